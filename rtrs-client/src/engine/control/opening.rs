//! Order in which paths open volumes, and handling of the answers.
//!
//! All opens use the same permit, and for a kernel server that is the same memory, whichever path a
//! request uses (6.1, rtrs-srv.c:get_or_create_srv). So only one open is in progress at a time.
//! Connecting paths go first. A connected path opens volumes that it does not serve yet and those
//! that have changed, but not while a fence is awaited, which may need the same connection. While a
//! close is unanswered, no volume is opened for the first time: the server may give it the number
//! of the closing one.
//!
//! A problem with a volume removes the volume from this path and has no other effect: the path
//! continues with the others, and tries again later. A path that serves nothing ends.

use std::sync::Arc;

use rtrs_core::gateway::Standing;
use rtrs_core::identity::ServerId;
use rtrs_core::ids::PathId;
use rtrs_core::time::Instant;
use rtrs_core::wire::{OpenRefusal, errno, errno_name};

use super::SessionControl;
use super::due::End;
use super::failure::SessionFailure;
use super::fence;
use super::identity::{self, MetServer, OtherPaths};
use super::path::Path;
use super::paths::Paths;
use super::terms::{Ask, Asked};
use super::volume::Volume;
use super::volumes::Volumes;
use crate::engine::ctx::Ctx;
use crate::engine::device_set::DeviceIndex;
use crate::engine::device_table::OpenDevice;
use crate::engine::message::ShardMessage;
use crate::engine::path_end::PathEnd;
use crate::engine::session::CONTROL;
use crate::path::handshake::Opened;
use crate::path::state::PathState;

/// Volumes that a path may open for the first time.
fn openable<'a>(path: &'a Path, volumes: &'a Volumes) -> impl Iterator<Item = &'a Volume> {
    let closing = volumes.are_closing();
    let wanted = volumes.iter().filter(|volume| volume.is_wanted());
    wanted.filter(move |volume| {
        (!closing || volume.was_open() || volume.is_closing()) && !path.terms.serves(volume.index())
    })
}

/// Volume that a connecting path opens next. One whose last open was not answered comes last.
fn first(path: &Path, volumes: &Volumes) -> Option<DeviceIndex> {
    let untried = || openable(path, volumes).filter(|volume| !path.terms.is_tried(volume.index()));
    let quick = untried().find(|volume| !path.terms.is_unanswered(volume.index()));
    quick.or_else(|| untried().next()).map(Volume::index)
}

/// Whether a connecting path still has to open a volume, now or once a close is answered.
fn is_untried(path: &Path, volumes: &Volumes) -> bool {
    let wanted = |volume: &Volume| volume.is_wanted() && !path.terms.is_tried(volume.index());
    volumes.iter().any(wanted)
}

/// Time and volume of the next open on a connected path, whether a first open or a repeated one.
fn due(path: &Path, volumes: &Volumes) -> Option<(Instant, DeviceIndex)> {
    let new = openable(path, volumes)
        .filter_map(|volume| Some((path.terms.due_first(volume.index())?, volume.index())));
    let changed = volumes.iter().filter(|volume| volume.is_wanted()).filter_map(|volume| {
        let due = path.terms.due_again(volume.index())?;
        (!rtrs_core::mutated!(ResizeUnheard)).then_some((due, volume.index()))
    });
    new.chain(changed).min()
}

fn may_open(paths: &Paths, volumes: &Volumes) -> bool {
    let awaited = fence::is_awaited(paths, volumes);
    let opening = paths.first(PathState::Opening).is_some();
    !(paths.is_using(CONTROL) || opening || awaited)
}

/// Returns whether the device in the answer on a connected path is the one that was opened `last`,
/// perhaps with another size. Returns false if its size differs and no ID proves that: it stays as
/// it was, since the connection is alive.
///
/// # Errors
/// Returns the reason why the device cannot be the same one.
fn judge_again(
    path: &Path,
    server: MetServer<'_>,
    volume: &Volume,
    last: &OpenDevice,
    device: &OpenDevice,
) -> Result<bool, PathEnd> {
    // These do not change while a connection is alive.
    let agreed = (path.terms.device_id(volume.index()), path.terms.cache_id(volume.index()));
    if agreed != (Some(device.device_id), Some(device.cache_id)) {
        return Err(PathEnd::AnotherDevice);
    }
    let (size, had) = (device.geometry.size, last.geometry.size);
    let has_ids = volume.pinned.id().is_some() || device.export_id.is_some();
    if size != had && !has_ids {
        tracing::warn!(
            size,
            had,
            "the device's size has changed, but no ID proves that it is the same device; the new \
             size applies after the next attach"
        );
        return Ok(false);
    }
    let (export, others) = (&volume.pinned, OtherPaths { connected: true, serving: true });
    let refused = identity::judge(server, export, Some(last), device)
        .or_else(|| identity::judge_beside(server, export, device.export_id, others));
    refused.map_or(Ok(true), |mismatch| Err(mismatch.into()))
}

