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

use rtrs_core::identity::ServerId;
use rtrs_core::ids::PathId;
use rtrs_core::time::Instant;
use rtrs_core::wire::{Extensions, OpenRefusal, errno_name};

use super::failure::SessionFailure;
use super::fence;
use super::identity::{self, Mismatch, OtherPaths, PinnedServer, ReportedServer};
use super::path::Path;
use super::routes::Routes;
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

/// Reason why a volume cannot be opened for a promotion.
const NOT_PROMOTED: &str = "the server cannot hand the export over between sessions: access \
                            migration for a virtual machine needs a single rtrs-server, and an \
                            export without the option gateway";

/// Reason why a server without an ID promotes no session: the session on the old host could not
/// prove that it returns after a restart of the server, and would be refused beside the new one.
const UNNAMED_SERVER: &str = "the server has no ID, which access migration for a virtual machine \
                              needs: give it one with the setting server-id";

/// Volumes that a path may open for the first time.
fn openable<'a>(path: &'a Path, volumes: &'a Volumes) -> impl Iterator<Item = &'a Volume> {
    let closing = volumes.are_closing();
    let wanted = volumes.iter().filter(|volume| volume.is_wanted());
    wanted.filter(move |volume| {
        (!closing || volume.was_open() || volume.is_closing())
            && !path.volumes.terms.serves(volume.index())
    })
}

/// Volume that a connecting path opens next. Volumes whose last open was not answered come last.
fn first(path: &Path, volumes: &Volumes) -> Option<DeviceIndex> {
    let untried =
        || openable(path, volumes).filter(|volume| !path.volumes.terms.is_tried(volume.index()));
    let quick = untried().find(|volume| !path.volumes.terms.is_unanswered(volume.index()));
    quick.or_else(|| untried().next()).map(Volume::index)
}

/// Whether a connecting path still has a volume to open, now or once a close is answered.
fn is_untried(path: &Path, volumes: &Volumes) -> bool {
    let wanted =
        |volume: &Volume| volume.is_wanted() && !path.volumes.terms.is_tried(volume.index());
    volumes.iter().any(wanted)
}

/// Time and volume of the next open on a connected path, whether a first open or a repeated one.
fn due(path: &Path, volumes: &Volumes) -> Option<(Instant, DeviceIndex)> {
    let new = openable(path, volumes)
        .filter_map(|volume| Some((path.volumes.terms.due_first(volume.index())?, volume.index())));
    let changed = volumes.iter().filter(|volume| volume.is_wanted()).filter_map(|volume| {
        let due = path.volumes.terms.due_again(volume.index())?;
        (!rtrs_core::mutated!(ResizeUnheard)).then_some((due, volume.index()))
    });
    let promoted = volumes.iter().filter(|volume| volume.is_open()).filter_map(|volume| {
        let due = volume.promotion.due()?;
        path.volumes.terms.serves(volume.index()).then_some((due, volume.index()))
    });
    new.chain(changed).chain(promoted).min()
}

fn may_open(routes: &Routes) -> bool {
    routes.may_ask() && !fence::is_awaited(&routes.paths, &routes.volumes)
}

/// Path and volume of the next open on a connecting path.
pub(super) fn next_connecting(routes: &Routes) -> Option<(PathId, DeviceIndex)> {
    let id = routes.paths.first(PathState::Opening)?;
    let at = first(&routes.paths[id], &routes.volumes)?;
    (!routes.paths.is_using(CONTROL)).then_some((id, at))
}

/// Path and volume of the next due open on a connected path.
pub(super) fn next_connected(routes: &Routes, now: Instant) -> Option<(PathId, DeviceIndex)> {
    let due = |path: &Path| {
        let due = due(path, &routes.volumes).filter(|(at, _)| now >= *at);
        due.map(|(_, volume)| (path.id(), volume))
    };
    let next = routes.paths.iter().filter(|path| path.is_free()).find_map(due);
    next.filter(|_| may_open(routes))
}

