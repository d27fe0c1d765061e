//! Tests of extents that shards cache: a list is used as long as it equals the result of a search,
//! no matter which session writes.

use rtrs_core::block::{Geometry, IoOp};
use rtrs_core::extents::{self, Extent};
use rtrs_core::fabric::WrOp;
use rtrs_core::mem::Region;
use rtrs_core::mutant::{self, Mutant};
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, Rw, WriteMsg};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Data, Peer, PeerOptions, io};

/// Number of sectors on the device.
const SECTORS: u64 = 2048;

fn server(sole_writer: bool) -> Fixture {
    let geometry = StandOptions::default().geometry;
    let geometry = Geometry { extents: true, ..geometry };
    Fixture::new(StandOptions { geometry, sole_writer, ..StandOptions::default() })
}

fn open(fixture: &mut Fixture, n: u8, access: AccessMode) -> Peer {
    let options = PeerOptions { session: n, path: n, local: n, ..PeerOptions::default() };
    let mut peer = Peer::up(fixture, options, &format!("sess{n}"));
    peer.open_device(fixture, "vol", access).expect("it opens");
    peer
}

/// Extents of a range, in an answer of `room` bytes over a connection.
fn extents_at(
    fixture: &mut Fixture,
    peer: &mut Peer,
    conn: usize,
    range: std::ops::Range<u64>,
    room: usize,
) -> Vec<Extent> {
    let len = u32::try_from((range.end - range.start) * 512).unwrap();
    peer.clear_result();
    peer.ask_for((conn, 5), &io(Rw::EXTENTS, range.start, len).encode(), room);
    fixture.pass(Duration::from_micros(10));
    assert_eq!(peer.reply(fixture).errno, 0);
    let list = Region::new(room).unwrap().slice(0, room).unwrap();
    list.copy_in(0, &peer.result(room));
    let mut seen = Vec::new();
    assert!(extents::read(&list, len, |extent| {
        seen.push(extent);
        true
    }));
    seen
}

/// Whether each sector is a hole, as requested one extent at a time.
fn map(fixture: &mut Fixture, peer: &mut Peer, conn: usize) -> Vec<bool> {
    let mut holes = Vec::new();
    while (holes.len() as u64) < SECTORS {
        let range = holes.len() as u64..SECTORS;
        let extents = extents_at(fixture, peer, conn, range, extents::LEN_MIN);
        assert_eq!(extents.len(), 1);
        let sectors = usize::try_from(extents[0].len / 512).unwrap();
        holes.extend(std::iter::repeat_n(extents[0].hole, sectors));
    }
    holes
}

/// Current holes in the device.
fn holes(fixture: &Fixture) -> Vec<bool> {
    let device = fixture.device.lock();
    device.bytes.chunks(512).map(|sector| sector.iter().all(|byte| *byte == 0)).collect()
}

/// Writes every other sector of the first `sectors`, behind the server's back.
fn fill(fixture: &Fixture, sectors: usize) {
    let mut device = fixture.device.lock();
    let all = device.bytes.chunks_mut(512).take(sectors);
    all.step_by(2).for_each(|sector| sector.fill(1));
}

/// Number of searches on the device since the last call.
fn searches(fixture: &Fixture) -> usize {
    let log = std::mem::take(&mut fixture.device.lock().log);
    log.iter().filter(|(op, ..)| *op == IoOp::Extents).count()
}

#[test]
fn one_search_answers_many_requests() {
    let mut fixture = server(true);
    fill(&fixture, 100);
    let mut peer = open(&mut fixture, 1, AccessMode::ReadOnly);
    for conn in [1, 2] {
        assert_eq!(map(&mut fixture, &mut peer, conn), holes(&fixture));
        // For 1, 8, 64 and up to 511 extents.
        assert_eq!(searches(&fixture), 4, "connection {conn}");
    }
}

#[test]
fn four_clients_have_a_list_each() {
    let mut fixture = server(true);
    fill(&fixture, 2048);
    let mut peer = open(&mut fixture, 1, AccessMode::ReadOnly);
    let mut at = [0, 1, 2, 3].map(|part| part * SECTORS / 4);
    for _ in 0..40 {
        for at in &mut at {
            let range = *at..SECTORS;
            let seen = extents_at(&mut fixture, &mut peer, 1, range, extents::LEN_MIN);
            assert_eq!(seen, [Extent { len: 512, hole: *at % 2 == 1 }]);
            *at += 1;
        }
    }
    assert_eq!(searches(&fixture), 4 * 3);
}

