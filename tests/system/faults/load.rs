//! Clients that continuously write and read, check the data, and record how long each IO takes, to
//! measure the effects of faults.
//!
//! Each client has its own NBD connection, part of the export and IO size. A block holds the last
//! acknowledged data; after a write that ended with an error it may hold the old or the new data,
//! until the next write succeeds. Any other content makes the client panic; every wait here and
//! [`Load::end`] propagate that. A load dropped before [`Load::end`] stops silently.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rtrs_tests::{Client, Front, RawNbd, Reply, fill_pattern, wait_for};

/// Bytes per IO of each client.
const SIZES: [usize; 4] = [4096, 4096, 12 << 10, 64 << 10];
const BLOCKS: u64 = 16;
/// Alignment of the clients' parts of the export.
const PART: u64 = 1 << 20;
const PROGRESS_TIME_MAX: Duration = Duration::from_secs(60);
/// A client's pauses between IOs, and after an error, since errors may be returned immediately.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(20);

/// Orders to the clients: continue; read everything again and end; end immediately because the test
/// has failed.
const RUN: u8 = 0;
const END: u8 = 1;
const ABANDON: u8 = 2;

/// An IO that ended with an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failed {
    pub(crate) ended: Instant,
    pub(crate) errno: u32,
}

#[derive(Debug, Default)]
struct Meter {
    good: AtomicU64,
    errors: AtomicU64,
    first_error: Mutex<Option<Failed>>,
    /// Duration of the longest IO in nanoseconds.
    longest: AtomicU64,
}

#[derive(Debug)]
struct Worker {
    meter: Arc<Meter>,
    thread: JoinHandle<()>,
}

/// Load from several clients on `vol0`.
#[derive(Debug)]
pub(crate) struct Load {
    order: Arc<AtomicU8>,
    workers: Vec<Worker>,
}

impl Load {
    /// Connects and starts the clients; returns when each has done some IO.
    pub(crate) fn start(client: &Client) -> Self {
        let order = Arc::new(AtomicU8::new(RUN));
        let workers = (0_u64..).zip(SIZES).map(|(at, size)| {
            let (meter, order) = (Arc::new(Meter::default()), Arc::clone(&order));
            let (of_thread, front) = (Arc::clone(&meter), client.front().clone());
            let part = Part { base: at * PART, size, blocks: [Some(0); BLOCKS as usize] };
            let thread = std::thread::spawn(move || part.work(&front, &of_thread, &order));
            Worker { meter, thread }
        });
        let workers = workers.collect();
        let load = Self { workers, order };
        load.progress();
        load
    }

    fn sum(&self, of: impl Fn(&Meter) -> &AtomicU64) -> u64 {
        self.workers.iter().map(|worker| of(&worker.meter).load(Ordering::Relaxed)).sum()
    }

    /// Returns the number of successful IOs.
    pub(crate) fn good(&self) -> u64 {
        self.sum(|meter| &meter.good)
    }

    /// Returns the number of IOs that ended with an error.
    pub(crate) fn errors(&self) -> u64 {
        self.sum(|meter| &meter.errors)
    }

    /// Returns the first error of each client, if any.
    pub(crate) fn first_errors(&self) -> Vec<Option<Failed>> {
        self.workers.iter().map(|worker| *worker.meter.first_error.lock()).collect()
    }

    /// Waits until every client has done more IO.
    pub(crate) fn progress(&self) {
        let good = |worker: &Worker| worker.meter.good.load(Ordering::Relaxed);
        let before: Vec<u64> = self.workers.iter().map(good).collect();
        wait_for("progress of every client's IO", PROGRESS_TIME_MAX, || {
            let ended = self.workers.iter().any(|worker| worker.thread.is_finished());
            assert!(!ended, "a client has panicked: see its message");
            let mut each = self.workers.iter().zip(&before);
            each.all(|(worker, before)| good(worker) > before + 8).then_some(())
        });
    }

    /// Resets the longest IO duration.
    pub(crate) fn forget(&self) {
        for worker in &self.workers {
            worker.meter.longest.store(0, Ordering::Relaxed);
        }
    }

