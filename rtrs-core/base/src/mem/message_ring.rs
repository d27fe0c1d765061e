//! Ring of messages in memory shared by several processes: all write, and its creator reads.
//!
//! The reader does not trust the writers: it reads each index and length once, checks it, and
//! copies messages out. A writer that breaks the ring makes it [`Malformed`].
//!
//! A writer that finds the ring full, or in use by another writer, is refused and must send its
//! message another way. So a writer that is killed while writing blocks no other writer; the ring
//! then refuses all later messages. Each message carries a stamp, by which the reader can order it
//! among messages that were sent another way.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate};

use super::counters::SharedCounters;
use super::delivery_ring::{DeliveryReader, DeliveryWriter, Place};
use super::mapping::{Mapping, Protection};
use super::ring_area::{Area, RECORD_LEN, place_len};
use super::ring_words::RingWords;

/// Room for counters before the ring.
const COUNTERS_LEN: usize = 128;
/// Offsets of the words, in different cache lines.
const AT_LOCK: usize = 128;
const AT_HEAD: usize = 256;
const AT_TAIL: usize = 384;
const AT_SLEEP: usize = 512;
const AT_DATA: usize = 640;

/// Creator's ends of the memory that it shares with other processes.
#[derive(Debug)]
pub struct OwnEnds {
    /// Counters, initially zero.
    pub counters: SharedCounters,
    /// Ring for messages from other processes.
    pub incoming: RingReader,
    /// Ring for messages to other processes.
    pub outgoing: DeliveryWriter,
    /// Descriptor of the memory, for other processes, none of which can change its size.
    pub fd: OwnedFd,
}

/// Other processes' ends of the memory that its creator shares with them.
#[derive(Debug)]
pub struct OtherEnds {
    /// Counters.
    pub counters: SharedCounters,
    /// Ring for messages to the creator.
    pub outgoing: RingWriter,
    /// Ring for messages from the creator.
    pub incoming: DeliveryReader,
}

/// Sizes of the memory that a process shares with others.
#[derive(Clone, Copy, Debug)]
pub struct RingSizes {
    /// Number of counters.
    pub counters: usize,
    /// Length of each of the two rings, a power of two.
    pub ring: usize,
    /// Length of the area for the creator's long messages, a power of two.
    pub long: usize,
}

impl RingSizes {
    fn is_valid(self) -> bool {
        let is_length = |len: usize| len.is_power_of_two() && (RECORD_LEN..=1 << 30).contains(&len);
        is_length(self.ring) && is_length(self.long) && self.counters * 4 <= COUNTERS_LEN
    }

    fn second(self) -> Place {
        Place { at: AT_DATA + self.ring, len: self.ring, long_len: self.long }
    }

    fn first(self, mapping: &Arc<Mapping>) -> Area {
        Area { mapping: Arc::clone(mapping), data: AT_DATA, len: self.ring }
    }

    fn total(self) -> usize {
        self.second().end()
    }
}

