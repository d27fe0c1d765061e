//! Ring of messages in memory that several processes share: all of them write, its creator reads.
//!
//! The reader does not trust the writers: it reads each index and length once, checks it, and
//! copies messages out. A writer that breaks the ring makes it [`Malformed`].
//!
//! A writer that finds the ring full, or in use by another writer, is refused and must send its
//! message another way. So a writer that is killed while it writes blocks no other writer; the ring
//! then refuses all later messages. Each message carries a stamp, by which its reader can order it
//! among messages that took the other way.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate};

use super::counters::SharedCounters;
use super::mapping::{Mapping, Protection};
use super::ring_words::RingWords;

/// Room for counters before the ring.
const COUNTERS_LEN: usize = 128;
/// Offsets of the words, in different cache lines.
const AT_LOCK: usize = 128;
const AT_HEAD: usize = 256;
const AT_TAIL: usize = 384;
const AT_SLEEP: usize = 512;
const AT_DATA: usize = 640;
/// Length of the header of each message, and alignment of records.
const RECORD_LEN: usize = 8;

/// Creates counters and a ring for messages of `len` bytes in total, a power of two. Returns them
/// with the descriptor for other processes, none of which can change its size.
///
/// # Errors
/// The system's error; `InvalidInput` for any other length, or for too many counters.
pub fn create_ring(
    name: &str,
    counters: usize,
    len: usize,
) -> io::Result<(SharedCounters, RingReader, OwnedFd)> {
    let is_valid = len.is_power_of_two() && (RECORD_LEN..=1 << 30).contains(&len);
    if !is_valid || counters * 4 > COUNTERS_LEN {
        let text = format!("a ring cannot have {len} bytes and {counters} counters");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create(name, flags)?;
    ftruncate(&fd, (AT_DATA + len) as u64)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let mapping = Arc::new(Mapping::new(fd.as_fd(), AT_DATA + len, Protection::ReadWrite)?);
    let ring = Area { mapping: Arc::clone(&mapping), len };
    Ok((SharedCounters::new(mapping, counters), RingReader { ring, tail: 0, sleep: 0 }, fd))
}

/// Maps the counters and the ring that another process has created. The descriptor is not needed
/// afterwards.
///
/// # Errors
/// The system's error; `InvalidData` for memory that could be shortened while it is used, or that
/// has a different size.
pub fn open_ring(
    fd: BorrowedFd<'_>,
    counters: usize,
    len: usize,
) -> io::Result<(SharedCounters, RingWriter)> {
    let is_sealed = fcntl_get_seals(fd)?.contains(SealFlags::SHRINK);
    let size = usize::try_from(fstat(fd)?.st_size).map_err(io::Error::other)?;
    if !is_sealed || size != AT_DATA + len || counters * 4 > COUNTERS_LEN {
        let text = "the memory does not hold the counters and the ring";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mapping = Arc::new(Mapping::new(fd, size, Protection::ReadWrite)?);
    let ring = Area { mapping: Arc::clone(&mapping), len };
    Ok((SharedCounters::new(mapping, counters), RingWriter(ring)))
}

/// Memory of a ring.
struct Area {
    mapping: Arc<Mapping>,
    /// Length of the area for messages.
    len: usize,
}

impl Area {
    fn words(&self) -> RingWords<'_, AtomicU32> {
        let word = |at| self.mapping.word(at);
        let (head, tail) = (word(AT_HEAD), word(AT_TAIL));
        RingWords { lock: word(AT_LOCK), head, tail, sleep: word(AT_SLEEP) }
    }

    /// Returns the two memory ranges that hold `len` bytes at a position: offset and length of the
    /// first, and the length of the second, which is at the beginning of the ring.
    fn ranges(&self, position: u32, len: usize) -> (usize, usize, usize) {
        let at = position as usize & (self.len - 1);
        let first = len.min(self.len - at);
        (AT_DATA + at, first, len - first)
    }

    fn write(&self, position: u32, bytes: &[u8]) {
        let (at, first, _) = self.ranges(position, bytes.len());
        let (first, second) = bytes.split_at(first);
        self.mapping.write_bytes(at, first);
        self.mapping.write_bytes(AT_DATA, second);
    }

    fn read(&self, position: u32, bytes: &mut [u8]) {
        let (at, first, _) = self.ranges(position, bytes.len());
        let (first, second) = bytes.split_at_mut(first);
        self.mapping.read_bytes(at, first);
        self.mapping.read_bytes(AT_DATA, second);
    }
}

/// Returns the length of a message's record in the ring.
fn place_len(len: usize) -> usize {
    RECORD_LEN + len.next_multiple_of(RECORD_LEN)
}

/// Converts a length, which is below that of a ring.
fn word(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The message is in the ring, and the reader finds it.
    Done,
    /// The message is in the ring, and the writer must wake the reader and then call
    /// [`RingWriter::woken`].
    Asleep(WakeToken),
    /// The ring has no room, or another writer is using it.
    Refused,
}

/// Identifies one sleep of the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeToken(u32);

/// Writing end of a ring, in any process.
pub struct RingWriter(Area);

impl RingWriter {
    /// Adds a message that consists of these parts, with the stamp that `stamp` returns.
    pub fn write<'a>(
        &self,
        parts: impl Iterator<Item = &'a [u8]> + Clone,
        stamp: impl FnOnce() -> u32,
    ) -> Written {
        let words = self.0.words();
        let len = parts.clone().map(<[u8]>::len).sum();
        if len > self.0.len || !words.try_lock() {
            return Written::Refused;
        }
        let (head, tail) = (words.published(), words.released());
        let used = head.wrapping_sub(tail) as usize;
        if used + place_len(len) > self.0.len {
            words.unlock();
            return Written::Refused;
        }
        let mut at = head.wrapping_add(word(RECORD_LEN));
        for part in parts {
            self.0.write(at, part);
            at = at.wrapping_add(word(part.len()));
        }
        let record = u64::from(stamp()) << 32 | u64::from(word(len));
        self.0.write(head, &record.to_ne_bytes());
        let sleep = words.publish(head.wrapping_add(word(place_len(len))));
        words.unlock();
        sleep.map_or(Written::Done, |sleep| Written::Asleep(WakeToken(sleep)))
    }

    /// Records that the reader has been woken.
    pub fn woken(&self, token: WakeToken) {
        self.0.words().woken(token.0);
    }

    /// Returns the position after all messages added so far: their total length, which wraps.
    pub fn position(&self) -> u32 {
        self.0.words().published()
    }
}

