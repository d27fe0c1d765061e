//! Block devices open on one shard, at most one per export, shared by all sessions.
//!
//! A device is opened on a shard by the first request that needs it there and stays open until no
//! session has its export open. Requests that a full device refused wait here in order.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Completion, Core, Geometry, Io, IoOp, SharedErrors};
use rtrs_core::ids::CoreIndex;
use rtrs_core::mem::Region;
use rtrs_core::ranges::Ranges;
use rtrs_core::status::IoStatus;
use rtrs_core::sync_order::ShardSyncs;
use rtrs_core::time::{Instant, earliest};

use super::delayed::Delayed;
use super::device_errors::DeviceErrors;
use super::known_extents::KnownExtents;
use super::overlap::OrphanedWrites;
use super::progress::IoProgress;
use super::table::{PathRow, RequestRef};
use crate::backend::INFLIGHT_MAX;
use crate::engine::epoch::SyncEpoch;
use crate::engine::message::{Outbox, ShardMessage};
use crate::engine::sync_failures::FailedSyncs;
use crate::export::{Export, ExportIndex, ExportTable};
use crate::stats::{ServerTimes, ShardExportCounters};

/// Number of bytes submitted to devices that fills a turn. An in-memory file reads and writes
/// within `submit`, before anything has been answered: with a much higher limit, the data would
/// leave the CPU's cache before it is sent.
const TURN: usize = 256 << 10;
/// Cost of an IO in addition to its bytes, in bytes: 16 IOs of 4 KiB fill a turn.
const IO_COST: usize = 12 << 10;

#[derive(Debug)]
struct OpenDevice {
    device: Box<dyn BlockDevice>,
    waiting: VecDeque<RequestRef>,
    closing: bool,
    /// Whether the device is polled in every turn.
    polled: bool,
    /// Outstanding syncs.
    syncs: ShardSyncs,
    /// Kinds of syncs that are numbered.
    shared: SharedErrors,
    errors: DeviceErrors,
    counters: Arc<ShardExportCounters>,
    turns: Arc<Ranges>,
    /// Requests that wait for the limits of the export; None if there are no limits.
    delayed: Option<Box<Delayed>>,
    /// None if other programs may change the content.
    extents: Option<Box<KnownExtents>>,
    /// Keeps the export's index in the table from being reused.
    export: Arc<Export>,
}

/// Devices of one shard.
#[derive(Debug)]
pub(super) struct Devices {
    core: Core,
    exports: Arc<ExportTable>,
    cores: u16,
    /// Open devices, by index of their export.
    open: Vec<Option<OpenDevice>>,
    /// Exports whose device has something to do.
    polled: Vec<ExportIndex>,
    /// Index of the next idle device to poll.
    next_idle: usize,
    /// Bytes of the IOs submitted in this turn, plus [`IO_COST`] for each.
    begun: usize,
    /// Time at which suppressed log lines about failed syncs are to be reported.
    suppressed_until: Option<Instant>,
    /// Value of [`ExportTable::partial_writes`] when this shard last scanned for them.
    scanned_at: u64,
}

impl Devices {
    /// Creates the table of one of `cores` shards, with nothing open.
    pub(super) fn new(core: Core, exports: Arc<ExportTable>, cores: u16) -> Self {
        Self {
            core,
            exports,
            cores,
            open: Vec::new(),
            polled: Vec::new(),
            next_idle: 0,
            begun: 0,
            suppressed_until: None,
            scanned_at: 0,
        }
    }

    /// Export of the device at a position in the poll list. Devices that become busy during a pass
    /// are appended.
    pub(super) fn polled(&self, number: usize) -> Option<ExportIndex> {
        self.polled.get(number).copied()
    }

    /// Returns an open device and adds it to the poll list.
    fn begin(&mut self, export: ExportIndex) -> &mut OpenDevice {
        let open = self.open[export.index()].as_mut();
        let open = open.unwrap_or_else(|| panic!("{export:?} is not open"));
        if !std::mem::replace(&mut open.polled, true) {
            self.polled.push(export);
        }
        open
    }

    /// Returns a device that must be open because it has a request. Panics if it is not.
    fn at(&self, export: ExportIndex) -> &OpenDevice {
        let open = self.open[export.index()].as_ref();
        open.unwrap_or_else(|| panic!("{export:?} is not open"))
    }

