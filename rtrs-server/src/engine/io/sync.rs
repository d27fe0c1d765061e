//! Syncs: flushes, and writes with FUA; what their ends mean for other sessions.
//!
//! A sync that failed raises the export's epoch (`epoch.rs`) and is answered when the epoch is
//! saved. One that succeeded is answered when all syncs that may have taken its error have ended,
//! and is only then decided: a flush by the session's ledger (`ledger.rs`), a write with FUA by the
//! epoch it was submitted in. Until then the request is `Settling`; the shard looks at such
//! requests in each turn, and another shard whose sync has ended wakes it by a message.
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

/// What saving an epoch may take. After that the failure is reported all the same: a state
/// directory on a disk that hangs must not delay the answer for ever.
const SAVE_MAX: Duration = Duration::from_secs(5);

/// A session's ledger for the export of a request, and where that request is answered.
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

/// How a step of an IO ended, and what has to come about before that is acted on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settling {
    pub(super) status: IoStatus,
    /// Of a sync: syncs with lower numbers decide what its end is worth.
    horizon: u64,
    /// Of a sync that has failed: the epoch to be saved before it is answered.
    saved_by: u32,
    /// From then on it is answered whether that is saved or not.
    unsaved_at: Instant,
}

/// What follows a step of an IO that has ended for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The next step is submitted.
    Submit,
    /// The same, when these bytes are in the block that was read.
    PutIn(PartOfBlock),
    /// The IO is answered with this errno.
    Answer(u16),
    /// A flush is answered with this errno, which reports a loss.
    ReportLoss(u16),
}

/// What the end of a step means for the answer.
#[derive(Clone, Copy, Debug)]
enum Verdict {
    /// The step ended as the device says.
    Stands,
    /// The flush fails: acknowledged writes may be lost.
    ReportLoss(Hidden, u16),
    /// The write with FUA fails: another sync failed meanwhile, perhaps for its bytes.
    Fail(u16),
}

impl IoProgress {
    /// True when the step that the device works on makes data durable.
    fn is_sync(&self) -> bool {
        let fua = self.flags.fua && self.step != IoStep::ReadBlock;
        self.covers_all() || self.step == IoStep::PostFlush || fua
    }

    /// True when that step failed as a sync, so that acknowledged data may be lost. No flush is
    /// ever refused: a file system that was shut down fails it with EROFS, for one. What has moved
    /// to another gateway has no cache, and lost nothing.
    fn has_lost(&self, status: IoStatus) -> bool {
        let failed = !status.is_ok() && status != IoStatus::Moved;
        failed && (self.is_flush() || !status.is_refusal())
    }

    /// True when that step is a flush that covers all that was acknowledged before.
    fn covers_all(&self) -> bool {
        self.step == IoStep::PreFlush || self.op == IoOp::Flush
    }

    /// Gives the device the next step, `order`. False when the device is full.
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

    /// It is about to be submitted: notes what decides about its end.
    fn begin_sync(&mut self, account: Account<'_>, devices: &mut Devices) {
        let rises = devices.epoch(self.export).rises();
        self.epoch.get_or_insert(rises);
        if !self.is_sync() {
            return;
        }
        if self.covers_all()
            && let Some(ledger) = account.ledger
        {
            self.mark = ledger.begin_flush(rises, account.path, account.permit);
        }
        self.number = devices.draw(self.export, self.covers_all());
    }

    /// The device was full: the sync did not begin. Nobody is woken, since another shard whose
    /// device is full too would answer by waking this one; requests that wait are looked at again.
    fn withdraw_sync(&mut self, devices: &mut Devices) {
        if let Some(number) = self.number.take() {
            devices.back(self.export, number);
        }
    }

    /// The device ended a step, perhaps of a path that is closed. True when other shards wait for
    /// that.
    pub(super) fn end_sync(
        &mut self,
        now: Instant,
        status: IoStatus,
        devices: &mut Devices,
    ) -> (Settling, bool) {
        let mut end = Settling { status, horizon: 0, saved_by: 0, unsaved_at: now + SAVE_MAX };
        if !self.is_sync() {
            return (end, false);
        }
        let epoch = devices.epoch(self.export);
        if self.has_lost(status) && !rtrs_core::mutated!(SyncFailureForgotten) {
            end.saved_by = epoch.raise();
            let name = devices.name(self.export);
            tracing::error!(
                %name,
                epoch = epoch.number(),
                %status,
                "a sync failed: what was written since the last good flush may be lost; the next \
                 flush of each session that has written fails"
            );
        }
        let Some(number) = self.number.take() else { return (end, false) };
        let wakes = devices.back(self.export, number);
        // After the number is back: what is drawn from now on began after this end.
        end.horizon = devices.epoch(self.export).horizon();
        (end, wakes)
    }

    /// True when the end of a step may be acted on.
    pub(super) fn is_settled(&self, end: &Settling, now: Instant, devices: &Devices) -> bool {
        if !self.is_sync() {
            return true;
        }
        let epoch = devices.epoch(self.export);
        let saved = epoch.is_saved(end.saved_by) || now >= end.unsaved_at;
        saved && epoch.is_clear(end.horizon)
    }

    /// It begins, or ends, to wait until it is settled.
    pub(super) fn count_settling(&self, begins: bool, devices: &Devices) {
        devices.epoch(self.export).count_waiting(begins);
    }

    /// It waited until it was settled; logs an epoch that could not be saved in time.
    pub(super) fn end_settling(&self, end: &Settling, devices: &Devices) {
        self.count_settling(false, devices);
        if !devices.epoch(self.export).is_saved(end.saved_by) {
            tracing::error!(
                name = devices.name(self.export),
                "cannot save the epoch in time: the failure is reported, but a client that \
                 connects after the server's next start may not be notified of it; check the disk \
                 of the state directory"
            );
        }
    }

    /// A step is settled: reports a loss, notes a write that is about to be acknowledged, and moves
    /// on to the next step.
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
                    ledger.report(self.mark, hidden, account.path, account.permit);
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

    /// What the end of a settled step means.
    fn verdict(&self, status: IoStatus, account: Account<'_>, devices: &Devices) -> Verdict {
        let rises = devices.epoch(self.export).rises();
        if self.covers_all() {
            if !status.is_ok() {
                return Verdict::ReportLoss(Hidden::Loss, status.to_errno());
            }
            let hidden = account.ledger.and_then(|own| own.hides_loss(self.mark, rises));
            return hidden.map_or(Verdict::Stands, |why| Verdict::ReportLoss(why, errno::EIO));
        }
        let outdated = self.epoch.is_some_and(|began| rises > began);
        if self.is_sync() && status.is_ok() && outdated {
            return Verdict::Fail(errno::EIO);
        }
        Verdict::Stands
    }

    /// A write has been done and is about to be acknowledged.
    fn note_write(&self, account: Account<'_>, devices: &Devices) {
        let uncounted = match self.op {
            IoOp::WriteZeroes => rtrs_core::mutated!(ZeroesNotCounted),
            IoOp::Discard => rtrs_core::mutated!(DiscardNotCounted),
            _ => false,
        };
        if !self.changes() || self.flags.fua || uncounted {
            return;
        }
        if let (Some(ledger), Some(began)) = (account.ledger, self.epoch) {
            ledger.wrote(began, devices.epoch(self.export).rises());
        }
    }
}

#[cfg(all(test, loom))]
#[path = "../tests/sync_model.rs"]
mod loom_model;
