//! Cases about protection from the peer, about windows, and about local memory and queues.

use std::sync::Arc;

use super::{Bench, LIMITS, Memory, Pair, SEND, Side, read_from, write_to};
use crate::fabric::{
    Access, FabricError, PrivateData, RegisterError, Registered, RemoteMem, SgeList, ToRegister,
    WcStatus, WrOp,
};
use crate::ids::Rkey;
use crate::mem::Region;

const LEN: usize = 64 << 10;

/// Creates a pair, memory of A that the peer may write to, and source memory of B.
fn target(bench: &mut Bench<'_>) -> (Pair, Memory, Memory) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, LEN, Access::REMOTE_WRITE, 0xEE);
    let source = bench.source(&pair.b, LEN);
    (pair, target, source)
}

/// Checks that a forbidden write by B closes the connection and changes nothing.
fn write_is_refused(
    bench: &mut Bench<'_>,
    pair: &Pair,
    source: &Memory,
    remote: RemoteMem,
    len: usize,
) {
    let pending = bench.recv(&pair.a, None);
    let id = bench.post(&pair.b, write_to(remote), SgeList::one(source.sge(0, len)));
    // On iWARP, the write may have been sent long before the peer refused it.
    let wc = bench.completion(&pair.b, id);
    let fits = matches!(wc.status, WcStatus::Success | WcStatus::RemoteAccess | WcStatus::Flushed);
    assert!(fits, "{wc:?}");
    assert_eq!(bench.completion(&pair.a, pending).status, WcStatus::Flushed);
    bench.refused(&pair.b, &pair.a);
}

fn untouched(memory: &Memory) {
    assert!(memory.bytes(0, memory.len()).iter().all(|&b| b == 0xEE), "bytes were placed");
}

/// Checks that a write through this key succeeds.
fn write_works(bench: &mut Bench<'_>, pair: &Pair, source: &Memory, remote: RemoteMem, len: usize) {
    let recv = bench.recv(&pair.a, None);
    let op = WrOp::RdmaWrite { remote, imm: Some(1) };
    let write = bench.post(&pair.b, op, SgeList::one(source.sge(0, len)));
    bench.good(&pair.a, recv);
    bench.good(&pair.b, write);
}

pub(super) fn unknown_key_is_refused(bench: &mut Bench<'_>) {
    let (pair, target, source) = target(bench);
    let wrong = Rkey(target.0.rkey().0 ^ 1);
    write_is_refused(bench, &pair, &source, target.with_key(0, wrong), 100);
    untouched(&target);
}

pub(super) fn deregistered_key_is_refused(bench: &mut Bench<'_>) {
    let (pair, target, source) = target(bench);
    write_works(bench, &pair, &source, target.remote(0), 100);
    let (remote, region) = (target.remote(0), Arc::clone(target.0.region()));
    region.fill(0, LEN, 0xEE);
    drop(target);
    write_is_refused(bench, &pair, &source, remote, 100);
    assert!(region.whole().to_vec().iter().all(|&b| b == 0xEE));
}

pub(super) fn write_out_of_bounds_by_one_is_refused(bench: &mut Bench<'_>) {
    let (pair, target, source) = target(bench);
    let remote = target.remote(LEN as u64 - 99);
    write_works(bench, &pair, &source, target.remote(LEN as u64 - 100), 100);
    target.slice(0, LEN).fill(0xEE);
    write_is_refused(bench, &pair, &source, remote, 100);
    assert_eq!(target.bytes(0, LEN - 99), vec![0xEE; LEN - 99]);
}

pub(super) fn write_below_the_base_is_refused(bench: &mut Bench<'_>) {
    let (pair, target, source) = target(bench);
    write_is_refused(bench, &pair, &source, target.remote(u64::MAX), 100);
    untouched(&target);
}

pub(super) fn write_that_wraps_is_refused(bench: &mut Bench<'_>) {
    let (pair, target, source) = target(bench);
    let remote = RemoteMem { addr: u64::MAX - 9, rkey: target.0.rkey() };
    write_is_refused(bench, &pair, &source, remote, 100);
    untouched(&target);
}