/// Creates counters and two rings.
///
/// # Errors
/// The system's error; `InvalidInput` for invalid sizes.
pub fn create_ring(name: &str, sizes: RingSizes) -> io::Result<OwnEnds> {
    if !sizes.is_valid() {
        let text = format!("a ring cannot have these sizes: {sizes:?}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create(name, flags)?;
    ftruncate(&fd, sizes.total() as u64)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let mapping = Arc::new(Mapping::new(fd.as_fd(), sizes.total(), Protection::ReadWrite)?);
    let incoming = RingReader { ring: sizes.first(&mapping), tail: 0, sleep: 0 };
    let outgoing = DeliveryWriter::new(&mapping, sizes.second());
    let counters = SharedCounters::new(mapping, sizes.counters);
    Ok(OwnEnds { counters, incoming, outgoing, fd })
}

/// Maps the counters and the rings that another process has created. The descriptor is not needed
/// afterwards.
///
/// # Errors
/// The system's error; `InvalidData` for memory that could be shortened while in use, or that has a
/// different size.
pub fn open_ring(fd: BorrowedFd<'_>, sizes: RingSizes) -> io::Result<OtherEnds> {
    let is_sealed = fcntl_get_seals(fd)?.contains(SealFlags::SHRINK);
    let size = usize::try_from(fstat(fd)?.st_size).map_err(io::Error::other)?;
    if !is_sealed || size != sizes.total() || !sizes.is_valid() {
        let text = "the memory does not hold the counters and the rings";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mapping = Arc::new(Mapping::new(fd, size, Protection::ReadWrite)?);
    let outgoing = RingWriter(sizes.first(&mapping));
    let incoming = DeliveryReader::new(&mapping, sizes.second());
    Ok(OtherEnds { counters: SharedCounters::new(mapping, sizes.counters), outgoing, incoming })
}

fn words(area: &Area) -> RingWords<'_, AtomicU32> {
    let word = |at| area.mapping.word(at);
    let (head, tail) = (word(AT_HEAD), word(AT_TAIL));
    RingWords { lock: word(AT_LOCK), head, tail, sleep: word(AT_SLEEP) }
}

/// Converts a length, which is less than that of a ring.
fn word(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The message is in the ring, and the reader will find it.
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
    /// Adds a message consisting of these parts, with the stamp that `stamp` returns.
    pub fn write<'a>(
        &self,
        parts: impl Iterator<Item = &'a [u8]> + Clone,
        stamp: impl FnOnce() -> u32,
    ) -> Written {
        let words = words(&self.0);
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
            self.0.write(at as usize, part);
            at = at.wrapping_add(word(part.len()));
        }
        let record = u64::from(stamp()) << 32 | u64::from(word(len));
        self.0.write(head as usize, &record.to_ne_bytes());
        let sleep = words.publish(head.wrapping_add(word(place_len(len))));
        words.unlock();
        sleep.map_or(Written::Done, |sleep| Written::Asleep(WakeToken(sleep)))
    }

    /// Records that the reader has been woken.
    pub fn woken(&self, token: WakeToken) {
        words(&self.0).woken(token.0);
    }

    /// Returns the position after all messages added so far: their total length, which wraps.
    pub fn position(&self) -> u32 {
        words(&self.0).published()
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
    /// Returns the length of the message in bytes, as claimed by its writer: at most the ring's
    /// length.
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
        words(&self.ring).published() != self.tail
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
        let published = words(&self.ring).published().wrapping_sub(self.tail);
        if published == 0 {
            return Ok(None);
        }
        let malformed = |place| Malformed { position: self.tail, published, place };
        let available = published as usize;
        if available > self.ring.len || !available.is_multiple_of(RECORD_LEN) {
            return Err(malformed(0));
        }
        let mut record = [0; RECORD_LEN];
        self.ring.read(self.tail as usize, &mut record);
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
        self.ring.read(self.position_of(offset), bytes);
    }

    /// Copies the bytes of a message from an offset to the end of the message. Panics if the offset
    /// is beyond the end.
    pub fn read_from(&self, front: &Front, offset: usize) -> Vec<u8> {
        self.check(front, offset, 0);
        let len = front.len - offset;
        let mut bytes = Vec::with_capacity(len);
        self.ring.append(self.position_of(offset), len, &mut bytes);
        bytes
    }

    fn position_of(&self, offset: usize) -> usize {
        self.tail.wrapping_add(word(RECORD_LEN + offset)) as usize
    }

    fn check(&self, front: &Front, offset: usize, len: usize) {
        assert!(offset + len <= front.len, "no {len} bytes at {offset} of {front:?}");
    }

    /// Frees the space of a message.
    #[allow(clippy::needless_pass_by_value, reason = "it is no longer the next message")]
    pub fn release(&mut self, front: Front) {
        self.tail = self.tail.wrapping_add(word(place_len(front.len)));
        words(&self.ring).release(self.tail);
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
            words(&self.ring).sleeps(self.sleep);
        }
    }

    /// Ends a sleep.
    pub fn awake(&mut self) {
        if !self.sleep.is_multiple_of(2) {
            self.sleep = self.sleep.wrapping_add(1);
            words(&self.ring).awakes(self.sleep);
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
    const SIZES: RingSizes = RingSizes { counters: 1, ring: LEN, long: LEN };

    fn pair() -> (RingWriter, RingReader, OwnedFd) {
        let OwnEnds { incoming, fd, .. } = create_ring("test", SIZES).unwrap();
        let OtherEnds { outgoing, .. } = open_ring(fd.as_fd(), SIZES).unwrap();
        (outgoing, incoming, fd)
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
        words(&reader.ring).head.store(begin, std::sync::atomic::Ordering::Relaxed);
        reader.tail = begin;
        words(&reader.ring).release(begin);
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
        assert!(words(&writer.0).try_lock());
        assert_eq!(write(&writer, &[1], 0), Written::Refused);
        assert_eq!(read(&mut reader), None);
        words(&writer.0).unlock();
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
        let other = [
            RingSizes { ring: 2 * LEN, ..SIZES },
            RingSizes { long: 2 * LEN, ..SIZES },
            RingSizes { counters: 33, ..SIZES },
        ];
        assert!(other.iter().all(|sizes| open_ring(fd.as_fd(), *sizes).is_err()));
        let plain = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&plain, SIZES.total() as u64).unwrap();
        let error = open_ring(plain.as_fd(), SIZES).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        for sizes in [RingSizes { ring: 5000, ..SIZES }, other[2]] {
            assert!(create_ring("test", sizes).is_err(), "{sizes:?}");
        }
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
