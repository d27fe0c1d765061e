//! Tests of protocol violations by a peer. A request that can be answered gets an error, and the
//! path stays up; a request that cannot be answered ends the path; other sessions are never
//! affected.

use std::panic::{self, AssertUnwindSafe};

use rtrs_core::fabric::{SgeList, WrOp};
use rtrs_core::ids::PermitId;
use rtrs_core::wire::{
    AccessMode, IoHeader, Open, OpenFlags, OpenRsp, Rw, SgDesc, WriteMsg, errno,
};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Data, Peer, PeerOptions, io, read_message};
use crate::engine::message::{ControlAnswer, Message, ShardMessage};
use crate::path::PathKey;
use crate::stats::PathStage;

/// A fixture with a good session in addition to the bad one.
struct Pair {
    fixture: Fixture,
    good: Peer,
    bad: Peer,
}

impl Pair {
    fn new(always_invalidate: bool) -> Self {
        let mut options = StandOptions::default();
        options.params.always_invalidate = always_invalidate.into();
        let mut fixture = Fixture::new(options);
        let mut good = Peer::up(&mut fixture, PeerOptions::default(), "good");
        good.open_device(&mut fixture, "other", AccessMode::ReadWrite).unwrap();
        let second = PeerOptions { session: 2, path: 2, local: 1, ..PeerOptions::default() };
        let mut bad = Peer::up(&mut fixture, second, "bad");
        bad.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap();
        Self { fixture, good, bad }
    }

    /// Asserts that the bad path, and nothing else, has ended.
    fn assert_ended(&mut self, what: &str) {
        assert_eq!(self.bad.closed(&mut self.fixture), 3, "{what}");
        assert_eq!(self.fixture.sessions().len(), 1, "{what}");
        self.assert_good(what);
    }

    /// Asserts that the bad path still works.
    fn assert_alive(&mut self, what: &str) {
        self.bad.send_flush((1, 0));
        assert_eq!(self.bad.reply(&mut self.fixture).errno, 0, "{what}");
        self.assert_good(what);
    }

    fn assert_good(&mut self, what: &str) {
        self.good.send_flush((2, 3));
        assert_eq!(self.good.reply(&mut self.fixture).errno, 0, "{what}");
    }
}

#[test]
fn immediates_outside_the_pool_end_the_path() {
    // 16 chunks of 16 KiB: 24 offset bits.
    for imm in [0x0100_0000 * 15 + 16384, 0x00ff_ffff, 16384] {
        let mut pair = Pair::new(true);
        pair.bad.send_imm(1, imm);
        pair.assert_ended(&format!("{imm:#x}"));
    }
    // A depth that is not a power of two leaves some numbers unused.
    let mut options = StandOptions::default();
    options.params.limits = rtrs_core::limits::Limits::new(12, 8192).unwrap();
    let mut fixture = Fixture::new(options);
    let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
    peer.send_imm(1, 12 << 24);
    assert_eq!(peer.closed(&mut fixture), 3);
    fixture.assert_empty();
}

#[test]
fn unknown_immediates_are_ignored() {
    let mut pair = Pair::new(true);
    for imm in [0x1000_0001, 0x2000_0000, 0x3000_0000, 0x7fff_ffff, 0xf000_0000] {
        pair.bad.send_imm(1, imm);
        pair.bad.send_imm(0, imm);
    }
    // Heartbeats belong on connection 0.
    pair.bad.send_imm(1, 0x8000_0000);
    assert_eq!(pair.bad.immediates(&mut pair.fixture), []);
    pair.assert_alive("unknown immediates");
}

#[test]
fn plain_messages_end_the_path() {
    for conn in [0, 1] {
        let mut pair = Pair::new(false);
        let op = WrOp::Send { imm: None, invalidate: None };
        pair.bad.post(conn, op, SgeList::EMPTY);
        pair.assert_ended("an empty send");
    }
}

