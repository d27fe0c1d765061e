//! Tests of served requests: data, flags, access modes, devices, limits.

use rtrs_core::block::{Geometry, IoOp};
use rtrs_core::fabric::sim::BindMode;
use rtrs_core::limits::Limits;
use rtrs_core::wire::{AccessMode, IoHeader, Rw, WriteMsg, errno};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Data, Peer, PeerOptions, io, read_message};
use crate::engine::session::SessionParams;

fn write_like(rw: Rw, sector: u64, len: u32) -> (Vec<u8>, [u8; 4]) {
    (io(rw, sector, len).encode().to_vec(), WriteMsg { usr_len: 32 }.encode())
}

#[test]
fn data_is_transferred_both_ways_over_every_connection() {
    for bind in [BindMode::Done, BindMode::Pending] {
        let mut fixture = Fixture::new(StandOptions { bind, ..StandOptions::default() });
        let mut peer =
            Peer::open(&mut fixture, PeerOptions { cid_num: 4, ..PeerOptions::default() });
        for conn in 0..4usize {
            for permit in 0..16u16 {
                let byte = u8::try_from(conn).unwrap() * 16 + u8::try_from(permit).unwrap();
                let sector = u64::from(byte);
                peer.send_write((conn, permit), io(Rw::WRITE, sector, 512), &[byte; 512]);
                let reply = peer.reply(&mut fixture);
                assert_eq!((reply.conn, reply.permit, reply.errno), (conn, permit, 0));
                // The answer uses the connection of its request, whichever that is.
                let other = (conn + 1) % 4;
                peer.clear_result();
                peer.send_read((other, permit), io(Rw::READ, sector, 512));
                assert_eq!(peer.reply(&mut fixture).conn, other);
                assert_eq!(peer.result(512), [byte; 512]);
            }
        }
        let totals = fixture.sessions()[0].paths[0].io;
        assert_eq!((totals.reads, totals.writes, totals.errors), (64, 64, 0));
        assert_eq!((totals.read_bytes, totals.write_bytes), (64 * 512, 64 * 512));
        assert_eq!(totals.inflight, 0);
    }
}

#[test]
fn many_requests_in_flight_are_each_answered_once() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().room = 3;
    for _ in 0..20 {
        for permit in 0..16u16 {
            let conn = usize::from(permit) % 3;
            let sector = u64::from(permit);
            peer.send_write((conn, permit), io(Rw::WRITE, sector, 512), &[1; 512]);
        }
        let mut permits: Vec<u16> = peer.replies(&mut fixture).iter().map(|r| r.permit).collect();
        permits.sort_unstable();
        assert_eq!(permits, (0..16).collect::<Vec<_>>());
    }
    let totals = fixture.counters();
    let writes = &totals.ops[1];
    assert_eq!((writes.times.count(), writes.bytes, writes.errors), (320, 320 * 512, 0));
    assert_eq!(totals.ops.iter().map(|op| op.times.count()).sum::<u64>(), 320);
    assert!(totals.queue_full > 0 && totals.queue_full < 320, "{}", totals.queue_full);
    // An invalid request does not count as an IO of the export.
    peer.send_write((0, 0), io(Rw::WRITE, u64::MAX >> 10, 512), &[1; 512]);
    assert_ne!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.counters(), totals);
}

#[test]
fn the_largest_request_fills_its_chunk() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    let len = fixture.params.limits.max_io_size();
    let data = vec![7; len as usize];
    peer.send_write((1, 15), io(Rw::WRITE, 0, len), &data);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.device.lock().bytes[..len as usize], data);
    peer.send_read((1, 15), io(Rw::READ, 0, len));
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(peer.result(len as usize), data);
}

#[test]
fn flags_of_a_write_reach_the_device() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    let mut run = |rw: Rw| {
        peer.send_write((1, 0), io(rw, 4, 512), &[1; 512]);
        assert_eq!(peer.reply(&mut fixture).errno, 0);
        std::mem::take(&mut fixture.device.lock().log)
    };
    let write = |fua| (IoOp::Write, 2048, 512, fua);
    let flush = (IoOp::Flush, 0, 0, false);
    assert_eq!(run(Rw::WRITE), [write(false)]);
    assert_eq!(run(Rw::WRITE.sync()), [write(false)]);
    assert_eq!(run(Rw::WRITE.sync().fua(true)), [write(true)]);
    assert_eq!(run(Rw::WRITE.preflush(true)), [flush, write(false)]);
    assert_eq!(run(Rw::WRITE.preflush(true).fua(true)), [flush, write(true)]);
    assert_eq!(run(Rw(0xffff_f000 | 1)), [write(false)], "unknown flags mean nothing");
}

