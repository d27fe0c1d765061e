//! The devices of a session, as one shard has them.
//!
//! Each request names its device, and each device has a geometry, a cache epoch and completions of
//! its own. All share the rows for IOs. A number that was given back is another
//! device's later; who has the one before is told by a token.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::block::{Completion, Geometry};
use rtrs_core::identity::ExportId;
use rtrs_core::losses::Losses;
use rtrs_core::shares::Shares;
use rtrs_core::status::IoStatus;

use super::cache_epoch::{CacheWatch, FlushMark};
use super::device_set::{DeviceIndex, DeviceSet};

/// Device ids count up from 0, so this one is nobody's.
pub(crate) const NO_DEVICE: u32 = i32::MAX as u32;

/// IOs a shard takes before it says that it is full.
pub(crate) const IOS_MAX: usize = 1024;

/// Bytes of zeroes a shard has, and the most that one IO writes of them.
pub(crate) const ZEROES_LEN: u32 = 1 << 20;

/// The device as the server described it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenDevice {
    /// The server's number for it on the path that opened it last.
    pub(crate) device_id: u32,
    pub(crate) geometry: Geometry,
    /// The server itself writes zeroes; otherwise the session does.
    pub(crate) writes_zeroes: bool,
    /// The epoch of the server's cache; 0 when it does not say.
    pub(crate) cache_id: u64,
    /// With that epoch all content ends.
    pub(crate) volatile: bool,
    /// Which export it is, if the server says.
    pub(crate) export_id: Option<ExportId>,
}

impl OpenDevice {
    /// A device that was not open yet: nothing fits into it.
    fn unknown() -> Self {
        Self {
            device_id: NO_DEVICE,
            geometry: Geometry { read_only: true, ..Geometry::plain(0) },
            writes_zeroes: false,
            cache_id: 0,
            volatile: false,
            export_id: None,
        }
    }
}

/// What the users of a device have in common, and no other device that has its number later.
pub(crate) type DeviceToken = Rc<()>;

/// A device as a shard has it.
#[derive(Debug)]
struct Device {
    info: Arc<OpenDevice>,
    standing: Standing,
    /// No path for too long, or none ever again: what comes ends at once.
    failing: bool,
    cache: Option<Arc<CacheWatch>>,
    /// The front end reports losses to each of its users itself.
    reports_elsewhere: bool,
    /// IOs taken and not yet reaped.
    inflight: usize,
    completed: VecDeque<Completion>,
    /// Tags of IOs that have not ended and whose user is to be told that they failed.
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
            inflight: 0,
            completed: VecDeque::with_capacity(IOS_MAX),
            given_up: VecDeque::new(),
            token: DeviceToken::default(),
        }
    }
}

/// Whether a device takes IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It was not open yet.
    New,
    /// It was open; whether IO flows depends on the paths.
    Open,
    /// Its user closed it.
    Closed,
    /// Nothing of it is left: its number is free.
    Free,
}

/// The devices of a session as one shard has them. Geometry is read here and nowhere else.
#[derive(Debug)]
pub(crate) struct DeviceTable {
    rows: Vec<Device>,
    /// Devices that the server has open.
    serving: DeviceSet,
    /// IOs taken and not yet reaped.
    shares: Shares,
    /// Those of them that have ended.
    completed: usize,
}

impl DeviceTable {
    pub(crate) fn new() -> Self {
        let (rows, serving, completed) = (Vec::new(), DeviceSet::default(), 0);
        Self { rows, serving, shares: Shares::new(IOS_MAX), completed }
    }

    fn row(&self, device: DeviceIndex) -> &Device {
        &self.rows[device.index()]
    }

    fn row_mut(&mut self, device: DeviceIndex) -> &mut Device {
        &mut self.rows[device.index()]
    }

    /// A device that was not open yet, under the next number or one that is free.
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

    /// Nothing of a closed device is left: another may get its number.
    pub(crate) fn free(&mut self, device: DeviceIndex) {
        let row = &mut self.rows[device.index()];
        for _ in 0..std::mem::take(&mut row.inflight) {
            self.shares.give(device.index());
        }
        self.completed -= row.completed.len();
        (row.standing, row.token) = (Standing::Free, DeviceToken::default());
        (row.completed, row.given_up) = (VecDeque::new(), VecDeque::new());
        self.serving.remove(device);
        self.shares.remove();
    }

    /// Drops completions of devices without a user, which nothing would reap. A user may be gone
    /// before the shard hears that the device is closed.
    pub(crate) fn drop_unclaimed(&mut self) {
        if self.completed == 0 {
            return;
        }
        for device in DeviceIndex::all().take(self.rows.len()) {
            while !self.has_user(device) && self.reap(device).is_some() {}
        }
    }

    fn has_user(&self, device: DeviceIndex) -> bool {
        Rc::strong_count(&self.row(device).token) > 1
    }

    /// What the users of a device have in common.
    pub(crate) fn token(&self, device: DeviceIndex) -> &DeviceToken {
        &self.row(device).token
    }

    /// True while its user has still to reap what has ended.
    pub(crate) fn is_left(&self, device: DeviceIndex) -> bool {
        self.row(device).inflight > 0 && self.has_user(device)
    }

