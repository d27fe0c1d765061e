//! Cases about closing connections: which work is flushed, which is still sent, and which event
//! comes last.

use super::{Bench, Pair, Port, SEND, Side, write_to};
use crate::fabric::{Access, CloseReason, FabricError, RemoteMem, SgeList, WcStatus, WrOp};
use crate::ids::Rkey;

pub(super) fn missing_receive_ends_the_connection(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 4096, Access::REMOTE_WRITE, 0);
    // A plain write needs no receive.
    let write = bench.post(&pair.b, write_to(target.remote(0)), SgeList::EMPTY);
    bench.good(&pair.b, write);
    bench.alive(&pair);
    if bench.harness.waits_for_receives() {
        messages_wait_for_receives(bench, &pair, target.remote(0));
        return;
    }
    bench.post(&pair.b, SEND, SgeList::EMPTY);
    bench.refused(&pair.b, &pair.a);
    // An immediate without a receive closes the connection too.
    let address = bench.harness.listen_address();
    let address = bench.fabric(Side::A).listen(address).expect("listen");
    let pair = bench.pair_at(address, &pair.a.pd, &pair.b.pd);
    let op = WrOp::RdmaWrite { remote: target.remote(0), imm: Some(1) };
    bench.post(&pair.b, op, SgeList::EMPTY);
    bench.refused(&pair.b, &pair.a);
}

/// Checks that nothing completes before a receive is posted, and that the messages then arrive in
/// order.
fn messages_wait_for_receives(bench: &mut Bench<'_>, pair: &Pair, remote: RemoteMem) {
    let send = bench.post(&pair.b, SEND, SgeList::EMPTY);
    let op = WrOp::RdmaWrite { remote, imm: Some(1) };
    let write = bench.post(&pair.b, op, SgeList::EMPTY);
    bench.settle();
    assert!(bench.completions(&pair.b).is_empty(), "acknowledged without a receive");
    let recv = bench.recv(&pair.a, None);
    assert_eq!(bench.good(&pair.a, recv).imm, None);
    bench.good(&pair.b, send);
    bench.settle();
    assert!(bench.completions(&pair.b).is_empty(), "acknowledged without a receive");
    let recv = bench.recv(&pair.a, None);
    assert_eq!(bench.good(&pair.a, recv).imm, Some(1));
    bench.good(&pair.b, write);
    bench.alive(pair);
}

/// Checks that all these requests completed as flushed.
fn all_flushed(bench: &mut Bench<'_>, port: &Port, ids: &[u64]) {
    for &id in ids {
        let wc = bench.completion(port, id);
        assert_eq!(wc.status, WcStatus::Flushed, "{wc:?}");
    }
}

pub(super) fn disconnect_flushes_everything(bench: &mut Bench<'_>) {
    for closer_is_b in [true, false] {
        let pair = bench.pair();
        let recvs_a: Vec<u64> = (0..8).map(|_| bench.recv(&pair.a, None)).collect();
        let recvs_b: Vec<u64> = (0..4).map(|_| bench.recv(&pair.b, None)).collect();
        let (closer, other) = if closer_is_b { (&pair.b, &pair.a) } else { (&pair.a, &pair.b) };
        bench.disconnect(closer);
        assert_eq!(bench.closed(closer), CloseReason::Local);
        assert_eq!(bench.closed(other), CloseReason::Peer);
        all_flushed(bench, &pair.a, &recvs_a);
        all_flushed(bench, &pair.b, &recvs_b);
        bench.settle();
        bench.fabric(Side::A).stop_listening();
    }
}

pub(super) fn disconnect_sends_what_was_posted(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 8 << 18, Access::REMOTE_WRITE, 0);
    let source = bench.source(&pair.b, 8 << 18);
    let recvs: Vec<u64> = (0..9).map(|_| bench.recv(&pair.a, None)).collect();
    let mut sends = Vec::new();
    for i in 0..8_usize {
        let op = WrOp::RdmaWrite { remote: target.remote((i as u64) << 18), imm: Some(0) };
        sends.push(bench.post(&pair.b, op, SgeList::one(source.sge(i << 18, 1 << 18))));
    }
    bench.disconnect(&pair.b);
    let late = bench.try_post(&pair.b, SEND, SgeList::EMPTY, true);
    assert!(matches!(late, Err(FabricError::QpState)), "{late:?}");
    for &recv in &recvs[..8] {
        bench.good(&pair.a, recv);
    }
    assert!(target.bytes(0, 8 << 18) == source.bytes(0, 8 << 18));
    all_flushed(bench, &pair.a, &recvs[8..]);
    for send in sends {
        bench.good(&pair.b, send);
    }
    assert_eq!(bench.closed(&pair.b), CloseReason::Local);
    assert_eq!(bench.closed(&pair.a), CloseReason::Peer);
}

pub(super) fn disconnect_from_both_ends(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    for port in [&pair.a, &pair.b] {
        bench.recv(port, None);
    }
    bench.disconnect(&pair.a);
    bench.disconnect(&pair.b);
    for port in [&pair.a, &pair.b] {
        let reason = bench.closed(port);
        assert!(matches!(reason, CloseReason::Local | CloseReason::Peer), "{reason:?}");
    }
    // A second disconnect does nothing.
    bench.disconnect(&pair.a);
    bench.abort(&pair.b);
}

