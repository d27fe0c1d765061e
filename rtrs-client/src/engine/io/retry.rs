//! Requests whose path died before their answer came, and when they are sent again.
//!
//! Such a request keeps its permit. It *awaits the fence* once its connection is closed on this
//! shard, so that nothing of it can touch local memory any more, and is *ready* once the control
//! shard says that the dead path is fenced off (`control/fence.rs`): nothing it sent can begin at
//! the server any more. Only then is it sent again, on whatever path the policy picks, under the
//! same permit, so that a server where the first copy still runs makes the second wait for it.
//! Ready requests go before new ones, in the order in which they were first sent.

use rtrs_core::ids::PathId;
use rtrs_core::time::Duration;

use super::requests::RequestRow;

/// Times a request is sent at most. Whoever ends the path of every copy is served with an error
/// in the end, instead of keeping all paths from work.
pub(super) const TRIES_MAX: u16 = 16;

/// The order of requests that are ready, and what is fenced off.
#[derive(Debug)]
pub(super) struct Retries {
    /// Turn and row, the request that was sent first in front.
    queue: Vec<(u64, RequestRow)>,
    /// By path, the epoch up to which it is fenced off.
    fenced: Vec<u32>,
}

impl Retries {
    pub(super) fn new(paths: usize) -> Self {
        Self { queue: Vec::new(), fenced: vec![0; paths] }
    }

    /// There may be one more path.
    pub(super) fn add_path(&mut self, paths: usize) {
        self.fenced.resize(paths.max(self.fenced.len()), 0);
    }

    /// True when this path is fenced off up to this epoch.
    pub(super) fn is_fenced(&self, path: PathId, epoch: u32) -> bool {
        self.fenced[path.index()] >= epoch
    }

    /// The server begins nothing more of this path up to this epoch.
    pub(super) fn fenced(&mut self, path: PathId, epoch: u32) {
        let known = &mut self.fenced[path.index()];
        *known = epoch.max(*known);
    }

    /// A request is ready, which was first sent in this turn.
    pub(super) fn push(&mut self, turn: u64, row: RequestRow) {
        let place = self.queue.partition_point(|(other, _)| *other < turn);
        self.queue.insert(place, (turn, row));
    }

    /// The request at a place of the queue.
    pub(super) fn get(&self, place: usize) -> Option<RequestRow> {
        self.queue.get(place).map(|(_, row)| *row)
    }

    /// The request at a place was sent or has ended.
    pub(super) fn remove_at(&mut self, place: usize) {
        self.queue.remove(place);
    }

    /// A request has ended while it was ready.
    pub(super) fn remove(&mut self, row: RequestRow) {
        self.queue.retain(|(_, other)| *other != row);
    }

    /// Panics when others than these, by turn, stand in the queue.
    pub(super) fn check(&self, mut ready: Vec<(u64, RequestRow)>) {
        ready.sort_unstable();
        assert_eq!(self.queue, ready, "what is ready stands in the queue once, in order");
    }
}

/// The IO that a shard has had for the longest time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OldestIo {
    /// Since its arrival.
    pub(crate) age: Duration,
    pub(crate) waits: Waits,
}

/// What an IO waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    /// The server's answer on this path.
    Answer(PathId),
    /// That this dead path is fenced off.
    Fence(PathId),
    /// A connected path.
    Path,
    /// A free permit.
    Permit,
}
