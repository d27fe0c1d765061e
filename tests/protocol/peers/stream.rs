//! Tests of frames after the start-up: violations of MPA, DDP or RDMAP end the connection, with a
//! Terminate and its reason where the RFCs define one. Also frames that arrive early, and a peer
//! that sends requests endlessly and never reads the answers.

use rtrs_tests::raw_mpa::{
    CRC, ENHANCED, REQUEST_KEY, SEND, WRITE, frame, immediate, send, start_data, start_frame,
    tagged, untagged,
};
use rtrs_tests::{PeerOptions, RawMpa, resident_memory};

use super::*;

/// Returns a raw path of one connection that is up, and the message number of its next send or
/// immediate.
fn raw_path(scene: &mut Scene) -> (RawMpa, u32) {
    let mut options = scene.options();
    options.cid_num = 1;
    let mut raw = RawMpa::start(scene.server, &options.request(0).encode());
    let name = format!("raw{}", options.session);
    raw.write(&frame(&send(1, &info_req(name.as_bytes()))));
    let rsp = raw.read_frame();
    assert_eq!(rsp[..2], SEND, "INFO_RSP: {rsp:02x?}");
    assert_eq!(rsp.len(), 18 + 8 + 8 + 16 * usize::from(DEPTH));
    (raw, 2)
}

#[test]
fn frames_that_violate_the_stream() {
    type Frames = Box<dyn Fn(u32) -> Vec<u8>>;
    let mut scene = Scene::new();
    let damaged = |ulpdu: &[u8], at: usize| {
        let mut bytes = frame(ulpdu);
        let at = at.min(bytes.len() - 1);
        bytes[at] ^= 0x10;
        bytes
    };
    let just = |ulpdu: Vec<u8>| -> Frames { Box::new(move |_| frame(&ulpdu)) };
    // Terminates as RFC 5040 and 5041 number them: layer and type, code. 0x2002: MPA's checksum.
    let cases: Vec<(&str, Frames, Option<[u8; 2]>)> = vec![
        (
            "a flipped bit in the payload",
            Box::new(move |msn| damaged(&immediate(msn, 0x8000_0000), 24)),
            Some([0x20, 0x02]),
        ),
        (
            "a flipped bit in the checksum",
            Box::new(move |msn| damaged(&immediate(msn, 0x8000_0000), usize::MAX)),
            Some([0x20, 0x02]),
        ),
        ("a frame of length 0", Box::new(|_| vec![0; 8]), None),
        ("a frame of length 13", just(vec![0xc1; 13]), None),
        (
            "a write of 65535 bytes with no key",
            Box::new(|_| [&[0xff, 0xff][..], &tagged(WRITE, 0x0102_0304, 0, &[1; 256])].concat()),
            Some([0x11, 0x00]),
        ),
        (
            "a send of 65535 bytes",
            Box::new(|msn| frame(&untagged(SEND, [0, msn, 0], &vec![0; 65535 - 18]))),
            Some([0x12, 0x05]),
        ),
        ("a write to key 0", just(tagged(WRITE, 0, 0, &[1; 64])), Some([0x11, 0x00])),
        ("an unknown tagged opcode", just(tagged([0xc1, 0x4f], 1, 0, &[])), Some([0x02, 0x06])),
        (
            "an unknown untagged opcode",
            Box::new(|msn| frame(&untagged([0x41, 0x4e], [0, msn, 0], &[]))),
            Some([0x02, 0x06]),
        ),
        ("a wrong DDP version", just(tagged([0xc2, 0x40], 1, 0, &[])), Some([0x11, 0x04])),
        ("a wrong RDMAP version", just(tagged([0xc1, 0x80], 1, 0, &[])), Some([0x02, 0x05])),
        ("queue 3", just(untagged(SEND, [3, 1, 0], &[0; 8])), Some([0x12, 0x01])),
        ("queue 2^32 - 1", just(untagged(SEND, [u32::MAX, 1, 0], &[0; 8])), Some([0x12, 0x01])),
        ("a past message number", Box::new(|msn| frame(&send(msn - 1, &[]))), Some([0x12, 0x03])),
        (
            "a future message number",
            Box::new(|msn| frame(&immediate(msn + 1, 0x8000_0000))),
            Some([0x12, 0x03]),
        ),
        (
            "a message with a gap",
            Box::new(|msn| frame(&untagged(SEND, [0, msn, 8], &[0; 8]))),
            Some([0x12, 0x04]),
        ),
        (
            "an immediate of 33 bits",
            Box::new(|msn| {
                frame(&untagged([0x41, 0x48], [0, msn, 0], &[0x80, 0, 0, 0, 0, 0, 0, 1]))
            }),
            None,
        ),
        (
            "an immediate of 4 bytes",
            Box::new(|msn| frame(&untagged([0x41, 0x48], [0, msn, 0], &[0x80, 0, 0, 0]))),
            None,
        ),
        ("a send without a prefix", Box::new(|msn| frame(&untagged(SEND, [0, msn, 0], &[]))), None),
        (
            "a prefix with unknown flags",
            Box::new(|msn| frame(&untagged(SEND, [0, msn, 0], &[0xff; 8]))),
            None,
        ),
        (
            "an invalidation of an invalid key",
            Box::new(|msn| {
                let words = [0x0bad_0bad, 0, msn, 0].map(u32::to_be_bytes).concat();
                frame(&[&[0x41, 0x44][..], &words, &[0; 8]].concat())
            }),
            None,
        ),
        (
            "a read of memory that is not ours to read",
            Box::new(|_| {
                let words = [1, 0, 0, 512, 1, 0, 0].map(u32::to_be_bytes).concat();
                frame(&untagged([0x41, 0x41], [1, 1, 0], &words))
            }),
            Some([0x01, 0x00]),
        ),
        (
            "more empty reads than agreed",
            Box::new(|_| {
                let words = [1, 0, 0, 0, 1, 0, 0].map(u32::to_be_bytes).concat();
                let read = |msn| frame(&untagged([0x41, 0x41], [1, msn, 0], &words));
                (1..=64).flat_map(read).chain(frame(&[0x41, 0x4e])).collect()
            }),
            None,
        ),
        (
            "an answer to a read that was not requested",
            just(tagged([0xc1, 0x42], 1, 0, &[1; 64])),
            None,
        ),
        ("a terminate", just(untagged([0x41, 0x47], [2, 1, 0], &[0x20, 0x02, 0, 0])), None),
        ("an empty terminate", just(untagged([0x41, 0x47], [2, 1, 0], &[])), None),
    ];
    for (what, frames, code) in &cases {
        let (mut raw, msn) = raw_path(&mut scene);
        raw.write(&frames(msn));
        let ended = raw.ended(what, AT_ONCE);
        if let Some(code) = code {
            let got = ended.terminate();
            assert_eq!(got, Some(*code), "{what}: {:02x?}, reset {}", ended.bytes, ended.reset);
        }
    }
    // Ends in the middle of a frame.
    let whole = frame(&immediate(2, 0x8000_0000));
    for len in [1, 2, 3, 20, whole.len() - 1] {
        let (mut raw, _) = raw_path(&mut scene);
        raw.write(&whole[..len]);
        raw.finish();
        let _ = raw.ended("half a frame", AT_ONCE);
    }
    scene.end();
}

