//! Tests of paths that lead elsewhere, and of sizes that change while IO runs.

use rtrs_core::block::TargetName;

use super::*;

/// Waits until the target's path is examined.
fn examine(source: &FileSource) {
    let number = source.examine_name();
    while !source.is_examined(number) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_path_leading_to_another_file_is_detected() {
    let scratch = Scratch::disk();
    let path = scratch.file("vol", 1 << 20);
    let (other, aside) = (scratch.file("other", 1 << 20), path.with_extension("aside"));
    let source = open(&path);
    let look = || {
        examine(&source);
        source.target_name().unwrap()
    };
    assert_eq!(look(), TargetName::Kept);
    std::fs::rename(&path, &aside).unwrap();
    assert_eq!(look(), TargetName::Missing, "renamed");
    assert!(!source.is_deleted(), "it has another name");
    std::fs::rename(&other, &path).unwrap();
    assert_eq!(look(), TargetName::Replaced);
    std::fs::rename(&aside, &path).unwrap();
    assert_eq!(look(), TargetName::Kept, "renamed back");
    std::fs::write(scratch.file("new", 1 << 20), [1; 4096]).unwrap();
    std::fs::rename(path.with_file_name("new"), &path).unwrap();
    assert_eq!(look(), TargetName::Replaced, "its inode has no name");
    assert!(source.is_deleted());
    std::fs::remove_file(&path).unwrap();
    assert_eq!(look(), TargetName::Missing);
    assert!(source.is_deleted());
}

#[test]
fn a_file_that_has_grown_meanwhile_is_not_truncated_without_permission() {
    let scratch = Scratch::disk();
    let path = scratch.file("grown", 1 << 20);
    let source = open(&path);
    let len = || std::fs::metadata(&path).unwrap().len();
    let why = source.shared.set_len(1 << 16, false).unwrap_err().to_string();
    assert!(why.contains("grown to 1048576 bytes in the meantime"), "{why}");
    assert_eq!(len(), 1 << 20);
    source.shared.set_len(1 << 16, true).unwrap();
    assert_eq!(len(), 1 << 16);
    source.shared.set_len(1 << 20, false).unwrap();
    assert_eq!(len(), 1 << 20);
}

/// Checks that a write begun by a queue does not run after the truncation.
#[test]
fn a_shrink_waits_for_writes_beyond_the_new_end() {
    let scratch = Scratch::disk();
    let path = scratch.file("shrunk", 1 << 20);
    let source = open(&path);
    let mut rigs = [Rig::new(&source, 0), Rig::new(&source, 1)];
    // The second queue has only a change below the end, the first one a change beyond it.
    for (rig, offset) in rigs.iter_mut().zip([512 << 10, 0]) {
        let io = rig.transfer(IoOp::Write, offset, 0, 4096);
        rig.device.submit(io).unwrap();
    }
    let cutting = source.clone();
    let cut = std::thread::spawn(move || cutting.resize(8192, &|| Ok(())));
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while source.geometry().size != 8192 {
        assert!(std::time::Instant::now() < end, "the size is lowered first");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20, "it waits for the write");
    for rig in &mut rigs {
        assert_eq!(
            rig.drain().iter().map(|(_, status)| *status).collect::<Vec<_>>(),
            [IoStatus::Ok]
        );
    }
    cut.join().unwrap().unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192);
    let io = rigs[0].transfer(IoOp::Write, 512 << 10, 0, 4096);
    assert_eq!(rigs[0].run(io), IoStatus::NoSpace, "new writes end there");
}
