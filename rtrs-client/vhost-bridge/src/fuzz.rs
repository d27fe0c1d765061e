//! Bodies of the fuzz targets: nothing that a monitor sends, and nothing that its guest writes to a
//! ring, causes a panic, an access outside the guest's memory, or a wait.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rtrs_core::block::Geometry;
use rtrs_core::mem::TruncationAlarm;
use rtrs_core::rt::mailbox;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::BackendReqHandler;
use vm_memory::{Bytes, GuestAddress};

use crate::chain::Chain;
use crate::exchange::{Exchange, Wait};
use crate::fault::Fault;
use crate::inflight::{Area, AreaSize};
use crate::memory::{FilePart, GuestMemory, GuestRegion};
use crate::monitor::Monitor;
use crate::request::parse;
use crate::shared::Shared;
use crate::vring::{RingSetup, Vring};

/// Guest address of the start of the guest's memory.
const MEMORY_AT: u64 = 0x1_0000;
const MEMORY_LEN: u64 = 0x8000;
/// Number of descriptors of the ring.
const SIZE: u16 = 16;
const AVAILABLE_AT: u64 = 0x200;
const USED_AT: u64 = 0x300;

fn memory_file(len: u64) -> File {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&file, len).expect("memory");
    File::from(file)
}

/// Device, and the requests that it has taken from its ring.
struct RingEnds {
    memory: Arc<GuestMemory>,
    alarm: Arc<TruncationAlarm>,
    area: Area,
    ring: Option<Vring>,
    inflight: Vec<u16>,
    chain: Chain,
    geometry: Geometry,
}

impl RingEnds {
    fn new() -> Self {
        let alarm = TruncationAlarm::new().expect("an alarm");
        let file = memory_file(MEMORY_LEN);
        let half = MEMORY_LEN / 2;
        // Two regions, so that a piece of memory may span both.
        let region = |offset| {
            let part = FilePart { file: &file, offset, len: half };
            GuestRegion::map(MEMORY_AT + offset, part, &alarm).expect("a mapping")
        };
        let memory = GuestMemory::from_regions(vec![region(0), region(half)]).expect("memory");
        let size = AreaSize { rings: 1, descriptors: SIZE };
        let (area, _file) = Area::create(size, &alarm).expect("an area");
        let geometry = Geometry {
            discard: true,
            discard_granularity: 512,
            write_zeroes: true,
            ..Geometry::plain(1 << 20)
        };
        let (ring, inflight, chain) = (None, Vec::new(), Chain::default());
        let mut ends =
            Self { memory: Arc::new(memory), alarm, area, ring, inflight, chain, geometry };
        ends.restart(false);
        ends
    }

    /// Starts the ring as the next process would.
    fn restart(&mut self, event_idx: bool) {
        self.inflight.clear();
        let setup = RingSetup {
            size: SIZE.into(),
            descriptors: GuestAddress(MEMORY_AT),
            available: GuestAddress(MEMORY_AT + AVAILABLE_AT),
            used: GuestAddress(MEMORY_AT + USED_AT),
            base: 0,
            event_idx,
            memory: Arc::clone(&self.memory),
            alarm: Arc::clone(&self.alarm),
            record: self.area.record(0),
            log: None,
        };
        // A ring that cannot start is a legal outcome; later steps then do nothing.
        self.ring = Vring::start(setup).ok();
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let at = at % MEMORY_LEN;
        let room = usize::try_from(MEMORY_LEN - at).unwrap_or(0);
        let bytes = &bytes[..bytes.len().min(room)];
        self.memory.write_slice(bytes, GuestAddress(MEMORY_AT + at)).expect("memory");
    }

    /// Takes a request, and answers it immediately if it needs no IO.
    fn take(&mut self) -> Result<(), Fault> {
        let Self { ring: Some(ring), chain, inflight, geometry, .. } = self else { return Ok(()) };
        let Some(head) = ring.take(chain)? else { return Ok(()) };
        assert!(head < SIZE && !inflight.contains(&head), "{head} of {inflight:?}");
        let parsed = parse(chain, geometry).inspect_err(|_| ring.refuse(head))?;
        assert_eq!(parsed.status.len(), 1);
        for piece in chain.readable.iter().chain(&chain.writable) {
            assert!(!piece.is_empty() && piece.to_vec().len() == piece.len());
        }
        parsed.status.copy_in(0, &[0]);
        inflight.push(head);
        Ok(())
    }

    fn step(&mut self, step: u8, number: u16) -> Result<(), Fault> {
        match step % 8 {
            0 => self.take()?,
            1 if !self.inflight.is_empty() => {
                let at = usize::from(number) % self.inflight.len();
                let head = self.inflight.swap_remove(at);
                if let Some(ring) = &mut self.ring {
                    ring.answer(head, number.into())?;
                }
            }
            2 => self.write(AVAILABLE_AT + 2, &number.to_le_bytes()),
            3 => self.restart(number & 1 != 0),
            4 => {
                if let Some(ring) = &mut self.ring {
                    ring.ask_kicks()?;
                    ring.needs_call()?;
                    ring.has_input();
                }
            }
            _ => {}
        }
        let inflight = self.ring.as_ref().map_or(0, Vring::inflight);
        assert_eq!(inflight, self.inflight.len());
        Ok(())
    }
}

