//! Tests of lost acknowledged writes, and of the flushes that report the losses to clients.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use nbd_bridge::kernel::FIRST_BYTES;
use nbd_bridge::{Bridge, BridgeConfig};
use rtrs_core::rt::Ring;
use rtrs_core::time::Instant;

use crate::client::{FLUSH, READ, WRITE, pattern, request};
use crate::device::{Switches, TestDevice};
use crate::fixture::{Fixture, config, geometry};

#[test]
fn a_loss_fails_one_flush_per_client_and_is_counted() {
    let fixture = Fixture::new();
    let mut clients = [fixture.client(true), fixture.client(true)];
    fixture.switches.losses.add();
    for client in &mut clients {
        assert_eq!(client.error_of(FLUSH, 0, 0, 0), 5);
        assert_eq!(client.error_of(FLUSH, 0, 0, 0), 0);
    }
    for client in clients {
        client.disconnect();
    }
    let stats = fixture.finish();
    assert_eq!((stats.completed, stats.failed), (4, 2));
}

#[test]
fn clients_that_flush_once_do_not_get_a_loss_reported_forever() {
    for disconnects in [true, false] {
        let fixture = Fixture::new();
        fixture.switches.losses.add();
        let mut first = fixture.accepted_client();
        assert_eq!(first.error_of(FLUSH, 0, 0, 0), 5);
        if disconnects {
            first.disconnect();
        } else {
            drop(first);
            fixture.wait("its end", |report| report.connections == 0);
        }
        let mut second = fixture.accepted_client();
        assert_eq!(second.error_of(FLUSH, 0, 0, 0), 0);
        second.disconnect();
        fixture.finish();
    }
}

#[test]
fn a_client_that_missed_the_report_of_a_loss_gets_it_after_reconnecting() {
    let fixture = Fixture::new();
    let mut early = fixture.accepted_client();
    fixture.switches.losses.add();
    early.send(FLUSH, 0, 1, 0, 0);
    fixture.wait("the failed flush", |report| report.stats.failed == 1);
    early.stream.shutdown(Shutdown::Both).unwrap();
    fixture.wait("its end", |report| report.connections == 0);
    let mut again = fixture.accepted_client();
    // Disconnecting without a flush settles nothing.
    fixture.accepted_client().disconnect();
    assert_eq!(again.error_of(FLUSH, 0, 0, 0), 5);
    again.disconnect();
    fixture.finish();
}

/// A flush by another client during the write does not report the loss.
#[test]
fn a_loss_between_parts_of_a_write_is_reported_after_its_end() {
    let fixture = Fixture::new();
    let mut clients = [fixture.client(true), fixture.client(true)];
    let bytes = [request(WRITE, 0, 1, 0, 300_000), pattern(1, 300_000)].concat();
    let (first, rest) = bytes.split_at(280_000);
    clients[0].stream.write_all(first).unwrap();
    fixture.wait("end of its first piece", |report| report.stats.completed == 1);
    fixture.switches.losses.add_shared();
    assert_eq!(clients[1].error_of(FLUSH, 0, 0, 0), 5);
    clients[0].stream.write_all(rest).unwrap();
    assert_eq!(clients[0].reply(|_| 0).error, 0);
    for client in &mut clients {
        assert_eq!(client.error_of(FLUSH, 0, 0, 0), 5);
        assert_eq!(client.error_of(FLUSH, 0, 0, 0), 0, "once");
    }
    for client in clients {
        client.disconnect();
    }
    fixture.finish();
}

/// Each write overlaps the next one in time.
#[test]
fn a_reported_loss_is_not_reported_again() {
    let fixture = Fixture::new();
    let mut clients: Vec<_> = (0..4).map(|_| fixture.client(true)).collect();
    let (data, len) = (pattern(1, 586 * 512), 586 * 512);
    let (first, rest) = data.split_at(280_000);
    let losses = &fixture.switches.losses;
    for at in 0..clients.len() {
        clients[at].stream.write_all(&request(WRITE, 0, 1, (at as u64) << 20, len)).unwrap();
        clients[at].stream.write_all(first).unwrap();
        let ended = |completed| completed == 2 * at as u64 + u64::from(at == 0);
        fixture.wait("first piece", |report| ended(report.stats.completed));
        match at.checked_sub(1) {
            None => losses.add_shared(),
            Some(before) => {
                clients[before].stream.write_all(rest).unwrap();
                assert_eq!(clients[before].reply(|_| 0).error, 0);
            }
        }
    }
    assert_eq!((losses.shared(), losses.count()), (1, 2));
    drop(clients);
    fixture.finish();
}

