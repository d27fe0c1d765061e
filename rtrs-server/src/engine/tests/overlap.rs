//! Tests of orphaned writes, and of the requests that wait for them.

use std::ops::Range;

use rtrs_core::block::{Geometry, IoOp};
use rtrs_core::identity::ServerProcess;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, Fence, Rw, WriteMsg, errno};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Data, Peer, PeerOptions, io};
use crate::stats::PathStage;

const MS: Duration = Duration::from_millis(1);
const SECTOR: usize = 512;

/// A session with two paths, with `vol` open.
fn two_paths(geometry: Geometry) -> (Fixture, Peer, Peer) {
    let mut fixture = Fixture::new(StandOptions { geometry, ..StandOptions::default() });
    let a = Peer::open(&mut fixture, PeerOptions::default());
    let second = PeerOptions { path: 2, local: 1, first_conn: false, ..PeerOptions::default() };
    let b = Peer::up(&mut fixture, second, "sess");
    fixture.device.lock().bytes.fill(9);
    (fixture, a, b)
}

fn usual() -> Geometry {
    StandOptions::default().geometry
}

/// An operation that changes sectors; a write fills them with its byte.
#[derive(Clone, Copy, Debug)]
struct Change {
    op: IoOp,
    byte: u8,
}

const DISCARD: Change = Change { op: IoOp::Discard, byte: 0 };
const WRITE_ZEROES: Change = Change { op: IoOp::WriteZeroes, byte: 0 };

fn write(byte: u8) -> Change {
    Change { op: IoOp::Write, byte }
}

/// Sends a change of these sectors.
fn change(peer: &mut Peer, at: (usize, u16), change: Change, sectors: Range<u64>) {
    let Range { start: sector, end } = sectors;
    let len = (end - sector) as u32 * 512;
    let rw = match change.op {
        IoOp::Write => {
            let data = vec![change.byte; len as usize];
            return peer.send_write(at, io(Rw::WRITE, sector, len), &data);
        }
        IoOp::Discard => Rw::DISCARD,
        _ => Rw::WRITE_ZEROES,
    };
    let (header, message) = (io(rw, sector, len).encode(), WriteMsg { usr_len: 32 }.encode());
    peer.request(at, Data::None, &header, &message);
}

/// Fences off path a over b once `hold` has left changes from a in flight; `left` orphans remain.
fn leave_running(
    fixture: &mut Fixture,
    b: &mut Peer,
    hold: impl FnOnce(&mut Fixture),
    left: usize,
) {
    hold(fixture);
    fixture.settle();
    let path = PeerOptions::default().request(0).path_uuid;
    b.send_fence(0, Fence { path, recon_cnt: 1, process: ServerProcess::NONE });
    assert_eq!(b.reply(fixture).errno, 0);
    let states: Vec<_> = fixture.sessions()[0].paths.iter().map(|path| path.state).collect();
    assert_eq!(states, [PathStage::Draining, PathStage::Connected]);
    assert_eq!(fixture.orphaned_writes(), left);
}

fn release(fixture: &mut Fixture) {
    {
        let mut device = fixture.device.lock();
        (device.hold, device.hold_flush, device.holds) = (false, false, false);
    }
    fixture.pass(5 * MS);
}

/// Numbers of requests that wait for orphaned writes, and of requests detected as copies.
fn waiting(fixture: &Fixture) -> (u64, u64) {
    let sessions = fixture.sessions();
    let paths = || sessions.iter().flat_map(|session| &session.paths);
    (paths().map(|path| path.io.blocked).sum(), paths().map(|path| path.io.replays).sum())
}

fn permits(replies: &[super::peer::Reply]) -> Vec<u16> {
    assert!(replies.iter().all(|reply| reply.errno == 0), "{replies:?}");
    replies.iter().map(|reply| reply.permit).collect()
}

/// The byte that fills a sector.
fn content(fixture: &Fixture, sector: usize) -> u8 {
    let bytes = &fixture.device.lock().bytes[sector * SECTOR..(sector + 1) * SECTOR];
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "sector {sector} is torn");
    bytes[0]
}

