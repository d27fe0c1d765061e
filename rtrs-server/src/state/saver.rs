//! The thread that writes the state directory's files and retries failed writes.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time between attempts to save a file.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// A request to save the latest content of a file.
pub(super) trait Save: Send + Sized + 'static {
    /// Whether both saves write the same file, so the later one suffices.
    fn has_file_of(&self, other: &Self) -> bool;

    /// Writes the file unless it is already saved. Returns the save if it must be retried.
    fn run(self) -> Option<Self>;
}

/// A job for the thread.
#[derive(Debug)]
enum Job<S> {
    Save(S),
    /// Retries all failed saves immediately, and reports whether everything is saved.
    Finish(Sender<bool>),
}

/// Sends saves to the thread, which exits when the last sender is dropped.
#[derive(Debug)]
pub(super) struct Saver<S> {
    jobs: Sender<Job<S>>,
    running: Arc<Running>,
}

/// Start of the save in progress; None if there is none, or if it has been reported.
#[derive(Debug, Default)]
struct Running(Mutex<Option<Instant>>);

impl Running {
    fn run<S: Save>(&self, save: S) -> Option<S> {
        *self.0.lock() = Some(Instant::now());
        let left = save.run();
        *self.0.lock() = None;
        left
    }
}

impl<S> Clone for Saver<S> {
    fn clone(&self) -> Self {
        Self { jobs: self.jobs.clone(), running: Arc::clone(&self.running) }
    }
}

impl<S: Save> Saver<S> {
    /// Starts the thread with the given name.
    pub(super) fn start(name: &str) -> io::Result<Self> {
        let (jobs, inbox) = mpsc::channel();
        let running = Arc::<Running>::default();
        let of_thread = Arc::clone(&running);
        thread::Builder::new().name(name.into()).spawn(move || run(&inbox, &of_thread))?;
        Ok(Self { jobs, running })
    }

    /// Saves a file, without waiting.
    pub(super) fn save(&self, save: S) {
        // The thread is still running, because this sender exists.
        drop(self.jobs.send(Job::Save(save)));
    }

    /// Whether a save has been in progress for at least `after`. Returns true only once per save.
    pub(super) fn take_slow(&self, after: Duration) -> bool {
        self.running.0.lock().take_if(|since| since.elapsed() >= after).is_some()
    }

    /// Waits up to `within` for everything to be saved. Returns whether it was.
    pub(super) fn finish(&self, within: Duration) -> bool {
        let (done, saved) = mpsc::channel();
        self.jobs.send(Job::Finish(done)).is_ok() && saved.recv_timeout(within) == Ok(true)
    }
}

fn run<S: Save>(inbox: &Receiver<Job<S>>, running: &Running) {
    let mut failed: Vec<S> = Vec::new();
    let mut retry = Instant::now();
    loop {
        let next = if failed.is_empty() {
            inbox.recv().map_err(RecvTimeoutError::from)
        } else {
            inbox.recv_timeout(retry.saturating_duration_since(Instant::now()))
        };
        let mut repeats = false;
        match next {
            Ok(Job::Save(save)) => {
                failed.retain(|other| !other.has_file_of(&save));
                let is_first = failed.is_empty();
                failed.extend(running.run(save));
                if is_first {
                    retry = Instant::now() + RETRY;
                }
                // Jobs may arrive without a pause between them.
                repeats = Instant::now() >= retry;
            }
            Ok(Job::Finish(done)) => {
                failed = failed.into_iter().filter_map(|save| running.run(save)).collect();
                // The requester may have stopped waiting.
                let _ = done.send(failed.is_empty());
            }
            Err(RecvTimeoutError::Timeout) => repeats = true,
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if repeats {
            failed = failed.into_iter().filter_map(|save| running.run(save)).collect();
            retry = Instant::now() + RETRY;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A save of file number `file`, which fails `fails` times.
    struct Failing {
        file: u32,
        fails: u32,
        runs: Sender<u32>,
    }

    impl Save for Failing {
        fn has_file_of(&self, other: &Self) -> bool {
            self.file == other.file
        }

        fn run(mut self) -> Option<Self> {
            self.runs.send(self.file).unwrap();
            self.fails = self.fails.checked_sub(1)?;
            Some(self)
        }
    }

    #[test]
    fn failed_saves_are_repeated_unless_a_later_one_has_their_file() {
        let saver = Saver::start("test").unwrap();
        let (runs, seen) = mpsc::channel();
        let save = |file, fails| saver.save(Failing { file, fails, runs: runs.clone() });
        save(1, u32::MAX);
        save(2, 1);
        save(1, 0);
        assert!(saver.finish(LONG), "the later save of file 1 has succeeded");
        let all: Vec<_> = seen.try_iter().collect();
        assert_eq!(all.iter().filter(|file| **file == 2).count(), 2, "repeated once: {all:?}");
        assert!(saver.finish(LONG) && seen.try_recv().is_err(), "file 1 is not repeated");
        save(3, 1);
        assert_eq!([(); 2].map(|()| seen.recv_timeout(LONG)), [Ok(3); 2], "without a request");
        save(4, u32::MAX);
        assert!(!saver.finish(LONG));
    }

    /// A save that fails once, or one immediately followed by another.
    enum Busy {
        FailsOnce(Sender<()>, bool),
        Follows(Saver<Self>, Arc<AtomicBool>),
    }

    impl Save for Busy {
        fn has_file_of(&self, other: &Self) -> bool {
            matches!(self, Self::Follows(..)) == matches!(other, Self::Follows(..))
        }

        fn run(self) -> Option<Self> {
            match self {
                Self::FailsOnce(runs, has_failed) => {
                    runs.send(()).unwrap();
                    (!has_failed).then_some(Self::FailsOnce(runs, true))
                }
                Self::Follows(saver, goes_on) => {
                    if goes_on.load(Ordering::SeqCst) {
                        saver.save(Self::Follows(saver.clone(), goes_on));
                    }
                    None
                }
            }
        }
    }

    #[test]
    fn a_failed_save_is_repeated_while_others_keep_arriving() {
        let saver = Saver::start("test").unwrap();
        let (runs, seen) = mpsc::channel();
        let goes_on = Arc::new(AtomicBool::new(true));
        saver.save(Busy::FailsOnce(runs, false));
        saver.save(Busy::Follows(saver.clone(), Arc::clone(&goes_on)));
        let repeated = [(); 2].map(|()| seen.recv_timeout(LONG));
        goes_on.store(false, Ordering::SeqCst);
        assert_eq!(repeated, [Ok(()); 2]);
        assert!(saver.finish(LONG));
    }

    /// A save that hangs until the sender is dropped.
    struct Hanging(Receiver<()>);

    impl Save for Hanging {
        fn has_file_of(&self, _other: &Self) -> bool {
            true
        }

        fn run(self) -> Option<Self> {
            let _ = self.0.recv();
            None
        }
    }

    #[test]
    fn a_save_that_hangs_is_reported_once() {
        let saver = Saver::start("test").unwrap();
        let (end, hanging) = mpsc::channel();
        saver.save(Hanging(hanging));
        while !saver.take_slow(Duration::ZERO) {
            thread::yield_now();
        }
        assert!(!saver.take_slow(Duration::ZERO));
        drop(end);
        assert!(saver.finish(LONG));
    }
}
