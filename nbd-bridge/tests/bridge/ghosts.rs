//! Tests of writes that closed connections left behind: none takes effect after a newer request was
//! answered. Two shards of one device are turned by hand, so that every step happens in the order
//! that the test wants.

use std::io::{ErrorKind, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use nbd_bridge::kernel::FIRST_BYTES;
use nbd_bridge::{Bridge, BridgeConfig, BufferPools, Group, Seat};
use rtrs_core::block::Geometry;
use rtrs_core::rt::Ring;
use rtrs_core::time::Instant;

use crate::client::{Client, DISC, READ, TRIM, WRITE, ZEROES, request};
use crate::device::{Switches, TestDevice};
use crate::fixture::{config, geometry};

const OLD: [u8; 4096] = [1; 4096];
const NEW: [u8; 4096] = [2; 4096];

pub(crate) struct Shard {
    ring: Rc<Ring>,
    pub(crate) bridge: Bridge,
    pub(crate) switches: Arc<Switches>,
    pub(crate) now: Instant,
}

impl Shard {
    /// Turns like [`settle`](Self::settle), for a bridge with internal errors.
    pub(crate) fn turn_unchecked(&mut self) {
        self.turn_until_quiet(|_| ());
    }

    /// Turns until nothing has happened for a while in real time.
    pub(crate) fn settle(&mut self) {
        self.turn_until_quiet(Bridge::check);
    }

    /// Turns once, without waiting for anything.
    pub(crate) fn turn_once(&mut self) {
        self.ring.turn().unwrap();
        self.bridge.turn(self.now);
        self.bridge.check();
    }

    fn turn_until_quiet(&mut self, check: impl Fn(&Bridge)) {
        let mut quiet = 0;
        while quiet < 5 {
            let limit = Some(Duration::from_millis(2));
            let any = self.ring.turn_or_sleep(limit).unwrap() | self.bridge.turn(self.now);
            check(&self.bridge);
            quiet = if any { 0 } else { quiet + 1 };
        }
    }

    /// Holds or releases the completions of this shard's device.
    pub(crate) fn hold(&self, hold: bool) {
        self.switches.hold.store(hold, SeqCst);
    }

    fn pair(&mut self) -> (UnixStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        (ours, theirs)
    }

    /// Returns a client that has completed the handshake.
    pub(crate) fn client(&mut self) -> Client {
        let (ours, theirs) = self.pair();
        self.connect(ours, theirs)
    }

    /// Returns a client that has completed the handshake, over TCP.
    fn tcp_client(&mut self) -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let theirs = listener.accept().unwrap().0;
        // The `UnixStream` functions used here work on any stream socket.
        let [ours, theirs] = [ours, theirs].map(|end| UnixStream::from(OwnedFd::from(end)));
        self.connect(ours, theirs)
    }

    fn connect(&mut self, ours: UnixStream, theirs: UnixStream) -> Client {
        ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        self.bridge.adopt(self.now, theirs.into());
        let thread = std::thread::spawn(move || Client::go(ours, false));
        while !thread.is_finished() {
            self.settle();
        }
        let client = thread.join().unwrap();
        client.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        client
    }

    /// Returns a kernel socket.
    fn kernel(&mut self) -> Client {
        let (ours, mut theirs) = self.pair();
        theirs.write_all(&FIRST_BYTES).unwrap();
        assert!(self.bridge.adopt_kernel(self.now, theirs.into()));
        Client::past_handshake(ours, false)
    }
}

/// Two shards of a device.
pub(crate) struct Two {
    pub(crate) shards: [Shard; 2],
    pub(crate) group: Arc<Group>,
}

impl Two {
    pub(crate) fn new() -> Self {
        Self::with(config())
    }

    pub(crate) fn with(config: BridgeConfig) -> Self {
        Self::of(&geometry(), config)
    }

    pub(crate) fn of(geometry: &Geometry, config: BridgeConfig) -> Self {
        let group = Group::new(2, |_| ());
        let first = Arc::new(Switches::default());
        let second = Arc::new(Switches { disk: Arc::clone(&first.disk), ..Switches::default() });
        let mut all = [(0, first), (1, second)].map(|(shard, switches)| {
            let ring = Ring::new(32).unwrap();
            let device = Box::new(TestDevice::new(geometry.clone(), Arc::clone(&switches)));
            let seat = Seat { group: Arc::clone(&group), shard };
            let bridge =
                Bridge::seated(&ring, &BufferPools::default(), device, "vol0", config, seat)
                    .unwrap();
            Shard { ring, bridge, switches, now: Instant::from_nanos(1 << 50) }
        });
        all.iter_mut().for_each(Shard::settle);
        Self { shards: all, group }
    }