    /// Waits for an IO by every client, and returns the duration of the longest IO that has ended
    /// since [`Self::forget`].
    pub(crate) fn longest(&self) -> Duration {
        self.progress();
        let longest = self.workers.iter().map(|w| w.meter.longest.load(Ordering::Relaxed)).max();
        Duration::from_nanos(longest.expect("clients"))
    }

    /// Ends the clients; each reads its part again over a new connection.
    pub(crate) fn end(&mut self) {
        self.progress();
        self.order.store(END, Ordering::Relaxed);
        for worker in self.workers.drain(..) {
            assert!(worker.thread.join().is_ok(), "a client has panicked: see its message");
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // After an ordered end, all clients have already ended.
        self.order.store(ABANDON, Ordering::Relaxed);
    }
}

/// A client's part of the export.
#[derive(Debug)]
struct Part {
    base: u64,
    size: usize,
    /// Last known round of each block, 0 before the first.
    blocks: [Option<u64>; BLOCKS as usize],
}

impl Part {
    fn offset(&self, block: u64) -> u64 {
        self.base + block * self.size as u64
    }

    fn fill(&self, block: u64, round: u64, bytes: &mut [u8]) {
        if round == 0 {
            bytes.fill(0);
        } else {
            fill_pattern(bytes, self.offset(block), round);
        }
    }

    fn work(mut self, front: &Front, meter: &Meter, order: &AtomicU8) {
        let mut raw = RawNbd::go(front, "vol0");
        let (mut sent, mut got) = (vec![0; self.size], vec![0; self.size]);
        let mut round = 0;
        while order.load(Ordering::Relaxed) == RUN {
            round += 1;
            let block = round % BLOCKS;
            self.fill(block, round, &mut sent);
            let offset = self.offset(block);
            let written = meter.measure(|| match raw.write(0, offset, &sent) {
                Reply::Error(0) => Ok(()),
                other => Err(other),
            });
            let Some(good) = written else { break };
            self.blocks[block as usize] = good.then_some(round);
            // Sometimes the block just written, sometimes a block written long ago.
            let block = round * 7 / 4 % BLOCKS;
            if !self.look(block, &mut raw, meter, &mut sent, &mut got) {
                break;
            }
            std::thread::sleep(if good { PAUSE } else { PAUSE_AFTER_ERROR });
        }
        match order.load(Ordering::Relaxed) {
            RUN => panic!("the session closed its NBD connection"),
            END => {}
            _ => return,
        }
        let mut raw = RawNbd::go(front, "vol0");
        for block in 0..BLOCKS {
            let open = self.look(block, &mut raw, meter, &mut sent, &mut got);
            assert!(open, "the session closed its NBD connection");
        }
    }

    /// Reads a block and checks its data. Returns false if the session has closed.
    fn look(
        &self,
        block: u64,
        raw: &mut RawNbd,
        meter: &Meter,
        wanted: &mut [u8],
        got: &mut [u8],
    ) -> bool {
        let offset = self.offset(block);
        let Some(good) = meter.measure(|| raw.read(offset, got)) else { return false };
        if let Some(round) = self.blocks[block as usize].filter(|_| good) {
            self.fill(block, round, wanted);
            let wrong = wanted.iter().zip(&*got).position(|(wanted, got)| wanted != got);
            assert_eq!(wrong, None, "not the data of round {round} in the IO at {offset}");
        }
        true
    }
}

impl Meter {
    /// Runs an IO. Returns whether it succeeded; None if the session has closed.
    fn measure(&self, io: impl FnOnce() -> Result<(), Reply>) -> Option<bool> {
        let begin = Instant::now();
        let outcome = io();
        let ended = Instant::now();
        let nanos = u64::try_from((ended - begin).as_nanos()).unwrap_or(u64::MAX);
        self.longest.fetch_max(nanos, Ordering::Relaxed);
        match outcome {
            Ok(()) => {
                self.good.fetch_add(1, Ordering::Relaxed);
                Some(true)
            }
            Err(Reply::Error(errno)) => {
                self.errors.fetch_add(1, Ordering::Relaxed);
                let _ = self.first_error.lock().get_or_insert(Failed { ended, errno });
                Some(false)
            }
            Err(Reply::Closed) => None,
        }
    }
}
