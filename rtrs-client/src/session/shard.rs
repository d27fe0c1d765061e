//! A core's part of a session: every IO passes here and nowhere else.
//!
//! An IO becomes a *parent* row; a parent is issued as one or more *requests*, each holding a
//! permit (which is a server chunk) and travelling over this core's connection of the path that
//! the policy picks. Parents that find no permit or no path wait in order. All tables are made
//! once, when the server's bounds are known; issuing and finishing a request allocates nothing.
//!
//! What was in flight on a path that died is sent again on another (`replay.rs`).
//!
//! Read targets are opened to the server through a window per permit, under a fresh key for each
//! request and closed again when the answer is in, so a late or lying server cannot write into
//! memory that moved on.

use std::collections::VecDeque;
use std::sync::Arc;

use rtrs_core::block::{Completion, Geometry, Io, IoOp};
use rtrs_core::fabric::{
    CloseReason, ConnectFailure, Fabric, FabricError, WcStatus, WorkCompletion,
};
use rtrs_core::ids::{CoreIndex, PathId, PermitId, QpNum};
use rtrs_core::losses::Losses;
use rtrs_core::mem::Region;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant};

use super::cache::FlushMark;
use super::permits::{Permits, share};
use super::policy::{Candidate, Chooser};
use super::probe::{LateProbe, Probe};
use super::replay::{Replays, Stranded};
use super::zeroes::Zeroes;
use super::{CacheWatch, Connect, Granted, OpenDevice, SessionConfig, ToHome, ToShard};
use crate::path::handshake::check_accept;
use crate::path::io::{Answer, Request};
use crate::path::shard::{PathEvent, PathShard};
use crate::stats::ShardStats;

/// IOs a core takes before it says that it is full.
const PARENTS: usize = 1024;
/// How often running requests are held against the IO timeout.
pub(super) const SWEEP: Duration = Duration::from_millis(250);
/// Least time of a request, however old its IO is.
const LAST_TRY: Duration = Duration::from_secs(1);

/// An IO that was submitted and not yet finished.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) io: Io,
    /// Bytes already issued.
    issued: u32,
    /// Requests in flight.
    pending: u32,
    /// Stands in the queue of those that wait to be issued.
    queued: bool,
    status: IoStatus,
    pub(super) submitted: Instant,
    /// Of a flush.
    mark: FlushMark,
}

/// What holds a permit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) parent: u32,
    pub(super) path: PathId,
    /// Where in the IO it begins.
    pub(super) at: u32,
    pub(super) len: u32,
    pub(super) sent: Instant,
    /// The answer, while the read target's window is still being closed.
    pub(super) answered: Option<IoStatus>,
    /// When it was first sent, as a number that only grows.
    pub(super) turn: u64,
    /// Times it was sent.
    pub(super) tries: u16,
    /// Set when the connection it was sent on is gone.
    pub(super) stranded: Option<Stranded>,
}

/// One core's part of a session.
#[derive(Debug)]
pub(crate) struct ShardSession {
    pub(super) core: CoreIndex,
    pub(super) config: Arc<SessionConfig>,
    pub(super) granted: Option<Granted>,
    device: Option<Arc<OpenDevice>>,
    /// Geometry shown to submitters; stays while the device is closed for a reconnect.
    pub(super) geometry: Geometry,
    pub(super) permits: Permits,
    pub(super) rows: Vec<Option<Row>>,
    pub(super) parents: Vec<Option<Parent>>,
    parents_free: Vec<u32>,
    pub(super) waiting: VecDeque<u32>,
    pub(super) replays: Replays,
    /// No path for too long: what comes ends at once.
    pub(super) failing: bool,
    pub(super) paths: Vec<PathShard>,
    pub(super) chooser: Chooser,
    pub(super) completed: VecDeque<Completion>,
    regions: Vec<Arc<Region>>,
    zeroes: Zeroes,
    pub(super) probe: Option<Probe>,
    pub(super) late_probes: Vec<LateProbe>,
    cache: Option<Arc<CacheWatch>>,
    /// Somebody else tells the device's users of losses.
    untold: bool,
    inflight: usize,
    next_sweep: Instant,
    /// Late sweeps in a row.
    pub(super) lates: u32,
    pub(super) now: Instant,
    pub(super) stats: ShardStats,
}

