//! State shared by all connections of a shard: the device, the rows, the buffers and the counters.
//!
//! A row is submitted to the device piece by piece, as its memory becomes available and as the
//! device accepts it, and never with more bytes per IO than the device's limits allow. Rows for
//! which the device queue is full wait in order; until they have been submitted, no new requests
//! are taken from clients. Rows that overlap an orphaned write are deferred until it has ended
//! (`group`). A row that the device gives up on is answered with an error immediately; the device
//! holds the row and its memory until the IO ends, and a change counts as an orphaned write from
//! then on. Changes to parts of blocks are serialized with overlapping requests (`fragments`).
//!
//! This file passes rows from one part to the next: `orphaned_writes`, `turns` and `device_queue`
//! each own the rows that wait in them. Connections and the shard's turn in `bridge` call it. After
//! startup, memory is allocated only when a client disconnects or the device gives up on IO.

mod device_queue;
mod first_reader;
mod fragments;
mod internal_error;
mod orphaned_writes;
mod turns;

use std::collections::VecDeque;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, IoOp};
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::losses::Losses;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};

use self::device_queue::DeviceQueue;
use self::first_reader::FirstReader;
use self::orphaned_writes::OrphanedWrites;
use self::turns::{Turn, Turns};
use crate::buffers::{Buffers, ReadMemory};
use crate::config::BridgeConfig;
use crate::export::ExportTerms;
use crate::group::Seat;
use crate::notices::{Notice, Notices};
use crate::proto::{ExportInfo, Exports, Op};
use crate::requests::{ConnId, Late, Requests};
use crate::status::is_device_fault;

