//! Words of a message ring, and the order in which writers and the reader access them.
//!
//! A writer publishes a message and then checks whether the reader is asleep. The reader announces
//! that it sleeps and then looks for messages. A fence between each side's two accesses lets at
//! least one side see what the other did, so no message waits for a sleeping reader.
//!
//! The sleep word is odd while the reader sleeps, and grows with each change: a writer that was
//! slow to clear it cannot clear the word of a later sleep. The word is cleared after the reader
//! has been woken, so a writer that is killed in between costs one more wakeup instead of one too
//! few.

use crate::sync::atomic::{Ordering, fence};

/// Number of attempts to take the writers' lock.
const LOCK_TRIES: usize = 32;

/// A word in shared memory.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    fn swap(&self, value: u32, order: Ordering) -> u32;
    /// Changes the word from one value to another. Returns false if it has any other value.
    fn exchange(&self, from: u32, to: u32) -> bool;
}

macro_rules! word {
    ($type:ty) => {
        impl Word for $type {
            fn load(&self, order: Ordering) -> u32 {
                self.load(order)
            }

            fn store(&self, value: u32, order: Ordering) {
                self.store(value, order);
            }

            fn swap(&self, value: u32, order: Ordering) -> u32 {
                self.swap(value, order)
            }

            fn exchange(&self, from: u32, to: u32) -> bool {
                self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            }
        }
    };
}

word!(std::sync::atomic::AtomicU32);
#[cfg(loom)]
word!(loom::sync::atomic::AtomicU32);

/// Words of a ring.
#[derive(Clone, Copy)]
pub(super) struct RingWords<'a, W> {
    /// 1 while a writer adds a message.
    pub(super) lock: &'a W,
    /// Total length of the published messages; wraps.
    pub(super) head: &'a W,
    /// Total length of the messages that have been read.
    pub(super) tail: &'a W,
    /// Odd while the reader sleeps.
    pub(super) sleep: &'a W,
}

impl<W: Word> RingWords<'_, W> {
    /// Takes the writers' lock. Returns false if another writer holds it; that writer may have been
    /// killed.
    pub(super) fn try_lock(&self) -> bool {
        for _ in 0..LOCK_TRIES {
            if self.lock.load(Ordering::Relaxed) == 0 && self.lock.exchange(0, 1) {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    pub(super) fn unlock(&self) {
        self.lock.store(0, Ordering::Release);
    }

    /// Publishes all messages before `head`. If the reader is asleep, returns the value of the
    /// sleep word, to be passed to [`Self::woken`].
    pub(super) fn publish(&self, head: u32) -> Option<u32> {
        self.head.store(head, Ordering::Release);
        fence(Ordering::SeqCst);
        let sleep = self.sleep.load(Ordering::Relaxed);
        (sleep % 2 == 1).then_some(sleep)
    }

    /// Records that the reader has been woken from the sleep with this value.
    pub(super) fn woken(&self, sleep: u32) {
        self.sleep.exchange(sleep, sleep.wrapping_add(1));
    }

    /// Returns the end of the published messages.
    pub(super) fn published(&self) -> u32 {
        self.head.load(Ordering::Acquire)
    }

    /// Returns the end of the messages that have been read, whose space is free.
    pub(super) fn released(&self) -> u32 {
        self.tail.load(Ordering::Acquire)
    }

    /// Frees the space of all messages before `tail`.
    pub(super) fn release(&self, tail: u32) {
        self.tail.store(tail, Ordering::Release);
    }

    /// Announces with an odd value that the reader sleeps. The reader then looks for messages.
    pub(super) fn sleeps(&self, sleep: u32) {
        self.sleep.store(sleep, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Announces the end of a sleep with an even value.
    pub(super) fn awakes(&self, sleep: u32) {
        // A store would do, because it cannot come between the halves of an exchange by a writer.
        // The model reflects that only for a swap.
        self.sleep.swap(sleep, Ordering::Relaxed);
    }
}

#[cfg(all(test, loom))]
mod loom_model {
    use std::sync::Arc;

    use loom::sync::atomic::AtomicU32;
    use loom::thread;

    use super::*;
    use crate::sync::model;

    /// Number of messages of the first writer; the second sends one.
    const MESSAGES: u32 = 2;
    const SLOTS: usize = 2;

    /// A ring of one-word messages.
    struct Ring {
        lock: AtomicU32,
        head: AtomicU32,
        tail: AtomicU32,
        sleep: AtomicU32,
        slots: [AtomicU32; SLOTS],
        /// Number of wakeups that the reader has not seen.
        wakeups: AtomicU32,
    }

    impl Ring {
        fn new() -> Self {
            let word = || AtomicU32::new(0);
            let (lock, head, tail, sleep, wakeups) = (word(), word(), word(), word(), word());
            Self { lock, head, tail, sleep, slots: [word(), word()], wakeups }
        }

        fn words(&self) -> RingWords<'_, AtomicU32> {
            let Self { lock, head, tail, sleep, .. } = self;
            RingWords { lock, head, tail, sleep }
        }

        /// Adds a message if there is room and no other writer.
        fn write(&self, value: u32) -> bool {
            let words = self.words();
            if !(words.lock.load(Ordering::Relaxed) == 0 && words.lock.exchange(0, 1)) {
                return false;
            }
            let head = words.head.load(Ordering::Relaxed);
            let has_room = head.wrapping_sub(words.released()) < SLOTS as u32;
            let mut sleep = None;
            if has_room {
                self.slots[head as usize % SLOTS].store(value, Ordering::Relaxed);
                sleep = words.publish(head + 1);
            }
            words.unlock();
            if let Some(sleep) = sleep {
                self.wakeups.fetch_add(1, Ordering::AcqRel);
                words.woken(sleep);
            }
            has_room
        }

        /// Reads until the reader sleeps and no wakeup is pending. Returns the messages.
        fn read(&self) -> Vec<u32> {
            let (words, mut got, mut sleep) = (self.words(), Vec::new(), 0);
            loop {
                let mut tail = got.len() as u32;
                while words.published() != tail {
                    got.push(self.slots[tail as usize % SLOTS].load(Ordering::Relaxed));
                    tail += 1;
                    words.release(tail);
                }
                sleep += 1;
                words.sleeps(sleep);
                let is_empty = words.published() == tail;
                if is_empty && self.wakeups.swap(0, Ordering::AcqRel) == 0 {
                    return got;
                }
                sleep += 1;
                words.awakes(sleep);
            }
        }
    }

    /// A reader that stays asleep has read every message, or a wakeup is pending. Messages are
    /// whole, and those of one writer arrive in order.
    #[test]
    fn no_message_waits_for_a_sleeping_reader() {
        model(|| {
            let ring = Arc::new(Ring::new());
            let writers: Vec<_> = [(10, MESSAGES), (20, 1)]
                .into_iter()
                .map(|(first, count)| {
                    let ring = Arc::clone(&ring);
                    thread::spawn(move || {
                        (first..first + count).filter(|value| ring.write(*value)).count()
                    })
                })
                .collect();
            let mut got = ring.read();
            let written: usize = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
            // A wakeup is pending if messages are unread.
            if got.len() < written {
                assert!(ring.wakeups.load(Ordering::Acquire) > 0, "{got:?} of {written}");
                for at in got.len()..written {
                    got.push(ring.slots[at % SLOTS].load(Ordering::Relaxed));
                }
            }
            assert_eq!(got.len(), written);
            let of = |low: u32| got.iter().copied().filter(move |value| value / 10 * 10 == low);
            assert!(of(10).is_sorted() && of(10).count() + of(20).count() == written, "{got:?}");
        });
    }
}