impl ShardSession {
    pub(crate) fn new(core: CoreIndex, config: Arc<SessionConfig>) -> Self {
        let paths =
            (0u16..).zip(&config.paths).map(|(id, t)| PathShard::new(PathId(id), t.clone()));
        Self {
            core,
            granted: None,
            device: None,
            geometry: Geometry { read_only: true, ..Geometry::plain(0) },
            permits: Permits::new(0..0),
            rows: Vec::new(),
            parents: (0..PARENTS).map(|_| None).collect(),
            parents_free: (0..PARENTS as u32).rev().collect(),
            waiting: VecDeque::with_capacity(PARENTS),
            replays: Replays::new(config.paths.len()),
            failing: false,
            paths: paths.collect(),
            chooser: Chooser::new(config.policy, config.paths.len()),
            completed: VecDeque::with_capacity(PARENTS),
            regions: Vec::new(),
            zeroes: Zeroes::default(),
            probe: None,
            late_probes: Vec::new(),
            cache: None,
            untold: false,
            inflight: 0,
            next_sweep: Instant::ZERO,
            lates: 0,
            now: Instant::ZERO,
            stats: ShardStats::new(config.paths.len()),
            config,
        }
    }

    /// A message of the home core.
    pub(crate) fn handle_message(
        &mut self,
        now: Instant,
        message: ToShard,
        fabrics: &mut [Box<dyn Fabric>],
        out: &mut Vec<ToHome>,
    ) {
        self.now = now;
        match message {
            ToShard::Granted(granted) => self.on_granted(granted),
            ToShard::Connect(connect) => {
                let Connect { path, epoch, cid, .. } = *connect;
                let started = self.paths[path.index()].connect(
                    now,
                    &connect,
                    self.permits.range(),
                    &self.regions,
                    self.config.connect_timeout,
                    fabrics,
                );
                if let Err(error) = started {
                    let reason = CloseReason::Lost(error.to_string());
                    let failure = ConnectFailure::Failed(reason);
                    out.push(ToHome::Failed { path, epoch, cid, failure });
                }
            }
            ToShard::PathUp { path, epoch, chunks, cache_id } => {
                self.failing &= rtrs_core::mutated!(StaysGivenUp);
                let range = self.permits.range();
                self.paths[path.index()].up(epoch, &chunks, range, cache_id);
            }
            ToShard::Cache(cache) => self.cache = Some(cache),
            ToShard::Disconnect { path, epoch, in_order } => {
                self.paths[path.index()].disconnect(now, epoch, in_order, fabrics);
            }
            ToShard::Open(device) => {
                self.geometry = device.geometry.clone();
                self.device = Some(device);
                let zeroes = self.zeroes.prepare(&self.geometry);
                let known = zeroes.and_then(|new| new.map_or(Ok(()), |r| self.attach_region(&r)));
                if let Err(error) = known {
                    tracing::error!("no memory for zeroes: {error}");
                }
            }
            ToShard::Closed => self.device = None,
            ToShard::Fenced { path, epoch } => self.on_fenced(path, epoch),
            ToShard::GiveUp => self.give_up(),
            ToShard::AddPath { path, target } => self.on_add_path(path, *target),
            ToShard::Retire { path, epoch } => self.paths[path.index()].retire(epoch),
            ToShard::Policy(policy) => self.chooser.policy = policy,
        }
    }

    fn on_granted(&mut self, granted: Granted) {
        if self.granted == Some(granted) {
            return;
        }
        if self.granted.is_none() {
            let own = granted.fence_permit(&self.config).0 + 1;
            let depth = granted.depth(&self.config);
            let range = share(depth, own, self.config.cores, self.core);
            self.rows = vec![None; usize::from(range.end - range.start)];
            self.permits = Permits::new(range);
        }
        self.granted = Some(granted);
    }

    /// A queue pair of this core got ready. True when it was one of ours.
    pub(crate) fn handle_established(
        &mut self,
        now: Instant,
        provider: usize,
        qp: QpNum,
        private_data: &[u8],
        fabric: &mut dyn Fabric,
        out: &mut Vec<ToHome>,
    ) -> bool {
        let Some(path) = self.path_of(provider, qp) else { return false };
        if let Err(misdeed) = check_accept(private_data) {
            path.abort(now, CloseReason::Protocol(misdeed), fabric);
            return true;
        }
        let (path_id, epoch, cid) = path.established();
        out.push(ToHome::Up { path: path_id, epoch, cid });
        true
    }

