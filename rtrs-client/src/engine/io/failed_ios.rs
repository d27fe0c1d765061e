//! Failed IOs: their number and the most recent one, for `status`, and a rate-limited log line.
//!
//! This code runs only when an IO has failed. An IO whose operation the server does not support is
//! not counted: clients try operations to find out whether they are supported.

use std::sync::Arc;

use rtrs_core::block::{Io, IoOp};
use rtrs_core::ids::PathId;
use rtrs_core::log_limit::LogLimits;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;
use rtrs_core::wire::errno_name;

use super::waiting::IoRow;
use crate::engine::device_set::DeviceIndex;
use crate::stats::op_name;

/// IO that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FailedIo {
    pub(crate) status: IoStatus,
    pub(crate) op: IoOp,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    /// Path whose answer or end made the IO fail; None if it failed for a different reason.
    pub(crate) path: Option<PathId>,
    pub(crate) at: Instant,
}

impl FailedIo {
    /// Describes a failed IO, without the path that may have made it fail.
    pub(super) fn new(io: &Io, status: IoStatus, at: Instant) -> Self {
        Self { status, op: io.op, offset: io.offset, len: io.len, path: None, at }
    }
}

/// A device's failed IOs on a shard, since the device was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failures {
    pub(crate) count: u64,
    pub(crate) last: Option<FailedIo>,
}

impl Failures {
    /// Adds the failed IOs of a different shard.
    pub(crate) fn add(&mut self, other: &Self) {
        self.count += other.count;
        let all = [self.last, other.last].into_iter().flatten();
        self.last = all.max_by_key(|failed| failed.at);
    }
}

/// Failed IOs of all devices of a shard.
#[derive(Debug, Default)]
pub(super) struct FailedIos {
    devices: Vec<Device>,
    /// Path that made each failing IO fail, until the IO ends.
    paths: Vec<(IoRow, PathId)>,
    /// Names of all paths, for the log.
    path_names: Vec<String>,
    lines: LogLimits<(DeviceIndex, IoStatus)>,
}

#[derive(Debug)]
struct Device {
    device: DeviceIndex,
    export: Arc<str>,
    failures: Failures,
}

impl FailedIos {
    /// Adds a device, replacing any earlier device with this number.
    pub(super) fn add_device(&mut self, device: DeviceIndex, export: Arc<str>) {
        self.devices.retain(|known| known.device != device);
        self.devices.push(Device { device, export, failures: Failures::default() });
    }

    /// Adds a path, replacing any earlier path with this number.
    pub(super) fn add_path(&mut self, path: PathId, name: &str) {
        let paths = self.path_names.len().max(path.index() + 1);
        self.path_names.resize(paths, String::new());
        name.clone_into(&mut self.path_names[path.index()]);
    }

    /// Failed IOs of a device.
    pub(super) fn of(&self, device: DeviceIndex) -> Failures {
        let found = self.devices.iter().find(|known| known.device == device);
        found.map(|known| known.failures).unwrap_or_default()
    }

    /// Records the path that made an IO fail. Other requests of the IO may still be in flight.
    #[cold]
    pub(super) fn failed_on(&mut self, io: IoRow, path: PathId) {
        self.paths.push((io, path));
    }

    /// Takes the path that made an IO fail.
    #[cold]
    pub(super) fn take_path(&mut self, io: IoRow) -> Option<PathId> {
        let at = self.paths.iter().position(|(failed, _)| *failed == io)?;
        Some(self.paths.swap_remove(at).1)
    }

    /// Counts a failed IO, and logs it at a limited rate.
    #[cold]
    pub(super) fn note(&mut self, device: DeviceIndex, failed: FailedIo) {
        if failed.status == IoStatus::Unsupported {
            return;
        }
        let Some(known) = self.devices.iter_mut().find(|known| known.device == device) else {
            return;
        };
        known.failures.add(&Failures { count: 1, last: Some(failed) });
        let FailedIo { status, op, offset, len, path, at } = failed;
        let Some(left_out) = self.lines.admit(at, (device, status)) else { return };
        tracing::warn!(
            export = &*known.export,
            op = op_name(op),
            offset,
            bytes = len,
            errno = errno_name(status.to_errno()),
            path = path.map(|path| tracing::field::display(&self.path_names[path.index()])),
            left_out,
            "IO failed: {status}"
        );
    }

    /// Logs the number of suppressed lines for errors that no longer occur.
    pub(super) fn log_suppressed(&mut self, now: Instant) {
        while let Some(((device, status), left_out)) = self.lines.overdue(now) {
            let known = self.devices.iter().find(|known| known.device == device);
            let export = known.map(|known| &*known.export);
            let errno = errno_name(status.to_errno());
            tracing::warn!(export, errno, left_out, "more IO failed: {status}");
        }
    }

    /// Time at which the number of suppressed lines must be logged.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.lines.deadline()
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::time::Duration;

    use super::*;

    #[test]
    fn the_last_failure_of_all_shards_is_the_latest() {
        let at = |seconds| {
            let at = Instant::ZERO + Duration::from_secs(seconds);
            let (op, path) = (IoOp::Write, Some(PathId(0)));
            let last = FailedIo { status: IoStatus::Io, op, offset: seconds, len: 1, path, at };
            Failures { count: seconds, last: Some(last) }
        };
        let mut all = Failures::default();
        for shard in [at(2), at(7), Failures::default(), at(5)] {
            all.add(&shard);
        }
        assert_eq!((all.count, all.last.map(|last| last.offset)), (14, Some(7)));
    }

    #[test]
    fn a_reused_device_number_starts_without_failures() {
        let mut all = FailedIos::default();
        all.add_device(DeviceIndex::FIRST, "v".into());
        all.devices[0].failures.count = 3;
        assert_eq!(all.of(DeviceIndex::FIRST).count, 3);
        all.add_device(DeviceIndex::FIRST, "w".into());
        assert_eq!(all.of(DeviceIndex::FIRST), Failures::default());
    }
}
