//! Test cases for data transfer: sends, writes and reads, their order and their completions.

use super::{Bench, Memory, Port, SEND, read_from, write_to};
use crate::fabric::{Access, CloseReason, RemoteMem, Sge, SgeList, WcOp, WcStatus, WrOp};
use crate::ids::Rkey;
use crate::mem::{MemSlice, Pool, Region};

pub(super) fn send_sizes(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 200_000, Access::LOCAL, 0xEE);
    let source = bench.source(&pair.b, 200_000);
    for len in [0, 1, 3, 4096, 65_535, 100_000] {
        // Test exactly enough room, and more than enough.
        for room in [len, len + 10] {
            target.slice(0, 200_000).fill(0xEE);
            let recv = bench.recv(&pair.a, Some(target.sge(7, room)));
            let send = bench.post(&pair.b, SEND, SgeList::one(source.sge(1, len)));
            let wc = bench.good(&pair.a, recv);
            assert_eq!((wc.op, wc.byte_len as usize, wc.imm), (WcOp::Recv, len, None));
            assert_eq!(target.bytes(7, len), source.bytes(1, len));
            assert_eq!(target.bytes(7 + len, 100), vec![0xEE; 100]);
            assert_eq!(target.bytes(0, 7), vec![0xEE; 7]);
            assert_eq!(bench.good(&pair.b, send).op, WcOp::Send);
        }
    }
}

pub(super) fn send_longer_than_the_receive(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 4096, Access::LOCAL, 0xEE);
    let source = bench.source(&pair.b, 4096);
    let short = bench.recv(&pair.a, Some(target.sge(0, 99)));
    let next = bench.recv(&pair.a, Some(target.sge(1000, 1000)));
    bench.post(&pair.b, SEND, SgeList::one(source.sge(0, 100)));
    let wc = bench.completion(&pair.a, short);
    assert_eq!(wc.status, WcStatus::LocalError);
    assert_eq!(bench.completion(&pair.a, next).status, WcStatus::Flushed);
    bench.refused(&pair.b, &pair.a);
    assert_eq!(target.bytes(99, 3000), vec![0xEE; 3000]);
}

pub(super) fn send_with_immediate(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 8192, Access::LOCAL, 0);
    let source = bench.source(&pair.b, 8192);
    for (len, imm) in [(0, 0), (10, 0xDEAD_BEEF), (5000, u32::MAX), (0, 1)] {
        let recv = bench.recv(&pair.a, Some(target.sge(0, 8192)));
        let op = WrOp::Send { imm: Some(imm), invalidate: None };
        let send = bench.post(&pair.b, op, SgeList::one(source.sge(0, len)));
        let wc = bench.good(&pair.a, recv);
        assert_eq!((wc.op, wc.byte_len as usize, wc.imm), (WcOp::Recv, len, Some(imm)));
        assert_eq!(target.bytes(0, len), source.bytes(0, len));
        bench.good(&pair.b, send);
    }
    bench.alive(&pair);
}

pub(super) fn send_of_two_pieces(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 16384, Access::LOCAL, 0);
    let one = bench.source(&pair.b, 16384);
    let two = bench.source(&pair.b, 4096);
    for (first, second) in [(1000, 24), (0, 5), (5, 0), (1, 1), (9999, 4001)] {
        let recv = bench.recv(&pair.a, Some(target.sge(0, 16384)));
        let sges = SgeList::two(one.sge(3, first), two.sge(5, second));
        bench.post(&pair.b, SEND, sges);
        assert_eq!(bench.good(&pair.a, recv).byte_len as usize, first + second);
        let expected = [one.bytes(3, first), two.bytes(5, second)].concat();
        assert_eq!(target.bytes(0, first + second), expected);
    }
}