    /// A connection attempt failed, or a connection ended. True when it was one of ours.
    pub(crate) fn handle_closed(
        &mut self,
        now: Instant,
        provider: usize,
        qp: QpNum,
        end: ConnectionEnd,
        out: &mut Vec<ToHome>,
    ) -> bool {
        self.now = now;
        let Some(path) = self.path_of(provider, qp) else { return false };
        let (path, epoch, cid, why) = path.closed();
        self.chooser.paces.forget(path);
        // Nothing of this connection can touch memory any more. What was answered ends here, the
        // rest goes to another path.
        for index in 0..self.rows.len() {
            let Some(row) = self.rows[index].filter(|row| row.is_on(path)) else { continue };
            match row.answered {
                Some(status) => self.finish_row(index, status),
                None if self.failing => self.finish_row(index, IoStatus::Aborted),
                None => self.strand(index, epoch),
            }
        }
        out.push(match end {
            ConnectionEnd::Failed(failure) => ToHome::Failed { path, epoch, cid, failure },
            ConnectionEnd::Closed(reason) => {
                let reason = match (reason, why) {
                    (CloseReason::Local, Some(why)) => why,
                    (reason, _) => reason,
                };
                ToHome::Closed { path, epoch, cid, reason }
            }
        });
        self.end_probe(path, epoch);
        true
    }

    fn path_of(&mut self, provider: usize, qp: QpNum) -> Option<&mut PathShard> {
        self.paths.iter_mut().find(|p| p.is(provider, qp))
    }

    /// A completion of this core. True when it was one of ours.
    pub(crate) fn handle_completion(
        &mut self,
        now: Instant,
        provider: usize,
        wc: &WorkCompletion,
        fabric: &mut dyn Fabric,
    ) -> bool {
        self.now = now;
        let Some(index) = self.paths.iter().position(|p| p.is(provider, wc.qp)) else {
            return false;
        };
        let path = &mut self.paths[index];
        if wc.status != WcStatus::Success {
            // The provider is about to report the end of the connection; rows wait for that.
            return true;
        }
        match path.on_completion(now, wc, fabric) {
            Ok(PathEvent::Nothing) => {}
            Ok(PathEvent::Answer(answer)) => self.on_answer(answer, index, fabric),
            Ok(PathEvent::Revoked(permit)) => self.on_revoked(permit, index),
            Err(misdeed) => path.abort(now, CloseReason::Protocol(misdeed), fabric),
        }
        true
    }

    fn row_index(&self, permit: PermitId, path: usize) -> Option<usize> {
        let range = self.permits.range();
        if !range.contains(&permit.0) {
            tracing::warn!("answer for permit {permit}, which is not of this connection");
            return None;
        }
        let index = usize::from(permit.0 - range.start);
        let row = self.rows[index]?;
        (row.stranded.is_none() && row.path.index() == path).then_some(index)
    }

    fn on_answer(&mut self, answer: Answer, path: usize, fabric: &mut dyn Fabric) {
        let is_probe = |probe: &mut Probe| probe.path == path && probe.permit == answer.permit;
        if let Some(probe) = self.probe.take_if(is_probe) {
            return self.permits.give(probe.permit);
        }
        let Some(index) = self.row_index(answer.permit, path) else { return };
        let Some(row) = self.rows[index].as_mut() else { return };
        if row.answered.is_some() {
            return;
        }
        let (len, took) = (row.len, self.now.since(row.sent));
        match self.paths[path].close_window(answer.permit, fabric) {
            Ok(true) => self.finish_row(index, answer.status),
            Ok(false) => row.answered = Some(answer.status),
            Err(error) => {
                let what = format!("window of permit {} did not close: {error}", answer.permit);
                row.answered = Some(answer.status);
                self.paths[path].abort(self.now, CloseReason::Lost(what), fabric);
            }
        }
        self.stats.request_done(path, len, answer.status, took);
        self.on_pace(path, took);
    }

    fn on_revoked(&mut self, permit: PermitId, path: usize) {
        let Some(index) = self.row_index(permit, path) else { return };
        if let Some(status) = self.rows[index].and_then(|row| row.answered) {
            self.finish_row(index, status);
        }
    }

