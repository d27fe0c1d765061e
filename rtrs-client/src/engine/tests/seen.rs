//! What the server played by hand has seen, in order.

use std::net::IpAddr;

use rtrs_core::fabric::CloseReason;
use rtrs_core::ids::{ConnIndex, PathUuid, PermitId, Rkey};
use rtrs_core::time::Instant;
use rtrs_core::wire::{ChunkRequest, ConnReq, IoHeader, RwOp};

/// A request as it lay in its chunk.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) path: PathUuid,
    pub(super) recon_cnt: u16,
    pub(super) cid: ConnIndex,
    pub(super) permit: PermitId,
    pub(super) imm: u32,
    /// The chunk's key when the request came.
    pub(super) key: Rkey,
    pub(super) parsed: ChunkRequest,
    /// From the user header to the end of the RTRS message.
    pub(super) tail: Vec<u8>,
    pub(super) io: Option<(RwOp, IoHeader)>,
    /// The whole chunk, if asked for.
    pub(super) chunk: Vec<u8>,
}

/// What came, in order.
#[derive(Debug)]
pub(super) enum Seen {
    Connect { req: ConnReq, local: IpAddr, at: Instant },
    Info { name: Vec<u8> },
    Request(Box<Request>),
    Heartbeat { at: Instant, next_ms: u32 },
    HeartbeatAck { at: Instant },
    Closed { cid: ConnIndex, reason: CloseReason },
}
