//! Tests of how paths and sessions end: replays, dead paths, silence, shutdown.

use rtrs_core::block::IoOp;
use rtrs_core::identity::ServerProcess;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, Fence, Imm, Rw, errno};

use super::fixture::{Fixture, StandOptions, client_ip};
use super::peer::{Peer, PeerOptions, io};
use crate::engine::session::ServerInstance;
use crate::stats::PathStage;

fn second_path() -> PeerOptions {
    PeerOptions { path: 2, local: 1, first_conn: false, ..PeerOptions::default() }
}

/// Creates a session with two paths and its device open.
fn two_paths(always_invalidate: bool) -> (Fixture, Peer, Peer) {
    let mut options = StandOptions::default();
    options.params.always_invalidate = always_invalidate.into();
    let mut fixture = Fixture::new(options);
    let a = Peer::open(&mut fixture, PeerOptions::default());
    let b = Peer::up(&mut fixture, second_path(), "sess");
    (fixture, a, b)
}

#[test]
fn a_replay_waits_for_its_original() {
    for dead in [false, true] {
        for conn in [1, 2] {
            let (mut fixture, mut a, mut b) = two_paths(true);
            fixture.device.lock().hold = true;
            a.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
            fixture.settle();
            if dead {
                a.leave(&mut fixture);
                let states: Vec<_> =
                    fixture.sessions()[0].paths.iter().map(|path| path.state).collect();
                assert_eq!(states, [PathStage::Draining, PathStage::Connected]);
            }
            b.send_write((conn, 6), io(Rw::WRITE, 0, 512), &[2; 512]);
            fixture.pass(Duration::from_millis(50));
            assert_eq!(b.replies(&mut fixture), [], "the original still runs");
            // The client abandoned the other path: late requests find it closed.
            let states: Vec<_> =
                fixture.sessions()[0].paths.iter().map(|path| path.state).collect();
            assert_eq!(states, [PathStage::Draining, PathStage::Connected]);
            let replays: u64 = fixture.sessions()[0].paths.iter().map(|path| path.io.replays).sum();
            assert_eq!(replays, 1);
            fixture.device.lock().hold = false;
            fixture.pass(Duration::from_millis(5));
            assert_eq!(b.reply(&mut fixture).errno, 0);
            assert_eq!(fixture.device.lock().log.len(), 2);
            assert_eq!(fixture.device.lock().bytes[..512], [2; 512], "the copy came last");
            assert_eq!(a.replies(&mut fixture), [], "nothing is answered on a path given up");
            assert_eq!(fixture.sessions()[0].paths.len(), 1);
            assert_eq!(fixture.load().1, 0);
        }
    }
}

#[test]
fn a_deferred_replay_ends_with_its_path() {
    let (mut fixture, mut a, mut b) = two_paths(true);
    fixture.device.lock().hold = true;
    a.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    b.send_write((2, 6), io(Rw::WRITE, 0, 512), &[2; 512]);
    fixture.settle();
    b.leave(&mut fixture);
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(a.replies(&mut fixture), [], "a path given up is not answered");
    assert_eq!(fixture.device.lock().log.len(), 1, "the replay never ran");
    fixture.assert_empty();
}

#[test]
fn two_deferred_requests_with_one_permit_are_a_violation() {
    let (mut fixture, mut a, mut b) = two_paths(false);
    fixture.device.lock().hold = true;
    a.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    b.send_write((2, 6), io(Rw::WRITE, 0, 512), &[2; 512]);
    b.send_write((2, 6), io(Rw::WRITE, 0, 512), &[3; 512]);
    assert_eq!(b.closed(&mut fixture), 3);
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(fixture.device.lock().log.len(), 1, "only the original ran");
    assert_eq!(a.replies(&mut fixture), []);
    fixture.assert_empty();
}

#[test]
fn a_replay_closes_the_abandoned_path() {
    let (mut fixture, mut a, mut b) = two_paths(true);
    fixture.device.lock().hold = true;
    a.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    b.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    assert_eq!(a.closed(&mut fixture), 3, "late requests find no connection");
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(b.reply(&mut fixture).errno, 0);
    // The client reconnects the path while the session keeps its device open.
    let again = PeerOptions { recon_cnt: 2, ..PeerOptions::default() };
    let mut back = Peer::up(&mut fixture, PeerOptions { first_conn: false, ..again }, "sess");
    back.send_read((1, 6), io(Rw::READ, 0, 512));
    assert_eq!(back.reply(&mut fixture).errno, 0);
}