pub(super) fn write_without_permission_is_refused(bench: &mut Bench<'_>) {
    let (pair, _, source) = target(bench);
    let target = bench.memory(&pair.a, LEN, Access::REMOTE_READ, 0xEE);
    write_is_refused(bench, &pair, &source, target.remote(0), 100);
    untouched(&target);
}

/// Checks that a forbidden read by B leaves its buffer unchanged.
fn read_is_refused(bench: &mut Bench<'_>, pair: &Pair, remote: RemoteMem, len: usize) {
    let here = bench.memory(&pair.b, LEN, Access::LOCAL, 0xEE);
    let id = bench.post(&pair.b, read_from(remote), SgeList::one(here.sge(0, len)));
    let wc = bench.completion(&pair.b, id);
    assert!(matches!(wc.status, WcStatus::RemoteAccess | WcStatus::Flushed), "{wc:?}");
    bench.refused(&pair.b, &pair.a);
    untouched(&here);
}

pub(super) fn read_without_permission_is_refused(bench: &mut Bench<'_>) {
    let (pair, target, _) = target(bench);
    read_is_refused(bench, &pair, target.remote(0), 100);
}

pub(super) fn read_out_of_bounds_by_one_is_refused(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let there = bench.memory(&pair.a, LEN, Access::REMOTE_READ, 1);
    let here = bench.memory(&pair.b, LEN, Access::LOCAL, 0);
    let last = read_from(there.remote(LEN as u64 - 100));
    let id = bench.post(&pair.b, last, SgeList::one(here.sge(0, 100)));
    bench.good(&pair.b, id);
    read_is_refused(bench, &pair, there.remote(LEN as u64 - 99), 100);
}

pub(super) fn key_of_another_domain_is_refused(bench: &mut Bench<'_>) {
    let (pair, _, source) = target(bench);
    let other = bench.pd(pair.a.side);
    let region = Region::new(LEN).expect("memory");
    region.fill(0, LEN, 0xEE);
    let target = Memory(other.register(&region, Access::REMOTE_WRITE).expect("registration"));
    write_is_refused(bench, &pair, &source, target.remote(0), 100);
    untouched(&target);
}

pub(super) fn window_grants_and_revokes(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let parent = bench.memory(&pair.a, LEN, Access::LOCAL, 0xEE);
    let source = bench.source(&pair.b, LEN);
    let window = pair.a.pd.window(&parent.0).expect("a window");
    let key = bench.bind(&pair.a, &window, &parent.slice(4096, 8192), Access::REMOTE_WRITE);
    write_works(bench, &pair, &source, parent.with_key(4096, key), 8192);
    assert_eq!(parent.bytes(4096, 8192), source.bytes(0, 8192));
    bench.revoke(&pair.a, &window);
    parent.slice(0, LEN).fill(0xEE);
    write_is_refused(bench, &pair, &source, parent.with_key(4096, key), 1);
    untouched(&parent);
}

pub(super) fn window_keys_are_fresh(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let parent = bench.memory(&pair.a, LEN, Access::LOCAL, 0xEE);
    let source = bench.source(&pair.b, LEN);
    let window = pair.a.pd.window(&parent.0).expect("a window");
    let slice = parent.slice(0, 4096);
    let mut keys = Vec::new();
    for round in 0..20 {
        let key = bench.bind(&pair.a, &window, &slice, Access::REMOTE_WRITE);
        // Consecutive keys differ; a key may be reused after a long time.
        assert!(keys.last() != Some(&key) && key != Rkey(0), "{keys:?} {key}");
        write_works(bench, &pair, &source, parent.with_key(0, key), 100);
        keys.push(key);
        if round % 2 == 0 {
            bench.revoke(&pair.a, &window);
        }
    }
    // After a second bind without a revoke, the previous key is invalid as well.
    parent.slice(0, LEN).fill(0xEE);
    bench.bind(&pair.a, &window, &slice, Access::REMOTE_WRITE);
    write_is_refused(bench, &pair, &source, parent.with_key(0, keys[keys.len() - 1]), 100);
    untouched(&parent);
}

