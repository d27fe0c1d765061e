//! Tests of two machines and a wire: operations, order, arbitrary fragmentation, counters.

use proptest::prelude::*;

use super::{End, PD, Pair, terms};
use crate::fabric::{
    Access, CloseReason, FabricError, RemoteMem, SgeList, WcOp, WcStatus, WorkRequest, WrOp,
};
use crate::ids::Rkey;
use crate::mem::MemSlice;

fn wr(wr_id: u64, op: WrOp, sges: SgeList) -> WorkRequest {
    WorkRequest { wr_id, op, sges, signaled: true }
}

fn pattern(end: &End, offset: usize, len: usize, seed: usize) -> Vec<u8> {
    let bytes: Vec<u8> = (0..len).map(|i| ((i * 31 + seed * 7) >> 3) as u8).collect();
    end.region.copy_in(offset, &bytes);
    bytes
}

fn remote(end: &End, offset: usize) -> RemoteMem {
    RemoteMem { addr: end.base + offset as u64, rkey: Rkey(end.stag) }
}

#[test]
fn every_operation_reaches_the_peer() {
    let mut pair = Pair::new();
    let data = pattern(&pair.left, 0, 200_000, 1);
    for id in 0..4 {
        let buf = Some(pair.right.sge(1 << 20, 1 << 20));
        pair.right.machine.post_recv(&pair.right.core, 100 + id, buf).unwrap();
    }
    let to = remote(&pair.right, 4096);
    let post = |pair: &mut Pair, request| {
        pair.left.machine.post_send(&pair.left.core, request).unwrap();
    };
    let sges = SgeList::two(pair.left.sge(0, 150_000), pair.left.sge(150_000, 50_000));
    post(&mut pair, wr(1, WrOp::RdmaWrite { remote: to, imm: Some(77) }, sges));
    let sges = SgeList::one(pair.left.sge(0, 100_000));
    post(&mut pair, wr(2, WrOp::Send { imm: Some(5), invalidate: None }, sges));
    post(&mut pair, wr(3, WrOp::RdmaWrite { remote: to, imm: Some(6) }, SgeList::EMPTY));
    let index = pair.right.core.stags.make_window(PD, pair.right.stag).unwrap();
    let key = Rkey(pair.right.core.stags.last_stag(index));
    let part: MemSlice = pair.right.region.slice(0, 4096).unwrap();
    let key = pair.right.core.stags.bind(PD, key, &part, Access::REMOTE_WRITE).unwrap();
    let op = WrOp::Send { imm: None, invalidate: Some(key) };
    post(&mut pair, wr(4, op, SgeList::EMPTY));
    let read = WrOp::RdmaRead { remote: to };
    let sink = SgeList::one(pair.left.sge(1 << 20, 199_999));
    post(&mut pair, wr(5, read, sink));
    post(&mut pair, wr(6, read, SgeList::EMPTY));
    pair.settle(1000);
    let done = pair.right.completions();
    let seen: Vec<_> = done.iter().map(|d| (d.wr_id, d.op, d.byte_len, d.imm)).collect();
    assert_eq!(
        seen,
        [
            (100, WcOp::RecvRdmaWithImm, 0, Some(77)),
            (101, WcOp::Recv, 100_000, Some(5)),
            (102, WcOp::RecvRdmaWithImm, 0, Some(6)),
            (103, WcOp::Recv, 0, None),
        ]
    );
    assert_eq!(done[3].invalidated, Some(key));
    assert_eq!(pair.right.bytes(4096, 200_000), data);
    assert_eq!(pair.right.bytes(1 << 20, 100_000), data[..100_000]);
    assert_eq!(pair.left.bytes(1 << 20, 199_999), data[..199_999]);
    let done = pair.left.completions();
    let ids: Vec<_> = done.iter().map(|d| (d.wr_id, d.status)).collect();
    assert_eq!(ids, (1..=6).map(|id| (id, WcStatus::Success)).collect::<Vec<_>>());
    assert_eq!(done[4].byte_len, 199_999);
}