#[test]
fn a_newer_change_waits_for_one_left_by_a_closed_path() {
    let kinds = [write(1), DISCARD, WRITE_ZEROES];
    for (n, (older, newer)) in kinds.into_iter().flat_map(|a| kinds.map(|b| (a, b))).enumerate() {
        // On one shard, and on two.
        let (conn, other) = (1, 1 + n % 2);
        let newer = Change { byte: newer.byte * 2, ..newer };
        let (mut fixture, mut a, mut b) = two_paths(usual());
        b.open_device(&mut fixture, "other", AccessMode::ReadWrite).unwrap();
        let hold = |fixture: &mut Fixture| {
            fixture.device.lock().hold_after = Some(0);
            change(&mut a, (conn, 6), older, 8..16);
        };
        leave_running(&mut fixture, &mut b, hold, 1);
        assert_eq!(fixture.sessions()[0].permits_held, 0, "what is left has no permit");

        change(&mut b, (other, 7), newer, 15..17);
        fixture.pass(50 * MS);
        assert_eq!(b.replies(&mut fixture), [], "{older:?} still runs");
        assert_eq!((waiting(&fixture), fixture.load().1), ((1, 0), 2));
        // Everything else continues: changes next to it, reads and flushes, and a different export.
        change(&mut b, (other, 8), newer, 7..8);
        change(&mut b, (conn, 9), newer, 16..20);
        b.send_read((other, 10), io(Rw::READ, 8, 4096));
        b.send_flush((conn, 11));
        let device = rtrs_core::wire::IoHeader { device_id: 1, ..io(Rw::WRITE, 8, 512) };
        b.send_write((other, 12), device, &[7; SECTOR]);
        let mut answered = permits(&b.replies(&mut fixture));
        answered.sort_unstable();
        assert_eq!(answered, [8, 9, 10, 11, 12]);
        assert_eq!(b.result(4096), [9; 4096], "the older one has not run");

        fixture.device.lock().log.clear();
        release(&mut fixture);
        assert_eq!(permits(&b.replies(&mut fixture)), [7]);
        let ran: Vec<_> = fixture.device.lock().log.iter().map(|ran| (ran.0, ran.1)).collect();
        assert_eq!(ran, [(older.op, 4096), (newer.op, 7680)]);
        let found = [7, 8, 14, 15, 16, 20].map(|sector| content(&fixture, sector));
        assert_eq!(found, [newer.byte, older.byte, older.byte, newer.byte, newer.byte, 9]);
        assert_eq!(
            (waiting(&fixture), fixture.orphaned_writes(), fixture.load().1),
            ((0, 0), 0, 0)
        );
        assert_eq!(fixture.sessions()[0].paths.len(), 1, "the closed path has ended");
        b.leave(&mut fixture);
        fixture.assert_empty();
    }
}

#[test]
fn only_the_running_part_is_awaited() {
    let geometry = Geometry { io_max: 1024, ..usual() };
    let (mut fixture, mut a, mut b) = two_paths(geometry);
    let hold = |fixture: &mut Fixture| {
        fixture.device.lock().hold_after = Some(1);
        change(&mut a, (1, 6), write(1), 1..8);
    };
    leave_running(&mut fixture, &mut b, hold, 1);
    // The first part is done, the second is running, and the others never start.
    for (permit, sector) in [(1, 2), (2, 3), (3, 4), (4, 5)] {
        change(&mut b, (2, permit), write(2), sector..sector + 1);
    }
    assert_eq!(permits(&b.replies(&mut fixture)), [1, 4]);
    assert_eq!(waiting(&fixture), (2, 0));
    release(&mut fixture);
    assert_eq!(permits(&b.replies(&mut fixture)), [2, 3]);
    assert_eq!([1, 2, 3, 4, 5, 6].map(|sector| content(&fixture, sector)), [1, 2, 2, 2, 2, 9]);
    assert_eq!(fixture.orphaned_writes(), 0);
}