/// A request in the middle of a list is answered from there, and a range may end within an extent.
#[test]
fn answers_begin_and_end_anywhere_in_a_list() {
    let mut fixture = server(true);
    fixture.device.lock().bytes[512 * 8..512 * 16].fill(1);
    let mut peer = open(&mut fixture, 1, AccessMode::ReadOnly);
    let data = |sectors: u64| Extent { len: sectors * 512, hole: false };
    let hole = |sectors: u64| Extent { len: sectors * 512, hole: true };
    let all = vec![hole(8), data(8), hole(SECTORS - 16)];
    assert_eq!(extents_at(&mut fixture, &mut peer, 1, 0..SECTORS, 4096), all);
    assert_eq!(searches(&fixture), 1);
    for (range, expected) in [
        (0..8, vec![hole(8)]),
        (3..12, vec![hole(5), data(4)]),
        (9..10, vec![data(1)]),
        (15..20, vec![data(1), hole(4)]),
        (SECTORS - 1..SECTORS, vec![hole(1)]),
    ] {
        assert_eq!(extents_at(&mut fixture, &mut peer, 1, range.clone(), 4096), expected);
        let first = extents_at(&mut fixture, &mut peer, 1, range, extents::LEN_MIN);
        assert_eq!(first, expected[..1]);
    }
    assert_eq!(searches(&fixture), 0);
}

#[test]
fn an_answer_has_as_many_bytes_as_extents() {
    for sole_writer in [true, false] {
        let mut fixture = server(sole_writer);
        fixture.device.lock().bytes[512 * 8..512 * 16].fill(1);
        let mut peer = open(&mut fixture, 1, AccessMode::ReadOnly);
        for (room, bytes) in [(4096, 8 + 3 * 8), (24, 24), (16, 16)] {
            fixture.posted();
            extents_at(&mut fixture, &mut peer, 1, 0..SECTORS, room);
            let posted = fixture.posted();
            let written = posted.iter().filter(|p| matches!(p.op, WrOp::RdmaWrite { .. }));
            let lens: Vec<_> = written.map(|p| p.bytes.len()).filter(|len| *len > 0).collect();
            assert_eq!(lens, [bytes], "room for {room} bytes");
        }
    }
}

/// Whether a map made after a write by another session shows the data.
fn shows_a_write(change: Rw, conns: [usize; 2]) -> bool {
    let mut fixture = server(true);
    fixture.device.lock().bytes[512 * 100..512 * 200].fill(1);
    let mut reader = open(&mut fixture, 1, AccessMode::ReadOnly);
    let mut writer = open(&mut fixture, 2, AccessMode::ReadWrite);
    assert_eq!(map(&mut fixture, &mut reader, conns[0]), holes(&fixture));
    let before = holes(&fixture);
    if change == Rw::WRITE {
        writer.send_write((conns[1], 3), io(change, 300, 512), &[1; 512]);
    } else {
        let header = io(change, 100, 512).encode();
        let message = WriteMsg { usr_len: 32 }.encode();
        writer.request((conns[1], 3), Data::None, &header, &message);
    }
    assert_eq!(writer.reply(&mut fixture).errno, 0);
    assert_ne!(holes(&fixture), before);
    map(&mut fixture, &mut reader, conns[0]) == holes(&fixture)
}

#[test]
fn a_map_includes_later_writes_of_another_session() {
    for change in [Rw::WRITE, Rw::WRITE_ZEROES, Rw::DISCARD] {
        for conns in [[1, 1], [1, 2], [2, 1]] {
            assert!(shows_a_write(change, conns), "{change:?} {conns:?}");
        }
    }
    mutant::choose(Some(Mutant::ExtentsKept));
    let shown = shows_a_write(Rw::WRITE, [1, 2]);
    mutant::choose(None);
    assert!(!shown || !cfg!(debug_assertions), "the mutant is not noticed");
}

/// Whether a map made after a write shows its data, if another map was made during the write.
fn shows_a_write_in_flight(conns: [usize; 2]) -> bool {
    let mut fixture = server(true);
    let mut reader = open(&mut fixture, 1, AccessMode::ReadOnly);
    let mut writer = open(&mut fixture, 2, AccessMode::ReadWrite);
    fixture.device.lock().hold_after = Some(0);
    writer.send_write((conns[1], 3), io(Rw::WRITE, 300, 512), &[1; 512]);
    assert_eq!(writer.replies(&mut fixture).len(), 0);
    assert!(fixture.device.lock().holds);
    assert!(map(&mut fixture, &mut reader, conns[0]).iter().all(|hole| *hole));
    fixture.device.lock().holds = false;
    assert_eq!(writer.reply(&mut fixture).errno, 0);
    map(&mut fixture, &mut reader, conns[0]) == holes(&fixture)
}

#[test]
fn a_search_during_a_write_is_not_kept() {
    for conns in [[1, 1], [1, 2], [2, 1]] {
        assert!(shows_a_write_in_flight(conns), "{conns:?}");
    }
    mutant::choose(Some(Mutant::ExtentsBesideChange));
    let shown = shows_a_write_in_flight([1, 2]);
    mutant::choose(None);
    assert!(!shown || !cfg!(debug_assertions), "the mutant is not noticed");
}