#[test]
fn reads_beyond_the_agreed_limit_wait_and_complete_in_order() {
    let mut pair = Pair::new();
    let data = pattern(&pair.right, 0, 64 * 100, 3);
    for i in 0..40 {
        let from = remote(&pair.right, i * 100);
        let sges = SgeList::one(pair.left.sge(i * 100, 100));
        let request = wr(i as u64, WrOp::RdmaRead { remote: from }, sges);
        pair.left.machine.post_send(&pair.left.core, request).unwrap();
    }
    pair.settle(33);
    let done = pair.left.completions();
    assert!(done.iter().map(|d| d.wr_id).eq(0..40), "{:?}", pair.right.machine.failure);
    assert_eq!(pair.left.bytes(0, 4000), data[..4000]);
}

#[test]
fn a_responder_is_silent_until_the_first_frame() {
    let mut pair = Pair::new();
    pair.right = End::new(terms(false), Access::REMOTE_WRITE);
    let request = wr(1, WrOp::Send { imm: None, invalidate: None }, SgeList::EMPTY);
    pair.right.machine.post_send(&pair.right.core, request).unwrap();
    assert!(pair.right.output().is_empty());
    let zero = RemoteMem { addr: 0, rkey: Rkey(0) };
    let request = wr(1, WrOp::RdmaWrite { remote: zero, imm: None }, SgeList::EMPTY);
    pair.left.machine.post_send(&pair.left.core, request).unwrap();
    let frame = pair.left.output();
    pair.right.input(&frame[..frame.len() - 1]);
    assert!(pair.right.output().is_empty());
    pair.right.input(&frame[frame.len() - 1..]);
    assert!(!pair.right.output().is_empty());
}

#[test]
fn large_writes_are_placed_directly() {
    let mut pair = Pair::new();
    let data = pattern(&pair.left, 0, 1 << 20, 9);
    for round in 0..4 {
        let to = remote(&pair.right, 0);
        let sges = SgeList::one(pair.left.sge(0, 1 << 20));
        pair.right.machine.post_recv(&pair.right.core, round, None).unwrap();
        let request = wr(round, WrOp::RdmaWrite { remote: to, imm: Some(1) }, sges);
        pair.left.machine.post_send(&pair.left.core, request).unwrap();
        pair.settle(usize::MAX);
    }
    assert_eq!(pair.right.bytes(0, 1 << 20), data);
    assert_eq!(pair.right.completions().len(), 4);
    let counters = pair.right.core.counters;
    assert_eq!(counters.bytes_direct + counters.bytes_copied, 4 << 20);
    assert!(counters.bytes_direct * 10 > 9 * (4 << 20), "{counters:?}");
}

#[test]
fn small_frames_share_a_receive() {
    let mut pair = Pair::new();
    for id in 0..60 {
        pair.right.machine.post_recv(&pair.right.core, id, None).unwrap();
        let to = remote(&pair.right, id as usize * 512);
        let sges = SgeList::one(pair.left.sge(0, 512));
        let request = wr(id, WrOp::RdmaWrite { remote: to, imm: Some(1) }, sges);
        pair.left.machine.post_send(&pair.left.core, request).unwrap();
    }
    let bytes = pair.left.output();
    let mut rest = &bytes[..];
    let mut calls = 0;
    while !rest.is_empty() {
        pair.right.machine.rx_prepare(&mut pair.right.rx);
        let taken = pair.right.rx.fill_from(rest);
        pair.right.machine.rx_done(&mut pair.right.core, taken);
        rest = &rest[taken..];
        calls += 1;
    }
    assert_eq!(calls, 1);
    assert_eq!(pair.right.completions().len(), 60);
}

