//! TCP proxy between a client and its server, for one path, that simulates failures of networks and
//! middleboxes: goes silent in one direction or both while all connections stay open, delays every
//! byte, closes in the middle of a frame, or corrupts a byte.
//!
//! The proxy parses MPA frames (RFC 5044 section 4) in order to damage the intended byte. Bytes
//! that arrive while a direction is shut are kept and forwarded when it is opened: late, as on a
//! slow network, even if both ends have closed the connection in the meantime. All queues are
//! bounded; all threads end with the proxy.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle, Scope};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rtrs_tests::wait_for;

/// Maximum number of connections; further ones are closed.
const CONNECTIONS_MAX: usize = 64;
/// Maximum number of pieces kept per connection and direction; at this limit, reading stops.
const QUEUE_MAX: usize = 64;
const PIECE: usize = 64 << 10;
/// Minimum size of frames to damage: these carry the data of a write or a read.
const FRAME_MIN: usize = 1024;
const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);
/// Time without progress after which a blocked write ends its connection.
const WRITE_TIME_MAX: Duration = Duration::from_secs(20);

/// Direction of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ToServer = 0,
    ToClient = 1,
}

/// Both directions.
pub(crate) const BOTH: [Way; 2] = [Way::ToServer, Way::ToClient];

/// Position in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Length,
    Header,
    Payload,
    Checksum,
}

/// All positions, in wire order.
pub(crate) const PLACES: [Place; 4] =
    [Place::Length, Place::Header, Place::Payload, Place::Checksum];

impl Place {
    /// Returns the length of a frame up to and including the byte at this position: an odd number.
    fn end(self, frame_len: usize) -> usize {
        match self {
            Self::Length => 1,
            // A byte of the steering tag.
            Self::Header => 5,
            Self::Payload => (frame_len / 2) | 1,
            Self::Checksum => frame_len - 1,
        }
    }
}

/// Damage to apply to the next large frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    /// Flips a bit in this byte.
    Corrupt(Place),
    /// Closes the connection at both ends after this byte; the remaining bytes are lost.
    Cut(Place),
}

#[derive(Debug, Default)]
struct State {
    shut: [bool; 2],
    delay: [Duration; 2],
    harm: [Option<Harm>; 2],
    ended: bool,
    live: Vec<Live>,
    /// Number of connections so far.
    count: u64,
}

