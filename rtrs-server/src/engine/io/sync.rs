//! Syncs: flushes and writes with FUA, and the effect of their results on other sessions.
//!
//! A failed sync raises the export's epoch (`epoch.rs`) and is answered once the epoch has been
//! saved. A successful sync is decided and answered only when all syncs that may have consumed its
//! error have ended: a flush is decided by the session's ledger (`ledger.rs`), a write with FUA by
//! the epoch in which it was submitted. Until then the request is `Settling`; the shard checks such
//! requests in each turn, and another shard whose sync has ended wakes it with a message.
//!
//! The request pipeline calls [`submit`](IoProgress::submit), `end_sync`, `is_settled` and
//! [`end_step`](IoProgress::end_step) in that order, and so does the loom model of this protocol.

use rtrs_core::block::{Io, IoOp};
use rtrs_core::ids::PermitId;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::errno;

use super::devices::Devices;
use super::progress::{IoProgress, IoStep};
use crate::engine::device_table::DeviceId;
use crate::engine::ledger::{FlushLedger, Hidden};
use crate::engine::partial::PartOfBlock;
use crate::path::{PathKey, PathShared};

/// Maximum time to save an epoch. After that the failure is reported anyway: a state directory on a
/// hanging disk must not delay the answer forever.
const SAVE_MAX: Duration = Duration::from_secs(5);

/// A session's ledger for the export of a request, and the path and permit of that request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Account<'a> {
    ledger: Option<&'a FlushLedger>,
    path: PathKey,
    permit: PermitId,
}

impl<'a> Account<'a> {
    pub(super) fn of(path: &'a PathShared, permit: PermitId, device: DeviceId) -> Self {
        Self { ledger: path.session.devices.ledger(device), path: path.key, permit }
    }
}

/// Result of an IO's step, and the conditions for acting on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settling {
    pub(super) status: IoStatus,
    /// For a sync: syncs with lower numbers decide its result.
    horizon: u64,
    /// For a failed sync: the number of epoch rises that must be saved before the sync is answered.
    saved_by: u32,
    /// Time at which the sync is answered even if the rises have not been saved.
    unsaved_at: Instant,
}

/// Action after a step of an IO has settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Submit the next step.
    Submit,
    /// Insert these bytes into the block that was read, then submit the next step.
    PutIn(PartOfBlock),
    /// Answer the IO with this errno.
    Answer(u16),
    /// Answer a flush with this errno, which reports a loss.
    ReportLoss(u16),
}

/// Effect of a step's result on the answer.
#[derive(Clone, Copy, Debug)]
enum Verdict {
    /// The device's result applies.
    Stands,
    /// The flush fails: acknowledged writes may be lost.
    ReportLoss(Hidden, u16),
    /// The write with FUA fails: another sync failed in the meantime, possibly on its bytes.
    Fail(u16),
}

impl IoProgress {
    /// Whether the current step makes data durable.
    fn is_sync(&self) -> bool {
        let fua = self.flags.fua && self.step != IoStep::ReadBlock;
        self.covers_all() || self.step == IoStep::PostFlush || fua
    }

    /// Whether the step failed as a sync, so that acknowledged data may be lost. No error of a
    /// flush counts as a refusal: for example, a file system that was shut down fails a flush with
    /// EROFS. An export that moved to another gateway has no cache, and has lost nothing.
    fn has_lost(&self, status: IoStatus) -> bool {
        let failed = !status.is_ok() && status != IoStatus::Moved;
        failed && (self.is_flush() || !status.is_refusal())
    }

    /// Whether the step is a flush that covers all data acknowledged before it.
    fn covers_all(&self) -> bool {
        self.step == IoStep::PreFlush || self.op == IoOp::Flush
    }

    /// Submits the next step, `order`, to the device. Returns false if the device queue is full.
    pub(super) fn submit(
        &mut self,
        order: Io,
        account: Account<'_>,
        devices: &mut Devices,
    ) -> bool {
        self.begin_sync(account, devices);
        let taken = devices.submit(self.export, order).is_ok();
        if !taken {
            self.withdraw_sync(devices);
        }
        taken
    }

    /// Records, before the submission, the state that decides the result.
    fn begin_sync(&mut self, account: Account<'_>, devices: &mut Devices) {
        let rises = devices.epoch(self.export).rises();
        self.sync.epoch.get_or_insert(rises);
        if !self.is_sync() {
            return;
        }
        if self.covers_all()
            && let Some(ledger) = account.ledger
        {
            self.sync.mark = ledger.begin_flush(rises, account.path, account.permit);
        }
        self.sync.number = devices.draw(self.export, self.covers_all());
    }

    /// Undoes `begin_sync` because the device queue was full. Other shards are not woken: a shard
    /// whose device queue is also full would wake this one in response. Waiting requests are
    /// checked again anyway.
    fn withdraw_sync(&mut self, devices: &mut Devices) {
        if let Some(number) = self.sync.number.take() {
            devices.back(self.export, number);
        }
    }

