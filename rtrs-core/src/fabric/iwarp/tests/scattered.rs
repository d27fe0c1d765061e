//! Tests of scattered memory: writes from and into pieces, read responses, and their frames.

use super::{End, PD, Pair, terms};
use crate::fabric::iwarp::batch::{PARTS_PER_FRAME, SEGMENT_MAX};
use crate::fabric::{Access, FabricError, RemoteMem, Sge, SgeList, WcStatus, WorkRequest, WrOp};
use crate::ids::Rkey;
use crate::mem::{MemSlice, PIECES_MAX, Pool};
use crate::prng::Prng;

/// Size of a scattered buffer.
const LEN: usize = 256 << 10;

/// Registered scattered buffer of an end.
struct Scattered {
    pool: Pool,
    buffer: u32,
    stag: u32,
    base: u64,
}

impl Scattered {
    fn new(end: &End, access: Access) -> Self {
        let mut pool = Pool::scattered(2, LEN).unwrap();
        // The second buffer is not at offset 0.
        let (_, buffer) = (pool.take(), pool.take().unwrap());
        let (stag, base) = end.core.stags.register(PD, pool.region(), access).unwrap();
        Self { pool, buffer, stag, base }
    }

    /// Assigns pieces of these lengths, each with a gap after it.
    fn assign(&mut self, end: &End, lens: &[usize]) -> MemSlice {
        let mut at = 7;
        let pieces = lens.iter().map(|len| {
            let piece = end.region.slice(at, *len).unwrap();
            at += len + 3;
            piece
        });
        self.pool.assign(self.buffer, pieces).unwrap()
    }

    fn remote(&self, slice: &MemSlice) -> RemoteMem {
        RemoteMem { addr: self.base + slice.offset() as u64, rkey: Rkey(self.stag) }
    }
}

fn random(prng: &mut Prng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    prng.fill(&mut bytes);
    bytes
}

/// Lists of pieces: odd sizes, ends of pieces at and around the ends of frames, many small pieces.
fn lists() -> Vec<Vec<usize>> {
    let mut lists = vec![
        vec![1],
        vec![LEN],
        vec![1, 2, 3],
        vec![511, 1, 4096, 3, 513],
        vec![SEGMENT_MAX, SEGMENT_MAX],
        vec![SEGMENT_MAX - 1, 2, SEGMENT_MAX],
        vec![SEGMENT_MAX + 1, 7, 100],
        vec![4096; 64],
        vec![1; PIECES_MAX],
        vec![2047; PIECES_MAX],
        vec![512; PARTS_PER_FRAME],
        vec![512; PARTS_PER_FRAME + 1],
    ];
    let prng = &mut Prng::new(11);
    for count in [5, 16, 17, 18, 40, 127, 128] {
        lists.push((0..count).map(|_| 1 + prng.index(LEN / count)).collect());
    }
    lists
}

fn post(end: &mut End, op: WrOp, sges: SgeList) -> Result<(), FabricError> {
    end.machine.post_send(&end.core, WorkRequest { wr_id: 1, op, sges, signaled: true })
}

/// Checks that the one request of an end has succeeded.
fn succeeded(pair: &mut Pair) {
    let done = pair.left.completions();
    assert!(done.len() == 1 && done[0].status == WcStatus::Success, "{done:?}");
    assert!(pair.left.machine.failure.is_none() && pair.right.machine.failure.is_none());
}

/// Creates a pair with or without checksums.
fn pair(crc: bool) -> Pair {
    let all = Access { local_write: true, remote_write: true, remote_read: true };
    let [left, right] =
        [true, false].map(|initiator| End::new(super::Terms { crc, ..terms(initiator) }, all));
    let mut pair = Pair { left, right };
    pair.right.machine.sender.permit();
    pair
}

#[test]
fn writes_gather_pieces() {
    let prng = &mut Prng::new(3);
    for (crc, cut) in [(true, usize::MAX), (false, 1001), (true, 40_000)] {
        let mut pair = pair(crc);
        let mut source = Scattered::new(&pair.left, Access::LOCAL);
        for lens in lists() {
            let slice = source.assign(&pair.left, &lens);
            let bytes = random(prng, slice.len());
            slice.copy_in(0, &bytes);
            // A header in one piece follows, as in a request.
            pair.left.region.copy_in(3 << 20, b"header");
            let header = pair.left.sge(3 << 20, 6);
            let first = Sge { slice: slice.clone(), lkey: source.stag };
            let remote = RemoteMem { addr: pair.right.base + 5, rkey: Rkey(pair.right.stag) };
            pair.right.region.fill(0, LEN + 100, 0xEE);
            pair.right.machine.post_recv(&pair.right.core, 9, None).unwrap();
            let op = WrOp::RdmaWrite { remote, imm: Some(1) };
            post(&mut pair.left, op, SgeList::two(first, header)).unwrap();
            pair.settle(cut);
            let expected = [&bytes[..], b"header", &[0xEE; 50]].concat();
            assert!(pair.right.bytes(5, bytes.len() + 56) == expected, "{lens:?}");
            assert_eq!(pair.right.completions().len(), 1);
            succeeded(&mut pair);
        }
    }
}

