//! Changes in flight while a file is shrunk.
//!
//! A write already begun by a queue can extend past the new end and lengthen the file again:
//! growing it later would then expose old bytes instead of zeroes. A shrink therefore first lowers
//! the size, which refuses new changes beyond the end, and then waits here until no queue has an
//! earlier one in flight. A queue sets its mark before it reads the size for a change, and clears
//! the mark when its last change has completed. A queue that always has changes in flight reports
//! at its first poll after those past the end have completed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Interval between checks of the queues.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A target's shrinks and queues.
#[derive(Debug, Default)]
pub(super) struct Shrinks {
    /// Number of shrinks so far.
    number: AtomicU64,
    /// New end set by the last shrink.
    end: AtomicU64,
    queues: Mutex<Vec<Weak<QueueMark>>>,
}

/// State of a queue's changes.
#[derive(Debug, Default)]
#[repr(align(64))]
struct QueueMark {
    /// Whether a change is in flight, or about to be.
    changing: AtomicBool,
    /// Number of the last shrink past whose end this queue has no more changes.
    seen: AtomicU64,
}

/// Changes of one queue.
#[derive(Debug)]
pub(super) struct Changes {
    mark: Arc<QueueMark>,
    count: u32,
}

impl Shrinks {
    /// Adds a new queue.
    pub(super) fn join(&self) -> Changes {
        let mark = Arc::new(QueueMark::default());
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&mark));
        Changes { mark, count: 0 }
    }

    /// Waits until no queue is changing anything past `end`, which is already the size. Returns
    /// false if that takes longer than `within`.
    pub(super) fn wait(&self, end: u64, within: Duration) -> bool {
        let until = Instant::now() + within;
        self.end.store(end, Ordering::SeqCst);
        let number = self.number.fetch_add(1, Ordering::SeqCst) + 1;
        let is_done = |queue: &Weak<QueueMark>| {
            queue.upgrade().is_none_or(|mark| {
                !mark.changing.load(Ordering::SeqCst) || mark.seen.load(Ordering::SeqCst) >= number
            })
        };
        while !self.queues.lock().iter().all(is_done) {
            if Instant::now() >= until {
                return false;
            }
            thread::sleep(LOOK_EVERY);
        }
        true
    }
}

impl Changes {
    /// Begins a change; must be called before the size is read for it.
    pub(super) fn begin(&mut self) {
        if self.count == 0 {
            self.mark.changing.store(true, Ordering::SeqCst);
        }
        self.count += 1;
    }

    /// Ends a change.
    pub(super) fn end(&mut self) {
        self.count -= 1;
        if self.count == 0 {
            self.mark.changing.store(false, Ordering::SeqCst);
        }
    }

    /// Reports that no change extends past the end set by the last shrink, if that is the case.
    /// `is_beyond` returns whether a change in flight extends past an end. Costs one load if there
    /// was no shrink.
    pub(super) fn report(&self, shrinks: &Shrinks, is_beyond: impl FnOnce(u64) -> bool) {
        let number = shrinks.number.load(Ordering::SeqCst);
        if number > self.mark.seen.load(Ordering::Relaxed)
            && !is_beyond(shrinks.end.load(Ordering::SeqCst))
        {
            self.mark.seen.store(number, Ordering::SeqCst);
        }
    }
}