    /// The permit of a row.
    pub(super) fn permit_of(&self, index: usize) -> PermitId {
        PermitId(self.permits.range().start + u16::try_from(index).unwrap_or(0))
    }

    pub(super) fn finish_row(&mut self, index: usize, status: IoStatus) {
        let Some(row) = self.rows[index].take() else { return };
        if row.stranded.is_none() {
            self.paths[row.path.index()].inflight -= 1;
        }
        self.permits.give(self.permit_of(index));
        let Some(parent) = self.parents[row.parent as usize].as_mut() else { return };
        parent.pending -= 1;
        if let Some(cache) = &self.cache {
            let life = self.paths[row.path.index()].cache_id();
            match status {
                IoStatus::Ok => cache.done(self.core, &parent.io, parent.mark, life),
                status => cache.failed(&parent.io, status),
            }
        }
        if !status.is_ok() && parent.status.is_ok() && !rtrs_core::mutated!(RequestErrorDropped) {
            parent.status = status;
        }
        if !parent.status.is_ok() && std::mem::take(&mut parent.queued) {
            // An error in one part ends the rest of it.
            self.waiting.retain(|&i| i != row.parent);
        }
        self.finish_parent(row.parent);
    }

    /// Completes a parent when nothing of it is outstanding.
    fn finish_parent(&mut self, index: u32) {
        let Some(parent) = self.parents[index as usize].as_ref() else { return };
        let all_issued = parent.issued >= parent.io.len.max(1) || !parent.status.is_ok();
        let early = rtrs_core::mutated!(FirstRequestEnds) && parent.pending > 0;
        if !early && (parent.pending > 0 || !all_issued) {
            return;
        }
        let Some(mut parent) = self.parents[index as usize].take() else { return };
        if let (IoOp::Flush, Some(cache), false) = (parent.io.op, &self.cache, self.untold) {
            parent.status = cache.tell(parent.mark, parent.status);
        }
        debug_assert!(!parent.queued, "a finished IO waits for nothing");
        self.parents_free.push(index);
        self.inflight -= 1;
        self.stats.io_done(&parent.io, parent.status, self.now.since(parent.submitted));
        self.completed.push_back(Completion { tag: parent.io.tag, status: parent.status });
    }

    /// From now on whoever asks tells the device's users of losses.
    pub(super) fn take_losses(&mut self) -> Option<Arc<Losses>> {
        let losses = self.cache.as_ref()?.losses();
        self.untold = true;
        Some(losses)
    }

    pub(super) fn attach_region(&mut self, region: &Arc<Region>) -> std::io::Result<()> {
        if !self.regions.iter().any(|r| r.id() == region.id()) {
            let range = self.permits.range();
            for path in &mut self.paths {
                path.attach_region(region, range.clone())
                    .map_err(|e| std::io::Error::other(e.to_string()))?;
            }
            self.regions.push(Arc::clone(region));
        }
        Ok(())
    }

