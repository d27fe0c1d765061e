//! The life of one path as the control shard decides it: connections join, INFO_REQ is admitted,
//! heartbeats are counted, and the shards report how far its end is.
//!
//! Every change of state goes through the table of [`PathState`] and is published to the shards.

use std::mem;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use rtrs_core::fabric::{ConnRequest, PeerIdentity};
use rtrs_core::ids::{ConnIndex, CoreIndex};
use rtrs_core::proto::{Heartbeat, HeartbeatAction, step};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{ConnReq, Fence, Name};

use super::announce::Announcer;
use super::known::Place;
use super::proving::Proving;
use crate::engine::control::refusal::Refusal;
use crate::engine::device_table::DeviceId;
use crate::engine::message::{EndReport, Outbox, ReplyTo, ShardMessage};
use crate::path::chunks::ChunkPool;
use crate::path::handshake::{InfoError, Joining};
use crate::path::state::PathState;
use crate::path::{PathEnd, PathKey, PathShared};
use crate::stats::{PathAuth, PathSnapshot, PathStage, micros, millis};

/// A shard that was given a connection of the path, and what it has reported.
#[derive(Debug)]
struct Part {
    shard: CoreIndex,
    reached: Option<EndReport>,
}

/// Connections that wait until the chunks of their path are registered.
#[derive(Debug, Default)]
pub(super) struct Held {
    connections: Vec<(ConnIndex, ConnRequest)>,
    /// Gone when nobody waits any more.
    wanted: Arc<()>,
}

impl Held {
    /// Gone when nobody waits any more.
    pub(super) fn wanted(&self) -> Weak<()> {
        Arc::downgrade(&self.wanted)
    }
}

#[derive(Debug)]
pub(super) struct Path {
    shared: Arc<PathShared>,
    state: PathState,
    recon_cnt: u16,
    /// Since its first connection.
    since: Instant,
    /// Since its connections are accepted, which its chunks have to be there for.
    accepted: Option<Instant>,
    joining: Option<Joining>,
    /// Set while its chunks are being registered.
    held: Option<Held>,
    heartbeat: Option<Heartbeat>,
    /// When it is to be looked at (`registry.rs`).
    timer: Option<Instant>,
    /// Until its client has proved who it is, where it has to.
    proving: Option<Proving>,
    announcer: Announcer,
    parts: Vec<Part>,
    /// Its address was reported to the listeners as known.
    known: bool,
    /// Fences to be answered when nothing of it begins any more.
    fenced_by: Vec<ReplyTo>,
}

impl Path {
    /// A path whose first connection has come; `held` if its chunks are being registered.
    pub(super) fn new(
        shared: Arc<PathShared>,
        recon_cnt: u16,
        (since, deadline): (Instant, Instant),
        held: Option<Held>,
    ) -> Self {
        Self {
            joining: Some(Joining::new(shared.origin.cid_num, deadline)),
            proving: shared.is_unproved().then(|| Proving::new(deadline)),
            shared,
            state: PathState::Connecting,
            recon_cnt,
            since,
            accepted: held.is_none().then_some(since),
            held,
            heartbeat: None,
            timer: None,
            announcer: Announcer::default(),
            parts: Vec::new(),
            known: false,
            fenced_by: Vec::new(),
        }
    }

    pub(super) fn shared(&self) -> &Arc<PathShared> {
        &self.shared
    }

    pub(super) fn key(&self) -> PathKey {
        self.shared.key
    }

    pub(super) fn state(&self) -> PathState {
        self.state
    }

    /// Since its connections are accepted; None while its chunks are being registered.
    pub(super) fn accepted(&self) -> Option<Instant> {
        self.accepted
    }

    /// Bytes of its chunks that count against the server's limit, those included that are being
    /// registered.
    pub(super) fn chunk_bytes(&self) -> u64 {
        match self.shared.chunks.get() {
            Some(pool) => pool.region().counted(),
            None if self.held.is_some() => ChunkPool::bytes(self.shared.session.limits) as u64,
            None => 0,
        }
    }

    /// Where its client is.
    pub(super) fn place(&self) -> Place {
        (self.shared.origin.provider, self.shared.origin.peer.ip().to_canonical())
    }

    /// Its place, if that is to be reported as known and was not: its session has opened an export
    /// and the handshake is over.
    pub(super) fn make_known(&mut self) -> Option<Place> {
        let due = !self.known && self.state == PathState::Connected && !self.is_unproved();
        self.known |= due;
        due.then(|| self.place())
    }

