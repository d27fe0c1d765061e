//! Tests of bridges of several devices that share memory on one ring, turned by hand: how one
//! bridge fares when the disk of another hangs and that bridge holds all of its share.

use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::JoinHandle;

use nbd_bridge::kernel::FIRST_BYTES;
use nbd_bridge::{Bridge, BridgeConfig, BufferPools, Seat};
use rtrs_core::rt::Ring;
use rtrs_core::time::{Duration, Instant};

use crate::client::{Client, READ};
use crate::device::{Switches, TestDevice};
use crate::fixture::{config, geometry};

const MIB: u32 = 1 << 20;
const PART: u32 = 256 << 10;

pub(crate) struct Many {
    ring: Rc<Ring>,
    pub(crate) bridges: Vec<Bridge>,
    pub(crate) switches: Vec<Arc<Switches>>,
    now: Instant,
}

impl Many {
    pub(crate) fn new(count: usize, config: BridgeConfig) -> Self {
        let ring = Ring::new(64).unwrap();
        let pools = BufferPools::default();
        let (mut bridges, mut switches) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let own: Arc<Switches> = Arc::default();
            let device = Box::new(TestDevice::new(geometry(), Arc::clone(&own)));
            let seat = Seat::alone();
            bridges.push(Bridge::seated(&ring, &pools, device, "vol0", config, seat).unwrap());
            switches.push(own);
        }
        Self { ring, bridges, switches, now: Instant::from_nanos(1 << 50) }
    }

    pub(crate) fn settle(&mut self) {
        let mut quiet = 0;
        self.now = self.now + Duration::from_millis(100);
        while quiet < 5 {
            let mut any = self.ring.turn_or_sleep(Some(Duration::from_millis(2))).unwrap();
            for bridge in &mut self.bridges {
                any |= bridge.turn(self.now);
                bridge.check();
            }
            quiet = if any { 0 } else { quiet + 1 };
        }
    }

    /// Turns all bridges until a thread has ended. If that takes long, the clock stops before the
    /// timeout for handshakes, or for clients that do not read, expires.
    pub(crate) fn join<T>(&mut self, thread: JoinHandle<T>) -> T {
        let most = self.now + Duration::from_secs(10);
        while !thread.is_finished() {
            self.settle();
            self.now = self.now.min(most);
        }
        thread.join().unwrap()
    }

    pub(crate) fn client(&mut self, at: usize, structured: bool) -> Client {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        self.bridges[at].adopt(self.now, theirs.into());
        let client = self.join(std::thread::spawn(move || Client::go(ours, structured)));
        client.stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        client
    }

    fn kernel(&mut self, at: usize) -> Client {
        use std::io::Write;
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        theirs.write_all(&FIRST_BYTES).unwrap();
        assert!(self.bridges[at].adopt_kernel(self.now, theirs.into()));
        Client::past_handshake(ours, false)
    }

    /// Hangs the disk of the first bridge, whose clients read until it holds all the memory it may
    /// have.
    fn hog(&mut self) -> Vec<Client> {
        let mut clients: Vec<_> = (0..6).map(|_| self.client(0, true)).collect();
        self.switches[0].hold.store(true, SeqCst);
        for client in &mut clients {
            for cookie in 0..9 {
                client.send(READ, 0, cookie, 0, 4 * MIB);
            }
            self.settle();
        }
        for client in &mut clients {
            for cookie in 10..30 {
                client.send(READ, 0, cookie, 0, 64 << 10);
            }
            self.settle();
        }
        clients
    }

    /// Reads while all bridges take turns. Returns None if no answer arrives.
    pub(crate) fn read(&mut self, client: &mut Client, flags: u16, len: u32) -> Option<u32> {
        let mut other =
            Client::past_handshake(client.stream.try_clone().unwrap(), client.structured);
        other.stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        client.send(READ, flags, 77, 0, len);
        let reply = self.join(std::thread::spawn(move || other.try_reply(|_| len as usize)));
        reply.ok().map(|reply| reply.error)
    }
}

/// A read that must not be split waits, and gets its memory when others have held it for too long.
#[test]
fn a_long_chunk_gets_memory_despite_a_hanging_volume() {
    let mut many = Many::new(3, config());
    let mut df = many.client(1, true);
    let mut other = many.client(1, true);
    let _hog = many.hog();
    assert_eq!(many.read(&mut df, 4, 32 * MIB), Some(0));
    assert_eq!(many.read(&mut other, 0, MIB), Some(0));
}

#[test]
fn a_read_error_keeps_a_connection_without_structured_replies() {
    for beside in [false, true] {
        let mut many = Many::new(36, BridgeConfig { connections_max: 8, ..config() });
        let mut kernel = many.kernel(1);
        many.settle();
        let _hog = if beside { many.hog() } else { Vec::new() };
        // The second half of a MiB cannot be read.
        many.switches[1].fail_every.store(2, SeqCst);
        for _ in 0..4 {
            assert_eq!(many.read(&mut kernel, 0, MIB), Some(5), "beside {beside}");
        }
        many.switches[1].fail_every.store(0, SeqCst);
        assert_eq!(many.read(&mut kernel, 0, MIB), Some(0), "beside {beside}");
        assert_eq!(many.bridges[1].connections(), 1);
    }
}

#[test]
fn several_clients_are_served_despite_a_hanging_volume() {
    let mut many = Many::new(36, config());
    let mut clients: Vec<_> = (0..3).map(|_| many.client(1, true)).collect();
    for client in &mut clients {
        assert_eq!(many.read(client, 0, 4096), Some(0), "alone");
    }
    let _hog = many.hog();
    for client in &mut clients {
        assert_eq!(many.read(client, 0, 4096), Some(0), "next to a hanging volume");
        assert_eq!(many.read(client, 0, MIB), Some(0), "next to a hanging volume");
    }
    for at in 2..6 {
        let mut client = many.client(at, true);
        assert_eq!(many.read(&mut client, 0, MIB), Some(0), "volume {at}");
    }
}

#[test]
fn a_disconnected_client_notices_while_the_device_hangs() {
    let mut many = Many::new(2, config());
    let mut client = many.client(0, true);
    many.switches[0].hold.store(true, SeqCst);
    client.send(READ, 0, 1, 0, PART);
    many.settle();
    many.bridges[0].stop();
    many.bridges[0].abort();
    many.settle();
    assert!(client.try_reply(|_| 0).is_err_and(|e| e.kind() != std::io::ErrorKind::WouldBlock));
}
