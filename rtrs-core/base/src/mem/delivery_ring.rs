//! Ring of messages from one process to several: its creator writes, all of them read.
//!
//! Readers copy a message and then advance the tail if it is where it was; if not, another reader
//! has taken the message, and the copy is worth nothing. So there is no lock that a reader could be
//! killed with.
//!
//! Readers poll a connection, not memory. The writer therefore keeps a *token* in the connection
//! while the ring has messages (`token_words.rs`). The writer trusts the number of reserved tokens
//! and the tail only as far as the readers harm themselves.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use super::mapping::Mapping;
use super::ring_area::{Area, RECORD_LEN, place_len};
use super::token_words::TokenWords;

/// Offsets of the words that the writer changes.
const AT_HEAD: usize = 0;
const AT_WANTED: usize = 8;
const AT_SENT: usize = 16;
const AT_CLOSED: usize = 20;
/// Offsets of the words that readers change, in another cache line.
const AT_TAIL: usize = 128;
const AT_RESERVED: usize = 136;
const AT_WAITING: usize = 140;
const AT_DATA: usize = 256;

/// Number of attempts to take a message, each of which fails because another reader took it.
const TAKE_TRIES: usize = 10_000;

/// Words and room of a ring.
struct Words {
    area: Area,
    /// Offset of the words.
    at: usize,
}

impl Words {
    fn new(mapping: &Arc<Mapping>, at: usize, len: usize) -> Self {
        Self { area: Area { mapping: Arc::clone(mapping), data: at + AT_DATA, len }, at }
    }

    fn load(&self, word: usize) -> u64 {
        self.area.mapping.long(self.at + word).load(Ordering::Acquire)
    }

    fn load_short(&self, word: usize) -> u32 {
        self.area.mapping.word(self.at + word).load(Ordering::Acquire)
    }

    fn tokens(&self) -> TokenWords<'_, AtomicU32> {
        let word = |at| self.area.mapping.word(self.at + at);
        TokenWords { sent: word(AT_SENT), reserved: word(AT_RESERVED) }
    }

    /// Whether readers have taken everything that is published.
    fn is_empty(&self) -> bool {
        self.load(AT_HEAD) == self.load(AT_TAIL)
    }
}

/// Writing end of a ring, in the process that has created it.
pub struct DeliveryWriter {
    words: Words,
    /// Position behind the messages in the ring.
    written: u64,
    /// Position behind those that readers may take.
    published: u64,
    /// Number of tokens sent; wraps.
    sent: u32,
}

impl DeliveryWriter {
    /// Returns the size of the memory of a ring of this length.
    pub(super) fn size_for(len: usize) -> usize {
        AT_DATA + len
    }

    pub(super) fn new(mapping: &Arc<Mapping>, at: usize, len: usize) -> Self {
        Self { words: Words::new(mapping, at, len), written: 0, published: 0, sent: 0 }
    }

    /// Adds a message of two parts, which [`Self::publish`] lets readers take. Returns false if
    /// there is no room.
    pub fn write(&mut self, head: &[u8], body: &[u8]) -> bool {
        let len = head.len() + body.len();
        let used = self.written.wrapping_sub(self.words.load(AT_TAIL));
        let room =
            usize::try_from(used).ok().and_then(|used| self.words.area.len.checked_sub(used));
        if room.is_none_or(|room| room < place_len(len)) {
            return false;
        }
        let area = &self.words.area;
        let at = self.written as usize;
        area.write(at, &(len as u64).to_ne_bytes());
        area.write(at + RECORD_LEN, head);
        area.write(at + RECORD_LEN + head.len(), body);
        self.written += place_len(len) as u64;
        true
    }

    /// Whether messages were written and not published.
    pub fn has_unpublished(&self) -> bool {
        self.written != self.published
    }

    /// Lets readers take all messages that were written.
    pub fn publish(&mut self) {
        self.published = self.written;
        let head = self.words.area.mapping.long(self.words.at + AT_HEAD);
        head.store(self.published, Ordering::Release);
        self.words.tokens().published();
    }

