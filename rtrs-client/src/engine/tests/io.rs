//! Tests of successful IO: keys, splitting and permits, and errors reported by the server.

use std::collections::BTreeMap;

use rtrs_core::block::{BlockDevice, IoFlags, IoOp};
use rtrs_core::fabric::sim::BindMode;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{OpenRsp, RwOp};

use super::fixture::{Fixture, MS, SEC, TestIo};
use super::server::Request;
use crate::engine::DeviceIndex;

#[test]
fn fresh_keys_are_used() {
    for bind in [BindMode::Done, BindMode::Pending] {
        let mut fixture = Fixture::open(|s| {
            s.how.queue_depth = 3;
            s.world.bind = bind;
        });
        for round in 0..20 {
            fixture.submit(round % 2, IoOp::Write, 0, 4096);
            fixture.drain(SEC);
        }
        let mut keys: BTreeMap<u16, Vec<u32>> = BTreeMap::new();
        for request in fixture.server.ios() {
            keys.entry(request.permit.0).or_default().push(request.key.0);
        }
        assert_eq!(keys.len(), 2);
        for (permit, keys) in keys {
            assert_eq!(keys.len(), 10);
            let mut distinct = keys.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), 10, "permit {permit}: a key per request");
        }
    }
}

#[test]
fn one_key_serves_all_if_the_server_does_not_refresh_keys() {
    let mut fixture = Fixture::open(|s| s.how.new_rkey = false);
    for round in 0..20 {
        fixture.submit(round % 2, IoOp::Write, 0, 4096);
        fixture.drain(SEC);
    }
    let first = fixture.server.ios().next().map(|r| r.key);
    assert!(fixture.server.ios().all(|r| Some(r.key) == first));
}

