//! Errors from fabric calls, and reasons why connections end.

use std::io;

/// Error from a fabric call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The operating system reported an error.
    #[error("{what}: {source}")]
    System {
        /// Attempted operation, with the address or device.
        what: String,
        /// System error.
        source: io::Error,
    },
    /// The queue pair is unknown, closed or in error.
    #[error("the queue pair is unusable")]
    QpState,
    /// The send or receive queue is full: the caller exceeded its own limit.
    #[error("the queue is full")]
    QueueFull,
    /// A local buffer is not registered, or not for this access.
    #[error("local memory is not registered for this access")]
    LocalMemory,
    /// The provider does not support this operation.
    #[error("not supported by this transport: {0}")]
    Unsupported(&'static str),
    /// All keys or windows are in use.
    #[error("no memory key left")]
    NoKey,
}

impl FabricError {
    /// Creates a system error with its context.
    pub fn system(what: impl Into<String>, source: io::Error) -> Self {
        Self::System { what: what.into(), source }
    }
}

/// Reason why a connection ended or could not be established.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// This end closed the connection.
    #[error("closed locally")]
    Local,
    /// The peer closed the connection gracefully.
    #[error("closed by the peer")]
    Peer,
    /// The transport lost the connection (reset, unreachable, end of stream inside a frame).
    #[error("connection lost: {0}")]
    Lost(String),
    /// One end does not accept the other's certificate or key, or only one end uses TLS.
    #[error("TLS: {0}")]
    Tls(String),
    /// No answer arrived within the timeout.
    #[error("timed out")]
    TimedOut,
    /// The peer violated the protocol, and this end closed the connection.
    #[error("protocol error by the peer: {0}")]
    Protocol(String),
    /// The peer reported a protocol violation by this end and closed the connection.
    #[error("terminated by the peer: {0}")]
    PeerTerminated(String),
}
