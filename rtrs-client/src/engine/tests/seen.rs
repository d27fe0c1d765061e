//! Record of what the scripted server has received, in order.

use std::net::IpAddr;

use rtrs_core::fabric::CloseReason;
use rtrs_core::ids::{ConnIndex, PathUuid, PermitId, Rkey};
use rtrs_core::time::Instant;
use rtrs_core::wire::{ChunkRequest, ConnReq, IoHeader, RwOp};

/// Request as found in its chunk.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) path: PathUuid,
    pub(super) recon_cnt: u16,
    pub(super) cid: ConnIndex,
    pub(super) permit: PermitId,
    pub(super) imm: u32,
    /// Key of the chunk when the request arrived.
    pub(super) key: Rkey,
    pub(super) parsed: ChunkRequest,
    /// Bytes from the user header to the end of the RTRS message.
    pub(super) tail: Vec<u8>,
    pub(super) io: Option<(RwOp, IoHeader)>,
    /// The whole chunk, if requested.
    pub(super) chunk: Vec<u8>,
}

/// Received events.
#[derive(Debug)]
pub(super) enum Seen {
    Connect { req: ConnReq, local: IpAddr, at: Instant },
    Info { name: Vec<u8> },
    Request(Box<Request>),
    Heartbeat { at: Instant, next_ms: u32 },
    HeartbeatAck { at: Instant },
    Closed { cid: ConnIndex, reason: CloseReason },
}
