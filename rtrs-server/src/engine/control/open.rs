//! Opens and closes of exports: the control shard's answers to OPEN and CLOSE.
//!
//! A name is looked up among the named exports. If the name is not found and the server has a
//! search path, the finder searches for it, and the result arrives as a message. `open_modes.rs`
//! decides which session may open an export in which mode; this file describes an open export to a
//! client.

use std::sync::Arc;

use rtrs_core::block::TargetName;
use rtrs_core::gateway::Gateway;
use rtrs_core::identity::ExportId;
use rtrs_core::ids::{CoreIndex, SessionId};
use rtrs_core::limits::{Limits, SECTOR_SIZE, SEGMENTS_MAX};
use rtrs_core::time::Instant;
use rtrs_core::wire::{AccessMode, Name, OpenFlags, OpenRefusal, OpenRsp, OpenRspTail, errno};

use super::close::Closings;
use super::ended::{Ended, Known, Left};
use super::open_modes::{OpenModes, Opener};
use super::removed::Removed;
use super::writers::{CurrentWriters, NewWriter};
use crate::engine::ctx::Ctx;
use crate::engine::device_table::{DeviceEntry, DeviceId};
use crate::engine::finder::{Examined, OpenMode, Search};
use crate::engine::ledger::FlushLedger;
use crate::engine::message::{CloseNumber, ControlAnswer, Outbox, ReplyTo, ShardMessage};
use crate::engine::partial::takes_partial_writes;
use crate::engine::session::{ServerInstance, SessionParams, SessionShared};
use crate::export::{Export, ExportIndex, ExportTable, Lookup, bare};
use crate::rate_limits::RateLimits;
use crate::stats::OpenSnapshot;

/// Reason for refusing a failed export, for clients that can show it. The export's target may be
/// slow when the server starts.
const NOT_OPEN_YET: &str =
    "the server cannot open this export yet (rtrs-server export list shows the reason)";

/// Exports that sessions have open.
#[derive(Debug)]
pub(super) struct Opens {
    params: SessionParams,
    exports: Arc<ExportTable>,
    access: OpenModes,
    closings: Closings,
    ended: Ended,
    removed: Removed,
    writers: CurrentWriters,
}

impl Opens {
    pub(super) fn new(params: SessionParams, exports: Arc<ExportTable>) -> Self {
        Self {
            params,
            access: OpenModes::default(),
            exports,
            closings: Closings::default(),
            ended: Ended::default(),
            removed: Removed::default(),
            writers: CurrentWriters::default(),
        }
    }

    /// Processes OPEN of a name with this lookup result, from a session with this name. Returns
    /// `None` if the OPEN was passed to the finder, whose answer arrives as a message, or to the
    /// examiner, which resends the OPEN.
    pub(super) fn open(
        &mut self,
        session: &SessionShared,
        session_name: Option<Name>,
        (reply_to, (name, found), mode): (ReplyTo, (&Name, Lookup), OpenMode),
        ctx: &mut Ctx<'_>,
    ) -> Option<ControlAnswer> {
        let bytes = name.as_bytes();
        if bytes.is_empty() || bytes.windows(2).any(|pair| pair == b"..") {
            return Some(ControlAnswer::Refused(errno::EINVAL));
        }
        if self.is_removed(session.id, name, mode) {
            return Some(ControlAnswer::Refused(errno::EIDRM));
        }
        match found {
            Lookup::Named(index) => {
                match mode.examined {
                    Examined::No if self.is_examined_first(index, reply_to, name, mode) => {
                        return None;
                    }
                    // A session on the old target would lose its writes at the last close.
                    Examined::Outdated if self.is_outdated(index) => {
                        return Some(ControlAnswer::Refused(errno::EBUSY));
                    }
                    _ => {}
                }
                return Some(self.open_export(session, index, mode, ctx));
            }
            // A file below the search path must not replace a named export.
            Lookup::Failed | Lookup::Changing => {
                let why = OpenRefusal::new(NOT_OPEN_YET).encode();
                return Some(ControlAnswer::RefusedWith(errno::ENOENT, why));
            }
            Lookup::Unknown => {}
        }
        let asked = self.exports.finder().zip(session_name).is_some_and(|(finder, session)| {
            finder.find(Search { reply_to, mode, session, name: *name })
        });
        (!asked).then_some(ControlAnswer::Refused(errno::ENOENT))
    }

