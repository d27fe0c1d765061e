//! A connection of this shard: its queue pair, its send queue, and the IDs of its work requests.

use std::collections::VecDeque;

use rtrs_core::fabric::{FabricError, QpLimits, SgeList, WorkRequest, WrOp};
use rtrs_core::ids::{ConnIndex, PermitId, ProviderIndex, QpNum};

use super::table::{ConnRow, PathRow};
use crate::engine::ctx::Fabrics;
use crate::engine::device_table::DeviceId;
use crate::path::io::{Answer, SendQueue};

/// Number of receives beyond the queue depth: for heartbeats and their answers on connection 0, and
/// for a repost in progress.
pub(super) const RECV_SLACK: u32 = 8;

/// Purpose of a work request. The work request's ID also contains the connection, so that a
/// completion's connection is found without a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkId {
    /// A receive without a buffer.
    Recv,
    /// The receive for INFO_REQ.
    Info,
    /// A send; its completion accounts for this number of queue entries.
    Send(u32),
    /// The revocation of the peer's key for a request's chunk.
    Revoke(PermitId),
    /// A fresh key for a request's chunk.
    Bind,
    /// The first bind of a chunk.
    FirstBind,
}

impl WorkId {
    pub(super) fn encode(self, conn: ConnRow) -> u64 {
        let (kind, payload) = match self {
            Self::Recv => (1, 0),
            Self::Info => (2, 0),
            Self::Send(covered) => (3, covered),
            Self::Revoke(permit) => (4, u32::from(permit.0)),
            Self::Bind => (5, 0),
            Self::FirstBind => (6, 0),
        };
        kind << 60 | u64::from(conn.0) << 32 | u64::from(payload)
    }

    #[allow(clippy::cast_possible_truncation, reason = "fields of fixed width")]
    pub(super) fn decode(wr_id: u64) -> Option<(Self, ConnRow)> {
        let payload = wr_id as u32;
        let kind = match wr_id >> 60 {
            1 => Self::Recv,
            2 => Self::Info,
            3 => Self::Send(payload),
            4 => Self::Revoke(PermitId(payload as u16)),
            5 => Self::Bind,
            6 => Self::FirstBind,
            _ => return None,
        };
        Some((kind, ConnRow((wr_id >> 32) as u32 & 0x0fff_ffff)))
    }
}

#[derive(Debug)]
pub(super) struct Conn {
    /// Row of this connection.
    pub(super) row: ConnRow,
    pub(super) path: PathRow,
    pub(super) cid: ConnIndex,
    pub(super) provider: ProviderIndex,
    pub(super) qp: QpNum,
    queue: SendQueue,
    /// Requests whose answers are waiting for space in the send queue; at most the queue depth.
    waiting: VecDeque<PermitId>,
    /// Devices whose CHANGED is waiting for space; at most as many as may be unanswered.
    announcements: VecDeque<DeviceId>,
}

impl Conn {
    pub(super) fn new(
        row: ConnRow,
        path: PathRow,
        cid: ConnIndex,
        provider: ProviderIndex,
        qp: QpNum,
        queue_depth: u16,
    ) -> Self {
        let waiting = VecDeque::with_capacity(usize::from(queue_depth));
        Self {
            row,
            path,
            cid,
            provider,
            qp,
            queue: SendQueue::new(queue_depth),
            waiting,
            announcements: VecDeque::new(),
        }
    }

    /// Limits of a queue pair. Its sends are answers and, for each permit, a revoke and a bind
    /// whose completions have not been seen. The first binds use the same space.
    pub(super) fn limits(queue_depth: u16) -> QpLimits {
        let depth = u32::from(queue_depth);
        QpLimits {
            send_max: SendQueue::limit_for(queue_depth) + 2 * depth + RECV_SLACK,
            recv_max: depth + RECV_SLACK + 1,
        }
    }

    /// Whether the send queue has space for one more message.
    pub(super) const fn has_room(&self) -> bool {
        self.queue.has_room(1)
    }

    /// Whether an answer can be posted now. Otherwise it must wait.
    pub(super) fn takes_answer(&self) -> bool {
        self.waiting.is_empty() && self.queue.has_room(SendQueue::ANSWER_MAX)
    }

    /// Queues the answer to this request until there is space.
    pub(super) fn wait(&mut self, permit: PermitId) {
        self.waiting.push_back(permit);
    }

    /// Frees the send queue entries that a completion accounts for.
    pub(super) const fn sent(&mut self, covered: u32) {
        self.queue.complete(covered);
    }

    /// Removes the next request whose answer is waiting, if there is space.
    pub(super) fn next_waiting(&mut self) -> Option<PermitId> {
        self.queue.has_room(SendQueue::ANSWER_MAX).then(|| self.waiting.pop_front())?
    }

    /// Queues CHANGED for this device.
    pub(super) fn announce(&mut self, device: DeviceId) {
        self.announcements.push_back(device);
    }

    /// Removes the next device whose CHANGED is waiting, if there is space. Answers have priority.
    pub(super) fn next_announcement(&mut self) -> Option<DeviceId> {
        self.takes_answer().then(|| self.announcements.pop_front())?
    }

    /// Drops queued messages, because the path is closed.
    pub(super) fn drop_waiting(&mut self) {
        self.announcements.clear();
        self.waiting.clear();
    }

    /// Posts a message that consists of one work request. The caller ensures that there is space.
    pub(super) fn send(
        &mut self,
        op: WrOp,
        sges: SgeList,
        fabrics: &mut Fabrics,
    ) -> Result<(), FabricError> {
        let covered = self.queue.take(1);
        let wr_id = WorkId::Send(covered.unwrap_or(0)).encode(self.row);
        let wr = WorkRequest { wr_id, op, sges, signaled: covered.is_some() };
        fabrics[self.provider.index()].post_send(self.qp, wr)
    }

    /// Posts an answer. The caller ensures that there is space.
    pub(super) fn answer(
        &mut self,
        answer: Answer,
        fabrics: &mut Fabrics,
    ) -> Result<(), FabricError> {
        let covered = self.queue.take(answer.requests());
        let wr_id = WorkId::Send(covered.unwrap_or(0)).encode(self.row);
        answer.post(&mut *fabrics[self.provider.index()], self.qp, wr_id, covered.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_ids_round_trip() {
        for work in [
            WorkId::Recv,
            WorkId::Info,
            WorkId::Send(u32::MAX),
            WorkId::Revoke(PermitId(u16::MAX)),
            WorkId::Bind,
            WorkId::FirstBind,
        ] {
            let conn = ConnRow(0x0abc_def0);
            assert_eq!(WorkId::decode(work.encode(conn)), Some((work, conn)));
        }
        assert_eq!(WorkId::decode(0), None);
        assert_eq!(WorkId::decode(u64::MAX), None);
    }
}