/// Reading end of a ring, in the process that created it.
pub struct RingReader {
    ring: Area,
    /// Position of the next message.
    tail: u32,
    sleep: u32,
}

/// The next message of a ring.
#[derive(Debug)]
pub struct Front {
    len: usize,
    stamp: u32,
}

impl Front {
    /// Returns the length of the message in bytes, as claimed by its writer: at most that of the
    /// ring.
    #[allow(clippy::len_without_is_empty, reason = "a message is not a collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the stamp of the message.
    pub fn stamp(&self) -> u32 {
        self.stamp
    }
}

/// A ring with an index or a length that no correct writer produces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "malformed ring: a record of {place} bytes at position {position}, of {published} published"
)]
pub struct Malformed {
    position: u32,
    published: u32,
    place: u64,
}

impl RingReader {
    /// Whether a message is waiting.
    pub fn has_input(&self) -> bool {
        self.ring.words().published() != self.tail
    }

    /// Returns the position of the next message: the total length of all released messages.
    pub fn position(&self) -> u32 {
        self.tail
    }

    /// Returns the next message, if there is one.
    ///
    /// # Errors
    /// See [`Malformed`].
    pub fn front(&self) -> Result<Option<Front>, Malformed> {
        let published = self.ring.words().published().wrapping_sub(self.tail);
        if published == 0 {
            return Ok(None);
        }
        let malformed = |place| Malformed { position: self.tail, published, place };
        let available = published as usize;
        if available > self.ring.len || !available.is_multiple_of(RECORD_LEN) {
            return Err(malformed(0));
        }
        let mut record = [0; RECORD_LEN];
        self.ring.read(self.tail, &mut record);
        let [a, b, c, d, stamp @ ..] = record;
        let len = u32::from_ne_bytes([a, b, c, d]) as usize;
        let place = place_len(len);
        if place > available {
            return Err(malformed(place as u64));
        }
        Ok(Some(Front { len, stamp: u32::from_ne_bytes(stamp) }))
    }

    /// Copies bytes of a message, starting at an offset, until `bytes` is full. Panics beyond the
    /// end of the message.
    pub fn read(&self, front: &Front, offset: usize, bytes: &mut [u8]) {
        self.check(front, offset, bytes.len());
        self.ring.read(self.tail.wrapping_add(word(RECORD_LEN + offset)), bytes);
    }