/// Time at which a connected path is due to open a volume. None while no path may open a volume; an
/// event ends that state.
pub(super) fn deadline(routes: &Routes) -> Option<Instant> {
    let free = routes.paths.iter().filter(|path| path.is_free());
    let due = free.filter_map(|path| due(path, &routes.volumes)).map(|(at, _)| at).min();
    due.filter(|_| may_open(routes))
}

/// Returns whether the device in the answer on a connected path is the one that was opened `last`,
/// perhaps with a different size. Returns false if its size differs and no ID proves that it is the
/// same; the known size then applies, since the connection is alive.
///
/// # Errors
/// Returns the reason why the device cannot be the same one.
fn judge_again(
    path: &Path,
    server: ReportedServer<'_>,
    volume: &Volume,
    last: &OpenDevice,
    device: &OpenDevice,
) -> Result<bool, PathEnd> {
    // These properties do not change while a connection is alive.
    let agreed =
        (path.volumes.terms.device_id(volume.index()), path.volumes.terms.cache_id(volume.index()));
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

/// Answer to an open of a volume on a path.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenAnswer<'a> {
    pub(super) path: PathId,
    pub(super) asked: Asked,
    pub(super) opened: &'a Opened,
}

/// Reason for a refused open, as given by the server.
#[derive(Clone, Debug)]
pub(super) struct OpenRefused {
    pub(super) errno: u16,
    pub(super) why: Option<OpenRefusal>,
}

/// Work left for the session by an answer to an open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Nothing,
    /// Start the next open of a connecting path.
    OpenConnecting,
    /// Start the next open of a connected path.
    OpenConnected,
    /// Let shards use the volume over the path, which connects with its first volume.
    Serve,
    /// Connect the path if it is not connected; another server serves the volume.
    StandBy,
    /// Check whether the attach has failed.
    CheckAttach,
}

/// Opens of a session, and the server from which the answers must come.
#[derive(Debug)]
pub(super) struct Opening {
    server: PinnedServer,
}

impl Opening {
    pub(super) fn new(server: PinnedServer) -> Self {
        Self { server }
    }

    pub(super) fn server(&self) -> &PinnedServer {
        &self.server
    }

    /// Checks the server that has accepted a path, before a volume is opened there.
    pub(super) fn admit(
        &mut self,
        server: Option<ServerId>,
        extensions: Extensions,
        was_open: bool,
    ) -> Result<(), Mismatch> {
        // The export is checked once it is open.
        let moves = self.server.has_gateways() || !was_open;
        let moves = moves && extensions.gateways && server.is_some();
        if let Some(mismatch) = self.server.refuses(server).filter(|_| !moves) {
            return Err(mismatch);
        }
        if extensions.gateways {
            self.server.record_gateway();
        }
        Ok(())
    }

    /// Handles a successful open. An error ends the path.
    pub(super) fn opened(
        &mut self,
        answer: OpenAnswer<'_>,
        routes: &mut Routes,
        ctx: &mut Ctx<'_>,
    ) -> Result<Next, PathEnd> {
        let OpenAnswer { path: id, asked, opened } = answer;
        let (device, standing) = (&opened.device, opened.standing);
        let (at, again) = (asked.volume, matches!(asked.ask, Ask::Again | Ask::Promote));
        let server = routes.paths[id].channel.server();
        let serves = routes.volumes[at].moving.would_serve(standing);
        if asked.ask == Ask::Promote {
            routes.volumes[at].promoted();
        }
        if again && routes.paths[id].volumes.terms.serves(at) {
            routes.volumes[at].moving.record(standing, server);
            if serves {
                return self.opened_again(answer, routes, ctx);
            }
            routes.stand_by(id, at, ctx);
            return Ok(Next::Nothing);
        }
        match self.judge(answer, routes) {
            Some(why) => return refuse(id, at, why, routes, ctx),
            None => routes.volumes[at].moving.record(standing, server),
        }
        if !serves {
            self.pin(answer, routes, true);
            routes.paths[id].volumes.terms.stand_by(at, device.device_id);
            return Ok(Next::StandBy);
        }
        let device = match routes.volumes[at].fit(device) {
            Ok(device) => device,
            Err(failure) => return refuse(id, at, failure.into(), routes, ctx),
        };
        let volume = &routes.volumes[at];
        volume.cache.compare(volume.last(), &device);
        self.pin(answer, routes, standing.is_some());
        let (server, process) =
            (routes.paths[id].channel.server(), routes.paths[id].channel.process());
        routes.volumes[at].pinned.note_server(server, process);
        if let Some(watch) = routes.volumes[at].cache.observe(ctx.now, &device) {
            routes.notify(&ShardMessage::Cache(at, watch), ctx);
        }
        if routes.volumes[at].is_used() && routes.volumes[at].opened(&device) {
            routes.notify(&ShardMessage::Open(at, Arc::clone(&device)), ctx);
        }
        routes.paths[id].volumes.terms.agree(at, device.device_id, device.cache_id);
        routes.paths[id].volumes.fence.opened(at);
        routes.displace(id, at, ctx);
        Ok(Next::Serve)
    }

