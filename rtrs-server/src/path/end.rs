//! Reasons why paths end.

use rtrs_core::fabric::CloseReason;
use rtrs_core::ids::ConnIndex;
use rtrs_core::wire::{NameError, WireError, errno};

use super::key::PathKey;

/// Reason why INFO_REQ was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InfoError {
    /// The message is not an INFO_REQ.
    #[error("{0}")]
    Wire(WireError),
    /// Connections are missing.
    #[error("INFO_REQ arrived with {0} connections missing")]
    Early(u16),
    /// The name is not a valid session name.
    #[error("{0}")]
    Name(NameError),
}

/// Protocol violation by a peer, which ends its path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerFault {
    /// Request before the handshake was over.
    #[error("request before the end of the handshake")]
    Early,
    /// Immediate with an invalid chunk or offset.
    #[error("immediate {0:#010x} has an invalid chunk or offset")]
    Immediate(u32),
    /// Unexpected message without an immediate.
    #[error("unexpected message")]
    Message,
    /// Permit that is already in flight on this path.
    #[error("permit {0} was reused before its answer")]
    PermitReused(u16),
    /// Malformed request without a recipient for an error answer.
    #[error("{0}")]
    Wire(WireError),
    /// INFO_REQ was refused.
    #[error("{0}")]
    Info(InfoError),
}

/// Reason why a path ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathEnd {
    /// The peer violated the protocol.
    #[error("protocol violation by the peer: {0}")]
    Peer(PeerFault),
    /// Another session already has the name.
    #[error("another session has the name {0:?} (session-name)")]
    NameTaken(String),
    /// A connection was closed.
    #[error("connection {cid} ended: {reason}")]
    Connection {
        /// Index of the connection.
        cid: ConnIndex,
        /// Reason why it was closed.
        reason: CloseReason,
    },
    /// The local transport refused an operation.
    #[error("transport error: {0}")]
    Fabric(String),
    /// An impossible state: a bug in this server.
    #[error("internal error: {0}")]
    Internal(&'static str),
    /// Memory or another resource needed for the path is unavailable.
    #[error("cannot serve the path: {0}")]
    Unserved(String),
    /// The handshake took too long.
    #[error("the handshake timed out")]
    HandshakeTimeout,
    /// The client did not authenticate in time.
    #[error("the client did not authenticate in time")]
    Unproved,
    /// The client has not authenticated, and others need its place.
    #[error("the client had not authenticated and was evicted to make room")]
    CrowdedUnproved,
    /// Another path has authenticated the session's client, with a different queue depth.
    #[error("another path authenticated the session with a different queue depth")]
    OtherClient,
    /// No client of the session authenticated in time.
    #[error("the session has no authenticated path left")]
    Orphaned,
    /// The session has opened no export, and others need its place.
    #[error(
        "the session had opened no export and was evicted to make room (half-open-max, \
         sessions-max)"
    )]
    Crowded,
    /// The session did not open an export in time.
    #[error("the session opened no export in time (open-timeout)")]
    Unopened,
    /// The peer is silent.
    #[error("the peer does not answer heartbeats")]
    Silent,
    /// The client reconnects this path, so its current connections are dead.
    #[error("the client reconnected the path")]
    Replaced,
    /// The client abandoned the path and reported this over another path.
    #[error("the client abandoned the path")]
    Fenced,
    /// The client resent a request over another path while this path still has the request, so the
    /// client abandoned this path.
    #[error("the client resent a request over path {0}")]
    Superseded(PathKey),
    /// The operator ended the path.
    #[error("ended by the operator")]
    Operator,
    /// The operator evicted the session.
    #[error("the session was evicted by the operator")]
    Evicted,
    /// The access lists changed and no longer allow what the client's session does.
    #[error("the access lists no longer allow the client")]
    NotAllowed,
    /// The server no longer accepts the client's certificate or key.
    #[error("the client's certificate or key is no longer accepted")]
    Unknown,
    /// Another gateway now serves an export of the path's session.
    #[error("an export of the session moved to another gateway")]
    Moved,
    /// The server is shutting down.
    #[error("the server is stopping")]
    Shutdown,
}

impl PathEnd {
    /// Errno with which INFO_REQ is refused. None for a client that violates the protocol: it
    /// receives no answer.
    pub(crate) const fn info_errno(&self) -> Option<u16> {
        match self {
            Self::NameTaken(_) => Some(errno::EEXIST),
            Self::NotAllowed => Some(errno::EACCES),
            Self::Unserved(_) => Some(errno::ENOMEM),
            Self::Peer(PeerFault::Info(InfoError::Name(_))) => Some(errno::EINVAL),
            _ => None,
        }
    }

    /// Whether connections should end abruptly rather than in an orderly way.
    pub const fn is_abrupt(&self) -> bool {
        !matches!(self, Self::Shutdown)
    }
}
