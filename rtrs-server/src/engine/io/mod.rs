//! One shard's part of every session: its connections, the requests that arrived over them, and its
//! devices. Every IO passes through here without any allocation.
//!
//! A path has a row on each shard that has one of its connections (`path.rs`), a connection has a
//! row in the shard's table (`conn.rs`), and a path's row has one request row per permit
//! (`request.rs`). `pipeline.rs` processes requests.
//!
//! The control shard controls the lifecycle of a path; this shard reports events (`Broken`,
//! `Finished`, `Stopped`, `Drained`) and follows its messages.

mod answer;
pub mod change_watch;
mod conn;
mod delayed;
mod device_errors;
pub mod devices;
mod ending;
mod known_extents;
mod limits;
pub mod overlap;
mod path;
pub mod permits;
mod pipeline;
mod progress;
pub mod request;
mod rows;
mod sync;
mod table;
pub mod throttle;
mod turns;
mod validate;

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use rtrs_core::block::Core;
use rtrs_core::fabric::{
    Access, BindResult, CloseReason, Sge, SgeList, WcOp, WcStatus, WorkCompletion, WrOp,
};
use rtrs_core::ids::{ChunkIndex, ConnIndex, CoreIndex, PermitId, ProviderIndex, QpNum};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{Imm, InfoReq};

use self::conn::{Conn, RECV_SLACK, WorkId};
use self::devices::Devices;
use self::overlap::OrphanedWrite;
use self::path::{LocalPath, Mode};
use self::pipeline::{RECHECK_INTERVAL, Step};
use self::request::RequestState;
use self::table::{ConnRow, PathRow, RequestRef, Table, Waiting};
use crate::engine::ctx::Ctx;
use crate::engine::message::{
    AcceptOrder, Closed, ControlMessage, EndReport, Outbox, ShardMessage,
};
use crate::engine::session::SessionParams;
use crate::export::ExportTable;
use crate::path::io::bare_write;
use crate::path::{PathEnd, PathKey, PeerFault};

/// The connection that a completion belongs to, and that connection's path.
#[derive(Clone, Copy)]
struct ConnRef {
    conn: ConnRow,
    path: PathRow,
    cid: ConnIndex,
    provider: ProviderIndex,
}

/// One shard's part of every session.
#[derive(Debug)]
pub struct Shard {
    index: CoreIndex,
    devices: Devices,
    paths: Table<PathRow, Box<LocalPath>>,
    conns: Table<ConnRow, Conn>,
    by_key: BTreeMap<PathKey, PathRow>,
    by_qp: BTreeMap<(ProviderIndex, QpNum), ConnRow>,
    waiting: Waiting,
    /// Buffer for the requests that a turn checks; empty between turns.
    looked_at: Vec<RequestRef>,
    /// Closed exports that may still have running requests.
    retiring: Vec<Closed>,
    /// Internal errors of paths that have ended, and those without a path.
    internal_errors: u64,
    now: Instant,
    exit: bool,
}

impl Shard {
    /// Creates a shard without connections.
    pub fn new(params: SessionParams, core: Core, exports: Arc<ExportTable>) -> Self {
        Self {
            index: core.index,
            devices: Devices::new(core, exports, params.cores),
            paths: Table::new(),
            conns: Table::new(),
            by_key: BTreeMap::new(),
            by_qp: BTreeMap::new(),
            waiting: Waiting::default(),
            looked_at: Vec::new(),
            retiring: Vec::new(),
            internal_errors: 0,
            now: Instant::ZERO,
            exit: false,
        }
    }

    /// Whether the shard must exit.
    pub fn is_done(&self) -> bool {
        self.exit
    }