    pub(crate) fn settle(&mut self) {
        for _ in 0..2 {
            self.shards.iter_mut().for_each(Shard::settle);
        }
    }

    pub(crate) fn disk(&self, at: usize) -> u8 {
        self.shards[0].switches.disk.lock().unwrap()[at]
    }

    /// Leaves a write of this client in flight at shard 0, which holds it, and disconnects the
    /// client.
    fn leave_behind(&mut self, mut client: Client) {
        self.shards[0].hold(true);
        client.send_write(0, 1, 0, &OLD);
        self.settle();
        assert_eq!(self.shards[0].bridge.inflight(), 1);
        client.leave();
    }

    /// Writes bytes to a client's socket while the shards turn.
    pub(crate) fn feed(&mut self, client: &mut Client, bytes: &[u8]) {
        for chunk in bytes.chunks(64 << 10) {
            client.stream.write_all(chunk).unwrap();
            self.settle();
        }
    }

    /// Asserts that everything has ended, or does so once children of other tests have called exec
    /// and thereby closed their copies of the clients' sockets.
    pub(crate) fn end(mut self) {
        let limit = std::time::Instant::now() + Duration::from_secs(60);
        self.settle();
        while self.shards.iter().any(|shard| shard.bridge.connections() > 0)
            && std::time::Instant::now() < limit
        {
            self.settle();
        }
        assert_eq!(self.group.orphaned_writes(), 0);
        for shard in &self.shards {
            assert_eq!((shard.bridge.connections(), shard.bridge.inflight()), (0, 0));
        }
    }
}

/// Whether a reply has arrived, after the shards have turned until nothing happens.
pub(crate) fn is_answered(client: &mut Client, len: usize) -> bool {
    // A kernel socket may contain only the first bytes of a reply.
    let mut head = [const { MaybeUninit::uninit() }; 16];
    let waiting = loop {
        match socket2::SockRef::from(&client.stream).peek(&mut head) {
            // Completions of this thread's ring interrupt calls that have a timeout.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break 0,
            waiting => break waiting.unwrap(),
        }
    };
    if waiting < head.len() {
        return false;
    }
    assert_eq!(client.reply(|_| len).error, 0);
    true
}

/// Requests of a newer connection wait for the write that an older one left behind, but only if
/// they overlap. `look` selects whether the old connection's shard turns before the new one writes.
fn no_ghost(on: usize, kernel: bool, look: bool) {
    let mut two = Two::new();
    let open = |shard: &mut Shard| if kernel { shard.kernel() } else { shard.client() };
    let old = open(&mut two.shards[0]);
    two.leave_behind(old);
    if look {
        two.shards[0].settle();
    }
    let mut new = open(&mut two.shards[on]);
    new.send_write(0, 2, 0, &NEW);
    two.settle();
    assert!(!is_answered(&mut new, 0), "the new write is answered, the old one may still land");
    new.send_write(0, 3, 4096, &NEW);
    two.settle();
    if on != 0 {
        assert!(is_answered(&mut new, 0), "a write elsewhere has nothing to wait for");
    }
    two.shards[0].hold(false);
    two.settle();
    assert!(is_answered(&mut new, 0));
    if on == 0 {
        assert!(is_answered(&mut new, 0));
    }
    assert_eq!((two.disk(0), two.disk(4096)), (2, 2), "the newer write stays");
    drop(new);
    two.end();
}

#[test]
fn a_write_of_a_dead_connection_does_not_overwrite_a_newer_one() {
    for on in [0, 1] {
        for look in [true, false] {
            no_ghost(on, false, look);
        }
    }
}

#[test]
fn a_write_of_a_dead_kernel_socket_does_not_overwrite_a_newer_one() {
    for on in [0, 1] {
        no_ghost(on, true, false);
    }
}

#[test]
fn late_data_on_a_dead_socket_is_discarded() {
    let mut two = Two::new();
    let (mut old, theirs) = two.shards[0].pair();
    old.write_all(&request(WRITE, 0, 1, 0, 4096)).unwrap();
    old.write_all(&OLD).unwrap();
    drop(old);
    // A new connection replaces the old one before the old one's shard has received its socket.
    let mut new = two.shards[1].kernel();
    new.send_write(0, 2, 0, &NEW);
    two.settle();
    assert!(is_answered(&mut new, 0));
    let shard = &mut two.shards[0];
    assert!(shard.bridge.adopt_kernel(shard.now, theirs.into()));
    two.settle();
    assert_eq!((two.disk(0), two.shards[0].bridge.connections()), (2, 0));
    drop(new);
    two.end();
}

