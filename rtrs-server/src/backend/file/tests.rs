//! Tests of the file backend on real files: the conformance suite, durability flags, holes and
//! unaligned sizes.

mod extents;
mod fua_errors;
mod names;
mod resize;
mod workers;

use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rtrs_core::block::{BlockDevice, BlockSource, Io, IoFlags, IoOp, WakeHandle};
use rtrs_core::mem::Region;
use rtrs_core::rt::{Clock, Completed, Fd, Op, Ring, blkdev};
use rtrs_core::skip::skip;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;

use super::lock::{self, Locks};
use super::queue::FileDevice;
use super::workers::WORKERS;
use super::{Direct, FileOptions, FileSource};
use crate::backend::INFLIGHT_MAX;
use crate::backend::conformance::{Keeps, Rig, run};

/// A directory that is removed at the end of the test.
struct Scratch(PathBuf);

impl Scratch {
    fn below(parent: &Path) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("rtrs-file-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Creates a directory on the disk where the tests were built.
    fn disk() -> Self {
        let exe = std::env::current_exe().unwrap();
        Self::below(exe.parent().unwrap())
    }

    fn memory() -> Option<Self> {
        let shm = Path::new("/dev/shm");
        if !shm.is_dir() {
            skip("no /dev/shm");
            return None;
        }
        Some(Self::below(shm))
    }

    fn file(&self, name: &str, size: u64) -> PathBuf {
        let path = self.0.join(name);
        File::create(&path).unwrap().set_len(size).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const READ_ONLY: FileOptions =
    FileOptions { read_only: true, direct: Direct::Auto, block: None, no_lock: false };

fn open(path: &Path) -> FileSource {
    FileSource::open(path, FileOptions::default()).unwrap()
}

fn refusal(path: &Path, read_only: bool, direct: Direct, block: Option<u32>) -> String {
    FileSource::open(path, FileOptions { read_only, direct, block, no_lock: false })
        .unwrap_err()
        .to_string()
}

fn conforms(source: FileSource) {
    let source: Arc<dyn BlockSource> = Arc::new(source);
    run(&source, Keeps::Data);
}

#[test]
fn files_on_disk_conform() {
    let scratch = Scratch::disk();
    for size in [512, 4096, 4096 * 3 + 512, 8 << 20] {
        conforms(open(&scratch.file("disk", size)));
    }
    let path = scratch.file("large-blocks", 8 << 20);
    let large = FileOptions { block: Some(4096), ..FileOptions::default() };
    conforms(FileSource::open(&path, large).unwrap());
}

#[test]
fn files_in_memory_conform() {
    let Some(scratch) = Scratch::memory() else { return };
    for size in [512, 4096 * 3 + 512, 8 << 20] {
        let source = open(&scratch.file("memory", size));
        assert!(source.shared.in_memory);
        conforms(source);
    }
    let text = refusal(&scratch.file("direct", 4096), false, Direct::On, None);
    assert!(text.contains("does not support direct IO"), "{text}");
}

#[test]
fn direct_io_conforms() {
    let scratch = Scratch::disk();
    let path = scratch.file("direct", 8 << 20);
    let source =
        match FileSource::open(&path, FileOptions { direct: Direct::On, ..FileOptions::default() })
        {
            Ok(source) => source,
            Err(error) => {
                assert!(error.to_string().contains("does not support direct IO"), "{error}");
                skip(&error.to_string());
                return;
            }
        };
    assert!(source.is_direct());
    conforms(source);
    assert!(!open(&path).is_direct(), "auto leaves regular files to the page cache");
}

#[test]
fn a_sparse_terabyte_conforms_and_stays_sparse() {
    let scratch = Scratch::disk();
    let path = scratch.file("sparse", 1 << 40);
    conforms(open(&path));
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 < 16 << 20, "still sparse");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 40, "size unchanged");
}

#[test]
fn read_only_files_conform() {
    let scratch = Scratch::disk();
    let path = scratch.file("ro", 1 << 20);
    let source = FileSource::open(&path, READ_ONLY).unwrap();
    let again = FileSource::open(&path, READ_ONLY).unwrap();
    assert!(source.geometry().read_only);
    conforms(source);
    conforms(again);
}

#[test]
fn a_trailing_partial_block_is_not_exported_or_changed() {
    let scratch = Scratch::disk();
    let path = scratch.file("tail", 1000);
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[0x33; 488], 512).unwrap();
    let source = open(&path);
    assert_eq!(source.geometry().size, 512);
    conforms(source);
    let mut tail = [0; 488];
    File::open(&path).unwrap().read_exact_at(&mut tail, 512).unwrap();
    assert_eq!(tail, [0x33; 488]);
}

