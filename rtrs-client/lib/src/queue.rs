//! Queues, which submit and complete requests.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rtrs_client::embed::{QueueUser, Submission};
use rtrs_core::status::IoStatus;

use crate::error::{Error, ErrorKind, IoError};
use crate::process::Process;
use crate::request::{Completion, InFlight, PIECES_MAX, Request};

/// Default for the limit set by [`Queue::set_wait_max`].
const WAIT_MAX: Duration = Duration::from_secs(300);

/// Minimum of [`Queue::io_max`].
const SECTOR: u32 = 512;

/// State that a volume shares with its queues.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) process: Process,
    /// Set when the volume is being closed.
    pub(crate) closing: AtomicBool,
}

impl Shared {
    /// Fails if the volume no longer accepts requests.
    fn check_open(&self) -> Result<(), Error> {
        self.process.check()?;
        if self.closing.load(Ordering::Acquire) {
            return Err(closed());
        }
        Ok(())
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "cannot use the queue: the volume is closed")
}

/// Request that was not submitted.
#[derive(Debug)]
pub struct Rejected {
    /// Reason.
    pub error: Error,
    /// The request, unchanged.
    pub request: Request,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Rejected {}

impl From<Rejected> for Error {
    fn from(rejected: Rejected) -> Self {
        rejected.error
    }
}

/// Recipient of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Receiver {
    /// The next [`Queue::poll`].
    Poll,
    /// The blocking call in progress.
    Call,
    /// No receiver: the blocking call no longer waits.
    None,
}

/// Queue of a volume, served by one of the library's IO threads.
///
/// A queue's requests run concurrently and complete in any order. A flush covers the writes that
/// completed before it was submitted. Requests in flight continue when the queue is dropped.
///
/// A queue can be moved to another thread, but two threads cannot use it at the same time:
///
/// ```compile_fail
/// fn is_shared<T: Sync>() {}
/// is_shared::<rtrs::Queue>();
/// ```
///
/// Reading with several requests in flight:
///
/// ```no_run
/// use std::time::Duration;
///
/// use rtrs::{Buffer, Error, Queue, Request};
///
/// fn checksum(queue: &mut Queue, size: u64) -> Result<u64, Error> {
///     const BLOCK: u64 = 64 << 10;
///     let (mut next, mut sum, mut done) = (0, 0, Vec::new());
///     let mut free: Vec<Buffer> = (0..16).map(|_| Buffer::zeroed(BLOCK as usize)).collect();
///     while next < size || queue.inflight() > 0 {
///         while next < size && let Some(buffer) = free.pop() {
///             queue.submit(next, Request::read(next, buffer))?;
///             next += BLOCK;
///         }
///         queue.poll(&mut done, 1, 16, Duration::from_secs(60))?;
///         for completion in done.drain(..) {
///             if let Err(error) = completion.result {
///                 panic!("cannot read at {}: {error}", completion.token);
///             }
///             let buffer = completion.into_buffer().expect("the buffer of the read");
///             sum += buffer.iter().map(|byte| u64::from(*byte)).sum::<u64>();
///             free.push(buffer);
///         }
///     }
///     Ok(sum)
/// }
/// ```
pub struct Queue {
    shared: Arc<Shared>,
    user: QueueUser,
    /// Maximum size of a request's memory, in bytes.
    io_max: u32,
    /// Requests in flight, by slot.
    inflight: Vec<Option<(Receiver, InFlight)>>,
    free: Vec<u32>,
    /// Completions for the next [`Queue::poll`].
    ready: VecDeque<Completion>,
    /// Completion of the blocking call's request.
    answer: Option<Completion>,
    wait_max: Duration,
    /// Makes the queue not `Sync`.
    owner: PhantomData<Cell<()>>,
}

impl Queue {
    pub(crate) fn new(shared: &Arc<Shared>, user: QueueUser, depth: u16, io_max: u32) -> Self {
        Self {
            shared: Arc::clone(shared),
            user,
            io_max: io_max.max(SECTOR),
            inflight: (0..depth).map(|_| None).collect(),
            free: (0..u32::from(depth)).rev().collect(),
            ready: VecDeque::new(),
            answer: None,
            wait_max: WAIT_MAX,
            owner: PhantomData,
        }
    }

