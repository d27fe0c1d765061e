//! Devices of a session on one shard.
//!
//! Each request names its device, and each device has its own geometry, cache epoch and
//! completions. All devices share the rows for IOs. A freed number may later be given to a
//! different device; a token identifies the users of the earlier device.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::block::{Completion, Geometry};
use rtrs_core::identity::ExportId;
use rtrs_core::losses::Losses;
use rtrs_core::shares::Shares;

use super::cache_epoch::{CacheWatch, FlushMark};
use super::device_set::{DeviceIndex, DeviceSet};

/// Device ID that is never used, as IDs count up from 0.
pub(crate) const NO_DEVICE: u32 = i32::MAX as u32;

/// Maximum number of IOs on a shard; at this limit, the shard reports that it is full.
pub(crate) const IOS_MAX: usize = 1024;

/// Size of a shard's buffer of zeroes, and the maximum length of an IO that writes them.
pub(crate) const ZEROES_LEN: u32 = 1 << 20;

/// Device as described by the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenDevice {
    /// The server's number for the device, on the path that most recently opened it.
    pub(crate) device_id: u32,
    pub(crate) geometry: Geometry,
    /// Whether the server itself writes zeroes; otherwise the session does.
    pub(crate) writes_zeroes: bool,
    /// Epoch of the server's cache; 0 if the server does not report it.
    pub(crate) cache_id: u64,
    /// Whether all content is lost at the end of that epoch.
    pub(crate) volatile: bool,
    /// Identity of the export, if the server reports it.
    pub(crate) export_id: Option<ExportId>,
    /// Whether another session may still write to the export, until this volume is promoted.
    pub(crate) is_shared: bool,
}

impl OpenDevice {
    /// Device that has not been opened yet: no IO fits within it.
    fn unknown() -> Self {
        Self {
            device_id: NO_DEVICE,
            geometry: Geometry { read_only: true, ..Geometry::plain(0) },
            writes_zeroes: false,
            cache_id: 0,
            volatile: false,
            export_id: None,
            is_shared: false,
        }
    }
}

/// Token shared by the users of a device, but not by later devices with the same number.
pub(crate) type DeviceToken = Rc<()>;

/// IO that has ended.
#[derive(Debug)]
struct Ended {
    completion: Completion,
    /// For a flush, which may report a loss: its mark, and the number of losses when it ended.
    flush: Option<(FlushMark, u64)>,
}

/// Completion that the user has reaped.
#[derive(Debug)]
pub(crate) struct Reaped {
    pub(crate) completion: Completion,
    /// Number of losses at the end of a flush.
    pub(crate) losses: Option<u64>,
}

#[derive(Debug)]
struct Device {
    info: Arc<OpenDevice>,
    standing: Standing,
    /// Whether new IO fails immediately, because there was no path for too long or will never be
    /// one.
    failing: bool,
    cache: Option<Arc<CacheWatch>>,
    /// Whether the front end itself reports losses to each of its users.
    reports_elsewhere: bool,
    claim: Claim,
    /// Number of IOs taken and not yet reaped.
    inflight: usize,
    completed: VecDeque<Ended>,
    /// Tags of unfinished IOs whose failure has yet to be reported to the user.
    given_up: VecDeque<u64>,
    token: DeviceToken,
}

impl Device {
    fn new() -> Self {
        Self {
            info: Arc::new(OpenDevice::unknown()),
            standing: Standing::New,
            failing: false,
            cache: None,
            reports_elsewhere: false,
            claim: Claim::default(),
            inflight: 0,
            completed: VecDeque::with_capacity(IOS_MAX),
            given_up: VecDeque::new(),
            token: DeviceToken::default(),
        }
    }
}

/// Whether the user claims a device that another session may write to.
#[derive(Clone, Copy, Debug, Default)]
struct Claim {
    is_made: bool,
    /// Value of `is_made` in the last report to the control shard.
    is_reported: bool,
}

/// Whether a device accepts IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The device has not been open yet.
    New,
    /// The device has been open; whether IO flows depends on the paths.
    Open,
    /// The user has closed the device.
    Closed,
    /// The device's number is free.
    Free,
}

/// Devices of a session on one shard. No other part reads geometry.
#[derive(Debug)]
pub(crate) struct DeviceTable {
    rows: Vec<Device>,
    /// Devices that are open on the server.
    serving: DeviceSet,
    /// Devices whose claims may differ from the last report to the control shard.
    claims: DeviceSet,
    /// IOs taken and not yet reaped.
    shares: Shares,
    /// Number of ended IOs not yet reaped.
    completed: usize,
}

impl DeviceTable {
    pub(crate) fn new() -> Self {
        let (rows, completed) = (Vec::new(), 0);
        let [serving, claims] = [DeviceSet::default(); 2];
        Self { rows, serving, claims, shares: Shares::new(IOS_MAX), completed }
    }