#[test]
fn a_device_without_fua_is_flushed_after_the_write() {
    let geometry = Geometry { fua: false, ..StandOptions::default().geometry };
    let mut fixture = Fixture::new(StandOptions { geometry, ..StandOptions::default() });
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    peer.send_write((1, 0), io(Rw::WRITE.fua(true), 4, 512), &[1; 512]);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    let log = std::mem::take(&mut fixture.device.lock().log);
    assert_eq!(log, [(IoOp::Write, 2048, 512, false), (IoOp::Flush, 0, 0, false)]);
}

#[test]
fn requests_above_the_device_limits_run_in_parts() {
    let geometry = Geometry {
        io_max: 1024,
        discard_max: 2048,
        zeroes_max: 2048,
        ..StandOptions::default().geometry
    };
    let mut fixture = Fixture::new(StandOptions { geometry, ..StandOptions::default() });
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    let data: Vec<u8> = (0..3584u32).map(|n| (n / 512).to_le_bytes()[0]).collect();
    peer.send_write((1, 0), io(Rw::WRITE.fua(true), 1, 3584), &data);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    peer.send_read((1, 0), io(Rw::READ, 1, 3584));
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(peer.result(3584), data);
    let log = std::mem::take(&mut fixture.device.lock().log);
    let part = |at: u64, len| (IoOp::Write, 512 + at, len, true);
    assert_eq!(log[..4], [part(0, 1024), part(1024, 1024), part(2048, 1024), part(3072, 512)]);
    let (header, message) = write_like(Rw::DISCARD, 0, 5120);
    peer.request((1, 0), Data::None, &header, &message);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    let log = std::mem::take(&mut fixture.device.lock().log);
    let part = |at, len| (IoOp::Discard, at, len, false);
    assert_eq!(log, [part(0, 2048), part(2048, 2048), part(4096, 1024)]);
}

#[test]
fn discards_zeroes_and_flushes_reach_the_device() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().bytes.fill(9);
    let wanted = [
        (Rw::DISCARD, 2, (IoOp::Discard, 1024, 4096, false)),
        (Rw::WRITE_ZEROES, 16, (IoOp::WriteZeroes, 8192, 4096, false)),
        (Rw::WRITE_ZEROES.fua(true).no_unmap(true), 32, (IoOp::WriteZeroes, 16384, 4096, true)),
    ];
    for (rw, sector, ran) in wanted {
        let (header, message) = write_like(rw, sector, 4096);
        peer.request((1, 5), Data::None, &header, &message);
        assert_eq!(peer.reply(&mut fixture).errno, 0);
        assert_eq!(std::mem::take(&mut fixture.device.lock().log), [ran]);
    }
    // A flush with sector -1, with and without FUA or PREFLUSH, as READ and as WRITE.
    for rw in [Rw::FLUSH, Rw(0x302), Rw(0x702)] {
        let header = io(rw, u64::MAX, 0).encode();
        let message = read_message(IoHeader::LEN, None, false);
        peer.request((1, 5), Data::None, &header, &message);
        assert_eq!(peer.reply(&mut fixture).errno, 0);
        assert_eq!(std::mem::take(&mut fixture.device.lock().log), [(IoOp::Flush, 0, 0, false)]);
    }
    assert_eq!(fixture.sessions()[0].paths[0].io.flushes, 3);
}

#[test]
fn fast_zeroes_are_refused_if_unsupported() {
    for fast_zero in [true, false] {
        let geometry = Geometry { fast_zero, write_zeroes: true, ..Geometry::plain(1 << 20) };
        let mut fixture = Fixture::new(StandOptions { geometry, ..StandOptions::default() });
        let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
        let opened = peer.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap();
        assert_eq!(opened.fast_zero, fast_zero);
        for (rw, errno) in [
            (Rw::WRITE_ZEROES, 0),
            (Rw::WRITE_ZEROES.fast_only(true), if fast_zero { 0 } else { errno::EOPNOTSUPP }),
        ] {
            let (header, message) = write_like(rw, 0, 4096);
            peer.request((1, 5), Data::None, &header, &message);
            assert_eq!(peer.reply(&mut fixture).errno, errno);
            let device = &mut *fixture.device.lock();
            let ran = device.log.pop().map(|_| device.fast_only);
            assert_eq!(ran, (errno == 0).then_some(rw.is_fast_only()));
        }
    }
}

