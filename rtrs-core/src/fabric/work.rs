//! Work requests and their completions, modeled on verbs.

use crate::ids::{QpNum, Rkey};
use crate::mem::MemSlice;

/// Registered local memory of a work request.
#[derive(Clone, Debug)]
pub struct Sge {
    /// Memory; kept alive by the request until its completion.
    pub slice: MemSlice,
    /// Local key of the registration that covers it.
    pub lkey: u32,
}

/// Location in the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMem {
    /// Address as sent by the peer; opaque to this side.
    pub addr: u64,
    /// Key as sent by the peer.
    pub rkey: Rkey,
}

/// Operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrOp {
    /// Send to the peer's next posted receive.
    Send {
        /// Immediate to deliver with the message (SEND_WITH_IMM).
        imm: Option<u32>,
        /// The peer's key to invalidate on delivery (SEND_WITH_INV). Cannot be combined with `imm`.
        invalidate: Option<Rkey>,
    },
    /// Place bytes in the peer's memory. Without an immediate, the peer sees no event.
    RdmaWrite {
        /// Target; ignored if the length is zero.
        remote: RemoteMem,
        /// Immediate to deliver after the bytes; consumes one of the peer's receives.
        imm: Option<u32>,
    },
    /// Fetch bytes from the peer's memory into the local buffer.
    RdmaRead {
        /// Source.
        remote: RemoteMem,
    },
}

impl WrOp {
    /// Returns the operation of the completion.
    pub const fn completes_as(&self) -> WcOp {
        match self {
            Self::Send { .. } => WcOp::Send,
            Self::RdmaWrite { .. } => WcOp::RdmaWrite,
            Self::RdmaRead { .. } => WcOp::RdmaRead,
        }
    }
}

/// Up to two pieces of local memory: payload, then header.
#[derive(Clone, Debug, Default)]
pub struct SgeList {
    /// First piece.
    pub first: Option<Sge>,
    /// Second piece, directly after the first on the wire.
    pub second: Option<Sge>,
}

impl SgeList {
    /// No local memory: an empty send, or an immediate without data.
    pub const EMPTY: Self = Self { first: None, second: None };

    /// Creates a list of one piece.
    pub fn one(sge: Sge) -> Self {
        Self { first: Some(sge), second: None }
    }

    /// Creates a list of two pieces.
    pub fn two(first: Sge, second: Sge) -> Self {
        Self { first: Some(first), second: Some(second) }
    }

    /// Returns the total number of bytes.
    pub fn len(&self) -> usize {
        self.iter().map(|sge| sge.slice.len()).sum()
    }

    /// Returns true if the total is zero bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the pieces in order.
    pub fn iter(&self) -> impl Iterator<Item = &Sge> {
        self.first.iter().chain(self.second.iter())
    }
}

/// Entry of a send queue.
#[derive(Clone, Debug)]
pub struct WorkRequest {
    /// ID chosen by the poster and returned in the completion.
    pub wr_id: u64,
    /// Operation.
    pub op: WrOp,
    /// Local memory: source, or target of a read (one piece only).
    pub sges: SgeList,
    /// Whether success produces a completion. Failures always do.
    pub signaled: bool,
}

/// Kind of work that completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WcOp {
    /// A message was sent.
    Send,
    /// An RDMA write was sent. On iWARP, it was handed to TCP and may not have reached the peer
    /// yet.
    RdmaWrite,
    /// An RDMA read has finished; its data is in the local buffer.
    RdmaRead,
    /// A message was received into a posted receive.
    Recv,
    /// A peer's RDMA write with immediate consumed a posted receive; its data is in place.
    RecvRdmaWithImm,
    /// A window bind or invalidation finished.
    Bind,
}

/// Outcome of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum WcStatus {
    /// The request succeeded.
    #[error("success")]
    Success,
    /// The queue pair entered the error state first; it is unknown whether the request took effect.
    #[error("flushed")]
    Flushed,
    /// A message did not fit in the posted receive, or local memory was invalid.
    #[error("local error")]
    LocalError,
    /// The peer refused the access (key, bounds, rights).
    #[error("remote access error")]
    RemoteAccess,
    /// The peer refused the operation for another reason, or had no receive posted.
    #[error("remote operation error")]
    RemoteOperation,
    /// The peer did not answer within the retry limit.
    #[error("retries exceeded")]
    RetryExceeded,
}

/// Completion of a posted work request or receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// Queue pair of the request.
    pub qp: QpNum,
    /// ID chosen by the poster.
    pub wr_id: u64,
    /// Operation. Unreliable if the status is not `Success`, as in verbs.
    pub op: WcOp,
    /// Outcome.
    pub status: WcStatus,
    /// Bytes received (`Recv`), or bytes written by the peer if the provider knows the number.
    pub byte_len: u32,
    /// Immediate, in host byte order.
    pub imm: Option<u32>,
    /// Local key that the peer's message invalidated.
    pub invalidated: Option<Rkey>,
}

impl WorkCompletion {
    /// Creates a completion with no bytes, immediate or invalidated key.
    pub const fn new(qp: QpNum, wr_id: u64, op: WcOp, status: WcStatus) -> Self {
        Self { qp, wr_id, op, status, byte_len: 0, imm: None, invalidated: None }
    }
}