pub(super) fn sends_keep_their_order(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 64 * 4096, Access::LOCAL, 0);
    let source = bench.source(&pair.b, 64 * 4096);
    let lens: Vec<usize> = (0..60).map(|i| (i * 131) % 4000 + 1).collect();
    let recvs: Vec<u64> =
        (0..60).map(|i| bench.recv(&pair.a, Some(target.sge(i * 4096, 4096)))).collect();
    let sends: Vec<u64> = (0..60)
        .map(|i| bench.post(&pair.b, SEND, SgeList::one(source.sge(i * 4096, lens[i]))))
        .collect();
    let mut got = Vec::new();
    let mut sent = Vec::new();
    bench.wait("all sends", |bench| {
        got.append(&mut bench.completions(&pair.a));
        sent.append(&mut bench.completions(&pair.b));
        (got.len() == 60 && sent.len() == 60).then_some(())
    });
    assert_eq!(got.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), recvs);
    assert_eq!(sent.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), sends);
    for (i, &len) in lens.iter().enumerate() {
        assert_eq!(got[i].byte_len as usize, len);
        assert_eq!(target.bytes(i * 4096, len), source.bytes(i * 4096, len));
    }
}

pub(super) fn write_sizes(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let size = 3 << 20;
    let target = bench.memory(&pair.a, size, Access::REMOTE_WRITE, 0xEE);
    let source = bench.source(&pair.b, size);
    for (len, from, to) in [
        (1, 0, 0),
        (1, 5, 4095),
        (511, 1, 3),
        (4096, 0, 0),
        (4097, 4095, 4093),
        (65_536, 17, 1),
        ((1 << 20) - 1, 3, 5),
        (1 << 20, 0, 4096),
        ((1 << 20) + 4097, 1, 7),
    ] {
        target.slice(0, size).fill(0xEE);
        let write = write_to(target.remote(to as u64));
        let first = bench.post(&pair.b, write, SgeList::one(source.sge(from, len)));
        let recv = bench.recv(&pair.a, None);
        bench.post(&pair.b, SEND, SgeList::EMPTY);
        bench.good(&pair.a, recv);
        assert!(target.bytes(to, len) == source.bytes(from, len), "{len} bytes differ");
        assert_eq!(target.bytes(0, to), vec![0xEE; to]);
        assert_eq!(target.bytes(to + len, 100), vec![0xEE; 100]);
        assert_eq!(bench.good(&pair.b, first).op, WcOp::RdmaWrite);
    }
    // Write up to the very end of the region.
    let write = write_to(target.remote(size as u64 - 10));
    bench.post(&pair.b, write, SgeList::one(source.sge(0, 10)));
    let recv = bench.recv(&pair.a, None);
    bench.post(&pair.b, SEND, SgeList::EMPTY);
    bench.good(&pair.a, recv);
    assert_eq!(target.bytes(size - 10, 10), source.bytes(0, 10));
}

pub(super) fn write_of_two_pieces(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 200_000, Access::REMOTE_WRITE, 0xEE);
    let data = bench.source(&pair.b, 200_000);
    let head = bench.source(&pair.b, 4096);
    for (first, second) in [(512, 24), (100_001, 31), (0, 24), (24, 0), (1, 1)] {
        let recv = bench.recv(&pair.a, None);
        let op = WrOp::RdmaWrite { remote: target.remote(9), imm: Some(5) };
        bench.post(&pair.b, op, SgeList::two(data.sge(1, first), head.sge(3, second)));
        bench.good(&pair.a, recv);
        let expected = [data.bytes(1, first), head.bytes(3, second)].concat();
        assert!(target.bytes(9, first + second) == expected, "{first} + {second}");
    }
}

