//! Tests of errors from changes with FUA, which may come from an earlier write-back.

use super::*;
use workers::end;

#[test]
fn a_failed_sync_in_a_write_is_not_a_refusal() {
    const ERRNOS: [(i32, IoStatus); 7] = [
        (30, IoStatus::ReadOnly),
        (13, IoStatus::ReadOnly),
        (22, IoStatus::Invalid),
        (28, IoStatus::NoSpace),
        (5, IoStatus::Io),
        (libc::EFBIG, IoStatus::Io),
        (libc::EDQUOT, IoStatus::NoSpace),
    ];
    let scratch = Scratch::disk();
    let path = scratch.file("errors", 1 << 20);
    let how = FileOptions { direct: Direct::Off, ..FileOptions::default() };
    let source = FileSource::open(&path, how).unwrap();
    let ring = Ring::new(256).unwrap();
    let region = Region::new(4096).unwrap();
    for (errno, plain) in ERRNOS {
        let lost = if plain.is_refusal() { IoStatus::Io } else { plain };
        for (op, fua, expected) in [
            (IoOp::Write, true, lost),
            (IoOp::Write, false, plain),
            (IoOp::WriteZeroes, true, lost),
            (IoOp::Flush, false, plain),
        ] {
            let mut device = FileDevice::new(&source.shared, &ring, WakeHandle::idle()).unwrap();
            let buf = (op == IoOp::Write).then(|| region.whole());
            let len = if op == IoOp::Flush { 0 } else { 4096 };
            let flags = IoFlags { fua, ..IoFlags::default() };
            device.submit(Io { tag: 7, op, flags, offset: 0, len, buf }).unwrap();
            if op == IoOp::WriteZeroes {
                // The sync follows the change.
                end(&mut device, 0..1, 0);
            }
            end(&mut device, 0..1, -errno);
            let done = device.reap().map(|done| (done.status, i32::from(done.errno)));
            assert_eq!(done, Some((expected, errno)), "{op:?}, FUA {fua}");
        }
    }
}