    /// Returns the number of requests whose completions [`poll`](Self::poll) has not returned,
    /// including those that a blocking call has abandoned.
    #[must_use]
    pub fn inflight(&self) -> usize {
        self.inflight.len() - self.free.len() + self.ready.len()
    }

    /// Returns the maximum number of requests in flight.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.inflight.len()
    }

    /// Returns the maximum length of a read or write, in bytes.
    #[must_use]
    pub fn io_max(&self) -> u32 {
        self.io_max
    }

    /// Sets the time limit for a blocking call's request; the default is 5 minutes. A call whose
    /// request takes longer fails with [`ErrorKind::TimedOut`].
    pub fn set_wait_max(&mut self, time: Duration) {
        self.wait_max = time;
    }

    /// Submits a request. Its completion carries the token, which may be any number.
    ///
    /// The volume's size, access and capabilities are checked later: a request that violates them
    /// completes with an error.
    ///
    /// # Errors
    /// Returns the request with the reason: [`ErrorKind::Full`], [`ErrorKind::Invalid`],
    /// [`ErrorKind::Closed`] or [`ErrorKind::Forked`].
    #[allow(clippy::result_large_err, reason = "the error returns the request")]
    pub fn submit(&mut self, token: u64, request: Request) -> Result<(), Rejected> {
        self.send(Receiver::Poll, token, request)
    }

    #[allow(clippy::result_large_err, reason = "the error returns the request")]
    fn send(&mut self, to: Receiver, token: u64, request: Request) -> Result<(), Rejected> {
        let checked = self.shared.check_open().and_then(|()| self.check(&request));
        let len = match checked {
            Ok(len) => len,
            Err(error) => return Err(Rejected { error, request }),
        };
        let Some(slot) = self.free.pop() else {
            let text = format!("the queue has {} requests in flight; poll it", self.depth());
            return Err(Rejected { error: Error::new(ErrorKind::Full, text), request });
        };
        let Request { op, flags, offset, memory, .. } = request;
        let (inflight, memory) = InFlight::new(token, len, op, memory);
        self.inflight[slot as usize] = Some((to, inflight));
        self.user.submissions.send(Submission { slot, op, flags, offset, len, memory });
        Ok(())
    }

    /// Checks that a request may be submitted, and returns its length.
    fn check(&self, request: &Request) -> Result<u32, Error> {
        let invalid = |text: String| Error::new(ErrorKind::Invalid, text);
        let (pieces, bytes) = request.memory_size();
        if pieces > PIECES_MAX {
            return Err(invalid(format!(
                "{pieces} buffers are too many; use at most {PIECES_MAX}"
            )));
        }
        if bytes > self.io_max as usize {
            let text =
                format!("{bytes} bytes are too many for a request; use at most {}", self.io_max);
            return Err(invalid(text));
        }
        u32::try_from(request.len())
            .map_err(|_| invalid(format!("a range of {} bytes is too long", request.len())))
    }

    /// Appends at most `max` completions to `completions`, and returns their number. Waits until
    /// there are `min` completions, nothing is in flight, or `timeout` has passed. Does not wait if
    /// `min` is 0.
    ///
    /// After the session has ended, the remaining requests complete with [`IoError::errno`] 103
    /// (ECONNABORTED).
    ///
    /// # Errors
    /// [`ErrorKind::Forked`], or [`ErrorKind::System`] if the system refuses to wait.
    pub fn poll(
        &mut self,
        completions: &mut Vec<Completion>,
        min: usize,
        max: usize,
        timeout: Duration,
    ) -> Result<usize, Error> {
        self.shared.process.check()?;
        let (begin, before) = (Instant::now(), completions.len());
        let result = loop {
            let closed = self.user.outcomes.is_closed();
            self.take(completions, before.saturating_add(max));
            let count = completions.len() - before;
            if count >= min.min(max) || self.inflight() == 0 {
                break Ok(count);
            }
            if closed {
                self.fail_rest();
                continue;
            }
            match self.wait(timeout.saturating_sub(begin.elapsed())) {
                Ok(true) => {}
                Ok(false) => break Ok(count),
                Err(error) => break Err(error),
            }
        };
        self.watch();
        result
    }

    /// Moves completions to the list until it has `end` elements.
    fn take(&mut self, completions: &mut Vec<Completion>, end: usize) {
        while completions.len() < end {
            if let Some(completion) = self.ready.pop_front() {
                completions.push(completion);
            } else if !self.take_outcome() {
                return;
            }
        }
    }

    /// Processes the next outcome from the session. Returns false if there is none.
    fn take_outcome(&mut self) -> bool {
        let Some(outcome) = self.user.outcomes.take() else { return false };
        self.end(outcome.slot, outcome.status);
        true
    }

    /// Completes the request in a slot.
    fn end(&mut self, slot: u32, status: IoStatus) {
        let Some((to, inflight)) = self.inflight[slot as usize].take() else { return };
        self.free.push(slot);
        let completion = inflight.complete(status);
        match to {
            Receiver::Poll => self.ready.push_back(completion),
            Receiver::Call => self.answer = Some(completion),
            Receiver::None => {}
        }
    }

    /// Completes all requests in flight after the session has ended.
    fn fail_rest(&mut self) {
        for slot in (0..).take(self.inflight.len()) {
            self.end(slot, IoStatus::Aborted);
        }
    }

    fn wait(&mut self, timeout: Duration) -> Result<bool, Error> {
        let failed =
            |error: io::Error| Error::new(ErrorKind::System, format!("cannot wait: {error}"));
        self.user.outcomes.wait(timeout).map_err(failed)
    }

    /// Makes the descriptor readable if there are completions, or else as soon as the next one
    /// arrives.
    fn watch(&mut self) {
        if self.ready.is_empty() {
            self.user.outcomes.watch();
        } else {
            self.user.outcomes.signal();
        }
    }

    /// Runs a request to completion.
    ///
    /// # Errors
    /// The errors of [`Self::submit`], and [`ErrorKind::TimedOut`]. The request's own error is in
    /// the completion.
    pub(crate) fn run(&mut self, request: Request) -> Result<Completion, Error> {
        let begin = Instant::now();
        self.answer = None;
        self.make_room(begin)?;
        self.send(Receiver::Call, 0, request)?;
        let result = loop {
            let closed = self.user.outcomes.is_closed();
            while self.answer.is_none() && self.take_outcome() {}
            if let Some(completion) = self.answer.take() {
                break Ok(completion);
            }
            if closed {
                self.fail_rest();
                continue;
            }
            match self.wait(self.wait_max.saturating_sub(begin.elapsed())) {
                Ok(true) => {}
                Ok(false) => break Err(self.late()),
                Err(error) => break Err(error),
            }
        };
        if result.is_err() {
            self.give_up();
        }
        self.watch();
        result
    }

    /// Waits until a request can be submitted.
    fn make_room(&mut self, begin: Instant) -> Result<(), Error> {
        self.shared.check_open()?;
        while self.free.is_empty() {
            let closed = self.user.outcomes.is_closed();
            if self.take_outcome() {
                continue;
            }
            if closed {
                self.fail_rest();
            } else if !self.wait(self.wait_max.saturating_sub(begin.elapsed()))? {
                return Err(self.late());
            }
        }
        Ok(())
    }

    fn late(&self) -> Error {
        let text = format!("no answer within {} s", self.wait_max.as_secs_f32());
        Error::new(ErrorKind::TimedOut, text)
    }

    /// Marks the blocking call's request, so that its completion is dropped.
    fn give_up(&mut self) {
        for (to, _) in self.inflight.iter_mut().flatten() {
            if *to == Receiver::Call {
                *to = Receiver::None;
            }
        }
    }
}

impl AsFd for Queue {
    /// Returns an eventfd for a poll loop. It is readable while there are completions that
    /// [`Queue::poll`] has not returned, or if the session has ended, and may be readable
    /// spuriously. Only the queue may read from it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.user.outcomes.as_fd()
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("inflight", &self.inflight()).finish_non_exhaustive()
    }
}

/// Converts the outcome of a blocking call's request.
pub(crate) fn outcome(what: &str, result: Result<(), IoError>) -> Result<(), Error> {
    result.map_err(|error| Error::new(ErrorKind::Io(error), format!("cannot {what}: {error}")))
}

#[cfg(test)]
mod tests;