    /// Copies the bytes of a message from an offset to the end of the message. Panics if the offset
    /// is beyond the end.
    pub fn read_from(&self, front: &Front, offset: usize) -> Vec<u8> {
        self.check(front, offset, 0);
        let len = front.len - offset;
        let mut bytes = Vec::with_capacity(len);
        let position = self.tail.wrapping_add(word(RECORD_LEN + offset));
        let (at, first, second) = self.ring.ranges(position, len);
        self.ring.mapping.append_bytes(at, first, &mut bytes);
        self.ring.mapping.append_bytes(AT_DATA, second, &mut bytes);
        bytes
    }

    fn check(&self, front: &Front, offset: usize, len: usize) {
        assert!(offset + len <= front.len, "no {len} bytes at {offset} of {front:?}");
    }

    /// Frees the space of a message.
    #[allow(clippy::needless_pass_by_value, reason = "it is no longer the next message")]
    pub fn release(&mut self, front: Front) {
        self.tail = self.tail.wrapping_add(word(place_len(front.len)));
        self.ring.words().release(self.tail);
    }

    /// Prepares a sleep: the writer of the next message has to wake the reader. Returns false, and
    /// stays awake, if a message is waiting.
    pub fn prepare_sleep(&mut self) -> bool {
        self.arm();
        let is_empty = !self.has_input();
        if !is_empty {
            self.awake();
        }
        is_empty
    }

    /// Makes the writer of each message wake the reader, whether or not messages are waiting.
    pub fn arm(&mut self) {
        if self.sleep.is_multiple_of(2) {
            self.sleep = self.sleep.wrapping_add(1);
            self.ring.words().sleeps(self.sleep);
        }
    }

    /// Ends a sleep.
    pub fn awake(&mut self) {
        if !self.sleep.is_multiple_of(2) {
            self.sleep = self.sleep.wrapping_add(1);
            self.ring.words().awakes(self.sleep);
        }
    }
}

impl fmt::Debug for RingWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingWriter").field("len", &self.0.len).finish_non_exhaustive()
    }
}

