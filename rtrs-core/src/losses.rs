//! Losses of acknowledged writes, and which user of a device has heard of them.
//!
//! A user is whoever counts on a flush: an NBD connection, or a kernel device with all its
//! sockets. Each hears of each loss once, by a flush that fails, whoever else heard of it before.
//! It is told whoever wrote what was lost: where several connections show one device
//! (NBD's CAN_MULTI_CONN), a good flush on one of them vouches for the writes of all. A user that
//! comes begins with the losses that the device's last good flush knew of, so a client that
//! connects again is told what its last connection was not.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::status::IoStatus;

/// The losses of one device, shared by all cores.
#[derive(Debug, Default)]
pub struct Losses {
    count: AtomicU64,
    /// All of these were known at the last good flush.
    settled: AtomicU64,
    /// The highest that any user was told of.
    told: AtomicU64,
    /// What the user without a connection of its own was told: a kernel device, a benchmark.
    common: AtomicU64,
}

impl Losses {
    /// Acknowledged writes may be lost.
    pub fn add(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// How many losses there were.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// What a user begins with that comes now.
    pub fn settled(&self) -> u64 {
        self.settled.load(Ordering::SeqCst)
    }

    /// What the common user was told.
    pub fn common(&self) -> u64 {
        self.common.load(Ordering::SeqCst)
    }

    /// The common user was told so many.
    pub fn tell_common(&self, told: u64) {
        self.common.fetch_max(told, Ordering::SeqCst);
    }

    /// True when some user was told of each loss.
    pub fn are_told(&self) -> bool {
        self.told.load(Ordering::SeqCst) >= self.count()
    }

    /// A flush has ended whose user had been told of `told` losses when it was submitted. Returns
    /// how it ends for that user, and how many losses that tells of.
    pub fn judge(&self, status: IoStatus, told: u64) -> (IoStatus, u64) {
        let count = self.count();
        let once = crate::mutated!(LossSaidOnce).then(|| self.told.load(Ordering::SeqCst));
        let known = count <= once.unwrap_or(told) || crate::mutated!(LossUnsaid);
        match status {
            IoStatus::Ok if known => {
                self.settled.fetch_max(told, Ordering::SeqCst);
                (status, told)
            }
            // It did not reach the device: that says nothing about what was written.
            IoStatus::Aborted | IoStatus::TimedOut => (status, told),
            _ => {
                self.told.fetch_max(count, Ordering::SeqCst);
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
            let (status, told) = losses.judge(status, *user);
            *user = told;
            status
        };
        assert_eq!(flush(&mut a, IoStatus::Ok), IoStatus::Ok);
        losses.add();
        assert!(!losses.are_told());
        assert_eq!(flush(&mut b, IoStatus::TimedOut), IoStatus::TimedOut);
        assert_eq!(flush(&mut b, IoStatus::NoSpace), IoStatus::NoSpace);
        assert!(losses.are_told());
        let mut late = losses.settled();
        assert_eq!(flush(&mut a, IoStatus::Ok), IoStatus::Io);
        for user in [&mut a, &mut b] {
            assert_eq!(flush(user, IoStatus::Ok), IoStatus::Ok);
        }
        assert_eq!(flush(&mut late, IoStatus::Ok), IoStatus::Io, "it came before that");
        assert_eq!(losses.judge(IoStatus::Ok, losses.settled()).0, IoStatus::Ok, "after it");
    }
}
