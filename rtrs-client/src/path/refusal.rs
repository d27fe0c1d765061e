//! Descriptions of a server's refusals.

use rtrs_core::fabric::{CloseReason, ConnectFailure};
use rtrs_core::identity::EvictionSecret;
use rtrs_core::wire::{ConnRsp, Extensions, errno, errno_name};

const NOT_ADMITTED: &str = " (the server's access lists do not admit this client, or not to this \
                            session: all its paths must prove the same name; its log says why)";

/// Describes a reject.
pub(crate) fn describe_reject(private_data: &[u8]) -> String {
    match ConnRsp::decode(private_data) {
        Ok(rsp) => {
            let errno = rsp.errno.unsigned_abs();
            let hint = match errno {
                17 => {
                    " (the server still holds a path with these addresses; a kernel's refuses \
                     IPv4 beside IPv6 too)"
                }
                104 => " (the server still holds the old path, or speaks another version)",
                6 => " (the address of another server; every --path must reach the same one)",
                13 if Extensions::decode(&rsp.ext).authenticate => {
                    " (the server's access lists do not admit this client without a name; to \
                     authenticate, use tls:// or rdma:// with key-file and server-key, or tls-dir)"
                }
                13 => NOT_ADMITTED,
                12 => " (the server has no memory for this; its log says why)",
                116 => " (the server's operator evicted this session: detach, and attach again)",
                95 => " (it answers pings only, or its RDMA device lacks something; see its log)",
                _ => "",
            };
            format!("refused by the server: {}{hint}", errno_name(errno))
        }
        Err(_) => "refused by the server".to_owned(),
    }
}

/// Returns Some if a server claims that its operator evicted the session, with the secret of the
/// claim if there is one. Any host that answers at the address can make this claim.
pub(crate) fn eviction(failure: &ConnectFailure) -> Option<Option<EvictionSecret>> {
    let ConnectFailure::Rejected(data) = failure else { return None };
    let rsp = ConnRsp::decode(data.as_bytes()).ok()?;
    let evicted = rsp.errno.unsigned_abs() == errno::ESTALE;
    evicted.then(|| Extensions::decode(&rsp.ext).identity.map(EvictionSecret))
}

/// Error of a path whose server claims an eviction without proof.
pub(crate) const UNPROVEN_EVICTION: &str = concat!(
    "cannot connect: the server says that it evicted this session, and does not prove that it is ",
    "the one that opened it; detach, and attach again if it was evicted",
);

/// Describes why a connection could not be established.
pub(crate) fn describe_failure(failure: &ConnectFailure) -> String {
    match failure {
        ConnectFailure::Rejected(data) => describe_reject(data.as_bytes()),
        ConnectFailure::Failed(CloseReason::TimedOut) => {
            "no answer within the connect timeout".to_owned()
        }
        // No connection existed yet that could be lost.
        ConnectFailure::Failed(CloseReason::Lost(why)) => why.clone(),
        ConnectFailure::Failed(reason) => reason.to_string(),
    }
}

/// Describes why a connection ended in place of INFO_RSP, with the likely cause.
pub(crate) fn describe_info_refusal(reason: &CloseReason, session: &str) -> String {
    let (what, reason) = match reason {
        CloseReason::PeerTerminated(_) => ("refused by the server", String::new()),
        reason => ("the connection ended in the handshake", format!(" ({reason})")),
    };
    format!(
        "{what}: perhaps another session there has the name {session} (--session-name); the \
         server's log says why{reason}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handshake_that_ends_has_its_likely_cause_first() {
        let lost = CloseReason::Lost("Connection reset by peer".into());
        let text = describe_info_refusal(&lost, "host-vol0");
        let cause = "the connection ended in the handshake: perhaps another session there has the \
                     name host-vol0 (--session-name)";
        assert!(text.starts_with(cause) && text.contains("Connection reset by peer"), "{text}");
        let refused = describe_info_refusal(&CloseReason::PeerTerminated("x".into()), "host-vol0");
        assert!(refused.starts_with("refused by the server: perhaps"), "{refused}");
        assert!(refused.ends_with("log says why"), "{refused}");
    }
}
