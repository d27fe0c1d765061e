//! Tests of the exact work requests posted for an answer, byte for byte, in both modes.

use rtrs_core::fabric::sim::BindMode;
use rtrs_core::fabric::{RemoteMem, WrOp};
use rtrs_core::ids::Rkey;
use rtrs_core::wire::{IoHeader, Rw, WriteMsg};

use super::fixture::{Fixture, Posted, StandOptions};
use super::peer::{Data, Peer, PeerOptions, io, read_message};

/// All modes in which a server can run.
fn modes() -> impl Iterator<Item = (Fixture, bool)> {
    [(true, BindMode::Done), (true, BindMode::Pending), (false, BindMode::Done)].into_iter().map(
        |(fresh, bind)| {
            let mut options = StandOptions { bind, ..StandOptions::default() };
            options.params.always_invalidate = fresh.into();
            (Fixture::new(options), fresh)
        },
    )
}

/// Last work request of an answer: with fresh keys a send that carries the key of `permit`,
/// otherwise a bare write. The key is taken from the posted request and must be the chunk's new
/// key.
fn last(fresh: bool, imm: u32, permit: u16, key: Rkey) -> Posted {
    if !fresh {
        let remote = RemoteMem { addr: 0, rkey: Rkey(0) };
        return Posted { op: WrOp::RdmaWrite { remote, imm: Some(imm) }, bytes: Vec::new() };
    }
    let mut bytes = vec![4, 0];
    bytes.extend(permit.to_le_bytes());
    bytes.extend(key.0.to_le_bytes());
    Posted { op: WrOp::Send { imm: Some(imm), invalidate: None }, bytes }
}

fn invalidate(key: Rkey) -> Posted {
    Posted { op: WrOp::Send { imm: None, invalidate: Some(key) }, bytes: Vec::new() }
}

#[test]
fn writes_flushes_discards_and_errors_post_one_work_request() {
    for (mut fixture, fresh) in modes() {
        let mut peer = Peer::open(&mut fixture, PeerOptions::default());
        let old_key = peer.chunks[7].key;
        fixture.posted();
        peer.send_write((1, 7), io(Rw::WRITE, 8, 512), &[5; 512]);
        assert_eq!(peer.reply(&mut fixture).permit, 7);
        let key = peer.chunks[7].key;
        assert_eq!(fixture.posted(), [last(fresh, 0x1000_0007, 7, key)]);
        assert_eq!(key != old_key, fresh, "a fresh key for every use");

        peer.send_flush((2, 7));
        peer.reply(&mut fixture);
        assert_eq!(fixture.posted(), [last(fresh, 0x1000_0007, 7, peer.chunks[7].key)]);

        let message = WriteMsg { usr_len: 32 }.encode();
        let discard = io(Rw::DISCARD, 8, 4096).encode();
        peer.request((1, 3), Data::None, &discard, &message);
        peer.reply(&mut fixture);
        assert_eq!(fixture.posted(), [last(fresh, 0x1000_0003, 3, peer.chunks[3].key)]);

        // 95, EOPNOTSUPP: secure erase.
        let erase = io(Rw::SECURE_ERASE, 8, 4096).encode();
        peer.request((1, 3), Data::None, &erase, &message);
        peer.reply(&mut fixture);
        let imm = 0x1000_0003 | 95 << 19;
        assert_eq!(fixture.posted(), [last(fresh, imm, 3, peer.chunks[3].key)]);
    }
}

#[test]
fn a_read_writes_its_data_first() {
    for (mut fixture, fresh) in modes() {
        let mut peer = Peer::open(&mut fixture, PeerOptions::default());
        let data: Vec<u8> = (0..1024u32).map(|n| n.to_le_bytes()[0]).collect();
        fixture.device.lock().bytes[512..1536].copy_from_slice(&data);
        fixture.posted();
        peer.send_read((1, 2), io(Rw::READ, 1, 1024));
        peer.reply(&mut fixture);
        let desc = peer.result_desc(1024);
        let remote = RemoteMem { addr: desc.addr, rkey: desc.key };
        let write = Posted { op: WrOp::RdmaWrite { remote, imm: None }, bytes: data.clone() };
        let key = peer.chunks[2].key;
        assert_eq!(fixture.posted(), [write, last(fresh, 0x1000_0002, 2, key)]);
        assert_eq!(peer.result(1024), data);
    }
}

#[test]
fn a_read_invalidates_its_key_even_if_it_fails() {
    for (mut fixture, fresh) in modes() {
        let mut peer = Peer::open(&mut fixture, PeerOptions::default());
        fixture.posted();
        // Past the end of the device: EINVAL, 22.
        for (sector, errno) in [(0, 0u32), (1 << 20, 22)] {
            let (desc, window) = peer.window_desc(1, 512);
            let message = read_message(IoHeader::LEN, Some(desc), true);
            let header = io(Rw::READ, sector, 512).encode();
            peer.request((1, 2), Data::Room(512), &header, &message);
            let reply = peer.reply(&mut fixture);
            assert_eq!((u32::from(reply.errno), reply.invalidated), (errno, true));
            let posted = fixture.posted();
            let imm = 0x2000_0002 | errno << 19;
            let ends = [invalidate(desc.key), last(fresh, imm, 2, peer.chunks[2].key)];
            assert_eq!(posted[posted.len() - 2..], ends);
            assert_eq!(posted.len(), if errno == 0 { 3 } else { 2 });
            drop(window);
        }
        // Without a descriptor the flag has no effect.
        let mut message = read_message(IoHeader::LEN, None, false);
        message[4] = 1;
        let flush = io(Rw::FLUSH, u64::MAX, 0).encode();
        peer.request((1, 2), Data::None, &flush, &message);
        assert!(!peer.reply(&mut fixture).invalidated);
        assert_eq!(fixture.posted(), [last(fresh, 0x1000_0002, 2, peer.chunks[2].key)]);
    }
}

#[test]
fn open_and_sess_info_are_answered_as_captured() {
    for (mut fixture, fresh) in modes() {
        let mut peer = Peer::up(&mut fixture, PeerOptions::default(), "sess");
        fixture.posted();
        peer.send_sess_info((0, 0), 2);
        peer.reply(&mut fixture);
        let posted = fixture.posted();
        let mut expected = vec![0; 36];
        expected[0] = 1;
        expected[4] = 2;
        assert_eq!(posted[0].bytes, expected);
        assert_eq!(posted[1], last(fresh, 0x1000_0000, 0, peer.chunks[0].key));

        peer.send_open(0, "/vol", rtrs_core::wire::AccessMode::ReadWrite);
        peer.reply(&mut fixture);
        let posted = fixture.posted();
        assert_eq!(posted.len(), 2);
        let mut expected = vec![3, 0, 0, 0, 0, 0, 0, 0];
        expected.extend(2048u64.to_le_bytes());
        expected.extend((32u32 << 11).to_le_bytes());
        expected.extend((1u32 << 21).to_le_bytes());
        expected.extend((1u32 << 21).to_le_bytes());
        expected.extend(512u32.to_le_bytes());
        expected.extend([0, 0, 0, 0, 0, 16, 0, 2, 128, 0, 0, 0, 0, 3]);
        expected.resize(56, 0);
        assert_eq!(posted[0].bytes, expected);
    }
}
