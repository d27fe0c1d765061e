//! The home core's part of a session: paths, heartbeats, opening the device.
//!
//! Each path connects one connection after the other (connection 0 here, the others on their
//! cores, by message), introduces itself, learns its chunks, opens the device and then carries
//! IO. Every path opens the device, not only the first: to a server that has the session it is
//! the same device again, and one that lost the session while we thought another path alive
//! (a restart behind a silent link) must not get IO for a device it does not know. When the last
//! path goes the device counts as closed. A path that ends first gets all its connections ended
//! on all cores, then waits by a backoff with jitter and starts over with a new epoch.

use std::net::SocketAddr;
use std::sync::Arc;

use rtrs_core::fabric::{CloseReason, Fabric, RemoteMem, WcOp, WcStatus, WorkCompletion};
use rtrs_core::identity::ServerId;
use rtrs_core::ids::{ConnIndex, CoreIndex, PathId, PathUuid, PermitId, QpNum};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::AccessMode;

use super::cache::KeptLife;
use super::device::SessionFailure;
use super::fence::{NoPathClock, PathFence};
use super::heartbeat::HeartbeatMonitor;
use super::identity::Pinned;
use super::links::Tries;
use super::online::Leave;
use super::permits::CONTROL;
use super::reconnect::Reconnect;
use super::shard::ConnectionEnd;
use super::{
    CacheWatch, Connect, Granted, OpenDevice, Outbox, PathShared, PathTarget, Policy,
    SessionConfig, ToHome, ToShard,
};
use crate::path::handshake::{self, ServiceConnection, ServiceEvent};
use crate::path::state::PathState;

/// Bound of each step of opening the device, and of a fence. A kernel's server opens its disk
/// before it looks at anything else that came over the connection, heartbeats too. Ours answers
/// heartbeats meanwhile, so a silent path is found by them (`device.rs`).
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(10);
/// Bound of ending all connections of a path; afterwards they are aborted once more.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the other paths wait for the one that asks the server to make the session. A kernel
/// server allocates and registers all its chunks before it answers.
pub(super) const OPENER_TIME_MAX: Duration = Duration::from_secs(2);
/// How often they look.
const OPENER_POLL: Duration = Duration::from_millis(5);

/// How far the device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DeviceState {
    Closed,
    Open {
        device: Arc<OpenDevice>,
    },
    /// The close was sent on this path.
    Closing {
        path: PathId,
        deadline: Instant,
    },
    /// Closed in order, or given up.
    Ended,
}

/// The home core's part of a path.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) id: PathId,
    pub(super) target: PathTarget,
    pub(super) state: PathState,
    /// It is being taken out of use by hand (`online.rs`).
    pub(super) leave: Option<Leave>,
    /// Taken out for good: not listed any more, and its place may be given to another.
    pub(super) removed: bool,
    /// Told to the cores when the device is open on the path.
    pub(super) chunks: Option<Arc<[RemoteMem]>>,
    /// The access last asked for on this path.
    pub(super) asked: AccessMode,
    pub(super) epoch: u32,
    pub(super) uuid: PathUuid,
    /// The server takes FENCE, as it said last.
    pub(super) fences: bool,
    /// Which server it is, as that said last.
    pub(super) server_id: Option<ServerId>,
    /// Was accepted once: the server may be asked to make the session anew.
    pub(super) accepted_once: bool,
    pub(super) recon_cnt: u16,
    /// The server's address of the last attempt.
    pub(super) remote: SocketAddr,
    pub(super) service: Option<ServiceConnection>,
    /// Connections above 0 that a core has or is making.
    pub(super) open: Vec<bool>,
    pub(super) next_cid: u16,
    /// When the last attempt began.
    pub(super) started: Instant,
    pub(super) until: Instant,
    pub(super) reconnect: Reconnect,
    pub(super) tries: Tries,
    pub(super) heartbeat: HeartbeatMonitor,
    pub(super) shared: Arc<PathShared>,
    pub(super) last_error: Option<String>,
    pub(super) fence: PathFence,
    /// The life of the server's cache in which it opened the device; 0 when nobody says.
    pub(super) cache_id: u64,
}

