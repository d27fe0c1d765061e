//! Losses of acknowledged writes, and which users of a device got a report of them.
//!
//! A user is whoever counts on a flush: an NBD connection, or a kernel device with all its
//! sockets. Each user gets one failed flush for each loss, whatever other users got. It does not
//! matter which user wrote what was lost: where several connections show one device
//! (NBD's CAN_MULTI_CONN), a good flush on one of them covers the writes of all. A new user
//! starts with the losses that the device's last good flush covered, so a client that reconnects
//! still gets a loss that was not reported on its last connection.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::status::IoStatus;

/// The losses of one device, shared by all shards.
#[derive(Debug, Default)]
pub struct Losses {
    count: AtomicU64,
    /// Those of them that may have taken any write that was acknowledged before.
    shared: AtomicU64,
    /// All of these were known at the last good flush.
    settled: AtomicU64,
    /// The highest count reported to any user.
    reported: AtomicU64,
    /// The count reported to the user that has no connection: a kernel device, a benchmark.
    common: AtomicU64,
}

impl Losses {
    /// Adds a loss of single writes.
    pub fn add(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Adds a loss of anything that was acknowledged and not flushed.
    pub fn add_shared(&self) {
        // Whoever finds the loss reported finds it counted here.
        self.shared.fetch_add(1, Ordering::SeqCst);
        self.add();
    }

    /// Returns the number of losses added by [`add_shared`](Self::add_shared).
    pub fn shared(&self) -> u64 {
        self.shared.load(Ordering::SeqCst)
    }

    /// How many losses there were.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// The count that a new user starts with.
    pub fn settled(&self) -> u64 {
        self.settled.load(Ordering::SeqCst)
    }

    /// The count reported to the common user.
    pub fn common(&self) -> u64 {
        self.common.load(Ordering::SeqCst)
    }

    /// Records the count reported to the common user.
    pub fn report_common(&self, reported: u64) {
        self.common.fetch_max(reported, Ordering::SeqCst);
    }

    /// True when each loss was reported to some user.
    pub fn all_reported(&self) -> bool {
        self.reported.load(Ordering::SeqCst) >= self.count()
    }

    /// Judges a flush that ended; its user had `reported` losses when it was submitted. Returns how
    /// the flush ends for that user, and the count then reported to it.
    pub fn judge(&self, status: IoStatus, reported: u64) -> (IoStatus, u64) {
        let count = self.count();
        let once = crate::mutated!(LossSaidOnce).then(|| self.reported.load(Ordering::SeqCst));
        let known = count <= once.unwrap_or(reported) || crate::mutated!(LossUnsaid);
        match status {
            IoStatus::Ok if known => {
                self.settled.fetch_max(reported, Ordering::SeqCst);
                (status, reported)
            }
            // It did not reach the device: that says nothing about what was written.
            IoStatus::Aborted | IoStatus::TimedOut => (status, reported),
            _ => {
                self.reported.fetch_max(count, Ordering::SeqCst);
                (if status.is_ok() { IoStatus::Io } else { status }, count)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_is_told_once_and_one_that_comes_is_told_what_no_good_flush_knew() {
        let losses = Losses::default();
        let (mut a, mut b) = (losses.settled(), losses.settled());
        let flush = |user: &mut u64, status| {
            let (status, reported) = losses.judge(status, *user);
            *user = reported;
            status
        };
        assert_eq!(flush(&mut a, IoStatus::Ok), IoStatus::Ok);
        losses.add();
        assert!(!losses.all_reported());
        assert_eq!(flush(&mut b, IoStatus::TimedOut), IoStatus::TimedOut);
        assert_eq!(flush(&mut b, IoStatus::NoSpace), IoStatus::NoSpace);
        assert!(losses.all_reported());
        let mut late = losses.settled();
        assert_eq!(flush(&mut a, IoStatus::Ok), IoStatus::Io);
        for user in [&mut a, &mut b] {
            assert_eq!(flush(user, IoStatus::Ok), IoStatus::Ok);
        }
        assert_eq!(flush(&mut late, IoStatus::Ok), IoStatus::Io, "it came before that");
        assert_eq!(losses.judge(IoStatus::Ok, losses.settled()).0, IoStatus::Ok, "after it");
    }
}
