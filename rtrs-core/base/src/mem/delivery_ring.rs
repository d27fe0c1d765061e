//! A ring of messages from one process to several: its creator writes, and all the others read.
//!
//! Readers copy a message and then advance the tail if it has not moved; if it has, another reader
//! has taken the message, and the copy is discarded. So there is no lock that a reader could hold
//! when it is killed.
//!
//! A body longer than a quarter of the ring is stored in a second area, so that the area for
//! ordinary messages stays small. Its record in the ring holds its position there.
//!
//! Readers poll a connection, not memory. The writer therefore keeps a *token* in the connection
//! while the ring has messages (`token_words.rs`). The writer trusts the words that readers change
//! only where a wrong value harms no one but readers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use super::long_bodies::{LongBodies, LongBody};
use super::mapping::Mapping;
use super::ring_area::{Area, RECORD_LEN, place_len};
use super::token_words::{TokenWords, is_after};

/// Offsets of the words that the writer changes.
const AT_HEAD: usize = 0;
const AT_WANTED: usize = 8;
const AT_ANNOUNCED: usize = 16;
const AT_SENT: usize = 20;
/// Offsets of the words that readers change, in another cache line.
const AT_TAIL: usize = 128;
const AT_TAKEN: usize = 136;
const AT_WAITS: usize = 140;
const AT_DATA: usize = 256;

/// Length of the field for a long body's position.
const POSITION_LEN: usize = 8;
/// Granularity at which the system reclaims memory.
const PAGE_LEN: usize = 4096;
/// Number of attempts to take a message. An attempt fails when another reader takes the message.
const TAKE_TRIES: usize = 10_000;

/// Location of a ring in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// Offset of the words.
    pub(super) at: usize,
    /// Length of the area for messages.
    pub(super) len: usize,
    /// Length of the area for long bodies.
    pub(super) long_len: usize,
}

impl Place {
    fn long_at(self) -> usize {
        (self.at + AT_DATA + self.len).next_multiple_of(PAGE_LEN)
    }

    /// Returns the offset at which the ring ends.
    pub(super) fn end(self) -> usize {
        self.long_at() + self.long_len
    }
}

/// Words and data areas of a ring.
struct Words {
    area: Area,
    /// Area for long bodies.
    long: Area,
    /// Offset of the words.
    at: usize,
}

impl Words {
    fn new(mapping: &Arc<Mapping>, place: Place) -> Self {
        let area = |data, len| Area { mapping: Arc::clone(mapping), data, len };
        let long = area(place.long_at(), place.long_len);
        Self { area: area(place.at + AT_DATA, place.len), long, at: place.at }
    }

    fn load(&self, word: usize) -> u64 {
        self.area.mapping.long(self.at + word).load(Ordering::Acquire)
    }

    fn short(&self, word: usize) -> &AtomicU32 {
        self.area.mapping.word(self.at + word)
    }

    fn tokens(&self) -> TokenWords<'_, AtomicU32> {
        let [announced, sent, taken] = [AT_ANNOUNCED, AT_SENT, AT_TAKEN].map(|at| self.short(at));
        TokenWords { announced, sent, taken }
    }
}

/// Writing end of a ring, in the process that created it.
pub struct DeliveryWriter {
    words: Words,
    /// Position after the last message in the ring.
    written: u64,
    /// Position after the last message that readers may take.
    published: u64,
    /// Number of the newest token that was sent; wraps.
    token: u32,
    /// Number of the newest token, sent or not.
    announced: u32,
    long: LongBodies,
}

impl DeliveryWriter {
    pub(super) fn new(mapping: &Arc<Mapping>, place: Place) -> Self {
        let (words, long) = (Words::new(mapping, place), LongBodies::default());
        Self { words, written: 0, published: 0, token: 0, announced: 0, long }
    }

    /// Adds a message in two parts, which [`Self::publish`] makes available to readers. Returns
    /// false if there is no room.
    pub fn write(&mut self, head: &[u8], body: &[u8]) -> bool {
        let tail = self.words.load(AT_TAIL);
        let is_long = self.is_long(body.len());
        let position = self.long.position().to_ne_bytes();
        let (inline, long) = if is_long { (&position[..], body) } else { (body, &[][..]) };
        let len = head.len() + inline.len();
        if self.room(tail) < place_len(len) {
            return false;
        }
        let end = self.written + place_len(len) as u64;
        if is_long && !self.long.write(&self.words.long, tail, LongBody { bytes: long, end }) {
            return false;
        }
        let area = &self.words.area;
        let at = self.written as usize;
        area.write(at, &((long.len() as u64) << 32 | len as u64).to_ne_bytes());
        area.write(at + RECORD_LEN, head);
        area.write(at + RECORD_LEN + head.len(), inline);
        self.written = end;
        true
    }

