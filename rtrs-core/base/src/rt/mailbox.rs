//! Messages between shards: a lock-free queue and an eventfd that wakes a sleeping receiver.
//!
//! The sender writes to the eventfd only when the receiver is marked as sleeping, so a busy pair of
//! shards exchanges messages without system calls. Messages to a receiver that has ended are
//! dropped, with the memory and reply channels that they hold.

use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_queue::SegQueue;

use super::op::{Fd, Op};
use super::ring::{Port, Ring};
use super::sleep_flag::SleepFlag;
use crate::mem::{MemSlice, Region};

struct Shared<T> {
    queue: SegQueue<T>,
    flag: SleepFlag,
    /// Set once the receiver has been dropped.
    has_ended: AtomicBool,
    wake: OwnedFd,
}

impl<T> Shared<T> {
    fn drop_messages(&self) {
        while self.queue.pop().is_some() {}
    }
}

/// The receiver's share of a mailbox.
struct Receiver<T>(Arc<Shared<T>>);

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let Shared { flag, has_ended, .. } = &*self.0;
        has_ended.store(true, Ordering::Relaxed);
        // The sender and this function both swap the flag, and the second swap sees what happened
        // before the first: either the sender sees `has_ended`, or this function sees the sender's
        // message.
        flag.awake();
        self.0.drop_messages();
    }
}

/// Sending end; clone it for every sender.
pub struct Sender<T> {
    shared: Arc<Shared<T>>,
}

/// Receiving end before it is bound to its shard's ring; it may be moved to that shard's thread.
pub struct Mailbox<T> {
    receiver: Receiver<T>,
}

/// Receiving end on its shard.
pub struct Inbox<T> {
    receiver: Receiver<T>,
    armed: Armed,
}

struct Armed {
    port: Port,
    fd: Fd,
    word: MemSlice,
}

/// Creates a mailbox.
///
/// # Errors
/// Returns the system's error if no eventfd can be created.
pub fn mailbox<T>() -> std::io::Result<(Sender<T>, Mailbox<T>)> {
    // SAFETY: eventfd takes no pointers.
    let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if raw < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let wake = unsafe { OwnedFd::from_raw_fd(raw) };
    let (queue, flag) = (SegQueue::new(), SleepFlag::new());
    let shared = Arc::new(Shared { queue, flag, has_ended: AtomicBool::new(false), wake });
    Ok((Sender { shared: Arc::clone(&shared) }, Mailbox { receiver: Receiver(shared) }))
}

impl<T> Sender<T> {
    /// Queues a message and wakes the receiver if it is asleep. Drops the message if the receiver
    /// has ended.
    pub fn send(&self, message: T) {
        let Shared { queue, flag, has_ended, wake } = &*self.shared;
        let write = || {
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight valid bytes are written to the mailbox's own eventfd. The call cannot
            // block: the eventfd is non-blocking, and a full counter means that the receiver is
            // already awake.
            unsafe { libc::write(wake.as_raw_fd(), one.as_ptr().cast(), 8) };
        };
        flag.send(|| queue.push(message), write);
        // Either the flag is seen here, or `Receiver::drop` sees the message; see there.
        if has_ended.load(Ordering::Relaxed) {
            self.shared.drop_messages();
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<T> Mailbox<T> {
    /// Binds the mailbox to its shard's ring, so that a message wakes the ring.
    ///
    /// # Errors
    /// Returns the system's error if a descriptor or memory cannot be allocated.
    pub fn arm(self, ring: &Rc<Ring>) -> std::io::Result<Inbox<T>> {
        let word = Region::new(8)?.slice(0, 8).unwrap_or_else(|| unreachable!("8 bytes fit"));
        let fd = Fd::new(self.receiver.0.wake.try_clone()?);
        let armed = Armed { port: ring.port(), fd, word };
        armed.post();
        Ok(Inbox { receiver: self.receiver, armed })
    }
}

impl<T> Inbox<T> {
    /// Returns the next message.
    pub fn take(&mut self) -> Option<T> {
        self.receiver.0.queue.pop()
    }

    /// Returns true if no message is queued.
    pub fn is_empty(&self) -> bool {
        self.receiver.0.queue.is_empty()
    }

    /// Marks the receiver as about to sleep. Returns false if a message has arrived in the
    /// meantime, in which case the receiver must not sleep.
    pub fn prepare_sleep(&mut self) -> bool {
        let Self { receiver: Receiver(shared), armed } = self;
        let drain = || {
            while armed.port.take().is_some() {
                armed.post();
            }
        };
        shared.flag.prepare_sleep(drain, || shared.queue.is_empty())
    }

    /// For a receiver that does not know when its shard sleeps: returns the next message; if there
    /// is none, the next one is guaranteed to wake the shard.
    pub fn take_or_watch(&mut self) -> Option<T> {
        loop {
            if let Some(message) = self.take() {
                return Some(message);
            }
            if self.prepare_sleep() {
                return None;
            }
        }
    }

    /// Marks the receiver as awake.
    pub fn awake(&self) {
        self.receiver.0.flag.awake();
    }
}

impl Armed {
    fn post(&self) {
        self.port
            .submit(Op::Read { fd: self.fd.clone(), buf: self.word.clone(), offset: u64::MAX }, 0);
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("queued", &self.shared.queue.len()).finish()
    }
}

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("queued", &self.receiver.0.queue.len()).finish()
    }
}

impl<T> fmt::Debug for Inbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("queued", &self.receiver.0.queue.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    #[test]
    fn messages_to_a_receiver_that_has_ended_are_dropped() {
        let ring = Ring::new(8).unwrap();
        let message = Arc::new(());
        let send = |to: &Sender<_>| to.send(Arc::clone(&message));
        let (sender, unbound) = mailbox::<Arc<()>>().unwrap();
        send(&sender);
        drop(unbound);
        assert_eq!(Arc::strong_count(&message), 1);
        let (sender, bound) = mailbox().unwrap();
        let inbox = bound.arm(&ring).unwrap();
        send(&sender);
        assert_eq!(Arc::strong_count(&message), 2);
        drop(inbox);
        assert_eq!(Arc::strong_count(&message), 1, "queued before the end");
        send(&sender);
        assert_eq!(Arc::strong_count(&message), 1, "sent after the end");
    }

    #[test]
    fn a_message_taken_early_does_not_lose_the_next_wakeup() {
        let ring = Ring::new(8).unwrap();
        let (sender, mailbox) = mailbox::<u32>().unwrap();
        let mut inbox = mailbox.arm(&ring).unwrap();
        ring.turn().unwrap();
        for round in 0..3 {
            sender.send(round);
            // The message is taken immediately; the sender's write to the eventfd is read only
            // afterwards.
            assert_eq!(inbox.take_or_watch(), Some(round));
            assert_eq!(inbox.take_or_watch(), None);
            ring.turn_or_sleep(Some(Duration::from_millis(200))).unwrap();
            assert_eq!(inbox.take_or_watch(), None);
            ring.turn().unwrap();
        }
        sender.send(9);
        assert!(ring.turn_or_sleep(Some(Duration::from_secs(5))).unwrap(), "it wakes");
        assert_eq!(inbox.take_or_watch(), Some(9));
    }
}
