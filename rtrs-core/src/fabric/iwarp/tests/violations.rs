//! Every protocol violation by a peer ends the stream with the Terminate that the RFCs require.

use proptest::prelude::*;

use super::golden::frame;
use super::{End, hex, terms};
use crate::fabric::iwarp::ddp::{self, Untagged};
use crate::fabric::iwarp::rdmap::{ReadRequest, opcode};
use crate::fabric::{Access, CloseReason, RemoteMem, SgeList, WcStatus, WorkRequest, WrOp};
use crate::ids::Rkey;
use crate::mem::{Counting, MemoryMeter, Region};

fn end() -> End {
    let mut end = End::new(terms(false), Access::REMOTE_WRITE);
    end.machine.sender.permit();
    end
}

const fn fields(qn: u32, msn: u32, mo: u32) -> Untagged {
    Untagged { invalidate: 0, qn, msn, mo }
}

fn untagged(kind: u8, last: bool, fields: Untagged, payload: &[u8]) -> Vec<u8> {
    frame(&ddp::untagged(kind, last, fields, payload.len()), payload)
}

fn write(stag: u32, addr: u64, payload: &[u8]) -> Vec<u8> {
    frame(&ddp::tagged(opcode::WRITE, true, stag, addr, payload.len()), payload)
}

/// Feeds bytes; returns layer, type, code and header bits of the Terminate.
fn verdict(end: &mut End, bytes: &[u8]) -> (u8, u8, u8) {
    end.input(bytes);
    let reason = end.machine.failure.as_ref().map(|f| f.reason.clone());
    assert!(matches!(reason, Some(CloseReason::Protocol(_))), "{reason:?}");
    let out = end.output();
    assert_eq!(out[2..4], [0x41, 0x47], "a terminate comes last and alone");
    assert!(!end.machine.has_output());
    let crc = out.len() - 4;
    assert_eq!(out[crc..], crc32c::crc32c(&out[..crc]).to_le_bytes());
    (out[20], out[21], out[22])
}

const MSG1: Untagged = fields(0, 1, 0);

#[test]
fn writes_are_validated() {
    let mut e = end();
    let (stag, base) = (e.stag, e.base);
    let len = e.region.len() as u64;
    assert_eq!(verdict(&mut e, &write(stag ^ 1, base, b"abcd")), (0x11, 0x00, 0xc0));
    assert_eq!(verdict(&mut end_of(stag, base), &write(1, base, b"abcd")), (0x11, 0, 0xc0));
    let mut e = end();
    let beyond = write(e.stag, e.base + len - 3, b"abcd");
    assert_eq!(verdict(&mut e, &beyond), (0x11, 0x01, 0xc0));
    let mut e = end();
    let wrap = write(e.stag, u64::MAX - 1, b"abcd");
    assert_eq!(verdict(&mut e, &wrap), (0x11, 0x03, 0xc0));
    let mut e = end();
    e.machine.pd = 99;
    let foreign = write(e.stag, e.base, b"abcd");
    assert_eq!(verdict(&mut e, &foreign), (0x11, 0x02, 0xc0));
    let mut e = End::new(terms(false), Access::LOCAL);
    let denied = write(e.stag, e.base, b"abcd");
    assert_eq!(verdict(&mut e, &denied), (0x01, 0x02, 0xc0));
    let mut e = end();
    let large = write(e.stag, e.base + len - 20_000, &[0; 30_000]);
    assert_eq!(verdict(&mut e, &large[..100]), (0x11, 0x01, 0xc0), "before the payload arrived");
    let mut e = end();
    e.input(&write(0x77, 3, b""));
    assert!(e.machine.failure.is_none(), "an empty write needs no STag");
}

