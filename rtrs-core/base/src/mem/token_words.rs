//! Tokens that keep a connection readable while a ring has messages, and the order of accesses.
//!
//! A token is a packet with a number, one higher than the previous token's. The writer sends a
//! token before it publishes messages, unless readers have left the newest one in the connection. A
//! reader that finds no message *claims* the newest token: it raises the number of taken tokens,
//! looks for messages again, and then takes all tokens up to the claimed one from the connection.
//! The writer checks that number once more after publishing. A fence between each side's two
//! accesses lets at least one side see the other's write, so no message is left without a token.
//!
//! The number of taken tokens only grows, and any reader may take any token that it has claimed.
//! Another reader may have claimed the same token and taken it. The late reader then finds a newer
//! token, which announces messages. It claims that token too, and asks the writer for another one
//! if there are messages. A reader that is killed after its claim leaves a token without messages,
//! which the next reader takes.

use crate::sync::atomic::{Ordering, fence};

use super::ring_words::Word;

/// Number of attempts to raise the number of taken tokens. An attempt fails only if another reader
/// has raised it.
const RAISE_TRIES: usize = 1000;

/// Words for the tokens of a connection. All are token numbers, which wrap around.
#[derive(Clone, Copy)]
pub(super) struct TokenWords<'a, W> {
    /// Newest token that was sent or is about to be sent.
    pub(super) announced: &'a W,
    /// Newest token that was sent.
    pub(super) sent: &'a W,
    /// Newest token that a reader has claimed.
    pub(super) taken: &'a W,
}

impl<W: Word> TokenWords<'_, W> {
    /// Announces the token to be sent next. Returns false if there are no messages: the reader that
    /// took the last one may not have seen the token. In that case, no token is given this number:
    /// a reader may have claimed it before the messages that a later token announces.
    pub(super) fn announce(&self, number: u32, has_messages: impl FnOnce() -> bool) -> bool {
        self.announced.store(number, Ordering::Release);
        fence(Ordering::SeqCst);
        let is_sent_next = has_messages();
        if !is_sent_next {
            self.sent(number);
        }
        is_sent_next
    }

    /// Records that a token was sent.
    pub(super) fn sent(&self, number: u32) {
        self.sent.store(number, Ordering::Release);
    }

    /// Orders the publication of messages before the next read of the number of taken tokens.
    #[allow(clippy::unused_self, reason = "it is one of the steps of the protocol")]
    pub(super) fn published(&self) {
        fence(Ordering::SeqCst);
    }

    /// Whether a reader has claimed a token.
    pub(super) fn is_taken(&self, number: u32) -> bool {
        !is_after(number, self.taken.load(Ordering::Acquire))
    }

    /// Whether a token was sent.
    pub(super) fn is_sent(&self, number: u32) -> bool {
        !is_after(number, self.sent.load(Ordering::Acquire))
    }

    /// Returns the newest token. It may be in the connection even if a reader has claimed it: that
    /// reader leaves it there if it finds a message.
    pub(super) fn newest(&self) -> u32 {
        self.announced.load(Ordering::Acquire)
    }

    /// Claims all tokens up to a number. Returns true if the caller must take them, because they
    /// announce no messages.
    pub(super) fn claim(&self, number: u32, is_empty: impl FnOnce() -> bool) -> bool {
        let is_claimed = self.raise(number);
        fence(Ordering::SeqCst);
        is_claimed && is_empty()
    }

    fn raise(&self, number: u32) -> bool {
        for _ in 0..RAISE_TRIES {
            let taken = self.taken.load(Ordering::Acquire);
            let newest = if is_after(number, taken) { number } else { taken };
            if self.taken.exchange(taken, newest) {
                return true;
            }
        }
        false
    }
}

/// Whether token `number` is newer than token `other`.
pub(super) fn is_after(number: u32, other: u32) -> bool {
    number.wrapping_sub(other).cast_signed() > 0
}

#[cfg(all(test, loom))]
mod loom_model {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use loom::sync::atomic::{AtomicBool, AtomicU32};
    use loom::thread;

    use super::*;
    use crate::sync::{Mutex, model};

    const MESSAGES: u32 = 2;

    /// A ring without contents, and its connection.
    struct Ring {
        head: AtomicU32,
        tail: AtomicU32,
        announced: AtomicU32,
        sent: AtomicU32,
        taken: AtomicU32,
        /// Tokens in the connection.
        tokens: Mutex<VecDeque<u32>>,
        /// Whether a reader has asked for another token.
        is_asked: AtomicBool,
    }

    impl Ring {
        fn new() -> Self {
            let word = || AtomicU32::new(0);
            let (head, tail, announced, sent, taken) = (word(), word(), word(), word(), word());
            let (tokens, is_asked) = (Mutex::new(VecDeque::new()), AtomicBool::new(false));
            Self { head, tail, announced, sent, taken, tokens, is_asked }
        }

