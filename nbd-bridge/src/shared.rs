//! State shared by all connections of a shard: the device, the rows, the buffers and the counters.
//!
//! A row is submitted to the device piece by piece, as its memory becomes available and as the
//! device accepts it, and never with more bytes per IO than the device's limits allow. Rows for
//! which the device queue is full wait in order; until they have been submitted, no new requests
//! are taken from clients. Rows that overlap an orphaned write are deferred until it has ended
//! (`group`). A row that the device gives up is answered with an error at once; the device keeps
//! the row and its memory until the IO ends, and a change counts as an orphaned write from then on.
//! Changes of parts of blocks take turns with overlapping requests (`fragments`). Called by
//! connections and by the shard's turn in `bridge`. After startup, memory is allocated only when a
//! client disconnects or the device gives up IO.

mod fragments;
mod internal_error;

use std::collections::VecDeque;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Geometry, Io, IoOp};
use rtrs_core::extents;
use rtrs_core::losses::Losses;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};

use crate::buffers::{Buffers, ReadMemory};
use crate::config::BridgeConfig;
use crate::export::export_info;
use crate::group::Seat;
use crate::notices::{Notice, Notices};
use crate::proto::{ExportInfo, Exports, Op};
use crate::requests::{ConnId, Late, Requests};
use crate::stats::BridgeStats;

/// State shared by all NBD connections of a shard.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Export name, as clients request it.
    name: String,
    max_payload: u32,
    /// Other hosts may write to the device.
    shared_writes: bool,
    pub(crate) buffers: Buffers,
    pub(crate) requests: Requests,
    pub(crate) stats: BridgeStats,
    /// Rate limits of log lines that clients can cause.
    pub(crate) notices: Notices,
    internal_errors: internal_error::InternalErrors,
    /// Time of the current turn.
    now: Instant,
    /// Lost writes of the device; each connection reports them to its client.
    pub(crate) losses: Option<Arc<Losses>>,
    device: Box<dyn BlockDevice>,
    /// Rows waiting for room in the device queue, in order.
    backlog: VecDeque<u32>,
    /// Rows waiting for orphaned writes, in order.
    deferred: Vec<u32>,
    /// Rows with a part that waits for its turn, or for room in the device queue during its turn.
    turns: Vec<u32>,
    /// Number of open changes of parts of blocks.
    fragments: usize,
    pub(crate) seat: Seat,
    /// Maximum time for which a row may be deferred.
    deferred_max: Option<Duration>,
    /// Rows whose last IO has ended, in the order in which they finished, for their connections.
    pub(crate) finished: VecDeque<u32>,
    /// Slot of the connection whose read waits for memory; it takes precedence over larger reads of
    /// others.
    waiting: Option<usize>,
}

impl Shared {
    pub(crate) fn new(
        name: &str,
        buffers: Buffers,
        config: &BridgeConfig,
        mut device: Box<dyn BlockDevice>,
        seat: Seat,
    ) -> Self {
        let rows = config.requests_max as usize;
        Self {
            name: name.into(),
            max_payload: config.max_payload,
            shared_writes: config.shared_writes,
            buffers,
            requests: Requests::new(config.requests_max),
            stats: BridgeStats::default(),
            notices: Notices::default(),
            internal_errors: internal_error::InternalErrors::default(),
            now: Instant::ZERO,
            losses: device.take_losses(),
            device,
            backlog: VecDeque::with_capacity(rows),
            deferred: Vec::with_capacity(rows),
            turns: Vec::with_capacity(rows),
            fragments: 0,
            seat,
            deferred_max: config.deferred_max,
            finished: VecDeque::with_capacity(rows),
            waiting: None,
        }
    }

    pub(crate) fn device(&self) -> &dyn BlockDevice {
        self.device.as_ref()
    }

    /// Export name, as clients request it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the export as clients see it now.
    pub(crate) fn export(&self) -> ExportInfo {
        let geometry = self.device.geometry();
        let (max_payload, export) = (self.max_payload, export_info(&self.name, geometry));
        let shared_writes = self.shared_writes && !geometry.partial_writes;
        ExportInfo { max_payload, shared_writes, ..export }
    }

