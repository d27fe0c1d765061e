//! Clients of a front end.

use std::fs;
use std::net::SocketAddr;

/// Client of a front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FrontEndClient {
    /// Process on this host.
    Process(u32),
    /// Address of a client over TCP.
    Address(SocketAddr),
    /// Client with TLS, whose address is in the log.
    Tls,
    /// Client that has disconnected, or a process whose number is not visible here.
    Unknown,
}

impl FrontEndClient {
    /// Describes the client for a person, with the name of its process from /proc.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Process(pid) => match fs::read_to_string(format!("/proc/{pid}/comm")) {
                Ok(name) => format!("{} (pid {pid})", name.trim_end().escape_debug()),
                Err(_) => format!("pid {pid}"),
            },
            Self::Address(address) => address.to_string(),
            Self::Tls => "a client with TLS".into(),
            Self::Unknown => "unknown".into(),
        }
    }
}
