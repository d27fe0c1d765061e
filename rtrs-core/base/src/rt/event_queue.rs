//! Bounded, lock-free queue from a shard to a thread that has no ring, with an eventfd.
//!
//! The receiver sleeps on the eventfd, or adds it to its own poll loop. The sender writes to it
//! only while the receiver watches the queue, so sending to a busy receiver costs no system call.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::sleep_flag::SleepFlag;

struct Shared<T> {
    queue: ArrayQueue<T>,
    /// Set while the receiver watches the queue.
    flag: SleepFlag,
    /// Set when the sender was dropped.
    closed: AtomicBool,
    event: OwnedFd,
}

impl<T> Shared<T> {
    /// Makes the eventfd readable.
    fn signal(&self) {
        // A full counter is already readable.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    fn is_quiet(&self) -> bool {
        self.queue.is_empty() && !self.closed.load(Ordering::Acquire)
    }
}

/// The only sending end. Dropping it closes the queue.
pub struct EventSender<T> {
    shared: Arc<Shared<T>>,
}

/// Receiving end.
pub struct EventReceiver<T> {
    shared: Arc<Shared<T>>,
}

/// Creates a queue for `capacity` values, at least one. The receiver watches it.
///
/// # Errors
/// Returns the system's error if no eventfd can be created.
pub fn event_queue<T>(capacity: usize) -> io::Result<(EventSender<T>, EventReceiver<T>)> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let (queue, flag) = (ArrayQueue::new(capacity.max(1)), SleepFlag::new());
    let shared = Arc::new(Shared { queue, flag, closed: AtomicBool::new(false), event });
    Ok((EventSender { shared: Arc::clone(&shared) }, EventReceiver { shared }))
}

impl<T> EventSender<T> {
    /// Queues a value, and makes the eventfd readable if the receiver watches the queue.
    ///
    /// # Errors
    /// Returns the value if the queue is full.
    pub fn send(&self, value: T) -> Result<(), T> {
        let (shared, mut refused) = (&*self.shared, None);
        let push = || refused = shared.queue.push(value).err();
        shared.flag.send(push, || shared.signal());
        refused.map_or(Ok(()), Err)
    }
}

impl<T> Drop for EventSender<T> {
    fn drop(&mut self) {
        let shared = &*self.shared;
        shared.flag.send(|| shared.closed.store(true, Ordering::Release), || shared.signal());
    }
}

impl<T> EventReceiver<T> {
    /// Returns the next value.
    pub fn take(&mut self) -> Option<T> {
        self.shared.queue.pop()
    }

    /// Returns true if the sender was dropped; values that it sent may still be queued.
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// Makes the eventfd readable now if the queue has a value or is closed, otherwise with the
    /// next value.
    pub fn watch(&mut self) {
        let shared = &*self.shared;
        let drain = || {
            // Ignore failure: the eventfd may be empty.
            let _ = rustix::io::read(&shared.event, &mut [0u8; 8]);
        };
        if !shared.flag.prepare_sleep(drain, || shared.is_quiet()) {
            shared.signal();
        }
    }

    /// Makes the eventfd readable until the next [`watch`](Self::watch) or [`wait`](Self::wait).
    pub fn signal(&self) {
        self.shared.signal();
    }

    /// Waits until the queue has a value or is closed. Returns false if `timeout` passes first.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<bool> {
        let end = Instant::now().checked_add(timeout);
        loop {
            self.watch();
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let left = left.map(Timespec::try_from).and_then(Result::ok);
            let event = &mut [PollFd::new(&self.shared.event, PollFlags::IN)];
            match poll(event, left.as_ref()) {
                // The eventfd was readable because of an earlier value.
                Ok(1..) if self.shared.is_quiet() => {}
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl<T> AsFd for EventReceiver<T> {
    /// Returns the eventfd, for a poll loop; see [`Self::watch`]. Callers must not read from it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}

impl<T> fmt::Debug for EventSender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventSender").field("queued", &self.shared.queue.len()).finish()
    }
}

impl<T> fmt::Debug for EventReceiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventReceiver").field("queued", &self.shared.queue.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn is_readable<T>(receiver: &EventReceiver<T>) -> bool {
        let event = &mut [PollFd::new(receiver, PollFlags::IN)];
        poll(event, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    }

    #[test]
    fn the_descriptor_follows_the_queue() {
        let (sender, mut receiver) = event_queue(4).unwrap();
        assert!(!is_readable(&receiver));
        sender.send(1).unwrap();
        assert!(is_readable(&receiver));
        receiver.watch();
        assert!(is_readable(&receiver), "a value is left");
        assert_eq!(receiver.take(), Some(1));
        receiver.watch();
        assert!(!is_readable(&receiver));
        sender.send(2).unwrap();
        assert!(is_readable(&receiver), "watched again");
        assert_eq!((receiver.take(), receiver.take()), (Some(2), None));
        receiver.watch();
        drop(sender);
        assert!(is_readable(&receiver) && receiver.is_closed());
        receiver.watch();
        assert!(is_readable(&receiver), "a closed queue stays readable");

        let (_sender, mut receiver) = event_queue::<u8>(1).unwrap();
        receiver.signal();
        assert!(is_readable(&receiver), "on request");
        receiver.watch();
        assert!(!is_readable(&receiver));
    }

    #[test]
    fn a_full_queue_returns_the_value() {
        let (sender, mut receiver) = event_queue(2).unwrap();
        assert_eq!([1, 2, 3].map(|value| sender.send(value)), [Ok(()), Ok(()), Err(3)]);
        assert_eq!(receiver.take(), Some(1));
        assert_eq!(sender.send(3), Ok(()));
    }

    #[test]
    fn a_wait_is_bounded_and_ends_with_a_value_or_the_sender() {
        let (sender, mut receiver) = event_queue(2).unwrap();
        assert!(!receiver.wait(Duration::from_millis(1)).unwrap());
        let thread = std::thread::spawn(move || {
            for value in 0..10_000 {
                while sender.send(value).is_err() {
                    std::thread::yield_now();
                }
            }
        });
        let mut next = 0;
        loop {
            assert!(receiver.wait(LONG).unwrap(), "stuck at {next}");
            let closed = receiver.is_closed();
            while let Some(value) = receiver.take() {
                assert_eq!(value, next);
                next += 1;
            }
            if closed {
                break;
            }
        }
        thread.join().unwrap();
        assert_eq!(next, 10_000);
    }
}
