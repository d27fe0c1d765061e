//! Clients of a front end.

use std::fs;
use std::net::SocketAddr;

/// Client of a front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FrontEndClient {
    /// Process on this host.
    Process(u32),
    /// Monitor of a virtual machine on this host, with its process if that is visible here.
    Machine(Option<u32>),
    /// Address of a TCP client.
    Address(SocketAddr),
    /// TLS client, whose address is in the log.
    Tls,
    /// Client that has disconnected, or a process whose number is not visible here.
    Unknown,
}

impl FrontEndClient {
    /// Describes the client for a person, with the name of its process from /proc.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Process(pid) | Self::Machine(Some(pid)) => describe_process(*pid),
            Self::Address(address) => address.to_string(),
            Self::Tls => "a client with TLS".into(),
            Self::Unknown | Self::Machine(None) => "unknown".into(),
        }
    }
}

fn describe_process(pid: u32) -> String {
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("{} (pid {pid})", name.trim_end().escape_debug()),
        Err(_) => format!("pid {pid}"),
    }
}
