//! Whether the receiver of a mailbox sleeps, and which sender has to wake it.
//!
//! A sender queues its message and then looks at the flag. The receiver sets the flag and then
//! looks at the queue. Every access swaps the flag, so of two the second sees all that was done
//! before the first: either the receiver finds the message, or the sender finds that the receiver
//! sleeps. This holds whatever the memory orderings of the queue are.

use crate::sync::atomic::{AtomicBool, Ordering};

/// Set while the receiver sleeps and nobody has begun to wake it.
#[derive(Debug)]
pub(super) struct SleepFlag(AtomicBool);

impl SleepFlag {
    /// Of a receiver that sleeps until it takes its first message.
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

    /// Marks the receiver as about to sleep. `drain` takes the wakes that came before: what
    /// they announced is in the queue. False when a message is queued: do not sleep.
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

    /// A mailbox whose queue orders nothing by itself.
    struct Mailbox {
        flag: SleepFlag,
        /// How many messages were ever queued.
        queued: AtomicU32,
        /// What senders have written and the receiver has not read.
        eventfd: AtomicU32,
    }

    /// How a receiver sleeps.
    #[derive(Clone, Copy)]
    struct Manner {
        /// It says that it is awake, as a shard does; `Inbox::take_or_watch` does not.
        says_awake: bool,
        /// Its first sleep ends by something else than a message.
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

        /// Takes messages until it sleeps and nobody has woken it. Returns how many it took.
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
                    if manner.says_awake {
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
            assert!(taken == SENDERS || woken, "it sleeps beside a message, and nobody wakes it");
        });
    }

    #[test]
    fn a_core_does_not_sleep_beside_a_message() {
        check(Manner { says_awake: true, timer: false });
    }

    #[test]
    fn a_core_that_a_timer_wakes_does_not_sleep_beside_a_message() {
        check(Manner { says_awake: true, timer: true });
    }

    #[test]
    fn who_watches_does_not_sleep_beside_a_message() {
        check(Manner { says_awake: false, timer: true });
    }
}
