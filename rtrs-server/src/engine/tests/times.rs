//! Tests of request times: the values in answers, and the counters.

use rtrs_core::fabric::sim::BindMode;
use rtrs_core::settings::AutoSwitch;
use rtrs_core::time::Duration;
use rtrs_core::wire::{ClientExtensions, Rw};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Peer, PeerOptions, io};
use crate::engine::session::SessionParams;

const MS: Duration = Duration::from_millis(1);

/// A client that accepts times, or one that does not.
fn client(times: bool) -> PeerOptions {
    let extensions = ClientExtensions { times, ..ClientExtensions::default() };
    PeerOptions { extensions, ..PeerOptions::default() }
}

/// Microseconds in the queue and at the disk, according to the last answer.
fn reported_times(peer: &Peer) -> (u32, u32) {
    let times = peer.times.expect("times");
    (times.queue_us, times.backend_us)
}

#[test]
fn an_answer_includes_the_time_at_the_disk() {
    for bind in [BindMode::Done, BindMode::Pending] {
        let mut fixture = Fixture::new(StandOptions { bind, ..StandOptions::default() });
        let mut peer = Peer::open(&mut fixture, client(true));
        fixture.device.lock().hold = true;
        peer.send_write((1, 1), io(Rw::WRITE, 0, 512), &[1; 512]);
        assert_eq!(peer.replies(&mut fixture), []);
        fixture.pass(30 * MS);
        fixture.device.lock().hold = false;
        fixture.pass(MS);
        assert_eq!(peer.reply(&mut fixture).errno, 0);
        let (queue, backend) = reported_times(&peer);
        assert!(queue < 1000 && (30_000..60_000).contains(&backend), "{queue} {backend}");
        let totals = fixture.counters();
        assert_eq!((totals.queue.count(), totals.backend.count()), (1, 1));
        assert!(totals.backend.nanos >= 30_000_000 && totals.queue.nanos < 1_000_000);
        let io = fixture.sessions()[0].io;
        assert_eq!(io.backend_ns, totals.backend.nanos);
        assert!(io.busy_ns >= io.backend_ns);
    }
}

#[test]
fn waiting_for_queue_space_is_queue_time() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, client(true));
    (fixture.device.lock().room, fixture.device.lock().hold) = (1, true);
    for permit in [1, 2] {
        peer.send_write((1, permit), io(Rw::WRITE, 0, 512), &[1; 512]);
    }
    assert_eq!(peer.replies(&mut fixture), []);
    fixture.pass(30 * MS);
    fixture.device.lock().hold = false;
    fixture.pass(MS);
    let permits: Vec<u16> = peer.replies(&mut fixture).iter().map(|reply| reply.permit).collect();
    assert_eq!(permits, [1, 2]);
    let (queue, backend) = reported_times(&peer);
    assert!((30_000..60_000).contains(&queue) && backend < 1000, "{queue} {backend}");
}

#[test]
fn all_steps_at_the_disk_are_counted() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, client(true));
    fixture.device.lock().hold = true;
    let rw = Rw::WRITE.preflush(true);
    peer.send_write((1, 1), io(rw, 0, 512), &[1; 512]);
    assert_eq!(peer.replies(&mut fixture), []);
    for _ in 0..2 {
        // The flush runs first, then the data.
        fixture.pass(20 * MS);
        fixture.device.lock().hold = false;
        fixture.pass(Duration::from_nanos(1));
        fixture.device.lock().hold = true;
    }
    fixture.device.lock().hold = false;
    fixture.pass(MS);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    let (queue, backend) = reported_times(&peer);
    assert!(queue < 1000 && backend >= 20_000, "{queue} {backend}");
}

/// Without times, answers equal those of a kernel server; the played client checks their length.
#[test]
fn times_are_sent_only_on_request() {
    for (times, always_invalidate) in
        [(false, AutoSwitch::On), (true, AutoSwitch::Off), (false, AutoSwitch::Off)]
    {
        let params = StandOptions::default().params;
        let params = SessionParams { always_invalidate, ..params };
        let mut fixture = Fixture::new(StandOptions { params, ..StandOptions::default() });
        let mut peer = Peer::open(&mut fixture, client(times));
        assert!(!peer.timed && peer.new_rkey == (always_invalidate == AutoSwitch::On));
        peer.send_read((1, 1), io(Rw::READ, 0, 512));
        assert_eq!(peer.reply(&mut fixture).errno, 0);
        assert!(peer.times.is_none());
        assert_eq!(fixture.counters().backend.count(), 1, "still counted here");
    }
}
