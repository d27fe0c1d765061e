//! Addition and removal of devices while the session runs, and device reports.
//!
//! A device that is being removed accepts no IO. Its requests on the server stay here, with their
//! permits and memory, until the server has answered or can no longer start them. The device's
//! number is then free, and the control shard is notified.

use std::sync::Arc;

use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::failed_ios::Failures;
use super::ios::Ios;
use super::requests::{Request, Standing};
use super::retry::{OldestIo, Waits};
use super::slow_requests::SlowReport;
use crate::engine::device_set::DeviceIndex;
use crate::stats::DeviceStats;

/// Devices to include in a report. Device statistics are large: copying those of many volumes
/// delays the shard's IO.
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
    /// Number of times that the server may have lost acknowledged writes, across all shards.
    pub(crate) cache_losses: u64,
    /// Number of flushes that failed only to report such a loss, across all shards.
    pub(crate) failed_flushes: u64,
    pub(crate) failures: Failures,
}

impl Ios {
    /// Adds a device that has not been opened yet.
    pub(super) fn add_device(&mut self, device: DeviceIndex, export: Arc<str>) {
        self.devices.add(device);
        self.requests.add_device(device);
        self.requests.failed.add_device(device, export);
        self.syncs.add_device(device);
        let devices = self.stats.len().max(device.index() + 1);
        self.stats.resize_with(devices, DeviceStats::default);
        self.stats[device.index()] = DeviceStats::default();
    }

    /// Resumes the IO of a device once a path serves it.
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
            self.fail_request(row, IoStatus::Aborted);
        }
        self.closing.insert(device);
    }

    /// Frees a closing device that has no IO left, and returns it.
    pub(super) fn next_settled(&mut self) -> Option<DeviceIndex> {
        let is_used = |device: DeviceIndex| {
            let is_used = self.requests.has_ios(device) || self.devices.is_left(device);
            is_used && !rtrs_core::mutated!(VolumeFreedEarly)
        };
        let device = self.closing.iter().find(|device| !is_used(*device))?;
        self.closing.remove(device);
        self.devices.free(device);
        self.requests.remove_device();
        Some(device)
    }

    /// Returns the report of a device. `is_served` says whether a path takes its requests.
    pub(super) fn report(
        &self,
        now: Instant,
        device: DeviceIndex,
        is_served: bool,
    ) -> DeviceReport {
        DeviceReport {
            device,
            stats: self.stats[device.index()].clone(),
            inflight: self.device_inflight(device),
            oldest: self.oldest(now, device, is_served),
            slow_requests: self.slow_requests(now, device),
            cache_losses: self.devices.cache_losses(device),
            failed_flushes: self.devices.failed_flushes(device),
            failures: self.requests.failed.of(device),
        }
    }

    /// A device's requests that the server does not answer although their path is alive.
    pub(crate) fn slow_requests(&self, now: Instant, device: DeviceIndex) -> SlowReport {
        let slow = self
            .requests
            .requests()
            .filter(|(_, request)| request.slow && self.requests.io(request.io).device == device);
        let total = self.stats[device.index()].slow_requests;
        slow.fold(SlowReport { total, ..SlowReport::default() }, |report, (_, request)| {
            let oldest = report.oldest.max(Some(now.since(request.sent)));
            SlowReport { now: report.now + 1, oldest, ..report }
        })
    }

    /// Returns a device's oldest IO: its age, and what it is waiting for.
    fn oldest(&self, now: Instant, device: DeviceIndex, is_served: bool) -> Option<OldestIo> {
        let (taken, request) = self.requests.oldest(device)?;
        let waits = match request.map(|request| (request.standing, request.path)) {
            Some((Standing::AwaitingFence { .. }, path)) => Waits::Fence(path),
            Some((Standing::Sent | Standing::Answered(_) | Standing::Exposed, path)) => {
                Waits::Answer(path)
            }
            Some((Standing::Ready, _)) => Waits::Path,
            None if taken.is_all_issued() => Waits::Flushes,
            None if is_served => Waits::Permit,
            None => Waits::Path,
        };
        Some(OldestIo { age: now.since(taken.submitted), waits })
    }
}
