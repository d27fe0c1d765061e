//! Tests of IO whose memory is a list of pieces, as submitted by front ends for guests and for
//! vectored IO.

use std::os::fd::AsFd;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Io, IoFlags, IoOp};
use rtrs_core::fabric::sim::BindMode;
use rtrs_core::mem::{MemSlice, PIECES_MAX, Pool, Region};
use rtrs_core::prng::Prng;
use rtrs_core::status::IoStatus;

use super::fixture::{Fixture, MS, SEC};
use crate::engine::{DeviceIndex, SessionDevice};
use crate::path::state::PathState;

/// Size of the buffers.
const LEN: usize = 384 << 10;

/// A user of a session's device, with scattered buffers.
struct User {
    device: SessionDevice,
    pool: Pool,
}

impl User {
    fn new(fixture: &mut Fixture, shard: usize) -> Self {
        fixture.client.is_idle = true;
        let mut device = fixture.client.device(shard, DeviceIndex::FIRST);
        let pool = Pool::scattered(4, LEN).expect("memory");
        device.attach_region(pool.region()).expect("memory is registered");
        Self { device, pool }
    }

    /// Submits an IO at this offset on the device; its tag is the number of its buffer.
    fn submit(&mut self, op: IoOp, offset: u64, pieces: Vec<MemSlice>) -> (u32, MemSlice) {
        let buffer = self.pool.take().expect("a buffer");
        let bytes = self.pool.assign(buffer, pieces).expect("pieces");
        let (tag, len, buf) = (u64::from(buffer), bytes.len() as u32, Some(bytes.clone()));
        let io = Io { tag, op, flags: IoFlags::default(), offset, len, buf };
        self.device.submit(io).expect("room");
        (buffer, bytes)
    }

    /// Takes the completion of an IO and its buffer.
    fn take(&mut self, buffer: u32) -> IoStatus {
        let done = self.device.reap().expect("a completion");
        assert_eq!(done.tag, u64::from(buffer));
        self.pool.give(buffer);
        done.status
    }
}

/// Runs until an IO has completed.
fn ended(fixture: &mut Fixture, shard: usize) {
    fixture.until("the end of the IO", SEC, |fixture| fixture.client.has_completions(shard));
}

/// Returns pieces of memory in reverse order, with gaps between them, whose total length is a
/// multiple of the block size.
fn pieces(prng: &mut Prng, memory: &Arc<Region>, count: usize) -> Vec<MemSlice> {
    let mut lens: Vec<usize> = (0..count).map(|_| 1 + prng.index(LEN / count - 512)).collect();
    let total: usize = lens.iter().sum();
    lens[count / 2] += total.next_multiple_of(512) - total;
    let mut end = memory.len();
    let piece = |len: &usize| {
        end -= len + 1;
        memory.slice(end, *len).expect("inside")
    };
    lens.iter().map(piece).collect()
}

#[test]
fn pieces_hold_the_bytes_of_an_io() {
    for (bind, bounces) in
        [(BindMode::Done, false), (BindMode::Done, true), (BindMode::Pending, true)]
    {
        let mut fixture = Fixture::open(|s| (s.world.bind, s.world.bounces) = (bind, bounces));
        let prng = &mut Prng::new(1);
        let mut user = User::new(&mut fixture, 1);
        let memory = Region::new(2 * LEN).expect("memory");
        for count in [1, 2, 3, 16, 33, 100, PIECES_MAX] {
            let (written, offset) = (pieces(prng, &memory, count), 512 * count as u64);
            let (buffer, bytes) = user.submit(IoOp::Write, offset, written);
            let mut data = vec![0; bytes.len()];
            prng.fill(&mut data);
            bytes.copy_in(0, &data);
            ended(&mut fixture, 1);
            assert_eq!(user.take(buffer), IoStatus::Ok);
            let at = offset as usize;
            assert!(fixture.server.disk[at..at + data.len()] == data, "{count} pieces written");

            memory.fill(0, memory.len(), 0xEE);
            let read = pieces(prng, &memory, PIECES_MAX + 1 - count);
            let (buffer, _) = user.submit(IoOp::Read, offset, read.clone());
            ended(&mut fixture, 1);
            assert_eq!(user.take(buffer), IoStatus::Ok);
            let seen: Vec<u8> = read.iter().flat_map(MemSlice::to_vec).collect();
            assert!(fixture.server.disk[at..at + seen.len()] == seen, "{} pieces", read.len());
            let others = memory.whole().to_vec().iter().filter(|&&byte| byte != 0xEE).count();
            assert!(others <= seen.len(), "bytes outside the pieces were written");
        }
    }
}

