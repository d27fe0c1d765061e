//! A server that lies about requests, answers and keys.

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::fabric::sim::BindMode;
use rtrs_core::ids::PermitId;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{Imm, RkeyRsp};

use super::stand::{MS, SEC, Stand};
use crate::path::state::PathState;

fn response(permit: u16, errno: u16, invalidated: bool) -> u32 {
    Imm::Response { permit: PermitId(permit), errno, invalidated }.encode()
}

#[test]
fn answers_nobody_waits_for_are_passed_over() {
    for new_rkey in [true, false] {
        let mut stand = Stand::open(|s| {
            s.how.hold = true;
            s.how.new_rkey = new_rkey;
        });
        let tag = stand.submit(1, IoOp::Read, 0, 4096);
        stand.until("the request", SEC, |s| s.server.held.len() == 1);
        let permit = stand.server.held[0].permit.0;
        let garbage = [
            response(permit + 1, 0, false),
            response(1, 0, false),
            response(0, 0, false),
            response(0xffff, 5, true),
            0x1001_0000,
            0x3000_0000 | u32::from(permit),
            u32::from(permit) << 24,
            0xf000_0000,
            Imm::Heartbeat.encode(),
        ];
        for imm in garbage {
            stand.server.immediate(0, 2, imm);
            // The same on the other core's connection, where this permit is nobody's.
            stand.server.immediate(0, 1, imm);
            stand.server.immediate(0, 1, response(permit, 0, false));
            stand.server.plain_send(0, 2);
        }
        stand.run(10 * MS);
        assert_eq!(stand.client.status(tag), None, "the answer is still to come");
        assert_eq!(stand.client.states(), [PathState::Connected]);
        stand.server.how.hold = false;
        stand.server.release();
        stand.drain(SEC);
        assert_eq!(stand.client.status(tag), Some(IoStatus::Ok));
        stand.read(0, 0, 4096);
        stand.read(1, 0, 4096);
    }
}

#[test]
fn on_the_service_connection_garbage_is_passed_over_and_foreign_answers_end_the_path() {
    let mut stand = Stand::open(|_| {});
    for imm in [0x3000_0000, 0x1001_0000, 0xf123_4567, response(0, 5, false)] {
        stand.server.immediate(0, 0, imm);
        stand.server.plain_send(0, 0);
    }
    stand.run(10 * MS);
    assert_eq!(stand.client.states(), [PathState::Connected]);
    assert!(stand.client.control.is_open());
    stand.server.immediate(0, 0, response(3, 0, false));
    stand.run(10 * MS);
    assert!(stand.client.last_error(0).contains("permit 3 on the service connection"));
    stand.until("the path", 5 * SEC, Stand::is_whole);
}

#[test]
fn an_answer_twice_ends_an_io_once() {
    let mut stand = Stand::open(|s| {
        s.how.hold = true;
        s.how.new_rkey = false;
    });
    let tag = stand.submit(0, IoOp::Write, 0, 4096);
    stand.until("the request", SEC, |s| s.server.held.len() == 1);
    let request = stand.server.held.pop().expect("held");
    let imm = response(request.permit.0, 0, false);
    for _ in 0..5 {
        stand.server.immediate(0, 1, imm);
    }
    stand.run(10 * MS);
    assert_eq!(stand.client.status(tag), Some(IoStatus::Ok));
    assert_eq!(stand.client.done.len(), 1);
}

#[test]
fn an_answer_on_another_path_is_no_answer() {
    let mut stand = Stand::open(|s| (s.paths, s.how.hold) = (2, true));
    let tag = stand.submit(0, IoOp::Read, 0, 4096);
    stand.until("the request", SEC, |s| s.server.held.len() == 1);
    let request = stand.server.held[0].clone();
    let other = stand.server.paths.iter().position(|p| p.uuid != request.path).expect("two");
    stand.server.immediate(other, 1, response(request.permit.0, 0, false));
    stand.run(10 * MS);
    assert_eq!(stand.client.status(tag), None);
    stand.server.release();
    stand.drain(SEC);
    assert_eq!(stand.client.buffer(0, 0, 4096).to_vec(), stand.server.disk[..4096]);
}

#[test]
fn lies_about_keys_end_the_path() {
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
            let mut stand = Stand::open(|_| {});
            stand.server.how.rkey_rsp = Some(Box::new(lie));
            let tag = stand.submit(1, op, 0, 4096);
            stand.until("the end", SEC, |s| s.client.states()[0] == PathState::Waiting);
            assert_eq!(stand.client.status(tag), None, "{word}");
            let error = stand.client.last_error(0);
            assert!(error.starts_with("connection 2: ") && error.contains(word), "{error}");
            stand.server.how.rkey_rsp = None;
            stand.drain(5 * SEC);
            assert_eq!(stand.client.status(tag), Some(IoStatus::Ok), "{word}");
            stand.read(1, 0, 4096);
        }
    }
}

#[test]
fn a_wrong_key_ends_the_path_at_its_next_use() {
    let mut stand = Stand::open(|s| s.how.queue_depth = 3);
    stand.server.how.rkey_rsp = Some(Box::new(|rsp| {
        let rkey = rtrs_core::ids::Rkey(rsp.rkey.0 ^ 0x55);
        RkeyRsp { rkey, ..rsp }.encode().to_vec()
    }));
    let first = stand.submit(0, IoOp::Write, 0, 4096);
    stand.drain(SEC);
    assert_eq!(stand.client.status(first), Some(IoStatus::Ok), "the key is only stored");
    let second = stand.submit(0, IoOp::Write, 0, 4096);
    stand.until("the end", SEC, |s| s.client.states()[0] != PathState::Connected);
    stand.server.how.rkey_rsp = None;
    stand.drain(5 * SEC);
    assert_eq!(stand.client.status(second), Some(IoStatus::Ok));
}