impl SessionControl {
    /// Starts the next open on a connecting path. Returns whether one was started.
    pub(super) fn open_next(&mut self, ctx: &mut Ctx<'_>) -> bool {
        if !self.is_running() || self.paths.is_using(CONTROL) {
            return false;
        }
        let Some(id) = self.paths.first(PathState::Opening) else { return false };
        let Some(volume) = first(&self.paths[id], &self.volumes) else { return false };
        let asked = self.paths[id].open(&self.volumes[volume], None, ctx);
        self.end_if_failed(id, asked, ctx);
        true
    }

    /// Starts the next due open on a connected path. Returns whether one was started.
    pub(super) fn open_beside(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let due = |path: &Path| {
            let due = due(path, &self.volumes).filter(|(at, _)| ctx.now >= *at);
            due.map(|(_, volume)| (path.id(), volume))
        };
        let next = self.paths.iter().filter(|path| path.is_free()).find_map(due);
        let next = next.filter(|_| may_open(&self.paths, &self.volumes) && self.is_running());
        let Some((id, volume)) = next else { return false };
        let (path, volume) = (&mut self.paths[id], &self.volumes[volume]);
        let at = volume.index();
        let asked = match path.terms.serves(at) || path.terms.is_standby(at) {
            true => path.open_again(volume, ctx),
            false => path.open(volume, None, ctx),
        };
        self.end_if_failed(id, asked, ctx);
        true
    }

    /// Time at which a connected path is due to open a volume. None while no path may open one; an
    /// event ends that state.
    pub(super) fn open_deadline(&self) -> Option<Instant> {
        let free = self.paths.iter().filter(|path| path.is_free());
        let due = free.filter_map(|path| due(path, &self.volumes)).map(|(at, _)| at).min();
        due.filter(|_| may_open(&self.paths, &self.volumes) && self.is_running())
    }

    /// Handles a notification that a device has changed. The device may not be open yet.
    pub(super) fn on_changed(&mut self, id: PathId, device: u32, ctx: &mut Ctx<'_>) {
        let path = &mut self.paths[id];
        let mut any = false;
        for volume in self.volumes.used() {
            let last = volume.last().map(|last| last.device_id);
            let (at, terms) = (volume.index(), &path.terms);
            let known = terms.device_id(at).or_else(|| terms.standby_id(at)).or(last);
            if known.is_none_or(|known| known == device) {
                path.terms.reopen(volume.index()).changed(ctx.now);
                any = true;
            }
        }
        if any {
            self.open_beside(ctx);
        }
    }

    /// Handles a successful open.
    pub(super) fn on_opened(
        &mut self,
        id: PathId,
        asked: Asked,
        opened: &Opened,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let (device, standing) = (&opened.device, opened.standing);
        let (at, again) = (asked.volume, asked.ask == Ask::Again);
        let met = self.met(id, device, standing);
        let server = self.paths[id].server();
        let serves = self.volumes[at].moving.would_serve(standing);
        if again && self.paths[id].terms.serves(at) {
            self.volumes[at].moving.meet(standing, server);
            if serves {
                return self.on_opened_again(id, at, met, device, ctx);
            }
            self.stand_by(id, at, ctx);
            return Ok(());
        }
        match self.judge_first(id, at, met, device) {
            Some(why) => return self.refuse(id, at, why, ctx),
            None => self.volumes[at].moving.meet(standing, server),
        }
        if !serves {
            self.pin(at, server, opened, true);
            self.paths[id].terms.stand_by(at, device.device_id);
            return self.on_open(id, ctx);
        }
        let device = match self.volumes[at].fit(device) {
            Ok(device) => device,
            Err(failure) => return self.refuse(id, at, failure.into(), ctx),
        };
        let volume = &self.volumes[at];
        volume.cache.compare(volume.last(), &device);
        self.pin(at, server, opened, standing.is_some());
        if let Some(watch) = self.volumes[at].cache.meet(ctx.now, &device) {
            self.notify_all(&ShardMessage::Cache(at, watch), ctx);
        }
        if self.volumes[at].is_used() && self.volumes[at].opened(&device) {
            self.notify_all(&ShardMessage::Open(at, Arc::clone(&device)), ctx);
        }
        self.paths[id].terms.agree(at, device.device_id, device.cache_id);
        self.paths[id].fence.opened(at);
        self.displace(id, at, ctx);
        if self.paths[id].is_connected() {
            self.advance_fences(ctx);
            self.open_beside(ctx);
            return Ok(());
        }
        self.on_open(id, ctx)
    }

