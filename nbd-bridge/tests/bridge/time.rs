//! Tests of timeouts, on a bridge whose clock the test sets.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use nbd_bridge::kernel::{BUSY_BYTES, FIRST_BYTES, QUEUE_DEPTH, REQUEST_BYTES};
use nbd_bridge::{Bridge, BridgeConfig};
use rtrs_core::rt::Ring;
use rtrs_core::time::Instant;

use crate::client::{Client, DISC, READ, WRITE, is_closed, request};
use crate::device::{Switches, TestDevice};
use crate::fixture::{config, geometry};

struct Timed {
    ring: Rc<Ring>,
    bridge: Bridge,
    switches: Arc<Switches>,
    now: Instant,
}

impl Timed {
    fn new() -> Self {
        Self::with(config())
    }

    fn with(config: BridgeConfig) -> Self {
        let ring = Ring::new(32).unwrap();
        let switches = Arc::new(Switches::default());
        let device = TestDevice::new(geometry(), Arc::clone(&switches));
        let bridge = Bridge::new(&ring, Box::new(device), "vol0", config).unwrap();
        Self { ring, bridge, switches, now: Instant::from_nanos(1 << 50) }
    }

    /// Runs turns until nothing has happened for a while in real time.
    fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 5 {
            let limit = Some(Duration::from_millis(2));
            let any = self.ring.turn_or_sleep(limit).unwrap() | self.bridge.turn(self.now);
            self.bridge.check();
            quiet = if any { 0 } else { quiet + 1 };
        }
    }

    fn pass(&mut self, seconds: u64) {
        self.now = self.now + Duration::from_secs(seconds);
        self.settle();
    }

    fn socket(&mut self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        self.bridge.adopt(self.now, theirs.into());
        ours
    }

    /// A kernel socket that is empty, so that the first reply lacks its first bytes.
    fn kernel_unread(&mut self) -> Client {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert!(self.bridge.adopt_kernel(self.now, theirs.into()));
        Client::past_handshake(ours, false)
    }

    fn kernel(&mut self) -> Client {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        theirs.write_all(&FIRST_BYTES).unwrap();
        assert!(self.bridge.adopt_kernel(self.now, theirs.into()));
        Client::past_handshake(ours, false)
    }

    fn client(&mut self) -> Client {
        let socket = self.socket();
        let thread = std::thread::spawn(move || Client::go(socket, false));
        while !thread.is_finished() {
            self.settle();
        }
        thread.join().unwrap()
    }
}

#[test]
fn connections_that_send_nothing_give_way_to_clients() {
    let mut timed = Timed::new();
    let user = timed.client();
    let mut silent: Vec<_> = (0..config().connections_max - 1).map(|_| timed.socket()).collect();
    timed.settle();
    // A handshake may take a moment.
    let mut early = timed.socket();
    timed.settle();
    assert!(is_closed(&mut early), "more than the limit");
    // A connection whose client is gone gives way immediately, before the ring reports that.
    silent.remove(1).shutdown(Shutdown::Both).unwrap();
    silent.push(timed.socket());
    timed.settle();
    assert_eq!(timed.bridge.connections(), config().connections_max);
    timed.pass(1);
    let mut clients = vec![user];
    for oldest in &mut silent {
        // This client is past the handshake, so it does not give way itself.
        let client = timed.client();
        let mut greeting = [0; 18];
        oldest.read_exact(&mut greeting).unwrap();
        assert!(is_closed(oldest), "the oldest gives way");
        clients.push(client);
    }
    // All the others have finished their handshakes.
    timed.pass(20);
    assert!(is_closed(&mut timed.socket()));
    assert_eq!(timed.bridge.connections(), config().connections_max);
}

#[test]
fn a_handshake_is_bounded_even_under_load() {
    let mut timed = Timed::new();
    let mut socket = timed.socket();
    timed.settle();
    for byte in [0, 0, 0, 3] {
        timed.pass(4);
        let _ = socket.write_all(&[byte]);
        timed.settle();
    }
    assert_eq!(timed.bridge.connections(), 0);
}

#[test]
fn idle_clients_stay_and_slow_devices_are_awaited() {
    let mut timed = Timed::new();
    let mut client = timed.client();
    timed.pass(3600);
    assert_eq!(timed.bridge.connections(), 1);
    assert_eq!(timed.bridge.deadline(), None, "an idle bridge sleeps");
    timed.switches.hold.store(true, SeqCst);
    client.send(READ, 0, 1, 0, 4096);
    timed.settle();
    timed.pass(3600);
    timed.switches.hold.store(false, SeqCst);
    timed.settle();
    assert_eq!(client.reply(|_| 4096).error, 0);
    // Part of a header while the device queue is full for a long time, then the rest.
    timed.switches.hold.store(true, SeqCst);
    timed.switches.fill.store(1, SeqCst);
    client.send(READ, 0, 2, 0, 4096);
    client.send(READ, 0, 3, 0, 4096);
    client.stream.write_all(&request(WRITE, 0, 4, 0, 4096)).unwrap();
    timed.settle();
    timed.pass(3600);
    timed.switches.hold.store(false, SeqCst);
    timed.settle();
    client.stream.write_all(&[1; 4096]).unwrap();
    timed.settle();
    for _ in 0..3 {
        assert_eq!(client.reply(|cookie| if cookie < 4 { 4096 } else { 0 }).error, 0);
    }
    client.leave();
    timed.settle();
    assert_eq!((timed.bridge.connections(), timed.bridge.inflight()), (0, 0));
}

