//! Tests of requests: an invalid request that can be answered returns an errno and leaves the path
//! up; a message that does not identify a request to answer ends the path.

use rtrs_core::wire::{
    AccessMode, IoHeader, Name, Open, OpenFlags, OpenRsp, Rw, SessInfo, SgDesc, WriteMsg, errno,
};
use rtrs_tests::{Data, Peer, PeerOptions, read_message, wait_for};

use super::*;

#[test]
fn immediates_that_end_the_path() {
    let mut scene = Scene::new();
    let chunk = u32::try_from(CHUNK).expect("a chunk");
    for (permit, offset) in [(DEPTH, 32), (31, 32), (0, chunk), (23, (1 << 23) - 1)] {
        let what = format!("permit {permit}, offset {offset}");
        let _ = scene.fatal(&what, |peer| {
            let imm = peer.request_imm(permit, offset as usize);
            peer.send_imm(1, imm);
        });
    }
    scene.end();
}

#[test]
fn unknown_immediates_are_ignored() {
    let mut scene = Scene::new();
    let mut peer = scene.writer();
    for imm in [0x1000_0001, 0x1fff_ffff, 0x2000_0000, 0x3000_0000, 0x7fff_ffff, 0xf000_0000] {
        peer.send_imm(0, imm);
        peer.send_imm(1, imm);
    }
    // Heartbeats on the wrong connection.
    peer.send_imm(1, 0x8000_0000);
    peer.send_imm(1, 0x9000_0000);
    peer.check_alive("unknown immediates");
    drop(peer);
    scene.end();
}

#[test]
fn malformed_requests_that_cannot_be_answered() {
    for always_invalidate in ["on", "off"] {
        let mut scene = Scene::with(&["--always-invalidate", always_invalidate]);
        let write = WriteMsg { usr_len: 32 }.encode();
        let read = |sg_cnt: u8| [3, 0, 32, 0, 0, 0, sg_cnt, 0];
        let cases: [(&str, usize, Vec<u8>, usize); 11] = [
            ("zeroes", 0, vec![0; 64], 32),
            ("an unknown type", 0, [&[0; 32][..], &[9, 0, 32, 0]].concat(), 32),
            ("the type of an answer", 0, [&[0; 32][..], &[4, 0, 32, 0]].concat(), 32),
            ("a user header longer than off", 0, [&[0; 31][..], &write].concat(), 31),
            ("a user header of 65535", 0, [&[0; 32][..], &[2, 0, 0xff, 0xff]].concat(), 32),
            ("a user header of 4096", 0, [&[0; 4096][..], &[2, 0, 0, 16]].concat(), 4096),
            ("two descriptors", 0, [&[0; 32][..], &read(2), &[0; 32]].concat(), 32),
            ("255 descriptors", 0, [&[0; 32][..], &read(255)].concat(), 32),
            ("a message beyond the end", CHUNK - 34, vec![2; 34], CHUNK - 2),
            ("a read beyond the end", CHUNK - 40, [&[0; 32][..], &read(1)].concat(), CHUNK - 8),
            ("a request at the very end", CHUNK - 1, vec![2], CHUNK - 1),
        ];
        for (what, at, bytes, off) in cases {
            let _ = scene.fatal(what, |peer| {
                let imm = peer.request_imm(3, off);
                peer.write_chunk(1, 3, at, &bytes, imm);
            });
        }
        scene.end();
    }
}

