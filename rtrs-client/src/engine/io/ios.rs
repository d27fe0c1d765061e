//! A shard's IOs, from submission to completion.
//!
//! This part knows which IOs were submitted and which requests carry them; connections are
//! elsewhere. A request leaves its connection when it is answered or when the connection ends. In
//! the latter case the request awaits the fence of its path (`retry.rs`) and belongs to no path
//! until it is resent.

use rtrs_core::block::{Completion, Io, IoOp};
use rtrs_core::ids::{CoreIndex, PathId};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::failed_ios::FailedIo;
use super::limits::TimeLimits;
use super::requests::{Request, RequestRow, Requests, Standing, TakenIo};
use super::retry::{Retries, TRIES_MAX};
use super::syncs::Syncs;
use super::waiting::IoRow;
use super::zeroes::Zeroes;
use crate::engine::cache_epoch::FlushMark;
use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::device_table::DeviceTable;
use crate::stats::{DeviceStats, Done};

/// Loss count of an IO of which a part was lost individually; no real count reaches this value.
const PART_LOST: u64 = u64::MAX;

/// Devices of a shard, their IOs, and the requests that carry the IOs.
#[derive(Debug)]
pub(crate) struct Ios {
    pub(super) shard: CoreIndex,
    /// Time of the current event, or of the last poll of a device.
    pub(super) now: Instant,
    pub(super) devices: DeviceTable,
    pub(super) requests: Requests,
    pub(super) retries: Retries,
    pub(super) zeroes: Zeroes,
    pub(super) syncs: Syncs,
    /// Devices that are being closed.
    pub(super) closing: DeviceSet,
    /// Counters by device.
    pub(super) stats: Vec<DeviceStats>,
}

impl Ios {
    /// Creates the tables, without devices or paths.
    pub(super) fn new(shard: CoreIndex) -> Self {
        Self {
            shard,
            now: Instant::ZERO,
            devices: DeviceTable::new(),
            requests: Requests::new(),
            retries: Retries::default(),
            zeroes: Zeroes::default(),
            syncs: Syncs::new(shard),
            closing: DeviceSet::default(),
            stats: Vec::new(),
        }
    }

    /// Adds a path, in a new slot or in the slot of a removed path.
    pub(super) fn add_path(&mut self, path: PathId, name: &str) {
        self.requests.failed.add_path(path, name);
        self.retries.add_path(path.index() + 1);
    }

    pub(super) fn submit(&mut self, device: DeviceIndex, io: Io) -> Result<(), Io> {
        if !self.devices.has_room(device) {
            return Err(io);
        }
        let info = self.devices.info(device);
        let mut io = self.zeroes.translate(info, io);
        let mut status = info.geometry.check(&io);
        let mut mark = FlushMark::default();
        if self.devices.is_closed(device) {
            status = IoStatus::Aborted;
        } else if self.devices.is_failing(device) && status.is_ok() {
            status = IoStatus::TimedOut;
        }
        if io.op == IoOp::Flush {
            // A flush has no range, whatever the submitter passed.
            (io.offset, io.len, io.buf) = (0, 0, None);
            if let Some(cache) = self.devices.cache(device) {
                cache.submitted(&mut mark, self.now);
            }
        }
        self.devices.taken(device);
        let row = self.requests.take(TakenIo::new(device, io, status, mark, self.now));
        self.stats[device.index()].queue_full += u64::from(self.requests.is_full());
        self.end_io(row);
        Ok(())
    }

    /// Cancels queued IO with these tags, and what remains unissued of partly issued IO. Requests
    /// that were ever posted, on any path, are not canceled: they may take effect at any time.
    pub(super) fn cancel(&mut self, device: DeviceIndex, fits: &dyn Fn(u64) -> bool) {
        for row in self.requests.waiting(device, |io| fits(io.io.tag)) {
            self.fail_io(row, IoStatus::Aborted);
        }
    }