#[test]
fn a_replay_waits_for_its_original_but_other_requests_do_not() {
    let (mut fixture, mut a, mut b) = two_paths(usual());
    let hold = |fixture: &mut Fixture| {
        fixture.device.lock().hold_after = Some(0);
        change(&mut a, (1, 6), write(1), 8..16);
    };
    leave_running(&mut fixture, &mut b, hold, 1);
    // The client has abandoned the write, and uses the permit for something else.
    change(&mut b, (2, 6), write(2), 32..40);
    assert_eq!(permits(&b.replies(&mut fixture)), [6]);
    b.send_read((1, 6), io(Rw::READ, 8, 512));
    assert_eq!(permits(&b.replies(&mut fixture)), [6]);
    assert_eq!(waiting(&fixture), (0, 0));
    // Now the client resends the same write.
    change(&mut b, (2, 6), write(1), 8..16);
    fixture.pass(50 * MS);
    assert_eq!((b.replies(&mut fixture), waiting(&fixture)), (vec![], (1, 1)));
    release(&mut fixture);
    assert_eq!(permits(&b.replies(&mut fixture)), [6]);
    assert_eq!(fixture.device.lock().log.len(), 4);
    assert_eq!((fixture.orphaned_writes(), content(&fixture, 8)), (0, 1));
}

#[test]
fn requests_that_have_changed_nothing_yet_block_nothing() {
    // A read, a write with a flush before it, and one with a flush after it.
    let geometry = Geometry { fua: false, write_cache: true, ..usual() };
    for rw in [Rw::READ, Rw::WRITE.preflush(true), Rw::WRITE.fua(true)] {
        let (mut fixture, mut a, mut b) = two_paths(geometry.clone());
        let flushed_after = rw == Rw::WRITE.fua(true);
        let hold = |fixture: &mut Fixture| {
            fixture.device.lock().hold = !flushed_after;
            fixture.device.lock().hold_flush = flushed_after;
            match rw {
                Rw::READ => a.send_read((1, 6), io(rw, 8, 512)),
                _ => a.send_write((1, 6), io(rw, 8, 512), &[1; SECTOR]),
            }
        };
        leave_running(&mut fixture, &mut b, hold, 0);
        change(&mut b, (2, 7), write(2), 8..9);
        fixture.settle();
        assert_eq!(waiting(&fixture), (0, 0), "{rw:?}");
        release(&mut fixture);
        assert_eq!(permits(&b.replies(&mut fixture)), [7]);
        assert_eq!(content(&fixture, 8), 2);
        let writes = fixture.device.lock().log.iter().filter(|ran| ran.0 == IoOp::Write).count();
        assert_eq!(writes, 1 + usize::from(flushed_after), "{rw:?}");
    }
    // Requests that the device has not accepted are dropped.
    let (mut fixture, mut a, mut b) = two_paths(usual());
    fixture.device.lock().room = 1;
    let hold = |fixture: &mut Fixture| {
        fixture.device.lock().hold_after = Some(0);
        change(&mut a, (1, 6), write(1), 8..9);
        change(&mut a, (1, 7), write(1), 9..10);
    };
    leave_running(&mut fixture, &mut b, hold, 1);
    change(&mut b, (2, 8), write(2), 9..10);
    assert_eq!(permits(&b.replies(&mut fixture)), [8]);
    release(&mut fixture);
    assert_eq!([8, 9].map(|sector| content(&fixture, sector)), [1, 2]);
}

/// Path a has left a write to sectors 8 to 15, and a newer write from b with permit 7 waits for it.
fn one_waits() -> (Fixture, Peer, Peer) {
    let (mut fixture, mut a, mut b) = two_paths(usual());
    let hold = |fixture: &mut Fixture| {
        fixture.device.lock().hold_after = Some(0);
        change(&mut a, (1, 6), write(1), 8..16);
    };
    leave_running(&mut fixture, &mut b, hold, 1);
    change(&mut b, (2, 7), write(2), 8..16);
    fixture.pass(5 * MS);
    assert_eq!((b.replies(&mut fixture), waiting(&fixture)), (vec![], (1, 0)));
    (fixture, a, b)
}