    /// Handles a repeated open on a connected path.
    fn opened_again(
        &self,
        answer: OpenAnswer<'_>,
        routes: &mut Routes,
        ctx: &mut Ctx<'_>,
    ) -> Result<Next, PathEnd> {
        let OpenAnswer { path: id, asked: Asked { volume: at, .. }, opened } = answer;
        let volume = &routes.volumes[at];
        let Some(last) = volume.get() else { return Ok(Next::Nothing) };
        let server = self.reported_server(answer, routes);
        let last = Arc::clone(last);
        let fits = match judge_again(&routes.paths[id], server, volume, &last, &opened.device) {
            Err(why) => return refuse(id, at, why, routes, ctx),
            Ok(true) => routes.volumes[at].fit(&opened.device),
            Ok(false) => routes.volumes[at].fit(&last),
        };
        match fits {
            Err(failure) => return refuse(id, at, failure.into(), routes, ctx),
            Ok(device) => {
                if routes.volumes[at].opened(&device) {
                    routes.notify(&ShardMessage::Open(at, device), ctx);
                }
            }
        }
        Ok(Next::OpenConnected)
    }

    /// Server to compare with the pinned one. A volume that moves may be on any server if its
    /// export ID proves that it is the same export; that server then counts as the pinned one.
    fn reported_server(&self, answer: OpenAnswer<'_>, routes: &Routes) -> ReportedServer<'_> {
        let Opened { device, standing, .. } = answer.opened;
        let is_certain = device.export_id.is_some_and(|id| !id.is_weak());
        let moves = standing.is_some() && is_certain && self.server.id().is_some();
        let reported =
            if moves { self.server.id() } else { routes.paths[answer.path].channel.server() };
        ReportedServer { pinned: &self.server, reported }
    }

    /// Returns why a volume opened for the first time in this attempt cannot be used over the path.
    fn judge(&self, answer: OpenAnswer<'_>, routes: &mut Routes) -> Option<PathEnd> {
        let OpenAnswer { path: id, asked: Asked { volume: at, .. }, opened } = answer;
        let (path, volume) = (&routes.paths[id], &routes.volumes[at]);
        let (server, device) = (self.reported_server(answer, routes), &opened.device);
        let connected = routes.paths.others(id).any(Path::is_connected);
        let serving = routes.paths.others(id).any(|other| other.has(at));
        let cannot_promote = match path.channel.fences() && opened.standing.is_none() {
            false => Some(NOT_PROMOTED),
            true => path.channel.server().is_none().then_some(UNNAMED_SERVER),
        };
        if let Some(why) = cannot_promote.filter(|_| volume.promotion.is_pending()) {
            let failure = SessionFailure::Unusable(why.to_owned());
            routes.volumes[at].fail(failure.clone());
            return Some(failure.into());
        }
        let mismatch = identity::judge(server, &volume.pinned, volume.last(), device);
        let mismatch = mismatch.or_else(|| {
            let others = OtherPaths { connected, serving };
            identity::judge_beside(server, &volume.pinned, device.export_id, others)
        });
        if let Some(mismatch) = mismatch {
            return Some(mismatch.into());
        }
        // An export can have two names, such as one with and one without a slash. Closing the
        // volume of one name would close the other's.
        let same = |other: &&Volume| {
            path.volumes.terms.device_id(other.index()) == Some(device.device_id)
                && other.index() != at
        };
        let twin = routes.volumes.iter().find(same)?.export();
        let why = format!("it is the same export as volume {twin} of this session");
        let failure = SessionFailure::Unusable(why);
        routes.volumes[at].fail(failure.clone());
        Some(failure.into())
    }

    /// Pins server and export to those of a device that was opened and accepted. With `moves`,
    /// a server that is already pinned is kept.
    fn pin(&mut self, answer: OpenAnswer<'_>, routes: &mut Routes, moves: bool) {
        let OpenAnswer { path, asked: Asked { volume: at, .. }, opened } = answer;
        let before = routes.volumes.identity(at, &self.server);
        self.server.record(routes.paths[path].channel.server(), opened.secret, moves);
        routes.volumes[at].pinned.record(opened.device.export_id);
        let identity = routes.volumes.identity(at, &self.server);
        if identity != before {
            tracing::info!(%identity, "volume identity pinned");
        }
    }
}

/// Handles a refused open of a volume that was not removed. An error ends the path.
pub(super) fn refused(
    id: PathId,
    asked: Asked,
    refusal: OpenRefused,
    routes: &mut Routes,
    ctx: &mut Ctx<'_>,
) -> Result<Next, PathEnd> {
    let Asked { volume: at, ask, until } = asked;
    if ask == Ask::Promote {
        if routes.volumes[at].promotion.refused(refusal.errno) {
            let (export, errno) = (routes.volumes[at].export(), errno_name(refusal.errno));
            let why = refusal.why.as_ref().map(OpenRefusal::text);
            tracing::info!(export, errno, why, "no exclusive access yet");
        }
        return Ok(Next::Nothing);
    }
    let Ask::Open(access) = ask else {
        let (path, errno) = (routes.paths[id].channel.name(), errno_name(refusal.errno));
        tracing::warn!(%path, errno, "cannot reopen the changed device; access may be revoked");
        return Ok(Next::Nothing);
    };
    let Routes { paths, volumes, .. } = routes;
    match volumes[at].refused(ctx.now, refusal.errno, refusal.why, access) {
        Ok(()) => paths[id].open(&volumes[at], Some(until), ctx).map(|()| Next::Nothing),
        Err(failure) => refuse(id, at, failure.into(), routes, ctx),
    }
}

/// Records why a path does not serve a volume. An error ends the path: it then serves nothing,
/// or leads to another server.
pub(super) fn refuse(
    id: PathId,
    at: DeviceIndex,
    why: PathEnd,
    routes: &mut Routes,
    ctx: &mut Ctx<'_>,
) -> Result<Next, PathEnd> {
    if matches!(&why, PathEnd::Mismatch(mismatch) if mismatch.is_of_server()) {
        return Err(why);
    }
    let path = &mut routes.paths[id];
    let export = routes.volumes[at].export();
    let served = path.volumes.terms.serves(at);
    let wait = path.volumes.terms.refuse(at, why.clone(), ctx.now);
    if path.is_connected() && path.volumes.terms.is_of_use() {
        let (path, again_ms) = (path.channel.name(), wait.as_millis());
        tracing::warn!(%path, export, again_ms, "the path does not serve this volume: {why}");
        let epoch = routes.paths[id].epoch();
        if served && let Some(message) = routes.paths[id].volumes.leaves(at, epoch) {
            routes.notify(&message, ctx);
        }
        routes.check_lost(at, ctx);
        return Ok(Next::CheckAttach);
    }
    if path.state() == PathState::Opening && is_untried(path, &routes.volumes) {
        let path = path.channel.name();
        tracing::warn!(%path, export, "the path does not serve this volume: {why}");
        return Ok(Next::OpenConnecting);
    }
    if routes.volumes.iter().nth(1).is_none() {
        return Err(why);
    }
    let refused = routes.volumes.iter().filter_map(|volume| {
        let why = path.volumes.terms.refusal(volume.index())?;
        Some((volume.export().to_owned(), why.clone()))
    });
    Err(PathEnd::Volumes(refused.collect()))
}
