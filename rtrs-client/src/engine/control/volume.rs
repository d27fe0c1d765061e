//! One volume of a session: how far it is, and why it cannot go on.
//!
//! Every path opens a volume before it carries IO to it, so that a path which joins a session the
//! server made anew finds the volume there; a repeated open returns the same device.

use std::sync::Arc;

use rtrs_core::block::Geometry;
use rtrs_core::ids::{CoreIndex, PathId};
use rtrs_core::time::Instant;
use rtrs_core::wire::{AccessMode, OpenRefusal, errno, errno_name};

use super::cache_epoch::CacheEpoch;
use super::failure::SessionFailure;
use super::identity::PinnedExport;
use super::moving::Moving;
use super::no_path::NoPathClock;
use crate::engine::device_set::DeviceIndex;
use crate::engine::device_table::OpenDevice;
use crate::engine::session::{SessionConfig, VolumeConfig};

/// How far a volume is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Closed,
    Open,
    /// Its user is gone. By shard: nothing of it is left there.
    Settling(Vec<bool>),
    /// Its close is to be sent.
    ToClose,
    /// Its close was sent on this path.
    Closing(PathId),
    /// Closed in order, or given up.
    Ended,
}

/// A volume as the control shard has it.
#[derive(Debug)]
pub(super) struct Volume {
    index: DeviceIndex,
    config: VolumeConfig,
    state: State,
    /// As it was opened last.
    last: Option<Arc<OpenDevice>>,
    /// What is asked for; lowered once where the export is read-only.
    access: AccessMode,
    /// Until then nothing that is in the way of the first open ends the volume.
    patient_until: Instant,
    failure: Option<SessionFailure>,
    /// What the last open that failed had in its way, while the volume is not open.
    obstacle: Option<SessionFailure>,
    pub(super) pinned: PinnedExport,
    pub(super) cache: CacheEpoch,
    pub(super) no_path: NoPathClock,
    pub(super) moving: Moving,
}

impl Volume {
    pub(super) fn new(
        index: DeviceIndex,
        volume: VolumeConfig,
        config: &SessionConfig,
        patient_until: Instant,
    ) -> Self {
        Self {
            index,
            state: State::Closed,
            last: None,
            access: volume.access,
            patient_until,
            failure: None,
            obstacle: None,
            pinned: PinnedExport::new(volume.identity.and_then(|identity| identity.export)),
            cache: CacheEpoch::new(config, volume.inherited_epoch),
            no_path: NoPathClock::new(config.no_path),
            moving: Moving::default(),
            config: volume,
        }
    }

    pub(super) fn index(&self) -> DeviceIndex {
        self.index
    }

    /// The name of its export.
    pub(super) fn export(&self) -> &str {
        &self.config.export
    }

    /// True while paths are to have it open; one that is to be closed, because the server may have
    /// it open.
    pub(super) fn is_wanted(&self) -> bool {
        match self.state {
            State::Closed | State::Open => self.failure.is_none(),
            State::ToClose => self.was_open() && self.failure.is_none(),
            State::Settling(_) | State::Closing(_) | State::Ended => false,
        }
    }

    /// True while the session has it for its user.
    pub(super) fn is_used(&self) -> bool {
        matches!(self.state, State::Closed | State::Open)
    }

    /// True while the server has it open, as far as is known.
    pub(super) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// The device while it is open at the server.
    pub(super) fn get(&self) -> Option<&Arc<OpenDevice>> {
        self.last.as_ref().filter(|_| self.is_open())
    }

    /// The device as it was opened last.
    pub(super) fn last(&self) -> Option<&OpenDevice> {
        self.last.as_deref()
    }

    /// True when it was open once.
    pub(super) fn was_open(&self) -> bool {
        self.last.is_some()
    }

    /// Why it cannot go on.
    pub(super) fn failure(&self) -> Option<&SessionFailure> {
        self.failure.as_ref()
    }

    /// Why it cannot go on, or what was in the way when it was last tried.
    pub(super) fn obstacle(&self) -> Option<&SessionFailure> {
        self.failure().or(self.obstacle.as_ref())
    }

    /// Something is in the way of an open. Before the first that ends the volume. Returns the
    /// reason.
    pub(super) fn fail(&mut self, failure: SessionFailure) -> String {
        let why = failure.to_string();
        if self.was_open() {
            self.obstacle = Some(failure);
        } else {
            self.failure = Some(failure);
        }
        why
    }

    /// The server's operator removed its export.
    pub(super) fn removed(&mut self) {
        if self.failure.is_none() {
            let failure = SessionFailure::Removed;
            tracing::error!(export = %self.config.export, "{failure}");
            self.failure = Some(failure);
        }
    }

    /// True while a refusal to open may still pass.
    pub(super) fn is_patient(&self, now: Instant) -> bool {
        !self.was_open() && now < self.patient_until
    }

    /// The access to ask for.
    pub(super) fn access(&self) -> AccessMode {
        self.access
    }

