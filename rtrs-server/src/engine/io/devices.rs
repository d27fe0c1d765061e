//! The block devices open on one shard, at most one per export, shared by all sessions.
//!
//! A device is opened on a shard by the first request that needs it there and stays open until no
//! session has its export open. Requests that a full device refused wait here in order.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Completion, Core, Geometry, Io, SharedErrors};
use rtrs_core::ids::CoreIndex;
use rtrs_core::mem::Region;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Instant, earliest};

use super::device_errors::DeviceErrors;
use super::overlap::OrphanedWrites;
use super::progress::IoProgress;
use super::table::RequestRef;
use crate::backend::INFLIGHT_MAX;
use crate::engine::epoch::SyncEpoch;
use crate::engine::message::{Outbox, ShardMessage};
use crate::export::{Export, ExportIndex, ExportTable};
use crate::stats::{ServerTimes, ShardExportCounters};

/// Bytes that devices may be given in a turn. A file in memory reads and writes within `submit`: by
/// then nothing has been answered, and with much more the data would leave the CPU's cache before
/// they are sent.
const TURN: usize = 256 << 10;
/// What an IO costs beside its bytes, in bytes: 16 IOs of 4 KiB fill a turn.
const IO_COST: usize = 12 << 10;

#[derive(Debug)]
struct OpenDevice {
    device: Box<dyn BlockDevice>,
    waiting: VecDeque<RequestRef>,
    closing: bool,
    /// Numbers of syncs that are out, lowest first.
    syncs: VecDeque<u64>,
    /// Which syncs have numbers.
    shared: SharedErrors,
    errors: DeviceErrors,
    counters: Arc<ShardExportCounters>,
    /// As long as it is held, its place in the table means nothing else.
    export: Arc<Export>,
}

/// One shard's devices.
#[derive(Debug)]
pub(super) struct Devices {
    core: Core,
    exports: Arc<ExportTable>,
    cores: u16,
    /// By place.
    open: Vec<Option<OpenDevice>>,
    /// The places with an open device.
    in_use: Vec<ExportIndex>,
    /// Bytes of the IOs submitted in this turn, and [`IO_COST`] for each.
    begun: usize,
}

impl Devices {
    /// Nothing open yet, on one of so many shards.
    pub(super) fn new(core: Core, exports: Arc<ExportTable>, cores: u16) -> Self {
        Self { core, exports, cores, open: Vec::new(), in_use: Vec::new(), begun: 0 }
    }

    /// The places of open devices, by number; what is opened meanwhile comes last.
    pub(super) fn in_use(&self, number: usize) -> Option<ExportIndex> {
        self.in_use.get(number).copied()
    }

    /// A device that is known to be open, since a request is at it. Panics when it is not.
    fn at(&self, export: ExportIndex) -> &OpenDevice {
        let open = self.open[export.index()].as_ref();
        open.unwrap_or_else(|| panic!("{export:?} is not open"))
    }

    fn at_mut(&mut self, export: ExportIndex) -> &mut OpenDevice {
        let open = self.open[export.index()].as_mut();
        open.unwrap_or_else(|| panic!("{export:?} is not open"))
    }

