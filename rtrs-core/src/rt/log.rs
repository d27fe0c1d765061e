//! A log that nobody waits for: lines go through a bounded queue to a thread that writes them.
//!
//! A shard must not write its log itself: a pipe that nobody reads, a terminal that is stopped, a
//! disk that hangs keep a writer as long as they please, and all IO of the shard with it. A line
//! that finds the queue full is lost; the number of lost lines is logged when there is room again.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Lines that wait to be written at most.
const LINES_MAX: usize = 1024;

enum Item {
    Line(Box<[u8]>),
    /// All before it is written.
    Flush(mpsc::Sender<()>),
}

/// The writing end: one `write` is one line. Never waits, never fails.
#[derive(Clone, Debug)]
pub struct Log {
    queue: mpsc::SyncSender<Item>,
    lost: Arc<AtomicU64>,
}

impl Log {
    /// Starts the thread, which ends when the last writing end is gone. `lost_lines` makes the
    /// line that says how many were lost.
    ///
    /// # Errors
    /// The system's error when there can be no thread.
    pub fn start(
        out: impl Write + Send + 'static,
        lost_lines: impl Fn(u64) -> String + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, items) = mpsc::sync_channel(LINES_MAX);
        let lost = Arc::new(AtomicU64::new(0));
        let log = Self { queue, lost: Arc::clone(&lost) };
        std::thread::Builder::new().name("log".into()).spawn(move || {
            pour(&items, out, &lost, lost_lines);
        })?;
        Ok(log)
    }

    /// Waits until what was logged so far is written, `patience` at most.
    pub fn settle(&self, patience: Duration) {
        let (done, written) = mpsc::channel();
        if self.queue.try_send(Item::Flush(done)).is_ok() {
            let _ = written.recv_timeout(patience);
        }
    }
}

/// Held by a program's main part: what was logged is written when that ends, or given up soon.
#[derive(Debug)]
pub struct SettleAtEnd(pub Log);

impl Drop for SettleAtEnd {
    fn drop(&mut self) {
        self.0.settle(Duration::from_secs(1));
    }
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.queue.try_send(Item::Line(line.into())).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes what comes. A line that cannot be written is lost: there is nobody to tell.
fn pour(
    items: &mpsc::Receiver<Item>,
    mut out: impl Write,
    lost: &AtomicU64,
    lost_lines: impl Fn(u64) -> String,
) {
    for item in items {
        match item {
            Item::Line(line) => {
                let _ = out.write_all(&line);
                let count = lost.swap(0, Ordering::Relaxed);
                if count > 0 {
                    let _ = out.write_all(lost_lines(count).as_bytes());
                }
            }
            Item::Flush(done) => {
                let _ = out.flush();
                let _ = done.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Kept;

    /// Writes into a channel, a permission from the other at a time.
    struct Slow(mpsc::Receiver<()>, mpsc::Sender<String>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
            self.0.recv().map_err(gone)?;
            let text = String::from_utf8_lossy(bytes).into_owned();
            self.1.send(text).map_err(|_| io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn who_logs_does_not_wait_and_what_is_lost_is_counted() {
        let (permit, permits) = mpsc::channel();
        let (written, texts) = mpsc::channel();
        let mut log =
            Log::start(Slow(permits, written), |count| format!("{count} lines of it lost\n"))
                .unwrap();
        let more = 10;
        // One may be in the writer's hand already.
        for n in 0..LINES_MAX + 1 + more {
            log.write_all(format!("line {n}\n").as_bytes()).unwrap();
        }
        log.settle(Duration::from_millis(1));
        let mut all = String::new();
        let limit = Duration::from_secs(10);
        while !all.contains("lost") {
            permit.send(()).unwrap();
            all.push_str(&texts.recv_timeout(limit).unwrap());
        }
        assert!(all.starts_with("line 0\n"), "{all}");
        let lost = all.lines().find_map(|line| line.split_once(" lines of")?.0.parse().ok());
        assert!(lost.is_some_and(|lost: usize| (more..=more + 1).contains(&lost)), "{lost:?}");
        // Lines that cannot be written are passed over, and the thread ends with its last user.
        drop((permit, log));
        assert_eq!(texts.recv_timeout(limit), Err(mpsc::RecvTimeoutError::Disconnected));
    }

    #[test]
    fn what_was_logged_is_there_when_it_has_settled() {
        let kept = Kept::default();
        let mut log = Log::start(kept.clone(), |_| String::new()).unwrap();
        log.write_all(b"one\n").unwrap();
        log.write_all(b"two\n").unwrap();
        log.settle(Duration::from_secs(10));
        assert_eq!(kept.text(), "one\ntwo\n");
    }
}
