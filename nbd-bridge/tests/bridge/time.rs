//! Bounds in time, on a bridge whose clock the test sets.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use nbd_bridge::{Bridge, export_info};
use rtrs_core::rt::Ring;
use rtrs_core::time::Instant;

use crate::client::{Client, READ, WRITE, request};
use crate::device::{Switches, TestDevice};
use crate::stand::{config, geometry};

struct Timed {
    ring: Rc<Ring>,
    bridge: Bridge,
    switches: Arc<Switches>,
    now: Instant,
}

impl Timed {
    fn new() -> Self {
        let ring = Ring::new(32).unwrap();
        let switches = Arc::new(Switches::default());
        let device = TestDevice::new(geometry(), Arc::clone(&switches));
        let export = export_info("vol0", &geometry());
        let bridge = Bridge::new(&ring, Box::new(device), export, config()).unwrap();
        Self { ring, bridge, switches, now: Instant::from_nanos(1 << 50) }
    }

    /// Turns until nothing happens for a while of real time.
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
        ours.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        self.bridge.adopt(self.now, theirs.into());
        ours
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
fn a_handshake_has_a_bound_however_busy() {
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
fn idle_clients_stay_and_late_devices_are_waited_for() {
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
    // A header in the middle while the device is full for long, then the rest of it.
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
    drop(client);
    timed.settle();
    assert_eq!((timed.bridge.connections(), timed.bridge.inflight()), (0, 0));
}

#[test]
fn a_message_that_stops_in_the_middle_has_a_bound() {
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
fn a_client_that_does_not_read_has_a_bound() {
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
