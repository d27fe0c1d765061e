//! Queues: requests that use the program's memory, and their completions.
//!
//! A request occupies a slot from its submission until its completion is returned. A completion
//! whose memory is still in use is *late*: it waits until that use ends.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use rtrs::{Completion, Queue, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::entry::{Failure, Health};
use crate::layout::{CCompletion, NO_EFFECT};
use crate::memory::{Hold, signal};
use crate::registry::Registry;

/// `rtrs_queue`.
#[derive(Debug)]
pub(crate) struct CQueue {
    health: Arc<Health>,
    /// Registered memory of the volume.
    memory: Arc<Registry>,
    /// Logical block size of the volume.
    block: u64,
    depth: usize,
    io_max: u32,
    /// Duplicate of the queue's eventfd.
    event: Arc<OwnedFd>,
    user: Mutex<User>,
}

/// The part of a queue that only one thread may use at a time.
#[derive(Debug)]
pub(crate) struct User {
    /// None once the session has ended.
    queue: Option<Queue>,
    event: Arc<OwnedFd>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slots of late completions.
    late: Vec<u32>,
    /// Completions from one poll.
    arrived: Vec<Completion>,
    done: Vec<CCompletion>,
}

/// Request in flight.
#[derive(Debug)]
struct Slot {
    hold: Arc<Hold>,
    /// Completion to return; its result is set when the request completes.
    completion: CCompletion,
}

/// Limits of a poll.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) min: usize,
    pub(crate) max: usize,
    pub(crate) timeout: Duration,
}

fn system(what: &str, error: &std::io::Error) -> Failure {
    Failure::new(error.raw_os_error().unwrap_or(libc::EIO), format!("cannot {what}: {error}"))
}

fn ended() -> Failure {
    Failure::new(libc::ESHUTDOWN, "cannot use the queue: the volume is closed")
}

impl CQueue {
    pub(crate) fn new(
        queue: Queue,
        health: &Arc<Health>,
        memory: &Arc<Registry>,
        block: u32,
    ) -> Result<Self, Failure> {
        let event = queue.as_fd().try_clone_to_owned();
        let event = Arc::new(event.map_err(|error| system("duplicate an eventfd", &error))?);
        let (depth, io_max) = (queue.depth(), queue.io_max());
        let completion = CCompletion { user_data: 0, result: 0, flags: 0, reserved: 0 };
        let slot = || Slot { hold: Arc::new(Hold::new(&event)), completion };
        let user = User {
            queue: Some(queue),
            event: Arc::clone(&event),
            slots: (0..depth).map(|_| slot()).collect(),
            free: (0..).take(depth).collect(),
            late: Vec::new(),
            arrived: Vec::new(),
            done: Vec::new(),
        };
        let (health, memory, block) = (Arc::clone(health), Arc::clone(memory), block.into());
        Ok(Self { health, memory, block, depth, io_max, event, user: Mutex::new(user) })
    }

    pub(crate) fn health(&self) -> &Health {
        &self.health
    }

    pub(crate) fn memory(&self) -> &Registry {
        &self.memory
    }

    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    pub(crate) fn io_max(&self) -> u32 {
        self.io_max
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Fails unless the offset and the length are multiples of the logical block size, the length
    /// is not 0, and the end of the range fits in 64 bits.
    pub(crate) fn check_range(&self, offset: u64, len: u64) -> Result<(), Failure> {
        let block = self.block;
        for (name, value) in [("offset", offset), ("length", len)] {
            if !value.is_multiple_of(block) {
                let text = format!("{name} {value} is not a multiple of {block} bytes");
                return Err(Failure::invalid(text));
            }
        }
        if len == 0 {
            return Err(Failure::invalid("length 0 is invalid"));
        }
        match offset.checked_add(len) {
            Some(_) => Ok(()),
            None => {
                Err(Failure::invalid(format!("a range of {len} bytes at {offset} exceeds 64 bits")))
            }
        }
    }

    /// Locks the queue for a call by this thread.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, User>, Failure> {
        match self.user.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let text = "another thread is using the queue; open one queue for each thread";
                Err(Failure::new(libc::EBUSY, text))
            }
        }
    }

    /// Fails if a call on the queue is in progress, except after a fork.
    pub(crate) fn check_idle(&self) -> Result<(), Failure> {
        if self.health.is_forked() { Ok(()) } else { self.lock().map(drop) }
    }

    /// Releases everything that the queue holds, after the session has ended.
    pub(crate) fn end(&self) -> Result<(), Failure> {
        let mut user = self.lock()?;
        user.queue = None;
        user.arrived.clear();
        Ok(())
    }

    /// Number of requests whose memory is in use; 1 if a call on the queue is in progress.
    pub(crate) fn held(&self) -> usize {
        self.lock().map_or(1, |user| user.slots.iter().filter(|one| !one.hold.has_ended()).count())
    }
}