    fn row(&self, device: DeviceIndex) -> &Device {
        &self.rows[device.index()]
    }

    fn row_mut(&mut self, device: DeviceIndex) -> &mut Device {
        &mut self.rows[device.index()]
    }

    /// Adds a device that has not been open yet, under the next number or a free one.
    pub(crate) fn add(&mut self, device: DeviceIndex) {
        match self.rows.get_mut(device.index()) {
            Some(free) => {
                assert_eq!(free.standing, Standing::Free, "{device:?} is in use");
                *free = Device::new();
            }
            None => self.rows.push(Device::new()),
        }
        self.shares.add();
    }

    /// Frees the number of a closed device that has no IO left.
    pub(crate) fn free(&mut self, device: DeviceIndex) {
        let row = &mut self.rows[device.index()];
        for _ in 0..std::mem::take(&mut row.inflight) {
            self.shares.give(device.index());
        }
        self.completed -= row.completed.len();
        (row.standing, row.token) = (Standing::Free, DeviceToken::default());
        (row.completed, row.given_up) = (VecDeque::new(), VecDeque::new());
        self.serving.remove(device);
        self.claims.remove(device);
        self.shares.remove();
    }

    /// Drops completions of devices without a user, which nothing would reap. A user may end before
    /// the shard learns that its device is closed.
    pub(crate) fn drop_unclaimed(&mut self) {
        if self.completed == 0 {
            return;
        }
        for device in DeviceIndex::all().take(self.rows.len()) {
            while !self.has_user(device) && self.pop(device).is_some() {}
        }
    }

    fn has_user(&self, device: DeviceIndex) -> bool {
        Rc::strong_count(&self.row(device).token) > 1
    }

    /// Token of the device's users.
    pub(crate) fn token(&self, device: DeviceIndex) -> &DeviceToken {
        &self.row(device).token
    }

    /// Whether the device's user has yet to reap completions.
    pub(crate) fn is_left(&self, device: DeviceIndex) -> bool {
        self.row(device).inflight > 0 && self.has_user(device)
    }

    /// Whether the device may take another IO.
    pub(crate) fn has_room(&self, device: DeviceIndex) -> bool {
        self.shares.may_take(device.index())
    }

    /// Sets the tracker of the device's writes and flushes.
    pub(crate) fn set_cache(&mut self, device: DeviceIndex, cache: Arc<CacheWatch>) {
        self.row_mut(device).cache = Some(cache);
    }

    /// Number of times that the server may have lost acknowledged writes of the device.
    pub(crate) fn cache_losses(&self, device: DeviceIndex) -> u64 {
        let cache = self.rows.get(device.index()).and_then(|row| row.cache.as_ref());
        cache.map_or(0, |cache| cache.losses().count())
    }

    /// Number of flushes that succeeded on the server but reported a loss to their user.
    pub(crate) fn failed_flushes(&self, device: DeviceIndex) -> u64 {
        let cache = self.rows.get(device.index()).and_then(|row| row.cache.as_ref());
        cache.map_or(0, |cache| cache.losses().failed_flushes())
    }

    /// Records that the device is open on the server, with this description.
    pub(crate) fn open(&mut self, device: DeviceIndex, info: Arc<OpenDevice>) {
        let row = self.row_mut(device);
        row.info = info;
        if row.standing == Standing::New {
            row.standing = Standing::Open;
        }
        self.serving.insert(device);
    }

    /// Records that the device is no longer open on the server; its IO waits.
    pub(crate) fn pause(&mut self, device: DeviceIndex) {
        self.serving.remove(device);
    }

    /// Records that the user claims the device. Returns whether no other session can write to it.
    pub(crate) fn claim(&mut self, device: DeviceIndex) -> bool {
        let row = self.row_mut(device);
        let is_shared = row.info.is_shared;
        if is_shared && !std::mem::replace(&mut row.claim.is_made, true) {
            self.claims.insert(device);
        }
        !is_shared
    }

    /// Records that the user no longer claims the device.
    pub(crate) fn release_claim(&mut self, device: DeviceIndex) {
        if std::mem::take(&mut self.row_mut(device).claim.is_made) {
            self.claims.insert(device);
        }
    }

    /// Takes the next device whose claim has changed since the last report, and whether it is
    /// claimed.
    pub(crate) fn take_claim(&mut self) -> Option<(DeviceIndex, bool)> {
        loop {
            let device = self.claims.iter().next()?;
            self.claims.remove(device);
            let Claim { is_made, is_reported } = &mut self.row_mut(device).claim;
            if std::mem::replace(is_reported, *is_made) != *is_made {
                return Some((device, *is_made));
            }
        }
    }