    fn is_long(&self, len: usize) -> bool {
        len > self.words.area.len / 4
    }

    /// Returns the free space: 0 if the tail is invalid, which no correct reader writes.
    fn room(&self, tail: u64) -> usize {
        let used = usize::try_from(self.written.wrapping_sub(tail)).unwrap_or(usize::MAX);
        self.words.area.len.saturating_sub(used)
    }

    /// Whether any messages have been written but not published.
    pub fn has_unpublished(&self) -> bool {
        self.written != self.published
    }

    /// Lets readers take all messages written so far.
    pub fn publish(&mut self) {
        self.published = self.written;
        let head = self.words.area.mapping.long(self.words.at + AT_HEAD);
        head.store(self.published, Ordering::Release);
        self.words.tokens().published();
    }

    /// Whether messages need a token. True before messages are published, and afterwards until a
    /// token is sent or readers have taken them.
    pub fn needs_token(&self) -> bool {
        !self.is_empty() && self.words.tokens().is_taken(self.token)
    }

    /// Announces the next token and returns its number. `None` if readers have taken everything in
    /// the meantime.
    pub fn next_token(&mut self) -> Option<u32> {
        self.announced = self.announced.wrapping_add(1);
        let number = self.announced;
        self.words.tokens().announce(number, || !self.is_empty()).then_some(number)
    }

    /// Records that the next token was sent.
    pub fn token_sent(&mut self) {
        self.token = self.announced;
        self.words.tokens().sent(self.token);
    }

    /// Records that the next token could not be sent: readers do not wait for it.
    pub fn token_failed(&mut self) {
        self.words.tokens().sent(self.announced);
    }

    /// Whether readers have taken everything.
    pub fn is_empty(&self) -> bool {
        self.written == self.words.load(AT_TAIL)
    }

    /// Asks readers to report once there is room for a body of `len` bytes, which was refused, and
    /// half of the ring is free. Everything must be published. Returns false if there is room
    /// already.
    pub fn want_room(&mut self, len: usize) -> bool {
        let mut wanted = self.published.saturating_sub(self.words.area.len as u64 / 2);
        if self.is_long(len) {
            wanted = wanted.max(self.long.end_with_room(&self.words.long, len));
        }
        let word = self.words.area.mapping.long(self.words.at + AT_WANTED);
        word.store(wanted, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.words.load(AT_TAIL) < wanted
    }
}

/// Reading end of a ring, in any of the processes.
pub struct DeliveryReader(Words);

/// A message that a reader may copy.
#[derive(Clone, Copy)]
pub struct Delivery<'a> {
    words: &'a Words,
    /// Position and length of the part in the ring.
    at: usize,
    len: usize,
    /// Position and length of the rest, in the area for long bodies.
    long_at: usize,
    long_len: usize,
    /// Position after the message in the ring.
    end: u64,
}

impl<'a> Delivery<'a> {
    /// Returns the message at the tail of a ring with `filled` bytes; `None` if it is malformed.
    fn at_tail(words: &'a Words, tail: u64, filled: u64) -> Option<Self> {
        let mut record = [0; RECORD_LEN];
        words.area.read(tail as usize, &mut record);
        let record = u64::from_ne_bytes(record);
        let (len, long_len) = ((record & 0xffff_ffff) as usize, (record >> 32) as usize);
        let (at, place) = ((tail as usize).wrapping_add(RECORD_LEN), place_len(len) as u64);
        let is_inside = filled <= words.area.len as u64 && place <= filled;
        if !is_inside || long_len > words.long.len {
            return None;
        }
        let end = tail.wrapping_add(place);
        let message = Self { words, at, len, long_at: 0, long_len, end };
        if long_len == 0 {
            return Some(message);
        }
        let len = len.checked_sub(POSITION_LEN)?;
        let mut position = [0; POSITION_LEN];
        words.area.read(at.wrapping_add(len), &mut position);
        Some(Self { len, long_at: u64::from_ne_bytes(position) as usize, ..message })
    }

    /// Returns the length of the message in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a message is not a collection")]
    pub fn len(&self) -> usize {
        self.len + self.long_len
    }

    /// Copies bytes, starting at an offset. Returns their number.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> usize {
        let count = self.len().saturating_sub(offset).min(bytes.len());
        let first = self.len.saturating_sub(offset).min(count);
        let (inline, long) = bytes[..count].split_at_mut(first);
        self.words.area.read(self.at.wrapping_add(offset), inline);
        let long_offset = offset.saturating_sub(self.len);
        self.words.long.read(self.long_at.wrapping_add(long_offset), long);
        count
    }
}

/// State of a ring after a message was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// No message is left.
    pub is_last: bool,
    /// The writer is waiting for a report.
    pub is_wanted: bool,
}

/// A ring with an index or a length that the writer never produces: a program has overwritten it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed ring: a program has overwritten its contents")]
pub struct Overwritten;