    /// Server ID to compare with the pinned one. A volume that moves may be at any server if its
    /// export ID proves that it is the same export; then the pinned ID is returned.
    fn met(&self, id: PathId, device: &OpenDevice, standing: Option<Standing>) -> Option<ServerId> {
        let is_certain = device.export_id.is_some_and(|id| !id.is_weak());
        let moves = standing.is_some() && is_certain && self.server.id().is_some();
        if moves { self.server.id() } else { self.paths[id].server() }
    }

    /// Finishes an open: connects the path if this was its first volume.
    fn on_open(&mut self, id: PathId, ctx: &mut Ctx<'_>) -> Result<(), PathEnd> {
        if self.paths[id].is_connected() {
            self.open_beside(ctx);
            return Ok(());
        }
        self.paths[id].connected(ctx.now)?;
        // The server has ended the path's previous connections, if they were to this server.
        let path = &self.paths[id];
        let is_there = |(server, _)| server == path.server() || !self.server.has_gateways();
        if path.fence.lost_at().is_none_or(is_there) {
            self.on_fenced(id, ctx);
        }
        if self.paths[id].is_leaving() {
            self.end_path(id, End::ASKED, ctx);
        } else {
            self.advance_fences(ctx);
        }
        Ok(())
    }

    /// Returns why a volume opened for the first time in this attempt cannot be used over the path.
    fn judge_first(
        &mut self,
        id: PathId,
        at: DeviceIndex,
        met: Option<ServerId>,
        device: &OpenDevice,
    ) -> Option<PathEnd> {
        let (path, volume) = (&self.paths[id], &self.volumes[at]);
        let server = MetServer { pinned: &self.server, met };
        let connected = self.paths.others(id).any(Path::is_connected);
        let serving = self.paths.others(id).any(|other| other.has(at));
        let mismatch = identity::judge(server, &volume.pinned, volume.last(), device);
        let mismatch = mismatch.or_else(|| {
            let others = OtherPaths { connected, serving };
            identity::judge_beside(server, &volume.pinned, device.export_id, others)
        });
        if let Some(mismatch) = mismatch {
            return Some(mismatch.into());
        }
        // An export can have two names, such as one with and one without a slash. Closing one would
        // close the other.
        let same = |other: &&Volume| {
            path.terms.device_id(other.index()) == Some(device.device_id) && other.index() != at
        };
        let twin = self.volumes.iter().find(same)?.export();
        let why = format!("it is the same export as volume {twin} of this session");
        let failure = SessionFailure::Unusable(why);
        self.volumes[at].fail(failure.clone());
        Some(failure.into())
    }

    /// Pins server and export to those of a device that was opened and not refused. With `moves`,
    /// a server that is already pinned is kept.
    fn pin(&mut self, at: DeviceIndex, server: Option<ServerId>, opened: &Opened, moves: bool) {
        let before = self.volumes.identity(at, &self.server);
        self.server.meet(server, opened.secret, moves);
        self.volumes[at].pinned.meet(opened.device.export_id);
        let met = self.volumes.identity(at, &self.server);
        if met != before {
            tracing::info!(identity = %met, "volume identity pinned");
        }
    }

    /// Handles a repeated open on a connected path.
    fn on_opened_again(
        &mut self,
        id: PathId,
        at: DeviceIndex,
        met: Option<ServerId>,
        device: &OpenDevice,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let volume = &self.volumes[at];
        let Some(last) = volume.get().filter(|_| !self.detaching) else { return Ok(()) };
        let server = MetServer { pinned: &self.server, met };
        match judge_again(&self.paths[id], server, volume, last, device) {
            Err(why) => return self.refuse(id, at, why, ctx),
            Ok(false) => {}
            Ok(true) => match self.volumes[at].fit(device) {
                Err(failure) => return self.refuse(id, at, failure.into(), ctx),
                Ok(device) => {
                    if self.volumes[at].opened(&device) {
                        self.notify_all(&ShardMessage::Open(at, device), ctx);
                    }
                }
            },
        }
        self.open_beside(ctx);
        Ok(())
    }