#[test]
fn a_closing_path_waits_for_its_io_and_frees_everything() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().room = 2;
    fixture.device.lock().hold = true;
    for permit in 0..8u16 {
        let at = (1 + usize::from(permit) % 2, permit);
        peer.send_write(at, io(Rw::WRITE, u64::from(permit), 512), &[1; 512]);
    }
    fixture.settle();
    assert_eq!(fixture.load(), (3, 8));
    peer.leave(&mut fixture);
    assert_eq!(fixture.load(), (0, 4), "requests that no device accepted are dropped");
    assert_eq!(fixture.sessions()[0].paths[0].state, PathStage::Draining);
    // The client may reconnect, with new chunks, while old IO is still running.
    let again = PeerOptions { recon_cnt: 2, ..PeerOptions::default() };
    let mut back = Peer::up(&mut fixture, again, "sess");
    let opened = back.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap();
    assert_eq!(opened.device_id, 0);
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(fixture.load(), (3, 0));
    assert_eq!(fixture.sessions()[0].paths.len(), 1);
    back.send_read((1, 0), io(Rw::READ, 0, 512));
    assert_eq!(back.reply(&mut fixture).errno, 0);
    back.leave(&mut fixture);
    fixture.assert_empty();
    assert_eq!(fixture.device.lock().open, 0);
}

#[test]
fn dead_paths_with_running_io_do_not_accumulate() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().hold = true;
    for life in 0..4u16 {
        // Each path writes to a different range, so none waits for another.
        let sector = u64::from(life);
        peer.send_write((1, life), io(Rw::WRITE, sector, 512), &[1; 512]);
        fixture.settle();
        peer.leave(&mut fixture);
        let next = PeerOptions { recon_cnt: life + 2, ..PeerOptions::default() };
        if life == 3 {
            let refused = Peer::new(&fixture, next).connect(&mut fixture, 0).unwrap_err();
            assert_eq!(refused, -104);
            break;
        }
        peer = Peer::up(&mut fixture, next, "sess");
    }
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    fixture.assert_empty();
}

#[test]
fn a_dead_path_does_not_affect_the_other_or_the_devices() {
    let (mut fixture, mut a, mut b) = two_paths(true);
    a.leave(&mut fixture);
    assert_eq!(fixture.open_names(), ["vol"]);
    b.send_write((1, 0), io(Rw::WRITE, 0, 512), &[1; 512]);
    assert_eq!(b.reply(&mut fixture).errno, 0, "the device is open on the session, not the path");
    b.leave(&mut fixture);
    fixture.assert_empty();
    assert_eq!(fixture.device.lock().open, 0);
}

#[test]
fn one_lost_connection_ends_its_whole_path() {
    for conn in 0..3 {
        let mut fixture = Fixture::new(StandOptions::default());
        let mut peer = Peer::open(&mut fixture, PeerOptions::default());
        let qp = peer.conns[conn];
        let now = fixture.now();
        peer.fabric.abort(now, qp);
        assert_eq!(peer.closed(&mut fixture), 3, "connection {conn}");
        fixture.assert_empty();
    }
}

#[test]
fn heartbeats_are_answered_at_once() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    fixture.posted();
    peer.send_imm(0, 0x8000_0000);
    assert_eq!(peer.immediates(&mut fixture), [(0, Imm::HeartbeatAck)]);
    let posted = fixture.posted();
    assert_eq!(posted.len(), 1);
    assert!(posted[0].bytes.is_empty());
}

#[test]
fn idle_peers_are_probed_and_silent_ones_closed() {
    let mut options = StandOptions::default();
    options.params.heartbeat_interval = Duration::from_millis(100);
    options.params.heartbeat_missed_max = 3;
    let mut fixture = Fixture::new(options);
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    for _ in 0..5 {
        fixture.pass(Duration::from_millis(110));
        assert_eq!(peer.immediates(&mut fixture), [(0, Imm::Heartbeat { next_ms: 0 })]);
        peer.send_imm(0, 0x9000_0000);
    }
    fixture.settle();
    assert!(fixture.sessions()[0].paths[0].heartbeat_us.is_some());
    // Traffic on any connection is a sign of life.
    for _ in 0..20 {
        fixture.pass(Duration::from_millis(50));
        peer.send_flush((2, 0));
        assert_eq!(peer.immediates(&mut fixture).len(), 1, "no heartbeat, one answer");
    }
    fixture.world.silence(client_ip(0), fixture.address.ip());
    fixture.pass(Duration::from_millis(390));
    assert_eq!(fixture.sessions().len(), 1);
    fixture.pass(Duration::from_millis(30));
    fixture.settle();
    fixture.assert_empty();
}