/// The right to wait for the connection in a way that wakes only one reader at a time.
#[derive(Debug)]
pub struct WaitsAlone<'a>(&'a AtomicU32);

impl Drop for WaitsAlone<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl DeliveryReader {
    pub(super) fn new(mapping: &Arc<Mapping>, place: Place) -> Self {
        Self(Words::new(mapping, place))
    }

    /// Whether there is no message.
    pub fn is_empty(&self) -> bool {
        self.0.load(AT_HEAD) == self.0.load(AT_TAIL)
    }

    /// Copies the next message with `copy`, and takes it unless `keeps` is set. `copy` is called
    /// again if another reader has taken the message.
    ///
    /// # Errors
    /// See [`Overwritten`].
    pub fn take<T>(
        &self,
        keeps: bool,
        mut copy: impl FnMut(Delivery<'_>) -> T,
    ) -> Result<Option<(T, Taken)>, Overwritten> {
        let words = &self.0;
        let tail_word = words.area.mapping.long(words.at + AT_TAIL);
        let mut is_overwritten = false;
        for _ in 0..TAKE_TRIES {
            let (tail, head) = (words.load(AT_TAIL), words.load(AT_HEAD));
            let filled = head.wrapping_sub(tail);
            if filled == 0 {
                return Ok(None);
            }
            // Another reader may have taken the message, and the writer may have reused its space.
            let message = Delivery::at_tail(words, tail, filled);
            is_overwritten = message.is_none();
            let Some(message) = message else { continue };
            let value = copy(message);
            if keeps {
                fence(Ordering::Acquire);
                if tail_word.load(Ordering::Relaxed) == tail {
                    return Ok(Some((value, Taken::default())));
                }
                continue;
            }
            let end = message.end;
            if tail_word.compare_exchange(tail, end, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                fence(Ordering::SeqCst);
                let wanted = words.load(AT_WANTED);
                let is_wanted = tail < wanted && wanted <= end;
                let is_last = words.load(AT_HEAD) == end;
                return Ok(Some((value, Taken { is_last, is_wanted })));
            }
        }
        if is_overwritten { Err(Overwritten) } else { Ok(None) }
    }

    /// Returns the right to wait alone. `None` if another reader holds it or was killed holding it.
    pub fn try_wait_alone(&self) -> Option<WaitsAlone<'_>> {
        let word = self.0.short(AT_WAITS);
        (word.swap(1, Ordering::AcqRel) == 0).then(|| WaitsAlone(word))
    }

    /// Returns the number of the newest token, which may or may not be in the connection.
    pub fn newest_token(&self) -> u32 {
        self.0.tokens().newest()
    }

    /// Claims all tokens up to a number. If this returns true, the caller takes them from the
    /// connection. Otherwise the tokens announce messages.
    pub fn claim_tokens(&self, number: u32) -> bool {
        self.0.tokens().claim(number, || self.is_empty())
    }

    /// Whether a reader has claimed a token.
    pub fn is_token_taken(&self, number: u32) -> bool {
        self.0.tokens().is_taken(number)
    }

    /// Whether a token was sent. If not, it may still arrive later.
    pub fn is_token_sent(&self, number: u32) -> bool {
        self.0.tokens().is_sent(number)
    }
}

/// Whether a token precedes another one.
pub fn is_older_token(number: u32, other: u32) -> bool {
    is_after(other, number)
}