/// A region may be opened to its peer step by step; small and large frames must respect that.
#[test]
fn writes_beyond_the_current_grant_are_refused() {
    let stride = 260 << 10;
    for len in [4, 30_000] {
        let meter = MemoryMeter::new(1 << 30);
        let mut e = end();
        e.region = Region::metered(8 * stride, stride, &meter, Counting::Written).unwrap();
        e.region.limit_writes(2);
        (e.stag, e.base) =
            e.core.stags.register(super::PD, &e.region, Access::REMOTE_WRITE).unwrap();
        let to = |chunk: u64| e.base + chunk * stride as u64;
        let (stag, bytes) = (e.stag, vec![7; len]);
        let [first, second, third] = [5, 0, 1].map(|chunk| write(stag, to(chunk), &bytes));
        e.input(&[&first[..], &second, &first].concat());
        assert!(e.machine.failure.is_none(), "{:?}", e.machine.failure);
        assert_eq!(meter.used(), 2 * stride as u64);
        assert_eq!(verdict(&mut e, &third[..third.len().min(100)]), (0x01, 0x02, 0xc0));
        let reason = e.machine.failure.as_ref().unwrap().reason.to_string();
        assert!(reason.contains("before OPEN"), "{reason}");
        assert_eq!((e.bytes(stride, 4), meter.used()), (vec![0; 4], 2 * stride as u64));
    }
}

fn end_of(_stag: u32, _base: u64) -> End {
    end()
}

#[test]
fn messages_are_validated() {
    let prefix = [0; 8];
    let cases: [(Vec<u8>, (u8, u8, u8)); 16] = [
        (untagged(opcode::SEND, true, MSG1, &prefix), (0x12, 0x02, 0xc0)),
        (untagged(opcode::IMMEDIATE, true, MSG1, &prefix), (0x12, 0x02, 0xc0)),
        (untagged(opcode::SEND, true, fields(0, 2, 0), &prefix), (0x12, 0x03, 0xc0)),
        (untagged(opcode::SEND, true, fields(0, 0, 0), &prefix), (0x12, 0x03, 0xc0)),
        (untagged(opcode::SEND, true, fields(0, 1, 4), &prefix), (0x12, 0x04, 0xc0)),
        (untagged(opcode::SEND, true, fields(1, 1, 0), &prefix), (0x12, 0x01, 0xc0)),
        (untagged(opcode::SEND, true, fields(9, 1, 0), &prefix), (0x12, 0x01, 0xc0)),
        (untagged(opcode::READ_REQUEST, true, fields(0, 1, 0), &[0; 28]), (0x12, 0x01, 0xc0)),
        (untagged(opcode::READ_REQUEST, true, fields(1, 1, 0), &[0; 27]), (0x02, 0xff, 0)),
        (untagged(opcode::IMMEDIATE, true, MSG1, &[0; 7]), (0x02, 0xff, 0)),
        (untagged(opcode::IMMEDIATE, true, MSG1, &[1; 8]), (0x02, 0xff, 0)),
        (untagged(opcode::IMMEDIATE, false, MSG1, &[0; 8]), (0x02, 0xff, 0)),
        (untagged(10, true, fields(1, 1, 0), &[0; 8]), (0x02, 0x06, 0)),
        (untagged(15, true, MSG1, &[0; 8]), (0x02, 0x06, 0)),
        (untagged(opcode::WRITE, true, MSG1, &[0; 8]), (0x02, 0x06, 0)),
        (frame(&ddp::tagged(opcode::SEND, true, 1, 0, 0), &[]), (0x02, 0x06, 0)),
    ];
    for (i, (bytes, wanted)) in cases.iter().enumerate() {
        assert_eq!(verdict(&mut end(), bytes), *wanted, "case {i}");
    }
    let mut plain = end();
    plain.machine.terms.as_mut().unwrap().features.immediate = false;
    let immediate = untagged(opcode::IMMEDIATE, true, MSG1, &prefix);
    assert_eq!(verdict(&mut plain, &immediate), (0x02, 0x06, 0));
}