/// Registers a scattered buffer with pieces of odd sizes and returns it.
fn scattered(bench: &mut Bench<'_>, port: &Port, pieces: usize) -> (Memory, MemSlice) {
    let memory = Region::new(1 << 20).expect("memory");
    let mut pool = Pool::scattered(1, 1 << 20).expect("memory");
    let buffer = pool.take().expect("a buffer");
    let mut at = 0;
    let list: Vec<MemSlice> = (0..pieces)
        .map(|_| {
            let len = 1 + bench.prng.index((1 << 20) / pieces - 1);
            at += len;
            memory.slice(at - len, len - bench.prng.index(len.min(2))).expect("inside")
        })
        .collect();
    let slice = pool.assign(buffer, list).expect("pieces");
    (Memory(port.pd.register(pool.region(), Access::LOCAL).expect("a registration")), slice)
}

pub(super) fn scattered_memory_is_written_and_read(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let there = bench.memory(&pair.a, 1 << 20, Access::REMOTE_READ, 0);
    let landing = bench.memory(&pair.a, 1 << 20, Access::REMOTE_WRITE, 0xEE);
    for pieces in [1, 2, 17, 128] {
        let (source, from) = scattered(bench, &pair.b, pieces);
        let mut bytes = vec![0; from.len()];
        bench.prng.fill(&mut bytes);
        from.copy_in(0, &bytes);
        // Transfer from pieces to the peer.
        let recv = bench.recv(&pair.a, None);
        let op = WrOp::RdmaWrite { remote: landing.remote(1), imm: Some(2) };
        let sge = Sge { slice: from.clone(), lkey: source.0.lkey() };
        let write = bench.post(&pair.b, op, SgeList::one(sge));
        bench.good(&pair.a, recv);
        bench.good(&pair.b, write);
        assert!(landing.bytes(1, bytes.len()) == bytes, "{pieces} pieces sent");
        // Transfer from the peer to pieces, through a window.
        let (target, to) = scattered(bench, &pair.b, pieces);
        let len = to.len().min(bytes.len());
        let to = to.slice(0, len).expect("a part");
        let window = pair.b.pd.window(&target.0).expect("a window");
        let key = bench.bind(&pair.b, &window, &to, Access::REMOTE_WRITE);
        let recv = bench.recv(&pair.b, None);
        let op = WrOp::RdmaWrite { remote: target.with_key(to.offset() as u64, key), imm: Some(3) };
        let write = bench.post(&pair.a, op, SgeList::one(landing.sge(1, len)));
        bench.good(&pair.b, recv);
        bench.good(&pair.a, write);
        bench.revoke(&pair.b, &window);
        target.0.collect(&to);
        assert!(to.to_vec() == bytes[..len], "{pieces} pieces received");
        // Read into pieces.
        there.slice(0, 1 << 20).copy_in(9, &bytes);
        to.fill(0);
        let sge = Sge { slice: to.clone(), lkey: target.0.lkey() };
        let read = bench.post(&pair.b, read_from(there.remote(9)), SgeList::one(sge));
        bench.good(&pair.b, read);
        target.0.collect(&to);
        assert!(to.to_vec() == bytes[..len], "{pieces} pieces read");
    }
}

pub(super) fn write_with_immediate(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 2 << 20, Access::REMOTE_WRITE, 0);
    let untouched = bench.memory(&pair.a, 4096, Access::LOCAL, 0xEE);
    let source = bench.source(&pair.b, 2 << 20);
    for (len, imm) in [(0, 7), (1, 0), (4096, u32::MAX), (1 << 20, 0x1234_5678), (0, 0)] {
        // The receive's buffer stays unchanged.
        let recv = bench.recv(&pair.a, Some(untouched.sge(0, 4096)));
        let op = WrOp::RdmaWrite { remote: target.remote(3), imm: Some(imm) };
        let write = bench.post(&pair.b, op, SgeList::one(source.sge(1, len)));
        let wc = bench.good(&pair.a, recv);
        assert_eq!((wc.op, wc.imm), (WcOp::RecvRdmaWithImm, Some(imm)));
        assert!(target.bytes(3, len) == source.bytes(1, len), "{len} bytes differ");
        assert_eq!(bench.good(&pair.b, write).op, WcOp::RdmaWrite);
    }
    assert_eq!(untouched.bytes(0, 4096), vec![0xEE; 4096]);
}

