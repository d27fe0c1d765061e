//! Byte-for-byte checks of requests in the chunk against docs/PROTOCOL.md.

use rtrs_core::block::{IoFlags, IoOp};

use super::fixture::{Fixture, SEC, TestIo};
use super::server::{BLANK, Request};

const FUA: IoFlags = IoFlags { fua: true, no_unmap: false, fast_only: false, partial: false };
const KEEP: IoFlags = IoFlags { fua: false, no_unmap: true, fast_only: false, partial: false };

/// IO header of RNBD for device 0 with priority 0.
fn header(sector: u64, rw: u32, size: u32) -> Vec<u8> {
    let mut bytes = vec![4, 0, 0, 0, 0, 0, 0, 0];
    bytes.extend(sector.to_le_bytes());
    bytes.extend(rw.to_le_bytes());
    bytes.extend(size.to_le_bytes());
    bytes.extend([0; 8]);
    bytes
}

fn one(io: TestIo) -> Request {
    let mut fixture = Fixture::open(|s| {
        s.how.queue_depth = 5;
        s.how.keep_chunks = true;
    });
    fixture.client.buffer(1, 0, 1 << 20).fill(0x5a);
    fixture.submit_io(1, io);
    fixture.drain(SEC);
    let found: Vec<_> = fixture.server.ios().cloned().collect();
    let [request] = <[Request; 1]>::try_from(found).expect("one request");
    assert_eq!((request.cid.0, request.permit.0), (2, 3), "shard 1: connection 2, permits 3 and 4");
    request
}

/// Immediate for a depth of 5: 3 bits of permit and 25 bits of offset.
fn imm(offset: u32) -> u32 {
    3 << 25 | offset
}

/// Checks that only `from..to` was written.
fn written(request: &Request, from: usize, to: usize) {
    let blank = |part: &[u8]| part.iter().all(|&b| b == BLANK);
    assert!(blank(&request.chunk[..from]) && blank(&request.chunk[to..]));
}

#[test]
fn a_read() {
    let read = one(TestIo::new(IoOp::Read, 0x800 * 512, 4096));
    assert_eq!(read.imm, imm(4096 + 32));
    let mut expected = header(0x800, 0x100, 4096);
    expected.extend([3, 0, 32, 0, 0, 0, 1, 0]);
    assert_eq!(read.tail[..40], expected);
    assert_eq!((read.tail.len(), &read.tail[52..]), (56, &[0, 16, 0, 0][..]), "one descriptor");
    written(&read, 4096, 4096 + 56);
}

#[test]
fn a_write() {
    let write = one(TestIo::new(IoOp::Write, 0x800 * 512, 4096));
    assert_eq!(write.imm, imm(4096 + 32));
    let mut expected = header(0x800, 1, 4096);
    expected.extend([2, 0, 32, 0]);
    assert_eq!(write.tail, expected);
    assert!(write.chunk[..4096].iter().all(|&b| b == 0x5a));
    written(&write, 0, 4096 + 36);
    assert_eq!(write.chunk[..4096], [0x5a; 4096]);

    let write = one(TestIo::new(IoOp::Write, 512, 512).flags(FUA));
    let mut expected = header(1, 0x301, 512);
    expected.extend([2, 0, 32, 0]);
    assert_eq!((write.imm, write.tail), (imm(512 + 32), expected));
}

#[test]
fn a_flush_is_a_read_without_descriptor() {
    let flush = one(TestIo::new(IoOp::Flush, 0, 0));
    let mut expected = header(u64::MAX, 0x302, 0);
    expected.extend([3, 0, 32, 0, 0, 0, 0, 0]);
    assert_eq!((flush.imm, &flush.tail), (imm(32), &expected));
    written(&flush, 0, 40);
}

#[test]
fn discard_and_write_zeroes_carry_no_data() {
    let discard = one(TestIo::new(IoOp::Discard, 1 << 20, 65536));
    let mut expected = header(0x800, 3, 65536);
    expected.extend([2, 0, 32, 0]);
    assert_eq!((discard.imm, &discard.tail), (imm(32), &expected));
    written(&discard, 0, 36);

    for (flags, rw) in [(IoFlags::default(), 5), (FUA, 0x205), (KEEP, 0x805)] {
        // Larger than a chunk, and still a single request.
        let zeroes = one(TestIo::new(IoOp::WriteZeroes, 0, 1 << 20).flags(flags));
        let mut expected = header(0, rw, 1 << 20);
        expected.extend([2, 0, 32, 0]);
        assert_eq!((zeroes.imm, &zeroes.tail), (imm(32), &expected));
        written(&zeroes, 0, 36);
    }
}

#[test]
fn control_requests() {
    let mut fixture = Fixture::open(|s| {
        s.how.queue_depth = 5;
        s.how.keep_chunks = true;
    });
    fixture.detach();
    fixture.until("the end", SEC, |s| s.client.control.view().is_done());
    let requests: Vec<_> = fixture.server.requests().cloned().collect();
    let [info, open, close] = <[Request; 3]>::try_from(requests).expect("three requests");
    assert!([&info, &open, &close].iter().all(|r| r.cid.0 == 0 && r.permit.0 == 0));

    let mut expected = vec![0, 0, 0, 0, 2];
    expected.resize(36, 0);
    expected.extend([3, 0, 36, 0, 0, 0, 1, 0]);
    assert_eq!((info.imm, &info.tail[..44]), (72, &expected[..]));
    assert_eq!((info.tail.len(), &info.tail[56..]), (60, &[36, 0, 0, 0][..]));
    written(&info, 36, 96);

    let mut expected = vec![2, 0, 0, 0, 1, 0];
    expected.extend(b"vol0");
    expected.resize(264, 0);
    expected.extend([3, 0, 8, 1, 0, 0, 1, 0]);
    assert_eq!((open.imm, &open.tail[..272]), (320, &expected[..]));
    assert_eq!((open.tail.len(), &open.tail[284..]), (288, &[56, 0, 0, 0][..]));

    assert_eq!((close.imm, &close.tail[..]), (8, &[5, 0, 0, 0, 0, 0, 0, 0, 2, 0, 8, 0][..]));
}
