//! Tests of a state directory on a full disk.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::thread;
use std::time::{Duration, Instant};

use rtrs_core::tests::certificates::TestDir;

use super::StateDir;
use super::disk_file::DiskFile;
use crate::engine::epoch_file::{EpochFile, Medium};

/// Makes the next replacement of the file fail as on a full disk.
fn fill(path: &std::path::Path) {
    symlink("/dev/full", path.with_extension("new")).unwrap();
}

#[test]
fn an_open_on_a_full_disk_names_the_real_error() {
    let scratch = TestDir::new("full-open");
    let path = scratch.0.join("vol");
    fill(&path);
    let mut file = EpochFile::open(DiskFile::new(&path), 7).unwrap();
    assert_eq!(file.number(), 7);
    let error = file.take_cleared().expect("not allocated");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
    assert!(file.take_cleared().is_none(), "reported once");
    fill(&path);
    file.reopen(8).unwrap();
    assert_eq!(file.take_cleared().and_then(|e| e.raw_os_error()), Some(libc::ENOSPC));
    assert_eq!(EpochFile::look(DiskFile::new(&path)).unwrap(), None, "a fresh epoch is next");
    assert_eq!(file.reopen(9).unwrap(), 9);
    assert!(file.take_cleared().is_none(), "there is room again");
    assert_eq!(EpochFile::look(DiskFile::new(&path)).unwrap(), Some(9));
}

#[test]
fn an_epoch_opened_on_a_full_disk_is_saved_when_there_is_room() {
    let scratch = TestDir::new("full-later");
    let state = StateDir::open(Some(&scratch.0), None);
    let path = state.store.as_ref().unwrap().path("vol");
    fill(&path);
    let epoch = state.epoch("vol", false).unwrap();
    let (base, rises) = (epoch.number(), epoch.raise());
    let end = Instant::now() + Duration::from_secs(60);
    while !epoch.is_saved(rises) {
        assert!(Instant::now() < end, "not saved");
        thread::sleep(Duration::from_millis(1));
    }
    drop(epoch);
    assert_eq!(state.epoch("vol", false).unwrap().number(), base + 1);
}

/// The lock file cannot be created, but an earlier server has left an intact epoch.
#[test]
fn an_epoch_that_cannot_be_kept_is_not_used_by_a_later_server() {
    let scratch = TestDir::new("full-lock");
    let state = StateDir::open(Some(&scratch.0), None);
    let path = state.store.as_ref().unwrap().path("vol");
    let before = state.epoch("vol", false).unwrap().number();
    let lock = path.with_extension("lock");
    symlink("/dev/full/x", &lock).unwrap();
    let error = File::options().write(true).create(true).truncate(false).open(&lock);
    assert!(error.is_err_and(|e: io::Error| e.kind() == io::ErrorKind::NotADirectory));
    // Not saved: a later server must not continue with the earlier epoch.
    state.epoch("vol", false).unwrap().raise();
    fs::remove_file(&lock).unwrap();
    assert_ne!(state.epoch("vol", false).unwrap().number(), before);
    assert!(DiskFile::new(&path).read().unwrap().is_some());
}
