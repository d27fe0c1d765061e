//! Tests of servers that send invalid answers, keys and messages.

use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::BindMode;
use rtrs_core::ids::PermitId;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{Imm, RkeyRsp};

use super::fixture::{Fixture, MS, SEC, TestIo};
use crate::engine::DeviceIndex;
use crate::path::state::PathState;

fn response(permit: u16, errno: u16, invalidated: bool) -> u32 {
    Imm::Response { permit: PermitId(permit), errno, invalidated }.encode()
}

#[test]
fn unexpected_answers_are_ignored() {
    for new_rkey in [true, false] {
        let mut fixture = Fixture::open(|s| {
            s.how.hold = true;
            s.how.new_rkey = new_rkey;
        });
        let tag = fixture.submit(1, IoOp::Read, 0, 4096);
        fixture.until("the request", SEC, |s| s.server.held.len() == 1);
        let permit = fixture.server.held[0].permit.0;
        let garbage = [
            response(permit + 1, 0, false),
            response(1, 0, false),
            response(0, 0, false),
            response(0xffff, 5, true),
            0x1001_0000,
            0x3000_0000 | u32::from(permit),
            u32::from(permit) << 24,
            0xf000_0000,
            Imm::Heartbeat { next_ms: 0 }.encode(),
        ];
        for imm in garbage {
            fixture.server.immediate(0, 2, imm);
            // Repeat this on the other shard's connection, where the permit is not in use.
            fixture.server.immediate(0, 1, imm);
            fixture.server.immediate(0, 1, response(permit, 0, false));
            fixture.server.plain_send(0, 2);
        }
        fixture.run(10 * MS);
        assert_eq!(fixture.client.status(tag), None, "the answer is still to come");
        assert_eq!(fixture.client.states(), [PathState::Connected]);
        fixture.server.how.hold = false;
        fixture.server.release();
        fixture.drain(SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
        fixture.read(0, 0, 4096);
        fixture.read(1, 0, 4096);
    }
}

#[test]
fn the_service_connection_ignores_garbage_but_foreign_answers_end_the_path() {
    let mut fixture = Fixture::open(|_| {});
    for imm in [0x3000_0000, 0x1001_0000, 0xf123_4567, response(0, 5, false)] {
        fixture.server.immediate(0, 0, imm);
        fixture.server.plain_send(0, 0);
    }
    fixture.run(10 * MS);
    assert_eq!(fixture.client.states(), [PathState::Connected]);
    assert!(fixture.client.control.view().is_open(DeviceIndex::FIRST));
    fixture.server.immediate(0, 0, response(3, 0, false));
    fixture.run(10 * MS);
    assert!(fixture.client.last_error(0).contains("permit 3 on the service connection"));
    fixture.until("the path", 5 * SEC, Fixture::is_whole);
}

#[test]
fn a_repeated_answer_ends_an_io_once() {
    let mut fixture = Fixture::open(|s| {
        s.how.hold = true;
        s.how.new_rkey = false;
    });
    let tag = fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    let request = fixture.server.held.pop().expect("held");
    let imm = response(request.permit.0, 0, false);
    for _ in 0..5 {
        fixture.server.immediate(0, 1, imm);
    }
    fixture.run(10 * MS);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    assert_eq!(fixture.client.done.len(), 1);
}

#[test]
fn an_answer_on_another_path_is_not_an_answer() {
    let mut fixture = Fixture::open(|s| (s.paths, s.how.hold) = (2, true));
    let tag = fixture.submit(0, IoOp::Read, 0, 4096);
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    let request = fixture.server.held[0].clone();
    let other = fixture.server.paths.iter().position(|p| p.uuid != request.path).expect("two");
    fixture.server.immediate(other, 1, response(request.permit.0, 0, false));
    fixture.run(10 * MS);
    assert_eq!(fixture.client.status(tag), None);
    fixture.server.release();
    fixture.drain(SEC);
    assert_eq!(fixture.client.buffer(0, 0, 4096).to_vec(), fixture.server.disk[..4096]);
}

#[test]
fn invalid_key_messages_end_the_path() {
    type Lie = fn(RkeyRsp) -> Vec<u8>;
    let lies: [(&str, Lie); 5] = [
        ("type", |rsp| {
            let mut bytes = rsp.encode().to_vec();
            bytes[0] = 3;
            bytes
        }),
        ("buf_id", |rsp| RkeyRsp { permit: PermitId(rsp.permit.0 ^ 1), ..rsp }.encode().to_vec()),
        ("RKEY_RSP", |rsp| rsp.encode()[..7].to_vec()),
        ("RKEY_RSP", |_| vec![4]),
        ("", |rsp| [rsp.encode(), rsp.encode()].concat()),
    ];
    for (word, lie) in lies {
        for op in [IoOp::Read, IoOp::Write] {
            let mut fixture = Fixture::open(|_| {});
            fixture.server.how.rkey_rsp = Some(Box::new(lie));
            let tag = fixture.submit(1, op, 0, 4096);
            fixture.until("the end", SEC, |s| s.client.states()[0] == PathState::Waiting);
            assert_eq!(fixture.client.status(tag), None, "{word}");
            let error = fixture.client.last_error(0);
            assert!(error.starts_with("connection 2: ") && error.contains(word), "{error}");
            fixture.server.how.rkey_rsp = None;
            fixture.drain(5 * SEC);
            assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok), "{word}");
            fixture.read(1, 0, 4096);
        }
    }
}

