//! The request pipeline of a shard, top to bottom: a request arrives, claims its permit, has the
//! peer's key revoked, is parsed and validated, runs on the device, and is answered.
//!
//! Each step calls the next one, or leaves the request in a state with the data it needs to
//! continue (`request.rs`); the event that ends the wait continues at the step below. A request
//! that cannot be served is answered with an errno; a malformed request without a recipient for an
//! answer ends its path. An impossible state also ends its path, and is counted and logged
//! ([`LocalPath::internal_error`]). The message is copied out of the chunk once and the copy is
//! validated; with `always_invalidate` the peer's key is revoked before that.
//!
//! Any shard may end three waits, without a message: `Deferred`, for the permit, which a path that
//! is not closed still holds (`permits.rs`); `Blocked`, for orphaned writes of a closed path to the
//! bytes that are to change (`overlap.rs`); and `Turn`, for other changes to a block (`turns.rs`).
//! A shard with such a request therefore checks it on each turn, and every millisecond when nothing
//! else happens. A deferred request has no permit and is dropped when its path finishes. The others
//! hold their permits, count as in flight, and are dropped when their paths close. The same applies
//! to `Throttled` requests, which rate limits delay before these waits (`delayed.rs`).

use std::ops::Range;

use rtrs_core::block::{Completion, Io, IoFlags, IoOp};
use rtrs_core::fabric::{Access, BindResult, RemoteMem};
use rtrs_core::ids::ChunkIndex;
use rtrs_core::limits::Limits;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;
use rtrs_core::wire::{
    ChunkRequest, IoHeader, Name, RNBD_VERSION, ReadMsg, RwOp, SessInfoRsp, USER_LEN_MAX,
    UserMessage, WireError, errno,
};

use super::conn::{Conn, WorkId};
use super::device_errors::is_device_error;
use super::devices::Devices;
use super::overlap::{OrphanedWrite, touches};
use super::path::{Accepts, LocalPath, Mode};
use super::permits::Claim;
use super::progress::{IoProgress, IoStep};
use super::request::{Arrival, Parsed, Reply, Request, RequestState, State, Wait};
use super::sync::{Account, Next, Settling};
use super::table::{RequestRef, Waiting};
use super::validate::{IoTarget, part_max, plan_io};
use crate::engine::ctx::Ctx;
use crate::engine::device_table::DeviceId;
use crate::engine::finder::OpenMode;
use crate::engine::ledger::FlushLedger;
use crate::engine::message::{ControlAnswer, ControlMessage, ControlRequest, Outbox, ReplyTo};
use crate::export::ExportIndex;
use crate::path::io::Answer;
use crate::path::{PathEnd, PathKey, PeerFault};
use crate::stats::ServerTimes;

/// Interval at which requests that wait for others are checked when nothing else happens.
pub(super) const RECHECK_INTERVAL: Duration = Duration::from_millis(1);

/// A request in the pipeline, with everything that serves it, looked up once per event.
#[derive(Debug)]
pub(super) struct Step<'a> {
    pub(super) at: RequestRef,
    pub(super) path: &'a mut LocalPath,
    /// Connection that the request arrived over; None if it has ended.
    pub(super) conn: Option<&'a mut Conn>,
    pub(super) devices: &'a mut Devices,
    pub(super) waiting: &'a mut Waiting,
    pub(super) limits: Limits,
}

/// Action that a request asks for.
enum Wanted {
    /// Immediate answer with this errno.
    Answer(u16),
    /// SESS_INFO: answer with this data.
    SessInfo([u8; SessInfoRsp::LEN]),
    /// Request to the control shard.
    Control(ControlRequest),
    /// IO for a device.
    Io(IoProgress),
}

