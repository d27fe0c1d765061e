//! The front end between a workload and its client: what is asked for goes through it as NBD.
//!
//! nbd-bridge works on the core's ring, so a core with a front has a real one, and a pair of
//! sockets in one thread. The bridge has one end, as a core's connection of /dev/nbdX; the other is
//! here, and does what the kernel does with requests and replies. No virtual time passes between
//! the two: whoever turns the core turns both until neither has anything to do. Where the bytes are
//! cut follows from the seed. A process that dies takes bridge, ring and sockets with it.

use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use nbd_bridge::kernel::FIRST_BYTES;
use nbd_bridge::wire::{SimpleReply, cmd, cmd_flags};
use nbd_bridge::{Bridge, BridgeConfig, Request, export_info};
use rtrs_client::SessionDevice;
use rtrs_core::block::{BlockDevice, Completion, Geometry, Io, IoOp};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::rt::Ring;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

/// Largest request: more than a workload asks for at once.
const PAYLOAD_MAX: u32 = 64 << 10;
/// Bytes of the bridge's buffers: the least it takes for one connection and such requests.
pub(super) const BUFFER_BYTES: usize = 780 << 10;
/// Rounds of one turn after which bridge and socket count as going round in circles.
const ROUNDS_MAX: u32 = 100_000;

/// One core's front end, and who uses it.
#[derive(Debug)]
pub(super) struct Front {
    geometry: Geometry,
    bridge: Bridge,
    ring: Rc<Ring>,
    socket: UnixStream,
    prng: Prng,
    /// Bytes of requests that the socket has not taken.
    out: Vec<u8>,
    /// Bytes of a reply that is not whole.
    input: Vec<u8>,
    asked: BTreeMap<u64, Io>,
    done: VecDeque<Completion>,
    turns: u32,
}

impl Front {
    /// A front of a session's device on this core.
    pub(super) fn new(now: Instant, device: SessionDevice, mut prng: Prng) -> Self {
        let geometry = device.geometry().clone();
        let mut export = export_info("vol", &geometry);
        export.max_payload = PAYLOAD_MAX;
        let ring = Ring::new(64).expect("io_uring");
        let config = BridgeConfig {
            buffer_bytes: BUFFER_BYTES,
            connections_max: 1,
            // Few, so that requests wait for rows.
            requests_max: prng.range(2..=64) as u32,
            touched_bytes: 0,
        };
        let mut bridge = Bridge::new(&ring, Box::new(device), export, config)
            .expect("a session's device can be served");
        let (socket, theirs) = UnixStream::pair().expect("a pair of sockets");
        socket.set_nonblocking(true).expect("a socket that does not block");
        assert!(bridge.adopt_kernel(now, theirs.into()), "the first connection is taken");
        Self {
            geometry,
            bridge,
            ring,
            socket,
            prng,
            out: Vec::new(),
            input: FIRST_BYTES.to_vec(),
            asked: BTreeMap::new(),
            done: VecDeque::new(),
            turns: 0,
        }
    }

    /// How many of so many bytes go at once.
    fn cut(&mut self, len: usize) -> usize {
        if self.prng.chance(Ratio::new(1, 2)) { len } else { 1 + self.prng.index(len) }
    }

    fn send(&mut self) -> bool {
        if self.out.is_empty() {
            return false;
        }
        let count = self.cut(self.out.len());
        match self.socket.write(&self.out[..count]) {
            Ok(count) => {
                self.out.drain(..count);
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
        let mut at = 0;
        while let Some(used) = self.take_reply(at) {
            at += used;
        }
        self.input.drain(..at);
        true
    }

    /// Takes the reply at `at`, if all of it is there; returns how long it is.
    fn take_reply(&mut self, at: usize) -> Option<usize> {
        let bytes = &self.input[at..];
        let head = match SimpleReply::decode(bytes) {
            Ok(head) => head,
            Err(error) if error.is_short() => return None,
            Err(error) => panic!("the bridge's replies are out of step: {error}"),
        };
        let tag = head.cookie;
        let status = status_of(head.error);
        let mut used = SimpleReply::LEN;
        // Whose end it is, and whether it is one, the workload judges.
        let asked = self.asked.get(&tag).filter(|io| io.op == IoOp::Read && status.is_ok());
        if let Some(buf) = asked.and_then(|io| io.buf.as_ref()) {
            let data = bytes.get(used..used + buf.len())?;
            buf.copy_in(0, data);
            used += data.len();
        }
        self.asked.remove(&tag);
        self.done.push_back(Completion { tag, status });
        Some(used)
    }
}

/// What NBD's error means; it has fewer than there are.
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
        };
        // No flag that was not offered: the kernel flushes after such a write.
        let flags = if io.flags.fua { cmd_flags::FUA } else { 0 };
        let (cookie, offset, len) = (io.tag, io.offset, io.len);
        let head = Request { flags, command, cookie, offset, len };
        self.out.extend_from_slice(&head.encode());
        if let (IoOp::Write, Some(buf)) = (io.op, &io.buf) {
            self.out.extend_from_slice(&buf.to_vec());
        }
        self.asked.insert(cookie, io);
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        let mut rounds = 0;
        loop {
            let mut any = self.send();
            any |= self.ring.turn().expect("io_uring");
            any |= self.bridge.turn(now);
            any |= self.receive();
            if !any && !self.ring.has_submissions() {
                break;
            }
            rounds += 1;
            assert!(rounds < ROUNDS_MAX, "bridge and socket do not come to rest");
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
        self.bridge.deadline()
    }
}
