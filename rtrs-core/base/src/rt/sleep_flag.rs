//! A mailbox's flag that shows whether its receiver sleeps, and which sender must wake it.
//!
//! A sender queues its message and then checks the flag. The receiver sets the flag and then checks
//! the queue. Every access swaps the flag, so the second of two accesses sees everything done
//! before the first: either the receiver finds the message, or the sender finds the receiver
//! asleep. This holds regardless of the queue's memory orderings.

use crate::sync::atomic::{AtomicBool, Ordering};

/// Set while the receiver sleeps and no sender has begun to wake it.
#[derive(Debug)]
pub(super) struct SleepFlag(AtomicBool);

impl SleepFlag {
    /// Creates the flag for a receiver that is asleep until it takes its first message.
    pub(super) fn new() -> Self {
        Self(AtomicBool::new(true))
    }

    /// Queues a message with `push`, and calls `wake` if the receiver sleeps.
    pub(super) fn send(&self, push: impl FnOnce(), wake: impl FnOnce()) {
        push();
        if self.0.swap(false, Ordering::AcqRel) {
            wake();
        }
    }

    /// Marks the receiver as about to sleep. `drain` consumes earlier wakes, whose messages are in
    /// the queue. Returns false if a message is queued; the receiver must then not sleep.
    pub(super) fn prepare_sleep(
        &self,
        drain: impl FnOnce(),
        is_empty: impl FnOnce() -> bool,
    ) -> bool {
        drain();
        self.0.swap(true, Ordering::AcqRel);
        if is_empty() {
            return true;
        }
        self.awake();
        false
    }

    /// Marks the receiver as awake.
    pub(super) fn awake(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}

#[cfg(all(test, loom))]
mod loom_model {
    use std::sync::Arc;

    use loom::sync::atomic::AtomicU32;
    use loom::thread;

    use super::*;
    use crate::sync::model;

    const SENDERS: u32 = 2;

    /// Mailbox whose queue provides no memory ordering.
    struct Mailbox {
        flag: SleepFlag,
        /// Total number of queued messages.
        queued: AtomicU32,
        /// Count that senders have written to the eventfd and the receiver has not read yet.
        eventfd: AtomicU32,
    }

    /// Way in which a receiver sleeps.
    #[derive(Clone, Copy)]
    struct Manner {
        /// The receiver calls `awake`, as a shard does; `Inbox::take_or_watch` does not.
        calls_awake: bool,
        /// The first sleep ends for a reason other than a message.
        timer: bool,
    }

    impl Mailbox {
        fn send(&self) {
            let push = || {
                self.queued.fetch_add(1, Ordering::Relaxed);
            };
            let wake = || {
                self.eventfd.fetch_add(1, Ordering::AcqRel);
            };
            self.flag.send(push, wake);
        }

        /// Takes messages until the receiver sleeps without a pending wake. Returns their number.
        fn receive(&self, manner: Manner) -> u32 {
            let mut timer = manner.timer;
            loop {
                let taken = self.queued.load(Ordering::Relaxed);
                let drain = || {
                    self.eventfd.swap(0, Ordering::AcqRel);
                };
                let is_empty = || self.queued.load(Ordering::Relaxed) == taken;
                if self.flag.prepare_sleep(drain, is_empty) {
                    let woken = self.eventfd.load(Ordering::Acquire) > 0;
                    if !woken && !std::mem::take(&mut timer) {
                        return taken;
                    }
                    if manner.calls_awake {
                        self.flag.awake();
                    }
                }
            }
        }
    }

    /// Lets two senders send while the receiver goes to sleep, wakes and goes to sleep again.
    fn check(manner: Manner) {
        model(move || {
            let (queued, eventfd) = (AtomicU32::new(0), AtomicU32::new(0));
            let mailbox = Arc::new(Mailbox { flag: SleepFlag::new(), queued, eventfd });
            let send = |mailbox: Arc<Mailbox>| thread::spawn(move || mailbox.send());
            let senders = [(); SENDERS as usize].map(|()| send(Arc::clone(&mailbox)));
            let taken = mailbox.receive(manner);
            senders.into_iter().for_each(|sender| sender.join().unwrap());
            let woken = mailbox.eventfd.load(Ordering::Acquire) > 0;
            assert!(taken == SENDERS || woken, "the receiver sleeps although a message waits");
        });
    }

    #[test]
    fn a_core_does_not_sleep_with_a_message_queued() {
        check(Manner { calls_awake: true, timer: false });
    }

    #[test]
    fn a_core_woken_by_a_timer_does_not_sleep_with_a_message_queued() {
        check(Manner { calls_awake: true, timer: true });
    }

    #[test]
    fn a_watching_core_does_not_sleep_with_a_message_queued() {
        check(Manner { calls_awake: false, timer: true });
    }
}
