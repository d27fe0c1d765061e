//! Tokens that keep a connection readable while a ring has messages, and the order of accesses.
//!
//! The writer sends a token before it publishes messages if the connection has none. The reader
//! that takes the last message reserves the token, looks again for messages, and then takes the
//! token from the connection, or gives the reservation back. The writer looks at the reservations
//! once more after it has published. A fence between the two accesses of each side lets at least
//! one of them see the other, so no message is left without a token. A token may be left without a
//! message: the reader that finds it takes it.

use crate::sync::atomic::{Ordering, fence};

use super::ring_words::Word;

/// Words for the tokens of a connection.
#[derive(Clone, Copy)]
pub(super) struct TokenWords<'a, W> {
    /// Number of tokens that were sent; wraps.
    pub(super) sent: &'a W,
    /// Number of tokens that readers have taken, or are about to take; wraps.
    pub(super) reserved: &'a W,
}

impl<W: Word> TokenWords<'_, W> {
    /// Ends the publication of messages, before the reservations are read.
    #[allow(clippy::unused_self, reason = "it is one of the steps of the protocol")]
    pub(super) fn published(&self) {
        fence(Ordering::SeqCst);
    }

    /// Whether all of this number of sent tokens are reserved.
    pub(super) fn lack(&self, sent: u32) -> bool {
        sent.wrapping_sub(self.reserved.load(Ordering::Acquire)).cast_signed() <= 0
    }

    /// Records the number of tokens that were sent.
    pub(super) fn sent(&self, sent: u32) {
        self.sent.store(sent, Ordering::Release);
    }

    /// Reserves a token if there is one, and there are no messages. It is in the connection.
    pub(super) fn reserve(&self, is_empty: impl FnOnce() -> bool) -> bool {
        loop {
            let number = self.reserved.load(Ordering::Acquire);
            let left = self.sent.load(Ordering::Acquire).wrapping_sub(number).cast_signed();
            if left <= 0 {
                return false;
            }
            if self.reserved.exchange(number, number.wrapping_add(1)) {
                break;
            }
        }
        fence(Ordering::SeqCst);
        let is_empty = is_empty();
        if !is_empty {
            self.reserved.sub(1);
        }
        is_empty
    }
}

#[cfg(all(test, loom))]
mod loom_model {
    use std::sync::Arc;

    use loom::sync::atomic::AtomicU32;
    use loom::thread;

    use super::*;
    use crate::sync::model;

    const MESSAGES: u32 = 2;

    /// Ring without content, and the number of tokens in its connection.
    #[derive(Default)]
    struct Ring {
        head: AtomicU32,
        tail: AtomicU32,
        sent: AtomicU32,
        reserved: AtomicU32,
        tokens: AtomicU32,
    }

    impl Ring {
        fn words(&self) -> TokenWords<'_, AtomicU32> {
            TokenWords { sent: &self.sent, reserved: &self.reserved }
        }

        fn is_empty(&self) -> bool {
            self.head.load(Ordering::Acquire) == self.tail.load(Ordering::Acquire)
        }

        fn write(&self) {
            let mut sent = 0;
            let ensure_token = |sent: &mut u32| {
                if self.words().lack(*sent) {
                    self.tokens.fetch_add(1, Ordering::AcqRel);
                    *sent += 1;
                    self.words().sent(*sent);
                }
            };
            for head in 1..=MESSAGES {
                ensure_token(&mut sent);
                self.head.store(head, Ordering::Release);
                self.words().published();
                if !self.is_empty() {
                    ensure_token(&mut sent);
                }
            }
        }

        fn take_tokens(&self) {
            while self.words().reserve(|| self.is_empty()) {
                assert!(self.tokens.fetch_sub(1, Ordering::AcqRel) > 0, "no token is there");
            }
        }

        /// Takes messages until none is left. Returns their number.
        fn read(&self) -> u32 {
            let mut count = 0;
            loop {
                let tail = self.tail.load(Ordering::Acquire);
                if self.head.load(Ordering::Acquire) == tail {
                    return count;
                }
                let is_taken = self
                    .tail
                    .compare_exchange(tail, tail + 1, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok();
                fence(Ordering::SeqCst);
                if is_taken {
                    count += 1;
                    if self.head.load(Ordering::Acquire) == tail + 1 {
                        self.take_tokens();
                    }
                }
            }
        }
    }

    /// When all threads are done, the connection has a token if messages are left. If none is
    /// left, a reader that looks takes all tokens.
    #[test]
    fn messages_that_are_left_have_a_token() {
        model(|| {
            let ring = Arc::new(Ring::default());
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    let ring = Arc::clone(&ring);
                    thread::spawn(move || ring.read())
                })
                .collect();
            ring.write();
            let taken: u32 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
            let tokens = ring.tokens.load(Ordering::Acquire);
            assert!(taken == MESSAGES || tokens > 0, "{taken} were taken, {tokens} tokens");
            let left = ring.read();
            assert_eq!(taken + left, MESSAGES);
            ring.take_tokens();
            assert_eq!(ring.tokens.load(Ordering::Acquire), 0);
        });
    }
}