    /// Handles a refused open.
    pub(super) fn on_open_refused(
        &mut self,
        id: PathId,
        Asked { volume: at, ask, until }: Asked,
        code: u16,
        why: Option<OpenRefusal>,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        let volume = &mut self.volumes[at];
        if code == errno::EIDRM && (ask == Ask::Again || volume.was_open()) {
            self.on_removed(at, Some(id), ctx);
            let why = PathEnd::from(SessionFailure::Removed);
            return if self.failure().is_some() { Err(why) } else { self.refuse(id, at, why, ctx) };
        }
        let Ask::Open(access) = ask else {
            let (path, errno) = (self.paths[id].name(), errno_name(code));
            tracing::warn!(%path, errno, "cannot reopen the changed device; access may be revoked");
            return Ok(());
        };
        match volume.refused(ctx.now, code, why, access) {
            Ok(()) => self.paths[id].open(volume, Some(until), ctx),
            Err(failure) => self.refuse(id, at, failure.into(), ctx),
        }
    }

    /// Records why a path does not serve a volume. An error ends the path: it then serves nothing,
    /// or leads to another server.
    fn refuse(
        &mut self,
        id: PathId,
        at: DeviceIndex,
        why: PathEnd,
        ctx: &mut Ctx<'_>,
    ) -> Result<(), PathEnd> {
        if matches!(&why, PathEnd::Mismatch(mismatch) if mismatch.is_of_server()) {
            return Err(why);
        }
        let path = &mut self.paths[id];
        let export = self.volumes[at].export();
        let served = path.terms.serves(at);
        let wait = path.terms.refuse(at, why.clone(), ctx.now);
        if path.is_connected() && path.terms.is_of_use() {
            let (path, again_ms) = (path.name(), wait.as_millis());
            tracing::warn!(%path, volume = export, again_ms, "path without this volume: {why}");
            if served && let Some(message) = self.paths[id].leaves(at) {
                self.notify_all(&message, ctx);
            }
            self.check_lost(at, ctx);
            self.check_attach(ctx.now);
            return Ok(());
        }
        if path.state() == PathState::Opening && is_untried(path, &self.volumes) {
            tracing::warn!(path = %path.name(), volume = export, "path without this volume: {why}");
            self.open_next(ctx);
            return Ok(());
        }
        if self.volumes.iter().nth(1).is_none() {
            return Err(why);
        }
        let refused = self.volumes.iter().filter_map(|volume| {
            let why = path.terms.refusal(volume.index())?;
            Some((volume.export().to_owned(), why.clone()))
        });
        Err(PathEnd::Volumes(refused.collect()))
    }

    /// Fails volumes that were never open when every path was refused or has failed, and one path
    /// is connected without them.
    pub(super) fn check_refused(&mut self, now: Instant) {
        let connected = self.paths.are_connected();
        for volume in self.volumes.iter_mut().filter(|_| connected) {
            if volume.was_open() || volume.failure().is_some() || volume.is_patient(now) {
                continue;
            }
            let refusal = |path: &Path| path.terms.refusal(volume.index()).map(ToString::to_string);
            let mut paths = self.paths.listed();
            if paths.all(|path| path.has_failed() || refusal(path).is_some()) {
                let why = self
                    .paths
                    .listed()
                    .filter_map(|path| Some(format!("{}: {}", path.name(), refusal(path)?)));
                let why = why.collect::<Vec<_>>().join("; ");
                volume.fail(SessionFailure::Unreachable(why));
            }
        }
    }

    /// Handles the removal of an open volume's export by the server's operator. A later export of
    /// that name is not the one its users know, so no path tries again.
    pub(super) fn on_removed(&mut self, at: DeviceIndex, over: Option<PathId>, ctx: &mut Ctx<'_>) {
        let gone = self.volumes.get(at).is_none_or(|volume| volume.failure().is_some());
        let over_already = gone || self.failure().is_some() || self.detaching;
        if over_already || rtrs_core::mutated!(RemovedIgnored) {
            return;
        }
        self.volumes[at].removed();
        self.notify_all(&ShardMessage::GiveUp(at), ctx);
        if self.failure().is_some() {
            for other in self.paths.ids().filter(|other| Some(*other) != over) {
                self.end_path(other, End::failed(SessionFailure::Removed), ctx);
            }
        }
    }

    /// Updates a volume after a path has stopped serving it.
    pub(super) fn check_lost(&mut self, at: DeviceIndex, ctx: &mut Ctx<'_>) {
        let volume = &mut self.volumes[at];
        if !volume.is_open() {
            return;
        }
        // A connected path that still waits for fences cannot carry IO.
        if !self.paths.iter().any(|path| path.carries(at)) {
            volume.no_path.begin(ctx.now);
        }
        // The server closes the volume with the last path of the session.
        if !self.paths.iter().any(|path| path.has(at)) {
            volume.lost();
            volume.no_path.begin(ctx.now);
            self.notify_all(&ShardMessage::Closed(at), ctx);
        }
    }
}
