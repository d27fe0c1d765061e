//! The devices of a session.
//!
//! A session carries several: each request names its device, and each device has a geometry, a
//! cache epoch and completions of its own. The commands open one.

use std::collections::VecDeque;
use std::sync::Arc;

use rtrs_core::block::{Completion, Geometry};
use rtrs_core::identity::ExportId;
use rtrs_core::losses::Losses;
use rtrs_core::status::IoStatus;

use super::cache_epoch::{CacheWatch, FlushMark};

/// Device ids count up from 0, so this one is nobody's.
pub(crate) const NO_DEVICE: u32 = i32::MAX as u32;

/// IOs a shard takes before it says that it is full.
pub(crate) const IOS_MAX: usize = 1024;

/// Bytes of zeroes a shard has, and the most that one IO writes of them.
pub(crate) const ZEROES_LEN: u32 = 1 << 20;

/// The device as the server described it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenDevice {
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

/// The number of a device in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DeviceIndex(pub(crate) u16);

impl DeviceIndex {
    /// The device that every session begins with.
    pub(crate) const FIRST: Self = Self(0);
}

/// A device as a shard has it.
#[derive(Debug)]
struct Device {
    info: Arc<OpenDevice>,
    standing: Standing,
    cache: Option<Arc<CacheWatch>>,
    /// The front end reports losses to each of its users itself.
    reports_elsewhere: bool,
    /// IOs taken and not yet reaped.
    inflight: usize,
    completed: VecDeque<Completion>,
    /// Tags of IOs that have not ended and whose user is to be told that they failed.
    given_up: VecDeque<u64>,
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
}

/// The devices of a session as one shard has them. Geometry is read here and nowhere else.
#[derive(Debug, Default)]
pub(crate) struct DeviceTable {
    rows: Vec<Device>,
    /// The server has the session's devices open.
    serving: bool,
}

impl DeviceTable {
    fn row(&self, device: DeviceIndex) -> &Device {
        &self.rows[usize::from(device.0)]
    }

    /// The row of a device, which is made if there is none.
    fn row_mut(&mut self, device: DeviceIndex) -> &mut Device {
        let at = usize::from(device.0);
        while self.rows.len() <= at {
            self.rows.push(Device {
                info: Arc::new(OpenDevice::unknown()),
                standing: Standing::New,
                cache: None,
                reports_elsewhere: false,
                inflight: 0,
                completed: VecDeque::with_capacity(IOS_MAX),
                given_up: VecDeque::new(),
            });
        }
        &mut self.rows[at]
    }

    /// This tracks writes and flushes of the device.
    pub(crate) fn set_cache(&mut self, device: DeviceIndex, cache: Arc<CacheWatch>) {
        self.row_mut(device).cache = Some(cache);
    }

    /// Times that the server may have lost acknowledged writes of the device.
    pub(crate) fn cache_losses(&self, device: DeviceIndex) -> u64 {
        let cache = self.rows.get(usize::from(device.0)).and_then(|row| row.cache.as_ref());
        cache.map_or(0, |cache| cache.losses().count())
    }

    /// The device is open at the server, and this is what it says of it.
    pub(crate) fn open(&mut self, device: DeviceIndex, info: Arc<OpenDevice>) {
        let row = self.row_mut(device);
        (row.info, row.standing) = (info, Standing::Open);
        self.serving = true;
    }

    /// No device is open at the server any more; IO waits.
    pub(crate) fn pause(&mut self) {
        self.serving = false;
    }

    /// The device takes no IO any more.
    pub(crate) fn close(&mut self, device: DeviceIndex) {
        self.row_mut(device).standing = Standing::Closed;
    }

    /// True while IO may flow.
    pub(crate) fn is_serving(&self) -> bool {
        self.serving
    }

    /// True when the device was open once.
    pub(crate) fn is_known(&self, device: DeviceIndex) -> bool {
        self.rows.get(usize::from(device.0)).is_some_and(|row| row.standing != Standing::New)
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
        Some(done)
    }

    /// True when completions wait to be reaped.
    pub(crate) fn has_completions(&self) -> bool {
        self.rows.iter().any(|row| !row.completed.is_empty())
    }

    /// IOs of all devices, taken and not yet reaped.
    pub(crate) fn inflight(&self) -> usize {
        self.rows.iter().map(|row| row.inflight).sum()
    }

    /// The same of one device.
    pub(crate) fn inflight_of(&self, device: DeviceIndex) -> usize {
        self.row(device).inflight
    }
}
