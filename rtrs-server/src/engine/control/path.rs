//! The control shard's view of one path: connections join, INFO_REQ is admitted, heartbeats are
//! monitored, and the shards report the progress of its shutdown.
//!
//! Every change of state follows the table of [`PathState`] and is published to the shards.

use std::mem;
use std::net::IpAddr;
use std::sync::Arc;

use rtrs_core::fabric::{ConnRequest, PeerIdentity};
use rtrs_core::ids::{ConnIndex, CoreIndex};
use rtrs_core::proto::{Heartbeat, HeartbeatAction, step};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{ConnReq, Fence, Name};

use super::announce::Announcer;
use super::handshake::{Handshake, Held};
use super::known::PeerAddress;
use super::path_shards::PathShards;
use super::proving::Proving;
use crate::engine::control::refusal::Refusal;
use crate::engine::device_table::DeviceId;
use crate::engine::message::{EndReport, Outbox, ReplyTo, ShardMessage};
use crate::path::chunks::ChunkPool;
use crate::path::state::PathState;
use crate::path::{InfoError, PathEnd, PathKey, PathShared};
use crate::stats::{PathAuth, PathSnapshot, PathStage, micros, millis};

#[derive(Debug)]
pub(super) struct Path {
    shared: Arc<PathShared>,
    state: PathState,
    recon_cnt: u16,
    /// Time of the path's first connection.
    since: Instant,
    pub(super) handshake: Handshake,
    heartbeat: Option<Heartbeat>,
    /// Time of the next check (`registry.rs`).
    timer: Option<Instant>,
    /// Authentication of the client; present until it is complete, if required.
    proving: Option<Proving>,
    announcer: Announcer,
    pub(super) shards: PathShards,
    /// Whether the client's address has been reported to the listeners as known.
    known: bool,
}