#[test]
fn postings_are_bounded_and_validated() {
    let mut end = End::new(terms(true), Access::LOCAL_READ);
    let send = WrOp::Send { imm: None, invalidate: None };
    let buf = end.sge(0, 10);
    let refused = end.machine.post_recv(&end.core, 1, Some(buf.clone()));
    assert!(matches!(refused, Err(FabricError::LocalMemory)), "no local write");
    let mut wrong = buf.clone();
    wrong.lkey ^= 1;
    let refused = end.machine.post_send(&end.core, wr(1, send, SgeList::one(wrong)));
    assert!(matches!(refused, Err(FabricError::LocalMemory)));
    for id in 0..64 {
        end.machine.post_recv(&end.core, id, None).unwrap();
        end.machine.post_send(&end.core, wr(id, send, SgeList::one(buf.clone()))).unwrap();
    }
    let refused = end.machine.post_recv(&end.core, 1, None);
    assert!(matches!(refused, Err(FabricError::QueueFull)));
    let refused = end.machine.post_send(&end.core, wr(1, send, SgeList::EMPTY));
    assert!(matches!(refused, Err(FabricError::QueueFull)));
    end.machine.rx_done(&mut end.core, 0);
    assert_eq!(end.machine.failure.as_ref().unwrap().reason, CloseReason::Peer);
    let refused = end.machine.post_send(&end.core, wr(1, send, SgeList::EMPTY));
    assert!(matches!(refused, Err(FabricError::QpState)));
    end.machine.flush_all(&mut end.core);
    let done = end.completions();
    assert_eq!(done.len(), 128);
    assert!(done.iter().all(|d| d.status == WcStatus::Flushed));
}

#[test]
fn a_plain_peer_gets_no_immediates() {
    let mut plain = terms(true);
    plain.features = super::Features::default();
    let mut end = End::new(plain, Access::LOCAL);
    let zero = RemoteMem { addr: 0, rkey: Rkey(0) };
    for op in [
        WrOp::Send { imm: Some(1), invalidate: None },
        WrOp::RdmaWrite { remote: zero, imm: Some(1) },
    ] {
        let refused = end.machine.post_send(&end.core, wr(1, op, SgeList::EMPTY));
        assert!(matches!(refused, Err(FabricError::Unsupported(_))));
    }
}

/// Memory content, and for each completion its wr_id, kind, length and immediate.
type Left = (Vec<u8>, Vec<(u64, WcOp, u32, Option<u32>)>);

/// Returns the results of mixed operations whose stream from left to right is split at `cuts`.
fn run_cut(cuts: &[usize], crc: bool) -> Left {
    let mut pair = Pair::new();
    pair.left.machine.terms.as_mut().unwrap().crc = crc;
    pair.right.machine.terms.as_mut().unwrap().crc = crc;
    pattern(&pair.left, 0, 300_000, 4);
    for id in 0..8 {
        let buf = Some(pair.right.sge((2 << 20) + id * 70_000, 70_000));
        pair.right.machine.post_recv(&pair.right.core, id as u64, buf).unwrap();
    }
    let sizes = [0, 1, 255, 257, 5000, 20_000, 61_441, 300_000];
    for (i, size) in sizes.into_iter().enumerate() {
        let to = remote(&pair.right, i * 100_000);
        let sges = SgeList::one(pair.left.sge(0, size));
        let imm = (i % 2 == 0).then_some(i as u32);
        let request = wr(i as u64, WrOp::RdmaWrite { remote: to, imm }, sges);
        pair.left.machine.post_send(&pair.left.core, request).unwrap();
        let imm = (i % 3 == 0).then_some(100 + i as u32);
        if i < 4 {
            let sges = SgeList::two(pair.left.sge(0, size.min(7)), pair.left.sge(9, size * 200));
            let op = WrOp::Send { imm, invalidate: None };
            let request = wr(10 + i as u64, op, sges);
            pair.left.machine.post_send(&pair.left.core, request).unwrap();
        }
    }
    let stream = pair.left.output();
    let mut rest = &stream[..];
    let mut cuts = cuts.iter().cycle();
    while !rest.is_empty() {
        let len = (*cuts.next().unwrap()).clamp(1, rest.len());
        pair.right.input(&rest[..len]);
        rest = &rest[len..];
    }
    assert!(pair.right.machine.failure.is_none(), "{:?}", pair.right.machine.failure);
    let done = pair.right.completions();
    let done = done.iter().map(|d| (d.wr_id, d.op, d.byte_len, d.imm)).collect();
    (pair.right.bytes(0, 3 << 20), done)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn splitting_the_stream_changes_nothing(
        cuts in proptest::collection::vec(
            prop_oneof![1usize..40, 1usize..3000, 1usize..200_000], 1..40),
        crc: bool,
    ) {
        let whole = run_cut(&[usize::MAX], crc);
        prop_assert_eq!(whole.1.len(), 8);
        prop_assert!(run_cut(&cuts, crc) == whole);
    }
}