    /// Whether an open requests an export that was removed while the session had it open. Even if
    /// the name is in use again, the export is a different export.
    pub(super) fn is_removed(&self, session: SessionId, name: &Name, mode: OpenMode) -> bool {
        mode.compares && self.removed.contains(session, name.as_bytes())
    }

    /// Whether the target of an export must be examined before this open, because no session has it
    /// open.
    fn is_examined_first(
        &self,
        index: ExportIndex,
        reply_to: ReplyTo,
        name: &Name,
        mode: OpenMode,
    ) -> bool {
        let unused = self.access.opens(index).is_empty();
        let has_path =
            self.exports.get(index).is_some_and(|export| export.source.target_name().is_some());
        let examiner = self.exports.examiner().filter(|_| unused && has_path);
        examiner.is_some_and(|examiner| examiner.examine(reply_to, name, mode))
    }

    /// Whether an export is unused and its path no longer resolves to the open target.
    fn is_outdated(&self, index: ExportIndex) -> bool {
        let name = self.exports.get(index).and_then(|export| export.source.target_name());
        name == Some(TargetName::Replaced) && self.access.opens(index).is_empty()
    }

    /// Passes an open of an export that is being changed to the examiner, because the export is
    /// about to return. Returns false if the open was already examined.
    pub(super) fn waits(&self, reply_to: ReplyTo, name: &Name, mode: OpenMode) -> bool {
        let examiner = self.exports.examiner().filter(|_| mode.examined == Examined::No);
        examiner.is_some_and(|examiner| examiner.examine(reply_to, name, mode))
    }

    /// Processes the finder's result.
    pub(super) fn found(
        &mut self,
        session: &SessionShared,
        mode: OpenMode,
        result: Result<Arc<Export>, u16>,
        ctx: &mut Ctx<'_>,
    ) -> ControlAnswer {
        let export = match result {
            Ok(export) => export,
            Err(errno) => return ControlAnswer::Refused(errno),
        };
        let Some(index) = self.exports.place(&export) else {
            tracing::warn!(export = &*export.name, "too many open exports of the search path");
            return ControlAnswer::Refused(errno::ENOMEM);
        };
        let answer = self.open_export(session, index, mode, ctx);
        if self.access.opens(index).is_empty() {
            self.exports.leave(index);
        }
        answer
    }