    pub(super) fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight + self.completed.len() >= PARENTS {
            return Err(io);
        }
        let Some(index) = self.parents_free.pop() else { return Err(io) };
        let mut io = self.zeroes.translate(&self.geometry, io);
        let mut status = self.geometry.check(&io);
        let mut mark = FlushMark::default();
        if self.failing && status.is_ok() {
            status = IoStatus::TimedOut;
        }
        if io.op == IoOp::Flush {
            // It has no range, whatever the submitter says.
            (io.offset, io.len, io.buf) = (0, 0, None);
            if let Some(cache) = &self.cache {
                cache.submitted(&mut mark, self.now);
            }
        }
        self.inflight += 1;
        self.parents[index as usize] = Some(Parent {
            io,
            issued: 0,
            pending: 0,
            queued: status.is_ok(),
            status,
            submitted: self.now,
            mark,
        });
        if status.is_ok() {
            self.waiting.push_back(index);
        } else {
            self.finish_parent(index);
        }
        Ok(())
    }

    /// Issues what waits as far as permits and paths allow. True when anything was issued or
    /// finished.
    pub(crate) fn pump(
        &mut self,
        now: Instant,
        fabrics: &mut [Box<dyn Fabric>],
        out: &mut Vec<ToHome>,
    ) -> bool {
        self.now = now;
        self.tell_retired(out);
        let mut any = self.sweep(now, fabrics);
        let (Some(granted), Some(device)) = (self.granted, self.device.clone()) else {
            return any;
        };
        any |= self.pump_replays(&granted, &device, fabrics);
        while let Some(&index) = self.waiting.front() {
            if self.permits.available() == 0 {
                break;
            }
            let Some(path) = self.chooser.choose(self.now, candidates(&self.paths)) else { break };
            let Some(permit) = self.permits.take() else { break };
            match self.issue(index, path, permit, &granted, &device, fabrics) {
                Ok(()) => any = true,
                Err(FabricError::QpState | FabricError::QueueFull) => {
                    self.permits.give(permit);
                    self.abandon_path(path, fabrics);
                    any = true;
                }
                Err(error) => {
                    self.permits.give(permit);
                    tracing::error!("request could not be posted: {error}");
                    self.fail_parent(index, IoStatus::Io);
                    any = true;
                }
            }
        }
        any
    }

    /// Issues the next part of a parent with a permit on a path.
    fn issue(
        &mut self,
        index: u32,
        path: PathId,
        permit: PermitId,
        granted: &Granted,
        device: &OpenDevice,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> Result<(), FabricError> {
        let Some(parent) = self.parents[index as usize].as_mut() else { return Ok(()) };
        if let (IoOp::Flush, Some(cache)) = (parent.io.op, &self.cache) {
            cache.sent(&mut parent.mark);
        }
        let io = &parent.io;
        if io.op == IoOp::WriteZeroes && !device.geometry.fast_zero {
            // It waited while another server took this one's place.
            return Err(FabricError::Unsupported("write zeroes at this server"));
        }
        let left = io.len - parent.issued;
        let part = match io.op {
            IoOp::Read | IoOp::Write => {
                part_len(left, granted.max_io_size, device.geometry.logical_block)
            }
            IoOp::Flush => 0,
            IoOp::Discard | IoOp::WriteZeroes => left,
        };
        let at = parent.issued;
        let request = request_of(io, (at, part), permit, device);
        let target = &mut self.paths[path.index()];
        let provider = target.provider();
        target.post(request, granted, fabrics[provider].as_mut())?;
        target.inflight += 1;
        parent.issued += part.max(u32::from(io.op == IoOp::Flush));
        parent.pending += 1;
        if parent.issued >= parent.io.len.max(1) {
            parent.queued = false;
            self.waiting.pop_front();
        }
        let row = usize::from(permit.0 - self.permits.range().start);
        debug_assert!(self.rows[row].is_none(), "permit {permit} is in use");
        self.rows[row] = Some(Row {
            parent: index,
            path,
            at,
            len: part,
            sent: self.now,
            answered: None,
            turn: self.replays.next_turn(),
            tries: 1,
            stranded: None,
        });
        self.stats.request_issued(path.index());
        Ok(())
    }

    /// A path that takes no request is no good any more: ends it.
    pub(super) fn abandon_path(&mut self, path: PathId, fabrics: &mut [Box<dyn Fabric>]) {
        let path = &mut self.paths[path.index()];
        let provider = path.provider();
        let why = CloseReason::Lost("no request can be posted".into());
        path.abort(self.now, why, fabrics[provider].as_mut());
    }

    /// Ends what is over its time: requests by ending their path, waiting IO with an error.
    fn sweep(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) -> bool {
        if now < self.next_sweep {
            return false;
        }
        let due = std::mem::replace(&mut self.next_sweep, now + SWEEP);
        if self.came_late(now, due) {
            return false;
        }
        let bound = self.config.io_timeout;
        let age_max = self.config.no_path.io_age_max(bound);
        let mut any = false;
        for index in 0..self.rows.len() {
            let Some(row) = self.rows[index] else { continue };
            let parent = self.parents[row.parent as usize].as_ref();
            let age = parent.map_or(Duration::ZERO, |parent| row.sent.since(parent.submitted));
            // What the whole IO has left, and a moment in any case.
            let left = age_max.map_or(bound, |max| max.saturating_sub(age).max(LAST_TRY));
            if row.stranded.is_none() && now.since(row.sent) >= bound.min(left) {
                let path = &mut self.paths[row.path.index()];
                let provider = path.provider();
                path.abort(now, CloseReason::TimedOut, fabrics[provider].as_mut());
                any = true;
            }
        }
        any |= self.look_at_silence(now, fabrics);
        let Some(age_max) = age_max else { return any };
        any |= self.sweep_replays(now, age_max);
        while let Some(&index) = self.waiting.front() {
            let Some(parent) = self.parents[index as usize].as_ref() else { break };
            if now.since(parent.submitted) < age_max {
                break;
            }
            self.fail_parent(index, IoStatus::TimedOut);
            any = true;
        }
        any
    }

    /// Ends a waiting parent with an error, as soon as its requests in flight are back.
    pub(super) fn fail_parent(&mut self, index: u32, status: IoStatus) {
        if let Some(parent) = self.parents[index as usize].as_mut() {
            parent.status = status;
            if std::mem::take(&mut parent.queued) {
                self.waiting.retain(|&i| i != index);
            }
        }
        self.finish_parent(index);
    }

    /// When `pump` wants to be called even if nothing happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        (self.inflight > 0).then_some(self.next_sweep)
    }

    /// IOs taken and not yet finished.
    pub(crate) fn inflight(&self) -> usize {
        self.inflight
    }

    /// True when completions wait to be reaped.
    pub(crate) fn has_completions(&self) -> bool {
        !self.completed.is_empty()
    }

    /// Counters of this core.
    pub(crate) fn stats(&self) -> &ShardStats {
        &self.stats
    }

    /// Permits that requests hold.
    pub(crate) fn permits_held(&self) -> usize {
        self.rows.iter().flatten().count()
    }

    /// Our own laws, held in tests and in the simulator.
    pub(crate) fn check(&self) {
        let rows = self.rows.iter().flatten().count();
        let taken = rows + usize::from(self.probe.is_some()) + self.late_probes.len();
        assert_eq!(taken + self.permits.available(), self.rows.len(), "permits all accounted for");
        let parents = self.parents.iter().flatten().count();
        assert_eq!(parents, self.inflight);
        assert_eq!(parents + self.parents_free.len(), PARENTS);
        let pending: u32 = self.parents.iter().flatten().map(|p| p.pending).sum();
        assert_eq!(pending as usize, rows);
        let queued = self.parents.iter().flatten().filter(|p| p.queued).count();
        assert_eq!(queued, self.waiting.len(), "what waits stands in the queue once");
        for &index in &self.waiting {
            let parent = self.parents[index as usize].as_ref().expect("only live IO waits");
            assert!(parent.queued && parent.status.is_ok());
        }
        self.check_replays();
        for path in &self.paths {
            let mine = self.rows.iter().flatten().filter(|r| r.is_on(path.id())).count();
            assert_eq!(path.inflight as usize, mine);
        }
    }
}

