//! A volume of a session: its state and its failure.
//!
//! Every path opens a volume before it carries IO to the volume, so that a path that joins a
//! recreated session finds the volume on the server. A repeated open returns the same device.

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
use super::promotion::Promotion;
use crate::engine::cache_epoch::Outstanding;
use crate::engine::device_set::DeviceIndex;
use crate::engine::device_table::OpenDevice;
use crate::engine::session::{SessionConfig, VolumeConfig};

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Closed,
    Open,
    /// Released by its user. Holds, for each shard, whether the volume's IO there has ended.
    Settling(Vec<bool>),
    /// The close has yet to be sent.
    ToClose,
    /// The close was sent over this path.
    Closing(PathId),
    /// Closed properly, or abandoned.
    Ended,
}

/// Control shard's part of a volume.
#[derive(Debug)]
pub(super) struct Volume {
    index: DeviceIndex,
    config: VolumeConfig,
    state: State,
    /// Device of the last open.
    last: Option<Arc<OpenDevice>>,
    /// Access to request; lowered once if the export is read-only, and changed by a promotion.
    access: AccessMode,
    /// Time until which problems with the first open do not end the volume.
    patient_until: Instant,
    failure: Option<SessionFailure>,
    /// Problem of the last failed open, while the volume is not open.
    obstacle: Option<SessionFailure>,
    pub(super) pinned: PinnedExport,
    pub(super) cache: CacheEpoch,
    pub(super) no_path: NoPathClock,
    pub(super) moving: Moving,
    pub(super) promotion: Promotion,
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
            cache: CacheEpoch::new(config, &volume),
            no_path: NoPathClock::new(config.no_path),
            moving: Moving::default(),
            promotion: if volume.promotes { Promotion::Unclaimed } else { Promotion::None },
            config: volume,
        }
    }

    pub(super) fn index(&self) -> DeviceIndex {
        self.index
    }

    pub(super) fn export(&self) -> &str {
        &self.config.export
    }

    /// Whether the content of the last opened device is lost when its server's process ends.
    pub(super) fn is_memory(&self) -> bool {
        self.last.as_ref().is_some_and(|device| device.volatile)
    }

    /// Whether paths should have the volume open. This includes a volume that is yet to be closed,
    /// because the server may have it open.
    pub(super) fn is_wanted(&self) -> bool {
        match self.state {
            State::Closed | State::Open => self.failure.is_none(),
            State::ToClose => self.was_open() && self.failure.is_none(),
            State::Settling(_) | State::Closing(_) | State::Ended => false,
        }
    }

    /// Whether the volume has a user.
    pub(super) fn is_used(&self) -> bool {
        matches!(self.state, State::Closed | State::Open)
    }

    /// Whether the volume is recorded as open on the server.
    pub(super) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// Whether the volume is being closed and its IO has yet to end.
    pub(super) fn is_settling(&self) -> bool {
        matches!(self.state, State::Settling(_))
    }

    /// Device, while the volume is open on the server.
    pub(super) fn get(&self) -> Option<&Arc<OpenDevice>> {
        self.last.as_ref().filter(|_| self.is_open())
    }

    /// Device of the last open.
    pub(super) fn last(&self) -> Option<&OpenDevice> {
        self.last.as_deref()
    }

    /// Whether the volume has ever been open.
    pub(super) fn was_open(&self) -> bool {
        self.last.is_some()
    }

    pub(super) fn failure(&self) -> Option<&SessionFailure> {
        self.failure.as_ref()
    }

    /// Failure, or else the problem found when the volume was last tried.
    pub(super) fn obstacle(&self) -> Option<&SessionFailure> {
        self.failure().or(self.obstacle.as_ref())
    }

    /// Records a problem with an open, which ends the volume if it has never been open.
    pub(super) fn fail(&mut self, failure: SessionFailure) {
        if self.was_open() {
            self.obstacle = Some(failure);
        } else {
            self.failure = Some(failure);
        }
    }

    /// Fails the volume even though it was open: its export was removed, or a different client has
    /// written to the export.
    pub(super) fn end_with(&mut self, failure: SessionFailure) {
        if self.failure.is_none() {
            tracing::error!(export = self.config.export, "{failure}");
            self.failure = Some(failure);
        }
    }

    /// Whether a refused open may still succeed later.
    pub(super) fn is_patient(&self, now: Instant) -> bool {
        !self.was_open() && now < self.patient_until
    }

    /// Records that the server has granted exclusive access. Every later open requests it.
    pub(super) fn promoted(&mut self) {
        if self.promotion.is_pending() {
            tracing::info!(export = self.config.export, "exclusive access granted");
            (self.access, self.promotion) = (AccessMode::ReadWrite, Promotion::None);
        }
    }

    /// Acknowledged writes whose loss users would not notice without the saved epoch. Before a
    /// promotion, only a virtual machine that waits may have left writes, on its old host.
    pub(super) fn outstanding(&self) -> Outstanding {
        match self.cache.outstanding() {
            Outstanding::Nothing => Outstanding::Nothing,
            _ if self.promotion.is_pending() => Outstanding::Reported,
            outstanding => outstanding,
        }
    }

    /// Access to request.
    pub(super) fn access(&self) -> AccessMode {
        self.access
    }

    /// Handles a refused open that requested this access. Returns Ok if the open is to be repeated
    /// with the current access, and otherwise the reason why the path does not serve the volume.
    pub(super) fn refused(
        &mut self,
        now: Instant,
        errno: u16,
        why: Option<OpenRefusal>,
        asked: AccessMode,
    ) -> Result<(), SessionFailure> {
        if errno == errno::EACCES
            && self.config.read_only_fallback
            && asked == AccessMode::ReadWrite
            && (!self.was_open() || self.access == AccessMode::ReadOnly)
        {
            let why = why.as_ref().map_or("the export is read-only", OpenRefusal::text);
            tracing::warn!("{why}: opening it read-only, because access is auto");
            self.access = AccessMode::ReadOnly;
            return Ok(());
        }
        let fell_back = asked == AccessMode::ReadOnly && self.config.read_only_fallback;
        let before = if fell_back { ", and rw was refused before (access: auto)" } else { "" };
        // A server answers ENOENT for an export that it cannot open yet but will try again.
        let may_pass = matches!(errno, errno::EPERM | errno::EBUSY | errno::ENOENT);
        // A volume that was open waits anyway.
        let retry = if self.was_open() { "" } else { "; --retry-for keeps trying" };
        let failure = SessionFailure::OpenRefused {
            export: self.config.export.clone(),
            errno: errno_name(errno).to_owned(),
            hint: match why {
                Some(why) if may_pass => format!(": {}{retry}", why.text()),
                Some(why) => format!(": {}{before} (see the server's setting access)", why.text()),
                None => open_hint(errno, asked).to_owned(),
            },
        };
        let may_pass = may_pass && self.is_patient(now);
        if !may_pass {
            self.fail(failure.clone());
        }
        Err(failure)
    }

    /// Returns the device as the volume's users see it, based on the device that a path opened.
    /// Paths open one after another, so this device's size is the newest; `identity.rs` has made
    /// sure that it is the same device.
    pub(super) fn fit(&mut self, device: &OpenDevice) -> Result<Arc<OpenDevice>, SessionFailure> {
        if let Some(failure) = refusal(self.last(), device).map(SessionFailure::Unusable) {
            self.fail(failure.clone());
            return Err(failure);
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
        let is_shared = self.promotion.is_pending();
        Ok(Arc::new(OpenDevice { geometry, is_shared, ..device.clone() }))
    }

    /// Records an open device that fits. Returns whether the shards must be notified.
    pub(super) fn opened(&mut self, device: &Arc<OpenDevice>) -> bool {
        self.obstacle = None;
        let is_new = self.get() != Some(device);
        self.last = Some(Arc::clone(device));
        if is_new {
            let (export, size) = (&self.config.export, device.geometry.size);
            tracing::info!(export, size, id = device.device_id, "device open");
            self.state = State::Open;
        }
        is_new
    }

    /// Records the loss of the last path that had the volume open.
    pub(super) fn lost(&mut self) {
        self.state = State::Closed;
        self.promotion.lost();
    }

    /// Starts closing the volume; shards report when its IO has ended.
    pub(super) fn settle(&mut self, shards: u16) {
        self.state = State::Settling(vec![false; usize::from(shards)]);
    }

    /// Records that the volume's IO on a shard has ended. Returns whether the volume must now be
    /// closed.
    pub(super) fn settled(&mut self, shard: CoreIndex) -> bool {
        let State::Settling(settled) = &mut self.state else { return false };
        settled[shard.index()] = true;
        let all = settled.iter().all(|settled| *settled);
        if all {
            self.state = State::ToClose;
        }
        all
    }

    /// Marks the volume for closing, even if its IO has not ended.
    pub(super) fn close(&mut self) {
        if !matches!(self.state, State::Closing(_)) {
            self.state = if self.last.is_some() { State::ToClose } else { State::Ended };
        }
    }

    /// Whether a close has yet to be sent or answered.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.state, State::ToClose | State::Closing(_))
    }

    /// Whether a close has yet to be sent.
    pub(super) fn is_to_close(&self) -> bool {
        self.state == State::ToClose
    }

    pub(super) fn close_sent(&mut self, over: PathId) {
        self.state = State::Closing(over);
    }

    /// Whether this path has yet to answer the close.
    pub(super) fn is_closing_over(&self, over: PathId) -> bool {
        self.state == State::Closing(over)
    }

    /// Marks the close to be repeated after the loss of its path.
    pub(super) fn close_lost(&mut self) {
        self.state = State::ToClose;
    }

    /// Ends the volume, whether it was closed properly or abandoned.
    pub(super) fn end(&mut self) {
        self.state = State::Ended;
    }
}