impl Step<'_> {
    /// Step 1. Accepts a request that arrived over a connection with the immediate `imm`, which
    /// encodes the permit and `offset`.
    pub(super) fn arrive(&mut self, offset: u32, imm: u32, ctx: &mut Ctx<'_>) {
        let permit = self.at.permit;
        let Some(conn) = self.conn.as_ref().map(|conn| conn.row) else {
            return self.path.internal_error("a request has no connection", ctx.out);
        };
        let accepts = self.path.accepts(ctx.out);
        if accepts == Accepts::Nothing {
            return;
        }
        if !self.limits.has_permit(permit) || offset >= self.limits.chunk_size() {
            return self.path.violation(PeerFault::Immediate(imm), ctx.out);
        }
        if self.path.shared.chunks.get().is_none() {
            return self.path.internal_error("a serving path has no chunks", ctx.out);
        }
        if self.path.requests[permit].state() != RequestState::Free {
            return self.path.violation(PeerFault::PermitReused(permit.0), ctx.out);
        }
        if accepts == Accepts::Closes && !self.is_close(offset) {
            return;
        }
        let request = &mut self.path.requests[permit];
        let reported = request.reported_loss.take();
        let shared = &self.path.shared;
        if let Some(ledger) = reported.and_then(|id| shared.session.devices.ledger(id)) {
            ledger.arrived(shared.key, permit);
        }
        let unproved = self.path.shared.is_unproved();
        let since = ctx.now;
        let arrival = Arrival { conn, offset, since, is_copy: false, unproved, key: None };
        self.claim(arrival, ctx);
    }

    /// Step 2. Claims the permit, or defers the request until the permit is free.
    fn claim(&mut self, mut arrival: Arrival, ctx: &mut Ctx<'_>) {
        let permit = self.at.permit;
        let permits = self.path.shared.permits(arrival.unproved);
        match permits.claim(permit, self.path.holder()) {
            Claim::Granted => {
                self.path.begin_request();
                self.revoke(arrival, ctx);
            }
            Claim::Own => {
                self.request().end();
                self.path.violation(PeerFault::PermitReused(permit.0), ctx.out);
            }
            Claim::Other(original) => {
                if !arrival.is_copy {
                    arrival.is_copy = true;
                    self.request().go(State::Deferred(arrival));
                    self.path.counters().replays.add(1);
                    // The answer was never sent, so the client abandoned the other path: nothing
                    // that is still in transit there may run after what arrives here.
                    let end = PathEnd::Superseded(self.path.shared.key);
                    let path = PathKey(original.path);
                    ctx.out.control(ControlMessage::Broken { path, end });
                }
                self.waiting.deferred.push(self.at);
            }
        }
    }

    /// Step 3. Revokes the peer's key for the chunk, if the chunk has its own. If that takes a work
    /// request, it is done by a bind to the next key, which the peer learns with the answer: a
    /// revoke here and a bind later would cost two. A peer that guesses the next key can only
    /// corrupt its own data; the validated message is a copy, made after the old key is revoked.
    fn revoke(&mut self, mut arrival: Arrival, ctx: &mut Ctx<'_>) {
        let answers = self.path.answers();
        let conn = self.conn.as_deref().filter(|_| answers);
        let Some(conn) = conn else { return self.release(ctx.out) };
        let (chunks, chunk) = (self.path.chunks(), ChunkIndex::from(self.at.permit));
        let Some(window) = chunks.window(chunk) else { return self.parse(arrival, ctx) };
        let fabric = &mut ctx.fabrics[conn.provider.index()];
        let wr_id = WorkId::Revoke(self.at.permit).encode(conn.row);
        let result = if fabric.capabilities().binds_are_requests {
            let slice = chunks.chunk(chunk);
            let bound = fabric.bind(conn.qp, window, &slice, Access::REMOTE_WRITE, wr_id);
            if let Ok(BindResult::Done(key) | BindResult::Pending(key)) = bound {
                arrival.key = Some(key);
            }
            bound
        } else {
            fabric.revoke(conn.qp, window, wr_id)
        };
        match result {
            Ok(BindResult::Done(_)) => self.parse(arrival, ctx),
            Ok(BindResult::Pending(_)) => self.request().go(State::Revoking(arrival)),
            Err(error) => {
                self.release(ctx.out);
                self.path.fail_by_fabric(&error, ctx.out);
            }
        }
    }

    /// Ends `Revoking`: the peer's key for the chunk is revoked.
    pub(super) fn revoked(&mut self, ctx: &mut Ctx<'_>) {
        match self.path.requests.get(self.at.permit).map(Request::get) {
            Some(&State::Revoking(arrival)) if self.path.may_begin() => self.parse(arrival, ctx),
            Some(State::Revoking(_)) => self.release(ctx.out),
            // The request was dropped when the path was closed.
            _ if self.path.mode() == Mode::Closing => {}
            _ => self.path.internal_error("a key was revoked without a request", ctx.out),
        }
    }

    /// Step 4. Copies the message out of the chunk, validates it, and executes it.
    fn parse(&mut self, arrival: Arrival, ctx: &mut Ctx<'_>) {
        let message = match self.read_message(arrival.offset) {
            Ok(message) => message,
            Err(error) => {
                self.release(ctx.out);
                return self.path.violation(PeerFault::Wire(error), ctx.out);
            }
        };
        let data_len = message.data_len;
        let target = message.desc().map(|desc| RemoteMem { addr: desc.addr, rkey: desc.key });
        let request = Parsed { arrival, data_len, target, invalidate: message.invalidate() };
        let mut header = [0; USER_LEN_MAX];
        let user = self.read_user_message(&message, &mut header);
        let wanted = self.wanted(&request, user);
        self.execute(request, wanted, ctx);
    }

    /// Copies the RTRS message at `offset` out of the chunk and validates it.
    fn read_message(&self, offset: u32) -> Result<ChunkRequest, WireError> {
        let mut message = [0; ReadMsg::LEN_MAX];
        let range = ChunkRequest::message_range(offset, self.limits.chunk_size())?;
        let message = &mut message[..range.len()];
        self.copy_out(range.start, message);
        ChunkRequest::parse(offset, message)
    }

    /// Copies the user header of a message out of the chunk into `header` and validates it.
    fn read_user_message<'h>(
        &self,
        message: &ChunkRequest,
        header: &'h mut [u8; USER_LEN_MAX],
    ) -> Result<UserMessage<'h>, WireError> {
        let range = message.user_range();
        let header = &mut header[..range.len()];
        self.copy_out(range.start, header);
        message.user(header, self.path.shared.session.version())
    }

    /// Whether the message at `offset` closes a device. The peer may change it until its key is
    /// revoked, but a different request then delays only the end of the peer's own path.
    fn is_close(&self, offset: u32) -> bool {
        let mut header = [0; USER_LEN_MAX];
        let Ok(message) = self.read_message(offset) else { return false };
        matches!(self.read_user_message(&message, &mut header), Ok(UserMessage::Close(_)))
    }

    fn copy_out(&self, from: usize, to: &mut [u8]) {
        let from = u32::try_from(from).unwrap_or(u32::MAX);
        self.path.chunks().copy_out(ChunkIndex::from(self.at.permit), from, to);
    }

    /// Decides how to serve a request from its user header. Refuses all but authentication to a
    /// client that has not authenticated.
    fn wanted(&mut self, request: &Parsed, user: Result<UserMessage<'_>, WireError>) -> Wanted {
        let data_len = request.data_len;
        match user {
            Ok(UserMessage::Challenge(challenge)) => {
                Wanted::Control(ControlRequest::Challenge { challenge, room: data_len })
            }
            Ok(UserMessage::Auth(auth)) => {
                let mut proof = vec![0; data_len as usize].into_boxed_slice();
                self.copy_out(0, &mut proof);
                Wanted::Control(ControlRequest::Auth { version: auth.version, proof })
            }
            _ if request.arrival.unproved => Wanted::Answer(errno::EACCES),
            Ok(UserMessage::SessInfo(info)) => {
                self.path.shared.session.agree_version(info.ver, RNBD_VERSION);
                Wanted::SessInfo(SessInfoRsp::answer(info).encode())
            }
            Ok(UserMessage::Open { access, flags, dev_name }) => match Name::new(dev_name) {
                Ok(name) => {
                    let mode = OpenMode::new(access, flags, data_len);
                    Wanted::Control(ControlRequest::Open { name: Box::new(name), mode })
                }
                Err(_) => Wanted::Answer(errno::EINVAL),
            },
            Ok(UserMessage::Close(close)) => {
                Wanted::Control(ControlRequest::Close { device: DeviceId(close.device_id) })
            }
            Ok(UserMessage::Fence(fence)) => Wanted::Control(ControlRequest::Fence(fence)),
            Ok(UserMessage::Move(wanted)) => Wanted::Control(ControlRequest::Move(wanted)),
            Ok(UserMessage::Discover { after }) => {
                Name::new(after).map(Box::new).map_or(Wanted::Answer(errno::EINVAL), |after| {
                    Wanted::Control(ControlRequest::Discover { after, room: data_len })
                })
            }
            Ok(UserMessage::Io(op, io)) => {
                self.validate_io(op, &io, data_len).map_or_else(Wanted::Answer, Wanted::Io)
            }
            Err(error) => {
                let (path, permit) = (self.path.shared.key, self.at.permit);
                tracing::debug!(%path, %permit, %error, "refused a request");
                Wanted::Answer(error.errno())
            }
        }
    }

    /// Executes the action that a request asks for.
    fn execute(&mut self, request: Parsed, wanted: Wanted, ctx: &mut Ctx<'_>) {
        match wanted {
            Wanted::Answer(errno) => self.finish(request, Reply::errno(errno), ctx),
            Wanted::SessInfo(bytes) => {
                self.fill(request.data_len, &bytes);
                self.finish(request, Reply::errno(0), ctx);
            }
            Wanted::Control(asked) => {
                self.request().go(State::Control(request));
                let (path, core) = (self.path.shared.key, self.path.holder().core);
                let reply_to = ReplyTo { path, core, permit: self.at.permit };
                ctx.out.control(ControlMessage::Request { reply_to, request: asked });
            }
            Wanted::Io(io) if io.op == IoOp::Flush && rtrs_core::mutated!(FlushSkipped) => {
                self.finish(request, Reply::errno(0), ctx);
            }
            Wanted::Io(io) if self.devices.delays(self.at, &io, ctx.now) => {
                self.request().go(State::Io(request, Wait::Throttled, io));
            }
            Wanted::Io(io) => self.start(request, io, ctx),
        }
    }

    /// Ends `Control`: the control shard answered an open, a close or a fence.
    pub(super) fn control_answered(&mut self, answer: &ControlAnswer, ctx: &mut Ctx<'_>) {
        let request = match self.path.requests.get(self.at.permit).map(Request::get) {
            Some(&State::Control(request)) => request,
            // The request was dropped when the path was closed.
            _ if self.path.mode() == Mode::Closing => return,
            _ => {
                return self
                    .path
                    .internal_error("an answer without an open, close or fence", ctx.out);
            }
        };
        let (errno, data) = answer.parts(request.data_len as usize);
        if !data.is_empty() {
            self.fill(request.data_len, data);
        }
        let explained = errno != 0 && !data.is_empty();
        let reply = Reply { explained, ..Reply::errno(errno) };
        self.finish(request, reply, ctx);
    }

    /// Step 5. Validates an IO against the session's device and plans it. The error is the errno of
    /// an immediate answer, 0 if there is nothing to do.
    fn validate_io(&mut self, op: RwOp, io: &IoHeader, room: u32) -> Result<IoProgress, u16> {
        let device = DeviceId(io.device_id);
        let entry = self.path.shared.session.devices.lookup(device)?;
        self.open_device(entry.export)?;
        let geometry = self.devices.geometry(entry.export);
        // A session that cannot write and never wrote has nothing to make durable, and must not
        // consume the error of other sessions' writes.
        let ledger = self.path.shared.session.devices.ledger(device);
        let reads_only = !entry.writable && ledger.is_none_or(FlushLedger::is_clean);
        let target = IoTarget { device, entry, geometry, reads_only, limits: self.limits };
        plan_io(target, op, io, room)
    }

    /// Opens the device on this shard, and registers the path's chunks with it.
    pub(super) fn open_device(&mut self, export: ExportIndex) -> Result<(), u16> {
        let attached = self.path.is_attached(export);
        let region = (!attached).then(|| self.path.chunks().region());
        if let Err(error) = self.devices.open(export, region) {
            tracing::warn!(%error, export = export.index(), "cannot open the device on this shard");
            return Err(IoStatus::from_io_error(&error).to_errno());
        }
        self.path.set_attached(export, true);
        Ok(())
    }

    /// Step 6. Begins an IO that no limit delays. It may be blocked by a closed path's orphaned
    /// write to its bytes, wait for its turn, or queue for a full device.
    pub(super) fn start(&mut self, mut request: Parsed, io: IoProgress, ctx: &mut Ctx<'_>) {
        if self.is_blocked(&io) {
            self.note_blocked(&mut request.arrival, &io);
            self.request().go(State::Io(request, Wait::Blocked, io));
            self.waiting.deferred.push(self.at);
        } else if !self.is_free(&io) {
            self.request().go(State::Io(request, Wait::Turn, io));
            self.begin_in_turn(io.export, ctx);
        } else if self.devices.is_contended(io.export) {
            self.request().go(State::Io(request, Wait::Queued, io));
            self.devices.wait(io.export, self.at);
        } else {
            self.request().go(State::Io(request, Wait::Submitted, io));
            self.submit_or_wait(io.export, ctx);
        }
    }

    /// Begins an IO now, unless it must wait for its turn.
    fn begin_in_turn(&mut self, export: ExportIndex, ctx: &mut Ctx<'_>) {
        if !self.takes_turn(ctx.out) {
            self.request().wait(Wait::Turn);
            self.waiting.deferred.push(self.at);
        } else if self.devices.is_contended(export) {
            self.request().wait(Wait::Queued);
            self.devices.wait(export, self.at);
        } else {
            self.request().wait(Wait::Submitted);
            self.submit_or_wait(export, ctx);
        }
    }

    /// Whether an orphaned write may still change bytes that this IO changes. Usually costs one
    /// load.
    fn is_blocked(&self, io: &IoProgress) -> bool {
        let bytes = io.bytes();
        let waits = io.changes() && !rtrs_core::mutated!(OverlapIgnored);
        waits && self.devices.orphaned(io.export).any(|_, write| touches(write, &bytes))
    }

    fn note_blocked(&self, arrival: &mut Arrival, io: &IoProgress) {
        let (permit, shared) = (self.at.permit, &self.path.shared);
        let counters = self.path.counters();
        counters.blocked.add(1);
        // Either the client resent the write, or it abandoned an earlier request with this permit.
        let original = |other: &OrphanedWrite, write: &Range<u64>| {
            (other.session, other.permit) == (shared.session.id, permit)
                && touches(write, &io.bytes())
        };
        if !arrival.is_copy && self.devices.orphaned(io.export).any(original) {
            arrival.is_copy = true;
            counters.replays.add(1);
        }
        tracing::debug!(
            path = %shared.key,
            %permit,
            bytes = ?io.bytes(),
            "blocked by an orphaned write of a closed path"
        );
    }

    /// Checks whether `Deferred`, `Blocked` or `Turn` has ended.
    pub(super) fn recheck(&mut self, ctx: &mut Ctx<'_>) {
        match *self.path.requests[self.at.permit].get() {
            State::Deferred(arrival) => self.claim(arrival, ctx),
            State::Io(_, Wait::Blocked | Wait::Turn, io)
                if !self.path.may_begin() || self.is_blocked(&io) =>
            {
                self.waiting.deferred.push(self.at);
            }
            State::Io(request, wait @ (Wait::Blocked | Wait::Turn), io) => {
                if matches!(wait, Wait::Blocked) {
                    self.path.counters().blocked.sub(1);
                }
                // Nothing has kept the device open in the meantime.
                if let Err(errno) = self.open_device(io.export) {
                    let reply = Reply::to_io(errno, &io);
                    return self.finish(request, reply, ctx);
                }
                self.begin_in_turn(io.export, ctx);
            }
            _ => self.path.internal_error("a request waits for others in the wrong state", ctx.out),
        }
    }

    fn submit_or_wait(&mut self, export: ExportIndex, ctx: &mut Ctx<'_>) {
        if !self.submit(ctx) {
            self.devices.wait(export, self.at);
        }
    }

    /// Step 7. Submits the next step of an IO to the device. Returns false if the device is full:
    /// the request is then `Queued` and must wait for it.
    fn submit(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let Self { at, path, devices, .. } = self;
        let (tag, permit) = (at.tag(), at.permit);
        let shared = &path.shared;
        let request = &mut path.requests[permit];
        let Some(io) = request.io_mut() else {
            path.internal_error("a submitted request is not an IO", ctx.out);
            return true;
        };
        let part_max = part_max(devices.geometry(io.export), io.op);
        io.device_time.begin(ctx.now);
        let order = if io.is_flush() {
            let (op, flags) = (IoOp::Flush, IoFlags::default());
            Io { tag, op, flags, offset: 0, len: 0, buf: None }
        } else {
            io.part = (io.len - io.done).min(part_max);
            let moves_data = matches!(io.op, IoOp::Read | IoOp::Write | IoOp::Extents);
            let bytes = if io.op == IoOp::Extents { io.room } else { io.part };
            let at = io.done + io.partial.map_or(0, |part| part.block_at);
            let chunks = shared.chunks.get().filter(|_| moves_data);
            let chunk = chunks.map(|chunks| chunks.chunk(ChunkIndex::from(permit)));
            let (op, flags) = match io.step {
                IoStep::ReadBlock => (IoOp::Read, IoFlags::default()),
                _ => (io.op, io.flags),
            };
            Io {
                tag,
                op,
                flags,
                offset: io.offset + u64::from(io.done),
                len: io.part,
                buf: chunk.and_then(|chunk| chunk.slice(at as usize, bytes as usize)),
            }
        };
        let taken = io.submit(order, Account::of(shared, permit, io.device), devices);
        request.wait(if taken { Wait::Submitted } else { Wait::Queued });
        taken
    }

    /// Ends `Queued`, if the device has room. Returns false if it is full again, and the request
    /// remains first in the queue; None if the path was closed while the request was queued.
    pub(super) fn resubmit(&mut self, ctx: &mut Ctx<'_>) -> Option<bool> {
        let request = self.path.requests.get(self.at.permit);
        let queued = request.filter(|request| request.state() == RequestState::Queued);
        let export = queued.and_then(Request::io)?.export;
        let taken = self.submit(ctx);
        if !taken {
            self.devices.wait_first(export, self.at);
        }
        Some(taken)
    }

    /// Ends `Submitted`: the device has completed a step of an IO.
    pub(super) fn device_done(&mut self, completion: Completion, ctx: &mut Ctx<'_>) {
        let status = completion.status;
        let request = &mut self.path.requests[self.at.permit];
        let submitted = request.state() == RequestState::Submitted;
        let Some(io) = request.io_mut().filter(|_| submitted) else {
            return self.path.internal_error("a device completed an unknown IO", ctx.out);
        };
        io.device_time.end(ctx.now);
        if is_device_error(status) {
            self.devices.log_error(io, completion, ctx.now);
        }
        let (end, wakes) = io.end_sync(ctx.now, status, self.devices);
        if is_device_error(status) {
            self.path.counters().device_errors.add(1);
        }
        if wakes {
            self.devices.wake_others(ctx.out);
        }
        if self.path.mode() == Mode::Closing {
            // Later steps do not begin: an unanswered request may or may not take effect.
            return self.orphaned_write_ended(ctx.out);
        }
        if status == IoStatus::Moved {
            // The request is not answered: the client resends it to the server that now serves the
            // export.
            self.release(ctx.out);
            return self.path.fail(PathEnd::Moved, ctx.out);
        }
        self.settle(end, ctx);
    }

    /// Step 8. Acts on the result of a step, now or once the syncs that decide it have ended.
    fn settle(&mut self, end: Settling, ctx: &mut Ctx<'_>) {
        let request = &mut self.path.requests[self.at.permit];
        let Some(io) = request.io() else {
            return self.path.internal_error("a settling request is not an IO", ctx.out);
        };
        if io.is_settled(&end, ctx.now, self.devices) {
            return self.advance(end.status, ctx);
        }
        io.count_settling(true, self.devices);
        request.wait(Wait::Settling(end));
        self.waiting.settling.push(self.at);
    }

    /// Checks whether `Settling` has ended.
    pub(super) fn recheck_settling(&mut self, ctx: &mut Ctx<'_>) {
        let State::Io(_, Wait::Settling(end), io) = self.path.requests[self.at.permit].get() else {
            return self.path.internal_error("a request settles in the wrong state", ctx.out);
        };
        if !io.is_settled(end, ctx.now, self.devices) {
            return self.waiting.settling.push(self.at);
        }
        io.end_settling(end, self.devices);
        let status = end.status;
        self.advance(status, ctx);
    }

    /// Step 9. Processes a settled step: continues with the next one, or answers.
    fn advance(&mut self, status: IoStatus, ctx: &mut Ctx<'_>) {
        let (shared, permit) = (&self.path.shared, self.at.permit);
        let request = &mut self.path.requests[permit];
        let Some(io) = request.io_mut() else {
            return self
                .path
                .internal_error("a step of a request that is not an IO ended", ctx.out);
        };
        let account = Account::of(shared, permit, io.device);
        match io.end_step(status, account, self.devices) {
            Next::PutIn(part) => {
                let io = *io;
                // The unchanged block must not be written as if it were changed.
                if !self.put_in(&io, part) {
                    return self.finish_io(errno::EIO, ctx);
                }
                self.submit_or_wait(io.export, ctx);
            }
            Next::Submit => {
                let export = io.export;
                self.submit_or_wait(export, ctx);
            }
            Next::Answer(errno) => self.finish_io(errno, ctx),
            Next::ReportLoss(errno) => {
                request.reported_loss = Some(io.device);
                self.finish_io(errno, ctx);
            }
        }
    }

    fn finish_io(&mut self, errno: u16, ctx: &mut Ctx<'_>) {
        match *self.path.requests[self.at.permit].get() {
            State::Io(request, _, ref io) => {
                let took =
                    ServerTimes::new(request.arrival.since, ctx.now, io.device_time.spent_ns());
                self.devices.answered(io, errno == 0, took);
                let reply = Reply::to_io(errno, io);
                let chunk = self.path.chunks().chunk(ChunkIndex::from(self.at.permit));
                let request = if io.op == IoOp::Extents { request.cut(&chunk) } else { request };
                self.finish(request, reply, ctx);
            }
            _ => self.path.internal_error("an answered request is not an IO", ctx.out),
        }
    }

    /// Step 10. Finishes a request whose result is decided: binds the chunk's window under a fresh
    /// key, then answers, in order with the answers that are waiting for room in the send queue.
    pub(super) fn finish(&mut self, mut request: Parsed, reply: Reply, ctx: &mut Ctx<'_>) {
        self.end_turn(ctx.out);
        let answers = self.path.answers();
        let conn = self.conn.as_deref_mut().filter(|_| answers);
        let Some(conn) = conn else { return self.release(ctx.out) };
        let (chunks, chunk) = (self.path.chunks(), ChunkIndex::from(self.at.permit));
        if request.arrival.key.is_none()
            && let Some(window) = chunks.window(chunk)
        {
            let (slice, wr_id) = (chunks.chunk(chunk), WorkId::Bind.encode(conn.row));
            let fabric = &mut ctx.fabrics[conn.provider.index()];
            match fabric.bind(conn.qp, window, &slice, Access::REMOTE_WRITE, wr_id) {
                // A pending bind takes effect before anything posted after it on the queue pair:
                // when the peer learns the key, the key is valid. No request waits for the
                // completion.
                Ok(BindResult::Done(key) | BindResult::Pending(key)) => {
                    request.arrival.key = Some(key);
                }
                Err(error) => {
                    self.release(ctx.out);
                    return self.path.fail_by_fabric(&error, ctx.out);
                }
            }
        }
        if conn.takes_answer() {
            self.post(request, reply, ctx);
        } else {
            conn.wait(self.at.permit);
            self.request().go(State::Responding(request, reply));
        }
    }

    /// Ends `Responding`: the send queue has room.
    pub(super) fn post_waiting(&mut self, ctx: &mut Ctx<'_>) {
        match *self.path.requests[self.at.permit].get() {
            State::Responding(request, reply) => self.post(request, reply, ctx),
            _ => self.path.internal_error("an answer waits in the wrong state", ctx.out),
        }
    }

    /// Step 11. Posts the answer and releases the permit.
    fn post(&mut self, request: Parsed, reply: Reply, ctx: &mut Ctx<'_>) {
        let (permit, chunk) = (self.at.permit, ChunkIndex::from(self.at.permit));
        let shared = &self.path.shared;
        let Parsed { arrival, data_len, target, invalidate } = request;
        let answered = reply.errno == 0 || reply.explained;
        let sends = answered && data_len > 0 && !rtrs_core::mutated!(ReadUnsent);
        let data = target.filter(|_| sends);
        let took = ServerTimes::new(arrival.since, ctx.now, reply.backend_ns);
        let answer = Answer {
            permit,
            errno: reply.errno,
            data: data.map(|remote| (self.path.chunks().sge(chunk, data_len), remote)),
            invalidate,
            rkey: arrival.key.map(|key| (key, shared.messages.rkey_rsp(chunk, shared.times))),
            took,
        };
        self.path.counters().answered(reply.errno == 0, reply.io, data_len, took);
        // The permit is free before the answer can reach the peer, which may reuse it immediately.
        self.release(ctx.out);
        let Some(conn) = self.conn.as_deref_mut() else {
            return self.path.internal_error("an answer has no connection", ctx.out);
        };
        if let Err(error) = conn.answer(answer, ctx.fabrics) {
            self.path.fail_by_fabric(&error, ctx.out);
        }
    }

    pub(super) fn request(&mut self) -> &mut Request {
        &mut self.path.requests[self.at.permit]
    }

    /// Frees the row and the permit without an answer, because the connection has ended or the path
    /// is closed.
    pub(super) fn release(&mut self, out: &mut Outbox) {
        self.end_turn(out);
        self.request().end();
        self.path.end_request();
        self.path.release_permit(self.at.permit);
    }
}