    /// Its place was reported as known.
    pub(super) fn is_known(&self) -> bool {
        self.known
    }

    /// True when it may carry requests of its session, and has chunks or is getting them.
    pub(super) fn has_chunks(&self) -> bool {
        let has = self.held.is_some() || self.shared.chunks.get().is_some();
        self.state.may_begin() && has && !self.is_unproved()
    }

    /// True when it has chunks or is getting them, whatever becomes of it, and its client is known.
    pub(super) fn has_memory(&self) -> bool {
        (self.held.is_some() || self.shared.chunks.get().is_some()) && !self.is_unproved()
    }

    /// True until its client has proved who it is, where it has to.
    pub(super) fn is_unproved(&self) -> bool {
        self.proving.is_some()
    }

    /// The proof of its client, until that is there.
    pub(super) fn proving(&self) -> Option<&Proving> {
        self.proving.as_ref()
    }

    /// The same, to go on with.
    pub(super) fn proving_mut(&mut self) -> Option<&mut Proving> {
        self.proving.as_mut()
    }

    /// Its client has proved who it is.
    pub(super) fn end_proving(&mut self) {
        self.proving = None;
    }

    /// True when a connection means this path, and something of it may still begin.
    pub(super) fn is_named(&self, conn: &ConnReq) -> bool {
        self.shared.origin.uuid == conn.path_uuid && self.state.may_begin()
    }

    /// True when a connection from there is of this connect of its path. Whoever knows the path's
    /// UUID can connect it too, from elsewhere.
    pub(super) fn is_connect(&self, conn: &ConnReq, peer: IpAddr) -> bool {
        self.recon_cnt == conn.recon_cnt && self.shared.origin.peer.ip() == peer
    }

    /// True when the other is a later connect of the same path.
    pub(super) fn is_older_than(&self, other: &Self) -> bool {
        let same = self.shared.origin.uuid == other.shared.origin.uuid;
        // Counts wrap: the nearer half is earlier.
        let ahead = other.recon_cnt.wrapping_sub(self.recon_cnt);
        same && (1..0x8000).contains(&ahead)
    }

    /// True when a FENCE of the client means it.
    pub(super) fn is_meant_by(&self, fence: &Fence) -> bool {
        self.shared.origin.uuid == fence.path
            && self.state.may_begin()
            && fence.covers(self.recon_cnt)
    }

    /// True when the client connects it again, which says that this one is dead.
    pub(super) fn is_replaced_by(&self, conn: &ConnReq) -> bool {
        let newer = conn.recon_cnt > self.recon_cnt && !rtrs_core::mutated!(OldPathKept);
        newer && self.state == PathState::Connected
    }

    /// A connection joins, which will live on a shard.
    pub(super) fn join(&mut self, conn: &ConnReq, shard: CoreIndex) -> Result<(), Refusal> {
        let joining = self.joining.as_mut().filter(|_| self.state == PathState::Connecting);
        let joining = joining.ok_or(Refusal::PathExists)?;
        joining.join(conn.cid, conn.cid_num).map_err(Refusal::Join)?;
        if !self.parts.iter().any(|part| part.shard == shard) {
            self.parts.push(Part { shard, reached: None });
        }
        Ok(())
    }

    /// Keeps a connection until the chunks are registered. Gives it back if they are, or if there
    /// will be none before INFO_REQ.
    pub(super) fn hold(&mut self, cid: ConnIndex, request: ConnRequest) -> Option<ConnRequest> {
        match &mut self.held {
            Some(held) => {
                held.connections.push((cid, request));
                None
            }
            None => Some(request),
        }
    }

    /// The chunks are registered, or cannot be: from now on its client can do its part, up to the
    /// deadline. None when the path ends: then it waits no more.
    pub(super) fn take_held(
        &mut self,
        (now, deadline): (Instant, Instant),
    ) -> Option<Vec<(ConnIndex, ConnRequest)>> {
        let held = self.held.take()?;
        self.accepted = Some(now);
        self.joining.iter_mut().for_each(|joining| joining.set_deadline(deadline));
        self.proving.iter_mut().for_each(|proving| proving.set_deadline(deadline));
        Some(held.connections)
    }

    /// INFO_REQ came, or something in its place. None when none is due.
    pub(super) fn admit(&self, bytes: &[u8]) -> Option<Result<Name, InfoError>> {
        let joining = self.joining.as_ref().filter(|_| self.state == PathState::Connecting)?;
        let held = self.held.as_ref().map_or(0, |held| held.connections.len());
        if held > 0 {
            return Some(Err(InfoError::Early(u16::try_from(held).unwrap_or(u16::MAX))));
        }
        Some(joining.admit(bytes))
    }