impl Row {
    /// In flight on this path.
    pub(super) fn is_on(&self, path: PathId) -> bool {
        self.path == path && self.stranded.is_none()
    }
}

/// The request for `len` bytes of an IO from `at` on.
pub(super) fn request_of(
    io: &Io,
    (at, len): (u32, u32),
    permit: PermitId,
    device: &OpenDevice,
) -> Request {
    let buf = io.buf.as_ref().and_then(|buf| buf.slice(at as usize, len as usize));
    let offset = io.offset + u64::from(at);
    let (device_id, op, flags) = (device.device_id, io.op, io.flags);
    Request { permit, device_id, op, flags, offset, len, buf }
}

pub(super) fn candidates(paths: &[PathShard]) -> impl Iterator<Item = Candidate> + Clone {
    paths.iter().filter(|p| p.takes_io()).map(|p| Candidate {
        path: p.id(),
        inflight: p.inflight,
        latency_ns: p.latency_ns(),
    })
}

/// Length of the next request of `left` bytes when one carries `most`: equal parts, so that a
/// request just over the limit does not leave a tiny one behind.
fn part_len(left: u32, most: u32, block: u32) -> u32 {
    let block = block.max(1);
    if left <= most {
        return left;
    }
    let grain = if most >= 8192 { block.max(4096) } else { block };
    let part = left.div_ceil(left.div_ceil(most)).next_multiple_of(grain);
    part.min(most / block * block)
}

/// How a connection of this core ended.
#[derive(Debug)]
pub(crate) enum ConnectionEnd {
    /// It never came about.
    Failed(ConnectFailure),
    /// It was up and ended.
    Closed(CloseReason),
}
