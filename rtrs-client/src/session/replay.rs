//! Requests whose path died before their answer came, and how they go on.
//!
//! Such a request keeps its permit. It is *stranded* once its connection is closed on this core,
//! so that nothing of it can touch local memory any more, and *cleared* once the home core says
//! that the dead path is fenced off (`fence.rs`): nothing it sent can begin at the server any
//! more. Only then is it sent again, on whatever path the policy picks, under the same permit, so
//! that a server where the first copy still runs makes the second wait for it. Cleared requests
//! go before new ones, in the order in which they were first sent.

use rtrs_core::block::IoOp;
use rtrs_core::fabric::{Fabric, FabricError};
use rtrs_core::ids::PathId;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};

use super::shard::{Row, ShardSession, candidates, request_of};
use super::{Failover, Granted, OpenDevice};

/// Times a request is sent at most. Whoever ends the path of every copy is served with an error
/// in the end, instead of keeping all paths from work.
const TRIES_MAX: u16 = 16;

/// How far a request is whose connection is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stranded {
    /// The path of this epoch may still have it delivered.
    Lost {
        /// The epoch it was sent in.
        epoch: u32,
    },
    /// It may be sent again, and stands in the queue for that.
    Cleared,
}

/// A core's requests that are to be sent again.
#[derive(Debug)]
pub(super) struct Replays {
    /// Rows that are cleared, the first one sent first.
    queue: Vec<usize>,
    /// By path, the epoch up to which it is fenced off.
    fenced: Vec<u32>,
    turn: u64,
}

impl Replays {
    pub(super) fn new(paths: usize) -> Self {
        Self { queue: Vec::new(), fenced: vec![0; paths], turn: 0 }
    }

    /// There may be one more path.
    pub(super) fn add_path(&mut self, paths: usize) {
        self.fenced.resize(paths.max(self.fenced.len()), 0);
    }

    /// The number of a request that is sent for the first time.
    pub(super) fn next_turn(&mut self) -> u64 {
        self.turn += 1;
        self.turn
    }

    /// True when this path is fenced off up to this epoch.
    pub(super) fn is_fenced(&self, path: PathId, epoch: u32) -> bool {
        self.fenced[path.index()] >= epoch
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }
}

impl ShardSession {
    /// Counts a request that is sent once more.
    pub(super) fn sent_again(&mut self, index: usize, path: PathId) {
        let now = self.now;
        if let Some(row) = self.rows[index].as_mut() {
            self.stats.request_moved(row.path.index());
            (row.path, row.sent, row.stranded) = (path, now, None);
            row.tries = row.tries.saturating_add(1);
        }
        self.paths[path.index()].inflight += 1;
        self.stats.request_issued(path.index());
    }

    /// No path for too long, or none ever again: what is not on a path ends with an error. What
    /// is ends with its connection.
    pub(super) fn give_up(&mut self) {
        self.failing = true;
        for index in 0..self.rows.len() {
            if self.rows[index].is_some_and(|row| row.stranded.is_some()) {
                self.finish_row(index, IoStatus::TimedOut);
            }
        }
        self.replays.clear();
        while let Some(&index) = self.waiting.front() {
            self.fail_parent(index, IoStatus::TimedOut);
        }
    }

    /// Ends IO with these tags that waits to be issued, and what of it is not issued yet where a
    /// part of it is. What was posted once, on whatever path, goes on: it may land at any time.
    pub(super) fn cancel(&mut self, fits: &dyn Fn(u64) -> bool) {
        let fits = |index: &u32| {
            self.parents[*index as usize].as_ref().is_some_and(|parent| fits(parent.io.tag))
        };
        let found: Vec<u32> = self.waiting.iter().copied().filter(fits).collect();
        for index in found {
            self.fail_parent(index, IoStatus::Aborted);
        }
    }

    /// The connection that a request was sent on is gone.
    pub(super) fn strand(&mut self, index: usize, epoch: u32) {
        let Some(row) = self.rows[index].as_mut() else { return };
        row.stranded = Some(Stranded::Lost { epoch });
        let path = row.path.index();
        self.paths[path].inflight -= 1;
        if self.replays.fenced[path] >= epoch || rtrs_core::mutated!(ResendBeforeFence) {
            self.clear_row(index);
        }
    }

    /// The server begins nothing more of this path up to this epoch.
    pub(super) fn on_fenced(&mut self, path: PathId, epoch: u32) {
        let known = &mut self.replays.fenced[path.index()];
        *known = epoch.max(*known);
        self.free_late_probes();
        for index in 0..self.rows.len() {
            let Some(row) = self.rows[index] else { continue };
            if row.path == path
                && matches!(row.stranded, Some(Stranded::Lost { epoch: e }) if e <= epoch)
            {
                self.clear_row(index);
            }
        }
    }

