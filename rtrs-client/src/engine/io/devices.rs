//! Addition and removal of devices while the session runs, and their reports.
//!
//! A device that is being removed takes no IO. Its requests at the server stay here, with their
//! permits and memory, until the server has answered or can no longer start them. Then the number
//! of the device is free, and the control shard is notified.

use std::sync::Arc;

use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::Shard;
use super::failed_ios::Failures;
use super::requests::{Request, Standing};
use super::retry::{OldestIo, Waits};
use super::slow_requests::SlowReport;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::message::ControlMessage;
use crate::stats::DeviceStats;

/// Devices to include in a report. Their statistics are large: copying those of many volumes delays
/// the shard's IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reported {
    All,
    One(DeviceIndex),
    None,
}

/// State and counters of a device on a shard.
#[derive(Debug)]
pub(crate) struct DeviceReport {
    pub(crate) device: DeviceIndex,
    pub(crate) stats: DeviceStats,
    /// Number of unfinished IOs.
    pub(crate) inflight: usize,
    /// Oldest unfinished IO.
    pub(crate) oldest: Option<OldestIo>,
    /// Requests that the server does not answer although their path is alive.
    pub(crate) slow_requests: SlowReport,
    /// Number of times that the server may have lost acknowledged writes, over all shards.
    pub(crate) cache_losses: u64,
    /// Number of flushes that only reported such a loss, over all shards.
    pub(crate) failed_flushes: u64,
    pub(crate) failures: Failures,
}

impl Shard {
    /// Adds a device that was not open yet.
    pub(super) fn add_device(&mut self, device: DeviceIndex, export: Arc<str>) {
        self.devices.add(device);
        self.requests.add_device(device);
        self.requests.failed.add_device(device, export);
        self.syncs.add_device(device);
        // The previous volume with this number may have been opened once more in order to close it.
        self.paths.forget_device(device);
        let devices = self.device_stats.len().max(device.index() + 1);
        self.device_stats.resize_with(devices, DeviceStats::default);
        self.device_stats[device.index()] = DeviceStats::default();
    }

    /// Lets IO of a device flow again once a path serves it.
    pub(super) fn has_path(&mut self, device: DeviceIndex) {
        if !rtrs_core::mutated!(StaysGivenUp) {
            self.devices.set_failing(device, false);
        }
    }

    /// Closes a device whose user has released it.
    pub(super) fn close_device(&mut self, device: DeviceIndex) {
        self.devices.close(device);
        self.cancel(device, &|_| true);
        for row in self.requests.ios_of(device) {
            self.requests.io_mut(row).given_up = true;
        }
        let of_it = |request: &Request| self.requests.io(request.io).device == device;
        let ready = |request: &Request| request.standing == Standing::Ready;
        for row in self.requests.rows(|request| of_it(request) && ready(request)) {
            self.retries.remove(row);
            self.end_request(row, IoStatus::Aborted);
        }
        self.closing.insert(device);
    }

    /// Reports closing devices that have no IO left on this shard.
    pub(super) fn report_settled(&mut self, ctx: &mut Ctx<'_>) {
        for device in self.closing.iter() {
            let is_used = self.requests.has_ios(device) || self.devices.is_left(device);
            if is_used && !rtrs_core::mutated!(VolumeFreedEarly) {
                continue;
            }
            self.closing.remove(device);
            self.devices.free(device);
            self.requests.remove_device();
            self.paths.forget_device(device);
            ctx.out.control(ControlMessage::Settled { device, shard: self.index });
        }
    }

    /// Returns this shard's reports of its devices.
    pub(crate) fn device_reports(&self, now: Instant, reported: Reported) -> Vec<DeviceReport> {
        let report = |device| DeviceReport {
            device,
            stats: self.device_stats[device.index()].clone(),
            inflight: self.requests.ios_of(device).len(),
            oldest: self.oldest(now, device),
            slow_requests: self.slow_requests(now, device),
            cache_losses: self.devices.cache_losses(device),
            failed_flushes: self.devices.failed_flushes(device),
            failures: self.requests.failed.of(device),
        };
        let is_reported = |device: &DeviceIndex| match reported {
            Reported::All => true,
            Reported::One(one) => one == *device,
            Reported::None => false,
        };
        self.devices.all().filter(is_reported).map(report).collect()
    }

    /// Requests of a device that the server does not answer although their path is alive.
    pub(crate) fn slow_requests(&self, now: Instant, device: DeviceIndex) -> SlowReport {
        let slow = self
            .requests
            .requests()
            .filter(|(_, request)| request.slow && self.requests.io(request.io).device == device);
        let total = self.device_stats[device.index()].slow_requests;
        slow.fold(SlowReport { total, ..SlowReport::default() }, |report, (_, request)| {
            let oldest = report.oldest.max(Some(now.since(request.sent)));
            SlowReport { now: report.now + 1, oldest, ..report }
        })
    }

    /// Number of unfinished IOs of a device.
    pub(crate) fn device_inflight(&self, device: DeviceIndex) -> usize {
        self.requests.ios_of(device).len()
    }

    /// Paths that may get requests of a device.
    #[cfg(test)]
    pub(crate) fn serving_paths(&self, device: DeviceIndex) -> Vec<usize> {
        let serving = self.paths.iter().filter(|path| path.takes_io_of(device));
        serving.map(|path| path.id().index()).collect()
    }

    /// Returns the oldest IO of a device: its age, and what it waits for.
    fn oldest(&self, now: Instant, device: DeviceIndex) -> Option<OldestIo> {
        let (taken, request) = self.requests.oldest(device)?;
        let waits = match request.map(|request| (request.standing, request.path)) {
            Some((Standing::AwaitingFence { .. }, path)) => Waits::Fence(path),
            Some((Standing::Sent | Standing::Answered(_) | Standing::Exposed, path)) => {
                Waits::Answer(path)
            }
            Some((Standing::Ready, _)) => Waits::Path,
            None if taken.is_all_issued() => Waits::Flushes,
            None if self.paths.serve(device) => Waits::Permit,
            None => Waits::Path,
        };
        Some(OldestIo { age: now.since(taken.submitted), waits })
    }
}