#[test]
fn frames_sent_too_early() {
    let mut scene = Scene::new();
    // Garbage as the first frame, sent together with the start-up frame, before the reply.
    let request = PeerOptions { cid_num: 1, ..scene.options() }.request(0).encode();
    let mut raw = RawMpa::connect(scene.server);
    let start = start_frame(REQUEST_KEY, ENHANCED | CRC, 2, &start_data(&request));
    raw.write(&[&start[..], &[0xff; 64]].concat());
    let _ = raw.ended("garbage after the start", AT_ONCE);
    // An immediate and then a request where INFO_REQ is due.
    for imm in [0x8000_0000_u32, 0x0000_0020] {
        let request = PeerOptions { cid_num: 1, ..scene.options() }.request(0).encode();
        let mut raw = RawMpa::start(scene.server, &request);
        raw.write(&frame(&immediate(1, imm)));
        let _ = raw.ended("an early immediate", AT_ONCE);
    }
    scene.end();
}

#[test]
fn a_peer_that_sends_requests_and_never_reads() {
    let mut scene = Scene::new();
    let (mut raw, first) = raw_path(&mut scene);
    // Endless heartbeats whose answers are not read.
    let flood: Vec<u8> =
        (0..400_000).flat_map(|at| frame(&immediate(first + at, 0x8000_0000))).collect();
    raw.write(&flood);
    scene.peer().check_alive("during a flood");
    let grown = resident_memory(scene.stand.server.pid()).saturating_sub(scene.memory);
    assert!(grown < 32 * MIB, "unread answers took {grown} bytes");
    drop(raw);
    scene.end();
}
