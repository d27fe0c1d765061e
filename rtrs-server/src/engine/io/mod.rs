//! One core's part of every session: its connections, the requests that came over them, its
//! devices. Every IO passes here and nothing on its way allocates.
//!
//! Rows: a path has a row on each core that has a connection of it, a connection has a row in
//! the core's table, and a path's row has one request row per permit, made with the first request
//! the path sends to this core. Work request ids carry the connection's row, so that a completion
//! finds its place without a search.
//!
//! The life of a path is decided by the control core; this core tells it what it sees (`Broken`,
//! `Finished`, `Stopped`, `Drained`) and does what it is told. The steps of a request stand in
//! `pipeline.rs`. Called by [`ServerEngine`](crate::engine::ServerEngine).

mod close;
mod deferred;
pub mod devices;
pub mod overlap;
pub mod permits;
mod pipeline;
pub mod request;
mod syncs;
mod validate;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rtrs_core::block::Core;
use rtrs_core::fabric::{
    Access, BindResult, CloseReason, Fabric, FabricError, QpLimits, SgeList, WcOp, WcStatus,
    WorkCompletion, WorkRequest, WrOp,
};
use rtrs_core::ids::{ChunkIndex, ConnIndex, CoreIndex, PermitId, QpNum};
use rtrs_core::time::{Instant, earliest};
use rtrs_core::wire::{Imm, InfoReq};

use self::deferred::PARKED_EVERY;
use self::permits::Holder;
use self::request::{Request, RequestState};
use crate::engine::io::devices::{Devices, RequestRef};
use crate::engine::message::{AcceptOrder, Closed, ControlMail, Outbox, ShardMail};
use crate::engine::session::SessionParams;
use crate::export::ExportTable;
use crate::path::io::{SendQueue, bare_write};
use crate::path::state::PathState;
use crate::path::{HEARD_EVERY, PathEnd, PathKey, PathShared, PeerFault};

/// Receives beyond the queue depth: heartbeats and their answers on connection 0, and room for a
/// repost that is on its way.
const RECV_SLACK: u32 = 8;

/// What a work request id says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkId {
    /// A receive without buffer.
    Recv,
    /// The receive for INFO_REQ.
    Info,
    /// A send; its completion accounts for that many queue entries.
    Send(u32),
    /// The end of the peer's key for a request's chunk.
    Revoke(PermitId),
    /// A fresh key for a request's chunk.
    Bind,
    /// The first bind of a chunk.
    FirstBind,
}

impl WorkId {
    pub(crate) fn encode(self, conn: u32) -> u64 {
        let (kind, payload) = match self {
            Self::Recv => (1, 0),
            Self::Info => (2, 0),
            Self::Send(covered) => (3, covered),
            Self::Revoke(permit) => (4, u32::from(permit.0)),
            Self::Bind => (5, 0),
            Self::FirstBind => (6, 0),
        };
        kind << 60 | u64::from(conn) << 32 | u64::from(payload)
    }

    #[allow(clippy::cast_possible_truncation, reason = "fields of fixed width")]
    pub(crate) fn decode(wr_id: u64) -> Option<(Self, u32)> {
        let payload = wr_id as u32;
        let kind = match wr_id >> 60 {
            1 => Self::Recv,
            2 => Self::Info,
            3 => Self::Send(payload),
            4 => Self::Revoke(PermitId(payload as u16)),
            5 => Self::Bind,
            6 => Self::FirstBind,
            _ => return None,
        };
        Some((kind, (wr_id >> 32) as u32 & 0x0fff_ffff))
    }
}

/// What a path's row still does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowMode {
    /// Takes requests.
    Serving,
    /// Something is wrong and the control core was told: takes and answers nothing new.
    Broken,
    /// Answers what runs.
    Finishing,
    /// Answers nothing.
    Closing,
}

#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) path: u32,
    pub(crate) cid: ConnIndex,
    pub(crate) provider: usize,
    pub(crate) qp: QpNum,
    pub(crate) queue: SendQueue,
    /// Answers that wait for room in the send queue; at most the queue depth.
    pub(crate) waiting: VecDeque<PermitId>,
}

