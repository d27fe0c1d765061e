//! The walk of a request on its core: immediate, permit, key, header, device, key, answer.
//!
//! Each step either moves the request on or leaves it in a state that names what it waits for;
//! whatever ends the wait calls the next step. A request that cannot be served is answered with
//! an errno; bytes that name nobody to answer end the path. The chunk's header is copied out once
//! and judged in the copy; with `always_invalidate` the peer's key is dead before that. How
//! requests wait for each other stands in `deferred.rs`.

use std::sync::Arc;

use rtrs_core::block::{Io, IoFlags, IoOp};
use rtrs_core::fabric::{Access, BindResult, RemoteMem};
use rtrs_core::ids::{ChunkIndex, PermitId, QpNum};
use rtrs_core::limits::SECTOR_SIZE;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;
use rtrs_core::wire::{
    ChunkRequest, IoHeader, Name, OpenRsp, RNBD_VERSION, ReadMsg, RwOp, SessInfoRsp, USER_LEN_MAX,
    UserMessage, errno,
};

use super::request::{IoProgress, IoStep, Request, RequestState, changes};
use super::validate::{judge_range, part_max};
use super::{Fabrics, RowMode, Shard, WorkId};
use crate::engine::device_table::DeviceId;
use crate::engine::io::devices::RequestRef;
use crate::engine::ledger::{FlushLedger, FlushMark};
use crate::engine::message::{ControlAnswer, ControlMail, ControlRequest, OpenMode, Outbox};
use crate::export::ExportIndex;
use crate::path::chunks::ChunkPool;
use crate::path::io::{Answer, SendQueue};
use crate::path::{PathEnd, PathShared, PeerFault};

/// What a judged header asks for.
enum Wanted {
    /// An answer at once.
    Refuse(u16),
    /// SESS_INFO: answer with this.
    Tell([u8; SessInfoRsp::LEN]),
    /// The control core's work.
    Control(ControlRequest),
    /// A device's work.
    Io(IoProgress),
}

impl Shard {
    /// The immediate of a request came.
    pub(super) fn arrived(
        &mut self,
        at: u32,
        permit: PermitId,
        offset: u32,
        imm: u32,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let Some(row) = self.conn(at).map(|conn| conn.path) else { return };
        if !self.takes_requests(row, out) {
            return;
        }
        let limits = self.params.limits;
        if !limits.has_permit(permit) || offset >= limits.chunk_size() {
            return self.break_path(row, PathEnd::Peer(PeerFault::Immediate(imm)), out);
        }
        let now = self.now();
        let Some(path) = self.path_mut(row) else { return };
        if path.requests.is_empty() {
            // Once per path and core; cores that never see a request need no rows.
            path.requests = (0..limits.queue_depth()).map(|_| Request::new()).collect();
        }
        let request = &mut path.requests[permit.index()];
        if request.state() != RequestState::Free {
            let fault = PeerFault::PermitReused(permit.0);
            return self.break_path(row, PathEnd::Peer(fault), out);
        }
        let told = request.told.take().and_then(|id| path.shared.session.devices.ledger(id));
        told.into_iter().for_each(|ledger| ledger.arrived(path.shared.key, permit));
        request.arrive(at, offset, now);
        self.claim(row, permit, fabrics, out);
    }

    /// Takes the peer's key for the chunk away, if it has one of its own. Where that is a work
    /// request, by a bind to the next key, which the peer learns with the answer: a revoke here and
    /// a bind there would cost two. A peer that guesses the next key can only spoil its own data;
    /// what is judged is a copy, made after the old key is dead (`parse`).
    pub(super) fn revoke(
        &mut self,
        row: u32,
        permit: PermitId,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let Some((shared, provider, qp, conn)) = self.place(row, permit) else {
            return self.abandon(row, permit, out);
        };
        let chunk = ChunkIndex::from(permit);
        let Some(window) = shared.chunks.get().and_then(|chunks| chunks.window(chunk)) else {
            return self.parse(row, permit, fabrics, out);
        };
        let wr_id = WorkId::Revoke(permit).encode(conn);
        let fabric = &mut fabrics[provider];
        let rebound = fabric.binds_are_requests();
        let result = if rebound {
            let Some(slice) = shared.chunks.get().map(|chunks| chunks.chunk(chunk)) else { return };
            fabric.bind(qp, window, &slice, Access::REMOTE_WRITE, wr_id)
        } else {
            fabric.revoke(qp, window, wr_id)
        };
        if rebound && let Ok(BindResult::Done(rkey) | BindResult::Pending(rkey)) = result {
            self.rebound(row, permit, rkey);
        }
        match result {
            Ok(BindResult::Done(_)) => self.parse(row, permit, fabrics, out),
            Ok(BindResult::Pending(_)) => self.go(row, permit, RequestState::Revoking),
            Err(error) => {
                self.abandon(row, permit, out);
                self.break_by_fabric(row, &error, out);
            }
        }
    }

