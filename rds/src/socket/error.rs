//! Errors of sockets, with the errno values of the kernel's RDS sockets.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use rustix::io::Errno;

/// Operation that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Open(PathBuf),
    Bind(IpAddr, u16),
    Send { to: Option<SocketAddr>, len: usize },
    Receive,
    Set(&'static str),
    Info(u32),
}

/// Error of an operation on a socket or node.
#[derive(Debug)]
pub struct Error {
    action: Action,
    source: io::Error,
}

impl Error {
    pub(super) fn new(action: Action, source: io::Error) -> Self {
        Self { action, source }
    }

    /// Returns the errno; EIO for errors without one.
    pub fn errno(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(Errno::IO.raw_os_error())
    }

    /// Whether a retry may succeed: the send buffer is full, the port is congested, or there is
    /// nothing to receive.
    pub fn is_temporary(&self) -> bool {
        self.is_congested() || self.is(Errno::AGAIN) || self.is(Errno::TIMEDOUT)
    }

    /// Creates the error of a failed wait.
    pub(crate) fn receiving(source: io::Error) -> Self {
        Self::new(Action::Receive, source)
    }

    /// Whether the node has ended.
    pub(crate) fn is_gone(&self) -> bool {
        self.is(Errno::NETDOWN)
    }

    /// Whether the destination port is congested.
    pub fn is_congested(&self) -> bool {
        matches!(self.action, Action::Send { .. }) && self.is(Errno::NOBUFS)
    }

    fn is(&self, errno: Errno) -> bool {
        self.source.raw_os_error() == Some(errno.raw_os_error())
    }

    /// Returns the reason, and a hint.
    fn reason(&self) -> Option<&'static str> {
        let errno = self.source.raw_os_error().map(Errno::from_raw_os_error)?;
        Some(match (&self.action, errno) {
            (_, Errno::NETDOWN) => "the node has ended; start it again and bind a new socket",
            (Action::Open(_), Errno::NOENT | Errno::CONNREFUSED) => {
                "no node listens there; start one with `rds node`"
            }
            (Action::Open(_), Errno::PROTOTYPE) => {
                "this is not the socket of a node; use the socket that ends in .sock"
            }
            (Action::Open(_) | Action::Bind(..), Errno::ACCESS) => {
                "permission denied; its owner can allow others with `rds node --socket-mode 666`"
            }
            (Action::Bind(..), Errno::ADDRINUSE) => {
                "the port is in use; use another, or 0 for a free one"
            }
            (Action::Bind(..), Errno::ADDRNOTAVAIL) => "the node does not have this address",
            (Action::Bind(..), Errno::INVAL) => "no socket can have this address or port",
            (Action::Bind(..), Errno::MFILE) => {
                "the node has no free descriptor; raise the limit of its process (ulimit -n)"
            }
            (Action::Bind(..), Errno::NOBUFS) => "the node has too many sockets (sockets-max)",
            (Action::Send { .. }, Errno::AGAIN) => "the send buffer is full",
            (Action::Send { .. }, Errno::TIMEDOUT) => {
                "the send buffer was full until the time limit"
            }
            (Action::Send { .. }, Errno::NOBUFS) => "the destination port is congested",
            (Action::Send { .. }, Errno::MSGSIZE) => {
                "the message is longer than the send buffer or 1 MiB; set a larger buffer, or send \
                 less"
            }
            (Action::Send { .. }, Errno::NOMEM) => {
                "the node has reached its peer limit; raise peers-max"
            }
            (Action::Send { .. }, Errno::INVAL) => "this is not the address of one node",
            (Action::Send { .. }, Errno::OPNOTSUPP) => {
                "the node has an address of the other family; use a matching one"
            }
            (Action::Send { .. }, Errno::NOTCONN) => "no destination was given",
            (Action::Receive, Errno::AGAIN) => "no message has arrived",
            (Action::Receive, Errno::TIMEDOUT) => "no message arrived within the time limit",
            (Action::Info(_), Errno::NOPROTOOPT) => "there is no such option",
            _ => return None,
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.action {
            Action::Open(path) => write!(f, "cannot use the node at {}", path.display())?,
            Action::Bind(address, port) => write!(f, "cannot bind {address} port {port}")?,
            Action::Send { to: Some(to), len } => {
                write!(f, "cannot send {len} bytes to {} port {}", to.ip(), to.port())?;
            }
            Action::Send { to: None, len } => write!(f, "cannot send {len} bytes")?,
            Action::Receive => f.write_str("cannot receive")?,
            Action::Set(what) => write!(f, "cannot set {what}")?,
            Action::Info(number) => write!(f, "cannot get info option {number}")?,
        }
        match self.reason() {
            Some(reason) => write!(f, ": {reason}"),
            None => write!(f, ": {}", self.source),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // An error with a reason of its own includes it in its text.
        self.reason().is_none().then_some(&self.source as _)
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        error.source
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_give_action_cause_and_hint() {
        let to: SocketAddr = "10.0.0.5:4000".parse().unwrap();
        let send = |errno: Errno| Error::new(Action::Send { to: Some(to), len: 70 }, errno.into());
        let error = send(Errno::NOBUFS);
        let text = "cannot send 70 bytes to 10.0.0.5 port 4000: the destination port is congested";
        assert_eq!(error.to_string(), text);
        assert!(error.is_congested() && error.is_temporary());
        assert_eq!(error.errno(), Errno::NOBUFS.raw_os_error());
        assert!(!send(Errno::MSGSIZE).is_temporary() && send(Errno::AGAIN).is_temporary());
        let error = Error::new(Action::Open("/x".into()), Errno::NOENT.into());
        assert!(error.to_string().ends_with("start one with `rds node`"), "{error}");
        let error = Error::new(Action::Open("/x".into()), Errno::ACCESS.into());
        assert!(error.to_string().contains("--socket-mode 666"), "{error}");
        let error = Error::new(Action::Open("/x".into()), Errno::PROTOTYPE.into());
        assert!(error.to_string().contains("this is not the socket of a node"), "{error}");
        let error = Error::new(Action::Receive, Errno::BADF.into());
        assert!(error.to_string().starts_with("cannot receive: "), "{error}");
        assert!(std::error::Error::source(&error).is_some());
    }
}