#[test]
fn writes_are_placed_in_pieces() {
    let prng = &mut Prng::new(4);
    for (crc, cut) in [(true, usize::MAX), (false, 1001), (true, 40_000)] {
        let mut pair = pair(crc);
        let mut target = Scattered::new(&pair.right, Access::LOCAL);
        let index = pair.right.core.stags.make_window(PD, target.stag).unwrap();
        for lens in lists() {
            pair.right.region.fill(0, 1 << 20, 0xEE);
            let slice = target.assign(&pair.right, &lens);
            let bytes = random(prng, slice.len());
            pair.left.region.copy_in(1, &bytes);
            let stags = &pair.right.core.stags;
            let key = Rkey(stags.last_stag(index));
            let rkey = stags.bind(PD, key, &slice, Access::REMOTE_WRITE).unwrap();
            let remote = RemoteMem { rkey, ..target.remote(&slice) };
            let sges = SgeList::one(pair.left.sge(1, bytes.len()));
            post(&mut pair.left, WrOp::RdmaWrite { remote, imm: None }, sges).unwrap();
            pair.settle(cut);
            succeeded(&mut pair);
            assert!(slice.to_vec() == bytes, "{lens:?}");
            let rest = pair.right.bytes(0, 1 << 20).iter().filter(|&&b| b != 0xEE).count();
            assert!(rest <= bytes.len(), "{lens:?}: bytes outside the pieces were written");
        }
        let large = pair.right.core.counters.bytes_direct;
        assert!(large > LEN as u64, "large pieces are received in place: {large}");
    }
}

#[test]
fn reads_go_from_pieces_to_pieces() {
    let prng = &mut Prng::new(5);
    let mut pair = pair(true);
    let mut source = Scattered::new(&pair.right, Access::REMOTE_READ);
    let mut sink = Scattered::new(&pair.left, Access::LOCAL);
    for lens in lists() {
        let from = source.assign(&pair.right, &lens);
        let reversed: Vec<usize> = lens.iter().rev().copied().collect();
        let to = sink.assign(&pair.left, &reversed);
        let bytes = random(prng, from.len());
        from.copy_in(0, &bytes);
        let op = WrOp::RdmaRead { remote: source.remote(&from) };
        let sges = SgeList::one(Sge { slice: to.clone(), lkey: sink.stag });
        post(&mut pair.left, op, sges).unwrap();
        pair.settle(30_001);
        succeeded(&mut pair);
        assert!(to.to_vec() == bytes, "{lens:?}");
    }
}

#[test]
fn frames_of_pages_have_the_usual_size() {
    let mut pair = Pair::new();
    let mut source = Scattered::new(&pair.left, Access::LOCAL);
    let remote = RemoteMem { addr: pair.right.base, rkey: Rkey(pair.right.stag) };
    for (lens, frames) in [(vec![4096; 45], 3), (vec![2048; 90], 6), (vec![SEGMENT_MAX * 3], 3)] {
        let slice = source.assign(&pair.left, &lens);
        let sges = SgeList::one(Sge { slice: slice.clone(), lkey: source.stag });
        post(&mut pair.left, WrOp::RdmaWrite { remote, imm: None }, sges).unwrap();
        let sent = pair.left.output();
        let (mut at, mut seen) = (0, 0);
        while at < sent.len() {
            let len = usize::from(u16::from_be_bytes([sent[at], sent[at + 1]]));
            at += crate::fabric::iwarp::mpa::fpdu_len(len);
            seen += 1;
        }
        assert_eq!(seen, frames, "{} pieces", lens.len());
        pair.right.input(&sent);
        pair.left.completions();
    }
}

#[test]
fn messages_take_memory_only_in_one_piece() {
    let mut pair = Pair::new();
    let mut source = Scattered::new(&pair.left, Access::LOCAL);
    let slice = source.assign(&pair.left, &[3, 4]);
    let sge = || Sge { slice: slice.clone(), lkey: source.stag };
    let send = WrOp::Send { imm: None, invalidate: None };
    let remote = RemoteMem { addr: pair.right.base, rkey: Rkey(pair.right.stag) };
    let write = WrOp::RdmaWrite { remote, imm: None };
    let second = SgeList::two(pair.left.sge(0, 5), sge());
    for (op, sges) in [(send, SgeList::one(sge())), (write, second)] {
        let refused = post(&mut pair.left, op, sges);
        assert!(matches!(refused, Err(FabricError::Unsupported(_))), "{refused:?}");
    }
}