#[test]
fn a_truncated_message_times_out() {
    let mut header = request(READ, 0, 1, 0, 4096);
    header.pop();
    let mut payload = request(WRITE, 0, 1, 0, 1 << 20);
    payload.extend([0; 300_000]);
    let mut skipped = request(WRITE, 0, 1, 1, 4096);
    skipped.extend([0; 100]);
    for bytes in [header, payload, skipped] {
        let mut timed = Timed::new();
        let mut client = timed.client();
        client.stream.set_nonblocking(true).unwrap();
        let mut left = &bytes[..];
        while !left.is_empty() {
            let sent = client.stream.write(left).unwrap();
            left = &left[sent..];
            timed.settle();
        }
        timed.pass(29);
        assert_eq!(timed.bridge.connections(), 1);
        assert!(timed.bridge.deadline().is_some());
        timed.pass(2);
        assert_eq!((timed.bridge.connections(), timed.bridge.inflight()), (0, 0));
    }
}

#[test]
fn a_client_that_does_not_read_times_out() {
    let mut timed = Timed::new();
    let mut client = timed.client();
    client.send(READ, 0, 1, 0, 32 << 20);
    client.send(READ, 0, 2, 0, 4096);
    timed.settle();
    timed.pass(30 + 60);
    assert_eq!(timed.bridge.connections(), 1, "32 MiB take their time");
    timed.pass(30 + 128);
    assert_eq!((timed.bridge.connections(), timed.bridge.inflight()), (0, 0));
}

#[test]
fn the_kernel_is_never_disconnected() {
    let mut timed = Timed::new();
    let mut kernel = timed.kernel();
    timed.pass(3600);
    // Nor in the middle of a header or of a payload.
    let header = request(WRITE, 0, 1, 4096, 8192);
    let (first, rest) = header.split_at(20);
    for part in [first, rest, &[7; 5000], &[7; 3192]] {
        kernel.stream.write_all(part).unwrap();
        timed.settle();
        assert_eq!(timed.bridge.deadline(), None);
        timed.pass(3600);
        assert_eq!(timed.bridge.connections(), 1);
    }
    assert_eq!(kernel.reply(|_| 0).error, 0);
    // A request while the kernel is not reading.
    kernel.send(READ, 0, 2, 0, 32 << 20);
    timed.settle();
    timed.pass(24 * 3600);
    assert_eq!((timed.bridge.connections(), timed.bridge.inflight()), (1, 1));
    let thread = std::thread::spawn(move || {
        let data = kernel.reply(|_| 32 << 20).data;
        (kernel, data)
    });
    while !thread.is_finished() {
        timed.settle();
    }
    let (mut kernel, data) = thread.join().unwrap();
    assert!(data[..4096].iter().all(|b| *b == 0) && data[4096..12288].iter().all(|b| *b == 7));
    // A refusal, then the end when the device is disconnected.
    kernel.send(READ, 0, 3, 1, 4096);
    timed.settle();
    assert_eq!(kernel.reply(|_| 0).error, 22);
    kernel.send(DISC, 0, 4, 0, 0);
    timed.settle();
    assert_eq!((timed.bridge.connections(), timed.bridge.inflight()), (0, 0));
    assert!(kernel.is_closed());
}

#[test]
fn the_first_reply_to_the_kernel_resumes_where_it_began() {
    let mut timed = Timed::new();
    let mut kernel = timed.kernel_unread();
    kernel.send(READ, 0, 1, 0, 4096);
    kernel.send(READ, 0, 2, 4096, 4096);
    timed.settle();
    let mut first = [0; 16];
    kernel.stream.read_exact(&mut first[FIRST_BYTES.len()..]).unwrap();
    assert_eq!(first, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], "the head without magic");
    kernel.stream.read_exact(&mut [0; 4096]).unwrap();
    assert_eq!(kernel.reply(|_| 4096).cookie, 2, "the second has all");
}

#[test]
fn a_full_kernel_queue_is_accepted_at_once() {
    // As for a kernel device: all requests at the kernel's default size.
    let config =
        BridgeConfig { connections_max: 2, touched_bytes: BUSY_BYTES, ..BridgeConfig::default() };
    let mut timed = Timed::with(config);
    let mut kernel = timed.kernel();
    kernel.stream.set_nonblocking(true).unwrap();
    timed.switches.hold.store(true, SeqCst);
    let bytes = u32::try_from(REQUEST_BYTES).unwrap();
    for cookie in 0..u64::from(QUEUE_DEPTH) {
        let mut message = if cookie % 2 == 0 {
            request(READ, 0, cookie, 0, bytes)
        } else {
            let mut message = request(WRITE, 0, cookie, 0, bytes);
            message.resize(message.len() + REQUEST_BYTES, 1);
            message
        };
        while !message.is_empty() {
            match kernel.stream.write(&message) {
                Ok(sent) => drop(message.drain(..sent)),
                Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
            }
            timed.settle();
        }
    }
    assert_eq!(timed.bridge.inflight(), QUEUE_DEPTH as usize);
    timed.bridge.abort();
    timed.switches.hold.store(false, SeqCst);
    timed.settle();
    assert_eq!(timed.bridge.connections(), 0);
}