    /// The peer's key for a request's chunk is dead.
    pub(super) fn revoked(
        &mut self,
        row: u32,
        permit: PermitId,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let Some(path) = self.path(row) else { return };
        let state = path.requests.get(permit.index()).map(Request::state);
        if state != Some(RequestState::Revoking) {
            return;
        }
        if matches!(path.mode, RowMode::Serving | RowMode::Finishing) {
            self.parse(row, permit, fabrics, out);
        } else {
            // The path went wrong meanwhile: nothing of it is begun any more.
            self.abandon(row, permit, out);
        }
    }

    /// Copies the header out of the chunk and judges it.
    fn parse(&mut self, row: u32, permit: PermitId, fabrics: &mut Fabrics, out: &mut Outbox) {
        self.go(row, permit, RequestState::Parsing);
        let chunk_size = self.params.limits.chunk_size();
        let Some(path) = self.path_mut(row) else { return };
        let Some(chunks) = path.shared.chunks.get() else { return };
        let request = &mut path.requests[permit.index()];
        let copy = |range: std::ops::Range<usize>, to: &mut [u8]| {
            let from = u32::try_from(range.start).unwrap_or(u32::MAX);
            chunks.copy_out(ChunkIndex::from(permit), from, to);
        };
        let mut message = [0; ReadMsg::LEN_MAX];
        let judged = ChunkRequest::message_range(request.offset, chunk_size).and_then(|range| {
            let message = &mut message[..range.len()];
            copy(range, message);
            ChunkRequest::parse(request.offset, message)
        });
        let judged = match judged {
            Ok(judged) => judged,
            Err(error) => {
                self.abandon(row, permit, out);
                return self.break_path(row, PathEnd::Peer(PeerFault::Wire(error)), out);
            }
        };
        request.data_len = judged.data_len;
        request.invalidate = judged.invalidate();
        request.target = judged.desc().map(|desc| RemoteMem { addr: desc.addr, rkey: desc.key });
        let mut header = [0; USER_LEN_MAX];
        let range = judged.user_range();
        let header = &mut header[..range.len()];
        copy(range, header);
        let version = path.shared.session.version();
        let wanted = match judged.user(header, version) {
            Ok(UserMessage::SessInfo(info)) => {
                path.shared.session.agree_version(info.ver, RNBD_VERSION);
                Wanted::Tell(SessInfoRsp::answer(info).encode())
            }
            Ok(UserMessage::Open { access, dev_name }) => match Name::new(dev_name) {
                Ok(name) => {
                    let (name, mode) = (Box::new(name), OpenMode::new(access, judged.data_len));
                    Wanted::Control(ControlRequest::Open { name, mode })
                }
                Err(_) => Wanted::Refuse(errno::EINVAL),
            },
            Ok(UserMessage::Close(close)) => {
                Wanted::Control(ControlRequest::Close { device: DeviceId(close.device_id) })
            }
            Ok(UserMessage::Fence(fence)) => Wanted::Control(ControlRequest::Fence(fence)),
            Ok(UserMessage::Io(op, io)) => self.judge_io(row, op, &io),
            Err(error) => {
                tracing::debug!(path = %path.shared.key, %permit, %error, "refused a request");
                Wanted::Refuse(error.errno())
            }
        };
        match wanted {
            Wanted::Refuse(errno) => self.finish(row, permit, errno, fabrics, out),
            Wanted::Tell(bytes) => {
                self.fill(row, permit, &bytes);
                self.finish(row, permit, 0, fabrics, out);
            }
            Wanted::Control(request) => {
                self.go(row, permit, RequestState::Control);
                let (core, Some(path)) = (self.core, self.path(row)) else { return };
                let path = path.shared.key;
                out.control(ControlMail::Request { path, core, permit, request });
            }
            Wanted::Io(io) if io.op == IoOp::Flush && rtrs_core::mutated!(FlushSkipped) => {
                self.finish(row, permit, 0, fabrics, out);
            }
            Wanted::Io(io) => self.start_io(row, permit, io, fabrics, out),
        }
    }