    /// Logs how many of the lines that clients can cause were suppressed.
    pub(crate) fn log_suppressed(&mut self, now: Instant) {
        self.notices.log_suppressed(now, &self.name);
    }

    /// Switches to memory of another pool. Returns true when such memory is available.
    pub(crate) fn move_on(&mut self) -> bool {
        let share = self.buffers.another_share().and_then(|share| {
            share.iter().try_for_each(|share| self.device.attach_region(share.region()))?;
            Ok(share)
        });
        match share {
            Ok(Some(share)) => {
                self.buffers.switch_to(share);
                tracing::info!(export = self.name, "NBD buffers exhausted; using another pool");
                true
            }
            Ok(None) => false,
            Err(error) => {
                if let Some(left_out) = self.notices.admit(self.now, Notice::PoolUnavailable) {
                    tracing::warn!(
                        export = self.name,
                        left_out,
                        %error,
                        "cannot allocate further NBD buffers"
                    );
                }
                false
            }
        }
    }

    /// Whether to take no more requests from clients for now.
    pub(crate) fn is_congested(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Takes a row for a connection that already has `rows`. A connection may hold at most as many
    /// rows as are free, so that a client that does not read its replies leaves room for others.
    pub(crate) fn take_row(&mut self, rows: usize) -> Option<u32> {
        if rows > self.requests.free() {
            return None;
        }
        self.requests.take()
    }

    /// Allocates memory for a read of connection `slot` and appends it to the row's parts: all
    /// or nothing.
    pub(crate) fn take_read(
        &mut self,
        slot: usize,
        row: u32,
        len: usize,
        memory: &mut ReadMemory,
    ) -> bool {
        let others_first = self.waiting.is_some_and(|first| first != slot);
        let parts = &mut self.requests.row(row).parts;
        if self.buffers.take_read(len, others_first, memory, parts) {
            self.stop_waiting(slot);
            return true;
        }
        // A connection that holds memory waits for its own client, which may never read; it gets no
        // precedence.
        if self.waiting.is_none() && memory.is_empty() {
            self.waiting = Some(slot);
        }
        false
    }

    /// Cancels the connection's wait for memory.
    pub(crate) fn stop_waiting(&mut self, slot: usize) {
        if self.waiting == Some(slot) {
            self.waiting = None;
        }
    }

    /// Submits the ready bytes of a row to the device, behind rows that already wait. A row that
    /// overlaps an orphaned write is deferred, and a row that overlaps a change of part of a block
    /// waits for its turn.
    pub(crate) fn submit(&mut self, row: u32) {
        let orphans = !self.seat.group.orphans.is_empty();
        if orphans && !rtrs_core::mutated!(NbdOrphanForgotten) && self.defer(row) {
            return;
        }
        let entry = self.requests.row(row);
        if entry.overlaps.is_deferred() {
            // More of the payload has arrived.
            return;
        }
        // IO that took too long may have ended meanwhile; then the rest is submitted.
        let noted = entry.reply.late() == Late::Noted;
        if noted && entry.progress.is_complete() && entry.is_at_device() {
            return self.give_up(row);
        }
        if !self.queue(row) {
            self.hand_over_in_order(row);
        }
    }

    /// Submits the ready bytes of a row, behind rows that wait for room in the device queue.
    fn hand_over_in_order(&mut self, row: u32) {
        if self.requests.row(row).progress.all_handed() {
            // A change within blocks may end before its turn in the backlog would come.
            return;
        }
        if !self.backlog.is_empty() || !self.hand_over(row) {
            self.backlog.push_back(row);
        }
    }

    /// Defers a row of which nothing has been submitted, if it overlaps an orphaned write. Returns
    /// true when the row is deferred.
    fn defer(&mut self, index: u32) -> bool {
        let row = self.requests.row(index);
        let fresh = row.progress.handed() == 0 && !row.overlaps.is_deferred();
        let is_flush = row.command.io() == Some(IoOp::Flush);
        if fresh && !is_flush && self.seat.group.orphans.touch(row.bytes()) {
            row.overlaps.defer();
            self.deferred.push(index);
            self.stats.deferred += 1;
        }
        self.requests.row(index).overlaps.is_deferred()
    }

    /// Whether requests wait for orphaned writes or for their turn.
    pub(crate) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty() || !self.turns.is_empty()
    }