pub(super) fn window_has_bounds(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let parent = bench.memory(&pair.a, LEN, Access::LOCAL, 0xEE);
    let source = bench.source(&pair.b, LEN);
    let window = pair.a.pd.window(&parent.0).expect("a window");
    let key = bench.bind(&pair.a, &window, &parent.slice(4096, 4096), Access::REMOTE_WRITE);
    write_works(bench, &pair, &source, parent.with_key(4096 + 4000, key), 96);
    parent.slice(0, LEN).fill(0xEE);
    write_is_refused(bench, &pair, &source, parent.with_key(4095, key), 10);
    untouched(&parent);
    // Test the other bound of the window on a separate connection.
    let address = bench.harness.listen_address();
    let address = bench.fabric(pair.a.side).listen(address).expect("listen");
    let pair = bench.pair_at(address, &pair.a.pd, &pair.b.pd);
    write_is_refused(bench, &pair, &source, parent.with_key(8192 - 9, key), 10);
    assert_eq!(parent.bytes(8192, LEN - 8192), vec![0xEE; LEN - 8192]);
}

pub(super) fn window_without_permission_is_refused(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let access = Access { local_write: true, remote_write: true, remote_read: true };
    let parent = bench.memory(&pair.a, LEN, access, 0xEE);
    let source = bench.source(&pair.b, LEN);
    let window = pair.a.pd.window(&parent.0).expect("a window");
    let key = bench.bind(&pair.a, &window, &parent.slice(0, 4096), Access::REMOTE_READ);
    let here = bench.memory(&pair.b, 4096, Access::LOCAL, 0);
    let read = read_from(parent.with_key(0, key));
    let id = bench.post(&pair.b, read, SgeList::one(here.sge(0, 4096)));
    bench.good(&pair.b, id);
    untouched(&here);
    write_is_refused(bench, &pair, &source, parent.with_key(0, key), 10);
    untouched(&parent);
}

pub(super) fn window_serves_all_queue_pairs_of_its_domain(bench: &mut Bench<'_>) {
    let address = bench.listen();
    let (pd_a, pd_b) = (bench.pd(Side::A), bench.pd(Side::B));
    let one = bench.pair_at(address, &pd_a, &pd_b);
    let two = bench.pair_at(address, &pd_a, &pd_b);
    let parent = bench.memory(&one.a, LEN, Access::LOCAL, 0);
    let source = bench.source(&two.b, LEN);
    let window = pd_a.window(&parent.0).expect("a window");
    // The window is bound on one queue pair, and used and revoked on the other.
    let key = bench.bind(&one.a, &window, &parent.slice(0, LEN), Access::REMOTE_WRITE);
    write_works(bench, &two, &source, parent.with_key(0, key), LEN);
    assert!(parent.bytes(0, LEN) == source.bytes(0, LEN));
    bench.revoke(&two.a, &window);
    parent.slice(0, LEN).fill(0xEE);
    write_is_refused(bench, &one, &source, parent.with_key(0, key), 10);
    untouched(&parent);
    bench.alive(&two);
}

pub(super) fn dropped_window_is_refused(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let parent = bench.memory(&pair.a, LEN, Access::LOCAL, 0xEE);
    let source = bench.source(&pair.b, LEN);
    let window = pair.a.pd.window(&parent.0).expect("a window");
    let key = bench.bind(&pair.a, &window, &parent.slice(0, LEN), Access::REMOTE_WRITE);
    drop(window);
    write_is_refused(bench, &pair, &source, parent.with_key(0, key), 10);
    untouched(&parent);
}

