//! Attempts to open failed exports, each on its own thread.
//!
//! A target may hang, for example a file on an NFS server that is down. The attempt to open it then
//! delays only further attempts for the same target, and no other export. A finished attempt keeps
//! its result, including the opened target, until a thread that holds the export's turn takes the
//! result. A command or reload therefore never competes with the retry thread for the lock of a
//! file: it joins the running attempt.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::open_error::OpenError;
use crate::export::Export;
use crate::settings::{ExportSpec, Target};

/// Result of an attempt.
pub(super) type Opened = Result<Arc<Export>, OpenError>;

/// An attempt to open an export with these settings.
#[derive(Debug)]
struct Attempt {
    number: u64,
    spec: ExportSpec,
    /// Result, once it is known.
    result: Option<Opened>,
}

#[derive(Debug, Default)]
struct State {
    /// Latest attempt for each export, by name.
    latest: BTreeMap<String, Attempt>,
    /// Targets of all threads, by attempt number.
    threads: BTreeMap<u64, Target>,
    count: u64,
    /// Whether the retry thread should check the failed exports again.
    woken: bool,
}

impl State {
    fn of(&self, spec: &ExportSpec) -> Option<&Attempt> {
        self.latest.get(spec.name()).filter(|attempt| attempt.spec == *spec)
    }

    /// Whether an earlier attempt for the same target is still running.
    fn is_blocked(&self, number: u64, target: &Target) -> bool {
        self.threads.range(..number).any(|(_, other)| other == target)
    }
}

/// Attempts to open exports, at most one per export.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Attempts {
    state: Mutex<State>,
    /// Notified when an attempt ends and to wake the retry thread.
    ended: Condvar,
}

impl Attempts {
    /// Starts an attempt, unless an attempt with the same settings exists. Returns whether the
    /// attempt is new. An attempt with different settings is abandoned.
    pub(super) fn begin(
        self: &Arc<Self>,
        spec: &ExportSpec,
        open: impl FnOnce(&ExportSpec) -> Opened + Send + 'static,
    ) -> Result<bool, String> {
        let mut state = self.state.lock();
        if state.of(spec).is_some() {
            return Ok(false);
        }
        state.count += 1;
        let (number, target) = (state.count, spec.target.clone());
        let attempt = Attempt { number, spec: spec.clone(), result: None };
        let (attempts, spec) = (Arc::clone(self), spec.clone());
        let named = thread::Builder::new().name("export-open".into());
        let started = named.spawn(move || attempts.run(number, &spec, open));
        started.map_err(|error| format!("cannot start a thread: {error}"))?;
        state.threads.insert(number, target);
        let abandoned = state.latest.insert(attempt.spec.name().to_owned(), attempt);
        drop(state);
        // Closing the target that the attempt opened may take a long time.
        drop(abandoned);
        Ok(true)
    }

    /// Runs an attempt, after earlier attempts for the same target.
    fn run(&self, number: u64, spec: &ExportSpec, open: impl FnOnce(&ExportSpec) -> Opened) {
        let mut state = self.state.lock();
        while state.is_blocked(number, &spec.target) {
            self.ended.wait(&mut state);
        }
        drop(state);
        let result = open(spec);
        let mut state = self.state.lock();
        let latest = state.latest.get_mut(spec.name());
        let abandoned = match latest.filter(|attempt| attempt.number == number) {
            Some(attempt) => attempt.result.replace(result),
            None => Some(result),
        };
        drop(state);
        // Closed before the next attempt for the target begins.
        drop(abandoned);
        self.state.lock().threads.remove(&number);
        self.ended.notify_all();
    }

    /// Waits until an attempt with these settings has ended, and takes its result. Returns None if
    /// the attempt is still running or there is none.
    pub(super) fn take(&self, spec: &ExportSpec, until: Instant) -> Option<Opened> {
        let mut state = self.state.lock();
        while state.of(spec)?.result.is_none() {
            if self.ended.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.of(spec)?.result.as_ref()?;
        state.latest.remove(spec.name())?.result
    }

    /// Abandons the attempt for an export. If it has opened the target, the target is closed.
    pub(super) fn abandon(&self, name: &str) {
        let abandoned = self.state.lock().latest.remove(name);
        drop(abandoned);
    }

    /// Number of attempts that are running.
    pub(super) fn running(&self) -> usize {
        let state = self.state.lock();
        state.latest.values().filter(|attempt| attempt.result.is_none()).count()
    }

    /// Whether an attempt with these settings is running.
    pub(super) fn is_running(&self, spec: &ExportSpec) -> bool {
        self.state.lock().of(spec).is_some_and(|attempt| attempt.result.is_none())
    }

    /// Settings of the attempts whose result is known.
    pub(super) fn ended(&self) -> Vec<ExportSpec> {
        let state = self.state.lock();
        let ended = state.latest.values().filter(|attempt| attempt.result.is_some());
        ended.map(|attempt| attempt.spec.clone()).collect()
    }

    /// Waits until the result of an attempt is known. Returns false if no result is known in time.
    pub(in crate::daemon) fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut state = self.state.lock();
        while state.latest.values().all(|attempt| attempt.result.is_none()) {
            if self.ended.wait_until(&mut state, until).timed_out() {
                return false;
            }
        }
        true
    }