pub(super) fn abort_flushes_everything(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 1 << 20, Access::REMOTE_WRITE, 0);
    let source = bench.source(&pair.b, 1 << 20);
    let recvs_a: Vec<u64> = (0..8).map(|_| bench.recv(&pair.a, None)).collect();
    let recvs_b: Vec<u64> = (0..8).map(|_| bench.recv(&pair.b, None)).collect();
    let mut sends = Vec::new();
    for _ in 0..30 {
        let write = write_to(target.remote(0));
        sends.push(bench.post(&pair.b, write, SgeList::one(source.sge(0, 1 << 20))));
    }
    bench.turn();
    bench.abort(&pair.b);
    assert_eq!(bench.closed(&pair.b), CloseReason::Local);
    let reason = bench.closed(&pair.a);
    assert!(matches!(reason, CloseReason::Lost(_) | CloseReason::Peer), "{reason:?}");
    all_flushed(bench, &pair.a, &recvs_a);
    all_flushed(bench, &pair.b, &recvs_b);
    for send in sends {
        let wc = bench.completion(&pair.b, send);
        assert!(matches!(wc.status, WcStatus::Success | WcStatus::Flushed), "{wc:?}");
    }
}

pub(super) fn no_peer_write_lands_after_closed(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 1 << 20, Access::REMOTE_WRITE, 0);
    let source = bench.memory(&pair.b, 1 << 20, Access::LOCAL, 1);
    for turns in 0..20_u32 {
        let address = bench.harness.listen_address();
        bench.fabric(Side::A).stop_listening();
        let address = bench.fabric(Side::A).listen(address).expect("listen");
        let pair = bench.pair_at(address, &pair.a.pd, &pair.b.pd);
        for _ in 0..40 {
            let write = write_to(target.remote(0));
            bench.post(&pair.b, write, SgeList::one(source.sge(0, 1 << 20)));
        }
        for _ in 0..turns {
            bench.turn();
        }
        bench.abort(&pair.a);
        bench.closed(&pair.a);
        target.slice(0, 1 << 20).fill(0xEE);
        bench.closed(&pair.b);
        for _ in 0..20 {
            bench.turn();
        }
        let bytes = target.bytes(0, 1 << 20);
        assert!(bytes.iter().all(|&b| b == 0xEE), "a write landed after Closed");
    }
}

pub(super) fn closed_queue_pair_accepts_nothing(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let memory = bench.memory(&pair.a, 4096, Access::LOCAL, 0);
    let window = pair.a.pd.window(&memory.0).expect("a window");
    bench.abort(&pair.b);
    bench.closed(&pair.a);
    bench.closed(&pair.b);
    for port in [&pair.a, &pair.b] {
        let sent = bench.try_post(port, SEND, SgeList::EMPTY, true);
        assert!(matches!(sent, Err(FabricError::QpState)), "{sent:?}");
        let received = bench.try_recv(port, None);
        assert!(matches!(received, Err(FabricError::QpState)), "{received:?}");
    }
    let id = bench.id();
    let slice = memory.slice(0, 100);
    let fabric = bench.fabric(Side::A);
    let bound = fabric.bind(pair.a.qp, &window, &slice, Access::REMOTE_WRITE, id);
    assert!(matches!(bound, Err(FabricError::QpState)), "{bound:?}");
    let revoked = fabric.revoke(pair.a.qp, &window, id);
    assert!(matches!(revoked, Err(FabricError::QpState)), "{revoked:?}");
    bench.disconnect(&pair.a);
    bench.abort(&pair.a);
    bench.settle();
}

pub(super) fn other_queue_pairs_are_unaffected(bench: &mut Bench<'_>) {
    let address = bench.listen();
    let (pd_a, pd_b) = (bench.pd(Side::A), bench.pd(Side::B));
    let pairs: Vec<Pair> = (0..4).map(|_| bench.pair_at(address, &pd_a, &pd_b)).collect();
    let target = bench.memory(&pairs[0].a, 4096, Access::REMOTE_WRITE, 0);
    let source = bench.source(&pairs[0].b, 4096);
    let wrong = target.with_key(0, Rkey(target.0.rkey().0 ^ 1));
    bench.post(&pairs[0].b, write_to(wrong), SgeList::one(source.sge(0, 10)));
    bench.refused(&pairs[0].b, &pairs[0].a);
    bench.abort(&pairs[1].a);
    bench.closed(&pairs[1].b);
    bench.disconnect(&pairs[2].a);
    bench.closed(&pairs[2].b);
    bench.alive(&pairs[3]);
}

pub(super) fn reconnect_after_close(bench: &mut Bench<'_>) {
    let address = bench.listen();
    let (pd_a, pd_b) = (bench.pd(Side::A), bench.pd(Side::B));
    let mut seen = Vec::new();
    for _ in 0..10 {
        let pair = bench.pair_at(address, &pd_a, &pd_b);
        assert!(!seen.contains(&pair.b.qp), "a number used again: {}", pair.b.qp);
        seen.push(pair.b.qp);
        bench.alive(&pair);
        bench.disconnect(&pair.b);
        bench.closed(&pair.b);
        bench.closed(&pair.a);
    }
}
