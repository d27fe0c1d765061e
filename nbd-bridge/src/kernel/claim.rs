//! Ownership of a device: a lock on the file that shows its backend.
//!
//! The kernel continues to show the process that connected a device, even after another process has
//! taken over the device. Therefore the process that owns a device holds a lock (flock) on
//! `/sys/block/nbdX/backend`. That file exists while the device is connected and is the same file
//! for all processes, whatever their run directory; the lock ends with the process. (Any process
//! that may read the file may also lock it. That makes the device look owned but does no other
//! harm; `/proc/locks` shows the holder.)
//!
//! Called by `device` and `takeover`.

use std::fs::{File, TryLockError};
use std::time::Duration;

use super::error::DeviceError;
use super::sysfs::{Places, await_that};

/// Maximum wait for a process that only checks whether a device was left behind.
const LOOK_PATIENCE: Duration = Duration::from_secs(1);

/// Ownership of a device, until dropped.
#[derive(Debug)]
pub(super) struct Claim {
    _lock: Option<File>,
}

impl Claim {
    /// Claims a connected device. Returns None if another process owns it. If the system does not
    /// support the lock, the owner shown by the kernel decides, and the result is still a claim.
    pub(super) fn new(places: &Places, index: u32) -> Option<Self> {
        let path = places.block(index).join("backend");
        let locked = File::open(&path).map_err(TryLockError::Error).and_then(|file| {
            file.try_lock()?;
            Ok(file)
        });
        match locked {
            Ok(lock) => Some(Self { _lock: Some(lock) }),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Error(error)) => {
                tracing::debug!("cannot lock {}: {error}", path.display());
                Some(Self { _lock: None })
            }
        }
    }

    /// Claims a device that this process has just connected.
    pub(super) fn of_own(places: &Places, index: u32) -> Option<Self> {
        let mut claim = None;
        if !await_that(LOOK_PATIENCE, || {
            claim = Self::new(places, index);
            claim.is_some()
        }) {
            tracing::warn!("/dev/nbd{index} is locked by another process; see /proc/locks");
        }
        claim
    }
}

/// Refuses a connected device, unless one of our processes left it behind.
pub(super) fn check_free(places: &Places, index: u32, backend: &str) -> Result<(), DeviceError> {
    let Some(owner) = places.owner(index) else { return Ok(()) };
    if claim_left_behind(places, index, |found| found == backend).is_some() {
        return Ok(());
    }
    let of = places.backend(index).filter(|text| !text.is_empty());
    let of = of.map(|backend| format!(" to {backend:?}")).unwrap_or_default();
    let who = match places.process(owner) {
        Some(name) => format!("process {owner} ({name})"),
        None if Claim::new(places, index).is_none() => {
            format!("process {owner} and taken over by a running process")
        }
        None => format!("process {owner}, which has ended (free the device with nbd-client -d)"),
    };
    let by = format!("connected{of} by {who}");
    Err(DeviceError::Busy { index, by })
}

/// Claims a device left behind by our processes: the process that connected it and any that took it
/// over have exited.
pub(super) fn claim_left_behind(
    places: &Places,
    index: u32,
    is_ours: impl Fn(&str) -> bool,
) -> Option<Claim> {
    let is_left_behind = places.backend(index).is_some_and(|backend| is_ours(&backend))
        && places.owner(index).is_some_and(|owner| places.is_left_behind(owner));
    if is_left_behind { Claim::new(places, index) } else { None }
}

#[cfg(test)]
mod tests {
    use super::super::sysfs::tests::Tree;
    use super::*;

    /// Maximum time until a lock is free: a child forked by another test shares the lock until it
    /// calls exec.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_device_is_claimed_by_one_process() {
        let tree = Tree::new("nbd-claim");
        tree.file("sys/block/nbd0/backend", "rtrs:s/v\n");
        tree.file("sys/block/nbd1/backend", "rtrs:s/v\n");
        let first = Claim::of_own(&tree.places, 0);
        assert!(first.is_some());
        assert!(Claim::new(&tree.places, 0).is_none(), "the claim is held");
        assert!(Claim::new(&tree.places, 1).is_some(), "another device");
        drop(first);
        let released = await_that(PATIENCE, || Claim::new(&tree.places, 0).is_some());
        assert!(released, "the claim was released");
        assert!(Claim::new(&tree.places, 2).is_some(), "no file to lock");
    }

    #[test]
    fn devices_in_use_differ_from_abandoned_ones() {
        let tree = Tree::new("nbd-busy");
        tree.file("proc/self/comm", "rtrs-client\n");
        tree.file("proc/5/comm", "rtrs-client\n");
        tree.file("proc/6/comm", "nbd-client\n");
        for (index, pid, backend) in
            [(0, "5", "rtrs:s/v"), (1, "6", ""), (2, "9", "rtrs:s/v"), (3, "9", "rtrs:s/w")]
        {
            tree.file(&format!("sys/block/nbd{index}/pid"), &format!("{pid}\n"));
            tree.file(&format!("sys/block/nbd{index}/backend"), &format!("{backend}\n"));
        }
        let free = |index| check_free(&tree.places, index, "rtrs:s/v").map_err(|e| e.to_string());
        assert_eq!(
            free(0).unwrap_err(),
            "/dev/nbd0 is in use: connected to \"rtrs:s/v\" by process 5 (rtrs-client); use \
             another device, or auto"
        );
        assert_eq!(
            free(1).unwrap_err(),
            "/dev/nbd1 is in use: connected by process 6 (nbd-client); use another device, or auto"
        );
        // One device left behind by us, one left behind by another program, and one that does not
        // exist.
        assert_eq!(free(2), Ok(()));
        let claim = Claim::new(&tree.places, 2);
        let error = free(2).unwrap_err();
        assert!(error.contains("process 9 and taken over by a running process"), "{error}");
        drop(claim);
        assert!(await_that(PATIENCE, || free(2).is_ok()), "the claim was released");
        let error = free(3).unwrap_err();
        assert!(error.contains("to \"rtrs:s/w\" by process 9, which has ended"), "{error}");
        assert_eq!(free(4), Ok(()));
    }
}
