//! Tests of heartbeats on idle paths: intervals that clients announce, and the detection of dead
//! clients.

use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, Imm, errno};

use super::fixture::{Fixture, StandOptions, client_ip};
use super::peer::{Peer, PeerOptions};

const MS: Duration = Duration::from_millis(1);
const HEARTBEAT: (usize, Imm) = (0, Imm::Heartbeat { next_ms: 0 });
const ACK: (usize, Imm) = (0, Imm::HeartbeatAck);

/// A server that sends a heartbeat after 100 ms of silence, or after the announced time, up to a
/// second.
fn fixture() -> Fixture {
    let mut options = StandOptions::default();
    options.params.heartbeat_interval = 100 * MS;
    options.params.heartbeat_missed_max = 3;
    options.params.heartbeat_idle_max = 1000 * MS;
    Fixture::new(options)
}

fn of(n: u8) -> PeerOptions {
    PeerOptions { session: n, path: n, local: n, ..PeerOptions::default() }
}

/// Announces the next heartbeat.
fn announce(fixture: &mut Fixture, peer: &mut Peer, next_ms: u32) {
    peer.send_imm(0, Imm::Heartbeat { next_ms }.encode());
    assert_eq!(peer.immediates(fixture), [ACK]);
}

/// Time until the server sends a heartbeat, checked every 10 ms.
fn asked_after(fixture: &mut Fixture, peer: &mut Peer) -> u32 {
    for ms in (10..10_000).step_by(10) {
        fixture.pass(10 * MS);
        let came = peer.immediates(fixture);
        if !came.is_empty() {
            assert_eq!(came, [HEARTBEAT]);
            peer.send_imm(0, Imm::HeartbeatAck.encode());
            fixture.settle();
            return ms;
        }
    }
    panic!("the server sends no heartbeat");
}

#[test]
fn the_announced_heartbeat_interval_is_respected() {
    let mut fixture = fixture();
    let mut peer = Peer::open(&mut fixture, of(1));
    announce(&mut fixture, &mut peer, 600);
    let first = asked_after(&mut fixture, &mut peer);
    assert!((690..=720).contains(&first), "600 ms and one period: {first}");
    let next = asked_after(&mut fixture, &mut peer);
    assert!((690..=720).contains(&next), "it still holds: {next}");
    // The interval is no longer than the server allows.
    announce(&mut fixture, &mut peer, 1 << 27);
    let most = asked_after(&mut fixture, &mut peer);
    assert!((1090..=1120).contains(&most), "{most}");
    // A client can also return to the usual interval.
    announce(&mut fixture, &mut peer, 100);
    let usual = asked_after(&mut fixture, &mut peer);
    assert!((90..=120).contains(&usual), "{usual}");
    announce(&mut fixture, &mut peer, 600);
    peer.send_imm(0, Imm::Heartbeat { next_ms: 0 }.encode());
    assert_eq!(peer.immediates(&mut fixture), [ACK], "a heartbeat without an announcement");
    let kept = asked_after(&mut fixture, &mut peer);
    assert!((690..=720).contains(&kept), "does not change the interval: {kept}");
}

#[test]
fn a_client_silent_beyond_its_interval_is_dead() {
    let mut fixture = fixture();
    let mut peer = Peer::open(&mut fixture, of(1));
    announce(&mut fixture, &mut peer, 600);
    fixture.world.silence(client_ip(1), fixture.address.ip());
    fixture.pass(980 * MS);
    assert_eq!(fixture.sessions().len(), 1);
    fixture.pass(50 * MS);
    fixture.settle();
    fixture.assert_empty();
}

#[test]
fn an_unauthenticated_peer_cannot_announce_an_interval() {
    let mut fixture = fixture();
    let mut peer = Peer::up(&mut fixture, of(1), "stranger");
    announce(&mut fixture, &mut peer, 600);
    let usual = asked_after(&mut fixture, &mut peer);
    assert!((90..=120).contains(&usual), "{usual}");
}

/// A dead client on an idle path keeps its export for as long as it may be silent. A client that
/// waits for the export or for the name does not wait that long.
#[test]
fn a_dead_client_is_detected_when_another_wants_its_export() {
    for by_name in [false, true] {
        let mut fixture = fixture();
        let mut dead = Peer::open(&mut fixture, of(1));
        announce(&mut fixture, &mut dead, 1000);
        fixture.world.silence(client_ip(1), fixture.address.ip());
        fixture.pass(300 * MS);
        assert_eq!(fixture.sessions().len(), 1);
        if by_name {
            let mut next = Peer::new(&fixture, of(2));
            for cid in 0..next.options.cid_num {
                next.connect(&mut fixture, cid).expect("a connection");
            }
            next.introduce("sess");
            assert_eq!(next.closed(&mut fixture), 3, "it is taken");
        } else {
            let mut next = Peer::up(&mut fixture, of(2), "next");
            let refused = next.open_device(&mut fixture, "vol", AccessMode::ReadWrite);
            assert_eq!(refused, Err(errno::EPERM));
            fixture.pass(290 * MS);
            next.send_imm(0, Imm::HeartbeatAck.encode());
            let refused = next.open_device(&mut fixture, "vol", AccessMode::ReadWrite);
            assert_eq!(refused, Err(errno::EPERM), "not detected yet; probed once");
            fixture.pass(40 * MS);
            fixture.settle();
            next.open_device(&mut fixture, "vol", AccessMode::ReadWrite).expect("it is free");
            continue;
        }
        fixture.pass(290 * MS);
        assert_eq!(fixture.sessions().len(), 1);
        fixture.pass(40 * MS);
        fixture.settle();
        fixture.assert_empty();
    }
}

/// A live client receives a heartbeat too, and nothing else happens.
#[test]
fn a_live_client_keeps_its_export() {
    let mut fixture = fixture();
    let mut first = Peer::open(&mut fixture, of(1));
    announce(&mut fixture, &mut first, 1000);
    let mut next = Peer::up(&mut fixture, of(2), "next");
    next.open_device(&mut fixture, "vol", AccessMode::ReadWrite).expect_err("it is taken");
    assert_eq!(first.immediates(&mut fixture), [HEARTBEAT]);
    first.send_imm(0, Imm::HeartbeatAck.encode());
    let later = asked_after(&mut fixture, &mut first);
    assert!((1090..=1120).contains(&later), "what it announced still holds: {later}");
    assert_eq!(first.closed(&mut fixture), 0);
}
