//! What all connections of a shard share: the device, the rows, the buffers, the counters.
//!
//! A row is handed to the device piece by piece as its memory is there and as the device takes
//! it, never more in one IO than the device's limits. Rows that the device had no room for wait
//! in order; until they are gone nothing new is taken from clients. Rows that overlap an orphaned
//! write are deferred until it has ended (`group`). A row that the device gives up is answered with
//! an error at once; the device keeps row and memory until its end, and a change counts as an
//! orphaned write from then on. Changes of parts of blocks take turns with what overlaps them
//! (`fragments`). Called by connections and by the shard's turn in `bridge`; nothing here allocates
//! after start, but when a client is gone or the device gives up.

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
use crate::requests::{ConnId, Late, Requests, Row};
use crate::stats::BridgeStats;

/// What all connections of a shard use.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Under which clients find the device.
    name: String,
    max_payload: u32,
    /// Another host may write to the device.
    shared_writes: bool,
    pub(crate) buffers: Buffers,
    pub(crate) requests: Requests,
    pub(crate) stats: BridgeStats,
    /// Limits for log lines that clients can cause.
    pub(crate) notices: Notices,
    internal_errors: internal_error::InternalErrors,
    /// Time of the current turn.
    now: Instant,
    /// Of the device; each connection reports them to its client.
    pub(crate) losses: Option<Arc<Losses>>,
    device: Box<dyn BlockDevice>,
    /// Rows that the device had no room for, in order.
    backlog: VecDeque<u32>,
    /// Rows that wait for orphaned writes, in order.
    deferred: Vec<u32>,
    /// Rows of which something waits for its turn, or for room at the device in it.
    turns: Vec<u32>,
    /// Changes of parts of blocks that have begun and not ended.
    fragments: usize,
    pub(crate) seat: Seat,
    /// How long a row may be deferred.
    deferred_max: Option<Duration>,
    /// Rows whose last IO ended, for their connections, in the order in which they finished.
    pub(crate) finished: VecDeque<u32>,
    /// The connection whose read waits for memory and goes before the others' larger ones.
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

    /// Name that clients find the device by.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The device as clients see it at this time.
    pub(crate) fn export(&self) -> ExportInfo {
        let geometry = self.device.geometry();
        let (max_payload, export) = (self.max_payload, export_info(&self.name, geometry));
        let shared_writes = self.shared_writes && !geometry.partial_writes;
        ExportInfo { max_payload, shared_writes, ..export }
    }

    /// Logs how many lines were left out of those that clients can cause.
    pub(crate) fn log_left_out(&mut self, now: Instant) {
        self.notices.log_left_out(now, &self.name);
    }

    /// Goes on with memory of another pool. True when there is such memory.
    pub(crate) fn move_on(&mut self) -> bool {
        let share = self.buffers.further_share().and_then(|share| {
            share.iter().try_for_each(|share| self.device.attach_region(share.region()))?;
            Ok(share)
        });
        match share {
            Ok(Some(share)) => {
                self.buffers.go_on_with(share);
                tracing::info!(
                    export = self.name,
                    "other volumes hold the NBD buffers: this one goes on with others"
                );
                true
            }
            Ok(None) => false,
            Err(error) => {
                if let Some(left_out) = self.notices.admit(self.now, Notice::NoFurtherBuffers) {
                    tracing::warn!(export = self.name, left_out, %error, "no further NBD buffers");
                }
                false
            }
        }
    }

    /// True when nothing more should be taken from clients for now.
    pub(crate) fn is_congested(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// A fresh row for a connection that has `rows` already. A connection may hold at most as
    /// many as are free, so that one that does not read its replies leaves room for the others.
    pub(crate) fn take_row(&mut self, rows: usize) -> Option<u32> {
        if rows > self.requests.free() {
            return None;
        }
        self.requests.take()
    }

    /// Memory for a read of connection `slot`, appended to the row's parts: all of it or nothing.
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
        // Who holds memory waits for its own client, which may never come; it has no claim.
        if self.waiting.is_none() && memory.is_empty() {
            self.waiting = Some(slot);
        }
        false
    }

    /// The connection waits for memory no more.
    pub(crate) fn stop_waiting(&mut self, slot: usize) {
        if self.waiting == Some(slot) {
            self.waiting = None;
        }
    }

    /// Hands to the device what is ready of a row, behind those that wait already. A row that
    /// overlaps an orphaned write is deferred, and one that overlaps a change of a part of a block
    /// waits for its turn.
    pub(crate) fn submit(&mut self, row: u32) {
        let orphans = !self.seat.group.orphans.is_empty();
        if orphans && !rtrs_core::mutated!(NbdOrphanForgotten) && self.defer(row) {
            return;
        }
        let entry = self.requests.row(row);
        if entry.deferred {
            // More of its payload has come.
            return;
        }
        // What took too long may have ended meanwhile: then the rest goes on.
        if entry.late == Late::Noted && entry.complete && entry.is_at_device() {
            return self.give_up(row);
        }
        if !self.queue(row) {
            self.hand_over_in_order(row);
        }
    }

    /// Hands to the device what is ready of a row, behind those that wait for room.
    fn hand_over_in_order(&mut self, row: u32) {
        let Row { handed, ready, .. } = self.requests.row(row);
        if handed == ready {
            // A change within blocks: the row may end before its turn in the backlog would come.
            return;
        }
        if !self.backlog.is_empty() || !self.hand_over(row) {
            self.backlog.push_back(row);
        }
    }

    /// Defers a row of which nothing was handed over yet, if it overlaps an orphaned write. True
    /// when it is deferred.
    fn defer(&mut self, index: u32) -> bool {
        let row = self.requests.row(index);
        let fresh = row.handed == 0 && !row.deferred;
        if fresh && row.io != Some(IoOp::Flush) && self.seat.group.orphans.touch(row.bytes()) {
            row.deferred = true;
            self.deferred.push(index);
            self.stats.deferred += 1;
        }
        self.requests.row(index).deferred
    }

    /// True when requests wait for orphaned writes, or for their turn.
    pub(crate) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty() || !self.turns.is_empty()
    }

    /// A row does not wait for orphaned writes any more.
    fn undefer(&mut self, index: u32) {
        let row = self.requests.row(index);
        if std::mem::take(&mut row.deferred) {
            row.deferred_since = None;
            self.deferred.retain(|row| *row != index);
        }
    }

    /// Hands over deferred rows whose bytes no orphaned write can change any more. True when there
    /// was one.
    pub(crate) fn release_deferred(&mut self) -> bool {
        let (mut at, mut any) = (0, false);
        while let Some(&index) = self.deferred.get(at) {
            let row = self.requests.row(index);
            if self.seat.group.orphans.touch(row.bytes()) {
                at += 1;
                continue;
            }
            (row.deferred, row.deferred_since) = (false, None);
            self.deferred.remove(at);
            self.submit(index);
            any = true;
        }
        any
    }

    /// Fails what is deferred, or waits for its turn, for longer than it may; what waits has not
    /// begun. True when there was one.
    pub(crate) fn expire_deferred(&mut self, now: Instant) -> bool {
        let Some(bound) = self.deferred_max else { return false };
        let (mut at, mut any) = (0_usize, false);
        loop {
            let turn = at.checked_sub(self.deferred.len());
            let next = turn.map_or_else(|| self.deferred.get(at), |at| self.turns.get(at));
            let Some(&index) = next else { return any };
            let row = self.requests.row(index);
            let since = *row.deferred_since.get_or_insert(now);
            // A payload that still arrives needs its row.
            let whole = row.complete || row.op == Op::Read;
            if whole && now.since(since) >= bound {
                if row.status.is_ok() {
                    row.status = IoStatus::TimedOut;
                }
                self.withdraw(index);
                any = true;
            } else {
                at += 1;
            }
        }
    }

    /// The device gives up a part of this row: its client is to get an error now. What was handed
    /// to the device may still take effect, so a change holds up what overlaps it until its end, as
    /// an orphaned write does. The row and its memory stay until then.
    fn give_up(&mut self, index: u32) {
        self.backlog.retain(|row| *row != index);
        self.undefer(index);
        self.drop_turns(index);
        let row = self.requests.row(index);
        (row.ready, row.late, row.complete) = (row.handed, Late::GivenUp, true);
        if row.status.is_ok() {
            row.status = IoStatus::TimedOut;
        }
        let bytes = row.may_change().filter(|_| !row.orphaned);
        if let Some(bytes) = bytes.filter(|_| !rtrs_core::mutated!(SlowIoRangeDropped)) {
            row.orphaned = true;
            self.seat.group.orphans.enter((self.seat.shard, index), bytes);
        }
        self.end_running(index);
        self.stats.given_up += 1;
        self.finished.push_back(index);
    }

    /// Takes the IOs that the device gives up. True when there was one.
    fn take_given_up(&mut self) -> bool {
        let mut any = false;
        while let Some(tag) = self.device.take_given_up() {
            any = true;
            if !self.is_at_device(tag, "the device gave up an IO that it does not have") {
                continue;
            }
            let (index, _) = row_of(tag);
            let row = self.requests.row(index);
            match (row.late, row.complete || row.op == Op::Read) {
                (Late::No | Late::Noted, true) => self.give_up(index),
                (Late::No, false) => row.late = Late::Noted,
                _ => {}
            }
        }
        any
    }

    /// The client of a connection is gone, or will send nothing more: its changes that the device
    /// may still make become orphaned writes. What it has deferred ends with an error: it has not
    /// begun, and must not wait for orphaned writes while it is one itself.
    pub(crate) fn orphan(&mut self, conn: ConnId) {
        let Seat { group, shard } = self.seat.clone();
        let mut count = 0;
        for index in self.requests.open_rows(conn) {
            if self.requests.row(index).deferred {
                self.withdraw(index);
            }
            let row = self.requests.row(index);
            if row.is_done() {
                continue;
            }
            if let Some(bytes) = row.may_change().filter(|_| !row.orphaned) {
                row.orphaned = true;
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

    /// The client of a connection is gone for good: what has not begun at the device never does.
    pub(crate) fn drop_unbegun(&mut self, conn: ConnId) {
        let rows = self.requests.open_rows(conn);
        if rows.is_empty() {
            return;
        }
        for &index in &rows {
            let row = self.requests.row(index);
            let unbegun = row.queued || fragments::is_open(row);
            if unbegun || self.backlog.contains(&index) {
                self.withdraw(index);
            }
        }
        self.device.cancel(&|tag| rows.contains(&row_of(tag).0));
    }

    /// Nothing more of a row is handed to the device.
    fn withdraw(&mut self, index: u32) {
        self.backlog.retain(|row| *row != index);
        self.undefer(index);
        self.drop_turns(index);
        let row = self.requests.row(index);
        (row.ready, row.complete) = (row.handed, true);
        row.deferred_since = None;
        if row.status.is_ok() {
            row.status = IoStatus::Aborted;
        }
        self.end_running(index);
        self.finish_if_done(index);
    }

    /// Hands over what is ready of a row. False when the device is full.
    fn hand_over(&mut self, index: u32) -> bool {
        let row = self.requests.row(index);
        let Some(op) = row.io else { return true };
        let io_max = io_max(self.device.geometry(), op);
        while row.handed < row.ready {
            let left = row.ready - row.handed;
            let (len, step, buf) = match op {
                IoOp::Read | IoOp::Write => {
                    let (at, from) = row.cursor;
                    let slice = &row.parts[at].slice;
                    let most = (io_max.min(left) as usize).min(slice.len() - from);
                    let len = u32::try_from(most).unwrap_or(left);
                    (len, len, slice.slice(from, most))
                }
                // A flush has no length; it counts as one.
                IoOp::Flush => (0, 1, None),
                IoOp::Discard | IoOp::WriteZeroes => {
                    let len = left.min(io_max);
                    (len, len, None)
                }
                IoOp::Extents => (left, left, row.parts[0].slice.slice(0, extents::LEN_MAX)),
            };
            let offset = row.cut.whole.start + u64::from(row.handed);
            let io = Io { tag: u64::from(index), op, flags: row.flags, offset, len, buf };
            if self.device.submit(io).is_err() {
                return false;
            }
            row.handed += step;
            row.pending += 1;
            if matches!(op, IoOp::Read | IoOp::Write) {
                row.cursor.1 += step as usize;
                if row.cursor.1 == row.parts[row.cursor.0].slice.len() {
                    row.cursor = (row.cursor.0 + 1, 0);
                }
            }
        }
        true
    }

    /// Reports the row to its connection if nothing of it is outstanding.
    pub(crate) fn finish_if_done(&mut self, row: u32) {
        let entry = self.requests.row(row);
        let early = rtrs_core::mutated!(NbdFirstPart) && entry.pending > 0;
        if entry.is_between() && !entry.status.is_ok() {
            entry.complete = true;
        }
        if early || entry.is_done() || entry.is_between() {
            self.repeat_loss(row);
            // A change within blocks has had its turn; of the orphaned write that it overlaps,
            // what is left is elsewhere.
            self.undefer(row);
            self.leave_orphans(row);
            // One whose error is on its way ends with that.
            if self.requests.row(row).late != Late::GivenUp {
                self.finished.push_back(row);
            }
        }
    }

    /// An IO of this row has ended well.
    fn note_losses(&mut self, row: u32) {
        let entry = self.requests.row(row);
        if entry.changes() && !entry.is_done() && entry.losses.is_none() {
            entry.losses = self.losses.as_ref().map(|losses| losses.shared());
        }
    }

    /// A row is about to be answered. A loss since the first of its IOs ended may have taken what
    /// that one wrote, and be reported already: flushes after the answer report it again. Losses of
    /// other single writes, and such repetitions, do not count.
    fn repeat_loss(&mut self, row: u32) {
        let entry = self.requests.row(row);
        let before = entry.losses.take().filter(|_| entry.status.is_ok() && !entry.flags.fua);
        if let (Some(before), Some(losses)) = (before, &self.losses)
            && losses.shared() != before
        {
            losses.add();
        }
    }

    /// A row is no orphaned write any more.
    fn leave_orphans(&mut self, row: u32) {
        if std::mem::take(&mut self.requests.row(row).orphaned) {
            let key = (self.seat.shard, row);
            self.seat.group.orphans.leave(|own| *own == key);
        }
    }

    /// Gives a row and its memory back. False when it has to stay.
    #[must_use]
    pub(crate) fn free_row(&mut self, row: u32, memory: &mut ReadMemory) -> bool {
        if !self.leave_tables(row) {
            return false;
        }
        let entry = self.requests.row(row);
        while let Some(part) = entry.parts.pop() {
            if entry.op == Op::Write {
                self.buffers.release(part.buffer);
            } else {
                self.buffers.release_read(part.buffer, memory);
            }
        }
        if let Some(aside) = entry.aside.take() {
            self.buffers.release_read(aside.buffer, memory);
        }
        self.requests.give(row);
        true
    }

    pub(crate) fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        self.device.poll(now)
    }

    /// Takes the device's completions, and hands over what it has room for now.
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
            entry.pending -= 1;
            if done.status.is_ok() {
                self.note_losses(row);
            }
            let entry = self.requests.row(row);
            if !done.status.is_ok() && entry.status.is_ok() && !rtrs_core::mutated!(NbdErrorDropped)
            {
                entry.status = done.status;
            }
            let through = entry.is_idle() && entry.handed == entry.ready;
            if entry.op == Op::Write && (through || rtrs_core::mutated!(NbdMemoryEarly)) {
                // The payload is at the device: its buffers need not wait for the reply.
                entry.cursor = (0, 0);
                while let Some(part) = entry.parts.pop() {
                    self.buffers.release(part.buffer);
                }
            }
            self.end_running(row);
            self.finish_if_done(row);
        }
        any |= !self.turns.is_empty() && self.advance_turns();
        while let Some(&row) = self.backlog.front() {
            let before = self.requests.row(row).handed;
            let all = self.hand_over(row);
            any |= self.requests.row(row).handed > before;
            if !all {
                break;
            }
            self.backlog.pop_front();
        }
        any
    }
}

/// The row of an IO's tag, and which of its fragments.
fn row_of(tag: u64) -> (u32, Option<usize>) {
    #[allow(clippy::cast_possible_truncation, reason = "the low half is a row number")]
    let row = tag as u32;
    let which = usize::try_from(tag >> fragments::WHICH_SHIFT).unwrap_or(0);
    (row, which.checked_sub(1))
}

/// Bytes in whole blocks that the device takes at once. A flush has none.
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