    /// Processes a message from the control shard.
    pub fn handle_message(&mut self, message: ShardMessage, ctx: &mut Ctx<'_>) {
        match message {
            ShardMessage::Accept(order) => self.accept(*order, ctx),
            ShardMessage::Serve { path } => {
                self.with_path(path, ctx, |shard, row, ctx| shard.serve(row, ctx));
            }
            ShardMessage::RefuseInfo { path, errno } => {
                self.with_path(path, ctx, |shard, row, ctx| {
                    let sge = shard.paths[row].shared.messages.info_refusal(errno);
                    shard.post_info_rsp(row, sge, ctx);
                });
            }
            ShardMessage::Heartbeat { path } => {
                let row = self.by_key.get(&path).and_then(|row| self.paths.get(*row));
                if let Some(conn) = row.and_then(|path| path.service()) {
                    self.post_heartbeat(conn, Imm::Heartbeat { next_ms: 0 }, ctx);
                }
            }
            ShardMessage::Changed { path, device } => {
                let row = self.by_key.get(&path).and_then(|row| self.paths.get(*row));
                if let Some(conn) = row.and_then(|path| path.service()) {
                    self.conns[conn].announce(device);
                    self.send_announcements(conn, ctx);
                }
            }
            ShardMessage::Finish { path } => {
                self.with_path(path, ctx, |shard, row, ctx| shard.finish_path(row, ctx));
            }
            ShardMessage::Close { path, abrupt } => {
                if !self.with_path(path, ctx, |shard, row, ctx| shard.close_path(row, abrupt, ctx))
                {
                    for report in [EndReport::Stopped, EndReport::Drained] {
                        let core = self.index;
                        ctx.out.control(ControlMessage::Ending { path, core, report });
                    }
                }
            }
            ShardMessage::Answer { path, permit, answer } => {
                // The answer is dropped if the path has ended in the meantime.
                self.with_path(path, ctx, |shard, path, ctx| {
                    let at = RequestRef { path, permit };
                    shard.step(at, None, ctx, |step, ctx| step.control_answered(&answer, ctx));
                });
            }
            ShardMessage::Retire(closed) => {
                self.retiring.push(closed);
                self.report_retired(ctx.out);
            }
            ShardMessage::CloseDevice { export } => {
                self.devices.close(export);
                self.paths.values_mut().for_each(|path| path.set_attached(export, false));
            }
            ShardMessage::Limits { export } => self.devices.apply_limits(export),
            // Nothing to do: waiting requests are checked in each turn.
            ShardMessage::Wake => {}
            ShardMessage::Exit => self.exit = true,
        }
    }

    /// Processes a completion from a provider.
    pub fn handle_completion(
        &mut self,
        provider: ProviderIndex,
        wc: &WorkCompletion,
        ctx: &mut Ctx<'_>,
    ) {
        let known = WorkId::decode(wc.wr_id).and_then(|(work, at)| {
            let conn = self.conns.get(at)?;
            let same = (conn.provider, conn.qp) == (provider, wc.qp);
            same.then_some((work, ConnRef { conn: at, path: conn.path, cid: conn.cid, provider }))
        });
        let Some((work, from)) = known else {
            return self.internal_error("a completion for an unknown connection");
        };
        let ConnRef { path: row, cid, .. } = from;
        let path = &mut self.paths[row];
        match wc.status {
            WcStatus::Success => {}
            // The queue pair is being closed; the earlier failure or `Closed` gives the reason.
            WcStatus::Flushed => return,
            status => {
                let reason = CloseReason::Lost(status.to_string());
                return path.fail(PathEnd::Connection { cid, reason }, ctx.out);
            }
        }
        match work {
            WorkId::Recv => self.received(from, wc, ctx),
            WorkId::Info => {
                path.heard(ctx.now);
                if wc.op != WcOp::Recv || wc.imm.is_some() {
                    return path.violation(PeerFault::Early, ctx.out);
                }
                let sge = path.shared.messages.info_req();
                let mut bytes =
                    vec![0; (wc.byte_len as usize).min(InfoReq::LEN)].into_boxed_slice();
                sge.slice.copy_out(0, &mut bytes);
                ctx.out.control(ControlMessage::Info { path: path.shared.key, bytes });
            }
            WorkId::Send(covered) => self.sent(from, covered, ctx),
            WorkId::Revoke(permit) => {
                let request = RequestRef { path: row, permit };
                self.step(request, Some(from.conn), ctx, |step, ctx| step.revoked(ctx));
            }
            WorkId::Bind => {}
            WorkId::FirstBind => {
                if path.first_binds(None) && path.mode() == Mode::Serving {
                    self.send_info_rsp(row, ctx);
                }
            }
        }
    }

    /// Handles a closed connection.
    pub fn handle_closed(
        &mut self,
        provider: ProviderIndex,
        qp: QpNum,
        reason: CloseReason,
        ctx: &mut Ctx<'_>,
    ) {
        let conn = self.by_qp.remove(&(provider, qp));
        let conn = conn.and_then(|at| Some((at, self.conns.remove(at)?)));
        let Some((at, Conn { path: row, cid, .. })) = conn else {
            return self.internal_error("the end of an unknown connection");
        };
        let path = &mut self.paths[row];
        path.remove_conn(at);
        path.fail(PathEnd::Connection { cid, reason }, ctx.out);
        self.end_path_if_over(row, ctx.out);
    }

