//! Directories whose files must not be removed because of their age.
//!
//! systemd-tmpfiles removes old files below `/tmp`, where the run directory of a user may be. It
//! skips directories with a BSD lock of another process.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Time for systemd-tmpfiles to release the lock that it takes while it cleans the directory.
const LOCK_TIME_MAX: Duration = Duration::from_secs(2);

/// Directory whose files do not age out as long as this value lives. Any number of processes can
/// hold the same directory.
#[derive(Debug)]
pub struct HeldDir {
    _locked: File,
}

impl HeldDir {
    pub(super) fn new(path: &Path) -> io::Result<Self> {
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let dir = File::options().read(true).custom_flags(flags).open(path)?;
        let deadline = Instant::now() + LOCK_TIME_MAX;
        loop {
            match dir.try_lock_shared() {
                Ok(()) => return Ok(Self { _locked: dir }),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;
    use std::time::SystemTime;

    use super::*;

    /// Time for which systemd-tmpfiles keeps files in the test.
    const AGE: Duration = Duration::from_secs(86_400);

    #[test]
    fn systemd_tmpfiles_leaves_held_directories_alone() {
        let name = format!("rtrs-held-dir-{}", std::process::id());
        let place = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&place);
        let [held, other] = ["held", "other"].map(|name| place.join(name));
        for dir in [&held, &other] {
            fs::create_dir_all(dir).unwrap();
            let file = File::create(dir.join("v.life")).unwrap();
            file.set_modified(SystemTime::now() - AGE * 20).unwrap();
        }
        let [first, second] = [HeldDir::new(&held).unwrap(), HeldDir::new(&held).unwrap()];
        drop(first);
        let config = place.join("tmpfiles.conf");
        // Only the time of modification: the test has just created the files.
        fs::write(&config, format!("d {} - - - m:1d\n", place.display())).unwrap();
        let clean = || Command::new("systemd-tmpfiles").arg("--clean").arg(&config).output();
        let left = |dir: &Path| dir.join("v.life").exists();
        match clean() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => {
                assert!(left(&held), "{done:?}");
                if !left(&other) {
                    drop(second);
                    let done = clean();
                    assert!(!left(&held), "a directory that nobody holds: {done:?}");
                }
            }
        }
        fs::remove_dir_all(&place).unwrap();
    }
}