#[test]
fn writes_reach_the_file() {
    let scratch = Scratch::disk();
    let path = scratch.file("content", 1 << 20);
    let source = open(&path);
    let mut rig = Rig::new(&source, 0);
    assert_eq!(rig.write(512, &[0xab; 1024]), IoStatus::Ok);
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes[512..1536].iter().all(|b| *b == 0xab));
    assert!(bytes[..512].iter().chain(&bytes[1536..]).all(|b| *b == 0));
}

/// Runs one IO on a queue and returns the operations that it submitted.
fn trace(source: &FileSource, op: IoOp, flags: IoFlags) -> Vec<String> {
    let ring = Ring::new(16).unwrap();
    let mut device = FileDevice::new(&source.shared, &ring, WakeHandle::idle()).unwrap();
    let region = Region::new(4096).unwrap();
    let is_transfer = matches!(op, IoOp::Read | IoOp::Write);
    let buf = is_transfer.then(|| region.whole());
    let len = if op == IoOp::Flush { 0 } else { 4096 };
    device.submit(Io { tag: 1, op, flags, offset: 0, len, buf }).unwrap();
    let end = Clock.now() + Duration::from_secs(120);
    loop {
        if let Some(done) = device.reap() {
            assert_eq!(done.status, IoStatus::Ok);
            return std::mem::take(&mut device.trace);
        }
        assert!(Clock.now() < end);
        ring.turn_or_sleep(Some(Duration::from_millis(5))).unwrap();
        device.poll(Clock.now());
    }
}

#[test]
fn durable_writes_sync_the_file() {
    let scratch = Scratch::disk();
    let source = open(&scratch.file("durable", 1 << 20));
    let (plain, fua) = (IoFlags::default(), IoFlags { fua: true, ..IoFlags::default() });
    let ops = trace(&source, IoOp::Write, plain);
    assert!(ops.len() == 1 && ops[0].contains("dsync: false"), "{ops:?}");
    let ops = trace(&source, IoOp::Write, fua);
    assert!(ops.len() == 1 && ops[0].contains("dsync: true"), "{ops:?}");
    let ops = trace(&source, IoOp::Flush, plain);
    assert!(ops.len() == 2 && ops[0].contains("Fsync") && ops[1].contains("Statx"), "{ops:?}");
    for op in [IoOp::Discard, IoOp::WriteZeroes] {
        if op == IoOp::Discard && !source.geometry().discard {
            skip("no holes on this file system");
            continue;
        }
        let ops = trace(&source, op, plain);
        assert!(!ops.iter().any(|op| op.contains("Fsync")), "{ops:?}");
        let ops = trace(&source, op, fua);
        assert!(ops.len() >= 2 && ops[ops.len() - 1].contains("Fsync"), "{ops:?}");
    }
}