    /// Holds an IO against the session's device and makes a plan of it.
    fn judge_io(&mut self, row: u32, op: RwOp, header: &IoHeader) -> Wanted {
        let Some(path) = self.path(row) else { return Wanted::Refuse(errno::EIO) };
        let session = Arc::clone(&path.shared.session);
        let device = DeviceId(header.device_id);
        let Some(entry) = session.devices.get(device) else {
            return Wanted::Refuse(errno::ENOTCONN);
        };
        if let Err(errno) = self.ready_device(row, entry.export) {
            return Wanted::Refuse(errno);
        }
        let Some(geometry) = self.devices.geometry(entry.export) else {
            return Wanted::Refuse(errno::ENODEV);
        };
        let op = match op {
            RwOp::Read => IoOp::Read,
            RwOp::Write => IoOp::Write,
            RwOp::Flush => IoOp::Flush,
            RwOp::Discard => IoOp::Discard,
            RwOp::WriteZeroes => IoOp::WriteZeroes,
            RwOp::SecureErase => return Wanted::Refuse(errno::EOPNOTSUPP),
        };
        let changes = changes(op);
        // No session is let write to a read-only export (`access.rs`).
        if changes && !entry.writable {
            return Wanted::Refuse(IoStatus::ReadOnly.to_errno());
        }
        // A flush comes with sector -1: only what is read or changed has a place.
        let (offset, len) = match op {
            IoOp::Flush => (0, 0),
            _ => match header.sector.checked_mul(u64::from(SECTOR_SIZE)) {
                Some(offset) => (offset, header.bi_size),
                None => return Wanted::Refuse(errno::EINVAL),
            },
        };
        let status = judge_range(geometry, op, offset, len);
        if !status.is_ok() {
            return Wanted::Refuse(status.to_errno());
        }
        let fua = changes && header.rw.is_fua();
        // It has nothing to make durable, and may not take the error of what others wrote.
        let reads_only =
            !entry.writable && session.devices.ledger(device).is_none_or(FlushLedger::is_clean);
        if reads_only && op == IoOp::Flush {
            return Wanted::Refuse(0);
        }
        let preflush = header.rw.is_preflush() && !rtrs_core::mutated!(PreflushDropped);
        let io = IoProgress {
            export: entry.export,
            device,
            op,
            flags: IoFlags {
                fua: fua && geometry.fua && !rtrs_core::mutated!(FuaDropped),
                no_unmap: op == IoOp::WriteZeroes && header.rw.is_no_unmap(),
                fast_only: false,
            },
            step: if preflush && op != IoOp::Flush && !reads_only {
                IoStep::PreFlush
            } else {
                IoStep::Data
            },
            post_flush: fua && !geometry.fua && geometry.write_cache,
            offset,
            done: 0,
            len,
            part: 0,
            epoch: None,
            mark: FlushMark::default(),
            number: None,
            horizon: 0,
            saved_by: 0,
            unsaved_at: Instant::ZERO,
            status: IoStatus::Ok,
        };
        Wanted::Io(io)
    }

    /// Opens the device on this core, and makes the path's chunks known to it.
    pub(super) fn ready_device(&mut self, row: u32, export: ExportIndex) -> Result<(), u16> {
        let path = self.paths.get_mut(row as usize).and_then(Option::as_deref_mut);
        let Some(path) = path else { return Err(errno::EIO) };
        let Some(attached) = path.attached.get_mut(export.index()) else {
            return Err(errno::ENODEV);
        };
        let chunks = path.shared.chunks.get().filter(|_| !*attached);
        match self.devices.open(export, chunks.map(ChunkPool::region)) {
            Ok(_) => {
                *attached = true;
                Ok(())
            }
            Err(error) => {
                let at = export.index();
                tracing::warn!(%error, export = at, "cannot open the device on this core");
                Err(IoStatus::from_io_error(&error).to_errno())
            }
        }
    }

    /// Nothing bars an IO: it goes to its device, or queues up there.
    pub(super) fn begin_io(
        &mut self,
        row: u32,
        permit: PermitId,
        export: ExportIndex,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        if self.devices.is_contended(export) {
            self.go(row, permit, RequestState::Queued);
            self.devices.wait(export, RequestRef { path: row, permit });
        } else if !self.submit(row, permit, fabrics, out) {
            self.devices.wait(export, RequestRef { path: row, permit });
        }
    }

