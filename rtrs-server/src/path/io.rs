//! Sending answers: chains of work requests, and the send queue that limits them.
//!
//! The chains are those of docs/PROTOCOL.md, "responses" (kernel rtrs-srv.c, rdma_write_sg and
//! send_io_resp_imm). A kernel client depends on these rules: an answer uses the connection of its
//! request; with fresh keys every answer, errors included, is a SEND_WITH_IMM that carries
//! RKEY_RSP, without them a zero-length RDMA_WRITE_WITH_IMM; exactly when the request asked for an
//! invalidation, failed reads included, a SEND_WITH_INV precedes the answer and the immediate has
//! the flag.

use rtrs_core::fabric::{Fabric, FabricError, RemoteMem, Sge, SgeList, WorkRequest, WrOp};
use rtrs_core::ids::{PermitId, QpNum, Rkey};
use rtrs_core::wire::{Imm, RkeyRsp, TimedRkeyRsp};

use crate::stats::ServerTimes;

/// An answer to a request, ready to be posted.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Permit that the answer returns to the client.
    pub permit: PermitId,
    /// Positive errno, or 0 for success.
    pub errno: u16,
    /// Result of a successful read and its destination.
    pub data: Option<(Sge, RemoteMem)>,
    /// Key that the peer asked to have invalidated.
    pub invalidate: Option<Rkey>,
    /// Fresh key of the chunk and the buffer for its message, which has room for the times if the
    /// path's answers carry them.
    pub rkey: Option<(Rkey, Sge)>,
    /// Time that the request took on the server.
    pub took: ServerTimes,
}

impl Answer {
    /// Number of work requests that the answer needs.
    pub const fn requests(&self) -> u32 {
        1 + self.data.is_some() as u32 + self.invalidate.is_some() as u32
    }

    /// Posts the chain. `signaled` says whether its last work request is signaled.
    ///
    /// # Errors
    /// Returns the fabric's error. Part of the chain may have been posted, so the path must end.
    pub fn post(
        self,
        fabric: &mut dyn Fabric,
        qp: QpNum,
        wr_id: u64,
        signaled: bool,
    ) -> Result<(), FabricError> {
        let mut post =
            |op, sges, signaled| fabric.post_send(qp, WorkRequest { wr_id, op, sges, signaled });
        if let Some((sge, remote)) = self.data {
            post(WrOp::RdmaWrite { remote, imm: None }, SgeList::one(sge), false)?;
        }
        if self.invalidate.is_some() {
            let op = WrOp::Send { imm: None, invalidate: self.invalidate };
            post(op, SgeList::EMPTY, false)?;
        }
        let imm = Imm::Response {
            permit: self.permit,
            errno: self.errno,
            invalidated: self.invalidate.is_some(),
        }
        .encode();
        let (op, sges) = match self.rkey {
            Some((rkey, sge)) => {
                let permit = self.permit;
                if sge.slice.len() == TimedRkeyRsp::LEN {
                    let ServerTimes { queue_ns, backend_ns } = self.took;
                    let (queue_us, backend_us) = (micros(queue_ns), micros(backend_ns));
                    let timed = TimedRkeyRsp { permit, rkey, queue_us, backend_us };
                    sge.slice.copy_in(0, &timed.encode());
                } else {
                    sge.slice.copy_in(0, &RkeyRsp { permit, rkey }.encode());
                }
                (WrOp::Send { imm: Some(imm), invalidate: None }, SgeList::one(sge))
            }
            None => (bare_write(imm), SgeList::EMPTY),
        };
        post(op, sges, signaled)
    }
}

/// Converts nanoseconds to microseconds, saturating after about an hour.
fn micros(nanos: u64) -> u32 {
    u32::try_from(nanos / 1000).unwrap_or(u32::MAX)
}

/// A zero-length RDMA write with an immediate. Address and key are zero, as in the kernel.
pub fn bare_write(imm: u32) -> WrOp {
    WrOp::RdmaWrite { remote: RemoteMem { addr: 0, rkey: Rkey(0) }, imm: Some(imm) }
}

/// Room in a connection's send queue for answers and heartbeats.
///
/// Only about one work request in [`SendQueue::SIGNAL_EVERY`] asks for a completion, which then
/// accounts for all earlier ones.
#[derive(Clone, Copy, Debug)]
pub struct SendQueue {
    limit: u32,
    used: u32,
    unsignaled: u32,
}

impl SendQueue {
    /// Number of work requests after which a completion is requested.
    pub const SIGNAL_EVERY: u32 = 32;
    /// Maximum number of work requests per answer.
    pub const ANSWER_MAX: u32 = 3;

    /// Creates a queue for the answers of `queue_depth` requests.
    pub const fn new(queue_depth: u16) -> Self {
        Self { limit: Self::limit_for(queue_depth), used: 0, unsignaled: 0 }
    }

    /// Maximum number of entries in use by answers.
    pub const fn limit_for(queue_depth: u16) -> u32 {
        Self::ANSWER_MAX * queue_depth as u32 + 2 * (Self::SIGNAL_EVERY + Self::ANSWER_MAX)
    }

    /// Whether `count` more entries fit.
    pub const fn has_room(&self, count: u32) -> bool {
        self.used + count <= self.limit
    }

    /// Takes `count` entries that will be posted as one chain. If it returns Some, the last entry
    /// must ask for a completion, which accounts for the returned number of entries.
    pub fn take(&mut self, count: u32) -> Option<u32> {
        assert!(self.has_room(count), "posted beyond the send queue");
        self.used += count;
        self.unsignaled += count;
        if self.unsignaled < Self::SIGNAL_EVERY {
            return None;
        }
        Some(std::mem::take(&mut self.unsignaled))
    }

    /// Frees the `covered` entries that a completion accounts for.
    pub const fn complete(&mut self, covered: u32) {
        self.used = self.used.saturating_sub(covered);
    }

    /// Number of entries in use.
    pub const fn used(&self) -> u32 {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::SendQueue;

    #[test]
    fn a_full_send_queue_always_has_a_signaled_request() {
        for depth in [1, 2, 512] {
            let mut queue = SendQueue::new(depth);
            let mut promised = Vec::new();
            while queue.has_room(SendQueue::ANSWER_MAX) {
                promised.extend(queue.take(SendQueue::ANSWER_MAX));
            }
            assert!(!promised.is_empty(), "depth {depth}: full, and nothing will free it");
            for covered in promised {
                queue.complete(covered);
            }
            assert!(queue.has_room(SendQueue::ANSWER_MAX));
            assert!(queue.used() < SendQueue::SIGNAL_EVERY + SendQueue::ANSWER_MAX);
        }
    }
}