    /// Prepares the next request of an IO. A sync enters the order of syncs with its first request.
    /// Returns whether it did; [`Self::return_sync`] removes it again.
    pub(super) fn begin(&mut self, row: IoRow) -> bool {
        let taken = self.requests.io_mut(row);
        let Some(cache) = self.devices.cache(taken.device) else { return false };
        let enters = (taken.io.op == IoOp::Flush || taken.io.flags.fua) && taken.sync.is_none();
        if enters {
            taken.sync = Some(self.syncs.draw(taken.device, cache));
        }
        if taken.io.op == IoOp::Flush {
            cache.sent(&mut taken.mark);
        }
        enters
    }

    /// Ends a request. `epoch` is the cache epoch of the path that answered it.
    pub(super) fn end_request(&mut self, row: RequestRow, status: IoStatus, epoch: u64) {
        let request = self.requests.end_request(row, status);
        let taken = self.requests.io_mut(request.io);
        if let Some(cache) = self.devices.cache(taken.device) {
            match (status, request.standing) {
                (IoStatus::Ok, _) => {
                    if taken.has_more() {
                        taken.losses.get_or_insert_with(|| cache.count());
                    }
                    if taken.io.op == IoOp::Flush {
                        // A flush covers writes only once it has succeeded for its user.
                        taken.epoch = epoch;
                        return self.end_io(request.io);
                    }
                    let outdated = cache.done(self.shard, &taken.io, taken.mark, epoch);
                    if outdated && taken.has_more() {
                        taken.losses = Some(PART_LOST);
                    }
                    if let Some(before) = taken.losses.filter(|_| !taken.has_more()) {
                        cache.ended_in_parts(&taken.io, before);
                    }
                }
                (status, Standing::Answered(_)) => cache.failed(&taken.io, status),
                // The server's answer is unknown.
                _ if taken.sync.is_some() => cache.sync_unanswered(),
                _ => {}
            }
        }
        self.end_io(request.io);
    }

    /// Fails a request that is not on any path.
    pub(super) fn fail_request(&mut self, row: RequestRow, status: IoStatus) {
        // Only a success has an epoch.
        self.end_request(row, status, 0);
    }

    /// Ends an IO that has no outstanding requests. A flush may be held back.
    fn end_io(&mut self, row: IoRow) {
        if self.requests.is_ended(row) && !self.is_held(row) {
            self.complete(row);
        }
    }

    /// Completes an IO that has ended.
    pub(super) fn complete(&mut self, row: IoRow) {
        let taken = self.requests.take_ended(row);
        let TakenIo { device, io, mark, status, submitted, epoch, given_up, .. } = taken;
        if let (IoOp::Flush, true, Some(cache)) =
            (io.op, status.is_ok(), self.devices.cache(device))
        {
            cache.done(self.shard, &io, mark, epoch);
        }
        let mark = (io.op == IoOp::Flush).then_some(mark);
        self.devices.ended(device, Completion::new(io.tag, status), mark);
        let stats = &mut self.stats[device.index()];
        if stats.io_done(&io, status, self.now.since(submitted)) == Done::Failed {
            let path = self.requests.failed.take_path(row);
            if !given_up {
                let failed = FailedIo { path, ..FailedIo::new(&io, status, self.now) };
                self.requests.failed.note(device, failed);
            }
        }
    }

    /// Fails a waiting IO as soon as its requests in flight have ended.
    pub(super) fn fail_io(&mut self, row: IoRow, status: IoStatus) {
        self.requests.fail(row, status);
        self.end_io(row);
    }

    /// Fails the waiting IO of a device that has had no path for too long or will never have one.
    /// Requests on a path end with the path's connection.
    pub(super) fn give_up(&mut self, device: DeviceIndex) {
        self.devices.set_failing(device, true);
        let of_it = |request: &Request| self.requests.io(request.io).device == device;
        let off = |request: &Request| of_it(request) && !request.is_on(request.path);
        for row in self.requests.rows(off) {
            self.retries.remove(row);
            self.fail_request(row, IoStatus::TimedOut);
        }
        while let Some(row) = self.requests.first_waiting(device) {
            self.fail_io(row, IoStatus::TimedOut);
        }
    }