    /// The server refused an open that asked for this access. True when it is to be repeated with
    /// the access of now; else the reason for the path's end.
    pub(super) fn refused(
        &mut self,
        now: Instant,
        (errno, why): (u16, Option<OpenRefusal>),
        asked: AccessMode,
    ) -> Result<(), String> {
        if errno == errno::EACCES
            && self.config.read_only_fallback
            && asked == AccessMode::ReadWrite
            && (!self.was_open() || self.access == AccessMode::ReadOnly)
        {
            let why = why.as_ref().map_or("the export is read-only", OpenRefusal::text);
            tracing::info!("{why}: opening it read-only, as access is auto");
            self.access = AccessMode::ReadOnly;
            return Ok(());
        }
        let fell_back = asked == AccessMode::ReadOnly && self.config.read_only_fallback;
        let before = if fell_back { ", and rw was refused before (access: auto)" } else { "" };
        let failure = SessionFailure::OpenRefused {
            export: self.config.export.clone(),
            errno: errno_name(errno).to_owned(),
            hint: match why {
                Some(why) => format!(": {}{before} (see the server's setting access)", why.text()),
                None => open_hint(errno, asked).to_owned(),
            },
        };
        let may_pass = matches!(errno, errno::EPERM | errno::EBUSY) && self.is_patient(now);
        Err(if may_pass { failure.to_string() } else { self.fail(failure) })
    }

    /// What the volume's users see of a device that a path opened. Paths open one after the other,
    /// so its size is the newest; that it is the same device is certain
    /// (`identity.rs`).
    pub(super) fn fit(&mut self, device: &OpenDevice) -> Result<Arc<OpenDevice>, String> {
        if let Some(why) = refusal(self.last(), device) {
            return Err(self.fail(SessionFailure::Unusable(why)));
        }
        let (size, had) = (device.geometry.size, self.last().map(|last| last.geometry.size));
        match had {
            Some(had) if size > had => tracing::info!(size, had, "the device has grown"),
            Some(had) if size < had => {
                tracing::error!(size, had, "the device was made smaller; IO beyond its end fails");
            }
            _ => {}
        }
        let read_only = self.access == AccessMode::ReadOnly;
        let geometry = Geometry { read_only, ..device.geometry.clone() };
        Ok(Arc::new(OpenDevice { geometry, ..device.clone() }))
    }

    /// A path opened the device, which fits. True when the shards do not know it so.
    pub(super) fn opened(&mut self, device: &Arc<OpenDevice>) -> bool {
        self.obstacle = None;
        let is_new = self.get() != Some(device);
        self.last = Some(Arc::clone(device));
        if is_new {
            let (export, size) = (&self.config.export, device.geometry.size);
            tracing::info!(%export, size, id = device.device_id, "device open");
            self.state = State::Open;
        }
        is_new
    }

    /// The last path that had it open is gone.
    pub(super) fn lost(&mut self) {
        self.state = State::Closed;
    }

    /// Its user is gone: shards say when nothing of it is left.
    pub(super) fn settle(&mut self, shards: u16) {
        self.state = State::Settling(vec![false; usize::from(shards)]);
    }

    /// Nothing of it is left on a shard. True when it is to be closed now.
    pub(super) fn settled(&mut self, shard: CoreIndex) -> bool {
        let State::Settling(settled) = &mut self.state else { return false };
        settled[shard.index()] = true;
        let all = settled.iter().all(|settled| *settled);
        if all {
            self.state = State::ToClose;
        }
        all
    }

    /// It is to be closed, whatever is left of it.
    pub(super) fn close(&mut self) {
        if !matches!(self.state, State::Closing(_)) {
            self.state = if self.last.is_some() { State::ToClose } else { State::Ended };
        }
    }

    /// True while its close is to be sent, or answered.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.state, State::ToClose | State::Closing(_))
    }

    /// True while its close is to be sent.
    pub(super) fn is_to_close(&self) -> bool {
        self.state == State::ToClose
    }

    /// The close was sent on this path.
    pub(super) fn close_sent(&mut self, over: PathId) {
        self.state = State::Closing(over);
    }

    /// True while this path is to answer the close.
    pub(super) fn is_closing_over(&self, over: PathId) -> bool {
        self.state == State::Closing(over)
    }

    /// The path that was to answer the close is gone.
    pub(super) fn close_lost(&mut self) {
        self.state = State::ToClose;
    }

    /// Closed in order, or given up.
    pub(super) fn end(&mut self) {
        self.state = State::Ended;
    }
}

/// Why a device cannot be used in place of the one opened last. The volume's users know that one:
/// a write cache that it lacked would never be flushed.
fn refusal(last: Option<&OpenDevice>, device: &OpenDevice) -> Option<String> {
    let now = &device.geometry;
    if now.size == 0 {
        return Some("the server's device has 0 bytes".to_owned());
    }
    let OpenDevice { geometry: before, .. } = last?;
    let block = now.logical_block;
    if block > before.logical_block {
        let had = before.logical_block;
        return Some(format!(
            "the server's device has blocks of {block} bytes and had {had} before: attach again"
        ));
    }
    (now.write_cache && !before.write_cache).then(|| {
        "the server's device has a write cache and had none before: attach again".to_owned()
    })
}

fn open_hint(errno: u16, asked: AccessMode) -> &'static str {
    match errno {
        13 if asked == AccessMode::ReadOnly => {
            ": no access list lets this client open it, the server itself may not open it, or it \
             leads out of its search path (the server's log says which)"
        }
        2 => ": the server has no export of that name (rtrs-client discover lists them)",
        1 => ": another session has it open for writing (end that session, or use --access ro)",
        13 => ": the export is read-only (use --access ro)",
        15 => ": that is not a block device, and a kernel's server exports nothing else",
        16 => ": it is in use, or another gateway serves it",
        22 => ": the server does not accept this name",
        30 => ": the export is read-only (use --access ro)",
        36 => ": the name is too long for the server",
        _ => "",
    }
}
