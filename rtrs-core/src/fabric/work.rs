//! Work requests and their completions, in the shape of verbs.

use crate::ids::{QpNum, Rkey};
use crate::mem::MemSlice;

/// Registered local memory of a work request.
#[derive(Clone, Debug)]
pub struct Sge {
    /// The memory; kept alive by the request until its completion.
    pub slice: MemSlice,
    /// Local key of the registration that covers it.
    pub lkey: u32,
}

/// Where in the peer's memory an operation goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMem {
    /// Address as the peer sent it; opaque to us.
    pub addr: u64,
    /// Key as the peer sent it.
    pub rkey: Rkey,
}

/// What a work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrOp {
    /// Send to the peer's next posted receive.
    Send {
        /// Immediate to deliver with it (SEND_WITH_IMM).
        imm: Option<u32>,
        /// Key at the peer to invalidate on delivery (SEND_WITH_INV). Not together with `imm`.
        invalidate: Option<Rkey>,
    },
    /// Place bytes in the peer's memory. Without an immediate the peer sees no event.
    RdmaWrite {
        /// Target; ignored when the length is zero.
        remote: RemoteMem,
        /// Immediate to deliver after the bytes; consumes a receive at the peer.
        imm: Option<u32>,
    },
    /// Fetch bytes from the peer's memory into the local buffer.
    RdmaRead {
        /// Source.
        remote: RemoteMem,
    },
}

impl WrOp {
    /// What its completion is called.
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
    /// Second piece, directly behind the first on the wire.
    pub second: Option<Sge>,
}

impl SgeList {
    /// No local memory: an empty send, a bare immediate.
    pub const EMPTY: Self = Self { first: None, second: None };

    /// One piece.
    pub fn one(sge: Sge) -> Self {
        Self { first: Some(sge), second: None }
    }

    /// Two pieces.
    pub fn two(first: Sge, second: Sge) -> Self {
        Self { first: Some(first), second: Some(second) }
    }

    /// Total bytes.
    pub fn len(&self) -> usize {
        self.iter().map(|sge| sge.slice.len()).sum()
    }

    /// True for a total of zero bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pieces in order.
    pub fn iter(&self) -> impl Iterator<Item = &Sge> {
        self.first.iter().chain(self.second.iter())
    }
}

/// One entry of a send queue.
#[derive(Clone, Debug)]
pub struct WorkRequest {
    /// Chosen by the poster, returned in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: WrOp,
    /// Local memory: source, or target of a read (one piece only).
    pub sges: SgeList,
    /// Wants a completion when it succeeds. Failures always complete.
    pub signaled: bool,
}

/// What kind of work a completion ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WcOp {
    /// A send left.
    Send,
    /// An RDMA write left. On iwarp: handed to TCP, not yet at the peer.
    RdmaWrite,
    /// A read's bytes are in the local buffer.
    RdmaRead,
    /// A message arrived in a posted receive.
    Recv,
    /// A peer's RDMA write with immediate consumed a posted receive; its bytes are in place.
    RecvRdmaWithImm,
    /// A window bind or invalidation finished.
    Bind,
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum WcStatus {
    /// Good.
    #[error("success")]
    Success,
    /// The queue pair went to error before this ran; nothing is known of its effect.
    #[error("flushed")]
    Flushed,
    /// A message did not fit the posted receive, or local memory was wrong.
    #[error("local error")]
    LocalError,
    /// The peer refused the access (key, bounds, rights).
    #[error("remote access error")]
    RemoteAccess,
    /// The peer refused the operation otherwise, or had no receive posted.
    #[error("remote operation error")]
    RemoteOperation,
    /// The peer did not answer within the retry bound.
    #[error("retries exceeded")]
    RetryExceeded,
}

/// The end of one posted work request or receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// The queue pair it was posted on.
    pub qp: QpNum,
    /// The poster's id.
    pub wr_id: u64,
    /// What it was. Unreliable when the status is not `Success`, as in verbs.
    pub op: WcOp,
    /// How it ended.
    pub status: WcStatus,
    /// Bytes received (`Recv`), or written by the peer where the provider knows it.
    pub byte_len: u32,
    /// The immediate, host order.
    pub imm: Option<u32>,
    /// The local key the peer's message invalidated.
    pub invalidated: Option<Rkey>,
}

impl WorkCompletion {
    /// A completion without bytes, immediate or invalidated key.
    pub const fn new(qp: QpNum, wr_id: u64, op: WcOp, status: WcStatus) -> Self {
        Self { qp, wr_id, op, status, byte_len: 0, imm: None, invalidated: None }
    }
}