    /// Gives the device the next step of an IO. False when the device is full: the request is
    /// `Queued` then and has to wait for it.
    fn submit(
        &mut self,
        row: u32,
        permit: PermitId,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) -> bool {
        self.begin_sync(row, permit);
        let Some(path) = self.paths.get_mut(row as usize).and_then(Option::as_deref_mut) else {
            return true;
        };
        let request = &mut path.requests[permit.index()];
        let Some(progress) = request.io.as_mut() else { return true };
        let tag = RequestRef { path: row, permit }.tag();
        let export = progress.export;
        let io = if progress.step != IoStep::Data || progress.op == IoOp::Flush {
            let (op, flags) = (IoOp::Flush, IoFlags::default());
            Io { tag, op, flags, offset: 0, len: 0, buf: None }
        } else {
            let Some(geometry) = self.devices.geometry(export) else {
                self.finish(row, permit, errno::ENODEV, fabrics, out);
                return true;
            };
            let left = progress.len - progress.done;
            progress.part = left.min(part_max(geometry, progress.op));
            let buf = if matches!(progress.op, IoOp::Read | IoOp::Write) {
                let chunks = path.shared.chunks.get();
                chunks.and_then(|chunks| {
                    let chunk = chunks.chunk(ChunkIndex::from(permit));
                    chunk.slice(progress.done as usize, progress.part as usize)
                })
            } else {
                None
            };
            Io {
                tag,
                op: progress.op,
                flags: progress.flags,
                offset: progress.offset + u64::from(progress.done),
                len: progress.part,
                buf,
            }
        };
        let taken = self.devices.submit(export, io).is_ok();
        let to = if taken { RequestState::Submitted } else { RequestState::Queued };
        if request.state() != to {
            request.go(to);
        }
        if !taken {
            self.withdraw_sync(row, permit);
        }
        taken
    }

    /// Reaps what devices finished and gives them what waits. True when anything happened.
    pub(super) fn poll_devices(
        &mut self,
        now: Instant,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) -> bool {
        let mut busy = false;
        for at in 0..self.devices.count() {
            busy |= self.devices.poll(at, now);
            while let Some(completion) = self.devices.reap(at) {
                busy = true;
                let RequestRef { path, permit } = RequestRef::of(completion.tag);
                self.io_done(path, permit, completion.status, fabrics, out);
            }
            while let Some(waiting) = self.devices.next_waiting(at) {
                let RequestRef { path, permit } = waiting;
                let request = self.path(path).and_then(|row| row.requests.get(permit.index()));
                let Some(request) = request.filter(|r| r.state() == RequestState::Queued) else {
                    continue;
                };
                let export = request.io.map(|io| io.export);
                if !self.submit(path, permit, fabrics, out) {
                    if let Some(export) = export {
                        self.devices.wait_again(export, waiting);
                    }
                    break;
                }
                busy = true;
            }
            self.devices.sweep(at);
        }
        busy
    }

    /// A device ended a step of an IO.
    fn io_done(
        &mut self,
        row: u32,
        permit: PermitId,
        status: IoStatus,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let Some(path) = self.path_mut(row) else { return };
        let closing = path.mode == RowMode::Closing;
        let request = &mut path.requests[permit.index()];
        if request.state() != RequestState::Submitted {
            return;
        }
        self.end_sync(row, permit, status, out);
        if closing {
            // What remains of it is not begun: the effect of an unanswered request is open.
            return self.stray_ended(row, permit, out);
        }
        self.settle_io(row, permit, status, fabrics, out);
    }

    /// A step of an IO has ended for good: the next one, or the answer.
    pub(super) fn advance_io(
        &mut self,
        row: u32,
        permit: PermitId,
        status: IoStatus,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let Some(path) = self.path_mut(row) else { return };
        let request = &mut path.requests[permit.index()];
        let good = status.is_ok() || rtrs_core::mutated!(DeviceErrorDropped);
        let Some(io) = request.io.as_mut().filter(|_| good) else {
            return self.finish(row, permit, status.to_errno(), fabrics, out);
        };
        match io.step {
            IoStep::PreFlush => io.step = IoStep::Data,
            IoStep::Data => {
                io.done += io.part;
                if io.done >= io.len || rtrs_core::mutated!(FirstPartAnswers) {
                    if !io.post_flush || rtrs_core::mutated!(PostflushDropped) {
                        self.note_write(row, permit);
                        return self.finish(row, permit, 0, fabrics, out);
                    }
                    io.step = IoStep::PostFlush;
                }
            }
            IoStep::PostFlush => return self.finish(row, permit, 0, fabrics, out),
        }
        let export = io.export;
        if !self.submit(row, permit, fabrics, out) {
            self.devices.wait(export, RequestRef { path: row, permit });
        }
    }

