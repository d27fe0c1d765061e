//! Cases about successful and failed connection attempts.

use super::{Bench, Pair, SEND, Side, skip};
use crate::fabric::{
    Access, CloseReason, ConnectFailure, FabricError, FabricEvent, PRIVATE_DATA_MAX, PrivateData,
    SgeList, WcStatus, WrOp,
};
use crate::time::Duration;

pub(super) fn connect_carries_private_data_both_ways(bench: &mut Bench<'_>) {
    let address = bench.listen();
    let (pd_a, pd_b) = (bench.pd(Side::A), bench.pd(Side::B));
    let asked: Vec<u8> = (1..=PRIVATE_DATA_MAX as u8).collect();
    let answered: Vec<u8> = (100..156).collect();
    let mut params = bench.params(address);
    params.private_data = PrivateData::new(&asked);
    let b = bench.start(&pd_b, &params);
    let request = bench.request();
    // RDMA CM pads with zeroes.
    assert!(request.private_data.as_bytes().starts_with(&asked));
    assert_eq!(request.local.port(), address.port());
    assert_ne!(request.peer, request.local);
    let a = bench.accept(Side::A, &pd_a, request, &PrivateData::new(&answered));
    bench.established(Side::A, a.qp);
    let got = bench.established(Side::B, b.qp);
    assert!(got.as_bytes().starts_with(&answered), "{:?}", got.as_bytes());
    bench.alive(&Pair { a, b });
}

pub(super) fn connect_without_private_data(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    bench.alive(&pair);
}

pub(super) fn reject_carries_private_data(bench: &mut Bench<'_>) {
    let address = bench.listen();
    let pd = bench.pd(Side::B);
    let params = bench.params(address);
    let b = bench.start(&pd, &params);
    let request = bench.request();
    let now = bench.now();
    bench.fabric(Side::A).reject(now, request, &PrivateData::new(b"not you"));
    match bench.connect_failed(Side::B, b.qp) {
        ConnectFailure::Rejected(data) => assert!(data.as_bytes().starts_with(b"not you")),
        other => panic!("{other:?}"),
    }
}

pub(super) fn dropped_request_ends_the_attempt(bench: &mut Bench<'_>) {
    let address = bench.listen();
    let pd = bench.pd(Side::B);
    let params = bench.params(address);
    let b = bench.start(&pd, &params);
    let started = bench.now();
    drop(bench.request());
    // The connector receives an event and need not wait for its timeout.
    let failure = bench.connect_failed(Side::B, b.qp);
    let ended = ConnectFailure::Failed(CloseReason::Peer) == failure
        || matches!(failure, ConnectFailure::Failed(CloseReason::Lost(_)));
    assert!(ended, "{failure:?}");
    assert!(bench.now().since(started) < params.timeout / 2);
}

pub(super) fn refused_connect_fails(bench: &mut Bench<'_>) {
    let address = bench.harness.refusing_address();
    let pd = bench.pd(Side::B);
    let params = bench.params(address);
    let started = bench.now();
    let b = bench.start(&pd, &params);
    let failure = bench.connect_failed(Side::B, b.qp);
    assert!(matches!(failure, ConnectFailure::Failed(CloseReason::Lost(_))), "{failure:?}");
    assert!(bench.now().since(started) < params.timeout);
}

pub(super) fn connect_times_out(bench: &mut Bench<'_>) {
    let Some(address) = bench.harness.silent_address() else {
        skip("the harness has no unreachable address");
        return;
    };
    let pd = bench.pd(Side::B);
    let mut params = bench.params(address);
    let usual = params.timeout;
    params.timeout = Duration::from_millis(300);
    let started = bench.now();
    let b = bench.start(&pd, &params);
    let failure = bench.connect_failed(Side::B, b.qp);
    assert_eq!(failure, ConnectFailure::Failed(CloseReason::TimedOut));
    let took = bench.now().since(started);
    assert!(took >= Duration::from_millis(299) && took < usual, "{took:?}");
}