/// The home core's part of a session.
#[derive(Debug)]
pub(crate) struct SessionControl {
    pub(super) config: Arc<SessionConfig>,
    pub(super) paths: Vec<Path>,
    pub(super) granted: Option<Granted>,
    pub(super) pinned: Pinned,
    pub(super) device: DeviceState,
    /// What is asked for; lowered once where the export is read-only.
    pub(super) access: AccessMode,
    pub(super) opened_once: bool,
    /// Until then nothing that is in the way of the first open ends the session.
    pub(super) patient_until: Instant,
    pub(super) last: Option<Arc<OpenDevice>>,
    pub(super) failure: Option<SessionFailure>,
    pub(super) detaching: bool,
    pub(super) policy: Policy,
    pub(super) no_path: NoPathClock,
    pub(super) cache: Option<Arc<CacheWatch>>,
    pub(super) kept: KeptLife,
    pub(super) outbox: Outbox,
}

impl Path {
    pub(super) fn new(
        now: Instant,
        id: PathId,
        target: PathTarget,
        uuid: [u8; 16],
        config: &SessionConfig,
    ) -> Self {
        let seed = config.seed ^ u64::from(id.0 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self {
            id,
            state: PathState::Waiting,
            leave: None,
            removed: false,
            chunks: None,
            asked: config.access,
            epoch: 0,
            uuid: PathUuid(uuid),
            fences: false,
            server_id: None,
            accepted_once: false,
            recon_cnt: 0,
            remote: target.remote(0),
            service: None,
            open: vec![false; usize::from(config.cores) + 1],
            next_cid: 0,
            started: Instant::ZERO,
            until: now,
            reconnect: Reconnect::new(
                target.remotes.len(),
                (config.reconnect_min, config.reconnect_max),
                seed,
            ),
            tries: Tries::default(),
            heartbeat: HeartbeatMonitor::default(),
            shared: Arc::new(PathShared::default()),
            last_error: None,
            fence: PathFence::default(),
            cache_id: 0,
            target,
        }
    }
}

impl SessionControl {
    pub(crate) fn new(now: Instant, config: Arc<SessionConfig>, uuids: &[[u8; 16]]) -> Self {
        let config_policy = config.policy;
        let named = (0u16..).zip(&config.paths).zip(uuids);
        let paths = named
            .map(|((id, target), uuid)| Path::new(now, PathId(id), target.clone(), *uuid, &config))
            .collect();
        Self {
            access: config.access,
            patient_until: now + config.open_patience,
            pinned: Pinned::new(config.identity),
            config,
            paths,
            granted: None,
            device: DeviceState::Closed,
            opened_once: false,
            last: None,
            failure: None,
            detaching: false,
            policy: config_policy,
            no_path: NoPathClock::default(),
            cache: None,
            kept: KeptLife::default(),
            outbox: Vec::new(),
        }
    }

    /// Messages for the cores, since the last call.
    pub(crate) fn take_outbox(&mut self) -> Outbox {
        std::mem::take(&mut self.outbox)
    }

    /// The device once it was opened.
    pub(crate) fn device(&self) -> Option<&Arc<OpenDevice>> {
        match &self.device {
            DeviceState::Open { device } => Some(device),
            _ => None,
        }
    }

    /// True while the device is open at the server.
    pub(crate) fn is_open(&self) -> bool {
        self.device().is_some()
    }

    /// Why the session cannot go on, once.
    pub(crate) fn failure(&self) -> Option<&SessionFailure> {
        self.failure.as_ref()
    }

    /// True when a detach has ended everything.
    pub(crate) fn is_done(&self) -> bool {
        self.detaching && self.paths.iter().all(|p| p.state == PathState::Gone)
    }

    /// Starts to end the session: closes the device in order, then every path.
    pub(crate) fn detach(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) {
        if std::mem::replace(&mut self.detaching, true) {
            return;
        }
        for core in 0..self.config.cores {
            self.outbox.push((CoreIndex(core), ToShard::Closed));
        }
        let up = self.paths.iter().position(|p| p.state == PathState::Connected);
        if let (DeviceState::Open { device }, Some(index)) = (&self.device, up) {
            let device_id = device.device_id;
            let provider = self.paths[index].target.provider;
            let sent = self.paths[index].service.as_mut().is_some_and(|service| {
                service.post_close(device_id, fabrics[provider].as_mut()).is_ok()
            });
            if sent {
                let path = self.paths[index].id;
                self.device = DeviceState::Closing { path, deadline: now + STEP_TIMEOUT / 5 };
                return;
            }
        }
        self.end_all(now, fabrics);
    }

    pub(super) fn end_all(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) {
        self.device = DeviceState::Ended;
        self.tell_all(ToShard::GiveUp);
        for index in 0..self.paths.len() {
            match self.paths[index].state {
                PathState::Waiting | PathState::Disconnected => {
                    self.paths[index].state.advance(PathState::Gone);
                }
                PathState::Closing | PathState::Gone => {}
                _ => self.end_path(now, index, None, fabrics),
            }
        }
    }