pub(super) fn empty_write_needs_no_key(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let nowhere = RemoteMem { addr: 0, rkey: Rkey(0) };
    let recv = bench.recv(&pair.a, None);
    let plain = bench.post(&pair.b, write_to(nowhere), SgeList::EMPTY);
    let op = WrOp::RdmaWrite { remote: nowhere, imm: Some(9) };
    let with_imm = bench.post(&pair.b, op, SgeList::EMPTY);
    assert_eq!(bench.good(&pair.a, recv).imm, Some(9));
    bench.good(&pair.b, plain);
    bench.good(&pair.b, with_imm);
    bench.alive(&pair);
}

pub(super) fn data_is_placed_before_the_immediate(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 1 << 20, Access::REMOTE_WRITE, 0);
    let source = bench.memory(&pair.b, 32 << 12, Access::LOCAL, 0);
    for round in 1..=20_u8 {
        // There are many plain writes, then one event; the last write overwrites the first.
        source.slice(0, 32 << 12).fill(round);
        let recv = bench.recv(&pair.a, None);
        for i in 0..16 {
            let write = write_to(target.remote((i << 14) + 1));
            bench.post_silent(&pair.b, write, SgeList::one(source.sge(0, 16384)));
        }
        source.slice(31 << 12, 4096).fill(round + 100);
        let write = write_to(target.remote(1));
        bench.post_silent(&pair.b, write, SgeList::one(source.sge(31 << 12, 4096)));
        let op = WrOp::RdmaWrite { remote: target.remote(0), imm: Some(1) };
        let last = bench.post(&pair.b, op, SgeList::EMPTY);
        bench.good(&pair.a, recv);
        assert!(target.bytes(1, 4096).iter().all(|&b| b == round + 100));
        assert!(target.bytes(4097, (16 << 14) - 4096).iter().all(|&b| b == round));
        bench.good(&pair.b, last);
    }
}

pub(super) fn a_batch_of_writes(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 64 << 12, Access::REMOTE_WRITE, 0);
    let source = bench.source(&pair.b, 64 << 12);
    for _ in 0..10 {
        target.slice(0, 64 << 12).fill(0);
        let (mut recvs, mut writes) = (Vec::new(), Vec::new());
        for i in 0..64 {
            recvs.push(bench.recv(&pair.a, None));
            let remote = target.remote(i << 12);
            let op = WrOp::RdmaWrite { remote, imm: Some(i as u32) };
            let sges = SgeList::one(source.sge((i as usize) << 12, 4096));
            writes.push(bench.post(&pair.b, op, sges));
        }
        for (i, recv) in recvs.into_iter().enumerate() {
            assert_eq!(bench.good(&pair.a, recv).imm, Some(i as u32));
        }
        assert!(target.bytes(0, 64 << 12) == source.bytes(0, 64 << 12));
        for write in writes {
            bench.good(&pair.b, write);
        }
    }
}

pub(super) fn selective_signaling(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let target = bench.memory(&pair.a, 4096, Access::REMOTE_WRITE, 0);
    let source = bench.source(&pair.b, 4096);
    // This is far more than the queue holds; each signaled request frees the entries of all
    // requests before it.
    for round in 0..40 {
        for i in 0..15_usize {
            let write = write_to(target.remote(i as u64));
            bench.post_silent(&pair.b, write, SgeList::one(source.sge(round, 1)));
        }
        let write = write_to(target.remote(15));
        let signaled = bench.post(&pair.b, write, SgeList::one(source.sge(round, 1)));
        bench.good(&pair.b, signaled);
    }
    let recv = bench.recv(&pair.a, None);
    let send = bench.post(&pair.b, SEND, SgeList::EMPTY);
    bench.good(&pair.a, recv);
    bench.good(&pair.b, send);
    assert_eq!(target.bytes(0, 16), vec![source.bytes(39, 1)[0]; 16]);
    assert!(bench.completions(&pair.b).is_empty(), "a silent success must not complete");
}

