//! Front end between a workload and its client: all requests pass through it as NBD.
//!
//! nbd-bridge works on the core's ring, so a core with a front has a real ring and a socket pair in
//! one thread. The bridge has one end, like a core's connection to /dev/nbdX; this module has the
//! other end and plays the kernel's part: it sends requests and receives replies. No virtual time
//! passes between the two: a turn of the core runs both until neither has work left. The byte
//! positions at which messages are cut are determined by the seed. The bridge, ring and sockets
//! disappear along with the process.
//!
//! A workload that uses parts of blocks does not identify itself as the kernel, and half of its
//! writes are sent twice, the second time without the first bytes, so that the copy begins within a
//! block. Since changes to a block are executed in order of arrival, the copy changes nothing;
//! otherwise it could restore the block's earlier content.

mod stalls;

use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use nbd_bridge::kernel::FIRST_BYTES;
use nbd_bridge::wire::{SimpleReply, cmd, cmd_flags};
use nbd_bridge::{Bridge, BridgeConfig, BufferPools, Request, Seat};
use rtrs_client::SessionDevice;
use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoOp};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::rt::Ring;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};

pub(super) use stalls::SECTORS as EXTRA_SECTORS;
use stalls::Stalls;

use super::options::MachineOptions;

/// Largest request: more than a workload submits at once, unless it uses long requests.
const PAYLOAD_MAX: u32 = 64 << 10;
/// Largest long request.
const LONG_MAX: u32 = 1 << 20;
/// Additional buffers that the bridges of two volumes share.
const SHARED: usize = 13;
/// Returns the size of the bridge's buffers in bytes: the minimum for its connections and for
/// requests of that length, or more if the buffers are shared.
pub(super) const fn buffer_bytes(way: Use) -> usize {
    let connections = if way.drops { CONNECTIONS_MAX } else { 1 };
    let long = if way.long { 2 * LONG_MAX as usize } else { 0 };
    let shared = if way.shares { SHARED } else { 0 };
    (1 + 2 * connections + shared) * (260 << 10) + long
}

/// Use of a front.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    /// Whether users occasionally drop their connections.
    pub(super) drops: bool,
    /// Whether requests are longer than a buffer of the bridge.
    pub(super) long: bool,
    /// Whether parts of blocks are written too.
    pub(super) parts: bool,
    /// Whether each core's connection is a separate user rather than part of a kernel device.
    pub(super) alone: bool,
    /// Whether users stop in the middle of payloads, and where the sectors of their extra writes
    /// start.
    pub(super) stalls: Option<u64>,
    /// Maximum time that a request may wait for an abandoned change.
    pub(super) deferred_max: Option<Duration>,
    /// Whether the session has another volume, whose front uses the same buffer pool.
    pub(super) shares: bool,
    /// Virtual machine that uses the device instead of the front.
    pub(super) machine: Option<MachineOptions>,
}
/// Bit in the cookie of the second copy of a write.
const TWICE: u64 = 1 << 63;
/// Bytes that the client sends before its first request, except the export name.
const HELLO: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x03";
/// Length of the greeting, and of the size and flags in the answer.
const WELCOME: usize = 18 + 10;
/// Maximum number of connections per core, including closed ones with writes in flight.
const CONNECTIONS_MAX: usize = 12;
/// Maximum number of rounds in a turn before the bridge and socket are considered to be looping.
const ROUNDS_MAX: u32 = 100_000;
const HALF: Ratio = Ratio::new(1, 2);

/// One end of an NBD connection.
#[derive(Debug)]
pub(super) struct End(UnixStream);

/// Returns a fresh connection: the user's end and the bridge's.
pub(super) fn connection() -> (End, End) {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    (End(ours), End(theirs))
}

/// Front end of one core, and its user.
#[derive(Debug)]
pub(super) struct Front {
    geometry: Geometry,
    bridge: Bridge,
    ring: Rc<Ring>,
    socket: UnixStream,
    prng: Prng,
    /// Bytes of requests that the socket has not accepted.
    out: Vec<u8>,
    /// Number of bytes that the socket has accepted.
    sent: u64,
    /// Flushes in `out`, and the number of bytes up to their ends.
    unsent: VecDeque<(u64, u64)>,
    /// Flushes that were sent since the last query.
    begun: Vec<u64>,
    /// Bytes of an incomplete reply.
    input: Vec<u8>,
    asked: BTreeMap<u64, Io>,
    /// Writes that are sent twice, with the result of the first copy.
    twice: Option<BTreeMap<u64, Option<IoStatus>>>,
    stalls: Option<Stalls>,
    /// Bytes that come before the first reply.
    welcome: usize,
    done: VecDeque<Completion>,
    turns: u32,
}

