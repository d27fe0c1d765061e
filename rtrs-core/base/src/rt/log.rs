//! Non-blocking log: lines pass through a bounded queue to a thread that writes them.
//!
//! A shard must not write its log itself: a pipe without a reader, a stopped terminal or a hanging
//! disk can block the writer indefinitely, and all IO of the shard with it. If the queue is full,
//! lines are lost; their number is logged once there is room again.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Maximum number of queued lines.
const LINES_MAX: usize = 1024;

enum Item {
    Line(Box<[u8]>),
    /// Request to confirm that all earlier lines were written.
    Flush(mpsc::Sender<()>),
}

/// Writing end of the log: one `write` is one line. Never waits, never fails.
#[derive(Clone, Debug)]
pub struct Log {
    queue: mpsc::SyncSender<Item>,
    lost: Arc<AtomicU64>,
}

impl Log {
    /// Starts the thread, which ends when the last writing end is dropped. `lost_lines` formats the
    /// line that reports the number of lost lines.
    ///
    /// # Errors
    /// Returns the system's error if the thread cannot be started.
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

    /// Waits for at most `patience` until everything logged so far has been written.
    pub fn settle(&self, patience: Duration) {
        let (done, written) = mpsc::channel();
        if self.queue.try_send(Item::Flush(done)).is_ok() {
            let _ = written.recv_timeout(patience);
        }
    }
}

/// Guard held by a program's main function: when dropped, it waits a limited time for the log to be
/// written.
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

/// Writes items as they arrive. A line that cannot be written is lost, because there is nowhere to
/// report it.
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
    use crate::kept::Kept;

    /// Test writer that sends to one channel and needs a permit from the other for each write.
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
    fn logging_does_not_block_and_lost_lines_are_counted() {
        let (permit, permits) = mpsc::channel();
        let (written, texts) = mpsc::channel();
        let mut log =
            Log::start(Slow(permits, written), |count| format!("{count} lines lost\n")).unwrap();
        let more = 10;
        // The writer may already have taken one line.
        for n in 0..LINES_MAX + 1 + more {
            log.write_all(format!("line {n}\n").as_bytes()).unwrap();
        }
        log.settle(Duration::from_millis(1));
        let mut all = String::new();
        let limit = Duration::from_secs(60);
        while !all.contains("lost") {
            permit.send(()).unwrap();
            all.push_str(&texts.recv_timeout(limit).unwrap());
        }
        assert!(all.starts_with("line 0\n"), "{all}");
        let lost = all.lines().find_map(|line| line.split_once(" lines lost")?.0.parse().ok());
        assert!(lost.is_some_and(|lost: usize| (more..=more + 1).contains(&lost)), "{lost:?}");
        // Lines that cannot be written are skipped, and the thread ends with its last user.
        drop((permit, log));
        assert_eq!(texts.recv_timeout(limit), Err(mpsc::RecvTimeoutError::Disconnected));
    }

    #[test]
    fn logged_lines_are_written_once_the_log_has_settled() {
        let kept = Kept::default();
        let mut log = Log::start(kept.clone(), |_| String::new()).unwrap();
        log.write_all(b"one\n").unwrap();
        log.write_all(b"two\n").unwrap();
        log.settle(Duration::from_secs(60));
        assert_eq!(kept.text(), "one\ntwo\n");
    }
}
