//! Opens and closes of exports: the control core's answers to OPEN and CLOSE.
//!
//! A name is looked up among the named exports; what is not there goes to the finder, if the
//! server has a search path, and comes back as a letter. Who may open what is judged by
//! `access.rs`; what an open export looks like to a client is told here.

use std::sync::Arc;

use rtrs_core::ids::{CoreIndex, PermitId, SessionId};
use rtrs_core::limits::{SECTOR_SIZE, SEGMENTS_MAX};
use rtrs_core::wire::{Name, OpenRsp, OpenRspTail, errno};

use super::Control;
use super::fence::Asker;
use crate::engine::ctx::Ctx;
use crate::engine::device_table::{DeviceEntry, DeviceId};
use crate::engine::ledger::FlushLedger;
use crate::engine::message::{ControlAnswer, ControlRequest, ShardMessage};
use crate::engine::session::{ServerLife, SessionShared};
use crate::export::{Export, ExportIndex};
use crate::finder::{OpenMode, Search};
use crate::path::PathKey;

impl Control {
    /// An open, a close or a fence came.
    pub(super) fn request(
        &mut self,
        key: PathKey,
        core: CoreIndex,
        permit: PermitId,
        request: ControlRequest,
        ctx: &mut Ctx<'_>,
    ) {
        let Some(path) = self.paths.get(&key) else { return };
        let session = Arc::clone(&path.shared.session);
        let answer = match request {
            ControlRequest::Open { name, mode } => {
                let bytes = name.as_bytes();
                let bad = bytes.is_empty() || bytes.windows(2).any(|pair| pair == b"..");
                match self.exports.find(bytes) {
                    _ if bad => ControlAnswer::Refused(errno::EINVAL),
                    Some(index) => self.open(&session, index, mode, ctx),
                    None if self.search(&session, (key, core, permit), &name, mode) => return,
                    None => ControlAnswer::Refused(errno::ENOENT),
                }
            }
            ControlRequest::Close { device } => {
                match self.begin_close(&session, device, Asker { path: key, core, permit }, ctx) {
                    Some(answer) => answer,
                    None => return,
                }
            }
            ControlRequest::Fence(fence) => {
                match self.fence(Asker { path: key, core, permit }, fence, ctx) {
                    Some(answer) => answer,
                    None => return,
                }
            }
        };
        ctx.out.shard(core, ShardMessage::Answer { path: key, permit, answer });
    }

    /// Asks the finder. False when nobody will answer.
    fn search(
        &self,
        session: &SessionShared,
        (path, core, permit): (PathKey, CoreIndex, PermitId),
        name: &Name,
        mode: OpenMode,
    ) -> bool {
        let session = self.sessions.get(&session.id).and_then(|session| session.name);
        let (Some(finder), Some(session)) = (self.exports.finder(), session) else { return false };
        finder.find(Search { path, core, permit, mode, session, name: *name })
    }

    /// The finder is done.
    pub(super) fn found(
        &mut self,
        search: &Search,
        result: Result<Arc<Export>, u16>,
        ctx: &mut Ctx<'_>,
    ) {
        let Search { path: key, core, permit, mode, .. } = *search;
        // Nobody to answer: what was found closes with its last holder, which is this one.
        let Some(path) = self.paths.get(&key) else { return };
        let session = Arc::clone(&path.shared.session);
        let answer = match result {
            Ok(export) => match self.exports.place(&export) {
                Some(index) => {
                    let answer = self.open(&session, index, mode, ctx);
                    if self.access.opens(index).is_empty() {
                        self.exports.leave(index);
                    }
                    answer
                }
                None => {
                    tracing::warn!(name = %export.name, "too many exports of the search path");
                    ControlAnswer::Refused(errno::ENOMEM)
                }
            },
            Err(errno) => ControlAnswer::Refused(errno),
        };
        ctx.out.shard(core, ShardMessage::Answer { path: key, permit, answer });
    }

    fn open(
        &mut self,
        session: &SessionShared,
        index: ExportIndex,
        mode: OpenMode,
        ctx: &mut Ctx<'_>,
    ) -> ControlAnswer {
        let OpenMode { access, compares } = mode;
        let Some(export) = self.exports.get(index) else {
            return ControlAnswer::Refused(errno::ENOENT);
        };
        // It may have asked before it was evicted.
        if self.evicted.contains(session.id) {
            return ControlAnswer::Refused(errno::ESTALE);
        }
        // Its writes from before the close may still run, whatever it asks for now.
        if self.closings.contains(session.id, index) {
            return ControlAnswer::Refused(errno::EBUSY);
        }
        let geometry = export.geometry();
        let result = self.access.open(index, geometry.read_only, session.id, access);
        if let Err(errno) = result {
            tracing::info!(name = %export.name, session = %session.id, errno, "refused an open");
            return ControlAnswer::Refused(errno);
        }
        let entry = DeviceEntry { export: index, writable: access.may_write() };
        let had = session.devices.find(index).is_some();
        let Some(device) = session.devices.open(entry, export.epoch.rises()) else {
            if self.access.close(index, session.id) {
                self.close_devices(index, ctx);
            }
            return ControlAnswer::Refused(errno::ENOMEM);
        };
        let (name, id) = (&export.name, device.0);
        tracing::info!(%name, session = %session.id, ?access, id, "opened");
        let secret = self.params.eviction_key.secret(session.id);
        let tail = OpenRspTail { export: export.id, secret };
        // Failures since the session opened it first are told by its flushes (`ledger.rs`): what
        // its paths open later is of the same epoch to it.
        let ledger = session.devices.ledger(device);
        let epoch = ledger.map_or(0, FlushLedger::opened);
        let opened = describe(&export, device, self.params.life, epoch);
        if !had
            && let Some(ledger) = ledger
            && let Some(lost) = self.ended.take(ctx.now, session.id, &export)
        {
            // Who compares the cache id learns there of a loss.
            let compared = compares && opened.cache_id != 0;
            ledger.resume(epoch, lost && !compared);
        }
        ControlAnswer::Opened(tail.encode(&opened))
    }

    /// Nothing of a session can change the export any more: others may open it.
    pub(super) fn give_back(&mut self, export: ExportIndex, session: SessionId, ctx: &mut Ctx<'_>) {
        if self.access.close(export, session) {
            self.close_devices(export, ctx);
        }
    }

    fn close_devices(&self, export: ExportIndex, ctx: &mut Ctx<'_>) {
        for core in 0..self.params.cores {
            ctx.out.shard(CoreIndex(core), ShardMessage::CloseDevice { export });
        }
        self.exports.leave(export);
    }
}

/// The life of a device without a cache: every one.
const WRITE_THROUGH: u64 = 0x7772_6974_6520_7468;

/// OPEN_RSP of an export: its geometry in the units of the wire.
fn describe(export: &Export, device: DeviceId, life: ServerLife, epoch: u32) -> OpenRsp {
    let geometry = export.geometry();
    let volatile = export.source.is_volatile();
    let life = match (volatile, geometry.write_cache) {
        (true, _) => life.process,
        (false, true) if rtrs_core::mutated!(CacheLifeUnsaid) => 0,
        (false, true) => life.boot,
        // What is answered survives any start of the host; a sync can fail all the same.
        (false, false) => WRITE_THROUGH,
    };
    let cache_id = export.epoch.cache_id(life, epoch);
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
        // Never: a kernel client that is told of it crashes on its use (docs/PROTOCOL.md).
        secure_discard: 0,
        rotational: geometry.rotational,
        fua: geometry.fua,
        write_cache: geometry.write_cache,
        cache_id,
        volatile,
    }
}