    /// Opens the export on this shard unless it is open, and makes `region` known to it if
    /// `attach`.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn open(
        &mut self,
        export: ExportIndex,
        attach: Option<&Arc<Region>>,
    ) -> io::Result<&mut (dyn BlockDevice + 'static)> {
        if self.open.len() <= export.index() {
            self.open.resize_with(export.index() + 1, || None);
        }
        let slot = &mut self.open[export.index()];
        let open = match slot {
            Some(open) => open,
            None => {
                // The session may just have closed it.
                let missing = || io::Error::from(io::ErrorKind::NotFound);
                let at = export;
                let export = self.exports.get(at).ok_or_else(missing)?;
                let device = export.source.open(&self.core)?;
                let waiting = VecDeque::new();
                export.epoch.set_shards(self.cores);
                let shared = export.source.shared_errors();
                let syncs = VecDeque::with_capacity(INFLIGHT_MAX);
                let errors = DeviceErrors::default();
                self.in_use.push(at);
                let counters = export.counters.shard(self.core.index);
                slot.insert(OpenDevice {
                    device,
                    waiting,
                    closing: false,
                    syncs,
                    shared,
                    errors,
                    counters,
                    export,
                })
            }
        };
        open.closing = false;
        open.device.refresh();
        if let Some(region) = attach {
            open.device.attach_region(region)?;
        }
        Ok(&mut *open.device)
    }

    /// The epoch of an open export.
    pub(super) fn epoch(&self, export: ExportIndex) -> &SyncEpoch {
        &self.at(export).export.epoch
    }

    /// The name of an open export.
    pub(super) fn name(&self, export: ExportIndex) -> &str {
        &self.at(export).export.name
    }

    /// A number for a sync that is about to be submitted on this shard, a flush or not. None where
    /// it takes no other's error.
    pub(super) fn draw(&mut self, export: ExportIndex, flush: bool) -> Option<u64> {
        let core = self.core.index;
        let open = self.at_mut(export);
        if open.shared == SharedErrors::None || open.shared == SharedErrors::Flushes && !flush {
            return None;
        }
        let number = open.export.epoch.draw(core, open.syncs.front().copied());
        open.syncs.push_back(number);
        Some(number)
    }

    /// A sync of this shard is back. True when other shards wait for that.
    pub(super) fn back(&mut self, export: ExportIndex, number: u64) -> bool {
        let core = self.core.index;
        let open = self.at_mut(export);
        if let Ok(at) = open.syncs.binary_search(&number) {
            open.syncs.remove(at);
        }
        open.export.epoch.back(core, open.syncs.front().copied())
    }

    /// Wakes the other shards: a sync of this one is back, for which requests may wait there.
    pub(super) fn wake_others(&self, out: &mut Outbox) {
        for core in (0..self.cores).filter(|core| *core != self.core.index.0) {
            out.shard(CoreIndex(core), ShardMessage::SyncBack);
        }
    }

    /// What closed paths have left running at an export, on all shards.
    pub(super) fn orphaned(&self, export: ExportIndex) -> &OrphanedWrites {
        self.exports.orphaned_writes(export)
    }

    /// Size, limits and abilities of an open device.
    pub(super) fn geometry(&self, export: ExportIndex) -> &Geometry {
        self.at(export).device.geometry()
    }

    /// Submits an IO to an open device.
    ///
    /// # Errors
    /// The IO, when the device is full.
    pub(super) fn submit(&mut self, export: ExportIndex, io: Io) -> Result<(), Io> {
        self.begun += io.len as usize + IO_COST;
        self.at_mut(export).device.submit(io)
    }

    /// True when IOs worth [`TURN`] were submitted since the last [`begin_turn`](Self::begin_turn).
    pub(super) fn is_turn_full(&self) -> bool {
        self.begun >= TURN
    }

    /// What is submitted from here on belongs to the next turn.
    pub(super) fn begin_turn(&mut self) {
        self.begun = 0;
    }

    /// Counts an IO that is about to be answered, and where its time went.
    pub(super) fn answered(&self, io: &IoProgress, good: bool, took: ServerTimes) {
        self.at(io.export).counters.answered(io.op, good, io.len, took);
    }

    /// Counts and logs that the device failed a step of an IO.
    pub(super) fn log_error(&mut self, io: &IoProgress, status: IoStatus, now: Instant) {
        let open = self.at_mut(io.export);
        open.counters.device_errors.add(1);
        open.errors.log(&open.export.name, io, status, now);
    }

    /// Lets a request wait for room in an open device.
    pub(super) fn wait(&mut self, export: ExportIndex, request: RequestRef) {
        let open = self.at_mut(export);
        open.counters.queue_full.add(1);
        open.waiting.push_back(request);
    }

    /// Puts a request back that met a full device again.
    pub(super) fn wait_first(&mut self, export: ExportIndex, request: RequestRef) {
        self.at_mut(export).waiting.push_front(request);
    }

    /// True when requests wait for the open device, so that a new one has to queue up.
    pub(super) fn is_contended(&self, export: ExportIndex) -> bool {
        !self.at(export).waiting.is_empty()
    }

    /// The next request that waits for the device at a place.
    pub(super) fn next_waiting(&mut self, at: ExportIndex) -> Option<RequestRef> {
        self.open[at.index()].as_mut()?.waiting.pop_front()
    }

    /// Moves the device at a place on. True when anything happened.
    pub(super) fn poll(&mut self, at: ExportIndex, now: Instant) -> bool {
        self.open[at.index()].as_mut().is_some_and(|open| open.device.poll(now))
    }

    /// The next finished IO of the device at a place.
    pub(super) fn reap(&mut self, at: ExportIndex) -> Option<Completion> {
        self.open[at.index()].as_mut()?.device.reap()
    }

    /// Nobody has the export open: its device closes when its last IO has ended.
    pub(super) fn close(&mut self, export: ExportIndex) {
        if let Some(Some(open)) = self.open.get_mut(export.index()) {
            open.closing = true;
        }
    }

    /// Closes the device at a place if it may be closed now. True when it did.
    pub(super) fn sweep(&mut self, at: ExportIndex) -> bool {
        let idle = |open: &OpenDevice| {
            open.closing && open.device.inflight() == 0 && open.waiting.is_empty()
        };
        let closes = self.open[at.index()].as_ref().is_some_and(idle);
        if closes {
            self.open[at.index()] = None;
            self.in_use.retain(|other| *other != at);
        }
        closes
    }

    /// When a device wants to be polled.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let open = self.in_use.iter().filter_map(|at| self.open[at.index()].as_ref());
        open.fold(None, |at, open| earliest(at, open.device.deadline()))
    }
}