impl Path {
    /// Creates a path whose first connection arrived at `since`, and whose handshake must end by
    /// `deadline`. `held` is present if the path's chunks are being registered.
    pub(super) fn new(
        shared: Arc<PathShared>,
        recon_cnt: u16,
        since: Instant,
        deadline: Instant,
        held: Option<Held>,
    ) -> Self {
        Self {
            handshake: Handshake::new(shared.origin.cid_num, since, deadline, held),
            proving: shared.is_unproved().then(|| Proving::new(deadline)),
            shared,
            state: PathState::Connecting,
            recon_cnt,
            since,
            heartbeat: None,
            timer: None,
            announcer: Announcer::default(),
            shards: PathShards::default(),
            known: false,
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

    /// Bytes of the path's chunks that count against the server's limit, including chunks that are
    /// being registered.
    pub(super) fn chunk_bytes(&self) -> u64 {
        match self.shared.chunks.get() {
            Some(pool) => pool.region().counted(),
            None if self.handshake.is_held() => ChunkPool::bytes(self.shared.session.limits) as u64,
            None => 0,
        }
    }

    /// Provider and address of the client, if they have been reported to the listeners as known.
    pub(super) fn known_place(&self) -> Option<PeerAddress> {
        let origin = &self.shared.origin;
        self.known.then(|| (origin.provider, origin.peer.ip().to_canonical()))
    }

    /// Marks the client's address as known and returns it, if it was not known yet, the handshake
    /// is over and the client has authenticated.
    pub(super) fn make_known(&mut self) -> Option<PeerAddress> {
        if self.known || self.state != PathState::Connected || self.is_unproved() {
            return None;
        }
        self.known = true;
        self.known_place()
    }

    /// Whether the path has chunks or is waiting for them, in any state, and its client is known.
    pub(super) fn has_memory(&self) -> bool {
        (self.handshake.is_held() || self.shared.chunks.get().is_some()) && !self.is_unproved()
    }

    /// Whether the client must still authenticate.
    pub(super) fn is_unproved(&self) -> bool {
        self.proving.is_some()
    }

    /// Authentication of the client, until it is complete.
    pub(super) fn proving(&self) -> Option<&Proving> {
        self.proving.as_ref()
    }

    /// Mutable access to the authentication of the client.
    pub(super) fn proving_mut(&mut self) -> Option<&mut Proving> {
        self.proving.as_mut()
    }

    /// Ends the authentication of the client.
    pub(super) fn end_proving(&mut self) {
        self.proving = None;
    }

    /// Whether a connection belongs to this path, and the path may still begin new work.
    pub(super) fn is_named(&self, conn: &ConnReq) -> bool {
        self.shared.origin.uuid == conn.path_uuid && self.state.may_begin()
    }

    /// Whether a connection from `peer` belongs to this connection attempt of its path. Anyone who
    /// knows the path's UUID could also use it from elsewhere.
    pub(super) fn is_connect(&self, conn: &ConnReq, peer: IpAddr) -> bool {
        self.recon_cnt == conn.recon_cnt && self.shared.origin.peer.ip() == peer
    }

    /// Whether the other path is a later connection attempt of the same path.
    pub(super) fn is_older_than(&self, other: &Self) -> bool {
        let same = self.shared.origin.uuid == other.shared.origin.uuid;
        // Counters wrap: an attempt is later if it is ahead by less than half the range.
        let ahead = other.recon_cnt.wrapping_sub(self.recon_cnt);
        same && (1..0x8000).contains(&ahead)
    }

    /// Whether a FENCE from the client applies to this path.
    pub(super) fn is_covered_by(&self, fence: &Fence) -> bool {
        self.shared.origin.uuid == fence.path
            && self.state.may_begin()
            && fence.covers(self.recon_cnt)
    }

    /// Whether the client is reconnecting the path, which means this connection attempt is dead.
    pub(super) fn is_replaced_by(&self, conn: &ConnReq) -> bool {
        let newer = conn.recon_cnt > self.recon_cnt && !rtrs_core::mutated!(OldPathKept);
        newer && self.state == PathState::Connected
    }

    /// Checks whether a connection can be added.
    pub(super) fn check_join(&self, conn: &ConnReq) -> Result<(), Refusal> {
        if self.state != PathState::Connecting {
            return Err(Refusal::PathExists);
        }
        self.handshake.check_join(conn)
    }

    /// Adds a connection, which is assigned to `shard`.
    pub(super) fn join(&mut self, conn: &ConnReq, shard: CoreIndex) -> Result<(), Refusal> {
        self.check_join(conn)?;
        self.handshake.join(conn)?;
        self.shards.add(shard);
        Ok(())
    }

    /// Ends the wait for the registration of the chunks, successful or not: the client then has
    /// until the deadline to continue. Returns None if the path is ending and no longer waits.
    pub(super) fn take_held(
        &mut self,
        now: Instant,
        deadline: Instant,
    ) -> Option<Vec<(ConnIndex, ConnRequest)>> {
        let held = self.handshake.take_held(now, deadline)?;
        self.proving.iter_mut().for_each(|proving| proving.set_deadline(deadline));
        Some(held)
    }

    /// Processes INFO_REQ, or another message sent in its place. Returns None if none is expected.
    pub(super) fn admit(&self, bytes: &[u8]) -> Option<Result<Name, InfoError>> {
        (self.state == PathState::Connecting).then(|| self.handshake.admit(bytes))?
    }

    /// Reports to the client why INFO_REQ is refused, if the reason has an errno and the client
    /// supports it; the client then closes the path. Returns false if the server must close it.
    pub(super) fn refuse_info(&mut self, why: &PathEnd, out: &mut Outbox) -> bool {
        let takes = self.shared.origin.takes_info_refusals;
        let Some(errno) = why.info_errno().filter(|_| takes && self.handshake.refuse(why)) else {
            return false;
        };
        let path = self.shared.key;
        out.shard(CoreIndex(0), ShardMessage::RefuseInfo { path, errno });
        true
    }

    /// Records that INFO_REQ was accepted. Called before INFO_RSP is sent: requests may follow
    /// INFO_RSP immediately, on any shard.
    pub(super) fn connected(&mut self) {
        self.handshake.end();
        self.go(PathState::Connected);
    }

    /// Starts the heartbeat when INFO_RSP is sent. Returns the time of the next check.
    pub(super) fn serving(&mut self, heartbeat: Heartbeat) -> Option<Instant> {
        let deadline = heartbeat.deadline();
        (self.state == PathState::Connected).then(|| self.heartbeat = Some(heartbeat))?;
        Some(deadline)
    }

    /// Announces that a device has changed size or been removed, so the client must reopen it.
    /// Nothing is sent on a path that is not serving yet or whose client has not authenticated,
    /// because that client will open the device later anyway.
    pub(super) fn announce(&mut self, device: DeviceId, out: &mut Outbox) {
        let takes = self.shared.origin.takes_changed && !rtrs_core::mutated!(ResizeUnannounced);
        if self.heartbeat.is_some() && takes && !self.is_unproved() {
            let due = self.announcer.changed(device);
            self.send_changed(due, out);
        }
    }

    /// Records that the client reopened a device over this path, or was refused. `ids` is the
    /// number of device IDs that the session has used.
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

    /// Records the client's announcement of its next heartbeat, if its session has opened an
    /// export. Returns the time of the next check of the path.
    pub(super) fn announced(&mut self, at: Instant, next: Duration) -> Option<Instant> {
        let takes = self.shared.session.has_opened() && !self.is_unproved();
        let heartbeat = self.heartbeat.as_mut().filter(|_| takes)?;
        heartbeat.announced(at, next);
        Some(heartbeat.deadline())
    }

    /// Brings forward the check for a dead client, because another client is waiting for a resource
    /// of the session. Returns the time of the next check of the path.
    pub(super) fn hurry(&mut self, now: Instant, out: &mut Outbox) -> Option<Instant> {
        let heartbeat = self.heartbeat.as_mut()?;
        heartbeat.on_traffic(self.shared.heard());
        if !heartbeat.hurry(now) {
            return None;
        }
        out.shard(CoreIndex(0), ShardMessage::Heartbeat { path: self.shared.key });
        Some(heartbeat.deadline())
    }

    /// Time of the next check.
    pub(super) fn timer(&self) -> Option<Instant> {
        self.timer
    }

    /// Sets the time of the next check; None if no check is due. Returns the previous time.
    pub(super) fn set_timer(&mut self, at: Option<Instant>) -> Option<Instant> {
        mem::replace(&mut self.timer, at)
    }

    /// Checks the timers. Returns the reason if the path must end, and otherwise the time of the
    /// next check.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        out: &mut Outbox,
    ) -> (Option<PathEnd>, Option<Instant>) {
        let (mut end, mut next) = (None, None);
        if let Some(deadline) = self.handshake.deadline() {
            if deadline <= now && !rtrs_core::mutated!(HandshakeKept) {
                end = Some(PathEnd::HandshakeTimeout);
            } else {
                next = Some(deadline);
            }
        }
        let proving = self.proving.as_ref().filter(|_| !self.state.is_ending());
        if let Some(deadline) = proving.map(Proving::deadline) {
            match deadline <= now {
                // Before INFO_REQ arrives, the proof is not what the path is waiting for.
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

    /// Stops accepting requests; each shard reports when its running requests have been answered.
    pub(super) fn finish(&mut self, out: &mut Outbox) {
        self.heartbeat = None;
        self.go(PathState::Finishing);
        for shard in self.shards.iter() {
            out.shard(shard, ShardMessage::Finish { path: self.shared.key });
        }
    }

    /// Starts closing the path, logged at debug level unless `is_loud`. Returns false if the path
    /// is already closing.
    pub(super) fn close(&mut self, end: &PathEnd, is_loud: bool, out: &mut Outbox) -> bool {
        if matches!(self.state, PathState::Closing | PathState::Draining | PathState::Gone) {
            return false;
        }
        let (path, peer, state) = (self.shared.key, self.shared.origin.peer, self.state);
        match end {
            _ if !is_loud => tracing::debug!(%path, %peer, ?state, reason = %end, "path closing"),
            // The peer cannot mend these causes, so it does not receive the reason.
            PathEnd::Internal(_) | PathEnd::Unserved(_) => {
                tracing::warn!(%path, %peer, reason = %end, "path closing");
            }
            _ => tracing::info!(%path, %peer, ?state, reason = %end, "path closing"),
        }
        self.handshake.cancel();
        self.heartbeat = None;
        self.proving.iter_mut().for_each(Proving::end);
        self.go(PathState::Closing);
        for shard in self.shards.iter() {
            out.shard(shard, ShardMessage::Close { path, abrupt: end.is_abrupt() });
        }
        true
    }

    /// Processes a shard's report. Returns true if a finishing path has nothing left to answer.
    pub(super) fn report(&mut self, shard: CoreIndex, report: EndReport) -> bool {
        self.shards.reported(shard, report);
        self.state == PathState::Finishing && self.shards.have_all(EndReport::Finished)
    }

    /// Advances the shutdown as far as the shards' reports allow. Returns the fences that are now
    /// complete, and whether nothing of the path remains.
    pub(super) fn advance(&mut self) -> (Vec<ReplyTo>, bool) {
        let mut fenced = Vec::new();
        if self.state == PathState::Closing && self.shards.have_all(EndReport::Stopped) {
            self.go(PathState::Draining);
            fenced = self.shards.take_fenced();
        }
        let drained =
            self.shards.have_all(EndReport::Drained) || rtrs_core::mutated!(SessionReleasedEarly);
        let gone = self.state == PathState::Draining && drained;
        if gone {
            self.go(PathState::Gone);
        }
        (fenced, gone)
    }

    /// State of the path for statistics.
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

    /// Returns the state that all shards shared, after the path has ended.
    pub(super) fn into_shared(self) -> Arc<PathShared> {
        self.shared
    }

    fn go(&mut self, to: PathState) {
        step(&mut self.state, to);
        self.shared.publish(to);
    }
}