    /// The control core answered an open or close.
    pub(super) fn control_answer(
        &mut self,
        row: u32,
        permit: PermitId,
        answer: ControlAnswer,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let waits = self.path(row).and_then(|path| path.requests.get(permit.index()));
        if waits.is_none_or(|request| request.state() != RequestState::Control) {
            return;
        }
        let errno = match answer {
            ControlAnswer::Done => 0,
            ControlAnswer::Refused(errno) => errno,
            ControlAnswer::Opened(bytes) => {
                let room = self.path(row).map_or(0, |p| p.requests[permit.index()].data_len);
                // Who has no room for all of the long form knows the short one only.
                let long = room as usize >= bytes.len();
                self.fill(row, permit, &bytes[..if long { bytes.len() } else { OpenRsp::LEN }]);
                0
            }
        };
        self.finish(row, permit, errno, fabrics, out);
    }

    /// Puts a response where the peer's read finds it, zeroes behind it.
    fn fill(&mut self, row: u32, permit: PermitId, bytes: &[u8]) {
        let Some(path) = self.path(row) else { return };
        let Some(chunks) = path.shared.chunks.get() else { return };
        let len = path.requests[permit.index()].data_len as usize;
        let chunk = chunks.chunk(ChunkIndex::from(permit));
        let Some(room) = chunk.slice(0, len) else { return };
        room.fill(0);
        room.copy_in(0, &bytes[..bytes.len().min(len)]);
    }

    /// The request is decided: give the chunk a fresh key, then answer.
    pub(super) fn finish(
        &mut self,
        row: u32,
        permit: PermitId,
        errno: u16,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        if let Some(path) = self.path_mut(row) {
            path.requests[permit.index()].errno = errno;
        }
        let Some((shared, provider, qp, conn)) = self.place(row, permit) else {
            return self.abandon(row, permit, out);
        };
        let chunk = ChunkIndex::from(permit);
        let Some(chunks) = shared.chunks.get() else { return self.abandon(row, permit, out) };
        let rebound = self.path(row).is_some_and(|path| path.requests[permit.index()].rebound);
        let Some(window) = chunks.window(chunk).filter(|_| !rebound) else {
            return self.respond(row, permit, fabrics, out);
        };
        let (slice, wr_id) = (chunks.chunk(chunk), WorkId::Bind.encode(conn));
        let bound = fabrics[provider].bind(qp, window, &slice, Access::REMOTE_WRITE, wr_id);
        match bound {
            // A pending bind is in force before anything posted behind it on the queue pair: when
            // the peer learns the key, it works. Nobody waits for its completion.
            Ok(BindResult::Done(rkey) | BindResult::Pending(rkey)) => {
                self.rebound(row, permit, rkey);
                self.respond(row, permit, fabrics, out);
            }
            Err(error) => {
                self.abandon(row, permit, out);
                self.break_by_fabric(row, &error, out);
            }
        }
    }

    /// Answers, in turn with what waits for room in the send queue.
    fn respond(&mut self, row: u32, permit: PermitId, fabrics: &mut Fabrics, out: &mut Outbox) {
        let Some((.., at)) = self.place(row, permit) else {
            return self.abandon(row, permit, out);
        };
        self.go(row, permit, RequestState::Responding);
        let Some(conn) = self.conn_mut(at) else { return };
        if conn.waiting.is_empty() && conn.queue.has_room(SendQueue::ANSWER_MAX) {
            self.post_answer(row, permit, fabrics, out);
        } else {
            conn.waiting.push_back(permit);
        }
    }

