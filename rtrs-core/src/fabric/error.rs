//! Why the fabric could not do something, and why a connection ended.

use std::io;

/// A refused call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The operating system refused.
    #[error("{what}: {source}")]
    System {
        /// What was attempted, with the address or device.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// The queue pair is unknown, closed or in error.
    #[error("the queue pair is not usable")]
    QpState,
    /// The send or receive queue is full: the poster broke its own bound.
    #[error("the queue is full")]
    QueueFull,
    /// A local buffer is not registered, or not for this.
    #[error("local memory is not registered for this access")]
    LocalMemory,
    /// The provider cannot do this.
    #[error("not supported by this transport: {0}")]
    Unsupported(&'static str),
    /// All keys or windows are in use.
    #[error("no memory key left")]
    NoKey,
}

impl FabricError {
    /// A system error with its context.
    pub fn system(what: impl Into<String>, source: io::Error) -> Self {
        Self::System { what: what.into(), source }
    }
}

/// Why a connection ended or never came about.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// We closed it.
    #[error("closed by us")]
    Local,
    /// The peer closed it in order.
    #[error("closed by the peer")]
    Peer,
    /// The transport lost it (reset, unreachable, end of stream inside a frame).
    #[error("connection lost: {0}")]
    Lost(String),
    /// One end does not accept the other's certificate or key, or there is no TLS at one end.
    #[error("TLS: {0}")]
    Tls(String),
    /// No answer within the bound.
    #[error("timed out")]
    TimedOut,
    /// The peer broke the protocol; we ended it.
    #[error("protocol error of the peer: {0}")]
    Protocol(String),
    /// The peer says that we broke the protocol, and ended it.
    #[error("terminated by the peer: {0}")]
    PeerTerminated(String),
}