/// Models a server that keeps the memory of a closed path in its domain and uses it again under new
/// keys.
pub(super) fn memory_is_reusable_after_its_connections(bench: &mut Bench<'_>) {
    let address = bench.listen();
    let (pd_a, pd_b) = (bench.pd(Side::A), bench.pd(Side::B));
    let mut pair = bench.pair_at(address, &pd_a, &pd_b);
    let parent = bench.memory(&pair.a, LEN, Access::LOCAL, 0xEE);
    let source = bench.source(&pair.b, LEN);
    let mut keys = Vec::new();
    for round in 0..6 {
        let window = pd_a.window(&parent.0).expect("a window");
        let key = bench.bind(&pair.a, &window, &parent.slice(0, LEN), Access::REMOTE_WRITE);
        write_works(bench, &pair, &source, parent.with_key(0, key), LEN);
        assert!(parent.bytes(0, LEN) == source.bytes(0, LEN));
        parent.slice(0, LEN).fill(0xEE);
        keys.push(key);
        match round % 3 {
            0 => bench.disconnect(&pair.a),
            1 => bench.abort(&pair.a),
            _ => bench.abort(&pair.b),
        }
        bench.closed(&pair.a);
        bench.closed(&pair.b);
        assert!(pd_a.is_idle(), "Closed came before the end");
        pd_a.free_later(Box::new(window));
        let gone = || (Arc::strong_count(&parent.0) == 1).then_some(());
        bench.wait("the window to be gone", |_| gone());
        let b = bench.start(&pd_b, &bench.params(address));
        let request = bench.request();
        assert!(bench.fabric(Side::A).fits(&pd_a, &request), "over the same device");
        let a = bench.accept(Side::A, &pd_a, request, &PrivateData::EMPTY);
        bench.established(Side::A, a.qp);
        bench.established(Side::B, b.qp);
        pair = Pair { a, b };
    }
    let last = keys[keys.len() - 1];
    write_is_refused(bench, &pair, &source, parent.with_key(0, last), 10);
    untouched(&parent);
}

/// Registers memory and returns the result, whether the provider does it immediately or
/// asynchronously.
fn register_async(
    bench: &mut Bench<'_>,
    id: u64,
    what: ToRegister,
) -> Result<Registered, RegisterError> {
    if let Some(made) = bench.fabric(Side::A).register_async(id, what) {
        return made;
    }
    let made =
        bench.wait("memory to be registered", |bench| bench.fabric(Side::A).next_registration());
    assert_eq!(made.id, id);
    made.result
}

pub(super) fn memory_registered_on_another_thread_is_usable(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let source = bench.source(&pair.b, LEN);
    let region = Region::new(LEN).expect("memory");
    let (pd, access) = (Arc::clone(&pair.a.pd), Access::LOCAL);
    let mut what = ToRegister { pd, region, registration: None, access, windows: 3, wanted: None };
    for round in 0..2 {
        let made = register_async(bench, 7 + round, what.clone()).expect("memory and windows");
        assert_eq!(made.windows.len(), 3);
        let parent = Memory(made.registration);
        if let Some(before) = what.registration.replace(Arc::clone(&parent.0)) {
            assert!(Arc::ptr_eq(&before, &parent.0), "only windows were asked for");
        }
        for window in &made.windows {
            let part = parent.slice(4096, 8192);
            let key = bench.bind(&pair.a, window, &part, Access::REMOTE_WRITE);
            part.fill(0);
            write_works(bench, &pair, &source, parent.with_key(4096, key), 8192);
            assert!(parent.bytes(4096, 8192) == source.bytes(0, 8192));
        }
    }
    // The windows and the memory belong to different domains.
    what.pd = bench.pd(Side::A);
    let refused = register_async(bench, 9, what);
    assert!(matches!(refused, Err(RegisterError::Windows(_))), "{refused:?}");
}

pub(super) fn send_with_invalidate_revokes_the_key(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let parent = bench.memory(&pair.a, LEN, Access::LOCAL, 0xEE);
    let source = bench.source(&pair.b, LEN);
    let window = pair.a.pd.window(&parent.0).expect("a window");
    let mut key = Rkey(0);
    for (round, len) in [0, 100].into_iter().enumerate() {
        key = bench.bind(&pair.a, &window, &parent.slice(0, 4096), Access::REMOTE_WRITE);
        write_works(bench, &pair, &source, parent.with_key(0, key), 4096);
        let recv = bench.recv(&pair.a, Some(parent.sge(8192, 4096)));
        let op = WrOp::Send { imm: None, invalidate: Some(key) };
        let send = bench.post(&pair.b, op, SgeList::one(source.sge(round, len)));
        let wc = bench.good(&pair.a, recv);
        assert_eq!((wc.invalidated, wc.byte_len as usize), (Some(key), len));
        assert_eq!(parent.bytes(8192, len), source.bytes(round, len));
        bench.good(&pair.b, send);
    }
    parent.slice(0, LEN).fill(0xEE);
    write_is_refused(bench, &pair, &source, parent.with_key(0, key), 10);
    untouched(&parent);
}