    /// Moves everything on whose time has come. True when anything happened.
    pub(crate) fn poll(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) -> bool {
        let mut any = self.open_next(now, fabrics);
        any |= self.poll_news(now, fabrics);
        for index in 0..self.paths.len() {
            any |= self.poll_path(now, index, fabrics);
        }
        any |= self.advance_fences(now, fabrics);
        any |= self.poll_no_path(now);
        self.keep_life(now);
        if matches!(self.device, DeviceState::Closing { deadline, .. } if now >= deadline) {
            self.end_all(now, fabrics);
            any = true;
        }
        any
    }

    fn poll_path(&mut self, now: Instant, index: usize, fabrics: &mut [Box<dyn Fabric>]) -> bool {
        let failed = self.failure.is_some();
        let path = &mut self.paths[index];
        match path.state {
            PathState::Waiting if path.leave.is_some() && !path.fence.is_awaited() => {
                self.has_left(now, index)
            }
            PathState::Waiting if now >= path.until && !self.detaching && !failed => {
                if self.another_opens_the_session(now, index) {
                    self.paths[index].until = now + OPENER_POLL;
                } else {
                    self.start_path(now, index, fabrics);
                }
                true
            }
            PathState::Connecting | PathState::Introducing if now >= path.until => {
                self.end_path(now, index, Some("no answer in time".into()), fabrics);
                true
            }
            PathState::Closing if now >= path.until => {
                path.until = now + CLOSE_TIMEOUT;
                let (id, epoch) = (path.id, path.epoch);
                let provider = path.target.provider;
                if let Some(service) = path.service.as_mut() {
                    service.end(now, false, fabrics[provider].as_mut());
                }
                self.tell_all(ToShard::Disconnect { path: id, epoch, in_order: false });
                true
            }
            PathState::Opening if now >= path.until => {
                let why = "opening the device was not answered";
                self.end_path(now, index, Some(why.into()), fabrics);
                true
            }
            PathState::Opening => self.poll_heartbeat(now, index, fabrics),
            PathState::Connected => {
                self.poll_leave(now, index, fabrics) || self.poll_heartbeat(now, index, fabrics)
            }
            _ => false,
        }
    }

    /// True while a path's first connection at the server was accepted, so that the server knows
    /// the session.
    fn is_known(path: &Path) -> bool {
        match path.state {
            PathState::Connecting => path.next_cid > 0,
            PathState::Introducing | PathState::Opening | PathState::Connected => true,
            PathState::Waiting | PathState::Closing | PathState::Disconnected | PathState::Gone => {
                false
            }
        }
    }

    /// True while another path asks the server to make the session: two that ask at once can get
    /// a session each from a kernel server (6.1, rtrs-srv.c:get_or_create_srv does not hold its
    /// lock from the look-up to the insertion). A mute server holds the others up for a bounded
    /// time only.
    fn another_opens_the_session(&self, now: Instant, index: usize) -> bool {
        if self.paths.iter().any(Self::is_known) {
            return false;
        }
        let mut others = self.paths.iter().enumerate().filter(|(other, _)| *other != index);
        others.any(|(_, path)| {
            path.state == PathState::Connecting && now.since(path.started) < OPENER_TIME_MAX
        })
    }

    fn start_path(&mut self, now: Instant, index: usize, fabrics: &mut [Box<dyn Fabric>]) {
        let provider = self.paths[index].target.provider;
        let first_conn = self.paths[index].accepted_once || !self.paths.iter().any(Self::is_known);
        let path = &mut self.paths[index];
        path.state.advance(PathState::Connecting);
        path.started = now;
        path.epoch += 1;
        path.recon_cnt = path.recon_cnt.wrapping_add(1);
        path.next_cid = 0;
        path.until = now + self.config.connect_timeout * 2;
        path.shared = Arc::new(PathShared::default());
        let request = handshake::conn_request(
            &self.config,
            path.uuid,
            path.recon_cnt,
            ConnIndex(0),
            first_conn,
        );
        path.remote = path.target.remote(path.epoch - 1);
        let started = ServiceConnection::connect(
            now,
            (path.target.local, path.remote),
            request,
            self.config.connect_timeout,
            fabrics[provider].as_mut(),
        );
        match started {
            Ok(service) => {
                path.service = Some(service);
                path.open[0] = true;
            }
            Err(error) => self.end_path(now, index, Some(error.to_string()), fabrics),
        }
    }