#[test]
fn extents_are_returned_if_offered() {
    for extents in [true, false] {
        let geometry = Geometry { extents, ..Geometry::plain(1 << 20) };
        let mut fixture = Fixture::new(StandOptions { geometry, ..StandOptions::default() });
        let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
        let opened = peer.open_device(&mut fixture, "vol", AccessMode::ReadOnly).unwrap();
        assert_eq!(opened.extents, extents);
        let errno = if extents { 0 } else { errno::EOPNOTSUPP };
        // The range may be longer than a chunk, and is not truncated.
        for (sector, len, room, errno) in [
            (0, 1 << 20, 4096, errno),
            (8, 512, 16, errno),
            (0, 4096, 15, errno::EINVAL),
            (2047, 1024, 4096, errno::EINVAL),
            (0, 100, 4096, errno::EINVAL),
            (0, 0, 4096, errno::EINVAL),
        ] {
            peer.clear_result();
            peer.ask_for((1, 5), &io(Rw::EXTENTS, sector, len).encode(), room);
            assert_eq!(peer.reply(&mut fixture).errno, errno, "{len} bytes at {sector}");
            if errno == 0 {
                let expect = [1, u64::from(len) | 1].map(u64::to_le_bytes).concat();
                let result = peer.result(room);
                assert_eq!(result[..16], expect);
                assert!(result[16..].iter().all(|byte| *byte == 0xee), "nothing else is sent");
                let log = std::mem::take(&mut fixture.device.lock().log);
                assert_eq!(log, [(IoOp::Extents, sector * 512, len, false)]);
            }
        }
        // As a WRITE, it has no buffer for an answer.
        let (header, message) = write_like(Rw::EXTENTS, 0, 4096);
        peer.request((1, 5), Data::None, &header, &message);
        assert_eq!(peer.reply(&mut fixture).errno, errno::EINVAL);
    }
}

#[test]
fn unsupported_operations_are_refused() {
    let geometry = Geometry { discard: false, write_zeroes: false, ..Geometry::plain(1 << 20) };
    let mut fixture = Fixture::new(StandOptions { geometry, ..StandOptions::default() });
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    let opened = peer.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap();
    assert_eq!((opened.max_discard_sectors, opened.max_write_zeroes_sectors), (0, 0));
    for rw in [Rw::DISCARD, Rw::WRITE_ZEROES, Rw::SECURE_ERASE] {
        let (header, message) = write_like(rw, 0, 4096);
        peer.request((1, 5), Data::None, &header, &message);
        assert_eq!(peer.reply(&mut fixture).errno, errno::EOPNOTSUPP);
    }
}

#[test]
fn ranges_beyond_the_device_are_refused() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    for (sector, len, read, write) in [
        (2048, 512, errno::EINVAL, errno::ENOSPC),
        (2047, 1024, errno::EINVAL, errno::ENOSPC),
        (u64::MAX, 512, errno::EINVAL, errno::EINVAL),
        (u64::MAX >> 9, 512, errno::EINVAL, errno::ENOSPC),
        (0, 100, errno::EINVAL, errno::EINVAL),
    ] {
        peer.send_read((1, 0), io(Rw::READ, sector, len));
        assert_eq!(peer.reply(&mut fixture).errno, read, "read of {len} at {sector}");
        peer.send_write((1, 0), io(Rw::WRITE, sector, len), &vec![1; len as usize]);
        assert_eq!(peer.reply(&mut fixture).errno, write, "write of {len} at {sector}");
        let (header, message) = write_like(Rw::DISCARD, sector, len);
        peer.request((1, 0), Data::None, &header, &message);
        assert_eq!(peer.reply(&mut fixture).errno, write, "discard of {len} at {sector}");
    }
    assert_eq!(fixture.device.lock().log, []);
    assert!(fixture.device.lock().bytes.iter().all(|b| *b == 0));
}

#[test]
fn devices_open_close_and_keep_their_ids() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    let rw = AccessMode::ReadWrite;
    let id = |opened: Result<rtrs_core::wire::OpenRsp, u16>| opened.map(|o| o.device_id);
    assert_eq!(id(peer.open_device(&mut fixture, "other", rw)), Ok(0));
    assert_eq!(id(peer.open_device(&mut fixture, "vol", rw)), Ok(1));
    assert_eq!(id(peer.open_device(&mut fixture, "//other", rw)), Ok(0), "the same device again");
    for name in ["nope", "vo", "vol2", "/"] {
        assert_eq!(id(peer.open_device(&mut fixture, name, rw)), Err(errno::ENOENT), "{name}");
    }
    for name in ["", "..", "a/../vol"] {
        assert_eq!(id(peer.open_device(&mut fixture, name, rw)), Err(errno::EINVAL), "{name}");
    }
    let write = io(Rw::WRITE, 0, 512);
    let to = |device_id| IoHeader { device_id, ..write };
    for (device, errno) in [(0, 0), (1, 0), (2, errno::ENOTCONN), (u32::MAX, errno::ENOTCONN)] {
        peer.send_write((1, 0), to(device), &[1; 512]);
        assert_eq!(peer.reply(&mut fixture).errno, errno, "device {device}");
    }
    assert_eq!(fixture.device.lock().open, 1);
    peer.send_close(1, 1);
    assert_eq!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.device.lock().open, 0, "closed on all cores");
    peer.send_write((1, 0), to(1), &[1; 512]);
    assert_eq!(peer.reply(&mut fixture).errno, errno::ENOTCONN);
    peer.send_close(1, 77);
    assert_eq!(peer.reply(&mut fixture).errno, 0, "closing what is not open succeeds");
    assert_eq!(fixture.open_names(), ["other"]);
}