    /// Counts a request that is delayed by a slow disk.
    pub(super) fn count_slow(&mut self, row: IoRow) {
        let device = self.requests.io(row).device;
        self.stats[device.index()].slow_requests += 1;
    }

    /// Reports the failure of an IO to its user. The IO's requests stay here with their permits and
    /// memory until the server has answered or can no longer start them. Returns false if the user
    /// was already notified.
    pub(super) fn give_up_io(&mut self, row: IoRow) -> bool {
        let taken = self.requests.io_mut(row);
        if std::mem::replace(&mut taken.given_up, true) {
            return false;
        }
        let (device, tag) = (taken.device, taken.io.tag);
        if let (Some(sync), Some(cache)) = (&mut taken.sync, self.devices.cache(device)) {
            sync.give_up(cache);
        }
        let failed = FailedIo::new(&taken.io, IoStatus::TimedOut, self.now);
        self.requests.failed.note(device, failed);
        self.requests.fail(row, IoStatus::TimedOut);
        self.devices.give_up(device, tag);
        true
    }

    /// Makes a request, which left its path when the connection ended, wait for the path's fence.
    pub(super) fn await_fence(&mut self, row: RequestRow, epoch: u32) {
        let request = self.requests.request_mut(row);
        let (path, io) = (request.path, request.io);
        request.sent = self.now;
        request.standing = Standing::AwaitingFence { epoch };
        let early = rtrs_core::mutated!(ResendBeforeFence)
            || rtrs_core::mutated!(GivenUpBeforeFence) && self.requests.io(io).given_up;
        if early || self.retries.is_fenced(path, epoch) {
            self.ready(row);
        }
    }

    /// Makes those requests ready whose path is fenced off up to this epoch: the server can no
    /// longer start them.
    pub(super) fn fenced(&mut self, path: PathId, epoch: u32) {
        let fenced = self.requests.rows(|request| {
            let awaits = request.standing;
            request.path == path
                && matches!(awaits, Standing::AwaitingFence { epoch: e } if e <= epoch)
        });
        for row in fenced {
            self.ready(row);
        }
    }

    /// Makes a request ready to be resent.
    fn ready(&mut self, row: RequestRow) {
        let request = self.requests.request_mut(row);
        let (io, turn) = (request.io, request.turn);
        request.standing = Standing::Ready;
        if request.tries >= TRIES_MAX {
            tracing::error!("a request failed after its path ended {TRIES_MAX} times");
            return self.fail_request(row, IoStatus::Aborted);
        }
        if self.requests.io(io).given_up {
            // The user already has the error, and the IO can no longer take effect late.
            return self.fail_request(row, IoStatus::TimedOut);
        }
        self.retries.push(turn, row);
    }

    /// Fails requests that have waited too long for a path. Returns whether any failed.
    pub(super) fn fail_late_retries(&mut self, limits: &TimeLimits, has_fences: bool) -> bool {
        let over = self.requests.rows(|request| {
            let submitted = self.requests.io(request.io).submitted;
            limits.fails_retry(request, submitted, has_fences, self.now)
        });
        for row in &over {
            self.retries.remove(*row);
            self.fail_request(*row, IoStatus::TimedOut);
        }
        !over.is_empty()
    }

    /// Fails IOs of a device that have waited too long to be issued. Returns whether any failed.
    pub(super) fn fail_late_waiting(
        &mut self,
        limits: &TimeLimits,
        device: DeviceIndex,
        is_served: bool,
    ) -> bool {
        let disk_is_slow = is_served && self.has_slow_request(device);
        let Some(bound) = limits.waiting_max(disk_is_slow) else { return false };
        let mut any = false;
        while let Some(row) = self.requests.first_waiting(device) {
            if self.now.since(self.requests.io(row).submitted) < bound {
                break;
            }
            self.fail_io(row, IoStatus::TimedOut);
            any = true;
        }
        any
    }