    /// A queue pair of this core got ready. True when it was a service connection.
    pub(crate) fn handle_established(
        &mut self,
        now: Instant,
        provider: usize,
        qp: QpNum,
        private_data: &[u8],
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let Some(index) = self.service_of(provider, qp) else { return false };
        if self.paths[index].state != PathState::Connecting {
            // We gave the attempt up while its answer was on the way.
            return true;
        }
        let response = handshake::conn_response(private_data).and_then(|(granted, extensions)| {
            let server_id = extensions.identity.and_then(ServerId::from_bytes);
            self.paths[index].server_id = server_id;
            match self.pinned.refuses_server(server_id) {
                None => Ok((granted, extensions)),
                Some(why) => Err(why),
            }
        });
        match response {
            Err(error) => self.end_path(now, index, Some(error), fabrics),
            Ok((granted, extensions)) => match self.accept_grant(granted) {
                Err(failure) => {
                    let text = failure.to_string();
                    if !self.opened_once {
                        self.failure = Some(failure);
                    }
                    self.end_path(now, index, Some(text), fabrics);
                }
                Ok(()) => {
                    self.paths[index].accepted_once = true;
                    self.paths[index].fences = extensions.fence;
                    if let Some(service) = self.paths[index].service.as_mut() {
                        service.granted(granted, extensions);
                    }
                    self.next_connection(now, index, fabrics);
                }
            },
        }
        true
    }

    /// The permit of fences.
    pub(super) fn fence_permit(&self) -> PermitId {
        self.granted.map_or(CONTROL, |granted| granted.fence_permit(&self.config))
    }

    /// Asks for the next connection of a path, or introduces it when all are up.
    fn next_connection(&mut self, now: Instant, index: usize, fabrics: &mut [Box<dyn Fabric>]) {
        let provider = self.paths[index].target.provider;
        let path = &mut self.paths[index];
        path.next_cid += 1;
        path.until = now + self.config.connect_timeout * 2;
        let Some(service) = path.service.as_mut() else { return };
        if path.next_cid > self.config.cores {
            path.state.advance(PathState::Introducing);
            let sent = service.post_info(&self.config.name, fabrics[provider].as_mut());
            if let Err(error) = sent {
                self.end_path(now, index, Some(error.to_string()), fabrics);
            }
            return;
        }
        let cid = ConnIndex(path.next_cid);
        let private_data =
            handshake::conn_request(&self.config, path.uuid, path.recon_cnt, cid, true);
        path.open[cid.index()] = true;
        let message = ToShard::Connect(Box::new(Connect {
            path: path.id,
            epoch: path.epoch,
            cid,
            remote: path.remote,
            pd: service.domain(),
            private_data,
            shared: Arc::clone(&path.shared),
        }));
        self.outbox.push((CoreIndex(cid.0 - 1), message));
    }

    /// A message of a core.
    pub(crate) fn handle_message(
        &mut self,
        now: Instant,
        message: ToHome,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        let (path, epoch, cid, end, in_order) = match message {
            ToHome::Up { path, epoch, cid } => {
                let path = path.index();
                let here = &self.paths[path];
                if here.epoch == epoch
                    && here.state == PathState::Connecting
                    && here.next_cid == cid.0
                {
                    self.next_connection(now, path, fabrics);
                }
                return;
            }
            ToHome::Retired { path, epoch, core } => {
                return self.on_retired(now, path.index(), epoch, core, fabrics);
            }
            ToHome::Failed { path, epoch, cid, failure } => {
                (path, epoch, cid, handshake::describe_failure(&failure), false)
            }
            ToHome::Closed { path, epoch, cid, reason } => {
                let end = self.describe_end(path.index(), &reason);
                (path, epoch, cid, end, reason == CloseReason::Peer)
            }
        };
        let index = path.index();
        if self.paths[index].epoch == epoch {
            self.paths[index].open[cid.index()] = false;
            let why = format!("connection {cid}: {end}");
            self.take_down(now, index, Some(why), in_order, fabrics);
        }
    }

    /// A service connection failed or ended. True when it was one.
    pub(crate) fn handle_closed(
        &mut self,
        now: Instant,
        provider: usize,
        qp: QpNum,
        end: &ConnectionEnd,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let Some(index) = self.service_of(provider, qp) else { return false };
        let mut why = match end {
            ConnectionEnd::Failed(failure) => handshake::describe_failure(failure),
            ConnectionEnd::Closed(reason) => self.describe_end(index, reason),
        };
        self.paths[index].service = None;
        self.paths[index].open[0] = false;
        if let ConnectionEnd::Failed(failure) = end
            && let Some(secret) = handshake::eviction(failure)
        {
            if self.pinned.is_proof(secret) {
                self.on_evicted(now, index, fabrics);
            } else {
                why = handshake::UNPROVEN_EVICTION.to_owned();
            }
        }
        let in_order = matches!(end, ConnectionEnd::Closed(CloseReason::Peer));
        self.take_down(now, index, Some(why), in_order, fabrics);
        true
    }