#[test]
fn an_answer_that_claims_an_invalidation_is_an_answer() {
    let mut stand = Stand::open(|s| {
        s.how.hold = true;
        s.how.new_rkey = false;
    });
    let tag = stand.submit(0, IoOp::Read, 0, 4096);
    stand.until("the request", SEC, |s| s.server.held.len() == 1);
    stand.server.immediate(0, 1, response(1, 5, true));
    stand.drain(SEC);
    assert_eq!(stand.client.status(tag), Some(IoStatus::Io));
}

#[test]
fn a_late_write_to_a_closed_window_is_refused() {
    for bind in [BindMode::Done, BindMode::Pending] {
        for new_rkey in [true, false] {
            let mut stand = Stand::open(|s| {
                (s.world.bind, s.how.new_rkey, s.how.hold) = (bind, new_rkey, true);
            });
            let tag = stand.submit(0, IoOp::Read, 0, 4096);
            stand.until("the request", SEC, |s| s.server.held.len() == 1);
            let request = stand.server.held.pop().expect("held");
            stand.server.serve(&request);
            stand.drain(SEC);
            assert_eq!(stand.client.status(tag), Some(IoStatus::Ok));
            let disk = stand.server.disk[..4096].to_vec();
            stand.server.write_late(&request);
            stand.until("the end", SEC, |s| s.client.states()[0] != PathState::Connected);
            assert_eq!(stand.client.buffer(0, 0, 4096).to_vec(), disk, "memory that moved on");
            let error = stand.client.last_error(0);
            assert!(error.contains("unknown key"), "{error}");
            stand.server.how.hold = false;
            stand.until("the path", 5 * SEC, Stand::is_whole);
            stand.read(0, 0, 4096);
        }
    }
}

#[test]
fn a_late_write_does_not_reach_the_next_user_of_the_buffer() {
    // Same permit, same buffer, next read: the old key is dead, the new one is another.
    let mut stand = Stand::open(|s| (s.how.queue_depth, s.how.hold) = (3, true));
    stand.submit(0, IoOp::Read, 0, 4096);
    stand.until("the request", SEC, |s| s.server.held.len() == 1);
    let old = stand.server.held.pop().expect("held");
    stand.server.serve(&old);
    stand.drain(SEC);
    let tag = stand.submit(0, IoOp::Read, 8192, 4096);
    stand.until("the request", SEC, |s| s.server.held.len() == 1);
    let new = &stand.server.held[0];
    assert_eq!(new.permit, old.permit);
    let (old_desc, new_desc) = (old.parsed.desc(), new.parsed.desc());
    let (old_desc, new_desc) = (old_desc.expect("a read"), new_desc.expect("a read"));
    assert_eq!((old_desc.addr, old_desc.len), (new_desc.addr, new_desc.len));
    assert_ne!(old_desc.key, new_desc.key, "a key per request");
    stand.client.buffer(0, 0, 4096).fill(0x11);
    stand.server.write_late(&old);
    stand.until("the end", SEC, |s| s.client.states()[0] == PathState::Waiting);
    assert_eq!(stand.client.buffer(0, 0, 4096).to_vec(), [0x11; 4096]);
    stand.server.how.hold = false;
    stand.drain(5 * SEC);
    assert_eq!(stand.client.status(tag), Some(IoStatus::Ok));
    assert_eq!(stand.client.buffer(0, 0, 4096).to_vec(), stand.server.disk[8192..12288]);
}

#[test]
fn a_read_window_covers_its_part_and_no_more() {
    let mut stand = Stand::open(|s| s.how.hold = true);
    stand.client.buffer(0, 0, 12288).fill(0x11);
    let at = 4096;
    let tag = stand.submit_with(0, (IoOp::Read, IoFlags::default()), (0, 4096), at);
    stand.until("the request", SEC, |s| s.server.held.len() == 1);
    let mut request = stand.server.held.pop().expect("held");
    // One sector more than was asked for.
    if let rtrs_core::wire::Message::Read(read) = &mut request.parsed.message
        && let Some(desc) = &mut read.desc
    {
        desc.len += 512;
    }
    stand.server.serve(&request);
    stand.until("the end", SEC, |s| s.client.states()[0] == PathState::Waiting);
    assert_eq!(stand.client.status(tag), None);
    assert_eq!(stand.client.buffer(0, 8192, 4096).to_vec(), [0x11; 4096]);
    assert!(stand.client.last_error(0).contains("outside the bounds"));
}

#[test]
fn a_read_ends_when_its_window_is_closed_and_not_before() {
    let mut seen = [0; 2];
    for seed in 0..60 {
        let mut stand = Stand::open(|s| {
            (s.seed, s.how.hold, s.world.bind) = (seed, true, BindMode::Pending);
        });
        let tag = stand.submit(0, IoOp::Read, 0, 4096);
        stand.until("the request", SEC, |s| s.server.held.len() == 1);
        let request = stand.server.held.pop().expect("held");
        stand.server.serve(&request);
        stand.server.immediate(0, 1, response(request.permit.0, 0, false));
        // Right behind two answers: it may land before the window is closed, or be refused.
        stand.server.write_late(&request);
        stand.until("the end", SEC, |s| s.client.status(tag).is_some());
        assert_eq!(stand.client.status(tag), Some(IoStatus::Ok));
        let found = stand.client.buffer(0, 0, 4096).to_vec();
        stand.run(10 * MS);
        assert_eq!(stand.client.buffer(0, 0, 4096).to_vec(), found, "seed {seed}: it had ended");
        seen[usize::from(found == stand.server.disk[..4096])] += 1;
    }
    assert!(seen.iter().all(|&n| n > 5), "both orders: {seen:?}");
}