/// Open connection.
#[derive(Debug)]
struct Live {
    number: u64,
    /// Streams to the client and to the server.
    streams: [TcpStream; 2],
    /// Number of directions that have ended.
    ways_ended: u8,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Proxy for a path.
#[derive(Debug)]
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Listens on a port at `ip` for connections to a server's portal.
    pub(crate) fn start(ip: &str, server: &str) -> Self {
        let server = server.strip_prefix("tcp://").expect("a TCP portal");
        let server = server.parse().expect("an address");
        let listener = TcpListener::bind((ip, 0)).expect("bind a loopback port");
        let address = listener.local_addr().expect("its address");
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            thread::scope(|scope| accept(scope, &of_thread, &listener, server));
        });
        Self { shared, address, thread: Some(thread) }
    }

    /// Returns the portal that clients connect to.
    pub(crate) fn portal(&self) -> String {
        format!("tcp://{}", self.address)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.state.lock());
        self.shared.changed.notify_all();
    }

    /// Stops forwarding in these directions; connections stay open, and new ones are accepted.
    pub(crate) fn shut(&self, ways: &[Way]) {
        self.change(|state| ways.iter().for_each(|way| state.shut[*way as usize] = true));
    }

    /// Resumes forwarding, with the kept bytes first.
    pub(crate) fn open(&self) {
        self.change(|state| state.shut = [false; 2]);
    }

    /// Delays every byte by `delay`, in both directions.
    pub(crate) fn delay(&self, delay: Duration) {
        self.change(|state| state.delay = [delay; 2]);
    }

    /// Closes all connections. Bytes in transit are lost.
    pub(crate) fn close_all(&self) {
        self.change(|state| state.live.drain(..).for_each(|live| close(&live.streams)));
    }

    /// Damages one frame, and returns when that has happened.
    pub(crate) fn harm(&self, way: Way, harm: Harm) {
        self.change(|state| state.harm[way as usize] = Some(harm));
        wait_for("a large frame to damage", Duration::from_secs(60), || {
            self.shared.state.lock().harm[way as usize].is_none().then_some(())
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.change(|state| state.ended = true);
        self.close_all();
        // The connection wakes the accepting thread.
        let _ = TcpStream::connect_timeout(&self.address, CONNECT_TIME_MAX);
        let joined = self.thread.take().is_some_and(|thread| thread.join().is_ok());
        assert!(joined || thread::panicking(), "a thread of the proxy panicked");
    }
}

fn close(streams: &[TcpStream; 2]) {
    for stream in streams {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

fn accept<'s>(
    scope: &'s Scope<'s, '_>,
    shared: &'s Shared,
    listener: &TcpListener,
    server: SocketAddr,
) {
    for stream in listener.incoming() {
        if shared.state.lock().ended {
            return;
        }
        let Ok(client) = stream else { continue };
        // The server is down, so the client's connection is closed.
        let Ok(server) = TcpStream::connect_timeout(&server, CONNECT_TIME_MAX) else { continue };
        for stream in [&client, &server] {
            // Fails if the connection is already closed, which the threads will detect.
            let _ = stream.set_nodelay(true);
            let _ = stream.set_write_timeout(Some(WRITE_TIME_MAX));
        }
        let copy = |stream: &TcpStream| stream.try_clone().expect("a second handle of a socket");
        let number = {
            let mut state = shared.state.lock();
            if state.ended || state.live.len() >= CONNECTIONS_MAX {
                continue;
            }
            state.count += 1;
            let number = state.count;
            let streams = [copy(&client), copy(&server)];
            state.live.push(Live { number, streams, ways_ended: 0 });
            number
        };
        for (way, from, to) in
            [(Way::ToServer, &client, &server), (Way::ToClient, &server, &client)]
        {
            let (sender, receiver) = sync_channel(QUEUE_MAX);
            let (from, to) = (copy(from), copy(to));
            scope.spawn(move || read(from, &sender));
            scope.spawn(move || write(shared, number, way, &receiver, to));
        }
    }
}

/// Bytes and their time of arrival.
type Piece = (Instant, Vec<u8>);

/// Reads to the end of the stream, or until the writing thread has ended.
fn read(mut from: TcpStream, sender: &SyncSender<Piece>) {
    let mut bytes = vec![0; PIECE];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if sender.send((Instant::now(), bytes[..count].to_vec())).is_err() {
            return;
        }
    }
}

/// Writes pieces when they are due, with any damage. The end of the stream is forwarded in order.
fn write(shared: &Shared, number: u64, way: Way, receiver: &Receiver<Piece>, mut to: TcpStream) {
    let mut frames = Frames::default();
    let mut in_order = true;
    while let Ok((came, mut bytes)) = receiver.recv() {
        let Some(harm) = shared.pass(way, came, frames.next(&bytes)) else { return };
        match harm {
            Some((Harm::Corrupt(place), frame)) => {
                bytes[frame.start + place.end(frame.len()) - 1] ^= 0x40;
            }
            Some((Harm::Cut(place), frame)) => {
                bytes.truncate(frame.start + place.end(frame.len()));
                in_order = false;
            }
            None => {}
        }
        in_order &= to.write_all(&bytes).is_ok();
        if !in_order {
            break;
        }
    }
    // A FIN is delayed like any other data.
    if in_order && shared.pass(way, Instant::now(), None).is_none() {
        return;
    }
    let _ = to.shutdown(Shutdown::Write);
    let mut state = shared.state.lock();
    let Some(at) = state.live.iter().position(|live| live.number == number) else { return };
    state.live[at].ways_ended += 1;
    if !in_order || state.live[at].ways_ended == 2 {
        close(&state.live.swap_remove(at).streams);
    }
}

/// Frame boundaries of one direction.
#[derive(Debug, Default)]
struct Frames {
    started: bool,
    /// Received bytes of a frame's header, or of the start-up frame.
    head: Vec<u8>,
    /// Bytes still missing from the current frame.
    rest: usize,
}

impl Frames {
    /// Parses `bytes` and returns the first large frame that they contain completely.
    fn next(&mut self, bytes: &[u8]) -> Option<Range<usize>> {
        let (mut at, mut found) = (0, None);
        while at < bytes.len() {
            let skipped = self.rest.min(bytes.len() - at);
            (self.rest, at) = (self.rest - skipped, at + skipped);
            let head_len = if self.started { 2 } else { 20 };
            let taken = (head_len - self.head.len()).min(bytes.len() - at);
            let begun_here = self.head.is_empty();
            self.head.extend_from_slice(&bytes[at..at + taken]);
            at += taken;
            if self.head.len() < head_len {
                continue;
            }
            let length = [self.head[head_len - 2], self.head[head_len - 1]];
            let length = usize::from(u16::from_be_bytes(length));
            self.head.clear();
            if !self.started {
                // Private data follows.
                (self.started, self.rest) = (true, length);
                continue;
            }
            let total = (2 + length).next_multiple_of(4) + 4;
            self.rest = total - 2;
            let start = at.wrapping_sub(2);
            let whole = begun_here && self.rest <= bytes.len() - at && total >= FRAME_MIN;
            found = found.or_else(|| whole.then(|| start..start + total));
        }
        found
    }
}

impl Shared {
    /// Waits until a piece that arrived at this time may be forwarded, and returns the damage to
    /// apply to its frame. None if the proxy ends.
    fn pass(
        &self,
        way: Way,
        came: Instant,
        frame: Option<Range<usize>>,
    ) -> Option<Option<(Harm, Range<usize>)>> {
        let mut state = self.state.lock();
        loop {
            if state.ended {
                return None;
            }
            let due = came + state.delay[way as usize];
            if state.shut[way as usize] {
                self.changed.wait(&mut state);
            } else if Instant::now() < due {
                let _ = self.changed.wait_until(&mut state, due);
            } else {
                break;
            }
        }
        let harm = frame.and_then(|frame| Some((state.harm[way as usize].take()?, frame)));
        Some(harm)
    }
}