pub(super) fn abort_while_connecting(bench: &mut Bench<'_>) {
    let address = bench.listen();
    let pd = bench.pd(Side::B);
    let params = bench.params(address);
    let b = bench.start(&pd, &params);
    bench.abort(&b);
    let failure = bench.connect_failed(Side::B, b.qp);
    assert_eq!(failure, ConnectFailure::Failed(CloseReason::Local));
    bench.settle();
    // The listener may have received the request; drop it.
    drop(bench.take(Side::A, |e| matches!(e, FabricEvent::Request(_))));
    let pair = {
        let (pd_a, pd_b) = (bench.pd(Side::A), bench.pd(Side::B));
        bench.pair_at(address, &pd_a, &pd_b)
    };
    bench.alive(&pair);
}

pub(super) fn failed_connect_flushes_receives(bench: &mut Bench<'_>) {
    let address = bench.harness.refusing_address();
    let pd = bench.pd(Side::B);
    let params = bench.params(address);
    let b = bench.start(&pd, &params);
    let memory = bench.memory(&b, 4096, Access::LOCAL, 0);
    let ids = [bench.recv(&b, None), bench.recv(&b, Some(memory.sge(0, 100)))];
    bench.connect_failed(Side::B, b.qp);
    for id in ids {
        assert_eq!(bench.completion(&b, id).status, WcStatus::Flushed);
    }
    assert!(matches!(bench.try_recv(&b, None), Err(FabricError::QpState)));
}

pub(super) fn port_in_use_is_reported(bench: &mut Bench<'_>) {
    let address = bench.listen();
    match bench.fabric(Side::A).listen(address) {
        Err(FabricError::System { what, source }) => {
            assert_eq!(source.kind(), std::io::ErrorKind::AddrInUse);
            assert!(what.contains(&address.to_string()), "{what}");
        }
        other => panic!("{other:?}"),
    }
    bench.fabric(Side::A).stop_listening();
    bench.fabric(Side::A).listen(address).expect("free again");
}

pub(super) fn many_queue_pairs(bench: &mut Bench<'_>) {
    let address = bench.listen();
    let (pd_a, pd_b) = (bench.pd(Side::A), bench.pd(Side::B));
    let pairs: Vec<_> = (0..32).map(|_| bench.pair_at(address, &pd_a, &pd_b)).collect();
    let mut waiting = Vec::new();
    for pair in &pairs {
        for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
            waiting.push((to, bench.recv(to, None)));
            waiting.push((from, bench.post(from, SEND, SgeList::EMPTY)));
        }
    }
    for (port, id) in waiting {
        bench.good(port, id);
    }
    for pair in pairs.iter().step_by(2) {
        bench.disconnect(&pair.b);
    }
    for pair in pairs.iter().step_by(2) {
        assert_eq!(bench.closed(&pair.b), CloseReason::Local);
        assert_eq!(bench.closed(&pair.a), CloseReason::Peer);
    }
    for pair in pairs.iter().skip(1).step_by(2) {
        bench.alive(pair);
    }
}

pub(super) fn request_is_accepted_on_another_core(bench: &mut Bench<'_>) {
    if bench.harness.fabric(Side::SecondA).is_none() {
        skip("the harness has one core on the listening end");
        return;
    }
    let address = bench.listen();
    let (pd_a, pd_b) = (bench.pd(Side::A), bench.pd(Side::B));
    let first = bench.pair_at(address, &pd_a, &pd_b);
    let params = bench.params(address);
    let b = bench.start(&pd_b, &params);
    let request = bench.request();
    // The protection domain is the first shard's: a path's memory serves all its shards.
    let a = bench.accept(Side::SecondA, &pd_a, request, &PrivateData::EMPTY);
    bench.established(Side::SecondA, a.qp);
    bench.established(Side::B, b.qp);
    let second = Pair { a, b };
    bench.alive(&second);
    let target = bench.memory(&first.a, 4096, Access::REMOTE_WRITE, 0);
    let source = bench.source(&second.b, 4096);
    let recv = bench.recv(&second.a, None);
    let op = WrOp::RdmaWrite { remote: target.remote(0), imm: Some(1) };
    bench.post(&second.b, op, SgeList::one(source.sge(0, 4096)));
    bench.good(&second.a, recv);
    assert_eq!(target.bytes(0, 4096), source.bytes(0, 4096));
    bench.alive(&first);
}