    /// Posts the answer of a request and lets go of its permit. There is room for it.
    pub(super) fn post_answer(
        &mut self,
        row: u32,
        permit: PermitId,
        fabrics: &mut Fabrics,
        out: &mut Outbox,
    ) {
        let Some((shared, provider, qp, at)) = self.place(row, permit) else {
            return self.abandon(row, permit, out);
        };
        let Some(path) = self.path(row) else { return };
        let request = &path.requests[permit.index()];
        if request.state() != RequestState::Responding {
            return;
        }
        let Some(chunks) = shared.chunks.get() else { return };
        let chunk = ChunkIndex::from(permit);
        let sends = request.errno == 0 && request.data_len > 0 && !rtrs_core::mutated!(ReadUnsent);
        let data = request.target.filter(|_| sends);
        let answer = Answer {
            permit,
            errno: request.errno,
            data: data.map(|remote| (chunks.sge(chunk, request.data_len), remote)),
            invalidate: request.invalidate,
            rkey: chunks.window(chunk).map(|_| (request.rkey, shared.messages.rkey_rsp(chunk))),
        };
        self.count(row, permit);
        // The permit is free before the answer can reach the peer, who may use it at once.
        self.release(row, permit);
        let Some(conn) = self.conn_mut(at) else { return };
        let covered = conn.queue.take(answer.requests());
        let wr_id = WorkId::Send(covered.unwrap_or(0)).encode(at);
        if let Err(error) = answer.post(&mut *fabrics[provider], qp, wr_id, covered.is_some()) {
            self.break_by_fabric(row, &error, out);
        }
        self.after_release(row, out);
    }

    /// Counts a request that is about to be answered.
    fn count(&self, row: u32, permit: PermitId) {
        let Some(path) = self.path(row) else { return };
        let request = &path.requests[permit.index()];
        let counters = path.shared.counters.core(self.core);
        let nanos = self.now().since(request.since).as_nanos();
        counters.busy_ns.add(u64::try_from(nanos).unwrap_or(u64::MAX));
        let good = request.errno == 0;
        if !good {
            counters.errors.add(1);
        }
        let bytes = if good { u64::from(request.data_len) } else { 0 };
        match request.io.map(|io| io.op) {
            Some(IoOp::Read) => {
                counters.reads.add(1);
                counters.read_bytes.add(bytes);
            }
            Some(IoOp::Write) => {
                counters.writes.add(1);
                if request.io.is_some_and(|io| io.flags.fua || io.post_flush) {
                    counters.fua_writes.add(1);
                }
                counters.write_bytes.add(bytes);
            }
            Some(IoOp::Flush) => counters.flushes.add(1),
            Some(IoOp::Discard) => counters.discards.add(1),
            Some(IoOp::WriteZeroes) => counters.write_zeroes.add(1),
            None => counters.controls.add(1),
        }
    }

    /// The path is closed: ends all its requests but those that a device works on.
    pub(super) fn abandon_requests(&mut self, row: u32) {
        let Some(path) = self.path(row) else { return };
        for at in 0..path.requests.len() {
            let permit = PermitId(u16::try_from(at).unwrap_or(u16::MAX));
            let state = self.path(row).map(|path| path.requests[at].state());
            match state {
                None | Some(RequestState::Free) => {}
                Some(RequestState::Submitted) => self.leave_running(row, permit),
                Some(state) => {
                    if state == RequestState::Barred {
                        self.count_unbarred(row);
                    }
                    self.release(row, permit);
                }
            }
        }
    }

    /// Ends a request without an answer.
    fn abandon(&mut self, row: u32, permit: PermitId, out: &mut Outbox) {
        self.release(row, permit);
        self.after_release(row, out);
    }

    /// Frees the row and the permit.
    fn release(&mut self, row: u32, permit: PermitId) {
        let core = self.core;
        let Some(path) = self.path(row) else { return };
        let holder = self.holder(path);
        let Some(path) = self.path_mut(row) else { return };
        path.requests[permit.index()].go(RequestState::Free);
        path.inflight -= 1;
        path.shared.counters.core(core).inflight.sub(1);
        path.shared.session.permits.release(permit, holder);
    }

    fn go(&mut self, row: u32, permit: PermitId, to: RequestState) {
        if let Some(path) = self.path_mut(row) {
            path.requests[permit.index()].go(to);
        }
    }

    /// The chunk of a request has its next key.
    fn rebound(&mut self, row: u32, permit: PermitId, rkey: rtrs_core::ids::Rkey) {
        if let Some(path) = self.path_mut(row) {
            let request = &mut path.requests[permit.index()];
            (request.rkey, request.rebound) = (rkey, true);
        }
    }

    /// Where a request is answered, unless its connection is gone or the path is closing.
    fn place(&self, row: u32, permit: PermitId) -> Option<(Arc<PathShared>, usize, QpNum, u32)> {
        let path = self.path(row)?;
        if path.mode == RowMode::Closing {
            return None;
        }
        let at = path.requests[permit.index()].conn;
        let conn = self.conn(at).filter(|conn| conn.path == row)?;
        Some((Arc::clone(&path.shared), conn.provider, conn.qp, at))
    }
}