#[test]
fn reads_and_older_connections_wait_for_orphaned_writes() {
    for command in [READ, TRIM, ZEROES] {
        let mut two = Two::new();
        let mut older = two.shards[1].client();
        older.send(READ, 0, 1, 1 << 20, 4096);
        two.settle();
        assert!(is_answered(&mut older, 4096));
        let old = two.shards[0].client();
        two.leave_behind(old);
        two.shards[0].settle();
        assert_eq!(two.group.orphaned_writes(), 1);
        older.send(command, 0, 2, 0, 8192);
        two.settle();
        let len = if command == READ { 8192 } else { 0 };
        assert!(!is_answered(&mut older, len), "{command}");
        older.send(READ, 0, 3, 4096, 4096);
        two.settle();
        assert!(is_answered(&mut older, 4096), "requests that do not overlap continue");
        two.shards[0].hold(false);
        two.settle();
        assert!(is_answered(&mut older, len), "{command}");
        drop(older);
        two.end();
    }
}

#[test]
fn the_first_request_waits_for_every_shards_check() {
    let mut two = Two::new();
    let old = two.shards[0].client();
    two.leave_behind(old);
    let mut new = two.shards[1].client();
    new.send(READ, 0, 2, 1 << 20, 4096);
    two.shards[1].settle();
    assert!(!is_answered(&mut new, 4096), "shard 0 has not looked");
    assert_eq!(two.group.orphaned_writes(), 0);
    two.shards[0].settle();
    assert_eq!(two.group.orphaned_writes(), 1);
    two.shards[1].settle();
    assert!(is_answered(&mut new, 4096));
    // From now on, the connection does not wait for other shards.
    new.send(READ, 0, 3, 1 << 20, 4096);
    two.shards[1].settle();
    assert!(is_answered(&mut new, 4096));
    two.shards[0].hold(false);
    drop(new);
    two.end();
}

#[test]
fn a_stuck_shard_delays_kernel_clients_and_disconnects_others() {
    let mut two = Two::new();
    let old = two.shards[0].client();
    two.leave_behind(old);
    let mut new = two.shards[1].client();
    let mut kernel = two.shards[1].kernel();
    for client in [&mut new, &mut kernel] {
        client.send(READ, 0, 2, 1 << 20, 4096);
    }
    two.shards[1].settle();
    two.shards[1].now = two.shards[1].now + Duration::from_secs(16);
    two.shards[1].settle();
    assert!(new.is_closed(), "it is not served, since that would not be safe");
    assert!(!is_answered(&mut kernel, 4096));
    two.settle();
    assert!(is_answered(&mut kernel, 4096));
    two.shards[0].hold(false);
    drop((new, kernel));
    two.end();
}

#[test]
fn unsubmitted_requests_of_a_closed_connection_are_dropped() {
    let mut two = Two::new();
    two.shards[0].switches.fill.store(1, SeqCst);
    let mut old = two.shards[0].client();
    two.shards[0].hold(true);
    // The first is at the device, the second waits for room there, the others are still in the
    // socket.
    for at in 0..8 {
        old.send_write(0, at, at * 4096, &OLD);
    }
    two.settle();
    assert_eq!(two.shards[0].bridge.inflight(), 2);
    old.leave();
    let mut new = two.shards[1].client();
    new.send_write(0, 9, 4096, &NEW);
    new.send_write(0, 10, 2 * 4096, &NEW);
    two.settle();
    for _ in 0..2 {
        assert!(is_answered(&mut new, 0), "nothing of the old client can land there");
    }
    assert_eq!((two.group.orphaned_writes(), two.shards[0].bridge.inflight()), (1, 1));
    two.shards[0].hold(false);
    two.settle();
    let found: Vec<u8> = (0..4).map(|at| two.disk(at * 4096)).collect();
    assert_eq!(found, [1, 2, 2, 0]);
    drop(new);
    two.end();
}

#[test]
fn closing_clients_are_answered_and_block_overlapping_requests() {
    for half_closed in [false, true] {
        let mut two = Two::new();
        two.shards[0].hold(true);
        let mut old = two.shards[0].client();
        old.send_write(0, 1, 0, &OLD);
        if half_closed {
            old.stream.shutdown(std::net::Shutdown::Write).unwrap();
        } else {
            old.send(DISC, 0, 0, 0, 0);
        }
        two.settle();
        let mut new = two.shards[1].client();
        new.send_write(0, 2, 0, &NEW);
        two.settle();
        assert!(!is_answered(&mut new, 0));
        two.shards[0].hold(false);
        two.settle();
        assert!(is_answered(&mut old, 0) && is_answered(&mut new, 0));
        assert!(old.is_closed());
        assert_eq!(two.disk(0), 2);
        drop((old, new));
        two.end();
    }
}

