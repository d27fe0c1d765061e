//! The thread that examines all targets once a second.
//!
//! Examining a target can block on a remote file system. The thread therefore delegates the work to
//! a helper thread but waits for it only until the next round is due. If a target has not answered
//! by then, it keeps that helper and is skipped until it does, while another helper examines the
//! others. There are thus two threads, and one more for each target that does not answer. The
//! threads start with the first target and exit within a second of the last one's removal.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Interval between rounds.
const INTERVAL: Duration = Duration::from_secs(1);

/// A target that can be examined.
pub(super) trait Examine: Send + Sync + 'static {
    /// Examines the target, which may take a long time.
    fn examine_target(&self);
}

/// State of a target, shared by the threads.
#[derive(Debug, Default)]
struct Flags {
    /// Whether to examine the target before the next round.
    wanted: AtomicBool,
    /// Whether a helper is examining the target.
    taken: AtomicBool,
}

struct Entry<T> {
    target: Weak<T>,
    flags: Arc<Flags>,
}

impl<T> Clone for Entry<T> {
    fn clone(&self) -> Self {
        Self { target: Weak::clone(&self.target), flags: Arc::clone(&self.flags) }
    }
}

/// Targets waiting for a helper.
type Batch<T> = Arc<Mutex<VecDeque<Entry<T>>>>;

/// Examines targets periodically.
pub(super) struct Watcher<T: Examine>(Mutex<Watched<T>>);

struct Watched<T> {
    entries: Vec<Entry<T>>,
    thread: Option<Thread>,
}

/// Handle for requesting that a target be examined before the next round.
#[derive(Debug)]
pub(super) struct Watch {
    flags: Arc<Flags>,
    thread: Thread,
}

impl Watch {
    /// Requests that the target be examined soon.
    pub(super) fn look(&self) {
        if !self.flags.wanted.swap(true, Ordering::Relaxed) {
            self.thread.unpark();
        }
    }
}

/// A helper thread.
struct Helper<T> {
    orders: Sender<Batch<T>>,
    done: Receiver<()>,
}

impl<T: Examine> Watcher<T> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Watched { entries: Vec::new(), thread: None }))
    }

    /// Examines a target periodically as long as it exists.
    pub(super) fn add(&'static self, target: &Arc<T>) -> io::Result<Watch> {
        let mut watched = self.0.lock();
        let thread = match &watched.thread {
            Some(thread) => thread.clone(),
            None => {
                let started = thread::Builder::new().name("watch-files".into());
                let thread = started.spawn(move || self.run())?.thread().clone();
                watched.thread.insert(thread).clone()
            }
        };
        let entry = Entry { target: Arc::downgrade(target), flags: Arc::default() };
        let flags = Arc::clone(&entry.flags);
        watched.entries.push(entry);
        Ok(Watch { flags, thread })
    }

    fn run(&self) {
        let mut helper = None;
        let mut round = Instant::now() + INTERVAL;
        loop {
            thread::park_timeout(round.saturating_duration_since(Instant::now()));
            let all = Instant::now() >= round;
            if all {
                round = Instant::now() + INTERVAL;
            }
            let Some(batch) = self.due(all) else { return };
            while !batch.lock().is_empty() && Self::examine_batch(&mut helper, &batch, round) {}
            // Targets that were not examined are examined in the next round.
            batch.lock().drain(..).for_each(|entry| entry.flags.reset());
        }
    }

    /// Returns the targets to examine now: all, or the requested ones. Returns None if no target is
    /// left; the thread then exits.
    fn due(&self, all: bool) -> Option<Batch<T>> {
        let mut watched = self.0.lock();
        watched.entries.retain(|entry| entry.target.strong_count() > 0);
        if watched.entries.is_empty() {
            watched.thread = None;
            return None;
        }
        let due = |entry: &&Entry<T>| {
            let wanted = entry.flags.wanted.load(Ordering::Relaxed);
            (all || wanted) && !entry.flags.taken.swap(true, Ordering::Relaxed)
        };
        Some(Arc::new(Mutex::new(watched.entries.iter().filter(due).cloned().collect())))
    }

    /// Has a helper examine a batch. Returns false if no helper can be started.
    fn examine_batch(helper: &mut Option<Helper<T>>, batch: &Batch<T>, until: Instant) -> bool {
        let Some(Helper { orders, done }) = helper.take().or_else(Helper::start) else {
            return false;
        };
        let wait = until.saturating_duration_since(Instant::now()).max(INTERVAL / 10);
        if orders.send(Arc::clone(batch)).is_ok() && done.recv_timeout(wait).is_ok() {
            *helper = Some(Helper { orders, done });
        }
        // Otherwise the helper exits when the target that blocks it has answered.
        true
    }
}

