//! Syncs: flushes, and writes with FUA; what their ends mean for other sessions.
//!
//! A sync that failed raises the export's epoch (`epoch.rs`) and is answered when the epoch is
//! saved. One that succeeded is answered when all syncs that may have taken its error are looked
//! at, and only then judged: a flush by the session's ledger (`ledger.rs`), a write with FUA by
//! the epoch it was submitted in. Requests that wait for either are `Settling`; the shard looks at
//! them in each turn, and is woken by a message when another shard's sync is back.

use std::mem;

use rtrs_core::block::IoOp;
use rtrs_core::ids::{CoreIndex, PermitId};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;
use rtrs_core::wire::errno;

use super::request::{IoProgress, IoStep, RequestState};
use super::{Fabrics, Shard};
use crate::engine::io::devices::RequestRef;
use crate::engine::ledger::Hidden;
use crate::engine::message::{Outbox, ShardMail};
use crate::epoch::SyncEpoch;

/// What saving an epoch may take. After that the failure is told all the same: a disk of the state
/// directory that hangs must not keep it from whoever waits for it.
const SAVE_MAX: Duration = Duration::from_secs(5);

/// True for a status of a write with FUA that says nothing about what was acknowledged before: the
/// request was refused before it reached the disk.
const fn is_refusal(status: IoStatus) -> bool {
    matches!(
        status,
        IoStatus::Beyond | IoStatus::Invalid | IoStatus::ReadOnly | IoStatus::Unsupported
    )
}

impl IoProgress {
    /// True when the step that the device works on makes data durable.
    pub(super) const fn is_sync(&self) -> bool {
        self.covers_all() || self.step as u8 == IoStep::PostFlush as u8 || self.flags.fua
    }

    /// True when that step failed as a sync, so that acknowledged data may be lost. No flush is
    /// ever refused: a file system that was shut down fails it with EROFS, for one.
    const fn has_lost(&self, status: IoStatus) -> bool {
        !status.is_ok()
            && (self.step as u8 != IoStep::Data as u8 || self.is_flush() || !is_refusal(status))
    }

    const fn is_flush(&self) -> bool {
        matches!(self.op, IoOp::Flush)
    }

    /// True when that step is a flush, which covers all that was acknowledged before.
    pub(super) const fn covers_all(&self) -> bool {
        matches!(self.step, IoStep::PreFlush) || self.is_flush()
    }
}

impl Shard {
    /// An IO is about to be submitted: notes what its end is judged by.
    pub(super) fn begin_sync(&mut self, row: u32, permit: PermitId) {
        let core = self.core;
        let Some(path) = self.paths.get_mut(row as usize).and_then(Option::as_deref_mut) else {
            return;
        };
        let session = &path.shared.session;
        let Some(io) = path.requests[permit.index()].io.as_mut() else { return };
        if io.epoch.is_none() {
            io.epoch = self.devices.epoch(io.export).map(|epoch| epoch.rises());
        }
        if !io.is_sync() {
            return;
        }
        if io.covers_all()
            && let Some(ledger) = session.devices.ledger(io.device)
        {
            let epoch = self.devices.epoch(io.export).map_or(0, SyncEpoch::rises);
            io.mark = ledger.begin_flush(epoch, path.shared.key, permit);
        }
        io.number = self.devices.draw(core, io.export, io.covers_all());
    }

    /// The device was full: the sync did not begin. Nobody is woken, since another shard whose
    /// device is full too would answer by waking this one; who waits looks again by itself.
    pub(super) fn withdraw_sync(&mut self, row: u32, permit: PermitId) {
        let Some(path) = self.path_mut(row) else { return };
        let Some(io) = path.requests[permit.index()].io.as_mut() else { return };
        let (export, number) = (io.export, io.number.take());
        if let Some(number) = number {
            self.devices.back(self.core, export, number);
        }
    }

    /// A device ended a step, perhaps of a path that is closed: what follows for other sessions.
    pub(super) fn end_sync(
        &mut self,
        row: u32,
        permit: PermitId,
        status: IoStatus,
        out: &mut Outbox,
    ) {
        let Some(path) = self.path_mut(row) else { return };
        let Some(io) = path.requests[permit.index()].io.as_mut() else { return };
        if !io.is_sync() {
            return;
        }
        let (export, number, lost) = (io.export, io.number.take(), io.has_lost(status));
        let Some(epoch) = self.devices.epoch(export) else { return };
        let (mut saved_by, now) = (0, self.now());
        if lost && !rtrs_core::mutated!(SyncFailureForgotten) {
            saved_by = epoch.raise();
            let name = self.devices.name(export).unwrap_or_default();
            tracing::error!(
                %name,
                epoch = epoch.number(),
                %status,
                "a sync failed: what was written since the last good flush may be lost; the next \
                 flush of each session that has written fails"
            );
        }
        let wakes = number.is_some_and(|number| self.devices.back(self.core, export, number));
        // After the number is back: what is drawn from now on began after this end.
        let horizon = number.and_then(|_| Some(self.devices.epoch(export)?.horizon()));
        if let Some(path) = self.path_mut(row)
            && let Some(io) = path.requests[permit.index()].io.as_mut()
        {
            (io.saved_by, io.horizon) = (saved_by, horizon.unwrap_or(0));
            io.unsaved_at = now + SAVE_MAX;
        }
        if wakes {
            self.wake_others(out);
        }
    }

    fn wake_others(&self, out: &mut Outbox) {
        for core in (0..self.params.cores).filter(|core| *core != self.core.0) {
            out.shard(CoreIndex(core), ShardMail::SyncBack);
        }
    }

