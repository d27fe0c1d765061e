//! Tests of partial block writes, and of the changes that are serialized with them.

use rtrs_core::block::IoOp;
use rtrs_core::identity::ServerProcess;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, Fence, IoHeader, Rw, errno};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Peer, PeerOptions, io};

const MS: Duration = Duration::from_millis(1);
const SECTOR: usize = 512;

/// A session that has `vol` open for writing, and one that has it open for migration.
fn two_writers() -> (Fixture, Peer, Peer) {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut first = Peer::open(&mut fixture, PeerOptions::default());
    let options = PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() };
    let mut second = Peer::up(&mut fixture, options, "second");
    second.open_device(&mut fixture, "vol", AccessMode::Migration).unwrap();
    for peer in [&mut first, &mut second] {
        peer.send_sess_info((0, 0), 2);
        peer.reply(&mut fixture);
    }
    fixture.device.lock().bytes.fill(9);
    (fixture, first, second)
}

/// A partial write of `len` bytes at offset `from`.
fn part(from: u64, len: u32, fua: bool) -> IoHeader {
    let prio = (from % 512) as u16;
    IoHeader { prio, ..io(Rw::PARTIAL_WRITE.fua(fua), from / 512, len) }
}

fn write_part(peer: &mut Peer, at: (usize, u16), from: u64, bytes: &[u8]) {
    peer.send_write(at, part(from, bytes.len() as u32, false), bytes);
}

fn ran(fixture: &Fixture) -> Vec<IoOp> {
    fixture.device.lock().log.iter().map(|ran| ran.0).collect()
}

fn release(fixture: &mut Fixture) {
    fixture.device.lock().hold = false;
    fixture.pass(5 * MS);
}

fn bytes(fixture: &Fixture, at: [usize; 4]) -> [u8; 4] {
    at.map(|at| fixture.device.lock().bytes[at])
}

#[test]
fn a_partial_write_changes_only_its_bytes() {
    let (mut fixture, mut first, _) = two_writers();
    first.send_write((1, 3), part(4 * 512 + 500, 12, true), &[7; 12]);
    assert_eq!(first.reply(&mut fixture).errno, 0);
    assert_eq!(ran(&fixture), [IoOp::Read, IoOp::Write]);
    let flags: Vec<bool> = fixture.device.lock().log.iter().map(|ran| ran.3).collect();
    assert_eq!(flags, [false, true]);
    let from = 4 * SECTOR + 500;
    assert_eq!(bytes(&fixture, [from - 1, from, from + 11, from + 12]), [9, 7, 7, 9]);
    // Ranges that cross a block boundary or are beyond the end are refused.
    for (from, len) in [(500, 13), (1 << 20, 4), ((1 << 20) - 1, 2), (u64::MAX / 2, 1)] {
        first.send_write((1, 4), part(from, len, false), &vec![1; len as usize]);
        let refused = first.reply(&mut fixture).errno;
        assert!(matches!(refused, errno::EINVAL | errno::ENOSPC), "{len} at {from}: {refused}");
    }
    assert_eq!(ran(&fixture).len(), 2);
}

#[test]
fn a_session_of_an_older_version_cannot_send_partial_writes() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    for version in [0, 1, 2] {
        if version > 0 {
            peer.send_sess_info((0, 0), version);
            peer.reply(&mut fixture);
        }
        write_part(&mut peer, (1, 3), 10, &[7; 20]);
        let errno = if version < 2 { errno::EOPNOTSUPP } else { 0 };
        assert_eq!(peer.reply(&mut fixture).errno, errno, "{version}");
    }
}

#[test]
fn a_change_of_the_block_waits_for_the_partial_write() {
    for conn in [1, 2] {
        let (mut fixture, mut first, mut second) = two_writers();
        fixture.device.lock().hold = true;
        write_part(&mut first, (1, 3), 10, &[7; 20]);
        fixture.pass(5 * MS);
        second.send_write((conn, 4), io(Rw::WRITE, 0, 512), &[8; SECTOR]);
        second.send_write((conn, 5), io(Rw::WRITE, 1, 512), &[6; SECTOR]);
        fixture.pass(5 * MS);
        release(&mut fixture);
        assert_eq!(first.reply(&mut fixture).errno, 0);
        assert_eq!(second.replies(&mut fixture).len(), 2);
        assert_eq!(bytes(&fixture, [9, 10, 29, 512]), [8, 8, 8, 6], "the later one stays");
        assert_eq!(fixture.load().1, 0);
    }
}

#[test]
fn a_partial_write_waits_for_a_running_change() {
    for conn in [1, 2] {
        let (mut fixture, mut first, mut second) = two_writers();
        fixture.device.lock().hold = true;
        second.send_write((conn, 4), io(Rw::WRITE, 0, 1024), &[8; 2 * SECTOR]);
        fixture.pass(5 * MS);
        write_part(&mut first, (1, 3), 600, &[7; 20]);
        write_part(&mut first, (2, 6), 620, &[5; 20]);
        fixture.pass(5 * MS);
        release(&mut fixture);
        assert_eq!(second.reply(&mut fixture).errno, 0);
        assert_eq!(first.replies(&mut fixture).len(), 2);
        assert_eq!(bytes(&fixture, [599, 600, 620, 640]), [8, 7, 5, 8]);
    }
}

#[test]
fn a_partial_write_of_a_closed_path_does_not_start_its_write() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut a = Peer::open(&mut fixture, PeerOptions::default());
    let options = PeerOptions { path: 2, local: 1, first_conn: false, ..PeerOptions::default() };
    let mut b = Peer::up(&mut fixture, options, "sess");
    b.send_sess_info((0, 0), 2);
    b.reply(&mut fixture);
    fixture.device.lock().bytes.fill(9);
    fixture.device.lock().hold = true;
    write_part(&mut a, (1, 3), 10, &[7; 20]);
    write_part(&mut a, (2, 4), 12, &[6; 20]);
    fixture.pass(5 * MS);
    let path = PeerOptions::default().request(0).path_uuid;
    b.send_fence(0, Fence { path, recon_cnt: 1, process: ServerProcess::NONE });
    assert_eq!(b.reply(&mut fixture).errno, 0);
    // The closed path's write no longer blocks others once its read is done.
    b.send_write((1, 3), io(Rw::WRITE, 0, 512), &[8; SECTOR]);
    fixture.pass(5 * MS);
    assert_eq!(b.replies(&mut fixture), []);
    release(&mut fixture);
    assert_eq!(b.reply(&mut fixture).errno, 0);
    assert_eq!(ran(&fixture), [IoOp::Read, IoOp::Write]);
    assert_eq!(bytes(&fixture, [0, 10, 12, 511]), [8; 4]);
    assert_eq!((fixture.orphaned_writes(), fixture.load().1), (0, 0));
}
