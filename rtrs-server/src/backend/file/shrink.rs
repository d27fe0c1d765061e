//! Changes in flight while a file is made shorter.
//!
//! A write that a queue has begun can end beyond the new end, and would make the file longer again:
//! a later growth would show old bytes instead of zeroes. So a shrink first lowers the size, which
//! refuses new changes beyond the end, and then waits here until no queue has an earlier one in
//! flight. A queue sets its mark before it reads the size for a change, and clears the mark when
//! its last change has ended; a queue that is never without changes reports at its next poll after
//! those beyond the end have ended.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time between two looks at the queues.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The shrinks of a target, and its queues.
#[derive(Debug, Default)]
pub(super) struct Shrinks {
    /// How many there were.
    number: AtomicU64,
    /// The end of the last one.
    end: AtomicU64,
    queues: Mutex<Vec<Weak<QueueMark>>>,
}

/// What a queue says of its changes.
#[derive(Debug, Default)]
#[repr(align(64))]
struct QueueMark {
    /// A change is in flight, or about to be.
    changing: AtomicBool,
    /// The last shrink beyond whose end this queue changes nothing any more.
    seen: AtomicU64,
}

/// The changes of one queue.
#[derive(Debug)]
pub(super) struct Changes {
    mark: Arc<QueueMark>,
    count: u32,
}

impl Shrinks {
    /// Takes part with a new queue.
    pub(super) fn join(&self) -> Changes {
        let mark = Arc::new(QueueMark::default());
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&mark));
        Changes { mark, count: 0 }
    }

    /// Waits until no queue changes anything beyond `end`, which is the size already. Returns false
    /// if that takes longer than `within`.
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
    /// Begins a change, before the size is read for it.
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

    /// Reports that nothing is changed beyond the end of the last shrink, where that is so.
    /// `is_beyond` tells of an end whether a change in flight reaches beyond it. One load where
    /// there was no shrink.
    pub(super) fn report(&self, shrinks: &Shrinks, is_beyond: impl FnOnce(u64) -> bool) {
        let number = shrinks.number.load(Ordering::SeqCst);
        if number > self.mark.seen.load(Ordering::Relaxed)
            && !is_beyond(shrinks.end.load(Ordering::SeqCst))
        {
            self.mark.seen.store(number, Ordering::SeqCst);
        }
    }
}