    /// The end of a step may be acted on: now, or when what it waits for has come about.
    pub(super) fn settle_io(
        &mut self,
        row: u32,
        permit: PermitId,
        status: IoStatus,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        if self.is_settled(row, permit) {
            return self.settled(row, permit, status, fabrics, out);
        }
        let Some(path) = self.paths.get_mut(row as usize).and_then(Option::as_deref_mut) else {
            return;
        };
        let request = &mut path.requests[permit.index()];
        request.go(RequestState::Settling);
        let Some(io) = request.io.as_mut() else { return };
        io.status = status;
        if let Some(epoch) = self.devices.epoch(io.export) {
            epoch.count_waiting(true);
        }
        self.settling.push(RequestRef { path: row, permit });
    }

    fn is_settled(&self, row: u32, permit: PermitId) -> bool {
        let request = self.path(row).and_then(|path| path.requests.get(permit.index()));
        let Some(io) = request.and_then(|request| request.io) else { return true };
        if !io.is_sync() {
            return true;
        }
        self.devices.epoch(io.export).is_none_or(|epoch| {
            let saved = epoch.is_saved(io.saved_by) || self.now() >= io.unsaved_at;
            saved && epoch.is_clear(io.horizon)
        })
    }

    /// Looks at requests that wait for syncs or for the epoch to be saved. True when one got on.
    pub(super) fn look_at_settling(&mut self, fabrics: &mut Fabrics, out: &mut Outbox) -> bool {
        let before = self.settling.len();
        for at in mem::take(&mut self.settling) {
            let RequestRef { path: row, permit } = at;
            let request = self.path(row).and_then(|path| path.requests.get(permit.index()));
            let Some(request) = request.filter(|r| r.state() == RequestState::Settling) else {
                continue;
            };
            let Some(io) = request.io else { continue };
            if !self.is_settled(row, permit) {
                self.settling.push(at);
                continue;
            }
            if let Some(epoch) = self.devices.epoch(io.export) {
                epoch.count_waiting(false);
                if !epoch.is_saved(io.saved_by) {
                    tracing::error!(
                        name = self.devices.name(io.export).unwrap_or_default(),
                        "cannot save the epoch in time: the failure is told, but a client that \
                         connects after the server's next start may not hear of it; look at the \
                         disk of the state directory"
                    );
                }
            }
            self.settled(row, permit, io.status, fabrics, out);
        }
        self.settling.len() < before
    }

    /// The path closes: its requests that settle are dropped.
    pub(super) fn drop_settling(&mut self, row: u32) {
        let mut settling = mem::take(&mut self.settling);
        settling.retain(|at| {
            if at.path != row {
                return true;
            }
            let io = self.path(row).and_then(|path| path.requests[at.permit.index()].io);
            if let Some(epoch) = io.and_then(|io| self.devices.epoch(io.export)) {
                epoch.count_waiting(false);
            }
            false
        });
        self.settling = settling;
    }

    /// A step has ended for good: judges it, then goes on or answers.
    fn settled(
        &mut self,
        row: u32,
        permit: PermitId,
        status: IoStatus,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let Some(path) = self.path(row) else { return };
        let Some(io) = path.requests[permit.index()].io else { return };
        let rises = self.devices.epoch(io.export).map_or(0, |epoch| epoch.rises());
        let ledger = path.shared.session.devices.ledger(io.device);
        if io.covers_all() {
            let hidden = match status {
                IoStatus::Ok => ledger.and_then(|own| own.hides_loss(io.mark, rises)),
                _ => Some(Hidden::Loss),
            };
            if let Some(hidden) = hidden {
                return self.tell_loss(row, permit, (&io, hidden, status), fabrics, out);
            }
        } else if io.is_sync() && status.is_ok() && io.epoch.is_some_and(|began| rises > began) {
            // Another sync failed meanwhile, perhaps for these bytes.
            return self.finish(row, permit, errno::EIO, fabrics, out);
        }
        self.advance_io(row, permit, status, fabrics, out);
    }

    /// Fails a flush because acknowledged writes may be lost.
    fn tell_loss(
        &mut self,
        row: u32,
        permit: PermitId,
        (io, hidden, status): (&IoProgress, Hidden, IoStatus),
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let Some(path) = self.path_mut(row) else { return };
        if let Some(ledger) = path.shared.session.devices.ledger(io.device) {
            ledger.tell(io.mark, hidden, path.shared.key, permit);
        }
        path.requests[permit.index()].told = Some(io.device);
        let errno = if status.is_ok() { errno::EIO } else { status.to_errno() };
        self.finish(row, permit, errno, fabrics, out);
    }

    /// The path closes, so answers that told of a loss may not have arrived: the client sends such
    /// a flush again over another path, and must hear it there.
    pub(super) fn untell_losses(&self, row: u32) {
        let Some(path) = self.path(row) else { return };
        for device in path.requests.iter().filter_map(|request| request.told) {
            if let Some(ledger) = path.shared.session.devices.ledger(device) {
                ledger.untell();
            }
        }
    }

    /// A write has been done and is about to be acknowledged.
    pub(super) fn note_write(&self, row: u32, permit: PermitId) {
        let Some(path) = self.path(row) else { return };
        let Some(io) = path.requests[permit.index()].io else { return };
        if !io.changes() || io.flags.fua {
            return;
        }
        let ledger = path.shared.session.devices.ledger(io.device);
        let epoch = self.devices.epoch(io.export);
        if let (Some(ledger), Some(began), Some(epoch)) = (ledger, io.epoch, epoch) {
            ledger.wrote(began, epoch.rises());
        }
    }
}