    fn clear_row(&mut self, index: usize) {
        let Some(row) = self.rows[index].as_mut() else { return };
        row.stranded = Some(Stranded::Cleared);
        if row.tries >= TRIES_MAX {
            tracing::error!("a request ended {TRIES_MAX} paths; it ends with an error");
            return self.finish_row(index, IoStatus::Aborted);
        }
        let turn = row.turn;
        let turn_of = |at: &usize| self.rows[*at].as_ref().map_or(0, |row: &Row| row.turn);
        let place = self.replays.queue.partition_point(|at| turn_of(at) < turn);
        self.replays.queue.insert(place, index);
    }

    /// Sends what is cleared. True when anything was sent or ended.
    pub(super) fn pump_replays(
        &mut self,
        granted: &Granted,
        device: &OpenDevice,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let age_max = self.config.no_path.io_age_max(self.config.io_timeout);
        let mut sent = 0;
        let mut any = false;
        while let Some(&index) = self.replays.queue.get(sent) {
            let Some(path) = self.chooser.choose(self.now, candidates(&self.paths)) else { break };
            let Some(row) = self.rows[index] else {
                sent += 1;
                continue;
            };
            let Some(parent) = self.parents[row.parent as usize].as_ref() else { break };
            if age_max.is_some_and(|max| self.now.since(parent.submitted) >= max) {
                self.finish_row(index, IoStatus::TimedOut);
                (sent, any) = (sent + 1, true);
                continue;
            }
            if parent.io.op == IoOp::WriteZeroes && !device.geometry.fast_zero {
                // Another server took the place of the one that could be trusted with it.
                self.finish_row(index, IoStatus::Unsupported);
                (sent, any) = (sent + 1, true);
                continue;
            }
            let request = request_of(&parent.io, (row.at, row.len), self.permit_of(index), device);
            let target = &mut self.paths[path.index()];
            let provider = target.provider();
            match target.post(request, granted, fabrics[provider].as_mut()) {
                Ok(()) => {
                    self.sent_again(index, path);
                    sent += 1;
                }
                Err(FabricError::QpState | FabricError::QueueFull) => {
                    self.abandon_path(path, fabrics);
                }
                Err(error) => {
                    tracing::error!("request could not be posted again: {error}");
                    self.finish_row(index, IoStatus::Io);
                    sent += 1;
                }
            }
            any = true;
        }
        self.replays.queue.drain(..sent);
        any
    }

    /// Ends what has waited too long. What is not cleared yet ends only where no fence will come:
    /// an error while the first copy may still begin would let it land after newer writes.
    pub(super) fn sweep_replays(&mut self, now: Instant, age_max: Duration) -> bool {
        let fences = self.granted.is_some_and(|granted| granted.fences);
        let unfenced = self.config.failover == Failover::Strict && !fences;
        let mut any = false;
        for index in 0..self.rows.len() {
            let Some(row) = self.rows[index] else { continue };
            let waits = match row.stranded {
                Some(Stranded::Cleared) => true,
                Some(Stranded::Lost { .. }) => unfenced || rtrs_core::mutated!(GivenUpBeforeFence),
                None => false,
            };
            let parent = self.parents[row.parent as usize].as_ref();
            if waits && parent.is_some_and(|parent| now.since(parent.submitted) >= age_max) {
                self.replays.queue.retain(|at| *at != index);
                self.finish_row(index, IoStatus::TimedOut);
                any = true;
            }
        }
        any
    }

    /// Where the oldest IO waits, and since when it is here.
    pub(crate) fn oldest(&self, now: Instant) -> Option<OldestIo> {
        let (at, parent) = self
            .parents
            .iter()
            .enumerate()
            .filter_map(|(at, parent)| Some((at, parent.as_ref()?)))
            .min_by_key(|(_, parent)| parent.submitted)?;
        let row = self.rows.iter().flatten().filter(|row| row.parent as usize == at);
        let waits = match row.min_by_key(|row| row.turn) {
            Some(Row { stranded: Some(Stranded::Lost { .. }), path, .. }) => Waits::Fence(*path),
            Some(Row { stranded: None, path, .. }) => Waits::Answer(*path),
            Some(Row { stranded: Some(Stranded::Cleared), .. }) => Waits::Path,
            None if self.paths.iter().any(|path| path.takes_io()) => Waits::Permit,
            None => Waits::Path,
        };
        Some(OldestIo { age: now.since(parent.submitted), waits })
    }

    /// Our own laws, held in tests and in the simulator.
    pub(super) fn check_replays(&self) {
        let cleared = |row: &Row| row.stranded == Some(Stranded::Cleared);
        let count = self.rows.iter().flatten().filter(|row| cleared(row)).count();
        assert_eq!(self.replays.queue.len(), count, "what is cleared stands in the queue once");
        let turns: Vec<u64> = self
            .replays
            .queue
            .iter()
            .map(|at| self.rows[*at].filter(|row| cleared(row)).expect("only cleared ones").turn)
            .collect();
        assert!(turns.is_sorted(), "in the order of their first sending: {turns:?}");
    }
}

/// The IO that a core has had for the longest time.
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