pub(super) fn both_directions_simultaneously(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let len = 256 << 10;
    let (mut work, mut memory) = (Vec::new(), Vec::new());
    for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
        let target = bench.memory(to, 16 * len, Access::REMOTE_WRITE, 0);
        let source = bench.source(from, 16 * len);
        for i in 0..16_u32 {
            let (at, recv) = (i as usize * len, bench.recv(to, None));
            let op = WrOp::RdmaWrite { remote: target.remote(at as u64), imm: Some(i) };
            let write = bench.post(from, op, SgeList::one(source.sge(at, len)));
            work.push((from, to, recv, write, i));
        }
        memory.push((target, source));
    }
    for (from, to, recv, write, imm) in work {
        assert_eq!(bench.good(to, recv).imm, Some(imm));
        bench.good(from, write);
    }
    for (target, source) in memory {
        assert!(target.bytes(0, 16 * len) == source.bytes(0, 16 * len));
    }
}

pub(super) fn read_sizes(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let size = 2 << 20;
    let there = bench.memory(&pair.a, size, Access::REMOTE_READ, 0);
    let mut bytes = vec![0; size];
    bench.prng.fill(&mut bytes);
    there.slice(0, size).copy_in(0, &bytes);
    let here = bench.memory(&pair.b, size, Access::LOCAL, 0xEE);
    for (len, from, to) in [(1, 0, 0), (1, 4095, 3), (4096, 1, 0), (100_000, 7, 9), (1 << 20, 5, 1)]
    {
        here.slice(0, size).fill(0xEE);
        let read = read_from(there.remote(from as u64));
        let id = bench.post(&pair.b, read, SgeList::one(here.sge(to, len)));
        assert_eq!(bench.good(&pair.b, id).op, WcOp::RdmaRead);
        assert!(here.bytes(to, len) == bytes[from..from + len], "{len} bytes differ");
        assert_eq!(here.bytes(to + len, 100), vec![0xEE; 100]);
        assert_eq!(here.bytes(0, to), vec![0xEE; to]);
    }
    bench.alive(&pair);
}

pub(super) fn empty_read_needs_no_key(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let nowhere = RemoteMem { addr: 1, rkey: Rkey(0) };
    let read = bench.post(&pair.b, read_from(nowhere), SgeList::EMPTY);
    assert_eq!(bench.good(&pair.b, read).op, WcOp::RdmaRead);
    bench.alive(&pair);
}

pub(super) fn writes_and_reads_mixed(bench: &mut Bench<'_>) {
    let pair = bench.pair();
    let access = Access { local_write: true, remote_write: true, remote_read: true };
    let there = bench.memory(&pair.a, 1 << 20, access, 0);
    let source = bench.source(&pair.b, 1 << 20);
    let back = bench.memory(&pair.b, 1 << 20, Access::LOCAL, 0);
    for round in 0..8 {
        let mut ids = Vec::new();
        // A read posted after a write on the same queue pair sees the written bytes.
        for i in 0..8 {
            let (at, len) = (i << 16, 1 + ((round * 8 + i) * 977) % 65_536);
            let write = write_to(there.remote(at as u64));
            ids.push(bench.post(&pair.b, write, SgeList::one(source.sge(at, len))));
            let read = read_from(there.remote(at as u64));
            ids.push(bench.post(&pair.b, read, SgeList::one(back.sge(at, len))));
        }
        for id in ids {
            bench.good(&pair.b, id);
        }
        for i in 0..8 {
            let (at, len) = (i << 16, 1 + ((round * 8 + i) * 977) % 65_536);
            assert!(back.bytes(at, len) == source.bytes(at, len), "round {round}, {i}");
        }
    }
    bench.disconnect(&pair.b);
    assert_eq!(bench.closed(&pair.b), CloseReason::Local);
}