#[test]
fn written_data_is_read_back() {
    for new_rkey in [true, false] {
        let mut fixture = Fixture::open(|s| s.how.new_rkey = new_rkey);
        let bytes: Vec<u8> = (0..300_032_u32).map(|i| (i / 3) as u8).collect();
        fixture.client.buffer(0, 0, bytes.len()).copy_in(0, &bytes);
        let tag = fixture.submit(0, IoOp::Write, 512 * 9, bytes.len() as u32);
        fixture.drain(SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
        assert_eq!(fixture.read(1, 512 * 9, bytes.len() as u32), bytes);
        let tag = fixture.submit(0, IoOp::WriteZeroes, 512 * 10, 4096);
        fixture.drain(SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
        let after = fixture.read(0, 512 * 9, bytes.len() as u32);
        assert_eq!(after[..512], bytes[..512]);
        assert_eq!(after[512..4608], [0; 4096]);
        assert_eq!(after[4608..], bytes[4608..]);
    }
}

#[test]
fn a_long_read_is_split_and_joined() {
    for (new_rkey, bind) in [(true, BindMode::Done), (false, BindMode::Pending)] {
        let mut fixture = Fixture::open(|s| {
            (s.how.new_rkey, s.world.bind) = (new_rkey, bind);
            s.how.queue_depth = 8;
        });
        let (offset, len) = (512 * 7, 1 << 20);
        let disk = fixture.server.disk[offset..offset + len].to_vec();
        assert_eq!(fixture.read(0, offset as u64, len as u32), disk);
        let parts: Vec<_> = fixture.server.ios().filter_map(|r| r.io).map(|(_, h)| h).collect();
        assert_eq!(parts.len(), 9, "1 MiB over requests of 126976 bytes");
        let mut sizes: Vec<_> = parts.iter().map(|h| (h.sector, h.bi_size)).collect();
        sizes.sort_unstable();
        let mut sector = 7;
        for (at, size) in sizes {
            assert_eq!(at, sector);
            assert!((65_536..=126_976).contains(&size), "no tiny part: {size}");
            sector += u64::from(size) / 512;
        }
        assert_eq!(sector, 7 + 2048);
    }
}

#[test]
fn an_error_in_one_part_fails_the_whole_io_once() {
    for bad in [0u64, 700, 2047] {
        let mut fixture = Fixture::open(|s| {
            s.how.queue_depth = 6;
            s.how.io_errno = Some(Box::new(move |header| {
                let end = header.sector + u64::from(header.bi_size) / 512;
                if (header.sector..end).contains(&bad) { 28 } else { 0 }
            }));
        });
        let tag = fixture.submit(1, IoOp::Read, 0, 1 << 20);
        let other = fixture.submit_io(1, TestIo::new(IoOp::Write, 2 << 20, 512).at(2 << 20));
        fixture.drain(SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::NoSpace));
        assert_eq!(fixture.client.status(other), Some(IoStatus::Ok));
        assert_eq!(fixture.client.done.len(), 2);
        if bad == 0 {
            assert!(fixture.server.ios().count() < 9, "the rest need not be tried");
        }
        fixture.server.how.io_errno = None;
        fixture.read(1, 0, 1 << 20);
    }
}

#[test]
fn server_errors_map_to_statuses() {
    for (errno, status) in [
        (5, IoStatus::Io),
        (22, IoStatus::Invalid),
        (28, IoStatus::NoSpace),
        (1, IoStatus::ReadOnly),
        (95, IoStatus::Unsupported),
        (61, IoStatus::Io),
        (110, IoStatus::TimedOut),
    ] {
        for op in [IoOp::Read, IoOp::Write, IoOp::Flush, IoOp::Discard] {
            let mut fixture = Fixture::open(|s| s.how.io_errno = Some(Box::new(move |_| errno)));
            let len = if op == IoOp::Flush { 0 } else { 4096 };
            let tag = fixture.submit(0, op, 0, len);
            fixture.drain(SEC);
            assert_eq!(fixture.client.status(tag), Some(status), "{op:?}");
            assert_eq!(fixture.client.states(), [crate::path::state::PathState::Connected]);
        }
    }
}

#[test]
fn invalid_io_is_never_sent() {
    let mut fixture = Fixture::open(|_| {});
    let cases = [
        (IoOp::Read, 4 << 20, 512, IoStatus::Invalid),
        (IoOp::Write, 4 << 20, 512, IoStatus::NoSpace),
        (IoOp::Read, 100, 512, IoStatus::Invalid),
        (IoOp::Write, 0, 100, IoStatus::Invalid),
        (IoOp::Write, u64::MAX - 511, 512, IoStatus::Invalid),
    ];
    for (op, offset, len, status) in cases {
        let tag = fixture.submit(0, op, offset, len);
        fixture.drain(SEC);
        let got = fixture.client.status(tag);
        assert!(got == Some(status) || got == Some(IoStatus::NoSpace), "{op:?}: {got:?}");
    }
    assert_eq!(fixture.server.ios().count(), 0);
}

#[test]
fn a_flush_has_no_range_whatever_its_submitter_says() {
    let mut fixture = Fixture::open(|_| {});
    let tag = fixture.submit(0, IoOp::Flush, 4096, 8192);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    assert_eq!(fixture.server.ios().count(), 1);
}

#[test]
fn io_waits_for_permits_and_all_are_returned() {
    let mut fixture = Fixture::open(|s| {
        s.how.queue_depth = 8;
        s.config.queue_depth_limit = 6;
        s.how.hold = true;
    });
    for round in 0..20 {
        let shard = round % 2;
        fixture.submit_io(shard, TestIo::new(IoOp::Read, 0, 4096).at(round * 4096));
    }
    fixture.run(50 * MS);
    // Permits 1 to 5, divided into two shares.
    let permits = |fixture: &Fixture, cid| {
        let mine = fixture.server.held.iter().filter(|r: &&Request| r.cid.0 == cid);
        mine.map(|r| r.permit.0).collect::<Vec<_>>()
    };
    assert_eq!(permits(&fixture, 1), [1, 2]);
    assert_eq!(permits(&fixture, 2), [3, 4, 5]);
    assert_eq!(fixture.client.pending(), 20);
    let now = fixture.now();
    let full = [0, 1].map(|shard| {
        let report = fixture.client.device_report(now, shard, DeviceIndex::FIRST);
        report.map_or(0, |report| report.stats.queue_full)
    });
    assert_eq!(full, [8, 7], "of ten on each shard");
    for _ in 0..20 {
        fixture.server.release();
        fixture.run(5 * MS);
    }
    fixture.drain(SEC);
    assert!(fixture.client.done.iter().all(|done| done.status.is_ok()));
    // In order of arrival, on each shard.
    for shard in 0..2 {
        let tags: Vec<_> =
            fixture.client.done.iter().filter(|d| d.shard == shard).map(|d| d.tag).collect();
        assert!(tags.is_sorted(), "{tags:?}");
    }
}

#[test]
fn answers_in_any_order_end_the_right_io() {
    let mut fixture = Fixture::open(|s| s.how.hold = true);
    let disk = fixture.server.disk.clone();
    let tags: Vec<_> = (0..6)
        .map(|i| {
            let read = TestIo::new(IoOp::Read, i as u64 * 8192, 4096);
            fixture.submit_io(0, read.at(i * 4096))
        })
        .collect();
    fixture.until("all requests", SEC, |s| s.server.held.len() == 6);
    fixture.server.held.reverse();
    while let Some(request) = fixture.server.held.pop() {
        let (_, header) = request.io.expect("IO");
        fixture.server.serve(&request);
        fixture.run(MS);
        let index = header.sector as usize / 16;
        assert_eq!(fixture.client.status(tags[index]), Some(IoStatus::Ok));
        let got = fixture.client.buffer(0, index * 4096, 4096).to_vec();
        assert_eq!(got, disk[index * 8192..index * 8192 + 4096]);
    }
    assert_eq!(fixture.client.pending(), 0);
}

#[test]
fn zeroes_are_written_as_data_if_the_server_cannot_be_trusted_with_them() {
    // A server that loses lengths, such as Linux 6.12 to 6.18; a server before 6.8; `rtrs-server`.
    for (keeps_lengths, limit, trusted) in
        [(false, 1 << 20, false), (false, 0, false), (true, 0, false), (true, 1 << 20, true)]
    {
        let mut fixture = Fixture::open(|s| {
            s.how.keeps_lengths = keeps_lengths;
            s.how.open_rsp =
                Some(Box::new(move |rsp| OpenRsp { max_write_zeroes_sectors: limit, ..rsp }));
        });
        let bytes = vec![0x5a; 600_064];
        fixture.client.buffer(0, 0, bytes.len()).copy_in(0, &bytes);
        fixture.submit(0, IoOp::Write, 0, bytes.len() as u32);
        fixture.drain(SEC);
        let before = fixture.server.ios().count();
        let flags = IoFlags { fua: true, no_unmap: true, fast_only: false, partial: false };
        let zeroes = TestIo::new(IoOp::WriteZeroes, 512, 599_040).flags(flags);
        let zeroes = fixture.submit_io(0, zeroes);
        fixture.drain(SEC);
        assert_eq!(fixture.client.status(zeroes), Some(IoStatus::Ok));
        let after = fixture.read(1, 0, 600_064);
        assert!(after[512..512 + 599_040].iter().all(|&byte| byte == 0));
        assert!(after[..512].iter().chain(&after[599_552..]).all(|&byte| byte == 0x5a));
        let sent: Vec<_> = fixture.server.ios().skip(before).filter_map(|r| r.io).collect();
        let wanted = if trusted { RwOp::WriteZeroes } else { RwOp::Write };
        let cleared: Vec<_> = sent.iter().filter(|(op, _)| *op != RwOp::Read).collect();
        assert_eq!(cleared.len(), if trusted { 1 } else { 5 }, "at most 126976 bytes each");
        assert!(cleared.iter().all(|(op, header)| *op == wanted && header.rw.is_fua()));

        // Fast zeroes must not be emulated, and the server has not promised them.
        let flags = IoFlags { fast_only: true, ..IoFlags::default() };
        let quick = fixture.submit_io(1, TestIo::new(IoOp::WriteZeroes, 0, 512).flags(flags));
        fixture.drain(SEC);
        assert_eq!(fixture.client.status(quick), Some(IoStatus::Unsupported));
        // A discard guarantees nothing, so it is sent to any server that offers it.
        fixture.submit(0, IoOp::Discard, 0, 4096);
        fixture.drain(SEC);
        let last = fixture.server.ios().last().and_then(|r| r.io).map(|(op, _)| op);
        assert_eq!(last, Some(RwOp::Discard));
    }
}

#[test]
fn fast_zeroes_are_requested_from_a_server_that_promises_them() {
    // A kernel server leaves uninitialized memory in the byte that makes the promise.
    for (keeps_lengths, fast_zero) in [(true, true), (true, false), (false, true)] {
        let mut fixture = Fixture::open(|s| {
            s.how.keeps_lengths = keeps_lengths;
            s.how.open_rsp = Some(Box::new(move |rsp| OpenRsp { fast_zero, ..rsp }));
        });
        let promised = keeps_lengths && fast_zero;
        assert_eq!(fixture.client.device(0, DeviceIndex::FIRST).geometry().fast_zero, promised);
        let flags = IoFlags { fast_only: true, ..IoFlags::default() };
        let before = fixture.server.ios().count();
        let quick = fixture.submit_io(0, TestIo::new(IoOp::WriteZeroes, 0, 512).flags(flags));
        fixture.drain(SEC);
        let status = if promised { IoStatus::Ok } else { IoStatus::Unsupported };
        assert_eq!(fixture.client.status(quick), Some(status));
        let sent: Vec<_> = fixture.server.ios().skip(before).filter_map(|r| r.io).collect();
        assert_eq!(sent.len(), usize::from(promised));
        assert!(sent.iter().all(|(_, header)| header.rw.is_fast_only()));
    }
}

#[test]
fn extents_are_requested_from_a_server_that_promises_them() {
    // A kernel server leaves uninitialized memory in the byte that makes the promise.
    for (keeps_lengths, extents) in [(true, true), (true, false), (false, true)] {
        let mut fixture = Fixture::open(|s| {
            s.how.keeps_lengths = keeps_lengths;
            s.how.open_rsp = Some(Box::new(move |rsp| OpenRsp { extents, ..rsp }));
        });
        let promised = keeps_lengths && extents;
        assert_eq!(fixture.client.device(0, DeviceIndex::FIRST).geometry().extents, promised);
        let before = fixture.server.ios().count();
        // A range larger than one request can transfer, in a single query.
        let tag = fixture.submit(0, IoOp::Extents, 4096, 1 << 20);
        fixture.drain(SEC);
        let status = if promised { IoStatus::Ok } else { IoStatus::Unsupported };
        assert_eq!(fixture.client.status(tag), Some(status));
        let sent: Vec<_> = fixture.server.ios().skip(before).filter_map(|r| r.io).collect();
        let sent: Vec<_> = sent.iter().map(|(op, io)| (*op, io.sector, io.bi_size)).collect();
        assert_eq!(sent, if promised { vec![(RwOp::Extents, 8, 1 << 20)] } else { vec![] });
        if promised {
            let list = fixture.client.buffer(0, 0, 16).to_vec();
            assert_eq!(list, [1_u64, 1 << 20].map(u64::to_le_bytes).concat());
        }
    }
}

#[test]
fn extents_do_not_reach_a_server_that_does_not_promise_them() {
    // The query waits because all permits are in use, or was sent and has to be resent.
    for waiting in [true, false] {
        let mut fixture = Fixture::open(|s| {
            s.how.hold = true;
            s.how.open_rsp = Some(Box::new(|rsp| OpenRsp { extents: true, ..rsp }));
        });
        for _ in 0..if waiting { 8 } else { 0 } {
            fixture.submit(0, IoOp::Flush, 0, 0);
        }
        fixture.run(10 * MS);
        let tag = fixture.submit(0, IoOp::Extents, 0, 4096);
        fixture.run(10 * MS);
        let asked = |fixture: &Fixture| {
            let ios = fixture.server.ios().filter_map(|r| r.io);
            ios.filter(|(op, _)| *op == RwOp::Extents).count()
        };
        assert_eq!(asked(&fixture), usize::from(!waiting));
        fixture.server.how.hold = false;
        fixture.server.how.open_rsp = None;
        fixture.server.end_path(fixture.now(), 0);
        fixture.drain(5 * SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Unsupported), "waiting: {waiting}");
        assert_eq!(asked(&fixture), usize::from(!waiting));
    }
}

