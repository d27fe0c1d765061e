//! Tests of holes in real files.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rtrs_core::block::{BlockSource, Io, IoOp};
use rtrs_core::extents;
use rtrs_core::rt::blkdev;
use rtrs_core::skip::skip;
use rtrs_core::status::IoStatus;

use super::{FileOptions, FileSource, Scratch};
use crate::backend::conformance::Rig;

const MIB: u64 = 1 << 20;

/// Returns the extents of a range, with an answer buffer of `room` bytes.
fn extents_of(rig: &mut Rig, from: u64, to: u64, room: usize) -> Vec<(u64, bool)> {
    let len = u32::try_from(to - from).unwrap();
    let buf = rig.region.slice(512, room).unwrap();
    let io = Io { len, ..rig.transfer(IoOp::Extents, from, 512, room) };
    assert_eq!(rig.run(io), IoStatus::Ok);
    let mut seen = Vec::new();
    assert!(extents::read(&buf, len, |extent| {
        seen.push((extent.len, extent.hole));
        true
    }));
    seen
}

#[test]
fn holes_are_found_and_none_beyond_the_end() {
    let memory = Scratch::memory();
    for scratch in [Some(Scratch::disk()), memory].into_iter().flatten() {
        let path = scratch.file("sparse", 8 * MIB);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        if blkdev::next_data(&file, 0).unwrap().is_some() {
            skip("no holes in files here");
            continue;
        }
        for at in [MIB, 3 * MIB] {
            file.write_all_at(&[1; 4096], at).unwrap();
        }
        let source = FileSource::open(&path, FileOptions::default()).unwrap();
        let mut rig = Rig::new(&source, 0);
        let all = extents_of(&mut rig, 0, 4 * MIB, 4096);
        assert_eq!(all.iter().map(|(len, _)| len).sum::<u64>(), 4 * MIB);
        let holes: Vec<_> = all.iter().map(|(_, hole)| *hole).collect();
        assert_eq!((holes, all[0].0), (vec![true, false, true, false, true], MIB));
        assert_eq!(extents_of(&mut rig, MIB + 512, MIB + 1024, 4096), [(512, false)]);
        assert_eq!(extents_of(&mut rig, 512, 1024, 4096), [(512, true)]);
        assert_eq!(extents_of(&mut rig, 0, 4 * MIB, extents::LEN_MIN), all[..1], "one fits");
        assert_eq!(extents_of(&mut rig, 4 * MIB, 8 * MIB, 4096), [(4 * MIB, true)]);
        // The file was truncated: the range beyond its end cannot be read.
        file.set_len(6 * MIB + 100).unwrap();
        let cut = extents_of(&mut rig, 4 * MIB, 8 * MIB, 4096);
        assert_eq!(cut, [(2 * MIB, true), (2 * MIB, false)]);
    }
}

/// Other programs may write to a file that this server has not locked.
#[test]
fn only_a_locked_writable_file_has_a_sole_writer() {
    let scratch = Scratch::disk();
    let path = scratch.file("written", MIB);
    for (read_only, no_lock) in [(true, false), (true, true), (false, true), (false, false)] {
        let how = FileOptions { read_only, no_lock, ..FileOptions::default() };
        let source = FileSource::open(&path, how).unwrap();
        assert_eq!(source.is_sole_writer(), !read_only && !no_lock, "{how:?}");
    }
}

#[test]
fn extent_requests_beyond_the_queue_limit_complete() {
    let scratch = Scratch::disk();
    let source = FileSource::open(&scratch.file("many", MIB), FileOptions::default()).unwrap();
    let mut rig = Rig::new(&source, 0);
    let mut left = 0;
    for _ in 0..600 {
        let io = Io { len: 1 << 20, ..rig.transfer(IoOp::Extents, 0, 0, 4096) };
        left += usize::from(rig.device.submit(io).is_ok());
    }
    assert!(left > 256, "more than fit in the thread's queue");
    while left > 0 {
        rig.turn();
        while let Some(done) = rig.device.reap() {
            assert_eq!(done.status, IoStatus::Ok);
            left -= 1;
        }
    }
    assert_eq!(rig.device.inflight(), 0);
}