/// Lists are kept again once the write is complete, including a write that found the device full.
#[test]
fn lists_are_kept_again_after_the_last_change() {
    let mut fixture = server(true);
    let mut reader = open(&mut fixture, 1, AccessMode::ReadOnly);
    let mut writer = open(&mut fixture, 2, AccessMode::ReadWrite);
    fixture.device.lock().room = 0;
    writer.send_write((1, 3), io(Rw::WRITE, 300, 512), &[1; 512]);
    assert_eq!(writer.replies(&mut fixture).len(), 0, "the device is full");
    fixture.device.lock().room = 64;
    assert_eq!(writer.reply(&mut fixture).errno, 0);
    // The second map replaces the list of another part.
    for expected in [2, 1, 0] {
        assert_eq!(map(&mut fixture, &mut reader, 1), holes(&fixture));
        assert_eq!(searches(&fixture), expected);
    }
}

/// Each search covers only what is requested, even under constant writes.
#[test]
fn searches_do_not_run_ahead_during_constant_writes() {
    let mut fixture = server(true);
    fill(&fixture, 2048);
    let mut reader = open(&mut fixture, 1, AccessMode::ReadOnly);
    let mut writer = open(&mut fixture, 2, AccessMode::ReadWrite);
    for at in 0..64 {
        let range = at..SECTORS.min(at + 128);
        let len = u32::try_from((range.end - range.start) * 512).unwrap();
        extents_at(&mut fixture, &mut reader, 1, range, extents::LEN_MIN);
        let log = std::mem::take(&mut fixture.device.lock().log);
        assert_eq!(log, [(IoOp::Extents, at * 512, len, false)]);
        writer.send_write((1, 3), io(Rw::WRITE, 1024, 512), &[1; 512]);
        assert_eq!(writer.reply(&mut fixture).errno, 0);
        fixture.device.lock().log.clear();
    }
}

#[test]
fn nothing_is_kept_if_other_programs_may_write() {
    let mut fixture = server(false);
    let mut peer = open(&mut fixture, 1, AccessMode::ReadOnly);
    for _ in 0..3 {
        assert_eq!(map(&mut fixture, &mut peer, 1), holes(&fixture));
        fixture.device.lock().bytes[512 * 8..512 * 16].fill(1);
        assert_eq!(map(&mut fixture, &mut peer, 1), holes(&fixture));
        fixture.device.lock().bytes[512 * 8..512 * 16].fill(0);
    }
    assert_eq!(searches(&fixture), 3 * (1 + 3));
}

/// Another program ignores the lock, or truncates the file and rewrites it.
#[test]
fn writes_of_another_program_are_shown_once_noticed() {
    let mut fixture = server(true);
    let mut peer = open(&mut fixture, 1, AccessMode::ReadOnly);
    map(&mut fixture, &mut peer, 1);
    fill(&fixture, 100);
    assert_ne!(map(&mut fixture, &mut peer, 1), holes(&fixture), "nothing is noticed yet");
    fixture.held("vol").forget_extents();
    assert_eq!(map(&mut fixture, &mut peer, 1), holes(&fixture));
    fixture.device.lock().cut = true;
    fixture.device.lock().bytes[512 * 300..512 * 400].fill(1);
    assert_eq!(map(&mut fixture, &mut peer, 1), holes(&fixture));
}

#[test]
fn a_failed_search_ahead_fails_no_request() {
    let mut fixture = server(true);
    fill(&fixture, 2048);
    let mut peer = open(&mut fixture, 1, AccessMode::ReadOnly);
    let bad = 200;
    fixture.device.lock().unsearchable_from = Some(bad * 512);
    for at in 0..bad - 8 {
        let seen = extents_at(&mut fixture, &mut peer, 1, at..at + 8, extents::LEN_MIN);
        assert_eq!(seen, [Extent { len: 512, hole: at % 2 == 1 }], "at {at}");
    }
    peer.ask_for((1, 5), &io(Rw::EXTENTS, bad, 4096).encode(), extents::LEN_MIN);
    assert_eq!(peer.reply(&mut fixture).errno, rtrs_core::wire::errno::EIO);
}

/// A file may be longer than its exported part, and another program may write there.
#[test]
fn a_list_ends_where_the_export_does() {
    let mut fixture = server(true);
    let half = SECTORS / 2;
    fixture.device.lock().size = Some(half * 512);
    let mut peer = open(&mut fixture, 1, AccessMode::ReadOnly);
    let seen = extents_at(&mut fixture, &mut peer, 1, half - 8..half, 4096);
    assert_eq!(seen, [Extent { len: 8 * 512, hole: true }]);
    fixture.device.lock().bytes[512 * 1500..512 * 1600].fill(1);
    fixture.device.lock().size = None;
    // Opening it makes the shards notice the new size.
    let mut peer = open(&mut fixture, 2, AccessMode::ReadOnly);
    let seen = extents_at(&mut fixture, &mut peer, 1, 1500..1508, 4096);
    assert_eq!(seen, [Extent { len: 8 * 512, hole: false }]);
}