#[test]
fn a_wrong_key_ends_the_path_at_its_next_use() {
    let mut fixture = Fixture::open(|s| s.how.queue_depth = 3);
    fixture.server.how.rkey_rsp = Some(Box::new(|rsp| {
        let rkey = rtrs_core::ids::Rkey(rsp.rkey.0 ^ 0x55);
        RkeyRsp { rkey, ..rsp }.encode().to_vec()
    }));
    let first = fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(first), Some(IoStatus::Ok), "the key is only stored");
    let second = fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.until("the end", SEC, |s| s.client.states()[0] != PathState::Connected);
    fixture.server.how.rkey_rsp = None;
    fixture.drain(5 * SEC);
    assert_eq!(fixture.client.status(second), Some(IoStatus::Ok));
}

#[test]
fn an_answer_that_claims_an_invalidation_is_an_answer() {
    let mut fixture = Fixture::open(|s| {
        s.how.hold = true;
        s.how.new_rkey = false;
    });
    let tag = fixture.submit(0, IoOp::Read, 0, 4096);
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    fixture.server.immediate(0, 1, response(1, 5, true));
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Io));
}

#[test]
fn a_late_write_to_a_closed_window_is_refused() {
    for bind in [BindMode::Done, BindMode::Pending] {
        for new_rkey in [true, false] {
            let mut fixture = Fixture::open(|s| {
                (s.world.bind, s.how.new_rkey, s.how.hold) = (bind, new_rkey, true);
            });
            let tag = fixture.submit(0, IoOp::Read, 0, 4096);
            fixture.until("the request", SEC, |s| s.server.held.len() == 1);
            let request = fixture.server.held.pop().expect("held");
            fixture.server.serve(&request);
            fixture.drain(SEC);
            assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
            let disk = fixture.server.disk[..4096].to_vec();
            fixture.server.write_late(&request);
            fixture.until("the end", SEC, |s| s.client.states()[0] != PathState::Connected);
            assert_eq!(fixture.client.buffer(0, 0, 4096).to_vec(), disk, "reused memory");
            let error = fixture.client.last_error(0);
            assert!(error.contains("unknown key"), "{error}");
            fixture.server.how.hold = false;
            fixture.until("the path", 5 * SEC, Fixture::is_whole);
            fixture.read(0, 0, 4096);
        }
    }
}

#[test]
fn a_late_write_does_not_reach_the_next_user_of_the_buffer() {
    // The next read has the same permit and buffer: the old key is invalid, and the new one
    // differs.
    let mut fixture = Fixture::open(|s| (s.how.queue_depth, s.how.hold) = (3, true));
    fixture.submit(0, IoOp::Read, 0, 4096);
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    let old = fixture.server.held.pop().expect("held");
    fixture.server.serve(&old);
    fixture.drain(SEC);
    let tag = fixture.submit(0, IoOp::Read, 8192, 4096);
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    let new = &fixture.server.held[0];
    assert_eq!(new.permit, old.permit);
    let (old_desc, new_desc) = (old.parsed.desc(), new.parsed.desc());
    let (old_desc, new_desc) = (old_desc.expect("a read"), new_desc.expect("a read"));
    assert_eq!((old_desc.addr, old_desc.len), (new_desc.addr, new_desc.len));
    assert_ne!(old_desc.key, new_desc.key, "a key per request");
    fixture.client.buffer(0, 0, 4096).fill(0x11);
    fixture.server.write_late(&old);
    fixture.until("the end", SEC, |s| s.client.states()[0] == PathState::Waiting);
    assert_eq!(fixture.client.buffer(0, 0, 4096).to_vec(), [0x11; 4096]);
    fixture.server.how.hold = false;
    fixture.drain(5 * SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    assert_eq!(fixture.client.buffer(0, 0, 4096).to_vec(), fixture.server.disk[8192..12288]);
}

#[test]
fn a_read_window_covers_its_part_and_no_more() {
    let mut fixture = Fixture::open(|s| s.how.hold = true);
    fixture.client.buffer(0, 0, 12288).fill(0x11);
    let at = 4096;
    let tag = fixture.submit_io(0, TestIo::new(IoOp::Read, 0, 4096).at(at));
    fixture.until("the request", SEC, |s| s.server.held.len() == 1);
    let mut request = fixture.server.held.pop().expect("held");
    // One sector more than requested.
    if let rtrs_core::wire::Message::Read(read) = &mut request.parsed.message
        && let Some(desc) = &mut read.desc
    {
        desc.len += 512;
    }
    fixture.server.serve(&request);
    fixture.until("the end", SEC, |s| s.client.states()[0] == PathState::Waiting);
    assert_eq!(fixture.client.status(tag), None);
    assert_eq!(fixture.client.buffer(0, 8192, 4096).to_vec(), [0x11; 4096]);
    assert!(fixture.client.last_error(0).contains("outside the bounds"));
}

#[test]
fn a_read_ends_when_its_window_is_closed_and_not_before() {
    let mut seen = [0; 2];
    for seed in 0..60 {
        let mut fixture = Fixture::open(|s| {
            (s.seed, s.how.hold, s.world.bind) = (seed, true, BindMode::Pending);
        });
        let tag = fixture.submit(0, IoOp::Read, 0, 4096);
        fixture.until("the request", SEC, |s| s.server.held.len() == 1);
        let request = fixture.server.held.pop().expect("held");
        fixture.server.serve(&request);
        fixture.server.immediate(0, 1, response(request.permit.0, 0, false));
        // A late write directly after two answers may arrive before the window is closed, or be
        // refused.
        fixture.server.write_late(&request);
        fixture.until("the end", SEC, |s| s.client.status(tag).is_some());
        assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
        let found = fixture.client.buffer(0, 0, 4096).to_vec();
        fixture.run(10 * MS);
        assert_eq!(fixture.client.buffer(0, 0, 4096).to_vec(), found, "seed {seed}: it had ended");
        seen[usize::from(found == fixture.server.disk[..4096])] += 1;
    }
    assert!(seen.iter().all(|&n| n > 5), "both orders: {seen:?}");
}
