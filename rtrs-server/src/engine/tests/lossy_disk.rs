//! A disk with a volatile cache. Each IO takes effect, and later completes, when the test says so.
//!
//! A failed sync drops the contents of the cache, which is reported only to that sync, as Linux
//! does with write-back errors.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::{BlockDevice, BlockSource, Completion, Core, Geometry, Io, IoOp};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

/// Size in bytes of a place, the range that one change covers.
pub(super) const PLACE: u32 = 4096;
const PLACES: usize = 2;

/// State of the data of one place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Fate {
    #[default]
    Unchanged,
    Cached,
    Durable,
    Lost,
}

/// An IO that has not completed.
#[derive(Debug)]
struct Held {
    id: usize,
    queue: usize,
    tag: u64,
    op: IoOp,
    fua: bool,
    place: usize,
    outcome: Option<IoStatus>,
    released: bool,
}

/// State of a disk, shared by the queues of all shards.
#[derive(Debug, Default)]
pub(super) struct LossyState {
    pub(super) fates: [Fate; PLACES],
    /// Whether the change to each place has completed, so that a flush covers it.
    completed: [bool; PLACES],
    held: Vec<Held>,
    /// Number of IOs taken; also the identifier of the next one.
    pub(super) taken: usize,
    /// Whether IOs succeed and complete immediately.
    pub(super) at_once: bool,
    queues: usize,
}

impl LossyState {
    /// Forgets all changes.
    pub(super) fn reset(&mut self) {
        (self.fates, self.completed) = Default::default();
    }

    /// Identifier of the oldest IO that has not been released.
    pub(super) fn first_held(&self) -> Option<usize> {
        self.held.iter().find(|io| !io.released).map(|io| io.id)
    }

    fn find(&mut self, id: usize) -> &mut Held {
        self.held.iter_mut().find(|io| io.id == id).expect("an IO that is held")
    }

    /// Whether an IO makes data durable.
    pub(super) fn is_sync(&mut self, id: usize) -> bool {
        let io = self.find(id);
        io.op == IoOp::Flush || io.fua
    }

    /// Makes an IO take effect with this outcome. A refused change has no effect. Returns false if
    /// the IO has already taken effect.
    pub(super) fn run(&mut self, id: usize, outcome: IoStatus) -> bool {
        let io = self.find(id);
        if io.outcome.is_some() {
            return false;
        }
        io.outcome = Some(outcome);
        let (op, fua, place) = (io.op, io.fua, io.place);
        let refused = op.changes() && is_refusal(outcome);
        if op.changes() && !refused {
            (self.fates[place], self.completed[place]) = (Fate::Cached, false);
        }
        if outcome.is_ok() {
            let completed = self.completed;
            for (at, fate) in self.fates.iter_mut().enumerate() {
                let covered = op == IoOp::Flush && completed[at] || fua && at == place;
                if covered && *fate == Fate::Cached {
                    *fate = Fate::Durable;
                }
            }
        } else if !refused {
            let cached = self.fates.iter_mut().filter(|fate| **fate == Fate::Cached);
            cached.for_each(|fate| *fate = Fate::Lost);
        }
        true
    }

    /// Completes an IO that has taken effect.
    pub(super) fn release(&mut self, id: usize) {
        let io = self.find(id);
        io.released = true;
        let (changes, place) = (io.op.changes(), io.place);
        if changes {
            self.completed[place] = true;
        }
    }

    fn take(&mut self, queue: usize, io: &Io) {
        let id = self.taken;
        self.taken += 1;
        let place = usize::try_from(io.offset / u64::from(PLACE)).expect("a small disk");
        let (tag, op, fua) = (io.tag, io.op, io.flags.fua);
        let held = Held { id, queue, tag, op, fua, place, outcome: None, released: false };
        self.held.push(held);
        if self.at_once {
            self.run(id, IoStatus::Ok);
            self.release(id);
        }
    }
}

/// Whether a change with this outcome was refused before it reached the disk.
pub(super) const fn is_refusal(status: IoStatus) -> bool {
    use IoStatus::{Beyond, Invalid, ReadOnly, Unsupported};
    matches!(status, Beyond | Invalid | ReadOnly | Unsupported)
}

#[derive(Debug)]
pub(super) struct LossyDisk {
    pub(super) geometry: Geometry,
    pub(super) state: Arc<Mutex<LossyState>>,
}

#[derive(Debug)]
struct Queue {
    number: usize,
    geometry: Geometry,
    state: Arc<Mutex<LossyState>>,
    done: VecDeque<Completion>,
}

impl BlockSource for LossyDisk {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn open(&self, _core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        let state = &mut *self.state.lock();
        state.queues += 1;
        let (number, shared) = (state.queues, Arc::clone(&self.state));
        let (geometry, done) = (self.geometry.clone(), VecDeque::new());
        Ok(Box::new(Queue { number, geometry, state: shared, done }))
    }
}

impl BlockDevice for Queue {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        self.state.lock().take(self.number, &io);
        Ok(())
    }

    fn poll(&mut self, _now: Instant) -> bool {
        let held = &mut self.state.lock().held;
        let ended = held.extract_if(.., |io| io.queue == self.number && io.released);
        let before = self.done.len();
        self.done.extend(ended.map(|io| {
            let status = io.outcome.expect("only an IO that took effect completes");
            Completion::new(io.tag, status)
        }));
        self.done.len() > before
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    fn inflight(&self) -> usize {
        let held = &self.state.lock().held;
        held.iter().filter(|io| io.queue == self.number).count() + self.done.len()
    }
}