    /// True while a device may have another IO.
    pub(crate) fn has_room(&self, device: DeviceIndex) -> bool {
        self.shares.may_take(device.index())
    }

    /// This tracks writes and flushes of the device.
    pub(crate) fn set_cache(&mut self, device: DeviceIndex, cache: Arc<CacheWatch>) {
        self.row_mut(device).cache = Some(cache);
    }

    /// Times that the server may have lost acknowledged writes of the device.
    pub(crate) fn cache_losses(&self, device: DeviceIndex) -> u64 {
        let cache = self.rows.get(device.index()).and_then(|row| row.cache.as_ref());
        cache.map_or(0, |cache| cache.losses().count())
    }

    /// The device is open at the server, and this is what it says of it.
    pub(crate) fn open(&mut self, device: DeviceIndex, info: Arc<OpenDevice>) {
        let row = self.row_mut(device);
        row.info = info;
        if row.standing == Standing::New {
            row.standing = Standing::Open;
        }
        self.serving.insert(device);
    }

    /// The device is not open at the server any more; its IO waits.
    pub(crate) fn pause(&mut self, device: DeviceIndex) {
        self.serving.remove(device);
    }

    /// The device takes no IO any more.
    pub(crate) fn close(&mut self, device: DeviceIndex) {
        self.row_mut(device).standing = Standing::Closed;
    }

    /// Devices to which IO may flow.
    pub(crate) fn serving(&self) -> DeviceSet {
        self.serving
    }

    /// What comes for the device ends at once, or does not any more.
    pub(crate) fn set_failing(&mut self, device: DeviceIndex, failing: bool) {
        self.row_mut(device).failing = failing;
    }

    /// No device fails IO until it is said again.
    pub(crate) fn fail_none(&mut self) {
        self.rows.iter_mut().for_each(|row| row.failing = false);
    }

    /// True while what comes for the device ends at once.
    pub(crate) fn is_failing(&self, device: DeviceIndex) -> bool {
        self.row(device).failing
    }

    /// True when the device was open once.
    pub(crate) fn is_known(&self, device: DeviceIndex) -> bool {
        let known = |row: &Device| matches!(row.standing, Standing::Open | Standing::Closed);
        self.rows.get(device.index()).is_some_and(known)
    }

    /// Devices that are there, or not quite gone.
    pub(crate) fn all(&self) -> impl Iterator<Item = DeviceIndex> {
        let rows = DeviceIndex::all().zip(&self.rows);
        rows.filter(|(_, row)| row.standing != Standing::Free).map(|(device, _)| device)
    }

    /// True when the device's user has closed it.
    pub(crate) fn is_closed(&self, device: DeviceIndex) -> bool {
        self.row(device).standing == Standing::Closed
    }

    /// What the server said of a device that is known.
    pub(crate) fn info(&self, device: DeviceIndex) -> &Arc<OpenDevice> {
        &self.row(device).info
    }

    /// What tracks its writes and flushes.
    pub(crate) fn cache(&self, device: DeviceIndex) -> Option<&CacheWatch> {
        self.row(device).cache.as_deref()
    }

    /// From now on the caller reports losses to the users of the device.
    pub(crate) fn take_losses(&mut self, device: DeviceIndex) -> Option<Arc<Losses>> {
        let row = self.row_mut(device);
        let losses = row.cache.as_ref()?.losses();
        row.reports_elsewhere = true;
        Some(losses)
    }

    /// An IO of the device was taken.
    pub(crate) fn taken(&mut self, device: DeviceIndex) {
        self.row_mut(device).inflight += 1;
        self.shares.take(device.index());
    }

    /// An IO of the device has ended. `mark` is that of a flush, which may report a loss. Returns
    /// how it ended.
    pub(crate) fn ended(
        &mut self,
        device: DeviceIndex,
        Completion { tag, status }: Completion,
        mark: Option<FlushMark>,
    ) -> IoStatus {
        let row = self.row_mut(device);
        let status = match (mark, &row.cache, row.reports_elsewhere) {
            (Some(mark), Some(cache), false) => cache.report(mark, status),
            _ => status,
        };
        row.completed.push_back(Completion { tag, status });
        self.completed += 1;
        status
    }

    /// The user of this IO is to be told that it has failed; it goes on. Once for each IO.
    pub(crate) fn give_up(&mut self, device: DeviceIndex, tag: u64) {
        self.row_mut(device).given_up.push_back(tag);
    }

    /// The next IO whose user is to be told that.
    pub(crate) fn take_given_up(&mut self, device: DeviceIndex) -> Option<u64> {
        self.row_mut(device).given_up.pop_front()
    }

    /// The next IO of the device that has ended.
    pub(crate) fn reap(&mut self, device: DeviceIndex) -> Option<Completion> {
        let row = self.row_mut(device);
        // Whoever takes them does so before, and a tag may be used anew.
        row.given_up.clear();
        let done = row.completed.pop_front()?;
        row.inflight -= 1;
        self.completed -= 1;
        self.shares.give(device.index());
        Some(done)
    }

    /// True when completions wait to be reaped.
    pub(crate) fn has_completions(&self) -> bool {
        self.completed > 0
    }

    /// IOs of a device, taken and not yet reaped.
    pub(crate) fn inflight_of(&self, device: DeviceIndex) -> usize {
        self.row(device).inflight
    }
}