    fn at_mut(&mut self, export: ExportIndex) -> &mut OpenDevice {
        let open = self.open[export.index()].as_mut();
        open.unwrap_or_else(|| panic!("{export:?} is not open"))
    }

    /// Opens the export on this shard unless it is open, and registers the region `attach` with it,
    /// if given.
    ///
    /// # Errors
    /// The device's error.
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
                // The session may have closed the export in the meantime.
                let missing = || io::Error::from(io::ErrorKind::NotFound);
                let at = export;
                let export = self.exports.get(at).ok_or_else(missing)?;
                let device = export.source.open(&self.core)?;
                let waiting = VecDeque::new();
                export.epoch.order().set_shards(self.cores);
                let shared = export.source.shared_errors();
                let syncs = ShardSyncs::with_capacity(self.core.index, INFLIGHT_MAX);
                let errors = DeviceErrors::default();
                let counters = export.counters.shard(self.core.index);
                let turns = export.turns(self.cores);
                let delayed = Delayed::new(&export.throttle);
                let extents = export.source.is_sole_writer().then(|| {
                    let shard = usize::from(self.core.index.0);
                    let (source, watch) = (Arc::clone(&export.source), export.changes(self.cores));
                    Box::new(KnownExtents::new(source, watch, shard))
                });
                turns.join(usize::from(self.core.index.0));
                // A partial write may have been entered while this shard joined.
                self.scanned_at = self.scanned_at.wrapping_sub(1);
                slot.insert(OpenDevice {
                    device,
                    waiting,
                    closing: false,
                    polled: false,
                    syncs,
                    shared,
                    errors,
                    counters,
                    turns,
                    delayed,
                    extents,
                    export,
                })
            }
        };
        open.closing = false;
        if !open.polled && !open.device.rests() {
            open.polled = true;
            self.polled.push(export);
        }
        open.device.refresh();
        if let Some(region) = attach {
            open.device.attach_region(region)?;
        }
        Ok(&mut *open.device)
    }

    /// Epoch of an open export.
    pub(super) fn epoch(&self, export: ExportIndex) -> &SyncEpoch {
        &self.at(export).export.epoch
    }

    /// Name of an open export.
    pub(super) fn name(&self, export: ExportIndex) -> &str {
        &self.at(export).export.name
    }

    /// Assigns a number to a sync that is about to be submitted on this shard. Returns None if the
    /// sync cannot consume another sync's error.
    pub(super) fn draw(&mut self, export: ExportIndex, flush: bool) -> Option<u64> {
        let open = self.at_mut(export);
        if open.shared == SharedErrors::None || open.shared == SharedErrors::Flushes && !flush {
            return None;
        }
        Some(open.syncs.draw(open.export.epoch.order()))
    }

    /// Records that a sync of this shard has returned. Returns whether other shards wait for that.
    pub(super) fn back(&mut self, export: ExportIndex, number: u64) -> bool {
        let open = self.at_mut(export);
        open.syncs.back(open.export.epoch.order(), number)
    }

    /// Wakes the other shards, where requests may wait for a sync on this shard that has returned.
    pub(super) fn wake_others(&self, out: &mut Outbox) {
        for core in (0..self.cores).filter(|core| *core != self.core.index.0) {
            out.shard(CoreIndex(core), ShardMessage::Wake);
        }
    }

    /// Ranges of changes that take turns on an export; None if the export is not open on this
    /// shard.
    pub(super) fn turns(&self, export: ExportIndex) -> Option<&Ranges> {
        Some(&self.open.get(export.index())?.as_ref()?.turns)
    }

    /// Counts a partial write that has entered a turn list, before other shards are woken for it.
    pub(super) fn note_partial_write(&self) {
        self.exports.note_partial_write();
    }

    /// Whether a partial write has entered a turn list since the last call. Costs one load.
    pub(super) fn must_look(&mut self) -> bool {
        let entered = self.exports.partial_writes();
        std::mem::replace(&mut self.scanned_at, entered) != entered
    }

    /// Open devices whose requests in flight this shard must enter into the turn list.
    pub(super) fn to_look_at(&self) -> impl Iterator<Item = (ExportIndex, &Arc<Ranges>, u64)> {
        let shard = usize::from(self.core.index.0);
        let open = (0..).map(ExportIndex).zip(&self.open);
        open.filter_map(move |(at, open)| {
            let turns = &open.as_ref()?.turns;
            Some((at, turns, turns.due(shard)?))
        })
    }

    /// Orphaned writes to an export, on all shards.
    pub(super) fn orphaned(&self, export: ExportIndex) -> &OrphanedWrites {
        self.exports.orphaned_writes(export)
    }

    /// Size, limits and capabilities of an open device.
    pub(super) fn geometry(&self, export: ExportIndex) -> &Geometry {
        self.at(export).device.geometry()
    }

    /// Submits an IO to an open device.
    ///
    /// # Errors
    /// The IO, if the device is full.
    pub(super) fn submit(&mut self, export: ExportIndex, io: Io) -> Result<(), Io> {
        let bytes = if io.op == IoOp::Extents { 0 } else { io.len as usize };
        self.begun += bytes + IO_COST;
        let OpenDevice { device, extents, .. } = self.begin(export);
        match extents {
            Some(extents) => extents.submit(io, &mut **device),
            None => device.submit(io),
        }
    }

    /// Records that the device has completed a step that changes its content.
    pub(super) fn end_change(&mut self, export: ExportIndex) {
        if let Some(extents) = &mut self.at_mut(export).extents {
            extents.end_change();
        }
    }

    /// Whether IO worth [`TURN`] bytes was submitted since [`begin_turn`](Self::begin_turn).
    pub(super) fn is_turn_full(&self) -> bool {
        self.begun >= TURN
    }

    /// Begins a new turn for counting submitted IOs.
    pub(super) fn begin_turn(&mut self) {
        self.begun = 0;
    }

    /// Counts an IO before it is answered, with its times.
    pub(super) fn answered(&self, io: &IoProgress, good: bool, took: ServerTimes) {
        self.at(io.export).counters.answered(io.op, good, io.len, took);
    }

    /// Counts and logs a step of an IO that failed on the device.
    pub(super) fn log_error(&mut self, io: &IoProgress, completion: Completion, now: Instant) {
        let open = self.at_mut(io.export);
        open.counters.device_errors.add(1);
        open.errors.log(&open.export.name, io, completion, now);
    }

    /// Logs a failed sync at a limited rate.
    #[cold]
    pub(super) fn log_failed_sync(&mut self, export: ExportIndex, status: IoStatus, now: Instant) {
        let export = &self.at(export).export;
        let deadline = export.sync_failures.log(failed_syncs(export), status, now);
        self.suppressed_until = earliest(self.suppressed_until, deadline);
    }

    /// Reports suppressed log lines about failed syncs when they are due.
    pub(super) fn log_suppressed(&mut self, now: Instant) {
        if self.suppressed_until.is_none_or(|at| now < at) {
            return;
        }
        let open = self.open.iter().flatten().map(|open| &open.export);
        self.suppressed_until = open.fold(None, |soonest, export| {
            earliest(soonest, export.sync_failures.log_suppressed(failed_syncs(export), now))
        });
    }

    /// Queues a request until an open device has room.
    pub(super) fn wait(&mut self, export: ExportIndex, request: RequestRef) {
        let open = self.begin(export);
        open.counters.queue_full.add(1);
        open.waiting.push_back(request);
    }

    /// Returns a request to the front of the queue, because the device is full again.
    pub(super) fn wait_first(&mut self, export: ExportIndex, request: RequestRef) {
        self.begin(export).waiting.push_front(request);
    }

    /// Whether requests wait for the open device, so that a new one must queue too.
    pub(super) fn is_contended(&self, export: ExportIndex) -> bool {
        !self.at(export).waiting.is_empty()
    }

    /// Removes the next request that waits for a device.
    pub(super) fn next_waiting(&mut self, at: ExportIndex) -> Option<RequestRef> {
        self.open[at.index()].as_mut()?.waiting.pop_front()
    }

    /// Whether the limits of its export delay an IO; if so, queues the request.
    pub(super) fn delays(&mut self, request: RequestRef, io: &IoProgress, now: Instant) -> bool {
        let Some(delayed) = &mut self.at_mut(io.export).delayed else { return false };
        let delays = delayed.delays(request, io, now);
        if delays {
            self.begin(io.export).counters.throttled.add(1);
        }
        delays
    }

    /// Removes the next request that the limits of an export no longer delay.
    pub(super) fn next_released(&mut self, at: ExportIndex, now: Instant) -> Option<RequestRef> {
        let open = self.open[at.index()].as_mut()?;
        let delayed = open.delayed.as_mut()?;
        let Some(released) = delayed.next(now) else {
            open.delayed.take_if(|delayed| delayed.is_over());
            return None;
        };
        open.counters.throttled_ns.add(released.waited_ns);
        Some(released.request)
    }

    /// Removes all requests of a path that are delayed by export limits.
    pub(super) fn remove_delayed(&mut self, path: PathRow, now: Instant) -> Vec<RequestRef> {
        let mut removed = Vec::new();
        for open in self.open.iter_mut().flatten() {
            let Some(delayed) = &mut open.delayed else { continue };
            for released in delayed.remove(path, now) {
                open.counters.throttled_ns.add(released.waited_ns);
                removed.push(released.request);
            }
        }
        removed
    }

    /// Applies an export's changed limits.
    pub(super) fn apply_limits(&mut self, export: ExportIndex) {
        if let Some(Some(open)) = self.open.get_mut(export.index()) {
            Delayed::apply(&mut open.delayed, &open.export.throttle);
        }
    }

    /// Whether the limits of its export delay a request.
    pub(super) fn is_delayed(&self, export: ExportIndex, request: RequestRef) -> bool {
        self.at(export).delayed.as_ref().is_some_and(|delayed| delayed.contains(request))
    }

    /// Polls a device. Returns whether anything happened.
    pub(super) fn poll(&mut self, at: ExportIndex, now: Instant) -> bool {
        let Some(open) = self.open[at.index()].as_mut() else { return false };
        if let Some(extents) = &mut open.extents {
            extents.polled();
        }
        open.device.poll(now)
    }

    /// Returns the next completed IO of a device.
    pub(super) fn reap(&mut self, at: ExportIndex) -> Option<Completion> {
        let OpenDevice { device, extents, .. } = self.open[at.index()].as_mut()?;
        match extents {
            Some(extents) => extents.reap(&mut **device),
            None => device.reap(),
        }
    }

    /// Marks a device to be closed when its last IO has ended, because no session has the export
    /// open.
    pub(super) fn close(&mut self, export: ExportIndex) {
        if self.open.get(export.index()).is_some_and(Option::is_some) {
            self.begin(export).closing = true;
        }
    }

    /// Removes the device at a position in the poll list if it has nothing left to do, and closes
    /// it if it is marked for closing and no request `needs` it. Returns true if another device now
    /// occupies its position.
    pub(super) fn sweep(&mut self, number: usize, needs: impl Fn(ExportIndex) -> bool) -> bool {
        let Some(at) = self.polled(number) else { return false };
        let slot = &mut self.open[at.index()];
        let Some(open) = slot else { return false };
        let device = &open.device;
        let delays = open.delayed.as_ref().is_some_and(|delayed| !delayed.is_empty());
        let answered = open.extents.as_ref().is_some_and(|extents| extents.has_answered());
        let busy = device.inflight() > 0 || answered || !open.waiting.is_empty() || delays;
        if busy || !(open.closing || device.rests()) || open.closing && needs(at) {
            return false;
        }
        open.polled = false;
        if open.closing {
            open.turns.leave(usize::from(self.core.index.0));
            *slot = None;
        }
        self.polled.swap_remove(number);
        true
    }

    /// Polls one of the idle devices, a different one in each turn, because some devices clean up
    /// what others left behind.
    pub(super) fn poll_idle(&mut self, now: Instant) {
        let at = if self.next_idle < self.open.len() { self.next_idle } else { 0 };
        self.next_idle = at + 1;
        let Some(Some(open)) = self.open.get_mut(at) else { return };
        if open.polled {
            return;
        }
        open.device.poll(now);
        if !open.device.rests() {
            open.polled = true;
            self.polled.extend(u16::try_from(at).map(ExportIndex));
        }
    }

    /// Time of the earliest poll that a device needs.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let polled = self.polled.iter().filter_map(|at| self.open[at.index()].as_ref());
        polled.fold(self.suppressed_until, |at, open| {
            let delayed = open.delayed.as_ref().and_then(|delayed| delayed.deadline());
            let answered = open.extents.as_ref().and_then(|extents| extents.deadline());
            [open.device.deadline(), delayed, answered].into_iter().fold(at, earliest)
        })
    }
}