impl fmt::Debug for RingReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingReader")
            .field("len", &self.ring.len)
            .field("tail", &self.tail)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 4096;

    fn pair() -> (RingWriter, RingReader, OwnedFd) {
        let (_, reader, fd) = create_ring("test", 1, LEN).unwrap();
        let (_, writer) = open_ring(fd.as_fd(), 1, LEN).unwrap();
        (writer, reader, fd)
    }

    fn write(writer: &RingWriter, message: &[u8], stamp: u32) -> Written {
        let (a, b) = message.split_at(message.len() / 3);
        writer.write([a, b].into_iter(), || stamp)
    }

    fn read(reader: &mut RingReader) -> Option<(Vec<u8>, u32)> {
        let front = reader.front().unwrap()?;
        let (bytes, stamp) = (reader.read_from(&front, 0), front.stamp());
        let mut head = vec![0; front.len().min(3)];
        reader.read(&front, 0, &mut head);
        assert!(bytes.starts_with(&head) && bytes.len() == front.len());
        reader.release(front);
        Some((bytes, stamp))
    }

    fn message(number: usize) -> Vec<u8> {
        (0..number * 37 % 1500).map(|at| (at + number) as u8).collect()
    }

    #[test]
    fn messages_pass_whole_and_in_order_around_the_end_of_the_ring() {
        let (writer, mut reader, _fd) = pair();
        // Positions wrap too.
        let begin = 0_u32.wrapping_sub(3 * 4096);
        reader.ring.words().head.store(begin, std::sync::atomic::Ordering::Relaxed);
        reader.tail = begin;
        reader.ring.words().release(begin);
        let (mut written, mut got) = (0, 0);
        while got < 1000 {
            while write(&writer, &message(written), written as u32) != Written::Refused {
                written += 1;
            }
            assert!(reader.has_input());
            let unread = written - got;
            for _ in 0..unread.div_ceil(2) {
                assert_eq!(read(&mut reader), Some((message(got), got as u32)), "{got}");
                got += 1;
            }
        }
        while got < written {
            assert_eq!(read(&mut reader), Some((message(got), got as u32)));
            got += 1;
        }
        assert_eq!(read(&mut reader), None);
        assert_eq!(reader.position(), writer.position());
    }

    #[test]
    fn a_message_is_refused_without_room_or_while_another_writer_is_active() {
        let (writer, mut reader, _fd) = pair();
        let largest = vec![7; LEN - RECORD_LEN];
        assert_eq!(write(&writer, &[7; LEN - RECORD_LEN + 1], 0), Written::Refused);
        assert_eq!(write(&writer, &largest, 0), Written::Done);
        assert_eq!(write(&writer, &[], 0), Written::Refused);
        assert_eq!(read(&mut reader), Some((largest, 0)));
        // A writer was killed.
        assert!(writer.0.words().try_lock());
        assert_eq!(write(&writer, &[1], 0), Written::Refused);
        assert_eq!(read(&mut reader), None);
        writer.0.words().unlock();
        assert_eq!(write(&writer, &[1], 0), Written::Done);
    }

    #[test]
    fn the_first_message_to_a_sleeping_reader_wakes_it() {
        let (writer, mut reader, _fd) = pair();
        assert!(reader.prepare_sleep());
        let Written::Asleep(first) = write(&writer, &[1], 0) else { panic!("it sleeps") };
        // Until the reader has been woken, later writers are asked to wake it too.
        assert_eq!(write(&writer, &[2], 0), Written::Asleep(first));
        writer.woken(first);
        assert_eq!(write(&writer, &[3], 0), Written::Done);
        reader.awake();
        assert!(!reader.prepare_sleep(), "messages are waiting");
        assert_eq!(write(&writer, &[4], 0), Written::Done);
        assert_eq!((0..4).filter_map(|_| read(&mut reader)).count(), 4);
        assert!(reader.prepare_sleep());
        // A late writer does not end a later sleep.
        writer.woken(first);
        assert!(matches!(write(&writer, &[5], 0), Written::Asleep(second) if second != first));
    }

    #[test]
    fn a_malformed_ring_is_an_error() {
        let (writer, mut reader, fd) = pair();
        let put = |at: usize, word: u32| {
            rustix::io::pwrite(&fd, &word.to_ne_bytes(), at as u64).unwrap();
        };
        for published in [4097, 4104, 4, u32::MAX, 1 << 31] {
            put(AT_HEAD, published);
            assert!(reader.front().is_err(), "{published}");
        }
        put(AT_HEAD, 16);
        for len in [9, 4088, u32::MAX] {
            put(AT_DATA, len);
            assert!(reader.front().is_err(), "{len}");
        }
        put(AT_DATA, 8);
        assert_eq!(read(&mut reader).map(|(bytes, _)| bytes.len()), Some(8));
        // Writers do not trust the ring either.
        put(AT_HEAD, 1 << 31);
        assert_eq!(write(&writer, &[1], 0), Written::Refused);
        let text = reader.front().unwrap_err().to_string();
        assert!(text.starts_with("malformed ring: a record of 0 bytes at position 16"), "{text}");
    }

    #[test]
    fn memory_that_could_shrink_or_has_another_size_is_refused() {
        let (_writer, _reader, fd) = pair();
        assert!(ftruncate(&fd, 0).is_err());
        assert!(open_ring(fd.as_fd(), 1, 2 * LEN).is_err());
        assert!(open_ring(fd.as_fd(), COUNTERS_LEN, LEN).is_err());
        let plain = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&plain, (AT_DATA + LEN) as u64).unwrap();
        let error = open_ring(plain.as_fd(), 1, LEN).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(create_ring("test", 1, 5000).is_err() && create_ring("test", 33, LEN).is_err());
    }

    #[test]
    fn writers_in_several_threads_do_not_mix_their_messages() {
        let (writer, mut reader, _fd) = pair();
        const COUNT: usize = 3000;
        std::thread::scope(|scope| {
            for number in 1..=3_u8 {
                let writer = &writer;
                scope.spawn(move || {
                    for at in 0..COUNT {
                        let message = vec![number; at % 200];
                        while write(writer, &message, at as u32) == Written::Refused {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let (mut next, mut empty) = ([0; 4], 0);
            while next.iter().sum::<usize>() + empty < 3 * COUNT {
                let Some((bytes, stamp)) = read(&mut reader) else {
                    std::thread::yield_now();
                    continue;
                };
                // Empty messages do not reveal their writer.
                let Some(number) = bytes.first().map(|byte| usize::from(*byte)) else {
                    empty += 1;
                    continue;
                };
                assert!(bytes.iter().all(|byte| usize::from(*byte) == number));
                next[number] += 1;
                let expected = next[number] + (next[number] - 1) / 199;
                assert_eq!(stamp as usize, expected, "writer {number}");
            }
        });
    }
}