#[test]
fn malformed_requests_end_the_path() {
    let write = WriteMsg { usr_len: 32 }.encode();
    let cases: [(&str, usize, Vec<u8>, u32); 7] = [
        ("zeroes", 0, vec![0; 64], 32),
        ("unknown type", 0, [&[0; 32][..], &[9, 0, 32, 0]].concat(), 32),
        ("an answer's type", 0, [&[0; 32][..], &[4, 0, 32, 0]].concat(), 32),
        ("user header longer than all before it", 0, [&[0; 16][..], &write].concat(), 16),
        ("two descriptors", 0, [&[0; 32][..], &[3, 0, 32, 0, 0, 0, 2, 0]].concat(), 32),
        ("message beyond the end", 16352, [&[0; 30][..], &[2, 0]].concat(), 16382),
        ("read beyond the end", 16344, [&[0; 32][..], &[3, 0, 32, 0, 0, 0, 1, 0]].concat(), 16376),
    ];
    for (what, at, bytes, off) in cases {
        for always_invalidate in [false, true] {
            let mut pair = Pair::new(always_invalidate);
            pair.bad.write_chunk(1, 0, at, &bytes, off);
            pair.assert_ended(what);
        }
    }
}

#[test]
fn invalid_headers_are_answered() {
    let mut pair = Pair::new(true);
    let desc = pair.bad.result_desc(512);
    let write = WriteMsg { usr_len: 32 }.encode().to_vec();
    let read = |desc| read_message(IoHeader::LEN, desc, false);
    let header = |rw, len| io(rw, 0, len).encode().to_vec();
    let mut unknown = header(Rw::WRITE, 512);
    unknown[0] = 9;
    let short = |len: usize| header(Rw::WRITE, 512)[..len].to_vec();
    let short_message = |len: u16| WriteMsg { usr_len: len }.encode().to_vec();
    let inval = errno::EINVAL;
    type Case<'a> = (&'a str, Data<'a>, Vec<u8>, Vec<u8>, u16);
    let long = SgDesc { len: 1024, ..desc };
    let cases: [Case<'_>; 16] = [
        (
            "write shorter than announced",
            Data::Bytes(&[1; 512]),
            header(Rw::WRITE, 1024),
            write.clone(),
            inval,
        ),
        (
            "write longer than announced",
            Data::Bytes(&[1; 1024]),
            header(Rw::WRITE, 512),
            write.clone(),
            inval,
        ),
        ("write of nothing", Data::None, header(Rw::WRITE, 0), write.clone(), inval),
        ("write announced without data", Data::None, header(Rw::WRITE, 512), write.clone(), inval),
        ("write as READ", Data::Bytes(&[1; 512]), header(Rw::WRITE, 512), read(Some(desc)), inval),
        ("read as WRITE", Data::Bytes(&[1; 512]), header(Rw::READ, 512), write.clone(), inval),
        ("read without target", Data::Room(512), header(Rw::READ, 512), read(None), inval),
        (
            "read larger than its target",
            Data::Room(512),
            header(Rw::READ, 512),
            read(Some(long)),
            inval,
        ),
        ("read of another size", Data::Room(512), header(Rw::READ, 1024), read(Some(desc)), inval),
        (
            "read of nothing",
            Data::None,
            header(Rw::READ, 0),
            read(Some(SgDesc { len: 0, ..desc })),
            inval,
        ),
        (
            "discard with data",
            Data::Bytes(&[1; 512]),
            header(Rw::DISCARD, 512),
            write.clone(),
            inval,
        ),
        ("discard of nothing", Data::None, header(Rw::DISCARD, 0), write.clone(), inval),
        ("flush with a target", Data::Room(512), header(Rw::FLUSH, 0), read(Some(desc)), inval),
        ("unknown operation", Data::None, header(Rw(0x99), 0), write.clone(), errno::EOPNOTSUPP),
        ("unknown message", Data::Bytes(&[1; 512]), unknown, write, inval),
        ("short header", Data::Bytes(&[1; 512]), short(23), short_message(23), inval),
    ];
    for (what, data, header, message, errno) in cases {
        pair.bad.request((1, 4), data, &header, &message);
        let reply = pair.bad.reply(&mut pair.fixture);
        assert_eq!((reply.permit, reply.errno), (4, errno), "{what}");
    }
    // Headers from older peers: 24 and 28 bytes are enough.
    for len in [24, 28] {
        let (data, header) = (Data::Bytes(&[1; 512]), short(len));
        let message = short_message(u16::try_from(len).unwrap());
        pair.bad.request((1, 4), data, &header, &message);
        assert_eq!(pair.bad.reply(&mut pair.fixture).errno, 0, "{len} bytes");
    }
    pair.assert_alive("after all of these");
}