    fn open_export(
        &mut self,
        session: &SessionShared,
        index: ExportIndex,
        mode: OpenMode,
        ctx: &mut Ctx<'_>,
    ) -> ControlAnswer {
        let OpenMode { access, compares, flags: OpenFlags { returns, waits }, .. } = mode;
        let Some(export) = self.exports.get(index) else {
            return ControlAnswer::Refused(errno::ENOENT);
        };
        // The session's writes from before the close may still be running, whatever access it
        // requests now.
        if self.closings.contains(session.id, index) {
            return ControlAnswer::Refused(errno::EBUSY);
        }
        if export.deny_migration && access == AccessMode::Migration {
            return ControlAnswer::Refused(errno::EPERM);
        }
        // Gateways share no list of writers; the image's lock keeps old requests out.
        let returns_to_list = returns && access.may_write() && export.source.gateway().is_none();
        if returns_to_list && self.writers.have_changed_since(session.id, &export) {
            return ControlAnswer::Refused(errno::EBADE);
        }
        let geometry = export.geometry();
        let waits = waits && access == AccessMode::Migration;
        let opener = Opener { session: session.id, returns: returns_to_list, waits };
        let migrated = self.access.migrates(index, session.id);
        let result = self.access.open(index, geometry.read_only, opener, access);
        if let Err(errno) = result {
            return ControlAnswer::Refused(errno);
        }
        if compares {
            session.note_compares();
        }
        let writable = access.may_write() && !self.access.waits(index, session.id);
        let entry = DeviceEntry { export: index, writable };
        let had = session.devices.find(index).is_some();
        let Some(device) = session.devices.open(entry, export.epoch.rises()) else {
            self.give_back(index, session.id, ctx.out);
            return ControlAnswer::Refused(errno::ENOMEM);
        };
        let promoted = migrated && access == AccessMode::ReadWrite;
        let writer = NewWriter { session: session.id, access, returns, promoted };
        self.writers.opened(writer, &export, self.access.opens(index));
        let secret = self.params.eviction_key.secret(session.id);
        let standing = export.source.gateway().map(Gateway::standing);
        let tail = OpenRspTail { export: export.id, secret, standing };
        // Flushes report failures since the session first opened the export (`ledger.rs`): later
        // opens over the session's paths get the same epoch.
        let ledger = session.devices.ledger(device);
        let epoch = ledger.map_or(0, FlushLedger::opened);
        if promoted && let Some(ledger) = ledger {
            self.inherit(ctx.now, session.id, &export, ledger);
        }
        let mut opened = describe(&export, session.limits, device, self.params.instance, epoch);
        // A kernel client receives the same bytes as from a kernel server.
        opened.partial_writes &= compares;
        if !had
            && let Some(ledger) = ledger
            && let Some(Left { lost, inherited }) = self.ended.take(ctx.now, session.id, &export)
        {
            // A client that compares the cache ID can detect a loss of its own writes by the
            // comparison.
            let compared = compares && opened.cache_id != 0;
            match lost && inherited {
                true => ledger.inherit_loss(),
                false => ledger.resume(epoch, lost && !compared),
            }
        }
        ControlAnswer::Opened(tail.encode(&opened))
    }

    /// Hands over unflushed writes when a virtual machine migrates: the session of the new host
    /// takes over the writes that the old host may have left.
    fn inherit(&mut self, now: Instant, heir: SessionId, export: &Export, ledger: &FlushLedger) {
        ledger.wrote(ledger.opened(), ledger.opened());
        if self.ended.take(now, heir, export).is_some_and(|left| left.lost) {
            ledger.inherit_loss();
        }
    }

    /// Keeps the unflushed writes of a session that stops using an export. They are kept for the
    /// session that waits to be promoted at the export, if there is one.
    fn bequeath(
        &mut self,
        now: Instant,
        session: SessionId,
        export: ExportIndex,
        ledger: &FlushLedger,
    ) {
        let heir = self.access.heir(export).filter(|heir| *heir != session);
        if let Some((heir, export)) = heir.zip(self.exports.get(export)) {
            self.ended.keep(now, heir, &Known::new(&export), ledger, true);
        }
    }

    /// Identity of the disk or file that a session has open under this name.
    pub(super) fn identity(&self, session: &SessionShared, name: &Name) -> Option<ExportId> {
        let opened = |export: &Arc<Export>| name_matches(&export.name, name);
        let open = session.devices.ids().filter_map(|id| session.devices.get(id));
        let mut open = open.filter_map(|entry| self.exports.get(entry.export));
        open.find(opened)?.id
    }

    /// Device to which an OPEN of this name refers, according to the answer. For a refused open,
    /// this is the device that the session has open under this name, or had open until the export
    /// was removed.
    pub(super) fn device_of(
        &self,
        session: &SessionShared,
        name: &Name,
        answer: &ControlAnswer,
    ) -> Option<DeviceId> {
        if let ControlAnswer::Opened(bytes) = answer {
            let opened = OpenRsp::decode(&bytes[..OpenRsp::LEN]).ok();
            return opened.map(|opened| DeviceId(opened.device_id));
        }
        let is = |id: &DeviceId| {
            let export = session.devices.get(*id).and_then(|entry| self.exports.get(entry.export));
            export.is_some_and(|export| name_matches(&export.name, name))
        };
        let open = session.devices.ids().find(is);
        open.or_else(|| self.removed.device(session.id, name.as_bytes()))
    }

