//! A device that can be opened only once, for all shards. It runs on its own thread, with its own
//! ring; the shards send their IOs to that thread.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use crossbeam_queue::ArrayQueue;
use rtrs_core::block::{BlockDevice, Completion, Core, Geometry, Io, SharedSize, WakeHandle};
use rtrs_core::ids::CoreIndex;
use rtrs_core::rt::{Inbox, Mailbox, PollPolicy, Ring, Sender, Shard, mailbox, run};
use rtrs_core::time::{Duration, Instant};

use super::immediate::Done;
use super::target::INFLIGHT_MAX;

/// Polling policy of the thread.
const POLL: PollPolicy = PollPolicy { budget_max: Duration::from_micros(200) };
/// Number of entries in the ring's submission queue.
const RING_ENTRIES: u32 = 256;

/// Message to the thread.
#[derive(Debug)]
enum Job {
    Run(Io, Arc<Ended>),
    /// Poll the device, which has completed an IO or has work to do.
    Look,
    Stop,
}

/// Completed IOs of a shard.
#[derive(Debug)]
struct Ended {
    queue: ArrayQueue<Completion>,
    /// Whether the shard was woken and has not polled since.
    woken: AtomicBool,
    wake: WakeHandle,
}

/// Handle to the device.
#[derive(Debug)]
pub(super) struct Single {
    geometry: Geometry,
    size: Arc<SharedSize>,
    jobs: Sender<Job>,
}

impl Single {
    /// Opens the device on a thread.
    ///
    /// # Errors
    /// Errors from the device or the system.
    pub(super) fn start(
        geometry: Geometry,
        size: Arc<SharedSize>,
        open: impl FnOnce(&Core) -> io::Result<Box<dyn BlockDevice>> + Send + 'static,
    ) -> io::Result<Self> {
        let (jobs, inbox) = mailbox()?;
        let (opened, wait) = mpsc::channel();
        let own = jobs.clone();
        thread::Builder::new().name("backend".into()).spawn(move || {
            match Runner::new(own, inbox, open) {
                Ok((ring, mut runner)) => {
                    let _ = opened.send(Ok(()));
                    if let Err(error) = run(&ring, POLL, &mut runner) {
                        tracing::error!("a backend has stopped: {error}");
                    }
                }
                Err(error) => drop(opened.send(Err(error))),
            }
        })?;
        let ended = || Err(io::Error::other("its thread has stopped"));
        wait.recv().unwrap_or_else(|_| ended())?;
        Ok(Self { geometry, size, jobs })
    }

    /// Opens a shard's queue.
    pub(super) fn open(&self, core: &Core) -> Box<dyn BlockDevice> {
        let ended = Arc::new(Ended {
            queue: ArrayQueue::new(INFLIGHT_MAX),
            woken: AtomicBool::new(false),
            wake: core.wake.clone(),
        });
        let size = Arc::clone(&self.size);
        let (jobs, done) = (self.jobs.clone(), Done::new());
        let geometry = Geometry { size: size.get(), ..self.geometry.clone() };
        Box::new(SingleQueue { geometry, size, jobs, ended, accepted: 0, done })
    }
}

impl Drop for Single {
    fn drop(&mut self) {
        self.jobs.send(Job::Stop);
    }
}

/// The device on its thread.
struct Runner {
    device: Box<dyn BlockDevice>,
    inbox: Inbox<Job>,
    /// The shard's tag and the destination of each IO, by the tag given to the device.
    rows: Vec<Option<(u64, Arc<Ended>)>>,
    free: Vec<usize>,
    waiting: VecDeque<(Io, Arc<Ended>)>,
    stopped: bool,
}

impl Runner {
    fn new(
        own: Sender<Job>,
        inbox: Mailbox<Job>,
        open: impl FnOnce(&Core) -> io::Result<Box<dyn BlockDevice>>,
    ) -> io::Result<(Rc<Ring>, Self)> {
        let ring = Ring::new(RING_ENTRIES)?;
        let inbox = inbox.arm(&ring)?;
        let wake = WakeHandle::new(move || own.send(Job::Look));
        let core = Core { index: CoreIndex(0), ring: Some(Rc::clone(&ring)), wake };
        let runner = Self {
            device: open(&core)?,
            inbox,
            rows: vec![None; INFLIGHT_MAX],
            free: (0..INFLIGHT_MAX).collect(),
            waiting: VecDeque::with_capacity(INFLIGHT_MAX),
            stopped: false,
        };
        Ok((ring, runner))
    }

    /// Submits as many waiting IOs to the device as it accepts.
    fn submit(&mut self) -> bool {
        let before = self.waiting.len();
        while let Some(row) = self.free.pop() {
            let Some((io, ended)) = self.waiting.pop_front() else {
                self.free.push(row);
                break;
            };
            let tag = io.tag;
            if let Err(io) = self.device.submit(Io { tag: row as u64, ..io }) {
                self.waiting.push_front((Io { tag, ..io }, ended));
                self.free.push(row);
                break;
            }
            self.rows[row] = Some((tag, ended));
        }
        self.waiting.len() < before
    }
}

impl Shard for Runner {
    type Message = Job;

    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(job) = self.inbox.take() {
            busy = true;
            match job {
                Job::Run(io, ended) => self.waiting.push_back((io, ended)),
                Job::Look => {}
                Job::Stop => self.stopped = true,
            }
        }
        busy |= self.submit();
        busy |= self.device.poll(now);
        while let Some(completion) = self.device.reap() {
            busy = true;
            let row = usize::try_from(completion.tag).unwrap_or(usize::MAX);
            if let Some((tag, ended)) = self.rows.get_mut(row).and_then(Option::take) {
                self.free.push(row);
                ended.end(Completion { tag, ..completion });
            }
        }
        busy
    }

    fn deadline(&self) -> Option<Instant> {
        self.device.deadline()
    }

    fn inflight(&self) -> usize {
        self.device.inflight()
    }

    fn is_done(&self) -> bool {
        self.stopped
    }

    fn inbox(&mut self) -> Option<&mut Inbox<Job>> {
        Some(&mut self.inbox)
    }
}

impl Ended {
    fn end(&self, completion: Completion) {
        // A queue accepts no more IOs than it has room for.
        let _ = self.queue.push(completion);
        if !self.woken.swap(true, Ordering::SeqCst) {
            self.wake.wake();
        }
    }
}

/// A shard's queue.
struct SingleQueue {
    geometry: Geometry,
    size: Arc<SharedSize>,
    jobs: Sender<Job>,
    ended: Arc<Ended>,
    accepted: usize,
    done: Done,
}

impl BlockDevice for SingleQueue {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn refresh(&mut self) {
        self.geometry.size = self.size.get();
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight() >= INFLIGHT_MAX {
            return Err(io);
        }
        self.accepted += 1;
        self.jobs.send(Job::Run(io, Arc::clone(&self.ended)));
        Ok(())
    }

    fn poll(&mut self, _now: Instant) -> bool {
        self.ended.woken.store(false, Ordering::SeqCst);
        let before = self.done.len();
        while let Some(completion) = self.ended.queue.pop() {
            self.accepted -= 1;
            self.done.add(completion);
        }
        self.done.len() > before
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop()
    }

    fn inflight(&self) -> usize {
        self.accepted + self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        self.done.deadline()
    }
}

impl fmt::Debug for SingleQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SingleQueue").field("accepted", &self.accepted).finish_non_exhaustive()
    }
}