/// Operations that never complete simulate a hanging disk: each would occupy a thread.
#[test]
fn a_hanging_export_uses_only_its_share_of_workers() {
    let scratch = Scratch::disk();
    let (a, b) = (open(&scratch.file("hangs", 1 << 20)), open(&scratch.file("works", 1 << 20)));
    let ring = Ring::new(256).unwrap();
    let mut a = FileDevice::new(&a.shared, &ring, WakeHandle::idle()).unwrap();
    let mut b = FileDevice::new(&b.shared, &ring, WakeHandle::idle()).unwrap();
    assert_eq!(ring.add_workers(0).unwrap() as usize, 2 * WORKERS, "each brings its own");
    let sync = |tag| {
        let (op, flags) = (IoOp::Flush, IoFlags::default());
        Io { tag, op, flags, offset: 0, len: 0, buf: None }
    };
    for tag in 0..128 {
        a.submit(sync(tag)).unwrap();
    }
    // The ring has not been polled, so no operation has completed.
    assert_eq!(ring.running(), WORKERS, "the rest wait here");
    b.submit(sync(0)).unwrap();
    assert_eq!(ring.running(), WORKERS + 1, "the other is not delayed");
    // Waiting operations continue in order as earlier ones complete.
    let end = Clock.now() + Duration::from_secs(120);
    let mut tags = Vec::new();
    while tags.len() < 128 {
        assert!(Clock.now() < end);
        ring.turn_or_sleep(Some(Duration::from_millis(5))).unwrap();
        assert!(ring.running() <= WORKERS + 1);
        a.poll(Clock.now());
        while let Some(done) = a.reap() {
            assert_eq!(done.status, IoStatus::Ok);
            tags.push(done.tag);
        }
    }
    tags.sort_unstable();
    assert!(tags.into_iter().eq(0..128));
    drop((a, b));
    assert_eq!(ring.add_workers(0).unwrap(), 0);
}

#[test]
fn zeroes_are_written_if_nothing_faster_exists() {
    let scratch = Scratch::disk();
    let path = scratch.file("zeroes", 4 << 20);
    let source = open(&path);
    source.shared.zero_range.store(false, Ordering::Relaxed);
    let mut rig = Rig::new(&source, 0);
    let len = (3 << 20) + 512;
    assert_eq!(rig.write(0, &vec![1; len + 512]), IoStatus::Ok);
    let keep = IoFlags { no_unmap: true, fua: true, ..IoFlags::default() };
    assert_eq!(rig.clear(IoOp::WriteZeroes, 0, len as u64, keep), IoStatus::Ok);
    assert!(rig.read(0, len).iter().all(|b| *b == 0));
    assert_eq!(rig.read(len as u64, 512), [1; 512]);
    let ops = trace(&source, IoOp::WriteZeroes, keep);
    assert!(ops[0].starts_with("Write") && ops[1].contains("Fsync"), "{ops:?}");
    // With `fast_only`, the request fails instead.
    let fast = IoFlags { no_unmap: true, fast_only: true, ..IoFlags::default() };
    assert_eq!(rig.write(0, &[1; 512]), IoStatus::Ok);
    assert_eq!(rig.clear(IoOp::WriteZeroes, 0, 512, fast), IoStatus::Unsupported);
    assert_eq!(rig.read(0, 512), [1; 512]);
}

#[test]
fn a_discard_frees_space_and_zeroes_may_keep_it() {
    let scratch = Scratch::disk();
    let path = scratch.file("holes", 4 << 20);
    let source = open(&path);
    if !source.geometry().discard {
        skip("no holes on this file system");
        return;
    }
    let mut rig = Rig::new(&source, 0);
    let used = || std::fs::metadata(&path).unwrap().blocks() * 512;
    let fill = |rig: &mut Rig| {
        assert_eq!(rig.write_at(0, &vec![1; 2 << 20], 0, true), IoStatus::Ok);
        assert!(used() >= 2 << 20, "{}", used());
    };
    fill(&mut rig);
    assert_eq!(rig.clear(IoOp::Discard, 0, 2 << 20, IoFlags::default()), IoStatus::Ok);
    assert!(used() < 1 << 20, "{}", used());
    fill(&mut rig);
    let keep = IoFlags { no_unmap: true, ..IoFlags::default() };
    assert_eq!(rig.clear(IoOp::WriteZeroes, 0, 2 << 20, keep), IoStatus::Ok);
    assert!(used() >= 2 << 20, "{}", used());
    assert_eq!(rig.clear(IoOp::WriteZeroes, 0, 2 << 20, IoFlags::default()), IoStatus::Ok);
    assert!(used() < 1 << 20, "{}", used());
}

