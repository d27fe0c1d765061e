//! Requests whose path died before their answer arrived, and the order in which they are resent.
//!
//! Such a request keeps its permit. It *awaits the fence* once its connection is closed on this
//! shard, so that it can no longer access local memory. It is *ready* once the control shard
//! reports that the dead path is fenced off (`control/fence.rs`), so that nothing sent on the path
//! can still start on the server. Only then is it resent, on the path that the policy selects and
//! under the same permit, so that a server still executing the first copy makes the second wait.
//! Ready requests are sent before new ones, in the order in which they were first sent.

use rtrs_core::ids::PathId;
use rtrs_core::time::Duration;

use super::requests::RequestRow;

/// Maximum number of times a request is sent. A request that takes down every path it is sent on
/// must eventually fail instead of keeping all paths down.
pub(super) const TRIES_MAX: u16 = 16;

/// Ready requests in order, and the fenced epochs.
#[derive(Debug, Default)]
pub(super) struct Retries {
    /// Turn and row, ordered by first send.
    queue: Vec<(u64, RequestRow)>,
    /// Epoch up to which each path is fenced off.
    fenced: Vec<u32>,
}

impl Retries {
    /// Grows the table to hold this number of paths.
    pub(super) fn add_path(&mut self, paths: usize) {
        self.fenced.resize(paths.max(self.fenced.len()), 0);
    }

    /// Whether this path is fenced off up to this epoch.
    pub(super) fn is_fenced(&self, path: PathId, epoch: u32) -> bool {
        self.fenced[path.index()] >= epoch
    }

    /// Records that requests sent on this path up to this epoch can no longer start on the server.
    pub(super) fn fenced(&mut self, path: PathId, epoch: u32) {
        let known = &mut self.fenced[path.index()];
        *known = epoch.max(*known);
    }

    /// Queues a ready request by `turn`, which reflects when it was first sent.
    pub(super) fn push(&mut self, turn: u64, row: RequestRow) {
        let place = self.queue.partition_point(|(other, _)| *other < turn);
        self.queue.insert(place, (turn, row));
    }

    /// Request at a position in the queue.
    pub(super) fn get(&self, place: usize) -> Option<RequestRow> {
        self.queue.get(place).map(|(_, row)| *row)
    }

    /// Removes the request at a position after it has been sent or has ended.
    pub(super) fn remove_at(&mut self, place: usize) {
        self.queue.remove(place);
    }

    /// Removes a ready request that has ended.
    pub(super) fn remove(&mut self, row: RequestRow) {
        self.queue.retain(|(_, other)| *other != row);
    }

    /// Panics if the queue differs from these requests, given by turn.
    pub(super) fn check(&self, mut ready: Vec<(u64, RequestRow)>) {
        ready.sort_unstable();
        assert_eq!(self.queue, ready, "ready requests are queued once, in order");
    }
}

/// IO that a shard has held the longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OldestIo {
    /// Time since the IO arrived.
    pub(crate) age: Duration,
    pub(crate) waits: Waits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    /// The server's answer on this path.
    Answer(PathId),
    /// The fence of this dead path.
    Fence(PathId),
    /// A connected path.
    Path,
    /// A free permit.
    Permit,
    /// Overlapping flushes to end.
    Flushes,
}
