//! How answers go out: the chains of work requests, and the send queue they fit in.
//!
//! The chains are those of docs/PROTOCOL.md, "responses" (kernel rtrs-srv.c, rdma_write_sg and
//! send_io_resp_imm). Rules a kernel client depends on: an answer goes over the connection of its
//! request; with fresh keys every answer, errors too, is a SEND_WITH_IMM that carries RKEY_RSP,
//! without them a zero-length RDMA_WRITE_WITH_IMM; a SEND_WITH_INV goes before, and the immediate
//! says so, exactly when the request asked for it, failed reads included.

use rtrs_core::fabric::{Fabric, FabricError, RemoteMem, Sge, SgeList, WorkRequest, WrOp};
use rtrs_core::ids::{PermitId, QpNum, Rkey};
use rtrs_core::wire::{Imm, RkeyRsp, TimedRkeyRsp};

use crate::stats::ServerTimes;

/// An answer to a request, ready to be posted.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The permit that goes home.
    pub permit: PermitId,
    /// 0 or a positive errno.
    pub errno: u16,
    /// The result of a successful read and where it goes.
    pub data: Option<(Sge, RemoteMem)>,
    /// The key the peer asked to have invalidated.
    pub invalidate: Option<Rkey>,
    /// The chunk's fresh key and the buffer its message goes into, which has room for the times
    /// where the path's answers carry them.
    pub rkey: Option<(Rkey, Sge)>,
    /// How long the request took here.
    pub took: ServerTimes,
}

impl Answer {
    /// Work requests it takes.
    pub const fn requests(&self) -> u32 {
        1 + self.data.is_some() as u32 + self.invalidate.is_some() as u32
    }

    /// Posts the chain; the last one is signaled when `signaled`.
    ///
    /// # Errors
    /// The fabric's; a part of the chain may be posted, so the path has to end.
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

/// Microseconds of so many nanoseconds; the largest number for more than an hour.
fn micros(nanos: u64) -> u32 {
    u32::try_from(nanos / 1000).unwrap_or(u32::MAX)
}

/// A zero-length RDMA write with an immediate: address and key are zero, as the kernel's are.
pub fn bare_write(imm: u32) -> WrOp {
    WrOp::RdmaWrite { remote: RemoteMem { addr: 0, rkey: Rkey(0) }, imm: Some(imm) }
}

/// Room in a connection's send queue for answers and heartbeats.
///
/// Only one work request in [`SendQueue::SIGNAL_EVERY`] or so asks for a completion, which then
/// accounts for all before it.
#[derive(Clone, Copy, Debug)]
pub struct SendQueue {
    limit: u32,
    used: u32,
    unsignaled: u32,
}

impl SendQueue {
    /// Work requests after which a completion is asked for.
    pub const SIGNAL_EVERY: u32 = 32;
    /// Work requests of the longest answer.
    pub const ANSWER_MAX: u32 = 3;

    /// A queue for the answers of `queue_depth` requests.
    pub const fn new(queue_depth: u16) -> Self {
        Self { limit: Self::limit_for(queue_depth), used: 0, unsignaled: 0 }
    }

    /// Entries that answers may take at once.
    pub const fn limit_for(queue_depth: u16) -> u32 {
        Self::ANSWER_MAX * queue_depth as u32 + 2 * (Self::SIGNAL_EVERY + Self::ANSWER_MAX)
    }

    /// True when `count` more fit.
    pub const fn has_room(&self, count: u32) -> bool {
        self.used + count <= self.limit
    }

    /// Takes `count` entries that will be posted as one chain. Some: ask for a completion with
    /// the last one; it accounts for that many.
    pub fn take(&mut self, count: u32) -> Option<u32> {
        assert!(self.has_room(count), "posted beyond the send queue");
        self.used += count;
        self.unsignaled += count;
        if self.unsignaled < Self::SIGNAL_EVERY {
            return None;
        }
        Some(std::mem::take(&mut self.unsignaled))
    }

    /// A completion came that accounts for `covered`.
    pub const fn complete(&mut self, covered: u32) {
        self.used = self.used.saturating_sub(covered);
    }

    /// Entries taken.
    pub const fn used(&self) -> u32 {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::SendQueue;

    #[test]
    fn the_send_queue_never_runs_dry_without_a_completion_on_its_way() {
        for depth in [1, 2, 512] {
            let mut queue = SendQueue::new(depth);
            let mut promised = Vec::new();
            while queue.has_room(SendQueue::ANSWER_MAX) {
                promised.extend(queue.take(SendQueue::ANSWER_MAX));
            }
            assert!(!promised.is_empty(), "depth {depth}: full and nothing will free it");
            for covered in promised {
                queue.complete(covered);
            }
            assert!(queue.has_room(SendQueue::ANSWER_MAX));
            assert!(queue.used() < SendQueue::SIGNAL_EVERY + SendQueue::ANSWER_MAX);
        }
    }
}