        fn words(&self) -> TokenWords<'_, AtomicU32> {
            let Self { announced, sent, taken, .. } = self;
            TokenWords { announced, sent, taken }
        }

        fn is_empty(&self) -> bool {
            self.head.load(Ordering::Acquire) == self.tail.load(Ordering::Acquire)
        }

        /// Sends a token, if there are messages before `written`.
        fn send_token(&self, number: &mut u32, written: u32) {
            let has_messages = || self.tail.load(Ordering::Acquire) != written;
            let next = self.announced.load(Ordering::Relaxed) + 1;
            if self.words().announce(next, has_messages) {
                self.tokens.lock().push_back(next);
                *number = next;
                self.words().sent(next);
            }
        }

        /// Publishes all messages, and answers readers that ask. Returns the number of tokens.
        fn write(&self) -> u32 {
            let mut number = 0;
            for head in 1..=MESSAGES {
                if self.words().is_taken(number) {
                    self.send_token(&mut number, head);
                }
                self.head.store(head, Ordering::Release);
                self.words().published();
                if !self.is_empty() && self.words().is_taken(number) {
                    self.send_token(&mut number, head);
                }
            }
            self.answer(&mut number);
            number
        }

        /// Sends a token if a reader has asked for one.
        fn answer(&self, number: &mut u32) {
            if self.is_asked.swap(false, Ordering::AcqRel) && !self.is_empty() {
                self.send_token(number, MESSAGES);
            }
        }

        fn next_token(&self) -> Option<u32> {
            self.tokens.lock().front().copied()
        }

        /// Takes the tokens up to a number, as readers do.
        fn take_tokens(&self, number: u32) {
            if !self.words().claim(number, || self.is_empty()) {
                return;
            }
            loop {
                let got = self.tokens.lock().pop_front();
                let Some(got) = got else { return };
                if is_after(number, got) {
                    continue;
                }
                if got != number && !self.words().claim(got, || self.is_empty()) {
                    // Loom does not order a store after another thread's swap.
                    self.is_asked.swap(true, Ordering::AcqRel);
                }
                return;
            }
        }

        /// Takes a message, and the tokens if it is the last. Returns false if there is none.
        fn take(&self) -> bool {
            let tail = self.tail.load(Ordering::Acquire);
            if self.head.load(Ordering::Acquire) == tail {
                return false;
            }
            let is_taken = self
                .tail
                .compare_exchange(tail, tail + 1, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
            fence(Ordering::SeqCst);
            if is_taken && self.head.load(Ordering::Acquire) == tail + 1 {
                self.take_tokens(self.words().newest());
            }
            true
        }

        /// Receives once. Without a message, takes the token that has made the connection readable.
        fn receive(&self) {
            if !self.take()
                && let Some(number) = self.next_token()
                && self.is_empty()
            {
                self.take_tokens(number);
            }
        }
    }

    /// Checks what is left when all threads are done: messages have a token, once the writer has
    /// answered. Without messages, the next calls leave no token.
    fn check(ring: &Ring, mut number: u32) {
        ring.answer(&mut number);
        let has_token = ring.next_token().is_some();
        let words = [&ring.head, &ring.tail, &ring.announced, &ring.sent, &ring.taken];
        let words = words.map(|word| word.load(Ordering::Acquire));
        let state = format!("head, tail, announced, sent, taken {words:?}; token {number}");
        assert!(ring.is_empty() || has_token, "messages are left without a token: {state}");
        while !ring.is_empty() {
            ring.take();
        }
        // A real call continues until it finds none.
        for _ in 0..2 * MESSAGES {
            ring.receive();
        }
        assert_eq!(ring.next_token(), None, "a token is left without messages");
    }

    fn run(readers: [fn(&Ring); 2]) {
        model(move || {
            let ring = Arc::new(Ring::new());
            let readers = readers.map(|read| {
                let ring = Arc::clone(&ring);
                thread::spawn(move || read(&ring))
            });
            let number = ring.write();
            for reader in readers {
                reader.join().unwrap();
            }
            check(&ring, number);
        });
    }

    fn read(ring: &Ring) {
        ring.receive();
        ring.receive();
    }

    /// A reader that is killed after its claim.
    fn claim_and_end(ring: &Ring) {
        let words = ring.words();
        words.claim(words.newest(), || ring.is_empty());
    }

    #[test]
    fn messages_that_are_left_have_a_token() {
        run([read, read]);
    }

    #[test]
    fn a_killed_reader_leaves_a_token_that_the_next_one_takes() {
        run([read, claim_and_end]);
    }
}