    /// Whether the connection has no token, as far as readers say. True before messages are
    /// published, and afterwards until a token is sent or readers have taken them.
    pub fn needs_token(&self) -> bool {
        let is_taken = !self.has_unpublished() && self.words.is_empty();
        !is_taken && self.lacks_token()
    }

    /// Whether the connection has no token, as far as readers say, be the ring empty or not.
    pub fn lacks_token(&self) -> bool {
        self.words.tokens().lack(self.sent)
    }

    /// Records that a token was sent.
    pub fn token_sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
        self.words.tokens().sent(self.sent);
    }

    /// Whether readers have taken everything.
    pub fn is_empty(&self) -> bool {
        self.written == self.words.load(AT_TAIL)
    }

    /// Asks readers to report when they have taken all but `left` bytes of what is published.
    /// Returns false if they have.
    pub fn want_report(&mut self, left: u64) -> bool {
        let wanted = self.published.saturating_sub(left);
        let word = self.words.area.mapping.long(self.words.at + AT_WANTED);
        word.store(wanted, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.words.load(AT_TAIL) < wanted
    }

    /// Lets readers know that no more messages come through the ring.
    pub fn close(&self) {
        let closed = self.words.area.mapping.word(self.words.at + AT_CLOSED);
        closed.store(1, Ordering::Release);
    }
}

/// Reading end of a ring, in any process.
pub struct DeliveryReader(Words);

/// A message that a reader may copy.
#[derive(Clone, Copy)]
pub struct Delivery<'a> {
    area: &'a Area,
    at: usize,
    len: usize,
}

impl Delivery<'_> {
    /// Returns the length of the message in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a message is not a collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Copies bytes from an offset on. Returns how many there were.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> usize {
        let count = self.len.saturating_sub(offset).min(bytes.len());
        self.area.read(self.at + offset, &mut bytes[..count]);
        count
    }
}

/// State of a ring after a message was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// No message is left.
    pub is_last: bool,
    /// The writer waits for a report.
    pub is_wanted: bool,
}

impl DeliveryReader {
    pub(super) fn new(mapping: &Arc<Mapping>, at: usize, len: usize) -> Self {
        Self(Words::new(mapping, at, len))
    }

    /// Whether no more messages come through the ring.
    pub fn is_closed(&self) -> bool {
        self.0.load_short(AT_CLOSED) != 0
    }

    /// Whether there is no message.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Copies the next message with `copy`, and takes it unless `keeps` is set. `copy` is called
    /// again if another reader takes the message meanwhile.
    pub fn take<T>(
        &self,
        keeps: bool,
        mut copy: impl FnMut(Delivery<'_>) -> T,
    ) -> Option<(T, Taken)> {
        let words = &self.0;
        let tail_word = words.area.mapping.long(words.at + AT_TAIL);
        for _ in 0..TAKE_TRIES {
            let (tail, head) = (words.load(AT_TAIL), words.load(AT_HEAD));
            let filled = head.wrapping_sub(tail);
            if filled == 0 {
                return None;
            }
            let mut record = [0; RECORD_LEN];
            words.area.read(tail as usize, &mut record);
            let len = u64::from_ne_bytes(record);
            let is_whole = filled <= words.area.len as u64 && len <= filled;
            if !is_whole || place_len(len as usize) as u64 > filled {
                continue;
            }
            let at = tail as usize + RECORD_LEN;
            let value = copy(Delivery { area: &words.area, at, len: len as usize });
            if keeps {
                fence(Ordering::Acquire);
                if tail_word.load(Ordering::Relaxed) == tail {
                    return Some((value, Taken::default()));
                }
                continue;
            }
            let end = tail + place_len(len as usize) as u64;
            if tail_word.compare_exchange(tail, end, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                fence(Ordering::SeqCst);
                let wanted = words.load(AT_WANTED);
                let is_wanted = tail < wanted && wanted <= end;
                let is_last = words.load(AT_HEAD) == end;
                return Some((value, Taken { is_last, is_wanted }));
            }
        }
        None
    }

    /// Runs `wait`, in which this reader waits for the connection, if the ring is empty. The system
    /// wakes one reader per token, which wakes others if there are more messages.
    pub fn wait<T>(&self, wait: impl FnOnce() -> T) -> Option<T> {
        let waiting = self.0.area.mapping.word(self.0.at + AT_WAITING);
        waiting.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let waited = self.is_empty().then(wait);
        waiting.fetch_sub(1, Ordering::SeqCst);
        waited
    }

    /// Whether readers wait although there are messages: those came without a token.
    pub fn has_overlooked(&self) -> bool {
        self.0.load_short(AT_WAITING) > 0 && !self.is_empty()
    }

    /// Reserves a token if the ring is empty. The caller takes it from the connection, where it is
    /// by then.
    pub fn reserve_token(&self) -> bool {
        self.0.tokens().reserve(|| self.is_empty())
    }
}

impl fmt::Debug for Delivery<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery").field("len", &self.len).finish_non_exhaustive()
    }
}