#[derive(Debug)]
pub(crate) struct PathRow {
    pub(crate) shared: Arc<PathShared>,
    pub(crate) mode: RowMode,
    pub(crate) conns: Vec<u32>,
    /// Row of connection 0, if it lives here.
    pub(crate) service: Option<u32>,
    pub(crate) requests: Box<[Request]>,
    /// Requests that have their permit, or had it when the path was closed and still run.
    pub(crate) inflight: u32,
    /// Which exports' devices on this core know the path's chunks.
    pub(crate) attached: Box<[bool]>,
    first_binds: u16,
    told_heard: Instant,
    finished_told: bool,
}

/// One core's part of every session.
#[derive(Debug)]
pub struct Shard {
    pub(crate) core: CoreIndex,
    pub(crate) params: SessionParams,
    pub(crate) devices: Devices,
    pub(crate) paths: Vec<Option<Box<PathRow>>>,
    pub(crate) conns: Vec<Option<Conn>>,
    /// Requests that wait until others have ended.
    pub(super) parked: Vec<RequestRef>,
    /// Requests whose device is done and that are not to be answered yet.
    pub(super) settling: Vec<RequestRef>,
    /// Closed exports that requests may still run on.
    pub(super) retiring: Vec<Closed>,
    by_key: BTreeMap<PathKey, u32>,
    by_qp: BTreeMap<(usize, QpNum), u32>,
    now: Instant,
    exit: bool,
}

/// The providers of a core, in the order in which paths name them.
pub type Fabrics = [Box<dyn Fabric>];

impl Shard {
    /// A core without connections.
    pub fn new(params: SessionParams, core: Core, exports: Arc<ExportTable>) -> Self {
        Self {
            core: core.index,
            params,
            devices: Devices::new(core, exports, params.cores),
            paths: Vec::new(),
            conns: Vec::new(),
            parked: Vec::new(),
            settling: Vec::new(),
            retiring: Vec::new(),
            by_key: BTreeMap::new(),
            by_qp: BTreeMap::new(),
            now: Instant::ZERO,
            exit: false,
        }
    }

    /// True when the core was told to end.
    pub fn is_done(&self) -> bool {
        self.exit
    }

    /// Takes a letter of the control core.
    pub fn handle_mail(
        &mut self,
        now: Instant,
        mail: ShardMail,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        self.now = now;
        match mail {
            ShardMail::Accept(order) => self.accept(now, *order, fabrics, out),
            ShardMail::Serve { path } => {
                if let Some(row) = self.row_of(path) {
                    self.serve(row, fabrics, out);
                }
            }
            ShardMail::Heartbeat { path } => {
                let service = self.row_of(path).and_then(|row| self.path(row)?.service);
                if let Some(conn) = service {
                    self.post_bare(conn, Imm::Heartbeat, fabrics, out);
                }
            }
            ShardMail::Finish { path } => {
                if let Some(row) = self.row_of(path) {
                    self.finish_path(row, out);
                }
            }
            ShardMail::Close { path, abrupt } => match self.row_of(path) {
                Some(row) => self.close_path(now, row, abrupt, fabrics, out),
                None => {
                    out.control(ControlMail::Stopped { path, core: self.core });
                    out.control(ControlMail::Drained { path, core: self.core });
                }
            },
            ShardMail::Answer { path, permit, answer } => {
                if let Some(row) = self.row_of(path) {
                    self.control_answer(row, permit, answer, fabrics, out);
                }
            }
            ShardMail::Retire(closed) => self.retire(closed, out),
            ShardMail::CloseDevice { export } => {
                self.devices.close(export);
                for row in self.paths.iter_mut().flatten() {
                    if let Some(attached) = row.attached.get_mut(export.index()) {
                        *attached = false;
                    }
                }
            }
            // The look is taken in each turn.
            ShardMail::SyncBack => {}
            ShardMail::Exit => self.exit = true,
        }
    }

    /// Takes a completion.
    pub fn handle_completion(
        &mut self,
        now: Instant,
        provider: usize,
        wc: &WorkCompletion,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        self.now = now;
        let Some((work, at)) = WorkId::decode(wc.wr_id) else { return };
        let Some(conn) = self.conn(at) else { return };
        if conn.qp != wc.qp || conn.provider != provider {
            return;
        }
        let (row, cid) = (conn.path, conn.cid);
        match wc.status {
            WcStatus::Success => {}
            // The queue pair goes down; what ended it is told by the failure before or by Closed.
            WcStatus::Flushed => return,
            status => {
                let reason = CloseReason::Lost(status.to_string());
                self.break_path(row, PathEnd::Connection { cid, reason }, out);
                return;
            }
        }
        match work {
            WorkId::Recv => self.received(at, wc, fabrics, out),
            WorkId::Info => self.received_info(at, wc, out),
            WorkId::Send(covered) => self.sent(at, covered, fabrics, out),
            WorkId::Revoke(permit) => self.revoked(row, permit, fabrics, out),
            WorkId::Bind => {}
            WorkId::FirstBind => self.first_bound(row, fabrics, out),
        }
    }

