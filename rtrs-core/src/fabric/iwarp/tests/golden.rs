//! Tests of the example bytes of docs/PROTOCOL.md, as the machine produces and accepts them.

use super::{End, PD, hex, terms};
use crate::fabric::iwarp::ddp::{self, Untagged};
use crate::fabric::iwarp::mpa::{self, Features};
use crate::fabric::iwarp::rdmap::{Blame, ReadRequest, TermCode, Terminate, opcode};
use crate::fabric::{Access, RemoteMem, SgeList, WcOp, WorkRequest, WrOp};
use crate::ids::Rkey;

/// Builds a frame with this header and payload.
pub(super) fn frame(header: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut bytes = [header, payload].concat();
    let len = bytes.len() - 2;
    bytes.resize(bytes.len() + mpa::pad_len(len), 0);
    let sum = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

const WRITE: &str = "00 12 | c1 40 | 12 34 56 00 | 00 00 00 00 10 00 20 00 | 13 37 13 37";
const VECTORS: [(&str, &str); 8] = [
    ("write", "00 12 | c1 40 | 12 34 56 00 | 00 00 00 00 10 00 20 00 | de ad be ef | ba 08 ff 2a"),
    (
        "immediate",
        "00 1a | 41 48 | 00 00 00 00 | 00 00 00 00 | 00 00 00 01 | 00 00 00 00 |
         ca fe ba be 00 00 00 00 | 50 9f 8b 69",
    ),
    (
        "send",
        "00 22 | 41 43 | 00 00 00 00 | 00 00 00 00 | 00 00 00 01 | 00 00 00 00 |
         00 00 7f 00 12 34 50 00 00 ab cd 01 00 00 00 40 | 91 5a d0 b8",
    ),
    (
        "read request",
        "00 2e | 41 41 | 00 00 00 00 | 00 00 00 01 | 00 00 00 01 | 00 00 00 00 | 00 00 05 02 |
         00 00 7f 00 99 99 00 00 | 00 00 00 40 | 00 ab cd 01 | 00 00 7f 00 12 34 50 00 |
         62 f2 ba a2",
    ),
    (
        "read response",
        "00 13 | c1 42 | 00 00 05 02 | 00 00 7f 00 99 99 00 00 | 68 65 6c 6c 6f | 00 00 00 |
         2a 11 20 54",
    ),
    (
        "send with invalidate",
        "00 12 | 41 44 | 00 ab cd 01 | 00 00 00 00 | 00 00 00 02 | 00 00 00 00 | e0 07 41 22",
    ),
    ("empty write", "00 0e | c1 40 | 00 00 00 01 | 00 00 00 00 00 00 00 00 | eb d3 4c 5f"),
    (
        "terminate",
        "00 16 | 41 47 | 00 00 00 00 | 00 00 00 02 | 00 00 00 01 | 00 00 00 00 | 20 02 00 00 |
         7f e4 25 85",
    ),
];

fn vector(name: &str) -> Vec<u8> {
    hex(VECTORS.iter().find(|(n, _)| *n == name).unwrap().1)
}

fn untagged(kind: u8, qn: u32, msn: u32, invalidate: u32, payload: &[u8]) -> Vec<u8> {
    let fields = Untagged { invalidate, qn, msn, mo: 0 };
    frame(&ddp::untagged(kind, true, fields, payload.len()), payload)
}

#[test]
fn frames_match_the_vectors() {
    let tagged = |kind, stag, addr, payload: &[u8]| {
        frame(&ddp::tagged(kind, true, stag, addr, payload.len()), payload)
    };
    let write = tagged(opcode::WRITE, 0x1234_5600, 0x1000_2000, &hex("deadbeef"));
    assert_eq!(write, vector("write"));
    let imm = untagged(opcode::IMMEDIATE, 0, 1, 0, &hex("cafebabe00000000"));
    assert_eq!(imm, vector("immediate"));
    let se = untagged(opcode::IMMEDIATE_SE, 0, 1, 0, &hex("cafebabe00000000"));
    assert_eq!(se[28..], hex("cd 54 bf 47"));
    let send = hex("00 00 7f 00 12 34 50 00 00 ab cd 01 00 00 00 40");
    assert_eq!(untagged(opcode::SEND, 0, 1, 0, &send), vector("send"));
    let request = ReadRequest {
        sink_stag: 0x502,
        sink_addr: 0x7f00_9999_0000,
        size: 64,
        source_stag: 0x00ab_cd01,
        source_addr: 0x7f00_1234_5000,
    };
    assert_eq!(ReadRequest::decode(&request.encode()), request);
    let read = untagged(opcode::READ_REQUEST, 1, 1, 0, &request.encode());
    assert_eq!(read, vector("read request"));
    let response = tagged(opcode::READ_RESPONSE, 0x502, 0x7f00_9999_0000, b"hello");
    assert_eq!(response, vector("read response"));
    let inv = untagged(opcode::SEND_INV, 0, 2, 0x00ab_cd01, &[]);
    assert_eq!(inv, vector("send with invalidate"));
    assert_eq!(tagged(opcode::WRITE, 1, 0, &[]), vector("empty write"));
}

#[test]
fn terminates_match_the_vectors() {
    let terminate = |code, blame| {
        let (payload, len) = Terminate { code, blame }.encode();
        untagged(opcode::TERMINATE, 2, 1, 0, &payload[..len])
    };
    assert_eq!(terminate(TermCode::CRC, Blame::NONE), vector("terminate"));
    let bounds = terminate(TermCode::TAGGED_BOUNDS, Blame::ddp(&hex(WRITE)[2..16], 0x12));
    let wanted =
        hex("00 26 | 41 47 | 00 00 00 00 | 00 00 00 02 | 00 00 00 01 | 00 00 00 00 | 11 01 c0 00 |
         00 12 | c1 40 12 34 56 00 00 00 00 00 10 00 20 00 | 87 e8 fb a6");
    assert_eq!(bounds, wanted);
    let opcode = terminate(TermCode::OPCODE, Blame::NONE);
    assert_eq!(opcode[20..], hex("02 06 00 00 | 6f 77 b9 73"));
}

#[test]
fn the_machine_sends_the_vectors() {
    let mut end = End::new(terms(true), Access::LOCAL);
    end.machine.terms.as_mut().unwrap().features.send_prefix = false;
    end.region.copy_in(0, &hex("deadbeef"));
    end.region.copy_in(100, &hex("00 00 7f 00 12 34 50 00 00 ab cd 01 00 00 00 40"));
    let remote = RemoteMem { addr: 0x1000_2000, rkey: Rkey(0x1234_5600) };
    let write = WorkRequest {
        wr_id: 1,
        op: WrOp::RdmaWrite { remote, imm: Some(0xcafe_babe) },
        sges: SgeList::one(end.sge(0, 4)),
        signaled: true,
    };
    end.machine.post_send(&end.core, write).unwrap();
    assert_eq!(end.output(), [vector("write"), vector("immediate")].concat());
    assert_eq!(end.completions().len(), 1);
    let mut end = End::new(terms(true), Access::LOCAL);
    end.machine.terms.as_mut().unwrap().features.send_prefix = false;
    end.region.copy_in(100, &hex("00 00 7f 00 12 34 50 00 00 ab cd 01 00 00 00 40"));
    let send = |sges, invalidate| WorkRequest {
        wr_id: 1,
        op: WrOp::Send { imm: None, invalidate },
        sges,
        signaled: false,
    };
    let first = send(SgeList::two(end.sge(100, 10), end.sge(110, 6)), None);
    end.machine.post_send(&end.core, first).unwrap();
    let second = send(SgeList::EMPTY, Some(Rkey(0x00ab_cd01)));
    end.machine.post_send(&end.core, second).unwrap();
    assert_eq!(end.output(), [vector("send"), vector("send with invalidate")].concat());
    assert!(end.completions().is_empty(), "not signaled");
    let mut end = End::new(mpa_rtr(), Access::LOCAL);
    assert_eq!(end.output(), vector("empty write"));
}

fn mpa_rtr() -> mpa::Terms {
    mpa::Terms { rtr_write: true, features: Features::default(), ..terms(true) }
}

#[test]
fn the_machine_accepts_the_vectors() {
    let mut end = End::new(terms(false), Access::LOCAL);
    end.machine.terms.as_mut().unwrap().features.send_prefix = false;
    for wr_id in 0..2 {
        let buf = (wr_id == 0).then(|| end.sge(0, 16));
        end.machine.post_recv(&end.core, wr_id, buf).unwrap();
    }
    end.input(&vector("empty write"));
    assert!(end.machine.has_heard());
    end.input(&vector("send"));
    let mut second = vector("immediate");
    second[15] = 2;
    end.input(&frame(&second[..20], &second[20..28]));
    let done = end.completions();
    assert_eq!(done.len(), 2, "{:?}", end.machine.failure);
    assert_eq!((done[0].op, done[0].byte_len), (WcOp::Recv, 16));
    assert_eq!((done[1].op, done[1].imm), (WcOp::RecvRdmaWithImm, Some(0xcafe_babe)));
    assert_eq!(end.bytes(0, 16), vector("send")[20..36]);
    assert_eq!(PD, end.machine.pd);
}
