//! A server's refusals of connections.

use std::fmt;

use rtrs_core::fabric::ConnectFailure;
use rtrs_core::identity::EvictionSecret;
use rtrs_core::wire::{ConnRsp, Extensions, errno, errno_name};

const NOT_ADMITTED: &str = " (the server's access lists do not admit this client, or this path \
                            proves another name than the session's other paths; see the server's \
                            log)";

/// Rejection of a connect request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rejection {
    /// Server's errno, if the reject contains one.
    errno: Option<u16>,
    /// Whether the server requires clients to authenticate.
    authenticates: bool,
}

impl Rejection {
    pub(crate) fn decode(private_data: &[u8]) -> Self {
        let rsp = ConnRsp::decode(private_data).ok();
        Self {
            errno: rsp.map(|rsp| rsp.errno.unsigned_abs()),
            authenticates: rsp.is_some_and(|rsp| Extensions::decode(&rsp.ext).authenticate),
        }
    }

    /// Server's errno, if the reject contains one.
    pub(crate) fn errno(self) -> Option<u16> {
        self.errno
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("refused by the server")?;
        let Some(errno) = self.errno else { return Ok(()) };
        let hint = match errno {
            17 => {
                " (the server still holds a path with these addresses; a kernel server also \
                 refuses IPv4 alongside IPv6)"
            }
            104 => " (the server still holds the old path, or speaks another version)",
            6 => " (the address of another server; every --path must reach the same server)",
            13 if self.authenticates => {
                " (the server's access lists do not admit this client without a name; to \
                 authenticate, use tls:// or rdma:// with key-file and server-key, or tls-dir)"
            }
            13 => NOT_ADMITTED,
            errno::ENOMEM => {
                " (the session's chunks do not fit memory-max at the server, or it has no memory; \
                 see its log)"
            }
            errno::EUSERS => {
                " (the server has reached its maximum number of sessions: raise sessions-max \
                 there, or end sessions)"
            }
            errno::EDQUOT => {
                " (a limit of the server: half-open-max, or the number of paths or connections of \
                 a session; see its log)"
            }
            116 => " (the server's operator evicted this session: detach, and attach again)",
            95 => {
                " (it answers pings only, or its RDMA device lacks a required feature; see its log)"
            }
            _ => "",
        };
        write!(f, ": {}{hint}", errno_name(errno))
    }
}

/// Returns Some if a server claims that its operator evicted the session, with the claim's secret
/// if there is one. Any host that answers at the address can make this claim.
pub(crate) fn eviction(failure: &ConnectFailure) -> Option<Option<EvictionSecret>> {
    let ConnectFailure::Rejected(data) = failure else { return None };
    let rsp = ConnRsp::decode(data.as_bytes()).ok()?;
    let evicted = rsp.errno.unsigned_abs() == errno::ESTALE;
    evicted.then(|| Extensions::decode(&rsp.ext).identity.map(EvictionSecret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacity_refusals_name_the_setting() {
        for (errno, name, setting) in [
            (errno::EUSERS, "EUSERS", "raise sessions-max there"),
            (errno::EDQUOT, "EDQUOT", "half-open-max"),
            (errno::ENOMEM, "ENOMEM", "memory-max at the server"),
        ] {
            let text = Rejection::decode(&ConnRsp::reject(errno).encode()).to_string();
            assert!(text.starts_with(&format!("refused by the server: {name} (")), "{text}");
            assert!(text.contains(setting), "{text}");
        }
    }
}