/// Returns why a device cannot replace the one opened last. The volume's users know the previous
/// device: they would never flush a write cache that it did not have.
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
            "the block size of the server's device changed from {had} to {block} bytes: attach \
             again"
        ));
    }
    (now.write_cache && !before.write_cache)
        .then(|| "the server's device now has a write cache: attach again".to_owned())
}

fn open_hint(errno: u16, asked: AccessMode) -> &'static str {
    match errno {
        13 if asked == AccessMode::ReadOnly => {
            ": no access list admits this client, the server lacks permission to open the file, or \
             the file is outside the search path (see the server's log)"
        }
        2 => {
            ": the server has no export of that name (rtrs-client discover lists them), or cannot \
             open it yet (see rtrs-server export list; --retry-for keeps trying)"
        }
        1 => {
            ": another session has it open for writing (end that session, --access ro, or --access \
             migration while a virtual machine moves)"
        }
        13 => ": the export is read-only (use --access ro)",
        15 => {
            ": the server has something else of that name (a directory, or a file that a kernel \
               server does not export)"
        }
        16 => {
            ": it is in use: by requests of an earlier session, by a program on the server, or by \
             another gateway (close it there, and check with rtrs-server export list and session \
             list; --retry-for keeps trying)"
        }
        22 => ": the server does not accept this name",
        30 => ": the export is read-only (use --access ro)",
        36 => ": the name is too long for the server",
        _ => "",
    }
}