impl Front {
    /// Creates a front for a session's device on this core.
    pub(super) fn new(
        now: Instant,
        device: SessionDevice,
        mut prng: Prng,
        seat: Seat,
        way: Use,
        pools: &BufferPools,
    ) -> Self {
        let geometry = device.geometry().clone();
        let ring = Ring::new(64).expect("io_uring");
        let config = BridgeConfig {
            buffer_bytes: buffer_bytes(way),
            connections_max: if way.drops { CONNECTIONS_MAX } else { 1 },
            // Few rows, so that requests have to wait for them.
            requests_max: prng.range(2..=64) as u32,
            touched_bytes: 0,
            max_payload: if way.long { LONG_MAX } else { PAYLOAD_MAX },
            deferred_max: way.deferred_max,
            shared_writes: false,
        };
        let mut bridge = Bridge::seated(&ring, pools, Box::new(device), "vol", config, seat)
            .expect("a session's device can be served");
        let (socket, theirs) = UnixStream::pair().expect("a pair of sockets");
        socket.set_nonblocking(true).expect("a socket that does not block");
        let alone = way.parts || way.alone || way.stalls.is_some();
        if alone {
            bridge.adopt(now, theirs.into());
        } else {
            let taken = bridge.adopt_kernel(now, theirs.into());
            assert!(taken, "the first connection is taken");
        }
        Self {
            geometry,
            bridge,
            ring,
            socket,
            out: if alone { [HELLO, b"vol"].concat() } else { Vec::new() },
            sent: 0,
            unsent: VecDeque::new(),
            begun: Vec::new(),
            input: if alone { Vec::new() } else { FIRST_BYTES.to_vec() },
            asked: BTreeMap::new(),
            twice: way.parts.then(BTreeMap::new),
            stalls: way.stalls.map(|base| Stalls::new(base, prng.fork())),
            welcome: if alone { WELCOME } else { 0 },
            done: VecDeque::new(),
            turns: 0,
            prng,
        }
    }

    /// Whether this core's bridge has room for one more connection.
    pub(super) fn has_room(&self) -> bool {
        self.bridge.connections() + 1 < CONNECTIONS_MAX
    }

    /// Hands a connection to this core's bridge.
    pub(super) fn adopt(&mut self, now: Instant, End(theirs): End) {
        assert!(self.bridge.adopt_kernel(now, theirs.into()), "there is room for a connection");
    }

    /// Closes the connection of this front's user and continues over `ours`. Returns the old
    /// connection, which closes when it is dropped.
    pub(super) fn reconnect(&mut self, End(ours): End) -> End {
        ours.set_nonblocking(true).expect("a socket that does not block");
        self.out.clear();
        self.unsent.clear();
        self.begun.clear();
        self.stalls.iter_mut().for_each(Stalls::closed);
        self.input = FIRST_BYTES.to_vec();
        self.asked.clear();
        self.done.clear();
        End(std::mem::replace(&mut self.socket, ours))
    }

    /// Chooses at random how many bytes to transfer at a time.
    fn cut(&mut self, len: usize) -> usize {
        if self.prng.chance(HALF) { len } else { 1 + self.prng.index(len) }
    }

    /// Takes the flushes that were sent since the last call. Neither the bridge nor a kernel device
    /// knows about a flush that waits behind the payload of another request.
    pub(super) fn take_begun(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.begun)
    }

    fn send(&mut self, now: Instant) -> bool {
        let stalled = self.stalls.as_mut().is_some_and(|stalls| stalls.has_stopped(now));
        if self.out.is_empty() || stalled {
            return false;
        }
        let room = self.stalls.as_ref().map(|stalls| stalls.room(self.out.len()));
        let count = self.cut(room.unwrap_or(self.out.len()));
        match self.socket.write(&self.out[..count]) {
            Ok(count) => {
                self.out.drain(..count);
                self.sent += count as u64;
                while let Some((tag, _)) = self.unsent.pop_front_if(|(_, end)| *end <= self.sent) {
                    self.begun.push(tag);
                }
                self.stalls.iter_mut().for_each(|stalls| stalls.sent(now, count));
                count > 0
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => panic!("the bridge closed its socket: {error}"),
        }
    }

    fn receive(&mut self) -> bool {
        let mut bytes = [0; 16 << 10];
        let count = self.cut(bytes.len());
        match self.socket.read(&mut bytes[..count]) {
            Ok(0) => panic!("the bridge closed its socket"),
            Ok(count) => self.input.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(error) => panic!("the bridge closed its socket: {error}"),
        }
        let mut at = self.welcome.min(self.input.len());
        self.welcome -= at;
        while let Some(used) = self.take_reply(at) {
            at += used;
        }
        self.input.drain(..at);
        true
    }

    /// Takes the reply at `at`, if it is complete, and returns its length.
    fn take_reply(&mut self, at: usize) -> Option<usize> {
        let bytes = &self.input[at..];
        let head = match SimpleReply::decode(bytes) {
            Ok(head) => head,
            Err(error) if error.is_short() => return None,
            Err(error) => panic!("the bridge's replies are out of step: {error}"),
        };
        if self.stalls.as_mut().is_some_and(|stalls| stalls.take_reply(head.cookie)) {
            return Some(SimpleReply::LEN);
        }
        let tag = head.cookie & !TWICE;
        let mut status = status_of(head.error);
        if let Some(first) = self.twice.as_mut().and_then(|twice| twice.get_mut(&tag)) {
            match first {
                None => {
                    *first = Some(status);
                    return Some(SimpleReply::LEN);
                }
                Some(first) if !first.is_ok() => status = *first,
                Some(_) => {}
            }
        }
        self.twice.as_mut().map(|twice| twice.remove(&tag));
        let mut used = SimpleReply::LEN;
        // The workload judges whether the reply belongs to a request.
        let asked = self.asked.get(&tag).filter(|io| io.op == IoOp::Read && status.is_ok());
        if let Some(buf) = asked.and_then(|io| io.buf.as_ref()) {
            let data = bytes.get(used..used + buf.len())?;
            buf.copy_in(0, data);
            used += data.len();
        }
        self.asked.remove(&tag);
        self.done.push_back(Completion::new(tag, status));
        Some(used)
    }
}