    /// Stops the device from taking IO.
    pub(crate) fn close(&mut self, device: DeviceIndex) {
        self.row_mut(device).standing = Standing::Closed;
    }

    /// Devices to which IO may flow.
    pub(crate) fn serving(&self) -> DeviceSet {
        self.serving
    }

    /// Sets whether new IO of the device fails immediately.
    pub(crate) fn set_failing(&mut self, device: DeviceIndex, failing: bool) {
        self.row_mut(device).failing = failing;
    }

    /// Lets all devices take IO until they are set to fail again.
    pub(crate) fn fail_none(&mut self) {
        self.rows.iter_mut().for_each(|row| row.failing = false);
    }

    /// Whether new IO of the device fails immediately.
    pub(crate) fn is_failing(&self, device: DeviceIndex) -> bool {
        self.row(device).failing
    }

    /// Whether the device was ever open.
    pub(crate) fn is_known(&self, device: DeviceIndex) -> bool {
        let known = |row: &Device| matches!(row.standing, Standing::Open | Standing::Closed);
        self.rows.get(device.index()).is_some_and(known)
    }

    /// Devices in use, including those being closed.
    pub(crate) fn all(&self) -> impl Iterator<Item = DeviceIndex> {
        let rows = DeviceIndex::all().zip(&self.rows);
        rows.filter(|(_, row)| row.standing != Standing::Free).map(|(device, _)| device)
    }

    /// Whether the device's user has closed it.
    pub(crate) fn is_closed(&self, device: DeviceIndex) -> bool {
        self.row(device).standing == Standing::Closed
    }

    /// Server's description of a known device.
    pub(crate) fn info(&self, device: DeviceIndex) -> &Arc<OpenDevice> {
        &self.row(device).info
    }

    /// Tracker of the device's writes and flushes.
    pub(crate) fn cache(&self, device: DeviceIndex) -> Option<&CacheWatch> {
        self.row(device).cache.as_deref()
    }

    /// Makes the caller responsible for reporting losses from now on.
    pub(crate) fn take_losses(&mut self, device: DeviceIndex) -> Option<Arc<Losses>> {
        let row = self.row_mut(device);
        let losses = row.cache.as_ref()?.losses();
        row.reports_elsewhere = true;
        Some(losses)
    }

    /// Counts an IO of the device.
    pub(crate) fn taken(&mut self, device: DeviceIndex) {
        self.row_mut(device).inflight += 1;
        self.shares.take(device.index());
    }

    /// Ends an IO of the device. `mark` is set for a flush, which may report a loss.
    pub(crate) fn ended(
        &mut self,
        device: DeviceIndex,
        completion: Completion,
        mark: Option<FlushMark>,
    ) {
        let row = self.row_mut(device);
        let losses = row.cache.as_ref().map(|cache| cache.losses().count());
        row.completed.push_back(Ended { completion, flush: mark.zip(losses) });
        self.completed += 1;
    }

    /// Queues the failure of an unfinished IO for its user, once for each IO.
    pub(crate) fn give_up(&mut self, device: DeviceIndex, tag: u64) {
        self.row_mut(device).given_up.push_back(tag);
    }

    /// Takes the tag of the next IO whose failure was queued.
    pub(crate) fn take_given_up(&mut self, device: DeviceIndex) -> Option<u64> {
        self.row_mut(device).given_up.pop_front()
    }

    /// Takes the next completion of the device, for its user.
    pub(crate) fn reap(&mut self, device: DeviceIndex) -> Option<Reaped> {
        if self.completed == 0 {
            return None;
        }
        let Ended { completion: Completion { tag, status, .. }, flush } = self.pop(device)?;
        let row = self.row(device);
        // A loss counts as reported only now: a flush that another shard takes before the user
        // knows of this failure must fail too.
        let status = match (flush, &row.cache, row.reports_elsewhere) {
            (Some((mark, losses)), Some(cache), false) => cache.report(mark, status, losses),
            _ => status,
        };
        let losses = flush.map(|(_, losses)| losses);
        Some(Reaped { completion: Completion::new(tag, status), losses })
    }

    fn pop(&mut self, device: DeviceIndex) -> Option<Ended> {
        let row = self.row_mut(device);
        // The user takes failures before completions; the tag may be reused now.
        row.given_up.clear();
        let ended = row.completed.pop_front()?;
        row.inflight -= 1;
        self.completed -= 1;
        self.shares.give(device.index());
        Some(ended)
    }

    /// Whether completions are waiting to be reaped.
    pub(crate) fn has_completions(&self) -> bool {
        self.completed > 0
    }

    /// Number of IOs of a device that were taken and not yet reaped.
    pub(crate) fn inflight_of(&self, device: DeviceIndex) -> usize {
        self.row(device).inflight
    }
}