#[test]
fn two_sessions_are_independent() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut a = Peer::open(&mut fixture, PeerOptions::default());
    let options = PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() };
    let mut b = Peer::up(&mut fixture, options, "b");
    assert_eq!(
        b.open_device(&mut fixture, "vol", AccessMode::ReadWrite),
        Err(errno::EPERM),
        "the other one writes"
    );
    b.open_device(&mut fixture, "other", AccessMode::ReadWrite).unwrap();
    fixture.device.lock().hold = true;
    a.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    b.send_write((1, 6), io(Rw::WRITE, 0, 512), &[2; 512]);
    assert_eq!(b.reply(&mut fixture).errno, 0, "permits are per session");
    fixture.device.lock().hold = false;
    assert_eq!(a.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.device.lock().bytes[..512], [1; 512]);
}

#[test]
fn a_fence_is_answered_once_nothing_of_the_path_can_start() {
    let (mut fixture, mut a, mut b) = two_paths(true);
    let path = PeerOptions::default().request(0).path_uuid;
    fixture.device.lock().hold = true;
    a.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    b.send_fence(0, Fence { path, recon_cnt: 0, process: ServerProcess::NONE });
    assert_eq!(b.reply(&mut fixture).errno, 0, "nothing of an old connect is left");
    assert_eq!(fixture.sessions()[0].paths[0].state, PathStage::Connected);

    b.send_fence(0, Fence { path, recon_cnt: 1, process: ServerProcess::NONE });
    let reply = b.reply(&mut fixture);
    assert_eq!((reply.permit, reply.errno), (0, 0));
    assert_eq!(a.closed(&mut fixture), 3);
    assert_eq!(fixture.sessions()[0].paths[0].state, PathStage::Draining, "its write still runs");
    // Its orphaned write delays the copy.
    b.send_write((1, 6), io(Rw::WRITE, 0, 512), &[2; 512]);
    fixture.pass(Duration::from_millis(50));
    assert_eq!(b.replies(&mut fixture), []);
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(5));
    assert_eq!(b.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.device.lock().log.len(), 2);
    assert_eq!(fixture.device.lock().bytes[..512], [2; 512]);
    // A repeated fence, and one for an unknown path: neither path can start any work.
    for uuid in [path, rtrs_core::ids::PathUuid([0x77; 16])] {
        b.send_fence(0, Fence { path: uuid, recon_cnt: 9, process: ServerProcess::NONE });
        assert_eq!(b.reply(&mut fixture).errno, 0);
    }
    // A path cannot fence itself.
    let own = second_path().request(0).path_uuid;
    b.send_fence(0, Fence { path: own, recon_cnt: 9, process: ServerProcess::NONE });
    assert_eq!(b.reply(&mut fixture).errno, errno::EINVAL);
    b.leave(&mut fixture);
    fixture.assert_empty();
}

#[test]
fn fences_and_connects_do_not_wait_for_slowly_closing_connections() {
    use PathStage::{Connected, Draining};
    let (mut fixture, mut a, mut b) = two_paths(true);
    fixture.world.linger(fixture.address.ip(), Duration::from_secs(9));
    let path = PeerOptions::default().request(0).path_uuid;
    fixture.device.lock().hold = true;
    a.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.pass(Duration::from_millis(5));
    b.send_fence(0, Fence { path, recon_cnt: 1, process: ServerProcess::NONE });
    // This request arrives with the fence, and is never started.
    a.send_write((2, 7), io(Rw::WRITE, 1, 512), &[7; 512]);
    fixture.pass(Duration::from_millis(50));
    assert_eq!(b.reply(&mut fixture).errno, 0);
    let states =
        |fixture: &Fixture| fixture.sessions()[0].paths.iter().map(|p| p.state).collect::<Vec<_>>();
    assert_eq!(states(&fixture), [Draining, Connected]);
    fixture.device.lock().hold = false;
    fixture.pass(Duration::from_millis(50));
    assert_eq!(fixture.device.lock().log.len(), 1, "the first write, and nothing more");
    assert_eq!(states(&fixture)[0], Draining, "its connections are still there");
    let again = PeerOptions { recon_cnt: 2, first_conn: false, ..PeerOptions::default() };
    let mut back = Peer::up(&mut fixture, again, "sess");
    back.send_write((1, 8), io(Rw::WRITE, 0, 512), &[8; 512]);
    fixture.pass(Duration::from_millis(5));
    assert_eq!(back.reply(&mut fixture).errno, 0);
    assert_eq!(states(&fixture), [Draining, Connected, Connected]);
    fixture.pass(Duration::from_secs(9));
    assert_eq!(states(&fixture), [Connected, Connected]);
    fixture.world.linger(fixture.address.ip(), Duration::ZERO);
    back.leave(&mut fixture);
    b.leave(&mut fixture);
    fixture.assert_empty();
}