    /// Processes a step that the device has completed, possibly for a closed path. Also returns
    /// whether other shards are waiting for this step to end.
    pub(super) fn end_sync(
        &mut self,
        now: Instant,
        status: IoStatus,
        devices: &mut Devices,
    ) -> (Settling, bool) {
        if self.may_change().is_some() {
            devices.end_change(self.export);
        }
        let mut end = Settling { status, horizon: 0, saved_by: 0, unsaved_at: now + SAVE_MAX };
        if !self.is_sync() {
            return (end, false);
        }
        let epoch = devices.epoch(self.export);
        if self.has_lost(status) && !rtrs_core::mutated!(SyncFailureForgotten) {
            end.saved_by = epoch.raise();
            devices.log_failed_sync(self.export, status, now);
        }
        let Some(number) = self.sync.number.take() else { return (end, false) };
        let wakes = devices.back(self.export, number);
        // Read after the sync's number has been returned: later syncs began after this one ended.
        end.horizon = devices.epoch(self.export).order().horizon();
        (end, wakes)
    }

    /// Whether the result of a step may be acted on.
    pub(super) fn is_settled(&self, end: &Settling, now: Instant, devices: &Devices) -> bool {
        if !self.is_sync() {
            return true;
        }
        let epoch = devices.epoch(self.export);
        let saved = epoch.is_saved(end.saved_by) || now >= end.unsaved_at;
        saved && epoch.order().is_clear(end.horizon)
    }

    /// Counts an IO that starts or stops waiting for its result to settle.
    pub(super) fn count_settling(&self, begins: bool, devices: &Devices) {
        devices.epoch(self.export).order().count_waiting(begins);
    }

    /// Ends the wait for a result to settle; logs an epoch that could not be saved in time.
    pub(super) fn end_settling(&self, end: &Settling, devices: &Devices) {
        self.count_settling(false, devices);
        if !devices.epoch(self.export).is_saved(end.saved_by) {
            tracing::error!(
                export = devices.name(self.export),
                "cannot save the epoch in time: current clients are notified of the failed sync, \
                 but clients that connect after a restart of the server may not be; check the disk \
                 of the state directory"
            );
        }
    }

    /// Ends a settled step: reports a loss, records a write before it is acknowledged, and advances
    /// to the next step.
    pub(super) fn end_step(
        &mut self,
        status: IoStatus,
        account: Account<'_>,
        devices: &Devices,
    ) -> Next {
        match self.verdict(status, account, devices) {
            Verdict::Stands => {}
            Verdict::Fail(errno) => return Next::Answer(errno),
            Verdict::ReportLoss(hidden, errno) => {
                if let Some(ledger) = account.ledger {
                    ledger.report(self.sync.mark, hidden, account.path, account.permit);
                }
                return Next::ReportLoss(errno);
            }
        }
        if !status.is_ok() && !rtrs_core::mutated!(DeviceErrorDropped) {
            return Next::Answer(status.to_errno());
        }
        match self.step {
            IoStep::PreFlush if self.partial.is_some() => self.step = IoStep::ReadBlock,
            IoStep::PreFlush => self.step = IoStep::Data,
            IoStep::ReadBlock => {
                self.step = IoStep::Data;
                return self.partial.map_or(Next::Submit, Next::PutIn);
            }
            IoStep::Data => {
                self.done += self.part;
                if self.done >= self.len || rtrs_core::mutated!(FirstPartAnswers) {
                    if !self.post_flush || rtrs_core::mutated!(PostflushDropped) {
                        self.note_write(account, devices);
                        return Next::Answer(0);
                    }
                    self.step = IoStep::PostFlush;
                }
            }
            IoStep::PostFlush => return Next::Answer(0),
        }
        Next::Submit
    }

    /// Determines the effect of a settled step.
    fn verdict(&self, status: IoStatus, account: Account<'_>, devices: &Devices) -> Verdict {
        let rises = devices.epoch(self.export).rises();
        if self.covers_all() {
            if !status.is_ok() {
                return Verdict::ReportLoss(Hidden::Loss, status.to_errno());
            }
            let hidden = account.ledger.and_then(|own| own.hides_loss(self.sync.mark, rises));
            return hidden.map_or(Verdict::Stands, |why| Verdict::ReportLoss(why, errno::EIO));
        }
        let outdated = self.sync.epoch.is_some_and(|began| rises > began);
        if self.is_sync() && status.is_ok() && outdated {
            return Verdict::Fail(errno::EIO);
        }
        Verdict::Stands
    }

    /// Records a completed write before it is acknowledged.
    fn note_write(&self, account: Account<'_>, devices: &Devices) {
        let uncounted = match self.op {
            IoOp::WriteZeroes => rtrs_core::mutated!(ZeroesNotCounted),
            IoOp::Discard => rtrs_core::mutated!(DiscardNotCounted),
            _ => false,
        };
        if !self.changes() || self.flags.fua || uncounted {
            return;
        }
        if let (Some(ledger), Some(began)) = (account.ledger, self.sync.epoch) {
            ledger.wrote(began, devices.epoch(self.export).rises());
        }
    }
}

#[cfg(all(test, loom))]
#[path = "../tests/sync_model.rs"]
mod loom_model;