    /// Removes a row from those that wait for orphaned writes.
    fn undefer(&mut self, index: u32) {
        if self.requests.row(index).overlaps.undefer() {
            self.deferred.retain(|row| *row != index);
        }
    }

    /// Submits deferred rows whose bytes no orphaned write can change any more. Returns true when
    /// there was such a row.
    pub(crate) fn release_deferred(&mut self) -> bool {
        let (mut at, mut any) = (0, false);
        while let Some(&index) = self.deferred.get(at) {
            let row = self.requests.row(index);
            if self.seat.group.orphans.touch(row.bytes()) {
                at += 1;
                continue;
            }
            row.overlaps.undefer();
            self.deferred.remove(at);
            self.submit(index);
            any = true;
        }
        any
    }

    /// Fails rows that have been deferred, or have waited for their turn, for too long. Such rows
    /// have not begun. Returns true when there was such a row.
    pub(crate) fn expire_deferred(&mut self, now: Instant) -> bool {
        let Some(bound) = self.deferred_max else { return false };
        let (mut at, mut any) = (0_usize, false);
        loop {
            let turn = at.checked_sub(self.deferred.len());
            let next = turn.map_or_else(|| self.deferred.get(at), |at| self.turns.get(at));
            let Some(&index) = next else { return any };
            let row = self.requests.row(index);
            let waited = row.overlaps.waited(now);
            // A payload that is still arriving needs its row.
            let whole = row.progress.is_complete() || row.command.op() == Op::Read;
            if whole && waited >= bound {
                row.reply.note(IoStatus::TimedOut);
                self.withdraw(index);
                any = true;
            } else {
                at += 1;
            }
        }
    }

    /// Handles a row that the device gives up in part: the client gets an error now. Bytes already
    /// submitted may still take effect, so a change holds up overlapping requests until it ends, as
    /// an orphaned write does. The row and its memory stay until then.
    fn give_up(&mut self, index: u32) {
        self.backlog.retain(|row| *row != index);
        self.undefer(index);
        self.drop_turns(index);
        let row = self.requests.row(index);
        row.progress.cut_off();
        row.reply.set_late(Late::GivenUp);
        row.reply.note(IoStatus::TimedOut);
        let bytes = row.may_change().filter(|_| !row.overlaps.is_orphaned());
        if let Some(bytes) = bytes.filter(|_| !rtrs_core::mutated!(SlowIoRangeDropped)) {
            row.overlaps.set_orphaned();
            self.seat.group.orphans.enter((self.seat.shard, index), bytes);
        }
        self.end_running(index);
        self.stats.given_up += 1;
        self.finished.push_back(index);
    }

    /// Collects the IOs that the device gives up. Returns true when there was one.
    fn take_given_up(&mut self) -> bool {
        let mut any = false;
        while let Some(tag) = self.device.take_given_up() {
            any = true;
            if !self.is_at_device(tag, "the device gave up an IO that it does not have") {
                continue;
            }
            let (index, _) = row_of(tag);
            let row = self.requests.row(index);
            let whole = row.progress.is_complete() || row.command.op() == Op::Read;
            match (row.reply.late(), whole) {
                (Late::No | Late::Noted, true) => self.give_up(index),
                (Late::No, false) => row.reply.set_late(Late::Noted),
                _ => {}
            }
        }
        any
    }