/// State shared by all NBD connections of a shard.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) terms: ExportTerms,
    pub(crate) buffers: Buffers,
    pub(crate) first_reader: FirstReader,
    pub(crate) requests: Requests,
    pub(crate) stats: FrontEndStats,
    /// Rate limits for log lines that clients can trigger.
    pub(crate) notices: Notices,
    pub(crate) internal_errors: internal_error::InternalErrors,
    /// Time of the current turn.
    now: Instant,
    /// Lost writes of the device; each connection reports them to its client.
    pub(crate) losses: Option<Arc<Losses>>,
    pub(crate) queue: DeviceQueue,
    orphaned_writes: OrphanedWrites,
    pub(crate) turns: Turns,
    pub(crate) seat: Seat,
    /// Maximum time for which a row may be deferred.
    deferred_max: Option<Duration>,
    /// Rows whose last IO has ended, in the order in which they finished, for their connections.
    pub(crate) finished: VecDeque<u32>,
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
            terms: ExportTerms::new(name, config),
            buffers,
            first_reader: FirstReader::default(),
            requests: Requests::new(config.requests_max, config.connections_max),
            stats: FrontEndStats::default(),
            notices: Notices::default(),
            internal_errors: internal_error::InternalErrors::default(),
            now: Instant::ZERO,
            losses: device.take_losses(),
            queue: DeviceQueue::new(device, rows),
            orphaned_writes: OrphanedWrites::new(seat.clone(), rows),
            turns: Turns::new(seat.clone(), rows),
            seat,
            deferred_max: config.deferred_max,
            finished: VecDeque::with_capacity(rows),
        }
    }

    /// Returns the export as clients see it now.
    pub(crate) fn export(&self) -> ExportInfo {
        self.terms.export(self.queue.geometry())
    }

    /// Switches to memory from a different pool. Returns true if such memory is available.
    pub(crate) fn move_on(&mut self) -> bool {
        let share = self.buffers.another_share().and_then(|share| {
            let device = self.queue.device_mut();
            share.iter().try_for_each(|share| device.attach_region(share.region()))?;
            Ok(share)
        });
        match share {
            Ok(Some(share)) => {
                self.buffers.switch_to(share);
                tracing::info!(
                    export = self.terms.name(),
                    "NBD buffers exhausted; using another pool"
                );
                true
            }
            Ok(None) => false,
            Err(error) => {
                if let Some(left_out) = self.notices.admit(self.now, Notice::PoolUnavailable) {
                    tracing::warn!(
                        export = self.terms.name(),
                        left_out,
                        %error,
                        "cannot allocate further NBD buffers"
                    );
                }
                false
            }
        }
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
        let others_first = self.first_reader.is_other(slot);
        let parts = &mut self.requests.row(row).parts;
        if self.buffers.take_read(len, others_first, memory, parts) {
            self.first_reader.stop(slot);
            return true;
        }
        // A connection that holds memory waits for its own client, which may never read, so it is
        // given no precedence.
        if memory.is_empty() {
            self.first_reader.wait(slot);
        }
        false
    }

    /// Drops the data of a finished read, which will be read again. Returns false if the row holds
    /// no such data.
    pub(crate) fn drop_data(&mut self, row: u32, memory: &mut ReadMemory) -> bool {
        let entry = self.requests.row(row);
        let drops = entry.forget_piece();
        if drops {
            while let Some(part) = entry.parts.pop() {
                self.buffers.release_read(part.buffer, memory);
            }
        }
        drops
    }

    /// Submits the ready bytes of a row to the device, behind rows already waiting. A row that
    /// overlaps an orphaned write is deferred, and a row that overlaps a change of part of a block
    /// waits for its turn.
    pub(crate) fn submit(&mut self, row: u32) {
        let entry = self.requests.row(row);
        if self.orphaned_writes.defer(row, entry) {
            self.stats.deferred += 1;
            return;
        }
        if entry.overlaps.is_deferred() {
            // More of the payload has arrived.
            return;
        }
        // IO that took too long may have ended in the meantime; in that case, submit the rest.
        let noted = entry.reply.late() == Late::Noted;
        if noted && entry.progress.is_complete() && entry.is_at_device() {
            return self.give_up(row);
        }
        match self.turns.queue(row, entry) {
            Turn::Now => self.queue.submit_in_order(row, entry),
            Turn::Queued => self.stats.deferred += 1,
            Turn::Joined => {}
        }
    }

    /// Whether requests wait for orphaned writes or for their turn.
    pub(crate) fn has_deferred(&self) -> bool {
        !self.orphaned_writes.deferred().is_empty() || !self.turns.waiting().is_empty()
    }

    /// Submits deferred rows whose bytes can no longer be changed by an orphaned write. Returns
    /// true if there were any.
    pub(crate) fn release_deferred(&mut self) -> bool {
        let (mut at, mut any) = (0, false);
        while let Some(index) = self.orphaned_writes.release(&mut at, &mut self.requests) {
            self.submit(index);
            any = true;
        }
        any
    }

    /// Fails rows that have been deferred, or have waited for their turn, for too long. Such rows
    /// have not begun. Returns true if there were any.
    pub(crate) fn expire_deferred(&mut self, now: Instant) -> bool {
        let Some(bound) = self.deferred_max else { return false };
        let (mut at, mut any) = (0_usize, false);
        loop {
            let (deferred, turns) = (self.orphaned_writes.deferred(), self.turns.waiting());
            let Some(&index) = deferred.iter().chain(turns).nth(at) else { return any };
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

    /// Handles a row that the device gives up on in part: the client is sent an error now. Bytes
    /// already submitted may still take effect, so a change holds up overlapping requests until it
    /// ends, as an orphaned write does. The row and its memory stay until then.
    fn give_up(&mut self, index: u32) {
        self.leave_queues(index);
        let row = self.requests.row(index);
        row.progress.cut_off();
        row.reply.set_late(Late::GivenUp);
        row.reply.note(IoStatus::TimedOut);
        if !rtrs_core::mutated!(SlowIoRangeDropped) {
            self.orphaned_writes.add(index, row);
        }
        self.turns.end_running(index, row);
        self.stats.given_up += 1;
        self.finished.push_back(index);
    }

    /// Removes the unsubmitted part of a row from all queues.
    fn leave_queues(&mut self, index: u32) {
        self.queue.remove(index);
        self.orphaned_writes.undefer(index, self.requests.row(index));
        self.drop_turns(index);
    }

    /// Collects the IOs that the device gives up on. Returns true if there were any.
    fn take_given_up(&mut self) -> bool {
        let mut any = false;
        while let Some(tag) = self.queue.device_mut().take_given_up() {
            any = true;
            if !self.is_at_device(tag, "the device abandoned an unknown IO") {
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

    /// Handles the disconnection of a client: changes that the device may still make become
    /// orphaned writes. Deferred requests fail: they have not begun, and they must not wait for
    /// orphaned writes while being orphaned writes themselves.
    pub(crate) fn orphan(&mut self, conn: ConnId) {
        let mut count = 0;
        for index in self.requests.open_rows(conn) {
            if self.requests.row(index).overlaps.is_deferred() {
                self.withdraw(index);
            }
            let row = self.requests.row(index);
            if row.is_done() {
                continue;
            }
            count += u64::from(self.orphaned_writes.add(index, row));
        }
        if count == 0 {
            return;
        }
        self.stats.orphaned += count;
        if let Some(left_out) = self.notices.admit(self.now, Notice::UnansweredWrites) {
            tracing::info!(
                export = self.terms.name(),
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
            if unbegun || self.queue.holds(index) {
                self.withdraw(index);
            }
        }
        self.queue.device_mut().cancel(&|tag| rows.contains(&row_of(tag).0));
    }

    /// Withdraws the unsubmitted part of a row.
    fn withdraw(&mut self, index: u32) {
        self.leave_queues(index);
        let row = self.requests.row(index);
        row.progress.cut_off();
        row.overlaps.stop_waiting();
        row.reply.note(IoStatus::Aborted);
        self.turns.end_running(index, row);
        self.finish_if_done(index);
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
            // A change to part of a block has had its turn. Anything left of the orphaned write
            // that it overlaps is elsewhere.
            self.orphaned_writes.undefer(row, entry);
            self.orphaned_writes.remove(row, entry);
            // A row whose error reply is being sent ends with that reply.
            if entry.reply.late() != Late::GivenUp {
                self.finished.push_back(row);
            }
        }
    }

    /// Frees a row and its memory, for a connection that holds `rows` rows. Returns false if the
    /// row must stay.
    #[must_use]
    pub(crate) fn free_row(&mut self, row: u32, rows: usize, memory: &mut ReadMemory) -> bool {
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
        if let Some(part) = entry.fragments.take_memory() {
            self.buffers.release_read(part.buffer, memory);
        }
        self.requests.give(row, rows - 1);
        true
    }

    pub(crate) fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        self.queue.device_mut().poll(now)
    }

    /// Collects the device's completions, and submits as much as it now has room for.
    pub(crate) fn reap(&mut self) -> bool {
        let mut any = self.take_given_up();
        while let Some(done) = self.queue.device_mut().reap() {
            any = true;
            if !self.is_at_device(done.tag, "the device completed an unknown IO") {
                continue;
            }
            let (row, fragment) = row_of(done.tag);
            self.stats.completed += 1;
            if is_device_fault(done.status) {
                self.stats.failed += 1;
            }
            if let Some(which) = fragment {
                self.on_fragment(row, which, done.status);
                continue;
            }
            let entry = self.requests.row(row);
            entry.progress.ended();
            if entry.command.io() == Some(IoOp::Flush) {
                entry.loss_marks.set_at_end(self.queue.device_mut().losses_at_end());
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
            self.turns.end_running(row, entry);
            self.finish_if_done(row);
        }
        any |= !self.turns.waiting().is_empty() && self.advance_turns();
        any | self.queue.submit_waiting(&mut self.requests)
    }
}

/// Splits an IO's tag into the row and the index of the fragment, if any.
fn row_of(tag: u64) -> (u32, Option<usize>) {
    #[allow(clippy::cast_possible_truncation, reason = "the low half is a row number")]
    let row = tag as u32;
    let which = usize::try_from(tag >> fragments::WHICH_SHIFT).unwrap_or(0);
    (row, which.checked_sub(1))
}

impl Exports for Shared {
    fn list(&self, visit: &mut dyn FnMut(&ExportInfo)) {
        visit(&self.export());
    }

    fn lookup(&self, name: &str) -> Option<ExportInfo> {
        (name.is_empty() || name == self.terms.name()).then(|| self.export())
    }
}