#[test]
fn a_blocked_request_ends_with_its_path() {
    let (mut fixture, _a, mut b) = one_waits();
    b.leave(&mut fixture);
    assert_eq!(fixture.load(), (0, 1), "what is left still runs");
    release(&mut fixture);
    assert_eq!(content(&fixture, 8), 1);
    assert_eq!(fixture.device.lock().log.len(), 1, "the newer one never ran");
    fixture.assert_empty();
}

#[test]
fn a_reconnected_path_waits_for_its_orphaned_write() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut old = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().hold_after = Some(0);
    change(&mut old, (1, 6), write(1), 8..16);
    fixture.settle();
    old.leave(&mut fixture);
    let again = PeerOptions { recon_cnt: 2, ..PeerOptions::default() };
    let mut new = Peer::up(&mut fixture, again, "sess");
    new.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap();
    change(&mut new, (2, 7), write(2), 8..16);
    fixture.pass(50 * MS);
    assert_eq!((new.replies(&mut fixture), waiting(&fixture)), (vec![], (1, 0)));
    release(&mut fixture);
    assert_eq!((permits(&new.replies(&mut fixture)), content(&fixture, 8)), (vec![7], 2));
}

#[test]
fn a_close_waits_for_the_orphaned_and_the_blocked_write() {
    let (mut fixture, _a, mut b) = one_waits();
    let other = PeerOptions { session: 2, path: 7, local: 2, ..PeerOptions::default() };
    let mut other = Peer::up(&mut fixture, other, "other");
    b.send_close(1, 0);
    fixture.pass(50 * MS);
    assert_eq!(b.replies(&mut fixture), []);
    let rw = AccessMode::ReadWrite;
    assert_eq!(other.open_device(&mut fixture, "vol", rw).map(drop), Err(errno::EPERM));
    release(&mut fixture);
    let mut answered = permits(&b.replies(&mut fixture));
    answered.sort_unstable();
    assert_eq!((answered, content(&fixture, 8)), (vec![1, 7], 2));
    assert_eq!(fixture.device.lock().open, 0, "closed on all cores");
    other.open_device(&mut fixture, "vol", rw).unwrap();
}

#[test]
fn a_second_writer_of_the_export_waits_for_orphaned_writes() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut a = Peer::open(&mut fixture, PeerOptions::default());
    let beside = PeerOptions { session: 2, path: 7, local: 2, ..PeerOptions::default() };
    let mut beside = Peer::up(&mut fixture, beside, "beside");
    beside.open_device(&mut fixture, "vol", AccessMode::Migration).unwrap();
    fixture.device.lock().hold_after = Some(0);
    change(&mut a, (1, 6), write(1), 8..16);
    fixture.settle();
    a.leave(&mut fixture);
    // A permit with the same number has no effect: it belongs to another session.
    change(&mut beside, (2, 6), write(2), 8..16);
    fixture.pass(50 * MS);
    assert_eq!((beside.replies(&mut fixture), waiting(&fixture)), (vec![], (1, 0)));
    release(&mut fixture);
    assert_eq!((permits(&beside.replies(&mut fixture)), content(&fixture, 8)), (vec![6], 2));
    beside.leave(&mut fixture);
    fixture.assert_empty();
}

#[test]
fn a_stopping_server_completes_blocked_requests_if_the_disk_responds() {
    let (mut fixture, _a, mut b) = one_waits();
    fixture.shutdown();
    fixture.pass(50 * MS);
    assert_eq!((b.replies(&mut fixture), fixture.all_done()), (vec![], false));
    release(&mut fixture);
    assert_eq!((permits(&b.replies(&mut fixture)), content(&fixture, 8)), (vec![7], 2));
    assert_eq!(b.closed(&mut fixture), 3);
    assert!(fixture.all_done());
    fixture.assert_empty();

    let (mut fixture, _a, mut b) = one_waits();
    fixture.shutdown();
    fixture.pass(Duration::from_secs(5) + 20 * MS);
    assert_eq!((b.replies(&mut fixture), b.closed(&mut fixture)), (vec![], 3));
    fixture.pass(Duration::from_secs(2) + 100 * MS);
    assert!(fixture.all_done(), "it does not wait for the disk");
    assert_eq!((fixture.device.lock().log.len(), waiting(&fixture)), (0, (0, 0)));
}