#[test]
fn requests_that_are_answered_with_an_error() {
    let mut scene = Scene::new();
    let mut peer = scene.writer();
    let write = WriteMsg { usr_len: 32 }.encode().to_vec();
    let desc = |len| peer.result_desc(len);
    let read = |desc| read_message(IoHeader::LEN, desc, false);
    let header = |rw, len| io(rw, 0, len).encode().to_vec();
    let typed = |kind: u8| {
        let mut bytes = header(Rw::WRITE, 512);
        bytes[0] = kind;
        bytes
    };
    let long = SgDesc { len: 1024, ..desc(512) };
    let huge = SgDesc { len: u32::MAX, ..desc(512) };
    let none = SgDesc { len: 0, ..desc(512) };
    let (bytes, room) = (Data::Bytes(&[1; 512]), Data::Room(512));
    let (inval, unsupported) = (errno::EINVAL, errno::EOPNOTSUPP);
    let sess_info = SessInfo { ver: 2 }.encode().to_vec();
    type Case<'a> = (&'a str, Data<'a>, Vec<u8>, Vec<u8>, u16);
    let cases: Vec<Case<'_>> = vec![
        ("write shorter than announced", bytes, header(Rw::WRITE, 1024), write.clone(), inval),
        ("write longer than announced", bytes, header(Rw::WRITE, 0), write.clone(), inval),
        ("write of 4 GiB", bytes, header(Rw::WRITE, u32::MAX), write.clone(), inval),
        ("write without data", Data::None, header(Rw::WRITE, 512), write.clone(), inval),
        ("write of nothing", Data::None, header(Rw::WRITE, 0), write.clone(), inval),
        ("write as a READ", bytes, header(Rw::WRITE, 512), read(Some(desc(512))), inval),
        ("read as a WRITE", bytes, header(Rw::READ, 512), write.clone(), inval),
        ("read without descriptor", room, header(Rw::READ, 512), read(None), inval),
        ("read, longer descriptor", room, header(Rw::READ, 512), read(Some(long)), inval),
        ("read, huge descriptor", room, header(Rw::READ, 512), read(Some(huge)), inval),
        ("read, empty descriptor", room, header(Rw::READ, 512), read(Some(none)), inval),
        ("read of another size", room, header(Rw::READ, 1024), read(Some(desc(512))), inval),
        ("read of nothing", Data::None, header(Rw::READ, 0), read(Some(none)), inval),
        ("read of 4 GiB", room, header(Rw::READ, u32::MAX), read(Some(huge)), inval),
        ("discard with data", bytes, header(Rw::DISCARD, 512), write.clone(), inval),
        ("discard of nothing", Data::None, header(Rw::DISCARD, 0), write.clone(), inval),
        ("flush with a target", room, header(Rw::FLUSH, 0), read(Some(desc(512))), inval),
        ("secure erase", Data::None, header(Rw::SECURE_ERASE, 512), write.clone(), unsupported),
        ("operation 6", Data::None, header(Rw(6), 512), write.clone(), unsupported),
        ("operation 255", Data::None, header(Rw(255), 512), write.clone(), unsupported),
        ("message 1", bytes, typed(1), write.clone(), inval),
        ("message 3", bytes, typed(3), write.clone(), inval),
        ("message 6", bytes, typed(6), write.clone(), inval),
        ("message 255", bytes, typed(255), write.clone(), inval),
        (
            "SESS_INFO as a WRITE",
            Data::None,
            sess_info.clone(),
            { WriteMsg { usr_len: 36 }.encode().to_vec() },
            inval,
        ),
        (
            "SESS_INFO, no room",
            Data::Room(35),
            sess_info,
            read_message(36, Some(desc(35)), false),
            inval,
        ),
        (
            "no user header",
            Data::None,
            Vec::new(),
            WriteMsg { usr_len: 0 }.encode().to_vec(),
            inval,
        ),
        (
            "a short user header",
            bytes,
            header(Rw::WRITE, 512)[..23].to_vec(),
            { WriteMsg { usr_len: 23 }.encode().to_vec() },
            inval,
        ),
    ];
    for (conn, permit) in [(0, 4), (1, 4), (1, 23)] {
        for (what, data, header, message, errno) in &cases {
            peer.request((conn, permit), *data, header, message);
            let answer = peer.answer();
            assert_eq!((answer.conn, answer.permit), (conn, permit), "{what}");
            assert_eq!(answer.errno, *errno, "{what}");
        }
    }
    peer.check_alive("wrong requests");
    drop(peer);
    scene.end();
}

/// The kernel client sends stack contents in bytes that the protocol leaves undefined.
#[test]
fn garbage_in_undefined_bytes() {
    let mut scene = Scene::new();
    let mut peer = scene.peer();
    let name = Name::new(b"vol1").expect("a name");
    let flags = OpenFlags::default();
    let mut open = Open { access: AccessMode::ReadWrite, flags, dev_name: name }.encode();
    for at in [2, 3, 5, 261, 262, 263].into_iter().chain(6 + 5..261) {
        open[at] = 0xa5;
    }
    assert_eq!(peer.open_raw(&open).expect("an open with garbage").device_id, 0);
    let mut info = SessInfo { ver: 2 }.encode();
    info[2..4].fill(0xa5);
    info[5..].fill(0xa5);
    let message = read_message(SessInfo::LEN, Some(peer.result_desc(SessInfo::LEN)), false);
    peer.request((0, 1), Data::Room(SessInfo::LEN), &info, &message);
    assert_eq!(peer.answer().errno, 0);
    assert_eq!(peer.result(SessInfo::LEN)[..5], [1, 0, 0, 0, 2]);
    assert_eq!(peer.result(SessInfo::LEN)[5..], [0; 31], "the garbage is not sent back");
    // IO headers of version 2, of version 2 from a peer whose struct has no padding, and of version
    // 1.
    for (len, byte) in [(32, 1), (28, 2), (24, 3)] {
        let dirty = |rw| {
            let mut header = io(rw, 0, 512).encode();
            header[2..4].fill(0xa5);
            header[26..].fill(0xa5);
            header[..usize::from(len)].to_vec()
        };
        let write = WriteMsg { usr_len: len }.encode();
        peer.request((1, 3), Data::Bytes(&[byte; 512]), &dirty(Rw::WRITE), &write);
        assert_eq!(peer.answer().errno, 0, "write with {len} bytes");
        let read = read_message(usize::from(len), Some(peer.result_desc(512)), false);
        peer.request((1, 4), Data::Room(512), &dirty(Rw::READ), &read);
        assert_eq!(peer.answer().errno, 0, "read with {len} bytes");
        assert_eq!(peer.result(512), [byte; 512]);
    }
    // A flush has no position, and unknown flags have no effect.
    let flush = IoHeader { sector: u64::MAX, ..io(Rw(0x302), 0, 0) }.encode();
    peer.request((1, 5), Data::None, &flush, &read_message(IoHeader::LEN, None, false));
    assert_eq!(peer.answer().errno, 0, "flush at sector -1");
    peer.send_write((1, 5), io(Rw(0xf001), 0, 512), &[4; 512]);
    assert_eq!(peer.answer().errno, 0, "unknown flags");
    peer.check_alive("garbage");
    drop(peer);
    scene.end();
}