    fn has_slow_request(&self, device: DeviceIndex) -> bool {
        let is_slow =
            |request: &Request| request.slow && self.requests.io(request.io).device == device;
        self.requests.requests().any(|(_, request)| is_slow(request))
    }

    /// Devices with their states and completions.
    pub(crate) fn devices(&self) -> &DeviceTable {
        &self.devices
    }

    /// Number of unfinished IOs.
    pub(crate) fn inflight(&self) -> usize {
        self.requests.inflight()
    }

    /// Number of unfinished IOs of a device.
    pub(crate) fn device_inflight(&self, device: DeviceIndex) -> usize {
        self.requests.ios_of(device).len()
    }

    /// Number of permits that requests hold.
    pub(crate) fn permits_held(&self) -> usize {
        self.requests.permits_held()
    }

    /// Panics when the tables are inconsistent; probes hold `others` permits.
    pub(super) fn check(&self, others: usize) {
        self.requests.check(others);
        let ready = self.requests.requests();
        let ready = ready.filter(|(_, request)| request.standing == Standing::Ready);
        self.retries.check(ready.map(|(row, request)| (request.turn, row)).collect());
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::sync::Arc;

    use rtrs_core::block::{Geometry, IoFlags};
    use rtrs_core::mem::Region;
    use rtrs_core::time::Duration;

    use super::*;
    use crate::engine::device_table::OpenDevice;

    const VOLUME: DeviceIndex = DeviceIndex::FIRST;
    const PATH: PathId = PathId(0);

    /// IOs of a shard with an open volume and a path.
    fn ios() -> Ios {
        let mut ios = Ios::new(CoreIndex(0));
        ios.add_path(PATH, "path");
        ios.add_device(VOLUME, "volume".into());
        ios.requests.set_permits(0..8);
        let open = OpenDevice {
            device_id: 0,
            geometry: Geometry::plain(1 << 20),
            writes_zeroes: true,
            cache_id: 0,
            volatile: false,
            export_id: None,
            is_shared: false,
        };
        ios.devices.open(VOLUME, Arc::new(open));
        ios
    }

    /// Submits a read with this tag.
    fn submit(ios: &mut Ios, tag: u64) {
        let buf = Region::new(4096).unwrap().slice(0, 4096);
        let (op, flags) = (IoOp::Read, IoFlags::default());
        ios.submit(VOLUME, Io { tag, op, flags, offset: 0, len: 4096, buf }).unwrap();
    }

    /// Sends the next request over the path, with parts of at most `max` bytes.
    fn send(ios: &mut Ios, max: u32) -> RequestRow {
        let row = ios.requests.first_waiting(VOLUME).unwrap();
        ios.begin(row);
        let part = ios.requests.io(row).next_part(max, 512);
        let permit = ios.requests.take_permit().unwrap();
        ios.requests.issued(row, permit, PATH, part, ios.now);
        ios.requests.find(permit, PATH).unwrap()
    }

    fn reap(ios: &mut Ios) -> Option<(u64, IoStatus)> {
        let reaped = ios.devices.reap(VOLUME)?;
        Some((reaped.completion.tag, reaped.completion.status))
    }

    #[test]
    fn an_io_ends_with_the_last_of_its_requests() {
        let mut ios = ios();
        submit(&mut ios, 7);
        let (first, last) = (send(&mut ios, 2048), send(&mut ios, 2048));
        ios.end_request(last, IoStatus::Ok, 0);
        assert_eq!(reap(&mut ios), None);
        ios.end_request(first, IoStatus::Ok, 0);
        assert_eq!(reap(&mut ios), Some((7, IoStatus::Ok)));
        ios.check(0);
    }

    #[test]
    fn a_failed_request_fails_its_io_and_the_unsent_rest() {
        let mut ios = ios();
        submit(&mut ios, 7);
        let first = send(&mut ios, 2048);
        ios.end_request(first, IoStatus::Io, 0);
        assert_eq!(reap(&mut ios), Some((7, IoStatus::Io)));
        assert_eq!(ios.requests.failed.of(VOLUME).last.and_then(|io| io.path), Some(PATH));
        ios.check(0);
    }

    #[test]
    fn a_lost_request_is_ready_once_its_path_is_fenced_off() {
        let mut ios = ios();
        submit(&mut ios, 7);
        let row = send(&mut ios, 4096);
        ios.await_fence(row, 3);
        ios.fenced(PATH, 2);
        assert_eq!(ios.retries.get(0), None, "the fence of an earlier epoch");
        ios.fenced(PATH, 3);
        assert_eq!(ios.retries.get(0), Some(row));
        ios.check(0);
    }

    #[test]
    fn a_slow_io_is_reported_to_its_user_once() {
        let mut ios = ios();
        submit(&mut ios, 7);
        let row = send(&mut ios, 4096);
        let io = ios.requests.request(row).io;
        assert!(ios.give_up_io(io) && !ios.give_up_io(io));
        assert_eq!(ios.devices.take_given_up(VOLUME), Some(7));
        assert_eq!(ios.devices.take_given_up(VOLUME), None);
        assert_eq!(ios.permits_held(), 1, "the server may still execute it");
        ios.end_request(row, IoStatus::Ok, 0);
        assert_eq!(reap(&mut ios), Some((7, IoStatus::TimedOut)));
        assert_eq!(ios.requests.failed.of(VOLUME).count, 1);
        ios.check(0);
    }

    #[test]
    fn a_device_without_a_path_fails_waiting_and_new_io() {
        let mut ios = ios();
        submit(&mut ios, 1);
        let row = send(&mut ios, 4096);
        submit(&mut ios, 2);
        ios.give_up(VOLUME);
        assert_eq!(reap(&mut ios), Some((2, IoStatus::TimedOut)));
        submit(&mut ios, 3);
        assert_eq!(reap(&mut ios), Some((3, IoStatus::TimedOut)));
        assert_eq!(reap(&mut ios), None, "the first is on a connection");
        ios.end_request(row, IoStatus::Ok, 0);
        assert_eq!(reap(&mut ios), Some((1, IoStatus::Ok)));
        ios.has_path(VOLUME);
        submit(&mut ios, 4);
        assert_eq!(ios.inflight(), 1);
        ios.check(0);
    }

    #[test]
    fn a_closed_device_is_settled_after_its_requests_and_completions() {
        let mut ios = ios();
        let user = Rc::clone(ios.devices.token(VOLUME));
        submit(&mut ios, 1);
        let row = send(&mut ios, 4096);
        submit(&mut ios, 2);
        ios.close_device(VOLUME);
        assert_eq!(reap(&mut ios), Some((2, IoStatus::Aborted)));
        assert_eq!(ios.next_settled(), None, "a request is at the server");
        ios.end_request(row, IoStatus::Ok, 0);
        assert_eq!(ios.next_settled(), None, "the user has not reaped it");
        assert_eq!(reap(&mut ios), Some((1, IoStatus::Ok)));
        assert_eq!(ios.next_settled(), Some(VOLUME));
        assert_eq!(ios.next_settled(), None);
        drop(user);
    }

    #[test]
    fn waiting_io_fails_at_its_time_limit() {
        let mut ios = ios();
        let limits = TimeLimits::failing_after(Duration::from_secs(30));
        submit(&mut ios, 1);
        ios.now = ios.now + Duration::from_secs(20);
        submit(&mut ios, 2);
        ios.now = ios.now + Duration::from_secs(10);
        assert!(ios.fail_late_waiting(&limits, VOLUME, true));
        assert_eq!(reap(&mut ios), Some((1, IoStatus::TimedOut)));
        assert_eq!(reap(&mut ios), None);
        assert!(!ios.fail_late_waiting(&limits, VOLUME, true));
    }
}