/// A half-closed TCP client looks the same as one that was replaced by another connection.
#[test]
fn a_half_closed_tcp_client_loses_its_request_to_another_client() {
    let all = [(true, true), (true, false), (false, true), (false, false)];
    for (connects_first, asks_first) in all {
        for alone in [false, true] {
            let mut two = Two::new();
            let early = (!connects_first).then(|| two.shards[0].client());
            let mut old = two.shards[0].tcp_client();
            let mut new = early.unwrap_or_else(|| two.shards[0].client());
            if !alone && !asks_first {
                new.send_write(0, 2, 0, &NEW);
            }
            old.send_write(0, 1, 0, &OLD);
            old.stream.shutdown(std::net::Shutdown::Write).unwrap();
            if !alone && asks_first {
                new.send_write(0, 2, 0, &NEW);
            }
            two.settle();
            let answered = old.try_reply(|_| 0).is_ok_and(|reply| reply.error == 0);
            assert_eq!(answered, alone, "{connects_first}, {asks_first}");
            assert_eq!(is_answered(&mut new, 0), !alone);
            assert_eq!(two.disk(0), if alone { 1 } else { 2 });
            drop((old, new));
            two.end();
        }
    }
}

#[test]
fn a_blocked_request_ends_with_its_client() {
    let mut two = Two::new();
    let old = two.shards[0].client();
    two.leave_behind(old);
    let mut second = two.shards[1].client();
    second.send_write(0, 2, 0, &[3; 4096]);
    // The same for a large write that has only partly arrived.
    let len = 1 << 20;
    second.stream.write_all(&request(WRITE, 0, 3, 0, len)).unwrap();
    two.feed(&mut second, &vec![3; 600_000]);
    assert_eq!(two.shards[1].bridge.stats().deferred, 2);
    second.leave();
    two.settle();
    assert_eq!((two.group.orphaned_writes(), two.shards[1].bridge.inflight()), (1, 0));
    let mut third = two.shards[1].client();
    third.send_write(0, 4, 0, &NEW);
    two.settle();
    assert!(!is_answered(&mut third, 0));
    two.shards[0].hold(false);
    two.settle();
    assert!(is_answered(&mut third, 0));
    assert_eq!((two.disk(0), two.disk(4096)), (2, 0));
    drop(third);
    two.end();
}

#[test]
fn a_partially_received_write_blocks_only_what_it_reached() {
    let mut two = Two::new();
    two.shards[0].hold(true);
    let mut old = two.shards[0].client();
    old.stream.write_all(&request(WRITE, 0, 1, 0, 4 << 20)).unwrap();
    two.feed(&mut old, &vec![1; 1 << 20]);
    old.leave();
    let mut new = two.shards[1].client();
    new.send_write(0, 2, 3 << 20, &NEW);
    two.settle();
    assert!(is_answered(&mut new, 0), "the old write did not get that far");
    new.send_write(0, 3, 4096, &NEW);
    two.settle();
    assert!(!is_answered(&mut new, 0));
    two.shards[0].hold(false);
    two.settle();
    assert!(is_answered(&mut new, 0));
    assert_eq!((two.disk(0), two.disk(4096), two.disk(3 << 20)), (1, 2, 2));
    drop(new);
    two.end();
}

/// Nothing is received from a client whose requests wait for room. Connections that predate the
/// client's disconnection request no round, so the disconnection must still be noticed.
fn no_ghost_of_a_stalled_client(kernel: bool, for_rows: bool) {
    let requests_max = if for_rows { 4 } else { config().requests_max };
    let mut two = Two::with(BridgeConfig { requests_max, ..config() });
    let mut older = two.shards[1].client();
    older.send(READ, 0, 1, 1 << 20, 4096);
    two.settle();
    assert!(is_answered(&mut older, 4096));
    let shard = &mut two.shards[0];
    let mut old = if kernel { shard.kernel() } else { shard.client() };
    shard.switches.fill.store(u32::from(!for_rows), SeqCst);
    shard.hold(true);
    for at in 0..8 {
        old.send_write(0, at, at * 4096, &OLD);
    }
    two.settle();
    assert!(two.shards[0].bridge.inflight() < 8, "the others wait");
    old.leave();
    two.shards[0].settle();
    older.send_write(0, 2, 0, &NEW);
    two.settle();
    assert!(!is_answered(&mut older, 0), "the old write may still land");
    // The last of the old writes has not begun, and never will.
    older.send_write(0, 3, 7 * 4096, &NEW);
    two.settle();
    assert!(is_answered(&mut older, 0));
    two.shards[0].hold(false);
    two.settle();
    assert!(is_answered(&mut older, 0));
    assert_eq!((two.disk(0), two.disk(7 * 4096)), (2, 2), "the newer writes stay");
    drop(older);
    two.end();
}

#[test]
fn a_closed_client_with_blocked_requests_is_detected() {
    for kernel in [false, true] {
        for for_rows in [false, true] {
            no_ghost_of_a_stalled_client(kernel, for_rows);
        }
    }
}