    /// INFO_REQ was accepted. Called before INFO_RSP goes out: requests may follow it at once, on
    /// any shard.
    pub(super) fn connected(&mut self) {
        self.joining = None;
        self.go(PathState::Connected);
    }

    /// INFO_RSP is on its way: heartbeats begin. Some: when to look at them.
    pub(super) fn serving(&mut self, heartbeat: Heartbeat) -> Option<Instant> {
        let deadline = heartbeat.deadline();
        (self.state == PathState::Connected).then(|| self.heartbeat = Some(heartbeat))?;
        Some(deadline)
    }

    /// The size of a device of its session has changed, or its export was removed: the client has
    /// to open it again. A path that does not serve yet, or whose client has not proved who it is,
    /// opens it later anyway.
    pub(super) fn announce(&mut self, device: DeviceId, out: &mut Outbox) {
        let takes = self.shared.origin.takes_changed && !rtrs_core::mutated!(ResizeUnsaid);
        if self.heartbeat.is_some() && takes && !self.is_unproved() {
            let due = self.announcer.changed(device);
            self.send_changed(due, out);
        }
    }

    /// The client has opened one of the session's `ids` devices again over this path, or was
    /// refused.
    pub(super) fn opened_again(&mut self, device: DeviceId, ids: u32, out: &mut Outbox) {
        while let Some(due) = self.announcer.answered(device, ids) {
            self.send_changed(Some(due), out);
        }
    }

    fn send_changed(&self, due: Option<DeviceId>, out: &mut Outbox) {
        let path = self.shared.key;
        due.into_iter()
            .for_each(|device| out.shard(CoreIndex(0), ShardMessage::Changed { path, device }));
    }