/// The second flush is sent before the first one fails, and waits for a row until then.
#[test]
fn a_flush_received_before_a_loss_was_reported_fails_too() {
    for (writes, requests_max) in [(0, 1), (0, 2), (3, 2), (40, 8)] {
        let fixture = Fixture::with(geometry(), BridgeConfig { requests_max, ..config() });
        let mut client = fixture.client(false);
        fixture.switches.hold.store(true, SeqCst);
        client.send(FLUSH, 0, 1, 0, 0);
        for cookie in 0..writes {
            client.send_write(0, 100 + cookie, 4096 * cookie, &[7; 4096]);
        }
        client.send(FLUSH, 0, 2, 0, 0);
        // A connection has at most as many rows as are free.
        let rows = requests_max as usize / 2 + 1;
        fixture.wait("full table", |report| report.inflight == rows);
        fixture.switches.losses.add();
        fixture.switches.hold.store(false, SeqCst);
        for _ in 0..writes + 2 {
            let reply = client.reply(|_| 0);
            assert_eq!(reply.error != 0, reply.cookie < 100, "{requests_max} rows: {reply:?}");
        }
        assert_eq!(client.error_of(FLUSH, 0, 0, 0), 0, "the loss was already reported");
        client.disconnect();
        fixture.finish();
    }
}

/// Bridge and client of a kernel device, run turn by turn in one thread.
struct Turns {
    ring: Rc<Ring>,
    bridge: Bridge,
    switches: Arc<Switches>,
    client: UnixStream,
    /// Bytes of replies that the client has received.
    replies: Vec<u8>,
}

impl Turns {
    const NOW: Instant = Instant::from_nanos(1 << 50);

    fn new() -> Self {
        let ring = Ring::new(32).unwrap();
        let switches = Arc::new(Switches::default());
        let device = TestDevice::new(geometry(), Arc::clone(&switches));
        let mut bridge = Bridge::new(&ring, Box::new(device), "vol0", config()).unwrap();
        let (client, theirs) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        assert!(bridge.adopt_kernel(Self::NOW, theirs.into()));
        // The process that connected the device has already sent the beginning of the first reply.
        Self { ring, bridge, switches, client, replies: FIRST_BYTES.to_vec() }
    }

    fn ask(&mut self, command: u16, cookie: u64, len: u32) {
        self.client.write_all(&request(command, 0, cookie, 0, len)).unwrap();
    }

    fn pass(&mut self) {
        self.ring.turn().unwrap();
        self.bridge.turn(Self::NOW);
    }

    fn until(&mut self, what: &str, done: impl Fn(&Bridge) -> bool) {
        for _ in 0..100_000 {
            if done(&self.bridge) {
                return;
            }
            self.pass();
        }
        panic!("no {what}; {} requests in flight", self.bridge.inflight());
    }

    /// Completes a held flush with a loss, in a turn that receives nothing.
    fn lose(&mut self) {
        self.switches.losses.add();
        self.switches.hold.store(false, SeqCst);
        self.bridge.turn(Self::NOW);
    }

    /// Receives a reply with this amount of data, and returns its error.
    fn error(&mut self, data: usize) -> u32 {
        let len = 16 + data;
        let mut bytes = [0; 64 << 10];
        for _ in 0..100_000 {
            if self.replies.len() >= len {
                break;
            }
            self.pass();
            if let Ok(count) = self.client.read(&mut bytes) {
                self.replies.extend_from_slice(&bytes[..count]);
            }
        }
        let reply: Vec<u8> = self.replies.drain(..len).collect();
        u32::from_be_bytes(reply[4..8].try_into().unwrap())
    }
}

/// The second flush is still in the socket when the first one fails, and its connection is not
/// stalled.
#[test]
fn a_flush_sent_before_a_loss_was_reported_fails_too() {
    let mut turns = Turns::new();
    turns.switches.hold.store(true, SeqCst);
    turns.ask(FLUSH, 1, 0);
    turns.until("flush at the device", |bridge| bridge.inflight() == 1);
    turns.ask(FLUSH, 2, 0);
    turns.lose();
    assert_eq!([turns.error(0), turns.error(0)], [5, 5]);
    turns.ask(FLUSH, 3, 0);
    assert_eq!(turns.error(0), 0, "the loss was already reported");
}

/// The reply to the first flush waits until the data of a read has been sent.
#[test]
fn a_flush_sent_while_the_report_of_a_loss_waits_fails_too() {
    let mut turns = Turns::new();
    turns.ask(READ, 1, 4 << 20);
    turns.until("read", |bridge| bridge.inflight() == 1);
    // Its reply is being sent, but the socket has no room for all of it.
    (0..100).for_each(|_| turns.pass());
    turns.switches.hold.store(true, SeqCst);
    turns.ask(FLUSH, 2, 0);
    turns.until("flush at the device", |bridge| bridge.inflight() == 2);
    turns.lose();
    turns.ask(FLUSH, 3, 0);
    turns.until("second flush", |bridge| bridge.inflight() == 3);
    assert_eq!([turns.error(4 << 20), turns.error(0), turns.error(0)], [0, 5, 5]);
    turns.ask(FLUSH, 4, 0);
    assert_eq!(turns.error(0), 0, "the loss was already reported");
}