/// Runs steps of at least five bytes: one byte selects the action, two are a number, and two are a
/// length. The action that writes to the guest's memory takes as many further bytes.
#[doc(hidden)]
pub fn fuzz_ring(mut data: &[u8]) {
    let mut ends = RingEnds::new();
    while let Some((&[step, a, b, c, d], rest)) = data.split_first_chunk() {
        let (number, len) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        data = rest;
        match step % 8 {
            5 => {
                let (bytes, rest) = data.split_at(data.len().min(len.into()));
                ends.write(number.into(), bytes);
                data = rest;
            }
            // A descriptor with an address in the guest's memory, which random bytes rarely
            // produce.
            6 => {
                let address = MEMORY_AT + u64::from(len) % MEMORY_LEN;
                let [len, flags] = [u32::from(step) * 4, u32::from(b)];
                let descriptor = [
                    &address.to_le_bytes()[..],
                    &len.to_le_bytes(),
                    &(flags as u16 & 7).to_le_bytes(),
                    &(u16::from(b >> 3) % (SIZE + 1)).to_le_bytes(),
                ];
                ends.write(16 * (u64::from(a) % u64::from(SIZE)), &descriptor.concat());
            }
            // An entry in the available ring.
            7 => {
                let at = AVAILABLE_AT + 4 + 2 * (u64::from(number) % u64::from(SIZE));
                ends.write(at, &(len % (SIZE + 1)).to_le_bytes());
            }
            _ => {
                if ends.step(step, number).is_err() {
                    // The ring stays stopped until it is restarted.
                    ends.ring = None;
                    ends.inflight.clear();
                }
            }
        }
    }
}

/// Monitor's end of a connection.
struct Sending {
    stream: UnixStream,
    files: [OwnedFd; 4],
}

impl Sending {
    fn new(stream: UnixStream) -> Self {
        stream.set_nonblocking(true).expect("a socket");
        let event = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let null = File::open("/dev/null").expect("/dev/null");
        let files = [memory_file(1 << 20).into(), event, null.into(), memory_file(100).into()];
        Self { stream, files }
    }

    /// Sends bytes with `count` descriptors; bytes for which the socket has no room are dropped.
    fn send(&self, bytes: &[u8], first: usize, count: usize) {
        let fds: Vec<BorrowedFd<'_>> =
            (0..count).map(|at| self.files[(first + at) % self.files.len()].as_fd()).collect();
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut room);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // The device may have closed the connection.
        let _ = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut ancillary, flags);
    }

    fn read_answers(&mut self) {
        let mut bytes = [0; 8192];
        while self.stream.read(&mut bytes).is_ok_and(|count| count > 0) {}
    }
}

/// Sends messages described by five bytes each: the mode with the number of descriptors, the code,
/// the flags, and two bytes for the length of the body that follows. Some modes send only the body.
#[doc(hidden)]
pub fn fuzz_messages(mut data: &[u8]) {
    let (mine, theirs) = UnixStream::pair().expect("sockets");
    let mut sending = Sending::new(theirs);
    let shared = Arc::new(Shared::new("volume", 2).expect("an eventfd"));
    *shared.geometry.lock() = Geometry::plain(1 << 20);
    // The shards have ended, so commands are dropped.
    let shards = [0; 2].map(|_| mailbox().expect("a mailbox").0);
    let alarm = TruncationAlarm::new().expect("an alarm");
    let monitor = Arc::new(Mutex::new(Monitor::new(&shared, &shards, &alarm)));
    let watched = mine.try_clone().expect("a descriptor");
    let mut handler = BackendReqHandler::from_stream(mine, Arc::clone(&monitor));
    let stop = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
    let exchange = Exchange { stream: &watched, stop: stop.as_fd() };
    let mut is_open = true;
    while is_open && let Some((&[mode, code, flags, c, d], rest)) = data.split_first_chunk() {
        let len = usize::from(u16::from_le_bytes([c, d]));
        let (body, rest) = rest.split_at(rest.len().min(len));
        data = rest;
        let (first, count) = (usize::from(mode >> 2 & 3), usize::from(mode >> 4));
        if mode & 3 == 3 {
            sending.send(body, first, count);
        } else {
            let words = [code.into(), flags.into(), body.len() as u32].map(u32::to_le_bytes);
            sending.send(&[words.as_flattened(), body].concat(), first, count);
        }
        is_open = match exchange.wait(Duration::ZERO) {
            Ok(Wait::Ready) => handler.handle_request().is_ok(),
            Ok(wait) => {
                assert_eq!(wait, Wait::NoMessage, "answers are read at once");
                true
            }
            Err(error) => panic!("{error}"),
        };
        sending.read_answers();
    }
    if is_open {
        sending.stream.shutdown(Shutdown::Write).expect("a socket");
        while exchange.wait(Duration::ZERO).ok() == Some(Wait::Ready)
            && handler.handle_request().is_ok()
        {
            sending.read_answers();
        }
    }
    monitor.lock().expect("no panic").end();
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use rtrs_core::prng::Prng;

    use super::*;

    fn replay(name: &str, body: fn(&[u8])) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let mut files = 0;
        for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
            let path = entry.unwrap().path();
            // Shown only when the body panics.
            println!("{}", path.display());
            body(&fs::read(&path).unwrap());
            files += 1;
        }
        assert!(files >= 6, "{}: only {files} inputs", dir.display());
    }

    #[test]
    fn the_corpus_of_rings_replays() {
        replay("vhost_ring", fuzz_ring);
    }

    #[test]
    fn the_corpus_of_messages_replays() {
        replay("vhost_messages", fuzz_messages);
    }

    #[test]
    fn any_steps_are_handled() {
        let prng = &mut Prng::new(31);
        for _ in 0..1000 {
            let mut data = vec![0; prng.index(400)];
            prng.fill(&mut data);
            fuzz_ring(&data);
            // Short bodies, so that the input contains several messages.
            data.chunks_exact_mut(5).for_each(|step| step[4] = 0);
            fuzz_ring(&data);
            fuzz_messages(&data);
        }
    }
}