#[test]
fn submissions_beyond_the_limit_are_returned() {
    let scratch = Scratch::disk();
    let source = open(&scratch.file("bound", 1 << 20));
    let mut rig = Rig::new(&source, 0);
    for i in 0..INFLIGHT_MAX as u64 {
        let io = rig.transfer(IoOp::Read, i * 512, 0, 512);
        assert!(rig.device.submit(io).is_ok(), "IO {i}");
    }
    let io = rig.transfer(IoOp::Read, 0, 0, 512);
    assert!(rig.device.submit(io).is_err());
    assert_eq!(rig.drain().len(), INFLIGHT_MAX);
}

#[test]
fn io_beyond_the_end_of_a_shrunk_file_fails() {
    let scratch = Scratch::disk();
    let path = scratch.file("shrinks", 1 << 20);
    let source = open(&path);
    let mut rig = Rig::new(&source, 0);
    File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    for (offset, len) in [(8192, 4096), (0, 8192)] {
        let io = rig.transfer(IoOp::Read, offset, 0, len);
        // The status depends on whether the change has been noticed.
        assert!(matches!(rig.run(io), IoStatus::Io | IoStatus::Beyond));
    }
    assert_eq!(rig.read(0, 4096), vec![0; 4096]);
}

#[test]
fn a_write_does_not_extend_a_shrunk_file() {
    let scratch = Scratch::disk();
    let path = scratch.file("cut", 1 << 20);
    let source = open(&path);
    let mut rig = Rig::new(&source, 0);
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(8192).unwrap();
    // A flush examines the file; otherwise it can take up to a second to notice the change.
    let io = rig.io(IoOp::Flush, 0, 0);
    assert_eq!(rig.run(io), IoStatus::Io);
    assert!(source.shared.is_beyond(8193));
    assert_eq!(rig.write(4096, &[1; 4096]), IoStatus::Ok, "within what is left");
    assert_eq!(rig.write(4096, &[1; 4608]), IoStatus::Beyond);
    for fua in [false, true] {
        let flags = IoFlags { fua, ..IoFlags::default() };
        assert_eq!(rig.clear(IoOp::WriteZeroes, 16384, 4096, flags), IoStatus::Beyond);
    }
    assert_eq!(file.metadata().unwrap().len(), 8192);
    // The truncated part is lost, even if the file is extended again.
    file.set_len(1 << 20).unwrap();
    source.shared.examine();
    let io = rig.transfer(IoOp::Read, 16384, 0, 4096);
    assert_eq!(rig.run(io), IoStatus::Beyond);
}

#[test]
fn one_flush_fails_for_each_truncation() {
    let on_disk = Scratch::disk();
    let in_memory = Scratch::memory();
    for scratch in [Some(&on_disk), in_memory.as_ref()].into_iter().flatten() {
        let path = scratch.file("cut", 1 << 20);
        let source = open(&path);
        let mut rigs = [Rig::new(&source, 0), Rig::new(&source, 1)];
        let mut flush = |core: usize| {
            let io = rigs[core].io(IoOp::Flush, 0, 0);
            rigs[core].run(io)
        };
        let file = File::options().write(true).open(&path).unwrap();
        assert_eq!(flush(0), IoStatus::Ok);
        // Detected by the flush itself.
        file.set_len(512 << 10).unwrap();
        assert!(source.settle().is_err(), "stopping does not hide the error");
        assert_eq!([flush(1), flush(0), flush(1)], [IoStatus::Io, IoStatus::Ok, IoStatus::Ok]);
        assert!(source.settle().is_ok());
        // Detected before the flush, when the file has already been extended again.
        file.set_len(8192).unwrap();
        source.shared.examine();
        file.set_len(1 << 20).unwrap();
        assert_eq!([flush(0), flush(1), flush(0)], [IoStatus::Io, IoStatus::Ok, IoStatus::Ok]);
    }
}