#[test]
fn sends_are_validated() {
    let with_recv = |len| {
        let mut e = end();
        let buf = Some(e.sge(0, len));
        e.machine.post_recv(&e.core, 5, buf).unwrap();
        e
    };
    let mut e = with_recv(16);
    let long = untagged(opcode::SEND, true, MSG1, &[0; 25]);
    assert_eq!(verdict(&mut e, &long), (0x12, 0x05, 0xc0));
    assert_eq!(e.completions()[0].status, WcStatus::LocalError);
    let mut e = with_recv(16);
    e.input(&untagged(opcode::SEND, false, MSG1, &[0; 12]));
    assert!(e.machine.failure.is_none());
    let gap = untagged(opcode::SEND, true, fields(0, 1, 13), &[0; 4]);
    assert_eq!(verdict(&mut e, &gap), (0x12, 0x04, 0xc0));
    let mut e = with_recv(16);
    e.input(&untagged(opcode::SEND, false, MSG1, &[0; 12]));
    let kind = untagged(opcode::SEND_INV, true, fields(0, 1, 12), &[0; 4]);
    assert_eq!(verdict(&mut e, &kind), (0x02, 0x06, 0));
    let mut e = with_recv(16);
    e.input(&untagged(opcode::SEND, false, MSG1, &[0; 12]));
    let between = untagged(opcode::IMMEDIATE, true, MSG1, &[0; 8]);
    assert_eq!(verdict(&mut e, &between), (0x12, 0x04, 0xc0));
    let short = untagged(opcode::SEND, true, MSG1, &[0; 7]);
    assert_eq!(verdict(&mut with_recv(16), &short), (0x02, 0xff, 0));
    let flags = untagged(opcode::SEND, true, MSG1, &[2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(verdict(&mut with_recv(16), &flags), (0x02, 0xff, 0));
    let mut e = with_recv(16);
    let fields = Untagged { invalidate: e.stag, qn: 0, msn: 1, mo: 0 };
    let inv = frame(&ddp::untagged(opcode::SEND_INV, true, fields, 8), &[0; 8]);
    assert_eq!(verdict(&mut e, &inv), (0x01, 0x09, 0));
}

#[test]
fn frames_are_validated() {
    let good = untagged(opcode::SEND, true, MSG1, &[0; 8]);
    for flip in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[flip / 8] ^= 1 << (flip % 8);
        if flip / 8 < 2 {
            continue; // a different length: the frame is incomplete, or too short
        }
        let mut e = end();
        e.machine.post_recv(&e.core, 1, None).unwrap();
        assert_eq!(verdict(&mut e, &bytes), (0x20, 0x02, 0), "bit {flip}");
        assert_eq!(e.core.counters.crc_errors, 1);
        assert!(e.completions().is_empty());
    }
    for len in 0..14u8 {
        let mut bytes = vec![0, len];
        bytes.resize(64, 0x41);
        assert_eq!(verdict(&mut end(), &bytes), (0x02, 0xff, 0));
    }
    let mut short = vec![0, 15, 0x41, 0x43];
    short.resize(17, 0);
    let short = frame(&short, &[]);
    assert_eq!(verdict(&mut end(), &short), (0x02, 0xff, 0), "untagged, yet 15 bytes");
    let version = |byte: usize, bits: u8, mut bytes: Vec<u8>| {
        bytes[byte] ^= bits;
        bytes.truncate(bytes.len() - 4);
        let sum = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    };
    assert_eq!(verdict(&mut end(), &version(2, 2, good.clone())), (0x12, 0x06, 0));
    assert_eq!(verdict(&mut end(), &version(3, 0x80, good)), (0x02, 0x05, 0));
    let tagged = write(1, 0, b"abcd");
    assert_eq!(verdict(&mut end(), &version(2, 2, tagged)), (0x11, 0x04, 0));
}

#[test]
fn a_corrupt_direct_frame_is_detected() {
    let mut e = end();
    let payload = vec![7u8; 40_000];
    let mut bytes = write(e.stag, e.base, &payload);
    bytes[30_000] ^= 4;
    e.input(&bytes[..1000]);
    assert_eq!(verdict(&mut e, &bytes[1000..]), (0x20, 0x02, 0));
    assert!(e.core.counters.bytes_direct > 30_000);
}

#[test]
fn reads_are_validated() {
    let ask = |e: &End, stag, addr, size| {
        let request =
            ReadRequest { sink_stag: 1, sink_addr: 0, size, source_stag: stag, source_addr: addr };
        let _ = e;
        untagged(opcode::READ_REQUEST, true, fields(1, 1, 0), &request.encode())
    };
    let readable = || {
        let mut e = End::new(terms(false), Access::REMOTE_READ);
        e.machine.sender.permit();
        e
    };
    let mut e = readable();
    let bytes = ask(&e, e.stag ^ 1, e.base, 4);
    assert_eq!(verdict(&mut e, &bytes), (0x01, 0x00, 0xe0));
    let mut e = readable();
    let bytes = ask(&e, e.stag, e.base + 4, e.region.len() as u32);
    assert_eq!(verdict(&mut e, &bytes), (0x01, 0x01, 0xe0));
    let mut e = end();
    let bytes = ask(&e, e.stag, e.base, 4);
    assert_eq!(verdict(&mut e, &bytes), (0x01, 0x02, 0xe0));
    let mut e = readable();
    e.machine.pd = 9;
    let bytes = ask(&e, e.stag, e.base, 4);
    assert_eq!(verdict(&mut e, &bytes), (0x01, 0x03, 0xe0));
    let mut e = readable();
    let bytes = ask(&e, e.stag, u64::MAX, 4);
    assert_eq!(verdict(&mut e, &bytes), (0x01, 0x04, 0xe0));
    let mut e = readable();
    let mut many = Vec::new();
    for msn in 1..=17 {
        let mut one = ask(&e, e.stag, e.base, 4);
        one[12..16].copy_from_slice(&u32::to_be_bytes(msn));
        many.extend(frame(&one[..48], &[]));
    }
    e.input(&many[..16 * 52]);
    assert!(e.machine.failure.is_none());
    assert_eq!(verdict(&mut e, &many[16 * 52..]), (0x12, 0x02, 0xc0), "one over IRD");
}

#[test]
fn responses_are_validated() {
    let response = |stag, addr, last, payload: &[u8]| {
        let head = ddp::tagged(opcode::READ_RESPONSE, last, stag, addr, payload.len());
        frame(&head, payload)
    };
    let reading = || {
        let mut e = End::new(terms(true), Access::LOCAL);
        let remote = RemoteMem { addr: 1, rkey: Rkey(1) };
        let sges = SgeList::one(e.sge(8192, 100));
        let op = WrOp::RdmaRead { remote };
        let request = WorkRequest { wr_id: 3, op, sges, signaled: true };
        e.machine.post_send(&e.core, request).unwrap();
        e.output();
        e
    };
    let mut e = reading();
    let at = e.base + 8192;
    let bytes = response(e.stag, at, true, &[1; 100]);
    e.input(&bytes);
    assert_eq!(e.completions()[0].byte_len, 100);
    assert_eq!(verdict(&mut e, &bytes), (0x02, 0x06, 0), "a second answer");
    type Make = fn(u32, u64) -> (u32, u64, bool, usize);
    let wrong: [(Make, (u8, u8, u8)); 5] = [
        (|s, a| (s ^ 1, a, true, 100), (0x11, 0x00, 0xc0)),
        (|s, a| (s, a + 4, true, 100), (0x11, 0x01, 0xc0)),
        (|s, a| (s, a, true, 96), (0x11, 0x01, 0xc0)),
        (|s, a| (s, a, false, 100), (0x11, 0x01, 0xc0)),
        (|s, a| (s, a, true, 101), (0x11, 0x01, 0xc0)),
    ];
    for (make, wanted) in wrong {
        let mut e = reading();
        let (stag, addr, last, len) = make(e.stag, e.base + 8192);
        let bytes = response(stag, addr, last, &vec![1; len]);
        assert_eq!(verdict(&mut e, &bytes), wanted);
    }
}

#[test]
fn a_terminate_from_the_peer_ends_the_stream() {
    let mut e = end();
    e.input(&hex(
        "00 16 | 41 47 | 00 00 00 00 | 00 00 00 02 | 00 00 00 01 | 00 00 00 00 | 20 02 00 00 |
         7f e4 25 85",
    ));
    let failure = e.machine.failure.as_ref().unwrap();
    assert!(matches!(&failure.reason, CloseReason::PeerTerminated(t) if t.contains("CRC")));
    assert!(e.output().is_empty(), "no answer to a terminate");
    let mut e = end();
    let remote = RemoteMem { addr: 1, rkey: Rkey(1) };
    for id in 0..2 {
        let op = WrOp::RdmaRead { remote };
        let sges = SgeList::one(e.sge(0, 4));
        let request = WorkRequest { wr_id: id, op, sges, signaled: false };
        e.machine.post_send(&e.core, request).unwrap();
    }
    e.output();
    e.input(&untagged(opcode::TERMINATE, true, fields(2, 1, 0), &[0x01, 0x02, 0, 0]));
    e.machine.flush_all(&mut e.core);
    let done = e.completions();
    assert_eq!(done[0].status, WcStatus::RemoteAccess);
    assert_eq!(done[1].status, WcStatus::Flushed);
}

#[test]
fn a_clean_end_differs_from_a_truncated_stream() {
    let mut e = end();
    e.machine.rx_prepare(&mut e.rx);
    e.machine.rx_done(&mut e.core, 0);
    assert_eq!(e.machine.failure.as_ref().unwrap().reason, CloseReason::Peer);
    for cut in [1, 5, 30, 20_000] {
        let mut e = end();
        let bytes = write(e.stag, e.base, &[1; 30_000]);
        e.input(&bytes[..cut]);
        e.machine.rx_done(&mut e.core, 0);
        assert!(matches!(e.machine.failure.as_ref().unwrap().reason, CloseReason::Lost(_)));
    }
}

#[test]
fn a_revoke_waits_for_a_write_in_progress() {
    let mut e = end();
    let index = e.core.stags.make_window(super::PD, e.stag).unwrap();
    let key = Rkey(e.core.stags.last_stag(index));
    let part = e.region.slice(0, 40_000).unwrap();
    let key = e.core.stags.bind(super::PD, key, &part, Access::REMOTE_WRITE).unwrap();
    let bytes = write(key.0, e.base, &[3; 40_000]);
    e.input(&bytes[..100]);
    assert!(e.core.stags.revoke(super::PD, key).is_err());
    e.input(&bytes[100..]);
    assert!(e.machine.failure.is_none(), "a write in progress may finish");
    assert!(e.core.stags.revoke(super::PD, key).is_ok());
    let mut two = end();
    let bytes = write(two.stag, two.base, &[3; 40_000]);
    two.input(&bytes[..100]);
    two.machine.end(CloseReason::Local, None);
    let held = two.core.stags.acquire(super::PD, two.stag, two.base, 1, 0).unwrap();
    two.core.stags.release(held);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
        let mut e = end();
        e.input(&bytes);
        e.output();
        e.machine.flush_all(&mut e.core);
    }

    #[test]
    fn random_headers_never_panic(
        frames in proptest::collection::vec(
            (0u8..2, 0u8..2, 0u8..16, 0u32..4, 0u32..4, 0u32..40,
             proptest::collection::vec(any::<u8>(), 0..80)), 1..20),
        cut in 1usize..200,
    ) {
        let mut e = end();
        for id in 0..3 {
            let buf = Some(e.sge(id * 64, 64));
            e.machine.post_recv(&e.core, id as u64, buf).unwrap();
        }
        let mut stream = Vec::new();
        for (tagged, last, op, qn, msn, mo, payload) in frames {
            let last = last == 1;
            stream.extend(if tagged == 1 {
                let addr = e.base + u64::from(mo);
                frame(&ddp::tagged(op, last, e.stag, addr, payload.len()), &payload)
            } else {
                untagged(op, last, fields(qn, msn, mo), &payload)
            });
        }
        for piece in stream.chunks(cut) {
            e.input(piece);
            e.output();
        }
        e.machine.flush_all(&mut e.core);
    }
}