impl fmt::Debug for DeliveryWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeliveryWriter")
            .field("written", &self.written)
            .field("published", &self.published)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for DeliveryReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeliveryReader").field("len", &self.0.area.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::message_ring::{create_ring, open_ring};
    use super::*;

    const LEN: usize = 4096;

    fn pair() -> (DeliveryWriter, DeliveryReader) {
        let ends = create_ring("test", 1, LEN).unwrap();
        let reader = open_ring(ends.fd.as_fd(), 1, LEN).unwrap().incoming;
        (ends.outgoing, reader)
    }

    fn take(reader: &DeliveryReader, keeps: bool) -> Option<(Vec<u8>, Taken)> {
        reader.take(keeps, |delivery| {
            let (mut head, mut rest) = ([0; 2], vec![0; delivery.len()]);
            let count = delivery.read(0, &mut head) + delivery.read(2, &mut rest);
            assert_eq!(count, delivery.len());
            [&head[..count.min(2)], &rest[..count.saturating_sub(2)]].concat()
        })
    }

    fn message(number: usize) -> Vec<u8> {
        (0..number * 37 % 1500).map(|at| (at + number) as u8).collect()
    }

    #[test]
    fn messages_pass_in_order_around_the_end_and_only_when_published() {
        let (mut writer, reader) = pair();
        let (mut written, mut got) = (0, 0);
        while got < 500 {
            let bytes = message(written);
            if writer.write(&bytes[..bytes.len() / 2], &bytes[bytes.len() / 2..]) {
                written += 1;
                continue;
            }
            assert!(writer.has_unpublished() && !writer.is_empty());
            writer.publish();
            for _ in 0..(written - got).div_ceil(2) {
                assert_eq!(take(&reader, true).unwrap().0, message(got), "it stays");
                assert_eq!(take(&reader, false).unwrap().0, message(got), "{got}");
                got += 1;
            }
        }
        writer.publish();
        while let Some((bytes, _)) = take(&reader, false) {
            assert_eq!(bytes, message(got));
            got += 1;
        }
        assert!(got == written && writer.is_empty() && reader.is_empty());
        assert!(writer.write(&[1], &[]));
        assert_eq!(take(&reader, false), None, "it is not published");
    }

    #[test]
    fn the_reader_of_the_last_message_reserves_the_token() {
        let (mut writer, reader) = pair();
        assert!(writer.lacks_token() && !writer.needs_token() && !reader.reserve_token());
        for _ in 0..3 {
            writer.write(&[1], &[]);
            writer.write(&[2], &[]);
            assert!(writer.needs_token());
            writer.token_sent();
            writer.publish();
            assert!(!writer.needs_token());
            assert!(!take(&reader, false).unwrap().1.is_last && !reader.reserve_token());
            assert!(take(&reader, false).unwrap().1.is_last);
            // Another message comes before the token is reserved.
            writer.write(&[3], &[]);
            writer.publish();
            assert!(!writer.needs_token() && !reader.reserve_token() && !writer.needs_token());
            assert!(take(&reader, false).unwrap().1.is_last);
            assert!(reader.reserve_token() && writer.lacks_token() && !reader.reserve_token());
        }
    }

    #[test]
    fn one_reader_reports_when_the_writer_wants_it() {
        let (mut writer, reader) = pair();
        for number in 0..4 {
            writer.write(&[number; 8], &[]);
        }
        writer.publish();
        assert!(writer.want_report(16), "one message may be left");
        let wanted: Vec<_> =
            std::iter::from_fn(|| take(&reader, false)).map(|(_, taken)| taken.is_wanted).collect();
        assert_eq!(wanted, [false, false, true, false]);
        assert!(!writer.want_report(16), "they have been taken");
    }

    #[test]
    fn a_reader_is_told_of_others_that_wait_while_messages_are_left() {
        let (mut writer, reader) = pair();
        assert_eq!(reader.wait(|| 7), Some(7));
        reader.wait(|| {
            writer.write(&[1], &[]);
            writer.write(&[2], &[]);
            writer.publish();
            assert_eq!(reader.wait(|| 7), None, "messages are there");
            assert!(take(&reader, false).is_some() && reader.has_overlooked());
            assert!(take(&reader, false).is_some() && !reader.has_overlooked());
        });
        writer.write(&[3], &[]);
        writer.publish();
        assert!(!reader.has_overlooked(), "no reader waits");
    }

    #[test]
    fn words_that_readers_spoil_harm_readers_only() {
        let (mut writer, reader) = pair();
        writer.write(&[1], &[]);
        writer.publish();
        let (mapping, at) = (Arc::clone(&writer.words.area.mapping), writer.words.at);
        let tail = mapping.long(at + AT_TAIL);
        for spoiled in [17, 1 << 40, u64::MAX - LEN as u64] {
            tail.store(spoiled, Ordering::Relaxed);
            assert!(!writer.write(&[1], &[]), "{spoiled}");
            assert_eq!(take(&reader, false), None, "{spoiled}");
        }
        tail.store(0, Ordering::Relaxed);
        mapping.word(at + AT_RESERVED).store(1 << 20, Ordering::Relaxed);
        assert!(writer.needs_token());
        assert_eq!(take(&reader, false).unwrap().0, [1]);
    }

    #[test]
    fn readers_in_several_threads_take_each_message_once() {
        const COUNT: usize = 20_000;
        let (mut writer, reader) = pair();
        let got: Vec<Vec<usize>> = std::thread::scope(|scope| {
            let read = || {
                let mut got = Vec::new();
                while got.last() != Some(&COUNT) {
                    // The end stays for the other readers.
                    let Some((bytes, _)) = take(&reader, true) else {
                        std::thread::yield_now();
                        continue;
                    };
                    let number = |bytes: &[u8]| {
                        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                        bytes.len()
                    };
                    if bytes.len() == 9 {
                        got.push(COUNT);
                    } else if let Some((bytes, _)) = take(&reader, false) {
                        if bytes.len() == 9 {
                            got.push(COUNT);
                        } else {
                            got.push(number(&bytes));
                        }
                    }
                }
                got
            };
            let readers = [scope.spawn(read), scope.spawn(read), scope.spawn(read)];
            for number in 0..COUNT {
                let bytes = vec![number as u8; 10 + number % 90];
                while !writer.write(&bytes, &[]) {
                    std::thread::yield_now();
                }
                writer.publish();
            }
            // Each reader takes or sees one of these.
            for _ in 0..3 {
                while !writer.write(&[0; 9], &[]) {
                    std::thread::yield_now();
                }
            }
            writer.publish();
            readers.map(|reader| reader.join().unwrap()).into()
        });
        let mut lengths: Vec<usize> = got.concat().into_iter().filter(|l| *l != COUNT).collect();
        let mut expected: Vec<usize> = (0..COUNT).map(|number| 10 + number % 90).collect();
        lengths.sort_unstable();
        expected.sort_unstable();
        assert_eq!(lengths, expected);
    }
}