#[test]
fn zeroes_do_not_reach_a_less_capable_successor() {
    let mut fixture = Fixture::open(|s| s.how.hold = true);
    // All permits of the shard are in use, so the zeroes wait.
    for _ in 0..8 {
        fixture.submit(0, IoOp::Flush, 0, 0);
    }
    fixture.run(10 * MS);
    let zeroes = fixture.submit(0, IoOp::WriteZeroes, 0, 4096);
    fixture.server.how.hold = false;
    fixture.server.how.keeps_lengths = false;
    fixture.server.end_path(fixture.now(), 0);
    fixture.drain(5 * SEC);
    assert_eq!(fixture.client.status(zeroes), Some(IoStatus::Unsupported));
    let ops: Vec<_> = fixture.server.ios().filter_map(|r| r.io).map(|(op, _)| op).collect();
    assert!(!ops.contains(&RwOp::WriteZeroes), "{ops:?}");
    // Zeroes submitted now are written.
    let zeroes = fixture.submit(0, IoOp::WriteZeroes, 0, 4096);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(zeroes), Some(IoStatus::Ok));
}

#[test]
fn fast_zeroes_do_not_reach_a_server_that_does_not_promise_them() {
    // The zeroes wait because all permits are in use, or were sent and have to be resent.
    for waiting in [true, false] {
        let mut fixture = Fixture::open(|s| {
            s.how.hold = true;
            s.how.open_rsp = Some(Box::new(|rsp| OpenRsp { fast_zero: true, ..rsp }));
        });
        for _ in 0..if waiting { 8 } else { 0 } {
            fixture.submit(0, IoOp::Flush, 0, 0);
        }
        fixture.run(10 * MS);
        let flags = IoFlags { fast_only: true, ..IoFlags::default() };
        let fast = fixture.submit_io(0, TestIo::new(IoOp::WriteZeroes, 0, 4096).flags(flags));
        let plain = fixture.submit(0, IoOp::WriteZeroes, 4096, 4096);
        fixture.run(10 * MS);
        let zeroes = |fixture: &Fixture| {
            let ios = fixture.server.ios().filter_map(|r| r.io);
            ios.filter(|(op, _)| *op == RwOp::WriteZeroes).count()
        };
        assert_eq!(zeroes(&fixture), if waiting { 0 } else { 2 });
        fixture.server.how.hold = false;
        fixture.server.how.open_rsp = None;
        fixture.server.end_path(fixture.now(), 0);
        fixture.drain(5 * SEC);
        assert_eq!(fixture.client.status(fast), Some(IoStatus::Unsupported), "waiting: {waiting}");
        assert_eq!(fixture.client.status(plain), Some(IoStatus::Ok), "waiting: {waiting}");
        assert_eq!(zeroes(&fixture), if waiting { 1 } else { 3 });
    }
}