#[test]
fn a_fence_by_another_process_requires_the_sessions_write_locks() {
    let path = PeerOptions::default().request(0).path_uuid;
    for exclusive in [false, true] {
        let mut options = StandOptions { exclusive, ..StandOptions::default() };
        options.params.instance = ServerInstance { boot: 1, process: 7 };
        let mut fixture = Fixture::new(options);
        let options = PeerOptions { first_conn: true, ..second_path() };
        let mut b = Peer::up(&mut fixture, options, "sess");
        let mut ask = |fixture: &mut Fixture, process| {
            b.send_fence(0, Fence { path, recon_cnt: 3, process: ServerProcess::new(process) });
            b.reply(fixture).errno
        };
        assert_eq!(ask(&mut fixture, 8), 0, "the session writes nothing");
        let a = Peer::open(&mut fixture, PeerOptions { path: 9, ..PeerOptions::default() });
        let refused = if exclusive { 0 } else { errno::ENOLCK };
        assert_eq!(ask(&mut fixture, 8), refused);
        // The process itself can answer, and a client of an earlier version names no process.
        for process in [7, 0] {
            assert_eq!(ask(&mut fixture, process), 0);
        }
        drop(a);
    }
}

#[test]
fn a_fence_affects_no_other_session() {
    let (mut fixture, _a, _b) = two_paths(true);
    let path = PeerOptions::default().request(0).path_uuid;
    let other = PeerOptions { session: 2, path: 7, local: 2, ..PeerOptions::default() };
    let mut other = Peer::up(&mut fixture, other, "other");
    other.send_fence(0, Fence { path, recon_cnt: 9, process: ServerProcess::NONE });
    assert_eq!(other.reply(&mut fixture).errno, 0);
    let sessions = fixture.sessions();
    let states = sessions.iter().flat_map(|session| &session.paths).map(|path| path.state);
    assert!(states.clone().all(|state| state == PathStage::Connected), "{sessions:?}");
    assert_eq!(states.count(), 3);
}

#[test]
fn shutdown_completes_running_io_and_accepts_no_more() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    let mut half = Peer::new(
        &fixture,
        PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() },
    );
    half.connect(&mut fixture, 0).unwrap();
    fixture.device.lock().hold = true;
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    peer.send_write((2, 7), io(Rw::WRITE, 8, 512), &[1; 512]);
    fixture.settle();
    fixture.shutdown();
    fixture.settle();
    assert_eq!(half.closed(&mut fixture), 1);
    peer.send_write((1, 8), io(Rw::WRITE, 16, 512), &[1; 512]);
    let refused = half.connect(&mut fixture, 0).unwrap_err();
    assert_eq!(refused, -104);
    assert!(!fixture.all_done());
    fixture.device.lock().hold = false;
    let mut permits: Vec<_> = peer.replies(&mut fixture).iter().map(|r| r.permit).collect();
    permits.sort_unstable();
    assert_eq!(permits, [6, 7], "both were answered before their connections ended");
    let writes = fixture.device.lock().log.iter().filter(|io| io.0 == IoOp::Write).count();
    assert_eq!(writes, 2);
    assert_eq!(peer.closed(&mut fixture), 3);
    assert!(fixture.all_done());
    fixture.assert_empty();
}

#[test]
fn shutdown_is_bounded_by_its_grace_time() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().hold = true;
    peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
    fixture.settle();
    fixture.shutdown();
    fixture.pass(Duration::from_millis(4990));
    assert!(!fixture.all_done());
    assert_eq!(peer.closed(&mut fixture), 0);
    fixture.pass(Duration::from_millis(20));
    assert_eq!(peer.closed(&mut fixture), 3);
    assert!(!fixture.all_done(), "the device still works on it");
    fixture.pass(Duration::from_millis(2100));
    assert!(fixture.all_done());
}

#[test]
fn an_idle_server_stops_at_once() {
    let mut fixture = Fixture::new(StandOptions::default());
    fixture.shutdown();
    fixture.settle();
    assert!(fixture.all_done());
}