    /// Handles the end of a connection's client: changes that the device may still make become
    /// orphaned writes. Deferred requests fail: they have not begun, and they must not wait for
    /// orphaned writes while being orphaned writes themselves.
    pub(crate) fn orphan(&mut self, conn: ConnId) {
        let Seat { group, shard } = self.seat.clone();
        let mut count = 0;
        for index in self.requests.open_rows(conn) {
            if self.requests.row(index).overlaps.is_deferred() {
                self.withdraw(index);
            }
            let row = self.requests.row(index);
            if row.is_done() {
                continue;
            }
            if let Some(bytes) = row.may_change().filter(|_| !row.overlaps.is_orphaned()) {
                row.overlaps.set_orphaned();
                count += 1;
                group.orphans.enter((shard, index), bytes);
            }
        }
        if count == 0 {
            return;
        }
        self.stats.orphaned += count;
        if let Some(left_out) = self.notices.admit(self.now, Notice::UnansweredWrites) {
            tracing::info!(
                export = self.name,
                writes = count,
                left_out,
                "NBD connection ended with unanswered writes: overlapping requests wait for them"
            );
        }
    }

    /// Drops the unsubmitted work of a connection whose client has disconnected.
    pub(crate) fn drop_unbegun(&mut self, conn: ConnId) {
        let rows = self.requests.open_rows(conn);
        if rows.is_empty() {
            return;
        }
        for &index in &rows {
            let row = self.requests.row(index);
            let unbegun = row.overlaps.is_queued() || row.fragments.open() > 0;
            if unbegun || self.backlog.contains(&index) {
                self.withdraw(index);
            }
        }
        self.device.cancel(&|tag| rows.contains(&row_of(tag).0));
    }

    /// Withdraws what has not been submitted of a row.
    fn withdraw(&mut self, index: u32) {
        self.backlog.retain(|row| *row != index);
        self.undefer(index);
        self.drop_turns(index);
        let row = self.requests.row(index);
        row.progress.cut_off();
        row.overlaps.stop_waiting();
        row.reply.note(IoStatus::Aborted);
        self.end_running(index);
        self.finish_if_done(index);
    }

    /// Submits the ready bytes of a row. Returns false when the device queue is full.
    fn hand_over(&mut self, index: u32) -> bool {
        let row = self.requests.row(index);
        let Some(op) = row.command.io() else { return true };
        let io_max = io_max(self.device.geometry(), op);
        while !row.progress.all_handed() {
            let left = row.progress.left();
            let (len, step, buf) = match op {
                IoOp::Read | IoOp::Write => {
                    let (at, from) = row.progress.cursor();
                    let slice = &row.parts[at].slice;
                    let most = (io_max.min(left) as usize).min(slice.len() - from);
                    let len = u32::try_from(most).unwrap_or(left);
                    (len, len, slice.slice(from, most))
                }
                // A flush has no length; it counts as one byte.
                IoOp::Flush => (0, 1, None),
                IoOp::Discard | IoOp::WriteZeroes => {
                    let len = left.min(io_max);
                    (len, len, None)
                }
                IoOp::Extents => (left, left, row.parts[0].slice.slice(0, extents::LEN_MAX)),
            };
            let offset = row.command.cut().whole.start + u64::from(row.progress.handed());
            let flags = row.command.flags();
            let io = Io { tag: u64::from(index), op, flags, offset, len, buf };
            if self.device.submit(io).is_err() {
                return false;
            }
            row.progress.submitted(step);
            if matches!(op, IoOp::Read | IoOp::Write) {
                let part = row.parts[row.progress.cursor().0].slice.len();
                row.progress.move_cursor(step, part);
            }
        }
        true
    }

    /// Reports the row to its connection if no work is outstanding.
    pub(crate) fn finish_if_done(&mut self, row: u32) {
        let entry = self.requests.row(row);
        let early = rtrs_core::mutated!(NbdFirstPartAnswers) && entry.progress.pending() > 0;
        if entry.is_between() && !entry.reply.status().is_ok() {
            entry.progress.set_complete();
        }
        if early || entry.is_done() || entry.is_between() {
            if let Some(losses) = &self.losses
                && entry.must_repeat_loss(losses)
            {
                losses.add();
            }
            // A change within blocks has had its turn. Anything left of the orphaned write that it
            // overlaps is elsewhere.
            self.undefer(row);
            self.leave_orphans(row);
            // A row whose error reply is being sent ends with that reply.
            if self.requests.row(row).reply.late() != Late::GivenUp {
                self.finished.push_back(row);
            }
        }
    }

