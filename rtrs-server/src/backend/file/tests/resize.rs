//! Tests of targets that grow, and of devices that are resized by command.

use std::cell::Cell;

use rtrs_core::block::TargetSize;

use super::*;

const OLD: u64 = 1 << 20;

fn set_len(path: &Path, len: u64) {
    File::options().write(true).open(path).unwrap().set_len(len).unwrap();
}

fn len(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

/// Resizes without losing data.
fn resize(source: &FileSource, size: u64) {
    source.resize(size, &|| panic!("nothing is lost")).unwrap();
}

#[test]
fn a_grown_file_is_used_by_every_queue() {
    let scratch = Scratch::disk();
    let path = scratch.file("grows", OLD);
    let source = open(&path);
    let mut rigs = [Rig::new(&source, 0), Rig::new(&source, 1)];
    assert_eq!(rigs[0].write(OLD, &[1; 4096]), IoStatus::NoSpace);
    // A partial block is not exported.
    set_len(&path, 2 * OLD + 300);
    source.shared.examine();
    assert_eq!(source.geometry().size, 2 * OLD);
    for rig in &mut rigs {
        assert_eq!(rig.write(OLD, &[1; 4096]), IoStatus::Ok);
        assert_eq!(rig.write(2 * OLD, &[1; 4096]), IoStatus::NoSpace);
        rig.device.refresh();
        assert_eq!(rig.device.geometry().size, 2 * OLD);
    }
    // A flush examines the size too.
    set_len(&path, 3 * OLD);
    let io = rigs[0].io(IoOp::Flush, 0, 0);
    assert_eq!(rigs[0].run(io), IoStatus::Ok);
    assert_eq!(source.geometry().size, 3 * OLD);
    // Detected without a request.
    set_len(&path, 4 * OLD);
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while source.geometry().size != 4 * OLD {
        assert!(std::time::Instant::now() < end, "it was not noticed");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_stale_size_of_a_grown_target_is_not_a_truncation() {
    let scratch = Scratch::disk();
    let path = scratch.file("grows", OLD);
    let source = open(&path);
    resize(&source, 2 * OLD);
    source.shared.note(OLD, true);
    assert!(!source.shared.is_beyond(2 * OLD));
    let size = TargetSize { bytes: 2 * OLD, was_cut: None, is_fixed: false };
    assert_eq!(source.target_size().unwrap(), size);
}

#[test]
fn a_resize_sets_the_length_of_the_file() {
    let scratch = Scratch::disk();
    let path = scratch.file("set", OLD);
    let source = open(&path);
    let mut rig = Rig::new(&source, 0);
    resize(&source, 4 * OLD);
    assert_eq!((source.geometry().size, len(&path)), (4 * OLD, 4 * OLD));
    assert_eq!(rig.write(3 * OLD, &[1; 4096]), IoStatus::Ok);
    // When shrinking, the loss is reported after new writes to the range are refused, and before
    // the data is removed.
    let notified = Cell::new(0);
    let lost = || {
        notified.set(notified.get() + 1);
        assert_eq!((source.geometry().size, len(&path)), (OLD, 4 * OLD));
        Ok(())
    };
    // If the loss cannot be recorded, nothing is lost: the resize fails.
    let error = source.resize(OLD, &|| Err(io::Error::other("no room"))).unwrap_err();
    assert_eq!((error.to_string(), source.geometry().size), ("no room".into(), 4 * OLD));
    assert_eq!(rig.write(3 * OLD, &[1; 4096]), IoStatus::Ok);
    source.resize(OLD, &lost).unwrap();
    assert_eq!((notified.get(), source.geometry().size, len(&path)), (1, OLD, OLD));
    assert_eq!(rig.write(3 * OLD, &[1; 4096]), IoStatus::NoSpace);
    let io = rig.io(IoOp::Flush, 0, 0);
    assert_eq!(rig.run(io), IoStatus::Ok, "it is not cut");
    // A change that began before the resize may have extended the file again.
    set_len(&path, 4 * OLD);
    source.shared.examine();
    assert_eq!(source.geometry().size, OLD);
    resize(&source, 4 * OLD);
    assert_eq!(rig.read(3 * OLD, 4096), [0; 4096]);
    set_len(&path, 5 * OLD);
    source.shared.examine();
    assert_eq!(source.geometry().size, 5 * OLD, "it follows again");
}

#[test]
fn a_resize_accepts_a_truncation_and_reports_the_loss() {
    let scratch = Scratch::disk();
    let path = scratch.file("cut", OLD);
    let source = open(&path);
    let mut rig = Rig::new(&source, 0);
    // A longer file loses data again, even if the first loss was reported.
    for (reported, grown) in [(false, OLD), (true, OLD), (false, 2 * OLD), (true, 2 * OLD)] {
        set_len(&path, 8192);
        source.shared.examine();
        set_len(&path, grown);
        source.shared.examine();
        assert_eq!(source.geometry().size, OLD, "a cut target does not grow by itself");
        let cut = TargetSize { bytes: grown, was_cut: Some(8192), is_fixed: false };
        assert_eq!(source.target_size().unwrap(), cut);
        if reported {
            let io = rig.io(IoOp::Flush, 0, 0);
            assert_eq!(rig.run(io), IoStatus::Io);
        }
        let notified = Cell::new(false);
        source
            .resize(OLD, &|| {
                notified.set(true);
                Ok(())
            })
            .unwrap();
        assert_eq!((notified.get(), len(&path)), (!reported || grown > OLD, OLD));
        assert_eq!(rig.write(16384, &[1; 4096]), IoStatus::Ok);
        let io = rig.io(IoOp::Flush, 0, 0);
        assert_eq!(rig.run(io), IoStatus::Ok);
    }
}

#[test]
fn targets_that_cannot_be_resized_are_unchanged() {
    let scratch = Scratch::disk();
    let path = scratch.file("ro", OLD);
    let source = FileSource::open(&path, READ_ONLY).unwrap();
    let error = source.resize(2 * OLD, &|| Ok(())).unwrap_err().to_string();
    assert!(error.contains("opened read-only"), "{error}");
    assert!(source.resize(4096, &|| panic!("nothing is lost")).is_err());
    assert_eq!((source.geometry().size, len(&path)), (OLD, OLD));
    set_len(&path, 2 * OLD);
    resize(&source, 2 * OLD);
    let path = scratch.file("loop", OLD);
    let Some(device) = Loop::over(&path, &[]) else { return };
    let source = open(&device.0);
    let error = source.resize(2 * OLD, &|| Ok(())).unwrap_err().to_string();
    assert!(error.contains("resize the device first"), "{error}");
    assert!(source.target_size().unwrap().is_fixed);
    set_len(&path, 2 * OLD);
    let grown = Command::new("losetup").arg("--set-capacity").arg(&device.0).status();
    assert!(grown.unwrap().success());
    source.shared.examine();
    assert_eq!(source.geometry().size, 2 * OLD, "a block device that grows");
    let mut rig = Rig::new(&source, 0);
    assert_eq!(rig.write(OLD, &[1; 4096]), IoStatus::Ok);
}