#[test]
fn access_modes_are_enforced() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut a = Peer::up(&mut fixture, PeerOptions::default(), "a");
    let second = PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() };
    let mut b = Peer::up(&mut fixture, second, "b");
    let third = PeerOptions { session: 3, path: 3, local: 2, ..PeerOptions::default() };
    let mut c = Peer::up(&mut fixture, third, "c");
    let (ro, rw, mv) = (AccessMode::ReadOnly, AccessMode::ReadWrite, AccessMode::Migration);
    a.open_device(&mut fixture, "vol", rw).unwrap();
    assert_eq!(b.open_device(&mut fixture, "vol", rw), Err(errno::EPERM));
    b.open_device(&mut fixture, "vol", ro).unwrap();
    // A session without the right to write is restricted accordingly.
    b.send_write((1, 0), io(Rw::WRITE, 0, 512), &[1; 512]);
    assert_eq!(b.reply(&mut fixture).errno, errno::EPERM);
    for rw in [Rw::DISCARD, Rw::WRITE_ZEROES] {
        let (header, message) = write_like(rw, 0, 4096);
        b.request((1, 0), Data::None, &header, &message);
        assert_eq!(b.reply(&mut fixture).errno, errno::EPERM);
    }
    b.send_flush((1, 0));
    assert_eq!(b.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.device.lock().log.len(), 0, "nothing ran, not even the flush");
    c.open_device(&mut fixture, "vol", mv).unwrap();
    assert_eq!(b.open_device(&mut fixture, "vol", mv), Err(errno::EPERM));
    // The first writer leaves; the device is free only when the migrator leaves too.
    a.leave(&mut fixture);
    assert_eq!(b.open_device(&mut fixture, "vol", rw), Err(errno::EPERM), "the migrator writes");
    c.leave(&mut fixture);
    b.open_device(&mut fixture, "vol", rw).unwrap();
    b.send_write((1, 0), io(Rw::WRITE, 0, 512), &[1; 512]);
    assert_eq!(b.reply(&mut fixture).errno, 0);
}

#[test]
fn a_read_only_export_refuses_writers_and_reports_it() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    let refused = peer.open_device(&mut fixture, "fixed", AccessMode::ReadWrite);
    assert_eq!(refused, Err(errno::EACCES));
    let opened = peer.open_device(&mut fixture, "fixed", AccessMode::ReadOnly).unwrap();
    assert_eq!((opened.max_discard_sectors, opened.max_write_zeroes_sectors), (0, 0));
    peer.send_write((1, 0), io(Rw::WRITE, 0, 512), &[1; 512]);
    assert_eq!(peer.reply(&mut fixture).errno, errno::EPERM);
    peer.send_read((1, 0), io(Rw::READ, 0, 512));
    assert_eq!(peer.reply(&mut fixture).errno, 0);
}

#[test]
fn versions_are_negotiated_without_delaying_open() {
    let mut fixture = Fixture::new(StandOptions::default());
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    // After a reconnect a kernel client sends OPEN without waiting for SESS_INFO's answer.
    peer.send_sess_info((0, 0), 3);
    peer.send_open(1, "vol", AccessMode::ReadWrite);
    let replies = peer.replies(&mut fixture);
    assert!(replies.len() == 2 && replies.iter().all(|r| r.errno == 0), "{replies:?}");
    assert_eq!(fixture.sessions()[0].version, 2);
    peer.send_sess_info((0, 0), 1);
    peer.reply(&mut fixture);
    assert_eq!(fixture.sessions()[0].version, 1);
}

#[test]
fn a_turn_submits_a_bounded_amount_of_io() {
    let limits = Limits::new(64, 16384).unwrap();
    let options = StandOptions::default();
    let params = SessionParams { limits, ..options.params };
    let mut fixture = Fixture::new(StandOptions { params, ..options });
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    for permit in 0..64 {
        peer.send_read((1, permit), io(Rw::READ, 0, limits.max_io_size()));
    }
    assert_eq!(peer.replies(&mut fixture).len(), 64);
    // Eleven reads, each charged for its 12 KiB of data and a fixed cost of 12 KiB.
    assert_eq!(fixture.device.lock().most, 11);
}
