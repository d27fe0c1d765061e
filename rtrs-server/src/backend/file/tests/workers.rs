//! Tests of the limits on operations that block in worker threads.

use super::*;

/// Completes a slot's operation as the system would, for a device whose ring is never polled.
pub(super) fn end(device: &mut FileDevice, slots: std::ops::Range<u64>, result: i32) {
    for token in slots {
        let fd = Fd::new(File::open("/dev/null").unwrap());
        device.settle(Completed { token, op: Op::Fsync { fd, data_only: true }, result });
    }
}

/// Number of operations submitted since the last call: those that fail instead of blocking, and
/// those that may block.
fn submitted(device: &mut FileDevice) -> (usize, usize) {
    let trace = std::mem::take(&mut device.trace);
    let nowait = trace.iter().filter(|op| op.ends_with("Nowait")).count();
    (nowait, trace.len() - nowait)
}

#[test]
fn direct_io_uses_a_worker_only_if_it_would_block() {
    const EAGAIN: i32 = 11;
    const EOPNOTSUPP: i32 = 95;
    let scratch = Scratch::disk();
    let path = scratch.file("nowait", 1 << 20);
    let how = FileOptions { direct: Direct::On, ..FileOptions::default() };
    let source = match FileSource::open(&path, how) {
        Ok(source) => source,
        Err(error) => {
            skip(&error.to_string());
            return;
        }
    };
    let ring = Ring::new(256).unwrap();
    let new = || {
        let mut device = FileDevice::new(&source.shared, &ring, WakeHandle::idle()).unwrap();
        // The tests may run on overlayfs, where these differ.
        (device.workers.nowait, device.workers.blocks) = (true, false);
        device
    };
    let region = Region::new(4096).unwrap();
    let submit = |device: &mut FileDevice, op, tags: std::ops::Range<u64>| {
        let buf = || (op == IoOp::Write).then(|| region.whole());
        let len = if op == IoOp::Flush { 0 } else { 4096 };
        for tag in tags {
            let io = Io { tag, op, flags: IoFlags::default(), offset: 0, len, buf: buf() };
            device.submit(io).unwrap();
        }
    };
    let share = WORKERS as u64;

    // Nothing is limited while no operation would block. The first slots are taken in order.
    let mut device = new();
    submit(&mut device, IoOp::Write, 0..100);
    assert_eq!(submitted(&mut device), (100, 0));
    // Operations that would block are submitted again, as many as there are workers.
    end(&mut device, 0..share + 8, -EAGAIN);
    assert_eq!(submitted(&mut device), (0, WORKERS));
    end(&mut device, 0..1, 4096);
    assert_eq!(submitted(&mut device), (0, 1), "the next one waiting");
    end(&mut device, 99..100, 4096);
    assert_eq!(submitted(&mut device), (0, 0), "it had no worker to give");
    // Without NOWAIT there is no limit, not even for waiting operations.
    end(&mut device, 98..99, -EOPNOTSUPP);
    assert_eq!(submitted(&mut device), (0, 1));
    end(&mut device, 1..2, 4096);
    assert_eq!(submitted(&mut device), (0, 7), "all that waited");

    let mut device = new();
    submit(&mut device, IoOp::Write, 0..50);
    assert_eq!(submitted(&mut device), (50, 0));
    end(&mut device, 0..50, -EOPNOTSUPP);
    assert_eq!(submitted(&mut device), (0, 50), "each again, none waits");
    submit(&mut device, IoOp::Write, 50..60);
    assert_eq!(submitted(&mut device), (0, 10), "not tried anymore");
    submit(&mut device, IoOp::Flush, 60..100);
    assert_eq!(submitted(&mut device), (0, WORKERS), "syncs are still limited");
    // An error unrelated to NOWAIT is the IO's result.
    end(&mut device, 0..1, -EOPNOTSUPP);
    assert_eq!(device.reap().map(|done| done.status), Some(IoStatus::Unsupported));
}

/// The submission itself may block if the file system cannot tell whether a read would.
#[test]
fn all_io_of_a_file_system_that_may_block_runs_in_workers() {
    let scratch = Scratch::disk();
    let path = scratch.file("blocks", 1 << 20);
    let how = FileOptions { direct: Direct::Off, ..FileOptions::default() };
    let source = FileSource::open(&path, how).unwrap();
    let ring = Ring::new(256).unwrap();
    let mut device = FileDevice::new(&source.shared, &ring, WakeHandle::idle()).unwrap();
    device.workers.blocks = true;
    let region = Region::new(4096).unwrap();
    for (tag, op) in (0..80).zip([IoOp::Read, IoOp::Write].into_iter().cycle()) {
        let (flags, buf) = (IoFlags::default(), Some(region.whole()));
        device.submit(Io { tag, op, flags, offset: 0, len: 4096, buf }).unwrap();
    }
    let trace = std::mem::take(&mut device.trace);
    assert!(trace.iter().all(|op| op.ends_with("Worker")), "{trace:?}");
    assert_eq!(trace.len(), WORKERS, "the others wait");
}

#[test]
fn cached_writes_to_a_device_without_nonblocking_writes_are_limited() {
    const EOPNOTSUPP: i32 = 95;
    let scratch = Scratch::disk();
    let path = scratch.file("cached", 1 << 20);
    let how = FileOptions { direct: Direct::Off, ..FileOptions::default() };
    let source = FileSource::open(&path, how).unwrap();
    let ring = Ring::new(256).unwrap();
    let mut device = FileDevice::new(&source.shared, &ring, WakeHandle::idle()).unwrap();
    // A real device would need root, so the test uses a file.
    (device.workers.nowait, device.workers.cached_device) = (true, true);
    let region = Region::new(4096).unwrap();
    let submit = |device: &mut FileDevice, tags: std::ops::Range<u64>| {
        for tag in tags {
            let (op, flags, buf) = (IoOp::Write, IoFlags::default(), Some(region.whole()));
            device.submit(Io { tag, op, flags, offset: 0, len: 4096, buf }).unwrap();
        }
        submitted(device)
    };
    assert_eq!(submit(&mut device, 0..50), (50, 0));
    end(&mut device, 0..50, -EOPNOTSUPP);
    assert_eq!(submitted(&mut device), (0, WORKERS), "the others wait");
    assert_eq!(submit(&mut device, 50..60), (0, 0), "not tried anymore");
    end(&mut device, 0..1, 4096);
    assert_eq!(submitted(&mut device), (0, 1), "the next one waiting");
}