    /// Polls devices and checks requests waiting for others. Returns true if anything happened.
    pub fn poll(&mut self, ctx: &mut Ctx<'_>) -> bool {
        self.now = ctx.now;
        let mut busy = self.look(ctx.out);
        let mut row = 0;
        self.devices.poll_idle(ctx.now);
        self.devices.log_suppressed(ctx.now);
        while let Some(at) = self.devices.polled(row) {
            busy |= self.devices.poll(at, ctx.now);
            while let Some(completion) = self.devices.reap(at) {
                busy = true;
                let at = RequestRef::of(completion.tag);
                self.step(at, None, ctx, |step, ctx| step.device_done(completion, ctx));
            }
            while let Some(waiting) = self.devices.next_waiting(at) {
                let mut taken = None;
                self.step_if_there(waiting, None, ctx, |step, ctx| taken = step.resubmit(ctx));
                if taken == Some(false) {
                    break;
                }
                busy |= taken.is_some();
            }
            busy |= self.start_released(at, ctx);
            let Self { devices, paths, waiting, .. } = self;
            let io = |at: &RequestRef| paths.get(at.path)?.requests.get(at.permit)?.io();
            let needing = || waiting.settling.iter().chain(&waiting.deferred).filter_map(io);
            row += usize::from(!devices.sweep(row, |at| needing().any(|io| io.export == at)));
        }
        busy |= !self.waiting.is_empty() && self.recheck_waiting(ctx);
        self.report_retired(ctx.out);
        self.devices.begin_turn();
        busy
    }

    /// Checks requests waiting for others. Returns true if any of them is no longer waiting.
    fn recheck_waiting(&mut self, ctx: &mut Ctx<'_>) -> bool {
        // Both lists keep their allocation.
        let mut waited = mem::take(&mut self.looked_at);
        mem::swap(&mut waited, &mut self.waiting.deferred);
        for at in &waited {
            self.step(*at, None, ctx, |step, ctx| step.recheck(ctx));
        }
        let mut any = self.waiting.deferred.len() < waited.len();
        waited.clear();
        mem::swap(&mut waited, &mut self.waiting.settling);
        for at in &waited {
            self.step(*at, None, ctx, |step, ctx| step.recheck_settling(ctx));
        }
        any |= self.waiting.settling.len() < waited.len();
        waited.clear();
        self.looked_at = waited;
        any
    }

    /// Whether this turn has begun as much IO as it should before answering.
    pub fn is_turn_full(&self) -> bool {
        self.devices.is_turn_full()
    }

    /// Time of the next poll if nothing else happens.
    pub fn deadline(&self) -> Option<Instant> {
        earliest(
            (!self.waiting.is_empty()).then(|| self.now + RECHECK_INTERVAL),
            self.devices.deadline(),
        )
    }

    /// Requests in flight on this shard, including orphaned ones of closed paths.
    pub fn inflight(&self) -> u64 {
        self.paths.iter().map(|(_, path)| u64::from(path.inflight())).sum()
    }

    /// Number of internal errors of this shard and its paths.
    pub fn internal_errors(&self) -> u64 {
        let of_paths = self.paths.iter().map(|(_, path)| path.counters().internal_errors.get());
        self.internal_errors + of_paths.sum::<u64>()
    }

    /// Number of connections on this shard.
    pub fn connections(&self) -> usize {
        self.conns.iter().count()
    }