#[test]
fn unusable_targets_are_refused_with_a_reason() {
    let scratch = Scratch::disk();
    let says = |path: &Path, words: &str| {
        for read_only in [false, true] {
            let text = refusal(path, read_only, Direct::Auto, None);
            assert!(text.contains(words), "{text}");
            assert!(text.starts_with(&path.display().to_string()), "{text}");
        }
    };
    says(&scratch.0, "is a directory");
    says(Path::new("/dev/null"), "is a character device");
    says(&scratch.0.join("missing"), "does not exist");
    says(&scratch.file("empty", 0), "has 0 bytes, less than one block of 512");
    says(&scratch.file("short", 511), "has 511 bytes");
    let socket = scratch.0.join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    says(&socket, "is a socket");
    drop(listener);
    let pipe = scratch.0.join("pipe");
    match Command::new("mkfifo").arg(&pipe).status() {
        Ok(status) if status.success() => says(&pipe, "is a pipe"),
        _ => skip("no mkfifo"),
    }
    let path = scratch.file("blocks", 2048);
    let text = refusal(&path, false, Direct::Auto, Some(4096));
    assert!(text.contains("less than one block of 4096"), "{text}");
}

#[test]
fn a_file_is_exported_for_writing_once() {
    let scratch = Scratch::disk();
    let path = scratch.file("locked", 4096);
    let first = open(&path);
    let text = refusal(&path, false, Direct::Auto, None);
    assert!(text.contains("is locked: it is already exported"), "{text}");
    assert!(FileSource::open(&path, READ_ONLY).is_ok(), "reading does not conflict");
    drop(first);
    open(&path);
}

#[test]
fn without_locks_a_writable_export_needs_the_no_lock_option() {
    let scratch = Scratch::disk();
    let path = scratch.file("unlocked", 4096);
    // NFS without lockd; FUSE, 9p and old kernels fail in other ways.
    const ENOLCK: i32 = 37;
    let locks = Locks {
        take: |_| Err(TryLockError::Error(io::Error::from_raw_os_error(ENOLCK))),
        probe: |_| Err(io::Error::from_raw_os_error(ENOLCK)),
    };
    let open = |how| FileSource::open_with(&path, &path, how, &locks);
    let text = open(FileOptions::default()).unwrap_err().to_string();
    assert!(text.contains("cannot be locked for writing: No locks available"), "{text}");
    assert!(text.ends_with("use `no-lock`"), "{text}");
    assert!(open(READ_ONLY).is_ok());
    assert!(open(FileOptions { no_lock: true, ..FileOptions::default() }).is_ok());
    // The option does not override a lock.
    let held = Locks { take: |_| Err(TryLockError::WouldBlock), ..lock::SYSTEM };
    let how = FileOptions { no_lock: true, ..FileOptions::default() };
    let text = FileSource::open_with(&path, &path, how, &held).unwrap_err().to_string();
    assert!(text.contains("is locked: it is already exported"), "{text}");
}

#[test]
fn a_file_on_hugetlbfs_is_not_exported_for_writing() {
    let file = match blkdev::huge_page_file() {
        Ok(file) => file,
        Err(error) => {
            skip(&format!("no huge pages: {error}"));
            return;
        }
    };
    file.set_len(2 << 20).unwrap();
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let text = refusal(&path, false, Direct::Auto, None);
    assert!(text.contains("is on hugetlbfs, where files cannot be written"), "{text}");
    assert!(FileSource::open(&path, READ_ONLY).is_ok());
}

/// Reruns one of this program's tests as an unprivileged user, or skips it.
fn rerun_as_nobody(test: &str, path: &Path) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("RTRS_UNREADABLE", path)
        .uid(65534)
        .gid(65534)
        .output();
    match output {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{text}");
            assert!(text.contains("1 passed"), "{text}");
        }
        Err(error) => {
            skip(&format!("cannot run as another user: {error}"));
        }
    }
}