    /// Removes a row from the orphaned writes.
    fn leave_orphans(&mut self, row: u32) {
        if self.requests.row(row).overlaps.take_orphaned() {
            let key = (self.seat.shard, row);
            self.seat.group.orphans.leave(|own| *own == key);
        }
    }

    /// Frees a row and its memory. Returns false when the row has to stay.
    #[must_use]
    pub(crate) fn free_row(&mut self, row: u32, memory: &mut ReadMemory) -> bool {
        if !self.leave_tables(row) {
            return false;
        }
        let entry = self.requests.row(row);
        while let Some(part) = entry.parts.pop() {
            if entry.command.op() == Op::Write {
                self.buffers.release(part.buffer);
            } else {
                self.buffers.release_read(part.buffer, memory);
            }
        }
        if let Some(own) = entry.fragments.take_memory() {
            self.buffers.release_read(own.buffer, memory);
        }
        self.requests.give(row);
        true
    }

    pub(crate) fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        self.device.poll(now)
    }

    /// Collects the device's completions, and submits what it has room for now.
    pub(crate) fn reap(&mut self) -> bool {
        let mut any = self.take_given_up();
        while let Some(done) = self.device.reap() {
            any = true;
            if !self.is_at_device(done.tag, "the device completed an IO that it does not have") {
                continue;
            }
            let (row, fragment) = row_of(done.tag);
            self.stats.completed(done.status);
            if let Some(which) = fragment {
                self.on_fragment(row, which, done.status);
                continue;
            }
            let entry = self.requests.row(row);
            entry.progress.ended();
            if entry.command.io() == Some(IoOp::Flush) {
                entry.loss_marks.set_at_end(self.device.losses_at_end());
            } else if done.status.is_ok() {
                entry.note_losses(self.losses.as_deref());
            }
            if !done.status.is_ok() && !rtrs_core::mutated!(NbdErrorDropped) {
                entry.reply.note(done.status);
            }
            let through = entry.is_idle() && entry.progress.all_handed();
            if entry.command.op() == Op::Write
                && (through || rtrs_core::mutated!(NbdMemoryReusedEarly))
            {
                // The device has consumed the payload, so its buffers need not wait for the reply.
                entry.progress.reset_cursor();
                while let Some(part) = entry.parts.pop() {
                    self.buffers.release(part.buffer);
                }
            }
            self.end_running(row);
            self.finish_if_done(row);
        }
        any |= !self.turns.is_empty() && self.advance_turns();
        while let Some(&row) = self.backlog.front() {
            let before = self.requests.row(row).progress.handed();
            let all = self.hand_over(row);
            any |= self.requests.row(row).progress.handed() > before;
            if !all {
                break;
            }
            self.backlog.pop_front();
        }
        any
    }
}

/// Splits an IO's tag into the row and the index of the fragment, if any.
fn row_of(tag: u64) -> (u32, Option<usize>) {
    #[allow(clippy::cast_possible_truncation, reason = "the low half is a row number")]
    let row = tag as u32;
    let which = usize::try_from(tag >> fragments::WHICH_SHIFT).unwrap_or(0);
    (row, which.checked_sub(1))
}

/// Maximum number of bytes per IO, in whole blocks. A flush has no bytes.
fn io_max(geometry: &Geometry, op: IoOp) -> u32 {
    let bytes = match op {
        IoOp::Read | IoOp::Write => geometry.io_max,
        IoOp::Discard => geometry.discard_max,
        IoOp::WriteZeroes => geometry.zeroes_max,
        IoOp::Flush | IoOp::Extents => 0,
    };
    let block = geometry.logical_block.max(1);
    (bytes / block * block).max(block)
}

impl Exports for Shared {
    fn list(&self, visit: &mut dyn FnMut(&ExportInfo)) {
        visit(&self.export());
    }

    fn lookup(&self, name: &str) -> Option<ExportInfo> {
        (name.is_empty() || name == self.name).then(|| self.export())
    }
}