pub(super) fn local_memory_is_checked(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let read_only = bench.memory(&pair.b, 4096, Access::LOCAL_READ, 1);
    let ours = bench.memory(&pair.b, 4096, Access::LOCAL, 1);
    let other_pd = bench.pd(pair.b.side);
    let region = Region::new(4096).expect("memory");
    let foreign = Memory(other_pd.register(&region, Access::LOCAL).expect("registration"));
    let mut wrong_key = ours.sge(0, 10);
    wrong_key.lkey ^= 1;
    let mut wrong_region = foreign.sge(0, 10);
    wrong_region.lkey = ours.0.lkey();
    let refused = |result: Result<u64, FabricError>| {
        assert!(matches!(result, Err(FabricError::LocalMemory)), "{result:?}");
    };
    for bad in [wrong_key, wrong_region, foreign.sge(0, 10)] {
        refused(bench.try_post(&pair.b, SEND, SgeList::one(bad.clone()), true));
        let two = SgeList::two(ours.sge(0, 10), bad.clone());
        refused(bench.try_post(&pair.b, SEND, two, true));
        refused(bench.try_recv(&pair.b, Some(bad)));
    }
    refused(bench.try_recv(&pair.b, Some(read_only.sge(0, 10))));
    let there = bench.memory(&pair.a, 4096, Access::REMOTE_READ, 2);
    let read = read_from(there.remote(0));
    refused(bench.try_post(&pair.b, read, SgeList::one(read_only.sge(0, 10)), true));
    // Nothing was posted, so the connection still works; a read-only source may be sent.
    let recv = bench.recv(&pair.a, None);
    bench.post(&pair.b, SEND, SgeList::EMPTY);
    bench.good(&pair.a, recv);
    let target = bench.memory(&pair.a, 4096, Access::LOCAL, 0);
    let recv = bench.recv(&pair.a, Some(target.sge(0, 100)));
    bench.post(&pair.b, SEND, SgeList::one(read_only.sge(0, 100)));
    bench.good(&pair.a, recv);
    assert_eq!(target.bytes(0, 100), vec![1; 100]);
    // The window covers memory that does not belong to its parent.
    let window = pair.b.pd.window(&ours.0).expect("a window");
    let id = bench.id();
    let slice = read_only.slice(0, 10);
    let bound = bench.fabric(pair.b.side).bind(pair.b.qp, &window, &slice, Access::LOCAL, id);
    assert!(matches!(bound, Err(FabricError::LocalMemory)), "{bound:?}");
}

pub(super) fn queues_are_bounded(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 4096, Access::REMOTE_WRITE, 0);
    let source = bench.source(&pair.b, 4096);
    for _ in 0..3 {
        let write = || write_to(target.remote(0));
        let ids: Vec<u64> = (0..LIMITS.send_max)
            .map(|_| bench.post(&pair.b, write(), SgeList::one(source.sge(0, 16))))
            .collect();
        let over = bench.try_post(&pair.b, write(), SgeList::one(source.sge(0, 16)), true);
        assert!(matches!(over, Err(FabricError::QueueFull)), "{over:?}");
        for id in ids {
            bench.good(&pair.b, id);
        }
    }
    for _ in 0..LIMITS.recv_max {
        bench.recv(&pair.a, None);
    }
    let over = bench.try_recv(&pair.a, None);
    assert!(matches!(over, Err(FabricError::QueueFull)), "{over:?}");
    bench.post(&pair.b, SEND, SgeList::EMPTY);
    bench.wait("a receive", |bench| (bench.completions(&pair.a).len() == 1).then_some(()));
    bench.recv(&pair.a, None);
    let over = bench.try_recv(&pair.a, None);
    assert!(matches!(over, Err(FabricError::QueueFull)), "{over:?}");
}