impl User {
    pub(crate) fn queue(&mut self) -> Result<&mut Queue, Failure> {
        self.queue.as_mut().ok_or_else(ended)
    }

    /// Number of requests whose completions have not been returned.
    pub(crate) fn inflight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Submits the request that `request` builds.
    pub(crate) fn submit(
        &mut self,
        user_data: usize,
        request: impl FnOnce(&Arc<Hold>) -> Request,
    ) -> Result<(), Failure> {
        let queue = self.queue.as_mut().ok_or_else(ended)?;
        let Some(slot) = self.free.pop() else {
            let text = format!("the queue has {} requests in flight; poll it", self.slots.len());
            return Err(Failure::new(libc::EAGAIN, text));
        };
        let Slot { hold, completion } = &mut self.slots[slot as usize];
        hold.begin();
        completion.user_data = user_data;
        queue.submit(slot.into(), request(hold)).map_err(|rejected| {
            self.free.push(slot);
            rejected.error.into()
        })
    }

    /// Returns completions, valid until the next poll.
    pub(crate) fn poll(&mut self, wanted: Wanted) -> Result<&[CCompletion], Failure> {
        let begin = Instant::now();
        self.done.clear();
        let result = loop {
            let left = wanted.timeout.saturating_sub(begin.elapsed());
            let missing = wanted.min.min(wanted.max).saturating_sub(self.done.len());
            // While a completion is late, any thread may signal the eventfd: `wait` sees that.
            let min = if self.late.is_empty() { missing.min(self.inflight()) } else { 0 };
            if let Err(failure) = self.receive(min, wanted.max, left) {
                break Err(failure);
            }
            self.take_released(wanted.max);
            let missing = wanted.min.min(wanted.max).saturating_sub(self.done.len());
            if missing == 0 || self.inflight() == 0 || begin.elapsed() >= wanted.timeout {
                break Ok(());
            }
            if !self.late.is_empty()
                && let Err(failure) = self.wait(wanted.timeout.saturating_sub(begin.elapsed()))
            {
                break Err(failure);
            }
        };
        if self.late.iter().any(|slot| self.slots[*slot as usize].hold.has_ended()) {
            signal(&self.event);
        }
        // Completions that have arrived are returned even if a later step failed.
        if self.done.is_empty() { result.map(|()| &self.done[..]) } else { Ok(&self.done) }
    }

    /// Takes completions from the queue. Afterwards the eventfd is readable only for later
    /// completions.
    fn receive(&mut self, min: usize, max: usize, timeout: Duration) -> Result<(), Failure> {
        let queue = self.queue.as_mut().ok_or_else(ended)?;
        let room = max - self.done.len();
        let result = queue.poll(&mut self.arrived, min, room, timeout);
        for completion in self.arrived.drain(..) {
            let Ok(slot) = u32::try_from(completion.token) else { continue };
            let Slot { hold, completion: entry } = &mut self.slots[slot as usize];
            (entry.result, entry.flags) = match completion.result {
                Ok(()) => (0, 0),
                Err(error) if error.is_refusal() => (-error.errno(), NO_EFFECT),
                Err(error) => (-error.errno(), 0),
            };
            // Ends the request's use of the memory; the engine may still use it.
            drop(completion);
            if hold.await_end() {
                self.late.push(slot);
            } else {
                self.done.push(*entry);
                self.free.push(slot);
            }
        }
        result.map(drop).map_err(Failure::from)
    }

    /// Takes late completions whose memory is no longer in use.
    fn take_released(&mut self, max: usize) {
        let Self { slots, free, late, done, .. } = self;
        late.retain(|slot| {
            let Slot { hold, completion } = &slots[*slot as usize];
            if done.len() == max || !hold.has_ended() {
                return true;
            }
            done.push(*completion);
            free.push(*slot);
            false
        });
    }

    /// Waits for the eventfd.
    fn wait(&self, timeout: Duration) -> Result<(), Failure> {
        let timeout = Timespec::try_from(timeout).ok();
        match poll(&mut [PollFd::new(&*self.event, PollFlags::IN)], timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(system("wait", &error.into())),
        }
    }
}