    /// Whether the export of this name denies migration.
    pub(super) fn denies_migration(&self, name: &Name) -> bool {
        let export = self.exports.find(name.as_bytes()).and_then(|at| self.exports.get(at));
        export.is_some_and(|export| export.deny_migration)
    }

    /// Processes CLOSE. Returns `None` if the answer is sent later, when none of the session's
    /// requests is running at the export anymore.
    pub(super) fn close(
        &mut self,
        session: &SessionShared,
        device: DeviceId,
        reply_to: ReplyTo,
        ctx: &mut Ctx<'_>,
    ) -> Option<ControlAnswer> {
        // Closing a device that is not open succeeds, as in the kernel.
        self.removed.closed(session.id, device);
        let Some(entry) = session.devices.close(device) else { return Some(ControlAnswer::Done) };
        if let Some(ledger) = session.devices.ledger(device) {
            self.bequeath(ctx.now, session.id, entry.export, ledger);
        }
        self.closings.begin(session.id, entry.export, Some(reply_to), self.params.cores, ctx.out);
        None
    }

    /// Processes the report of a shard that no longer has any requests for a closed export.
    pub(super) fn retired(&mut self, close: CloseNumber, out: &mut Outbox) {
        if let Some((closed, reply_to)) = self.closings.retired(close) {
            self.give_back(closed.export, closed.session, out);
            if let Some(reply_to) = reply_to {
                reply_to.answer(ControlAnswer::Done, out);
            }
        }
    }

    /// Sessions that have an export open, with their modes, including sessions that closed the
    /// export but still have requests running at the export.
    pub(super) fn users(&self, export: ExportIndex) -> &[(SessionId, AccessMode)] {
        self.access.opens(export)
    }

    /// Sessions that have the export with this name open.
    pub(super) fn users_of(&self, name: &Name) -> Vec<SessionId> {
        let index = self.exports.find(name.as_bytes());
        let users = index.map(|index| self.users(index)).unwrap_or_default();
        users.iter().map(|(session, _)| *session).collect()
    }

    /// Removes an export from the `sessions` that have it open, and starts to wait for their
    /// requests at the export.
    pub(super) fn remove<'a>(
        &mut self,
        index: ExportIndex,
        sessions: impl Iterator<Item = &'a SessionShared>,
        out: &mut Outbox,
    ) {
        let open = !self.users(index).is_empty();
        let Some(export) = self.exports.remove(index, open) else { return };
        for session in sessions {
            // None if the session is already closing the export.
            let Some(device) = session.devices.find(index) else { continue };
            session.devices.remove(device);
            self.removed.add(session, device, Known::new(&export));
            self.closings.begin(session.id, index, None, self.params.cores, out);
        }
    }

    /// Changes the rate limits of an export on all shards.
    pub(super) fn limit(&self, index: ExportIndex, limits: RateLimits, out: &mut Outbox) {
        let Some(export) = self.exports.get(index) else { return };
        export.throttle.set(limits);
        for core in 0..self.params.cores {
            out.shard(CoreIndex(core), ShardMessage::Limits { export: index });
        }
    }

    /// Returns the exports that an ended session had open.
    pub(super) fn session_ended(
        &mut self,
        session: &SessionShared,
        now: Instant,
        out: &mut Outbox,
    ) {
        for device in session.devices.ids() {
            let Some(entry) = session.devices.close(device) else { continue };
            let export = self.exports.get(entry.export);
            if let (Some(export), Some(ledger)) = (export, session.devices.ledger(device)) {
                self.ended.keep(now, session.id, &Known::new(&export), ledger, false);
                self.bequeath(now, session.id, entry.export, ledger);
            }
            if !rtrs_core::mutated!(ExportKept) {
                self.give_back(entry.export, session.id, out);
            }
        }
        for (device, export) in self.removed.session_ended(session) {
            if let Some(ledger) = session.devices.ledger(device) {
                self.ended.keep(now, session.id, &export, ledger, false);
            }
        }
        for export in self.closings.forget(session.id) {
            self.give_back(export, session.id, out);
        }
    }

    /// Releases an export that a session can no longer change, so that others may open it.
    fn give_back(&mut self, export: ExportIndex, session: SessionId, out: &mut Outbox) {
        if self.access.close(export, session) {
            for core in 0..self.params.cores {
                out.shard(CoreIndex(core), ShardMessage::CloseDevice { export });
            }
            self.exports.leave(export);
        }
    }

    /// Open exports of a session, in the form that statistics show.
    pub(super) fn snapshot(&self, session: &SessionShared) -> Vec<OpenSnapshot> {
        let devices = &session.devices;
        let open = devices.ids().filter_map(|id| devices.get(id)).map(|entry| entry.export);
        // A session holds a closed export until none of its requests remains there.
        open.chain(self.closings.of(session.id))
            .filter_map(|at| {
                let export = self.exports.get(at)?;
                let mut opens = self.access.opens(at).iter();
                let (_, mode) = *opens.find(|(who, _)| *who == session.id)?;
                let limited = export.throttle.limits().is_some();
                let (export, id) = (export.name.clone(), export.id.map(|id| id.to_string()));
                Some(OpenSnapshot { export, access: mode.into(), id, limited })
            })
            .collect()
    }
}