    pub(super) fn heartbeat_acked(&mut self, at: Instant) {
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.on_ack(at);
        }
    }

    /// The client announced its next heartbeat. That counts from a client whose session has opened
    /// an export. Some: when to look at the path next.
    pub(super) fn announced(&mut self, at: Instant, next: Duration) -> Option<Instant> {
        let takes = self.shared.session.has_opened() && !self.is_unproved();
        let heartbeat = self.heartbeat.as_mut().filter(|_| takes)?;
        heartbeat.announced(at, next);
        Some(heartbeat.deadline())
    }

    /// Somebody waits for what the path's session has: if its client is dead, that is to be known
    /// soon. Some: when to look at the path.
    pub(super) fn hurry(&mut self, now: Instant, out: &mut Outbox) -> Option<Instant> {
        let heartbeat = self.heartbeat.as_mut()?;
        heartbeat.on_traffic(self.shared.heard());
        if !heartbeat.hurry(now) {
            return None;
        }
        out.shard(CoreIndex(0), ShardMessage::Heartbeat { path: self.shared.key });
        Some(heartbeat.deadline())
    }

    /// When it is to be looked at.
    pub(super) fn timer(&self) -> Option<Instant> {
        self.timer
    }

    /// It is to be looked at then. Returns when it was to be before.
    pub(super) fn set_timer(&mut self, at: Instant) -> Option<Instant> {
        self.timer.replace(at)
    }

    /// It is looked at.
    pub(super) fn timer_over(&mut self) {
        self.timer = None;
    }

    /// Looks at the timers. Some: why the path has to end. Else: when to look again.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        out: &mut Outbox,
    ) -> (Option<PathEnd>, Option<Instant>) {
        let (mut end, mut next) = (None, None);
        if let Some(joining) = &self.joining {
            if joining.deadline() <= now && !rtrs_core::mutated!(HandshakeKept) {
                end = Some(PathEnd::HandshakeTimeout);
            } else {
                next = Some(joining.deadline());
            }
        }
        let proving = self.proving.as_ref().filter(|_| !self.state.is_ending());
        if let Some(deadline) = proving.map(Proving::deadline) {
            match deadline <= now {
                // What is missing is another thing before INFO_REQ.
                true => end = end.or(Some(PathEnd::Unproved)),
                false => next = earliest(next, Some(deadline)),
            }
        }
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.on_traffic(self.shared.heard());
            match heartbeat.poll(now) {
                HeartbeatAction::None => {}
                HeartbeatAction::Send => {
                    out.shard(CoreIndex(0), ShardMessage::Heartbeat { path: self.shared.key });
                }
                HeartbeatAction::Dead if rtrs_core::mutated!(ServerKeepsSilent) => {}
                HeartbeatAction::Dead => end = Some(PathEnd::Silent),
            }
            next = earliest(next, Some(heartbeat.deadline()));
        }
        (end, next)
    }

    /// Takes no new requests; each shard reports when those that run are answered.
    pub(super) fn finish(&mut self, out: &mut Outbox) {
        self.heartbeat = None;
        self.go(PathState::Finishing);
        for part in &self.parts {
            out.shard(part.shard, ShardMessage::Finish { path: self.shared.key });
        }
    }

    /// Begins the end, which is logged at level debug unless it `is_loud`. False when it has begun
    /// before.
    pub(super) fn close(&mut self, end: &PathEnd, is_loud: bool, out: &mut Outbox) -> bool {
        if matches!(self.state, PathState::Closing | PathState::Draining | PathState::Gone) {
            return false;
        }
        let (path, peer, state) = (self.shared.key, self.shared.origin.peer, self.state);
        match end {
            _ if !is_loud => tracing::debug!(%path, %peer, ?state, reason = %end, "a path ends"),
            // The peer can do nothing about it, and does not know the reason.
            PathEnd::Internal(_) | PathEnd::Unserved(_) => {
                tracing::warn!(%path, %peer, reason = %end, "a path ends");
            }
            _ => tracing::info!(%path, %peer, ?state, reason = %end, "a path ends"),
        }
        (self.joining, self.held, self.heartbeat) = (None, None, None);
        self.proving.iter_mut().for_each(Proving::end);
        self.go(PathState::Closing);
        for part in &self.parts {
            out.shard(part.shard, ShardMessage::Close { path, abrupt: end.is_abrupt() });
        }
        true
    }

    /// A shard reports. True when a path that finishes has nothing left to answer.
    pub(super) fn report(&mut self, shard: CoreIndex, report: EndReport) -> bool {
        for part in self.parts.iter_mut().filter(|part| part.shard == shard) {
            part.reached = part.reached.max(Some(report));
        }
        self.state == PathState::Finishing && self.have_all(EndReport::Finished)
    }

    /// True when all shards have reported that, or more.
    fn have_all(&self, report: EndReport) -> bool {
        self.parts.iter().all(|part| part.reached >= Some(report))
    }

    /// This request is answered when nothing of the path begins any more.
    pub(super) fn fence(&mut self, reply_to: ReplyTo) {
        self.fenced_by.push(reply_to);
    }

    /// Moves the end on as far as the shards have reported: the fences that are reached now, and
    /// whether nothing of the path is left.
    pub(super) fn advance(&mut self) -> (Vec<ReplyTo>, bool) {
        let mut fenced = Vec::new();
        if self.state == PathState::Closing && self.have_all(EndReport::Stopped) {
            self.go(PathState::Draining);
            fenced = mem::take(&mut self.fenced_by);
        }
        let drained = self.have_all(EndReport::Drained) || rtrs_core::mutated!(SessionGoneEarly);
        let gone = self.state == PathState::Draining && drained;
        if gone {
            self.go(PathState::Gone);
        }
        (fenced, gone)
    }

    /// The path as statistics show it.
    pub(super) fn snapshot(&self, now: Instant) -> PathSnapshot {
        let shared = &self.shared;
        PathSnapshot {
            path: shared.key.0,
            uuid: shared.origin.uuid.to_string(),
            state: PathStage::new(self.state, self.is_unproved()),
            transport: shared.origin.transport.to_owned(),
            cipher: shared.identity().cipher.map(str::to_owned),
            auth: match shared.identity() {
                _ if self.is_unproved() => Some(PathAuth::Pending),
                PeerIdentity { proof: None, .. } => None,
                PeerIdentity { cipher: None, .. } => Some(PathAuth::Signed),
                _ => Some(PathAuth::Tls),
            },
            peer: shared.origin.peer.to_string(),
            local: shared.origin.local.to_string(),
            connections: shared.origin.cid_num,
            fresh_keys: shared.fresh_keys,
            age_ms: millis(now.since(self.since)),
            heartbeat_us: self.heartbeat.as_ref().and_then(Heartbeat::rtt).map(micros),
            io: shared.counters.totals(),
        }
    }

    /// The path is gone: what all shards shared of it.
    pub(super) fn into_shared(self) -> Arc<PathShared> {
        self.shared
    }

    fn go(&mut self, to: PathState) {
        step(&mut self.state, to);
        self.shared.publish(to);
    }
}