    /// Wakes the retry thread.
    pub(super) fn wake(&self) {
        self.state.lock().woken = true;
        self.ended.notify_all();
    }

    /// Waits until the result of an attempt is known, or the thread is woken.
    pub(in crate::daemon) fn wait_or_wake(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut state = self.state.lock();
        while !state.woken && state.latest.values().all(|attempt| attempt.result.is_none()) {
            if self.ended.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.woken = false;
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::mpsc;

    use rtrs_core::block::{BlockDevice, BlockSource, Core, Geometry};

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn refused(why: &str) -> Opened {
        Err(why.into())
    }

    fn why(opened: Option<Opened>) -> Option<String> {
        opened.and_then(Result::err).map(|error| error.why)
    }

    #[test]
    fn a_hanging_target_delays_no_other_target() {
        let attempts = Arc::<Attempts>::default();
        let [hanging, other]: [ExportSpec; 2] =
            ["a=/hangs", "b=/other"].map(|text| text.parse().unwrap());
        let (release, held) = mpsc::channel::<()>();
        let begun = attempts.begin(&hanging, move |_| {
            held.recv().unwrap();
            refused("late")
        });
        assert_eq!(begun, Ok(true));
        assert_eq!(attempts.begin(&other, |_| refused("missing")), Ok(true));
        let until = Instant::now() + LONG;
        assert_eq!(why(attempts.take(&other, until)), Some("missing".into()));
        assert!(attempts.is_running(&hanging) && attempts.ended().is_empty());
        assert!(attempts.take(&hanging, Instant::now()).is_none(), "it is not waited for");
        // A second attempt joins the first.
        assert_eq!(attempts.begin(&hanging, |_| unreachable!()), Ok(false));
        release.send(()).unwrap();
        attempts.wait(LONG);
        assert_eq!(attempts.ended(), std::slice::from_ref(&hanging));
        assert_eq!(why(attempts.take(&hanging, until)), Some("late".into()));
        assert!(attempts.take(&hanging, until).is_none());
    }

    /// A target that checks, when it is closed, whether the attempts are locked.
    #[derive(Debug)]
    struct Closing(Arc<Attempts>, mpsc::Sender<bool>);

    impl Drop for Closing {
        fn drop(&mut self) {
            self.1.send(self.0.state.try_lock().is_some()).unwrap();
        }
    }

    impl BlockSource for Closing {
        fn geometry(&self) -> Geometry {
            Geometry::plain(4096)
        }

        fn open(&self, _core: &Core) -> io::Result<Box<dyn BlockDevice>> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    #[test]
    fn an_abandoned_target_is_closed_without_the_lock() {
        let attempts = Arc::<Attempts>::default();
        let [first, second]: [ExportSpec; 2] =
            ["a=/same", "a=/other"].map(|text| text.parse().unwrap());
        let (closed, was_free) = mpsc::channel();
        let source = Arc::new(Closing(Arc::clone(&attempts), closed));
        attempts.begin(&first, move |_| Ok(Arc::new(Export::new("a", source)))).unwrap();
        assert!(attempts.wait(LONG));
        attempts.begin(&second, |_| refused("second")).unwrap();
        assert_eq!(was_free.recv_timeout(LONG), Ok(true));
    }

    #[test]
    fn a_thread_that_is_woken_before_it_waits_does_not_wait() {
        let attempts = Attempts::default();
        attempts.wake();
        attempts.wait_or_wake(1000 * LONG);
        assert!(!attempts.state.lock().woken);
    }

    #[test]
    fn attempts_for_one_target_run_in_order() {
        let attempts = Arc::<Attempts>::default();
        let [first, second]: [ExportSpec; 2] =
            ["a=/same", "a=/same,ro"].map(|text| text.parse().unwrap());
        let (release, held) = mpsc::channel::<()>();
        let (order, seen) = mpsc::channel();
        let ended = order.clone();
        let begun = attempts.begin(&first, move |_| {
            held.recv().unwrap();
            ended.send("first").unwrap();
            refused("first")
        });
        assert_eq!(begun, Ok(true));
        let begun = attempts.begin(&second, move |_| {
            order.send("second").unwrap();
            refused("second")
        });
        assert_eq!(begun, Ok(true));
        assert!(attempts.take(&first, Instant::now()).is_none(), "it is abandoned");
        release.send(()).unwrap();
        assert_eq!(why(attempts.take(&second, Instant::now() + LONG)), Some("second".into()));
        assert_eq!(seen.iter().take(2).collect::<Vec<_>>(), ["first", "second"]);
        assert!(attempts.ended().is_empty(), "the abandoned result is dropped");
    }
}
