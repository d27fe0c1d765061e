//! Threads that cannot take a signal, because they are waiting in the kernel for a file system or
//! disk that does not answer.
//!
//! The C library changes the user of all threads by sending a signal to each, and waits for all of
//! them without a limit. During that time no thread can start or exit, so a server that waits there
//! cannot even stop. The change must therefore not begin while a thread is stuck.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Interval between checks of the threads.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Waits up to `within` until each thread has been able to take a signal. The error names a thread
/// that was not. `tasks` is the directory of the threads in /proc.
pub(super) fn wait_for_stuck_threads(tasks: &Path, within: Duration) -> Result<(), String> {
    let until = Instant::now() + within;
    let mut stuck = stuck_threads(tasks);
    loop {
        let Some(name) = stuck.values().next() else { return Ok(()) };
        if Instant::now() >= until {
            return Err(format!(
                "thread {name} waits for a file system or disk that does not respond; repair that \
                 file system or disk, or remove its exports"
            ));
        }
        thread::sleep(LOOK_AGAIN);
        let now = stuck_threads(tasks);
        stuck.retain(|thread, _| now.contains_key(thread));
    }
}

/// Returns the names of the threads that cannot take a signal now, by directory name.
fn stuck_threads(tasks: &Path) -> BTreeMap<String, String> {
    let look = |entry: io::Result<fs::DirEntry>| {
        let entry = entry.ok()?;
        // The thread may have exited.
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
        let is_stuck = line("State:")?.trim_start().starts_with('D');
        let name = line("Name:")?.trim().to_owned();
        is_stuck.then(|| (entry.file_name().to_string_lossy().into_owned(), name))
    };
    fs::read_dir(tasks).into_iter().flatten().filter_map(look).collect()
}

#[cfg(test)]
mod tests {
    use rtrs_core::tests::certificates::TestDir;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn set(tasks: &Path, thread: &str, state: &str) {
        let dir = tasks.join(thread);
        fs::create_dir_all(&dir).unwrap();
        let status = format!("Name:\texport-{thread}\nState:\t{state}\nTgid:\t1\n");
        // The file is replaced as a whole, because it may be read at any time.
        fs::write(dir.join("new"), status).unwrap();
        fs::rename(dir.join("new"), dir.join("status")).unwrap();
    }

    #[test]
    fn only_a_thread_that_stays_stuck_is_reported() {
        let dir = TestDir::new("stuck-threads");
        set(&dir.0, "1", "S (sleeping)");
        set(&dir.0, "2", "D (disk sleep)");
        set(&dir.0, "3", "D (disk sleep)");
        // A thread that has exited.
        fs::create_dir(dir.0.join("4")).unwrap();
        let why = wait_for_stuck_threads(&dir.0, Duration::ZERO).unwrap_err();
        assert!(why.starts_with("thread export-2 waits for a file system"), "{why}");
        thread::scope(|scope| {
            let waits = scope.spawn(|| wait_for_stuck_threads(&dir.0, LONG));
            set(&dir.0, "2", "R (running)");
            set(&dir.0, "1", "D (disk sleep)");
            set(&dir.0, "3", "S (sleeping)");
            thread::sleep(2 * LOOK_AGAIN);
            // Each thread waits for a disk briefly, but none all the time.
            set(&dir.0, "1", "S (sleeping)");
            assert_eq!(waits.join().unwrap(), Ok(()));
        });
        assert_eq!(wait_for_stuck_threads(Path::new("/proc/self/task"), LONG), Ok(()));
    }
}