/// Maps an NBD error to a status; NBD has fewer errors.
fn status_of(error: u32) -> IoStatus {
    use nbd_bridge::wire::NbdError;
    match NbdError::from_code(error) {
        None if error == 0 => IoStatus::Ok,
        Some(NbdError::Perm) => IoStatus::ReadOnly,
        Some(NbdError::Inval) => IoStatus::Invalid,
        Some(NbdError::NoSpc) => IoStatus::NoSpace,
        Some(NbdError::NoMem) => IoStatus::NoMemory,
        Some(NbdError::NotSup) => IoStatus::Unsupported,
        _ => IoStatus::Io,
    }
}

impl BlockDevice for Front {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        let command = match io.op {
            IoOp::Read => cmd::READ,
            IoOp::Write => cmd::WRITE,
            IoOp::Flush => cmd::FLUSH,
            IoOp::Discard => cmd::TRIM,
            IoOp::WriteZeroes => cmd::WRITE_ZEROES,
            IoOp::Extents => cmd::BLOCK_STATUS,
        };
        // Only offered flags are used: if FUA is not offered, the kernel flushes after such a
        // write.
        let flags = if io.flags.fua { cmd_flags::FUA } else { 0 };
        if let Some(stalls) = self.stalls.as_mut().filter(|_| io.op == IoOp::Write) {
            stalls.submit_extra(&mut self.out);
            stalls.payload(self.out.len() + Request::LEN, io.len as usize);
        }
        let (cookie, len) = (io.tag, io.len);
        let offset = if io.op == IoOp::Flush { 0 } else { io.offset };
        let head = Request { flags, command, cookie, offset, len };
        self.out.extend_from_slice(&head.encode());
        if io.op == IoOp::Flush {
            self.unsent.push_back((cookie, self.sent + self.out.len() as u64));
        }
        if let (IoOp::Write, Some(buf)) = (io.op, &io.buf) {
            let bytes = buf.to_vec();
            self.out.extend_from_slice(&bytes);
            if let Some(twice) = self.twice.as_mut().filter(|_| self.prng.chance(HALF)) {
                let from = 1 + self.prng.below(u64::from(len) - 1) as u32;
                let (offset, len) = (offset + u64::from(from), len - from);
                let part = Request { cookie: cookie | TWICE, offset, len, ..head };
                self.out.extend_from_slice(&part.encode());
                self.out.extend_from_slice(&bytes[from as usize..]);
                twice.insert(cookie, None);
            }
        }
        self.asked.insert(cookie, io);
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        let mut rounds = 0;
        loop {
            let mut any = self.send(now);
            any |= self.ring.turn().expect("io_uring");
            any |= self.bridge.turn(now);
            any |= self.receive();
            if !any && !self.ring.has_submissions() {
                break;
            }
            rounds += 1;
            assert!(rounds < ROUNDS_MAX, "bridge and socket do not become idle");
        }
        self.turns += 1;
        if self.turns.is_multiple_of(16) {
            self.bridge.check();
        }
        rounds > 0
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    fn inflight(&self) -> usize {
        self.asked.len() + self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        let stalls = self.stalls.as_ref().filter(|_| !self.out.is_empty());
        earliest(self.bridge.deadline(), stalls.and_then(Stalls::resumes))
    }
}