/// Compares names without leading slashes, which kernel clients send.
fn name_matches(export: &str, asked: &Name) -> bool {
    bare(asked.as_bytes()) == bare(export.as_bytes())
}

/// Constant cache epoch of a device without a cache.
const WRITE_THROUGH: u64 = 0x7772_6974_6520_7468;

/// Describes an export in OPEN_RSP, with its geometry in the units of the protocol.
fn describe(
    export: &Export,
    limits: Limits,
    device: DeviceId,
    instance: ServerInstance,
    epoch: u32,
) -> OpenRsp {
    let geometry = export.geometry();
    let volatile = export.source.is_volatile();
    let base = match (volatile, geometry.write_cache) {
        (true, _) => instance.process,
        (false, true) if rtrs_core::mutated!(CacheEpochUnreported) => 0,
        (false, true) => instance.boot,
        // Answered writes survive any restart of the host, but a sync can still fail.
        (false, false) => WRITE_THROUGH,
    };
    let cache_id = match export.source.gateway() {
        // All gateways report the same constant, because they share no epoch.
        Some(_) => WRITE_THROUGH,
        None => export.epoch.cache_id(base, epoch),
    };
    let sectors = |bytes: u32| bytes / SECTOR_SIZE;
    let short = |bytes: u32| u16::try_from(bytes).unwrap_or(1 << 15);
    let writable = !geometry.read_only;
    let discard = geometry.discard && writable;
    OpenRsp {
        device_id: device.0,
        nsectors: geometry.size / u64::from(SECTOR_SIZE),
        max_hw_sectors: sectors(geometry.io_max),
        max_write_zeroes_sectors: if geometry.write_zeroes && writable {
            sectors(geometry.zeroes_max)
        } else {
            0
        },
        max_discard_sectors: if discard { sectors(geometry.discard_max) } else { 0 },
        discard_granularity: if discard {
            geometry.discard_granularity.max(geometry.logical_block)
        } else {
            0
        },
        discard_alignment: if discard { geometry.discard_alignment } else { 0 },
        physical_block_size: short(geometry.physical_block.max(geometry.logical_block)),
        logical_block_size: short(geometry.logical_block),
        max_segments: SEGMENTS_MAX,
        // Never supported: a kernel client that uses it crashes (docs/PROTOCOL.md).
        secure_discard: 0,
        rotational: geometry.rotational,
        fua: geometry.fua,
        write_cache: geometry.write_cache,
        cache_id,
        volatile,
        fast_zero: geometry.fast_zero && writable,
        extents: geometry.extents,
        partial_writes: takes_partial_writes(&geometry, limits),
    }
}