/// Failed syncs of an export, for a log line.
fn failed_syncs(export: &Export) -> FailedSyncs<'_> {
    FailedSyncs {
        export: &export.name,
        epoch: export.epoch.number(),
        failures: export.epoch.rises(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use rtrs_core::block::BlockSource;

    use super::*;
    use crate::backend::NullSource;

    /// Whether the device is idle, and the number of polls.
    #[derive(Clone, Debug, Default)]
    struct Source(Arc<(AtomicBool, AtomicU32)>);

    #[derive(Debug)]
    struct Device(Geometry, Source);

    impl Source {
        fn polls(&self) -> u32 {
            self.0.1.load(Ordering::Relaxed)
        }
    }

    impl BlockSource for Source {
        fn geometry(&self) -> Geometry {
            NullSource::new(4096, 512).geometry()
        }

        fn open(&self, _core: &Core) -> io::Result<Box<dyn BlockDevice>> {
            Ok(Box::new(Device(self.geometry(), self.clone())))
        }
    }

    impl BlockDevice for Device {
        fn geometry(&self) -> &Geometry {
            &self.0
        }

        fn submit(&mut self, io: Io) -> Result<(), Io> {
            Err(io)
        }

        fn poll(&mut self, _now: Instant) -> bool {
            self.1.0.1.fetch_add(1, Ordering::Relaxed);
            false
        }

        fn reap(&mut self) -> Option<Completion> {
            None
        }

        fn inflight(&self) -> usize {
            0
        }

        fn rests(&self) -> bool {
            self.1.0.0.load(Ordering::Relaxed)
        }
    }

    /// One turn of the shard.
    fn turn(devices: &mut Devices) {
        devices.poll_idle(Instant::ZERO);
        let mut number = 0;
        while let Some(at) = devices.polled(number) {
            devices.poll(at, Instant::ZERO);
            number += usize::from(!devices.sweep(number, |_| false));
        }
    }

    #[test]
    fn a_busy_device_is_polled_in_each_turn() {
        let sources: Vec<Source> = (0..4).map(|_| Source::default()).collect();
        let exports = sources.iter().enumerate().map(|(at, source)| {
            source.0.0.store(at != 1, Ordering::Relaxed);
            Export::new(format!("v{at}"), Arc::new(source.clone()))
        });
        let exports = ExportTable::new(exports.collect());
        let mut devices = Devices::new(Core::without_ring(CoreIndex(0)), exports, 1);
        for at in 0..4 {
            devices.open(ExportIndex(at), None).expect("a device");
        }
        (0..40).for_each(|_| turn(&mut devices));
        let polls: Vec<u32> = sources.iter().map(Source::polls).collect();
        assert_eq!(polls, [10, 40, 10, 10]);
        // A device that becomes busy again is polled in each turn as soon as that is detected.
        sources[2].0.0.store(false, Ordering::Relaxed);
        sources[1].0.0.store(true, Ordering::Relaxed);
        (0..8).for_each(|_| turn(&mut devices));
        let before: Vec<u32> = sources.iter().map(Source::polls).collect();
        (0..8).for_each(|_| turn(&mut devices));
        let more = sources.iter().zip(&before).map(|(source, before)| source.polls() - before);
        assert_eq!(more.collect::<Vec<_>>(), [2, 2, 8, 2]);
        // A polled device can be closed.
        devices.close(ExportIndex(2));
        let number = devices.polled.iter().position(|at| *at == ExportIndex(2));
        assert!(!devices.sweep(number.expect("it is polled"), |at| at == ExportIndex(2)));
        assert!(devices.open[2].is_some(), "an IO at it settles");
        turn(&mut devices);
        assert!(devices.open[2].is_none() && devices.polled.is_empty());
    }
}