    /// A connection of ours ended.
    pub fn handle_closed(
        &mut self,
        provider: usize,
        qp: QpNum,
        reason: CloseReason,
        out: &mut Outbox,
    ) {
        let Some(at) = self.by_qp.remove(&(provider, qp)) else { return };
        let Some(conn) = self.conns[at as usize].take() else { return };
        let row = conn.path;
        if let Some(path) = self.path_mut(row) {
            path.conns.retain(|other| *other != at);
            if path.service == Some(at) {
                path.service = None;
            }
            if path.mode != RowMode::Closing {
                self.break_path(row, PathEnd::Connection { cid: conn.cid, reason }, out);
            }
        }
        self.after_release(row, out);
    }

    /// Polls devices, looks at requests that wait for others. True when anything happened.
    pub fn poll(&mut self, now: Instant, fabrics: &mut Fabrics, out: &mut Outbox) -> bool {
        self.now = now;
        let mut busy = self.poll_devices(now, fabrics, out);
        if !self.parked.is_empty() {
            busy |= self.look_at_parked(fabrics, out);
        }
        if !self.settling.is_empty() {
            busy |= self.look_at_settling(fabrics, out);
        }
        self.tell_retired(out);
        busy
    }

    /// When to be polled even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let waits = !self.parked.is_empty() || !self.settling.is_empty();
        let parked = waits.then(|| self.now + PARKED_EVERY);
        earliest(parked, self.devices.deadline())
    }

    /// Requests in flight on this core, those that closed paths have left running included.
    pub fn inflight(&self) -> u64 {
        self.paths.iter().flatten().map(|row| u64::from(row.inflight)).sum()
    }

    /// Connections on this core.
    pub fn connections(&self) -> usize {
        self.conns.iter().flatten().count()
    }

    /// Panics when rows and counters do not agree: that is our own fault.
    pub fn check(&self) {
        for (at, row) in self.paths.iter().enumerate() {
            let row = row.as_ref().filter(|_| !rtrs_core::mutated!(ReplayWithoutPermit));
            let Some(row) = row else { continue };
            let holder = self.holder(row);
            let mut held = 0;
            for (permit, request) in row.requests.iter().enumerate() {
                let permit = PermitId(u16::try_from(permit).unwrap_or(u16::MAX));
                let owner = row.shared.session.permits.holder(permit);
                let mine = owner == Some(holder);
                let runs = match request.state() {
                    RequestState::Free | RequestState::Parked => false,
                    // What a closed path has left at its device has no permit any more.
                    RequestState::Submitted if row.mode == RowMode::Closing => !mine,
                    _ => mine,
                };
                let idle = matches!(request.state(), RequestState::Free | RequestState::Parked);
                assert!(runs || idle && !mine, "{request:?} of {permit}, held by {owner:?}");
                self.check_wait(row, permit, request);
                held += u32::from(runs);
            }
            assert_eq!(held, row.inflight, "path row {at}");
            for conn in &row.conns {
                let conn = self.conn(*conn).map(|conn| conn.path as usize);
                assert_eq!(conn, Some(at), "connection of another path");
            }
        }
    }

    pub(crate) fn path(&self, row: u32) -> Option<&PathRow> {
        self.paths.get(row as usize)?.as_deref()
    }

    pub(crate) fn path_mut(&mut self, row: u32) -> Option<&mut PathRow> {
        self.paths.get_mut(row as usize)?.as_deref_mut()
    }

    pub(crate) fn conn(&self, at: u32) -> Option<&Conn> {
        self.conns.get(at as usize)?.as_ref()
    }

    pub(crate) fn conn_mut(&mut self, at: u32) -> Option<&mut Conn> {
        self.conns.get_mut(at as usize)?.as_mut()
    }

    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    pub(crate) fn holder(&self, row: &PathRow) -> Holder {
        Holder { path: row.shared.key.0, core: self.core }
    }

    fn row_of(&self, key: PathKey) -> Option<u32> {
        self.by_key.get(&key).copied()
    }

    /// Tells the control core once that a path cannot go on.
    pub(crate) fn break_path(&mut self, row: u32, end: PathEnd, out: &mut Outbox) {
        let Some(path) = self.path_mut(row) else { return };
        if matches!(path.mode, RowMode::Serving | RowMode::Finishing) {
            path.mode = RowMode::Broken;
            out.control(ControlMail::Broken { path: path.shared.key, end });
        }
    }

    pub(crate) fn break_by_fabric(&mut self, row: u32, error: &FabricError, out: &mut Outbox) {
        self.break_path(row, PathEnd::Fabric(error.to_string()), out);
    }

    fn accept(
        &mut self,
        now: Instant,
        order: AcceptOrder,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let AcceptOrder { path, cid, request, response } = order;
        let row = self.row_of(path.key).unwrap_or_else(|| self.new_row(Arc::clone(&path)));
        let depth = self.params.limits.queue_depth();
        let recv_max = u32::from(depth) + RECV_SLACK + 1;
        // Answers; a revoke per permit and a bind whose completion was not seen yet, or the first
        // binds in their place.
        let send_max = SendQueue::limit_for(depth) + 2 * u32::from(depth) + RECV_SLACK;
        let provider = usize::from(path.provider);
        let Some(fabric) = fabrics.get_mut(provider) else { return };
        let limits = QpLimits { send_max, recv_max };
        let qp = match fabric.accept(now, &path.pd, request, limits, &response) {
            Ok(qp) => qp,
            Err(error) => return self.break_by_fabric(row, &error, out),
        };
        let at = claim_slot(&mut self.conns);
        self.conns[at as usize] = Some(Conn {
            path: row,
            cid,
            provider,
            qp,
            queue: SendQueue::new(depth),
            waiting: VecDeque::with_capacity(usize::from(depth)),
        });
        self.by_qp.insert((provider, qp), at);
        if let Some(path) = self.path_mut(row) {
            path.conns.push(at);
            if cid.0 == 0 {
                path.service = Some(at);
            }
        }
        // All receives are there before the peer can know that it is connected.
        let mut posted = Ok(());
        if cid.0 == 0 {
            let wr_id = WorkId::Info.encode(at);
            posted = fabric.post_recv(qp, wr_id, Some(path.messages.info_req()));
        }
        let count = u32::from(depth) + if cid.0 == 0 { RECV_SLACK } else { 0 };
        for _ in 0..count {
            posted = posted.and_then(|()| fabric.post_recv(qp, WorkId::Recv.encode(at), None));
        }
        if let Err(error) = posted {
            self.break_by_fabric(row, &error, out);
        }
    }

    fn new_row(&mut self, shared: Arc<PathShared>) -> u32 {
        let row = claim_slot(&mut self.paths);
        self.by_key.insert(shared.key, row);
        self.paths[row as usize] = Some(Box::new(PathRow {
            shared,
            mode: RowMode::Serving,
            conns: Vec::new(),
            service: None,
            requests: Box::default(),
            inflight: 0,
            attached: vec![false; self.devices.count()].into(),
            first_binds: 0,
            told_heard: Instant::ZERO,
            finished_told: false,
        }));
        row
    }

    /// Binds all windows of a path that was admitted, then sends INFO_RSP.
    fn serve(&mut self, row: u32, fabrics: &mut Fabrics, out: &mut Outbox) {
        let Some(path) = self.path(row) else { return };
        let (shared, Some(service)) = (Arc::clone(&path.shared), path.service) else { return };
        let (Some(chunks), Some(conn)) = (shared.chunks.get(), self.conn(service)) else { return };
        let (provider, qp) = (conn.provider, conn.qp);
        let fabric = &mut fabrics[provider];
        let mut pending = 0;
        for at in 0..chunks.window_count() {
            let Some(window) = chunks.window(ChunkIndex(at)) else { break };
            let slice = chunks.chunk(ChunkIndex(at));
            let wr_id = WorkId::FirstBind.encode(service);
            match fabric.bind(qp, window, &slice, Access::REMOTE_WRITE, wr_id) {
                Ok(BindResult::Done(_)) => {}
                Ok(BindResult::Pending(_)) => pending += 1,
                Err(error) => return self.break_by_fabric(row, &error, out),
            }
        }
        if let Some(path) = self.path_mut(row) {
            path.first_binds = pending;
        }
        if pending == 0 {
            self.send_info_rsp(row, fabrics, out);
        }
    }

    fn first_bound(&mut self, row: u32, fabrics: &mut Fabrics, out: &mut Outbox) {
        let Some(path) = self.path_mut(row) else { return };
        path.first_binds = path.first_binds.saturating_sub(1);
        if path.first_binds == 0 && path.mode == RowMode::Serving {
            self.send_info_rsp(row, fabrics, out);
        }
    }

    /// INFO_RSP, the first message on connection 0; from then on the peer may send requests.
    fn send_info_rsp(&mut self, row: u32, fabrics: &mut Fabrics, out: &mut Outbox) {
        let Some(path) = self.path(row) else { return };
        let (shared, Some(service)) = (Arc::clone(&path.shared), path.service) else { return };
        let (Some(chunks), Some(conn)) = (shared.chunks.get(), self.conn_mut(service)) else {
            return;
        };
        let sge = shared.messages.info_rsp(&chunks.describe());
        let covered = conn.queue.take(1);
        let wr = WorkRequest {
            wr_id: WorkId::Send(covered.unwrap_or(0)).encode(service),
            op: WrOp::Send { imm: None, invalidate: None },
            sges: SgeList::one(sge),
            signaled: covered.is_some(),
        };
        let (provider, qp) = (conn.provider, conn.qp);
        match fabrics[provider].post_send(qp, wr) {
            Ok(()) => out.control(ControlMail::Serving { path: shared.key }),
            Err(error) => self.break_by_fabric(row, &error, out),
        }
    }

    /// Something arrived in a receive without buffer.
    fn received(&mut self, at: u32, wc: &WorkCompletion, fabrics: &mut Fabrics, out: &mut Outbox) {
        let Some(conn) = self.conn(at) else { return };
        let (row, cid, provider, qp) = (conn.path, conn.cid, conn.provider, conn.qp);
        // Before anything else: the next message must find a receive.
        if let Err(error) = fabrics[provider].post_recv(qp, WorkId::Recv.encode(at), None) {
            return self.break_by_fabric(row, &error, out);
        }
        self.heard(row);
        let Some(imm) = wc.imm.filter(|_| wc.byte_len == 0 || wc.op != WcOp::Recv) else {
            return self.break_path(row, PathEnd::Peer(PeerFault::Message), out);
        };
        match Imm::decode_with(imm, self.params.limits.mem_bits()) {
            Imm::Request { permit, offset } => self.arrived(at, permit, offset, imm, fabrics, out),
            Imm::Heartbeat if cid.0 == 0 => self.post_bare(at, Imm::HeartbeatAck, fabrics, out),
            Imm::HeartbeatAck if cid.0 == 0 => {
                if let Some(path) = self.path(row) {
                    let (path, at) = (path.shared.key, self.now);
                    out.control(ControlMail::HeartbeatAck { path, at });
                }
            }
            other => tracing::debug!(?other, %cid, "an immediate that means nothing here"),
        }
    }

    fn received_info(&mut self, at: u32, wc: &WorkCompletion, out: &mut Outbox) {
        let Some(row) = self.conn(at).map(|conn| conn.path) else { return };
        self.heard(row);
        let Some(path) = self.path(row) else { return };
        if wc.op != WcOp::Recv || wc.imm.is_some() {
            return self.break_path(row, PathEnd::Peer(PeerFault::Early), out);
        }
        let sge = path.shared.messages.info_req();
        let mut bytes = vec![0; (wc.byte_len as usize).min(InfoReq::LEN)].into_boxed_slice();
        sge.slice.copy_out(0, &mut bytes);
        out.control(ControlMail::Info { path: path.shared.key, bytes });
    }

    /// Notes a sign of life of the peer.
    fn heard(&mut self, row: u32) {
        let now = self.now;
        if let Some(path) = self.path_mut(row)
            && now.since(path.told_heard) >= HEARD_EVERY
        {
            path.told_heard = now;
            path.shared.tell_heard(now);
        }
    }

    /// Posts a zero-length write with a heartbeat's immediate. Left out when the send queue is
    /// full: then there is traffic enough, or the peer floods us.
    fn post_bare(&mut self, at: u32, imm: Imm, fabrics: &mut Fabrics, out: &mut Outbox) {
        let Some(conn) = self.conn_mut(at) else { return };
        if !conn.queue.has_room(1) {
            return;
        }
        let covered = conn.queue.take(1);
        let wr = WorkRequest {
            wr_id: WorkId::Send(covered.unwrap_or(0)).encode(at),
            op: bare_write(imm.encode()),
            sges: SgeList::EMPTY,
            signaled: covered.is_some(),
        };
        let (row, provider, qp) = (conn.path, conn.provider, conn.qp);
        if let Err(error) = fabrics[provider].post_send(qp, wr) {
            self.break_by_fabric(row, &error, out);
        }
    }

    /// A signaled send left: its predecessors did too, and answers that waited may go.
    fn sent(&mut self, at: u32, covered: u32, fabrics: &mut Fabrics, out: &mut Outbox) {
        let Some(conn) = self.conn_mut(at) else { return };
        conn.queue.complete(covered);
        while let Some(conn) = self.conn_mut(at)
            && conn.queue.has_room(SendQueue::ANSWER_MAX)
            && let Some(permit) = conn.waiting.pop_front()
        {
            let row = conn.path;
            self.post_answer(row, permit, fabrics, out);
        }
    }

    /// Takes no new requests; tells when none runs any more.
    fn finish_path(&mut self, row: u32, out: &mut Outbox) {
        let Some(path) = self.path_mut(row) else { return };
        if path.mode == RowMode::Serving {
            path.mode = RowMode::Finishing;
        }
        self.drop_parked(row);
        self.after_release(row, out);
    }

    fn close_path(
        &mut self,
        now: Instant,
        row: u32,
        abrupt: bool,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let Some(path) = self.path_mut(row) else { return };
        path.mode = RowMode::Closing;
        let conns = path.conns.clone();
        self.drop_parked(row);
        self.drop_settling(row);
        self.untell_losses(row);
        self.abandon_requests(row);
        for at in conns {
            let Some(conn) = self.conn(at) else { continue };
            let fabric = &mut fabrics[conn.provider];
            if abrupt { fabric.abort(now, conn.qp) } else { fabric.disconnect(now, conn.qp) }
        }
        // From here on nothing that comes is taken (`takes_requests`), and what ran is entered as
        // such; no need to wait until the connections are gone.
        if let Some(path) = self.path(row) {
            out.control(ControlMail::Stopped { path: path.shared.key, core: self.core });
        }
        self.after_release(row, out);
    }

    /// A request or a connection of the path ended, or the path changed its mode.
    pub(crate) fn after_release(&mut self, row: u32, out: &mut Outbox) {
        let core = self.core;
        let Some(path) = self.path_mut(row) else { return };
        if path.inflight > 0 {
            return;
        }
        let key = path.shared.key;
        match path.mode {
            RowMode::Finishing if !path.finished_told => {
                path.finished_told = true;
                out.control(ControlMail::Finished { path: key, core });
            }
            RowMode::Closing if path.conns.is_empty() => {
                self.by_key.remove(&key);
                self.paths[row as usize] = None;
                out.control(ControlMail::Drained { path: key, core });
            }
            _ => {}
        }
    }

    /// True when a request may be taken from this path now.
    pub(crate) fn takes_requests(&mut self, row: u32, out: &mut Outbox) -> bool {
        let Some(path) = self.path(row) else { return false };
        match (path.mode, path.shared.state()) {
            (RowMode::Serving, PathState::Connected) => true,
            (RowMode::Serving, PathState::Connecting) => {
                self.break_path(row, PathEnd::Peer(PeerFault::Early), out);
                false
            }
            _ => false,
        }
    }
}

/// A free place in a table, which grows when there is none.
fn claim_slot<T>(table: &mut Vec<Option<T>>) -> u32 {
    let at = table.iter().position(Option::is_none).unwrap_or_else(|| {
        table.push(None);
        table.len() - 1
    });
    u32::try_from(at).unwrap_or_else(|_| panic!("more rows than descriptors"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_ids_survive_the_round_trip() {
        for work in [
            WorkId::Recv,
            WorkId::Info,
            WorkId::Send(u32::MAX),
            WorkId::Revoke(PermitId(u16::MAX)),
            WorkId::Bind,
            WorkId::FirstBind,
        ] {
            assert_eq!(WorkId::decode(work.encode(0x0abc_def0)), Some((work, 0x0abc_def0)));
        }
        assert_eq!(WorkId::decode(0), None);
        assert_eq!(WorkId::decode(u64::MAX), None);
    }
}
