//! Threads for driver calls that may block.
//!
//! `ibv_destroy_qp` returns once the queue pair has nothing in flight. rdma_rxe waits there for
//! packets that a network device has not sent yet, up to 50 s if the device is stalled (rxe_pool.c,
//! `__rxe_cleanup`). A shard that waited there would delay all its other paths. So queue pairs are
//! destroyed here, and the shard is notified afterwards. The connection manager's identifiers are
//! also destroyed here (`rdma_destroy_id` waits for the kernel's own work on them). Pinning and
//! unpinning memory and creating hundreds of windows also take time.
//!
//! A process has two sets of these threads: one for slow calls, and one for calls that are expected
//! to be short (`teardown.rs`, `listener.rs`) and must not wait behind the others.
//!
//! One thread is started in advance, since there may be no memory for a thread when paths fail;
//! more are started when all are busy, and exit when idle. A call that never returns occupies its
//! thread, and only work that depends on that call waits for it.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::time::Duration;

/// Maximum number of threads; further jobs are queued.
const WORKERS_MAX: usize = 64;
/// Time that an additional thread waits for work before it exits.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// Stack size. Jobs call the driver and send a message; the library may also load a device's
/// driver.
const STACK: usize = 256 << 10;

/// A job, which may block and reports its result to its owner.
type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    workers: usize,
    idle: usize,
    closed: bool,
}

/// Thread pool for calls that may block. Its jobs are finished even after it is dropped.
pub(super) struct Reaper {
    name: &'static str,
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl Reaper {
    /// Starts the first thread; all threads have this name.
    ///
    /// # Errors
    /// Returns the system's error if the thread cannot be started.
    pub(super) fn start(name: &'static str) -> io::Result<Self> {
        let reaper = Self { name, shared: Arc::default() };
        reaper.spawn(&mut reaper.shared.0.lock())?;
        Ok(reaper)
    }

    fn spawn(&self, state: &mut State) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(self.name.into()).stack_size(STACK);
        let _ = thread.spawn(move || work(&shared))?;
        state.workers += 1;
        Ok(())
    }

    /// Runs a job, which may block, on one of the threads.
    pub(super) fn take(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.0.lock();
        state.jobs.push_back(Box::new(job));
        if state.jobs.len() > state.idle
            && state.workers < WORKERS_MAX
            && let Err(error) = self.spawn(&mut state)
        {
            // One of the existing threads will run the job.
            tracing::warn!(%error, threads = self.name, "cannot start a thread for driver calls");
        }
        drop(state);
        self.shared.1.notify_one();
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.shared.0.lock().closed = true;
        self.shared.1.notify_all();
    }
}

impl std::fmt::Debug for Reaper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.shared.0.lock();
        f.debug_struct("Reaper")
            .field("jobs", &state.jobs.len())
            .field("workers", &state.workers)
            .finish_non_exhaustive()
    }
}

fn work((state, more): &(Mutex<State>, Condvar)) {
    let mut at = state.lock();
    loop {
        if let Some(job) = at.jobs.pop_front() {
            drop(at);
            job();
            at = state.lock();
            continue;
        }
        if at.closed {
            break;
        }
        at.idle += 1;
        let late = if at.workers > 1 {
            more.wait_for(&mut at, IDLE_MAX).timed_out()
        } else {
            more.wait(&mut at);
            false
        };
        at.idle -= 1;
        if late && at.jobs.is_empty() && at.workers > 1 {
            break;
        }
    }
    at.workers -= 1;
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_blocked_job_does_not_delay_others() {
        let reaper = Reaper::start("reaper").unwrap();
        let (sender, receiver) = mpsc::channel();
        let gates: Vec<_> = (0..WORKERS_MAX - 1).map(|_| mpsc::channel::<()>()).collect();
        let (open, gates): (Vec<_>, Vec<_>) = gates.into_iter().unzip();
        for (n, gate) in gates.into_iter().enumerate() {
            let sender = sender.clone();
            reaper.take(move || {
                let _ = gate.recv_timeout(PATIENCE);
                sender.send(n).unwrap();
            });
        }
        for n in 1000..1100 {
            let sender = sender.clone();
            reaper.take(move || sender.send(n).unwrap());
        }
        for n in 1000..1100 {
            assert_eq!(receiver.recv_timeout(PATIENCE), Ok(n), "behind those that block");
        }
        drop(open);
        let mut rest: Vec<_> =
            (1..WORKERS_MAX).map(|_| receiver.recv_timeout(PATIENCE).unwrap()).collect();
        rest.sort_unstable();
        assert_eq!(rest, (0..WORKERS_MAX - 1).collect::<Vec<_>>());
    }

    #[test]
    fn queued_jobs_run_even_when_all_workers_are_busy_and_the_owner_drops() {
        let reaper = Reaper::start("reaper").unwrap();
        let (sender, receiver) = mpsc::channel();
        for n in 0..WORKERS_MAX * 3 {
            let sender = sender.clone();
            reaper.take(move || sender.send(n).unwrap());
        }
        assert!(reaper.shared.0.lock().workers <= WORKERS_MAX);
        let shared = Arc::downgrade(&reaper.shared);
        drop((reaper, sender));
        assert_eq!(receiver.iter().count(), WORKERS_MAX * 3);
        // The channel is closed, so no job is left and the threads exit.
        for _ in 0..6000 {
            if shared.strong_count() == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("threads stay behind");
    }
}