    /// Panics if the tables are inconsistent, or after an internal error, which is a bug.
    pub fn check(&self) {
        assert_eq!(self.internal_errors, 0, "internal errors, see the log");
        let all = self.paths.iter().filter(|_| !rtrs_core::mutated!(ReplayWithoutPermit));
        for (row, path) in all {
            assert_eq!(path.counters().internal_errors.get(), 0, "internal errors, see the log");
            let closing = path.mode() == Mode::Closing;
            let mut held = 0;
            for (permit, request) in path.requests.iter() {
                let owner = path.shared.permit_holder(permit, path.holder());
                let mine = owner == Some(path.holder());
                let (runs, right) = match request.state() {
                    RequestState::Free | RequestState::Deferred => (false, !mine),
                    // A request that a closed path has left at the device no longer holds a permit.
                    RequestState::Submitted if closing => (true, !mine),
                    _ => (true, mine),
                };
                assert!(right, "{request:?} of {permit}, held by {owner:?}");
                held += u32::from(runs);
                let here = |at: &RequestRef| *at == RequestRef { path: row, permit };
                let io = request.io().filter(|io| io.may_change().is_some());
                let known = match request.state() {
                    RequestState::Deferred | RequestState::Blocked | RequestState::Turn => {
                        !closing && self.waiting.deferred.iter().any(here)
                    }
                    RequestState::Settling => !closing && self.waiting.settling.iter().any(here),
                    RequestState::Throttled => request.io().is_some_and(|io| {
                        let at = RequestRef { path: row, permit };
                        !closing && self.devices.is_delayed(io.export, at)
                    }),
                    RequestState::Submitted if closing => io.is_none_or(|io| {
                        let key = path.shared.key;
                        let own =
                            |one: &OrphanedWrite, _: &_| (one.path, one.permit) == (key, permit);
                        self.devices.orphaned(io.export).any(own)
                    }),
                    _ => true,
                };
                assert!(known, "{request:?} of {permit} neither waits nor is orphaned");
            }
            assert_eq!(held, path.inflight(), "{row:?}");
            for conn in path.conns() {
                let of = self.conns.get(*conn).map(|conn| conn.path);
                assert_eq!(of, Some(row), "connection of another path");
            }
        }
    }

    /// Runs a step of a request, then removes the request's path if nothing of it remains on this
    /// shard. `conn` is the connection of a new request.
    fn step(
        &mut self,
        at: RequestRef,
        conn: Option<ConnRow>,
        ctx: &mut Ctx<'_>,
        run: impl FnOnce(&mut Step<'_>, &mut Ctx<'_>),
    ) {
        if !self.step_if_there(at, conn, ctx, run) {
            self.internal_error("a request of an unknown path");
        }
    }

    /// Runs a step of a request whose path may have ended. Returns false if the path has ended.
    fn step_if_there(
        &mut self,
        at: RequestRef,
        conn: Option<ConnRow>,
        ctx: &mut Ctx<'_>,
        run: impl FnOnce(&mut Step<'_>, &mut Ctx<'_>),
    ) -> bool {
        let Self { devices, paths, conns, waiting, .. } = self;
        let Some(path) = paths.get_mut(at.path) else { return false };
        let limits = path.limits();
        let conn = conn.or_else(|| path.requests.get(at.permit)?.conn());
        let conn = conn.and_then(|row| conns.get_mut(row)).filter(|conn| conn.path == at.path);
        run(&mut Step { at, path, conn, devices, waiting, limits }, ctx);
        if path.is_over(ctx.out) {
            self.remove_path(at.path, ctx.out);
        }
        true
    }