#[test]
fn missing_permissions_are_named() {
    if let Some(dir) = std::env::var_os("RTRS_UNREADABLE").map(PathBuf::from) {
        let text = refusal(&dir.join("secret"), true, Direct::Auto, None);
        assert!(text.contains("cannot be read: Permission denied"), "{text}");
        let text = refusal(&dir.join("public"), false, Direct::Auto, None);
        assert!(text.contains("cannot be opened for writing: Permission denied"), "{text}");
        assert!(text.contains("export it with `ro`"), "{text}");
        assert!(FileSource::open(&dir.join("public"), READ_ONLY).is_ok());
        return;
    }
    let scratch = Scratch::below(&std::env::temp_dir());
    std::fs::set_permissions(&scratch.0, PermissionsExt::from_mode(0o755)).unwrap();
    for (name, mode) in [("secret", 0o000), ("public", 0o444)] {
        let path = scratch.file(name, 4096);
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }
    if File::open(scratch.0.join("secret")).is_ok() {
        // Permissions do not restrict root.
        let name = "backend::file::tests::missing_permissions_are_named";
        rerun_as_nobody(name, &scratch.0);
        return;
    }
    let text = refusal(&scratch.0.join("secret"), true, Direct::Auto, None);
    assert!(text.contains("cannot be read"), "{text}");
    let text = refusal(&scratch.0.join("public"), false, Direct::Auto, None);
    assert!(text.contains("cannot be opened for writing"), "{text}");
}

/// A loop device over a file, detached at the end of the test.
struct Loop(PathBuf);

impl Loop {
    fn over(path: &Path, options: &[&str]) -> Option<Self> {
        let output =
            Command::new("losetup").args(options).args(["--find", "--show"]).arg(path).output();
        match output {
            Ok(output) if output.status.success() => {
                Some(Self(String::from_utf8(output.stdout).unwrap().trim().into()))
            }
            Ok(output) => {
                skip(&format!("losetup: {}", String::from_utf8_lossy(&output.stderr).trim()));
                None
            }
            Err(error) => {
                skip(&format!("losetup: {error}"));
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn block_devices_conform() {
    let scratch = Scratch::disk();
    for (sectors, direct) in
        [("512", Direct::Auto), ("512", Direct::Off), ("4096", Direct::On), ("512", Direct::On)]
    {
        let path = scratch.file("loop", 8 << 20);
        let Some(device) = Loop::over(&path, &["--sector-size", sectors]) else { return };
        let source =
            FileSource::open(&device.0, FileOptions { direct, ..FileOptions::default() }).unwrap();
        let g = source.geometry();
        assert_eq!(source.is_direct(), direct != Direct::Off);
        assert_eq!((g.size, g.logical_block.to_string().as_str()), (8 << 20, sectors));
        conforms(source.clone());
        if g.discard {
            let mut rig = Rig::new(&source, 0);
            assert_eq!(rig.write_at(0, &vec![1; 2 << 20], 0, true), IoStatus::Ok);
            let before = std::fs::metadata(&path).unwrap().blocks();
            assert_eq!(rig.clear(IoOp::Discard, 0, 2 << 20, IoFlags::default()), IoStatus::Ok);
            assert!(std::fs::metadata(&path).unwrap().blocks() < before, "space comes back");
            // This is more discards than the thread's queue holds.
            for i in 0..INFLIGHT_MAX as u64 {
                let io = rig.io(IoOp::Discard, i * u64::from(g.logical_block), g.logical_block);
                assert!(rig.device.submit(io).is_ok(), "discard {i}");
            }
            let ended = rig.drain();
            assert_eq!(ended.len(), INFLIGHT_MAX);
            assert!(ended.iter().all(|(_, status)| status.is_ok()));
        } else {
            skip("this loop device does not support discard");
        }
        let text = refusal(&device.0, false, direct, None);
        assert!(text.contains("in use") || text.contains("locked"), "{text}");
        if sectors == "4096" {
            let text = refusal(&device.0, true, direct, Some(512));
            assert!(text.contains("needs blocks of 4096 bytes"), "{text}");
        }
    }
}

#[test]
fn a_read_only_block_device_requires_ro() {
    let scratch = Scratch::disk();
    let path = scratch.file("loop", 1 << 20);
    let Some(device) = Loop::over(&path, &["--read-only"]) else { return };
    let text = refusal(&device.0, false, Direct::Auto, None);
    assert!(text.contains("export it with `ro`"), "{text}");
    conforms(FileSource::open(&device.0, READ_ONLY).unwrap());
}