#[test]
fn invalid_opens_are_answered() {
    let mut pair = Pair::new(true);
    let name = rtrs_core::wire::Name::new(b"vol").unwrap();
    let flags = OpenFlags::default();
    let good = Open { access: AccessMode::ReadOnly, flags, dev_name: name }.encode();
    let desc = pair.bad.result_desc(OpenRsp::LEN);
    let message = read_message(Open::LEN, Some(desc), false);
    let mut mode = good;
    mode[4] = 3;
    let mut endless = good;
    endless[6..261].fill(b'v');
    for (what, header) in [("mode", mode), ("name without end", endless)] {
        let room = Data::Room(OpenRsp::LEN);
        pair.bad.request((0, 4), room, &header, &message);
        assert_eq!(pair.bad.reply(&mut pair.fixture).errno, errno::EINVAL, "{what}");
    }
    let small = pair.bad.result_desc(55);
    let message = read_message(Open::LEN, Some(small), false);
    pair.bad.request((0, 4), Data::Room(55), &good, &message);
    assert_eq!(pair.bad.reply(&mut pair.fixture).errno, errno::EINVAL, "no room for the answer");
    // As a WRITE, it has no buffer for an answer.
    let message = WriteMsg { usr_len: 264 }.encode();
    pair.bad.request((0, 4), Data::None, &good, &message);
    assert_eq!(pair.bad.reply(&mut pair.fixture).errno, errno::EINVAL);
    pair.assert_alive("after all of these");
}

#[test]
fn a_permit_reused_before_its_answer_ends_the_path() {
    // On the same connection, and on a connection of the other shard.
    for second in [1, 2] {
        let mut pair = Pair::new(false);
        pair.fixture.device.lock().hold = true;
        pair.bad.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
        pair.fixture.settle();
        pair.bad.send_write((second, 6), io(Rw::WRITE, 8, 512), &[2; 512]);
        assert_eq!(pair.bad.closed(&mut pair.fixture), 3);
        assert_eq!(pair.fixture.load().1, 1, "the first one still runs");
        pair.fixture.device.lock().hold = false;
        pair.assert_ended("reuse");
        assert_eq!(pair.fixture.load().1, 0);
        let log = pair.fixture.device.lock().log.clone();
        assert_eq!(log.len(), 1, "the second one never ran: {log:?}");
    }
}

#[test]
fn a_chunk_without_its_key_cannot_be_written() {
    let mut pair = Pair::new(true);
    let old = pair.bad.chunks[6];
    pair.bad.send_flush((1, 6));
    pair.bad.reply(&mut pair.fixture);
    assert_ne!(pair.bad.chunks[6].key, old.key);
    pair.bad.chunks[6] = old;
    pair.bad.send_flush((1, 6));
    pair.assert_ended("an old key");
}

#[test]
fn a_read_into_foreign_memory_ends_the_path() {
    let mut pair = Pair::new(true);
    let desc = SgDesc { key: rtrs_core::ids::Rkey(0x1234_5678), ..pair.bad.result_desc(512) };
    let message = read_message(IoHeader::LEN, Some(desc), false);
    let header = io(Rw::READ, 0, 512).encode();
    pair.bad.request((1, 4), Data::Room(512), &header, &message);
    pair.assert_ended("a wrong client key");
}

#[test]
fn an_impossible_state_is_counted_and_ends_the_path() {
    let mut options = StandOptions::default();
    options.params.cores = 1;
    let mut fixture = Fixture::new(options);
    let _peer = Peer::open(&mut fixture, PeerOptions::default());
    let other = PeerOptions { path: 2, local: 1, first_conn: false, ..PeerOptions::default() };
    let _other = Peer::up(&mut fixture, other, "sess");
    let path = PathKey(fixture.sessions()[0].paths[0].path);
    let (permit, answer) = (PermitId(5), ControlAnswer::Done);
    fixture.send(Message::Shard(ShardMessage::Answer { path, permit, answer }));
    let turn = panic::catch_unwind(AssertUnwindSafe(|| fixture.settle()));
    turn.expect_err("the engine's own check detects it");
    let session = fixture.sessions().swap_remove(0);
    assert_eq!(session.io.internal_errors, 1);
    let up = session.paths.iter().filter(|path| path.state == PathStage::Connected);
    assert_eq!(up.map(|up| up.path).collect::<Vec<_>>(), [path.0 + 1], "the other path stays up");
}
