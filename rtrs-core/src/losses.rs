//! Losses of acknowledged writes, and how they are reported to the users of a device.
//!
//! A user is a client that relies on flushes: an NBD connection, or a kernel device with all its
//! sockets. Each user receives one failed flush for each loss, regardless of other users. It does
//! not matter which user wrote the lost data: where several connections present one device (NBD's
//! CAN_MULTI_CONN), a successful flush on one connection covers the writes of all. A new user
//! starts with the losses known at the device's last successful flush, so a client that reconnects
//! still receives a loss that was not reported on its last connection. A report to a user that
//! has since left counts as a successful flush; otherwise, if each of a series of programs flushes
//! once, all of them would fail.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::status::IoStatus;

/// Losses of one device, shared by all shards.
#[derive(Debug, Default)]
pub struct Losses {
    count: AtomicU64,
    /// Number of losses that may affect any earlier acknowledged write.
    shared: AtomicU64,
    /// Number of losses known at the last successful flush, or reported to a user that has left.
    settled: AtomicU64,
    /// Highest number of losses reported to any user.
    reported: AtomicU64,
    /// Number of flushes that succeeded on the server but failed here in order to report a loss.
    failed_flushes: AtomicU64,
    /// Number of losses reported to the user with no connection: a kernel device or a benchmark.
    common: AtomicU64,
}

impl Losses {
    /// Records that individual acknowledged writes may be lost.
    pub fn add(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that everything acknowledged but not flushed may be lost.
    pub fn add_shared(&self) {
        // The order matters: a reader that sees the loss reported also sees it counted here.
        self.shared.fetch_add(1, Ordering::SeqCst);
        self.add();
    }

    /// Returns the number of losses recorded by [`add_shared`](Self::add_shared).
    pub fn shared(&self) -> u64 {
        self.shared.load(Ordering::SeqCst)
    }

    /// Returns the number of losses.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// Returns the count with which a new user starts.
    pub fn settled(&self) -> u64 {
        self.settled.load(Ordering::SeqCst)
    }

    /// Records that a user has left after `reported` losses were reported to it.
    pub fn settle(&self, reported: u64) {
        self.settled.fetch_max(reported, Ordering::SeqCst);
    }

    /// Returns the count reported to the common user.
    pub fn common(&self) -> u64 {
        self.common.load(Ordering::SeqCst)
    }

    /// Records the count reported to the common user.
    pub fn report_common(&self, reported: u64) {
        self.common.fetch_max(reported, Ordering::SeqCst);
    }

    /// Returns the number of flushes that succeeded on the server but failed for their user in
    /// order to report a loss.
    pub fn failed_flushes(&self) -> u64 {
        self.failed_flushes.load(Ordering::Relaxed)
    }

    /// Returns true if every loss has been reported to some user.
    pub fn all_reported(&self) -> bool {
        self.reported.load(Ordering::SeqCst) >= self.count()
    }

    /// Determines the outcome of a flush that ended when there were `count` losses, for its user,
    /// to whom `reported` losses had been reported when it was submitted. Returns the status for
    /// that user, and the count then reported to it.
    pub fn judge(&self, status: IoStatus, reported: u64, count: u64) -> (IoStatus, u64) {
        let once = crate::mutated!(LossReportedOnce).then(|| self.reported.load(Ordering::SeqCst));
        let known = count <= once.unwrap_or(reported) || crate::mutated!(LossUnreported);
        match status {
            IoStatus::Ok if known => {
                self.settle(reported);
                (status, reported)
            }
            // The flush did not reach the device, so its outcome reveals nothing about earlier
            // writes.
            IoStatus::Aborted | IoStatus::TimedOut => (status, reported),
            _ => {
                self.reported.fetch_max(count, Ordering::SeqCst);
                self.failed_flushes.fetch_add(u64::from(status.is_ok()), Ordering::Relaxed);
                (if status.is_ok() { IoStatus::Io } else { status }, count)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_reported_once_per_user() {
        let losses = Losses::default();
        let (mut a, mut b) = (losses.settled(), losses.settled());
        let flush = |user: &mut u64, status| {
            let (status, reported) = losses.judge(status, *user, losses.count());
            *user = reported;
            status
        };
        assert_eq!(flush(&mut a, IoStatus::Ok), IoStatus::Ok);
        losses.add();
        assert!(!losses.all_reported());
        assert_eq!(flush(&mut b, IoStatus::TimedOut), IoStatus::TimedOut);
        assert_eq!(flush(&mut b, IoStatus::NoSpace), IoStatus::NoSpace);
        assert!(losses.all_reported());
        assert_eq!(losses.failed_flushes(), 0, "this flush failed at the server");
        let mut late = losses.settled();
        assert_eq!(flush(&mut a, IoStatus::Ok), IoStatus::Io);
        for user in [&mut a, &mut b] {
            assert_eq!(flush(user, IoStatus::Ok), IoStatus::Ok);
        }
        assert_eq!(flush(&mut late, IoStatus::Ok), IoStatus::Io, "it came before that");
        assert_eq!(losses.failed_flushes(), 2);
        assert_eq!(
            losses.judge(IoStatus::Ok, losses.settled(), losses.count()).0,
            IoStatus::Ok,
            "after it"
        );
    }
}