    /// A completion of this core. True when it was of a service connection.
    pub(crate) fn handle_completion(
        &mut self,
        now: Instant,
        provider: usize,
        wc: &WorkCompletion,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let Some(index) = self.service_of(provider, wc.qp) else { return false };
        let path = &mut self.paths[index];
        let Some(service) = path.service.as_mut() else { return true };
        let received = matches!(wc.op, WcOp::Recv | WcOp::RecvRdmaWithImm);
        let event = service.on_completion(wc, fabrics[provider].as_mut());
        // A heartbeat of the server's shows one direction only: it would be sent just the same if
        // nothing of ours arrived.
        let both_ways = !matches!(event, Ok(ServiceEvent::HeartbeatAsked));
        if received && wc.status == WcStatus::Success && both_ways {
            path.shared.received(now);
        }
        self.on_service_event(now, index, event, fabrics);
        true
    }

    /// Ends a path: all its connections on all cores. When the last is gone it waits for its
    /// next attempt.
    pub(super) fn end_path(
        &mut self,
        now: Instant,
        index: usize,
        why: Option<String>,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        let in_order = why.is_none();
        self.take_down(now, index, why, in_order, fabrics);
    }

    /// Ends a path. In order: what the server has sent on other connections still counts.
    pub(super) fn take_down(
        &mut self,
        now: Instant,
        index: usize,
        why: Option<String>,
        in_order: bool,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        let provider = self.paths[index].target.provider;
        let path = &mut self.paths[index];
        if matches!(
            path.state,
            PathState::Connecting
                | PathState::Introducing
                | PathState::Opening
                | PathState::Connected
        ) {
            if let Some(mut why) = why {
                if path.target.remotes.len() > 1 {
                    why = format!("{}: {why}", path.remote);
                }
                if !self.detaching && path.last_error.as_ref() != Some(&why) {
                    tracing::warn!(path = %path.target.name, "path down: {why}");
                }
                path.last_error = Some(why);
            }
            path.state.advance(PathState::Closing);
            path.until = now + CLOSE_TIMEOUT;
            path.heartbeat.stop();
            path.chunks = None;
            path.fence.died(path.epoch, path.recon_cnt);
            path.shared.set_latency(Duration::ZERO);
            if let Some(service) = path.service.as_mut() {
                service.end(now, in_order, fabrics[provider].as_mut());
            }
            let (id, epoch) = (path.id, path.epoch);
            self.tell_all(ToShard::Disconnect { path: id, epoch, in_order });
            self.on_path_lost(now, id);
        }
        let path = &mut self.paths[index];
        if path.state == PathState::Closing && path.open.iter().all(|open| !open) {
            path.service = None;
            path.reconnect.ended();
            let at_once = path.tries.take_at_once();
            if self.detaching {
                path.state.advance(PathState::Gone);
            } else if !self.has_left(now, index) {
                let path = &mut self.paths[index];
                path.state.advance(PathState::Waiting);
                path.until = path.reconnect.next_attempt(now, at_once);
            }
        }
        self.judge_start(now);
    }

    pub(super) fn tell_all(&mut self, message: ToShard) {
        for core in 1..self.config.cores {
            self.outbox.push((CoreIndex(core), message.clone()));
        }
        self.outbox.push((CoreIndex(0), message));
    }

    fn service_of(&self, provider: usize, qp: QpNum) -> Option<usize> {
        self.paths.iter().position(|path| {
            path.target.provider == provider && path.service.as_ref().is_some_and(|s| s.qp() == qp)
        })
    }

    /// When `poll` wants to be called even if nothing happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let device = match self.device {
            DeviceState::Closing { deadline, .. } => Some(deadline),
            _ => None,
        };
        let soonest = earliest(earliest(device, self.fence_deadline()), self.no_path_deadline());
        self.paths.iter().fold(soonest, |soonest, path| {
            let own = match path.state {
                PathState::Connected => {
                    earliest(path.heartbeat.deadline(), path.leave.as_ref().map(Leave::deadline))
                }
                PathState::Opening => earliest(path.heartbeat.deadline(), Some(path.until)),
                PathState::Disconnected | PathState::Gone => None,
                PathState::Waiting if self.detaching || self.failure.is_some() => None,
                _ => Some(path.until),
            };
            earliest(earliest(soonest, own), path.tries.deadline())
        })
    }
}