    /// Runs a function on a path of this shard. Returns false if the path does not exist.
    fn with_path(
        &mut self,
        key: PathKey,
        ctx: &mut Ctx<'_>,
        run: impl FnOnce(&mut Self, PathRow, &mut Ctx<'_>),
    ) -> bool {
        let Some(row) = self.by_key.get(&key).copied() else { return false };
        run(self, row, ctx);
        true
    }

    fn internal_error(&mut self, what: &'static str) {
        tracing::error!(shard = self.index.0, what, "internal error");
        self.internal_errors += 1;
    }

    fn accept(&mut self, order: AcceptOrder, ctx: &mut Ctx<'_>) {
        let AcceptOrder { path, cid, request, response } = order;
        let row = self.by_key.get(&path.key).copied().unwrap_or_else(|| {
            let local = LocalPath::new(Arc::clone(&path), self.index);
            let row = self.paths.insert(|_| Box::new(local));
            self.by_key.insert(path.key, row);
            row
        });
        let depth = path.session.limits.queue_depth();
        let provider = path.origin.provider;
        let fabric = &mut ctx.fabrics[provider.index()];
        let qp = fabric.accept(ctx.now, &path.pd, request, Conn::limits(depth), &response);
        let local = &mut self.paths[row];
        let qp = match qp {
            Ok(qp) => qp,
            Err(error) => return local.fail_by_fabric(&error, ctx.out),
        };
        let at = self.conns.insert(|at| Conn::new(at, row, cid, provider, qp, depth));
        self.by_qp.insert((provider, qp), at);
        local.add_conn(at, cid);
        // All receives are posted before the peer can know that it is connected.
        let mut posted = Ok(());
        let mut count = u32::from(depth);
        if cid.0 == 0 {
            let wr_id = WorkId::Info.encode(at);
            posted = fabric.post_recv(qp, wr_id, Some(path.messages.info_req()));
            count += RECV_SLACK;
        }
        for _ in 0..count {
            posted = posted.and_then(|()| fabric.post_recv(qp, WorkId::Recv.encode(at), None));
        }
        if let Err(error) = posted {
            local.fail_by_fabric(&error, ctx.out);
        }
    }

    /// Binds all windows of an admitted path, then sends INFO_RSP.
    fn serve(&mut self, row: PathRow, ctx: &mut Ctx<'_>) {
        let path = &mut self.paths[row];
        // Connection 0 may have ended in the meantime: the path is about to be closed.
        let Some(service) = path.service() else { return };
        let conn = &self.conns[service];
        let chunks = path.chunks();
        let fabric = &mut ctx.fabrics[conn.provider.index()];
        let wr_id = WorkId::FirstBind.encode(service);
        let mut pending = 0;
        for at in (0..chunks.window_count()).map(ChunkIndex) {
            let Some(window) = chunks.window(at) else { break };
            match fabric.bind(conn.qp, window, &chunks.chunk(at), Access::REMOTE_WRITE, wr_id) {
                Ok(BindResult::Done(_)) => {}
                Ok(BindResult::Pending(_)) => pending += 1,
                Err(error) => return path.fail_by_fabric(&error, ctx.out),
            }
        }
        if path.first_binds(Some(pending)) {
            self.send_info_rsp(row, ctx);
        }
    }

    /// Sends INFO_RSP, the first message on connection 0; from then on the peer may send requests.
    fn send_info_rsp(&mut self, row: PathRow, ctx: &mut Ctx<'_>) {
        let path = &self.paths[row];
        let sge = path.shared.messages.info_rsp(&path.chunks().describe());
        let key = path.shared.key;
        if self.post_info_rsp(row, sge, ctx) {
            ctx.out.control(ControlMessage::Serving { path: key });
        }
    }

    /// Posts INFO_RSP. Returns false if connection 0 has ended or fails.
    fn post_info_rsp(&mut self, row: PathRow, sge: Sge, ctx: &mut Ctx<'_>) -> bool {
        let path = &mut self.paths[row];
        let Some(service) = path.service() else { return false };
        let op = WrOp::Send { imm: None, invalidate: None };
        let sent = self.conns[service].send(op, SgeList::one(sge), ctx.fabrics);
        if let Err(error) = &sent {
            path.fail_by_fabric(error, ctx.out);
        }
        sent.is_ok()
    }

    /// Processes a message that arrived in a receive without a buffer.
    fn received(&mut self, from: ConnRef, wc: &WorkCompletion, ctx: &mut Ctx<'_>) {
        let ConnRef { conn: at, path: row, cid, provider } = from;
        let path = &mut self.paths[row];
        // Done first, because the next message needs a posted receive.
        let wr_id = WorkId::Recv.encode(at);
        if let Err(error) = ctx.fabrics[provider.index()].post_recv(wc.qp, wr_id, None) {
            return path.fail_by_fabric(&error, ctx.out);
        }
        path.heard(ctx.now);
        let Some(imm) = wc.imm.filter(|_| wc.byte_len == 0 || wc.op != WcOp::Recv) else {
            return path.violation(PeerFault::Message, ctx.out);
        };
        match Imm::decode_with(imm, path.limits().mem_bits()) {
            Imm::Request { permit, offset } => {
                let request = RequestRef { path: row, permit };
                self.step(request, Some(at), ctx, |step, ctx| step.arrive(offset, imm, ctx));
            }
            Imm::Heartbeat { next_ms } if cid.0 == 0 => {
                if next_ms > 0 {
                    let (path, next) = (path.shared.key, Duration::from_millis(next_ms.into()));
                    ctx.out.control(ControlMessage::Announced { path, at: ctx.now, next });
                }
                self.post_heartbeat(at, Imm::HeartbeatAck, ctx);
            }
            Imm::HeartbeatAck if cid.0 == 0 => {
                let path = path.shared.key;
                ctx.out.control(ControlMessage::HeartbeatAck { path, at: ctx.now });
            }
            other => tracing::debug!(?other, %cid, "unexpected immediate"),
        }
    }

    /// Posts a zero-length write with a heartbeat's immediate. Does nothing if the send queue is
    /// full: in that case there is enough traffic, or the peer is flooding this server.
    fn post_heartbeat(&mut self, at: ConnRow, imm: Imm, ctx: &mut Ctx<'_>) {
        let conn = &mut self.conns[at];
        if conn.has_room()
            && let Err(error) = conn.send(bare_write(imm.encode()), SgeList::EMPTY, ctx.fabrics)
        {
            self.paths[conn.path].fail_by_fabric(&error, ctx.out);
        }
    }

    /// Posts as many queued CHANGED messages as fit in the send queue.
    fn send_announcements(&mut self, at: ConnRow, ctx: &mut Ctx<'_>) {
        let Some(conn) = self.conns.get_mut(at) else { return };
        while let Some(device) = conn.next_announcement() {
            let imm = Imm::Changed { device: device.0 };
            let sent = conn.send(bare_write(imm.encode()), SgeList::EMPTY, ctx.fabrics);
            if let Err(error) = sent {
                return self.paths[conn.path].fail_by_fabric(&error, ctx.out);
            }
        }
    }

    /// Processes a completed send, which makes room for waiting answers.
    fn sent(&mut self, from: ConnRef, covered: u32, ctx: &mut Ctx<'_>) {
        let ConnRef { conn: at, path, .. } = from;
        self.conns[at].sent(covered);
        while let Some(permit) = self.conns[at].next_waiting() {
            let request = RequestRef { path, permit };
            self.step(request, Some(at), ctx, |step, ctx| step.post_waiting(ctx));
        }
        self.send_announcements(at, ctx);
    }

    /// Stops accepting requests, and reports to the control shard when no request is running.
    /// Export limits do not delay the end of the path.
    fn finish_path(&mut self, row: PathRow, ctx: &mut Ctx<'_>) {
        self.paths[row].finish();
        let mut deferred = mem::take(&mut self.waiting.deferred);
        deferred.retain(|at| {
            let mut drops = false;
            if at.path == row {
                self.step(*at, None, ctx, |step, _| drops = step.drop_deferred());
            }
            !drops
        });
        self.waiting.deferred = deferred;
        self.release_path(row, ctx);
        self.end_path_if_over(row, ctx.out);
    }

    fn close_path(&mut self, row: PathRow, abrupt: bool, ctx: &mut Ctx<'_>) {
        let Self { devices, paths, waiting, .. } = self;
        let path = &mut paths[row];
        let limits = path.limits();
        path.close();
        // The rows of the removed requests are freed below.
        drop(devices.remove_delayed(row, ctx.now));
        waiting.deferred.retain(|at| at.path != row);
        waiting.settling.retain(|at| at.path != row);
        let permits: Vec<PermitId> = path.requests.iter().map(|(permit, _)| permit).collect();
        for permit in permits {
            let at = RequestRef { path: row, permit };
            Step { at, path, conn: None, devices, waiting, limits }.close(ctx.out);
        }
        for at in path.conns() {
            let conn = &mut self.conns[*at];
            conn.drop_waiting();
            let fabric = &mut ctx.fabrics[conn.provider.index()];
            if abrupt {
                fabric.abort(ctx.now, conn.qp);
            } else {
                fabric.disconnect(ctx.now, conn.qp);
            }
        }
        // From here on nothing that arrives is accepted, and running IO is registered as orphaned
        // writes; there is no need to wait until the connections have ended.
        path.report(EndReport::Stopped, ctx.out);
        self.end_path_if_over(row, ctx.out);
    }

    /// Ends the path on this shard if no requests or connections remain.
    fn end_path_if_over(&mut self, row: PathRow, out: &mut Outbox) {
        if self.paths.get_mut(row).is_some_and(|path| path.is_over(out)) {
            self.remove_path(row, out);
        }
    }

    fn remove_path(&mut self, row: PathRow, out: &mut Outbox) {
        if let Some(path) = self.paths.remove(row) {
            self.internal_errors += path.counters().internal_errors.get();
            self.by_key.remove(&path.shared.key);
            path.report(EndReport::Drained, out);
        }
    }

    /// Reports closed exports on which this shard no longer runs their session's requests.
    fn report_retired(&mut self, out: &mut Outbox) {
        let Self { paths, retiring, .. } = self;
        retiring.retain(|closed| {
            let mut of_session =
                paths.iter().filter(|(_, path)| path.shared.session.id == closed.session);
            let runs = of_session.any(|(_, path)| path.has_io_at(closed.export));
            if !runs || rtrs_core::mutated!(CloseWhileBusy) {
                out.control(ControlMessage::Retired { close: closed.close });
                return false;
            }
            true
        });
    }
}