impl Flags {
    fn reset(&self) {
        self.taken.store(false, Ordering::Relaxed);
    }
}

impl<T: Examine> Helper<T> {
    fn start() -> Option<Self> {
        let (orders, inbox) = channel::<Batch<T>>();
        let (reply, done) = channel();
        let serve = move || {
            for batch in inbox {
                look_at(&batch);
                if reply.send(()).is_err() {
                    return;
                }
            }
        };
        match thread::Builder::new().name("look-at-files".into()).spawn(serve) {
            Ok(_) => Some(Self { orders, done }),
            Err(error) => {
                tracing::warn!("cannot watch files for changes: cannot start a thread: {error}");
                None
            }
        }
    }
}

fn look_at<T: Examine>(batch: &Batch<T>) {
    loop {
        let next = batch.lock().pop_front();
        let Some(Entry { target, flags }) = next else { return };
        flags.wanted.store(false, Ordering::Relaxed);
        if let Some(target) = target.upgrade() {
            target.examine_target();
        }
        flags.reset();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[derive(Debug, Default)]
    struct Target {
        looks: AtomicU32,
        /// Examinations hang while this is locked.
        hangs: Mutex<()>,
    }

    impl Examine for Target {
        fn examine_target(&self) {
            self.looks.fetch_add(1, Ordering::SeqCst);
            drop(self.hangs.lock());
        }
    }

    fn watcher() -> &'static Watcher<Target> {
        Box::leak(Box::new(Watcher::new()))
    }

    /// Waits for at most a minute until a condition holds.
    fn until(what: &str, so: impl Fn() -> bool) {
        let start = Instant::now();
        while !so() {
            assert!(start.elapsed() < INTERVAL * 60, "{what}");
            thread::sleep(INTERVAL / 100);
        }
    }

    fn looks(target: &Target) -> u32 {
        target.looks.load(Ordering::SeqCst)
    }

    #[test]
    fn a_hanging_target_does_not_stop_checks_of_others() {
        let watcher = watcher();
        let targets: Vec<Arc<Target>> = (0..8).map(|_| Arc::default()).collect();
        let first = targets[2].hangs.lock();
        let second = targets[5].hangs.lock();
        let watches: Vec<_> = targets.iter().map(|target| watcher.add(target).unwrap()).collect();
        let others = || targets.iter().enumerate().filter(|(at, _)| *at != 2 && *at != 5);
        until("three rounds", || others().all(|(_, target)| looks(target) >= 3));
        assert_eq!([2, 5].map(|at: usize| looks(&targets[at])), [1, 1], "once, until it answers");
        drop(first);
        until("the first is back", || looks(&targets[2]) >= 3);
        assert_eq!(looks(&targets[5]), 1);
        drop(second);
        until("the second is back", || looks(&targets[5]) >= 3);
        drop(watches);
    }

    #[test]
    fn the_thread_ends_with_the_last_target_and_restarts() {
        let watcher = watcher();
        for _ in 0..2 {
            let target = Arc::new(Target::default());
            let watch = watcher.add(&target).unwrap();
            let also = Arc::new(Target::default());
            let _also = watcher.add(&also).unwrap();
            drop(also);
            until("a check", || looks(&target) > 0);
            let before = looks(&target);
            watch.look();
            until("a requested check", || looks(&target) > before);
            drop(target);
            until("the thread's end", || watcher.0.lock().thread.is_none());
        }
    }
}