impl fmt::Debug for Delivery<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery").field("len", &self.len()).finish_non_exhaustive()
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

    use super::super::message_ring::{RingSizes, create_ring, open_ring};
    use super::*;

    const LEN: usize = 4096;
    const SIZES: RingSizes = RingSizes { counters: 1, ring: LEN, long: 4 * LEN };

    fn pair() -> (DeliveryWriter, DeliveryReader) {
        let ends = create_ring("test", SIZES).unwrap();
        let reader = open_ring(ends.fd.as_fd(), SIZES).unwrap().incoming;
        (ends.outgoing, reader)
    }

    fn take(reader: &DeliveryReader, keeps: bool) -> Option<(Vec<u8>, Taken)> {
        let taken = reader.take(keeps, |delivery| {
            let (mut head, mut rest) = ([0; 2], vec![0; delivery.len()]);
            let count = delivery.read(0, &mut head) + delivery.read(2, &mut rest);
            assert_eq!(count, delivery.len());
            [&head[..count.min(2)], &rest[..count.saturating_sub(2)]].concat()
        });
        taken.unwrap()
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
    fn long_bodies_pass_in_order_beside_others() {
        let (mut writer, reader) = pair();
        let message = |number: usize| {
            let is_long = number.is_multiple_of(3);
            let len = if is_long { LEN / 4 + number * 97 % (3 * LEN) } else { number };
            (0..len + 2).map(|at| (at + number) as u8).collect::<Vec<u8>>()
        };
        let (mut written, mut got) = (0, 0);
        while got < 500 {
            let bytes = message(written);
            if writer.write(&bytes[..2], &bytes[2..]) {
                written += 1;
                continue;
            }
            writer.publish();
            for _ in 0..(written - got).div_ceil(2) {
                assert_eq!(take(&reader, true).unwrap().0, message(got), "it stays");
                assert_eq!(take(&reader, false).unwrap().0, message(got), "{got}");
                got += 1;
            }
        }
        assert!(!writer.write(&[], &[0; 4 * LEN + 1]), "longer than the area");
    }

    #[test]
    fn the_reader_of_the_last_message_claims_the_token() {
        let (mut writer, reader) = pair();
        assert!(!writer.needs_token());
        for number in [1, 3, 5] {
            writer.write(&[1], &[]);
            writer.write(&[2], &[]);
            assert!(writer.needs_token());
            assert_eq!(writer.next_token(), Some(number));
            // From now on, the token may arrive at any time.
            assert_eq!(reader.newest_token(), number);
            assert!(!reader.is_token_sent(number));
            writer.token_sent();
            writer.publish();
            assert!(!writer.needs_token() && reader.is_token_sent(number));
            assert!(!take(&reader, false).unwrap().1.is_last);
            assert!(take(&reader, false).unwrap().1.is_last);
            assert!(reader.claim_tokens(number));
            // A number is not reused, because readers may have claimed it.
            assert_eq!((writer.next_token(), reader.newest_token()), (None, number + 1));
        }
    }

    #[test]
    fn a_claim_beside_a_new_message_makes_the_writer_send_another_token() {
        let (mut writer, reader) = pair();
        writer.write(&[1], &[]);
        writer.next_token();
        writer.token_sent();
        writer.publish();
        assert!(take(&reader, false).unwrap().1.is_last);
        writer.write(&[2], &[]);
        assert!(!writer.needs_token(), "the first one is still there");
        writer.publish();
        assert!(!reader.claim_tokens(1), "it announces the second message");
        assert!(writer.needs_token());
        assert_eq!(writer.next_token(), Some(2));
        writer.token_sent();
        assert!(!writer.needs_token());
        // The reader that claimed the first token long ago has taken the second one.
        assert!(!reader.claim_tokens(2) && writer.needs_token());
    }

    #[test]
    fn one_reader_reports_when_there_is_room() {
        let (mut writer, reader) = pair();
        let reports = |reader: &DeliveryReader| {
            let all = std::iter::from_fn(|| take(reader, false));
            all.map(|(_, taken)| taken.is_wanted).collect::<Vec<_>>()
        };
        while writer.write(&[1; 504], &[]) {}
        writer.publish();
        assert!(writer.want_room(504));
        let fourth: Vec<_> = (1..=8).map(|number| number == 4).collect();
        assert_eq!(reports(&reader), fourth);
        assert!(!writer.want_room(504), "they have been taken");
        // Long bodies: the report comes with the message that makes room for the next body.
        for _ in 0..4 {
            assert!(writer.write(&[], &[1; LEN]));
        }
        assert!(!writer.write(&[], &[1; 2 * LEN]));
        writer.publish();
        assert!(writer.want_room(2 * LEN));
        assert_eq!(reports(&reader), [false, true, false, false]);
        assert!(!writer.want_room(2 * LEN) && writer.write(&[], &[1; 2 * LEN]));
    }

    #[test]
    fn one_reader_waits_alone() {
        let (_writer, reader) = pair();
        for _ in 0..2 {
            let alone = reader.try_wait_alone();
            assert!(alone.is_some());
            assert!((0..2).all(|_| reader.try_wait_alone().is_none()));
        }
        // The reader was killed.
        std::mem::forget(reader.try_wait_alone());
        assert!(reader.try_wait_alone().is_none());
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
            assert_eq!(reader.take(false, |_| ()), Err(Overwritten), "{spoiled}");
        }
        tail.store(u64::MAX - 6, Ordering::Relaxed);
        assert_eq!(reader.take(false, |_| ()), Err(Overwritten));
        tail.store(0, Ordering::Relaxed);
        mapping.word(at + AT_TAKEN).store(1 << 20, Ordering::Relaxed);
        assert!(writer.needs_token());
        // Lengths of a long body without a position, and beyond its area.
        for record in [1 << 32 | 1, (4 * LEN as u64 + 1) << 32 | 8] {
            mapping.long(at + AT_DATA).store(record, Ordering::Relaxed);
            assert_eq!(reader.take(false, |_| ()), Err(Overwritten), "{record:#x}");
        }
        mapping.long(at + AT_DATA).store(1, Ordering::Relaxed);
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
                    // The last messages are left for the other readers.
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