#[test]
fn io_beyond_the_device() {
    let mut scene = Scene::new();
    let mut peer = scene.peer();
    // Before OPEN, and on devices that are not open.
    for device_id in [0, 1, 4, 5, 255, u32::MAX] {
        let header = IoHeader { device_id, ..io(Rw::READ, 0, 512) };
        peer.send_read((1, 3), header);
        assert_eq!(peer.answer().errno, errno::ENOTCONN, "read of device {device_id}");
        peer.send_write((1, 3), IoHeader { rw: Rw::WRITE, ..header }, &[1; 512]);
        assert_eq!(peer.answer().errno, errno::ENOTCONN, "write to device {device_id}");
    }
    let device = |peer: &mut Peer, name, access| {
        peer.open(name, access).unwrap_or_else(|errno| panic!("open {name}: {errno}")).device_id
    };
    let plain = device(&mut peer, "vol1", AccessMode::ReadWrite);
    let blocks = device(&mut peer, "vol2", AccessMode::ReadWrite);
    let shared = device(&mut peer, "ro", AccessMode::ReadOnly);
    let (inval, perm) = (errno::EINVAL, errno::EPERM);
    let sectors = MIB / 512;
    // Past the end, across the end, beyond 64 bits; not aligned to sectors or to blocks.
    for (device_id, sector, len) in [
        (plain, sectors, 512),
        (plain, sectors - 1, 1024),
        (plain, u64::MAX, 512),
        (plain, u64::MAX / 512, 1024),
        (plain, 1 << 55, 512),
        (plain, 0, 513),
        (plain, 0, 1),
        (blocks, 1, 4096),
        (blocks, 0, 512),
        (blocks, 8, 4608),
        (blocks, sectors - 1, 4096),
    ] {
        let what = format!("{len} bytes at sector {sector} of device {device_id}");
        let header = IoHeader { device_id, ..io(Rw::READ, sector, len) };
        peer.send_read((1, 3), header);
        assert_eq!(peer.answer().errno, inval, "read of {what}");
        let allowed = [inval, errno::ENOSPC];
        peer.send_write((1, 3), IoHeader { rw: Rw::WRITE, ..header }, &vec![1; len as usize]);
        let got = peer.answer().errno;
        assert!(allowed.contains(&got), "write of {what}: {got}");
        for rw in [Rw::DISCARD, Rw::WRITE_ZEROES] {
            peer.send_write((1, 3), IoHeader { rw, ..header }, &[]);
            let got = peer.answer().errno;
            assert!(allowed.contains(&got), "{rw:?} of {what}: {got}");
        }
    }
    // Writes to a read-only export, and to one opened read-only.
    let again = device(&mut peer, "vol1", AccessMode::ReadOnly);
    assert_eq!(again, plain, "the session has the export open already");
    for device_id in [shared, plain] {
        for rw in [Rw::WRITE, Rw::WRITE.fua(true), Rw::DISCARD, Rw::WRITE_ZEROES] {
            let bytes =
                if rw.op() == Ok(rtrs_core::wire::RwOp::Write) { &[1; 512][..] } else { &[] };
            peer.send_write((1, 3), IoHeader { device_id, ..io(rw, 0, 512) }, bytes);
            assert_eq!(peer.answer().errno, perm, "{rw:?} on device {device_id}");
        }
        peer.send_read((1, 3), IoHeader { device_id, ..io(Rw::READ, 0, 512) });
        assert_eq!(peer.answer().errno, 0);
        assert_eq!(peer.result(512), [0; 512], "something was written after all");
    }
    // After CLOSE.
    assert_eq!(peer.close(blocks), 0);
    peer.send_read((1, 3), IoHeader { device_id: blocks, ..io(Rw::READ, 0, 4096) });
    assert_eq!(peer.answer().errno, errno::ENOTCONN);
    peer.check_alive("IO beyond the device");
    drop(peer);
    scene.end();
}