/// Data in one piece of registered memory is not copied, unlike data in several pieces.
#[test]
fn registered_memory_is_not_copied() {
    for bounces in [false, true] {
        let mut fixture = Fixture::open(|s| {
            (s.paths, s.world.bounces) = (2, bounces);
        });
        let mut user = User::new(&mut fixture, 0);
        let memory = Region::new(2 * LEN).expect("memory");
        let before = fixture.world.registered(fixture.node);
        user.device.attach_region(&memory).expect("memory is registered");
        let registered = fixture.world.registered(fixture.node);
        assert!(registered >= before + 2 * memory.len(), "with both paths");

        let owner = Arc::new(());
        let piece = |at: usize, len: usize| {
            Region::alias(&memory, Arc::clone(&owner)).slice(at, len).expect("inside")
        };
        let submit = |user: &mut User, op: IoOp, offset: u64, buf: MemSlice| {
            let len = u32::try_from(buf.len()).expect("a length");
            let io = Io { tag: 99, op, flags: IoFlags::default(), offset, len, buf: Some(buf) };
            user.device.submit(io).expect("room");
        };
        memory.fill(100, LEN, 0x31);
        submit(&mut user, IoOp::Write, 8192, piece(100, LEN));
        ended(&mut fixture, 0);
        assert_eq!(user.device.reap().map(|done| done.status), Some(IoStatus::Ok));
        assert!(fixture.server.disk[8192..8192 + LEN].iter().all(|&byte| byte == 0x31));
        fixture.server.disk[8192..12288].fill(0x32);
        submit(&mut user, IoOp::Read, 8192, piece(LEN + 4096, 8192));
        ended(&mut fixture, 0);
        assert_eq!(user.device.reap().map(|done| done.status), Some(IoStatus::Ok));
        let read = memory.slice(LEN + 4096, 8192).expect("inside").to_vec();
        assert!(read == [[0x32; 4096], [0x31; 4096]].concat(), "the data of the read");
        assert_eq!(Arc::strong_count(&owner), 1, "nothing uses the memory");
        let bounced = |fixture: &Fixture| {
            fixture.client.stats(0).paths.iter().map(|path| path.bounced).sum::<u64>()
        };
        assert_eq!(bounced(&fixture), 0);
        let (buffer, _) = user.submit(IoOp::Read, 0, vec![piece(0, 512)]);
        ended(&mut fixture, 0);
        assert_eq!(user.take(buffer), IoStatus::Ok);
        assert_eq!(bounced(&fixture), u64::from(bounces));

        user.device.detach_region(&memory);
        assert_eq!(fixture.world.registered(fixture.node), before);
        submit(&mut user, IoOp::Read, 0, piece(0, 512));
        ended(&mut fixture, 0);
        assert_ne!(user.device.reap().map(|done| done.status), Some(IoStatus::Ok));
    }
}

/// Maps an unlinked file, like the memory of a guest.
fn guest_memory() -> Arc<Region> {
    let path = std::env::temp_dir().join(format!("rtrs-guest-{}", std::process::id()));
    let options =
        std::fs::OpenOptions::new().create(true).truncate(true).read(true).write(true).open(&path);
    let file = options.expect("a file");
    std::fs::remove_file(&path).expect("its name");
    file.set_len(2 * LEN as u64).expect("its length");
    Region::shared(file.as_fd(), 0, 2 * LEN).expect("a mapping")
}

#[test]
fn memory_is_unmapped_after_the_last_io_that_uses_it() {
    for bounces in [false, true] {
        let mut fixture = Fixture::open(|s| {
            s.paths = 2;
            (s.how.hold, s.how.fence, s.world.bounces) = (true, true, bounces);
        });
        let prng = &mut Prng::new(2);
        let mut user = User::new(&mut fixture, 0);
        let memory = guest_memory();
        memory.fill(0, memory.len(), 0x21);
        let disk = fixture.server.disk[8192..16384].to_vec();
        let halves = [memory.slice(9, 5000).unwrap(), memory.slice(7000, 3192).unwrap()];
        let (read, target) = user.submit(IoOp::Read, 8192, halves.into());
        let (_, bytes) = user.submit(IoOp::Write, 65536, pieces(prng, &memory, 20));
        let written = bytes.to_vec();
        fixture.until("requests held", SEC, |s| s.server.held.len() >= 2);

        // The guest removes its memory while IO is in flight; then a path fails.
        let mapped = Arc::downgrade(&memory);
        drop(memory);
        fixture.link_down(0);
        let is_lost = |s: &Fixture| s.client.states()[0] != PathState::Connected;
        fixture.until("the path's end", 2 * SEC, is_lost);
        fixture.run(200 * MS);
        assert!(!fixture.client.has_completions(0), "nothing ends before the server answers");
        fixture.server.how.hold = false;
        fixture.server.release();
        fixture.until("the end of all IO", SEC, |s| s.client.inflight(0) == 0);
        assert!(fixture.server.disk[65536..65536 + written.len()] == written);

        for at in 0..2 {
            assert!(mapped.upgrade().is_some(), "{at} of 2 IOs have ended");
            let done = user.device.reap().expect("a completion");
            assert_eq!(done.status, IoStatus::Ok);
            if done.tag == u64::from(read) {
                assert!(target.to_vec() == disk, "the data of the read");
            }
            user.pool.give(u32::try_from(done.tag).unwrap());
        }
        assert!(mapped.upgrade().is_none(), "the memory is unmapped");
    }
}