#[test]
fn opens_that_are_refused() {
    let mut scene = Scene::new();
    let mut peer = scene.peer();
    let good = Open {
        access: AccessMode::ReadOnly,
        flags: OpenFlags::default(),
        dev_name: Name::new(b"vol1").expect("a name"),
    }
    .encode();
    let mut endless = good;
    endless[6..261].fill(b'v');
    assert_eq!(peer.open_raw(&endless), Err(errno::EINVAL), "an unterminated name");
    for access in [3, 255] {
        let mut wrong = good;
        wrong[4] = access;
        assert_eq!(peer.open_raw(&wrong), Err(errno::EINVAL), "access {access}");
    }
    for (name, error) in [
        ("", errno::EINVAL),
        ("..", errno::EINVAL),
        ("../vol1", errno::EINVAL),
        ("nothing", errno::ENOENT),
        ("VOL1", errno::ENOENT),
        ("vol1 ", errno::ENOENT),
        ("/etc/passwd", errno::ENOENT),
        ("mem:1M", errno::ENOENT),
    ] {
        assert_eq!(peer.open(name, AccessMode::ReadOnly), Err(error), "{name:?}");
    }
    for access in [AccessMode::ReadWrite, AccessMode::Migration] {
        assert_eq!(peer.open("ro", access), Err(errno::EACCES), "{access:?}");
    }
    // The innocent session has vol0 open.
    assert_eq!(peer.open("vol0", AccessMode::ReadWrite), Err(errno::EPERM));
    assert!(peer.open("vol0", AccessMode::ReadOnly).is_ok());
    // No room for the answer, or no descriptor for it.
    for len in [0, 55] {
        let message = read_message(Open::LEN, Some(peer.result_desc(len)), false);
        peer.request((0, 4), Data::Room(len), &good, &message);
        assert_eq!(peer.answer().errno, errno::EINVAL, "{len} bytes of room");
    }
    let message = WriteMsg { usr_len: 264 }.encode();
    peer.request((0, 4), Data::None, &good, &message);
    assert_eq!(peer.answer().errno, errno::EINVAL, "as a WRITE");
    // Repeated opens return the same device; closing an unknown device is allowed.
    for _ in 0..1000 {
        let device = peer.open("vol1", AccessMode::ReadWrite).map(|rsp: OpenRsp| rsp.device_id);
        assert_eq!(device, Ok(1));
    }
    let mut second = scene.peer();
    assert_eq!(second.open("vol1", AccessMode::ReadWrite), Err(errno::EPERM));
    assert!(second.open("vol1", AccessMode::Migration).is_ok());
    let mut third = scene.peer();
    assert_eq!(third.open("vol1", AccessMode::Migration), Err(errno::EPERM));
    for device in [2, 99, u32::MAX] {
        assert_eq!(second.close(device), 0, "close of device {device}");
    }
    for peer in [&mut peer, &mut second, &mut third] {
        peer.check_alive("refused opens");
    }
    drop((peer, second, third));
    scene.end();
}

#[test]
fn permits_reused_before_their_answer() {
    let late = "late=mem:1M,delay=6s";
    let mut scene = Scene::with(&["--always-invalidate", "off", "--export", late]);
    for second in [1, 2] {
        let mut peer = {
            let options = PeerOptions { cid_num: 3, ..scene.options() };
            Peer::up(scene.server, options, &format!("peer{}", options.session))
        };
        wait_for("the export to be free", PATIENCE, || {
            peer.open("late", AccessMode::ReadWrite).ok()
        });
        peer.send_write((1, 6), io(Rw::WRITE, 0, 512), &[1; 512]);
        // Over another connection, the second request must not overtake the first.
        peer.check_alive("a request in progress");
        peer.send_write((second, 6), io(Rw::WRITE, 8, 512), &[2; 512]);
        let _ = peer.ended("a permit used twice", at_once());
    }
    // No data from the second request was written.
    let mut peer = scene.peer();
    peer.open("late", AccessMode::ReadOnly).expect("open late");
    peer.send_read((1, 3), io(Rw::READ, 8, 512));
    assert_eq!(peer.answer().errno, 0);
    assert_eq!(peer.result(512), [0; 512]);
    drop(peer);
    scene.end();
}
