//! One NBD connection on one shard.
//!
//! Bytes are received into a buffer of the registered pool. The payload of a write is submitted to
//! the device from where it was received: while large writes arrive, each receive is limited so
//! that the payload fills a fresh buffer and only the next header follows it; small writes are
//! received in bulk, many to a buffer. Only a request that straddles the end of a buffer is moved,
//! and for a large write that is at most its header. Reads are answered from the memory that the
//! device filled. Replies are sent in the order in which requests finish, many per system call.
//!
//! The kernel's end of a device ([`crate::kernel`]) is such a connection too, without a handshake
//! and without timeouts: it is trusted, it has no alternative, and when memory is short it may read
//! and write slowly. Closing it would fail IO that is merely late. It ends when the device is
//! disconnected, which has timeouts of its own.
//!
//! This file holds the lifecycle and the timeouts of a connection; `parse` turns bytes into
//! requests, `socket` receives and sends. Called by `bridge`.

mod parse;
mod socket;

use std::collections::VecDeque;
use std::fmt;

use rtrs_core::block::IoOp;
use rtrs_core::mem::{IoVecs, MemSlice, Region};
use rtrs_core::rt::{Fd, Op as RingOp, OpId, PeerEnd, Port, peer_end, unread};
use rtrs_core::time::{Duration, Instant};

use crate::buffers::ReadMemory;
use crate::group::{Due, ROUND_TIMEOUT};
use crate::kernel::FIRST_BYTES;
use crate::notices::{self, Notice};
use crate::peer::Peer;
use crate::proto::{Handshake, Rules, Terms, Validated, reply};
use crate::requests::{ConnId, Late};
use crate::shared::Shared;

/// Timeout of the whole handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);
/// Timeout between two receives in the middle of a message, and of a send in addition to the time
/// that its bytes take at [`SEND_RATE_MIN`].
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Minimum rate, in bytes per second, at which a client must read a reply.
const SEND_RATE_MIN: u64 = 256 * 1024;
/// Maximum number of replies per system call.
const REPLIES_MAX: usize = 64;
/// Maximum number of slices per system call: a 32 MiB piece of a read in parts, or many small
/// reads.
const SLICES_MAX: usize = 320;
/// Tokens of this connection's operations; the slot number is in the low bits.
pub(crate) const TOKEN_SEND: u64 = 1 << 32;

/// Receive state of a connection.
#[derive(Debug)]
enum Phase {
    Handshake(Box<Handshake>),
    Header,
    /// Payload of a row, with the number of bytes still to come.
    Payload {
        row: u32,
        left: u32,
    },
    /// Payload that is discarded.
    Skip {
        left: u32,
    },
    /// A request that waits for a row or for memory.
    Starved(Validated),
    /// No further requests are accepted.
    Ended,
}

/// Whether requests of a connection may be handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    /// No request has arrived yet.
    Shut,
    /// Waiting until all shards have checked for disconnected clients.
    Asked(u64),
    Open,
}

/// An NBD connection.
pub(crate) struct Conn {
    fd: Fd,
    pub(crate) id: ConnId,
    phase: Phase,
    gate: Gate,
    /// Connected over TCP, where a disconnected client looks like one that only shut down its
    /// sending side.
    tcp: bool,
    /// The client has disconnected; its unanswered writes count as orphaned.
    departed: bool,
    /// The client sent a disconnect request; requests before it are carried out.
    in_order: bool,
    rules: Option<Rules>,
    /// Receive buffer, offset of the first unconsumed byte, and end of the received bytes.
    buffer: Option<u32>,
    start: usize,
    fill: usize,
    /// Number of requests for which receives remain limited to fit large writes.
    large: u8,
    receiving: Option<OpId>,
    sending: Option<OpId>,
    /// Poll that reports a hangup of the client, also while no receive is running.
    watching: Option<OpId>,
    /// The client has shut down its sending side, so a poll could not report anything else.
    half_closed: bool,
    vecs: Option<Box<IoVecs>>,
    staging: MemSlice,
    /// Handshake bytes to be sent.
    greeting: Vec<u8>,
    replies: VecDeque<u32>,
    in_send: Vec<u32>,
    /// Row of a simple reply that has been sent in part.
    cut_short: Option<u32>,
    /// Number of rows of this connection.
    rows: usize,
    /// Memory held by the reads of this connection.
    memory: ReadMemory,
    opened: Instant,
    /// Time when bytes last arrived, or when the connection began to wait for them.
    heard: Instant,
    /// Deadline of the send in progress.
    send_by: Instant,
    /// The socket is unusable; no more sends or receives.
    broken: bool,
    /// The other end is the kernel, which has no timeouts.
    kernel: bool,
    /// Bytes of the next send that were already sent.
    sent_before: usize,
    /// Losses of acknowledged writes that have been reported to the client.
    reported: u64,
    /// Loss reports as seen by requests that are still to be taken.
    backlog: Backlog,
}

/// State for requests that arrived before the client learned of a loss and are taken after it. A
/// flush among them fails because of that loss too, since it may cover writes that were lost.
#[derive(Clone, Copy, Debug, Default)]
struct Backlog {
    /// Bytes received so far.
    received: u64,
    /// Requests wait for rows, memory or the device, and receiving has stopped.
    stalled: bool,
    /// Row whose reply reports a loss and waits to be sent.
    report: Option<u32>,
    /// Losses reported to the client at the last check.
    seen: u64,
    /// A loss count, and the stream offset up to which requests arrived when only that count had
    /// been reported.
    older: Option<(u64, u64)>,
}

impl Conn {
    /// Creates the connection of a client that is about to start its handshake, or of the kernel.
    /// The kernel learned the export by other means, starts with requests, and already has
    /// [`FIRST_BYTES`] of the first reply.
    pub(crate) fn new(
        fd: Fd,
        id: ConnId,
        now: Instant,
        kernel: bool,
        shared: &Shared,
    ) -> std::io::Result<Self> {
        let tcp = !socket2::SockRef::from(&fd).local_addr()?.is_unix();
        let mut greeting = Vec::new();
        let phase = if kernel {
            Phase::Header
        } else {
            Phase::Handshake(Box::new(Handshake::start(&mut greeting)))
        };
        let settled = shared.losses.as_ref().map_or(0, |losses| losses.settled());
        let mut conn = Self {
            fd,
            id,
            phase,
            gate: Gate::Shut,
            tcp,
            departed: false,
            in_order: false,
            rules: kernel.then(|| {
                let keeps_blocks = true;
                Rules::new(&shared.export(), Terms { keeps_blocks, ..Terms::default() })
            }),
            buffer: None,
            start: 0,
            fill: 0,
            large: 0,
            receiving: None,
            sending: None,
            watching: None,
            half_closed: false,
            vecs: Some(IoVecs::new(SLICES_MAX)),
            staging: Region::new(REPLIES_MAX * reply::ROOM)?.whole(),
            greeting,
            replies: VecDeque::with_capacity(shared.requests.capacity()),
            in_send: Vec::with_capacity(REPLIES_MAX),
            cut_short: None,
            rows: 0,
            memory: ReadMemory::default(),
            opened: now,
            heard: now,
            send_by: now,
            broken: false,
            kernel,
            sent_before: if kernel { FIRST_BYTES.len() } else { 0 },
            // The client starts with the losses known at the device's last successful flush.
            reported: settled,
            backlog: Backlog::default(),
        };
        conn.backlog.seen = conn.reported(shared);
        Ok(conn)
    }

    /// Whether the connection holds no more requests and may be dropped.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self.phase, Phase::Ended)
            && self.rows == 0
            && self.receiving.is_none()
            && self.sending.is_none()
            && self.watching.is_none()
            && (self.broken || (self.greeting.is_empty() && self.replies.is_empty()))
    }

    /// Client that uses the export; None during the handshake, after a disconnect, and for the
    /// kernel.
    pub(crate) fn client(&self) -> Option<Peer> {
        let is_over = self.kernel || self.broken || self.departed;
        let is_serving = !matches!(self.phase, Phase::Handshake(_) | Phase::Ended);
        (is_serving && !is_over).then(|| Peer::of(&self.fd))
    }

    /// Number of rows of this connection.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Number of buffers held for receiving and for reads. Buffers of writes are not included.
    pub(crate) fn buffers(&self) -> (usize, usize) {
        (usize::from(self.buffer.is_some()), self.memory.held())
    }

    /// Stops taking requests. Requests in flight are still answered, except for a write whose
    /// payload did not arrive in full.
    pub(crate) fn end(&mut self, port: &Port, shared: &mut Shared) {
        let phase = std::mem::replace(&mut self.phase, Phase::Ended);
        shared.first_reader.stop(self.id.slot);
        for id in [self.receiving, self.watching].into_iter().flatten() {
            port.cancel(id);
        }
        if let Phase::Payload { row, .. } = phase {
            let entry = shared.requests.row(row);
            entry.progress.set_complete();
            entry.reply.silence();
            shared.finish_if_done(row);
        }
    }

    /// Handles a client that has disconnected or will send nothing more: as [`Conn::end`], and its
    /// changes in flight also hold up overlapping requests of other connections.
    pub(crate) fn depart(&mut self, port: &Port, shared: &mut Shared) {
        if !matches!(self.phase, Phase::Ended) {
            self.end(port, shared);
        }
        if !std::mem::replace(&mut self.departed, true) {
            shared.orphan(self.id);
        }
    }

    /// Checks whether the client has disconnected, on behalf of a connection that waits for this
    /// round. Bytes that the client sent and that have not been read are dropped, because those
    /// requests would be carried out after newer ones. A TCP client that has only shut down its
    /// sending side therefore loses its unread requests without an answer, unless it is the only
    /// one that has asked since the last check. A client that has disconnected altogether may have
    /// been replaced before its socket arrived here, so it counts in its own round too.
    pub(crate) fn look(&mut self, due: Due, port: &Port, shared: &mut Shared) {
        if self.broken {
            return;
        }
        let own = due.only && self.gate == Gate::Asked(due.round);
        match peer_end(&self.fd) {
            PeerEnd::Gone => self.abort(port, shared),
            PeerEnd::SendsNoMore if self.tcp && !own => self.depart(port, shared),
            PeerEnd::SendsNoMore | PeerEnd::Open => {}
        }
    }

    /// Whether the first request waits for other shards.
    pub(crate) fn waits_for_round(&self) -> bool {
        matches!(self.gate, Gate::Asked(_)) && !matches!(self.phase, Phase::Ended)
    }

    /// Returns true when requests may be handled: all shards have checked for disconnected clients
    /// since the first request arrived.
    fn passes(&mut self, shared: &Shared) -> bool {
        let group = &shared.seat.group;
        match self.gate {
            Gate::Open => return true,
            Gate::Shut => self.gate = Gate::Asked(group.ask(shared.seat.shard)),
            Gate::Asked(round) if group.is_over(round) => self.gate = Gate::Open,
            Gate::Asked(_) => {}
        }
        self.gate == Gate::Open
    }

    /// Aborts the connection: cancels running operations and sends no more replies.
    pub(crate) fn abort(&mut self, port: &Port, shared: &mut Shared) {
        if self.broken {
            return;
        }
        self.broken = true;
        // IOs at the device may keep the connection object alive for a long time.
        if !self.kernel
            && let Err(error) = socket2::SockRef::from(&self.fd).shutdown(std::net::Shutdown::Both)
        {
            tracing::debug!("socket of an NBD client not shut down: {error}");
        }
        self.depart(port, shared);
        if !self.in_order {
            shared.drop_unbegun(self.id);
        }
        if let Some(id) = self.sending {
            port.cancel(id);
        }
        while let Some(row) = self.replies.pop_front() {
            self.told(row, shared);
        }
    }

    /// Handles a row whose reply was sent or can no longer be delivered. The device may still work
    /// on a row that it gave up. A piece of a long read is followed by the next one.
    fn told(&mut self, row: u32, shared: &mut Shared) {
        let entry = shared.requests.row(row);
        if entry.is_between() {
            if !self.broken {
                entry.next_piece();
                return shared.submit(row);
            }
            entry.progress.set_complete();
        }
        if entry.is_done() {
            self.free_row(row, shared);
        } else {
            entry.reply.set_late(Late::Told);
        }
    }

    /// Releases the buffers of a closed connection.
    pub(crate) fn release(&mut self, shared: &mut Shared) {
        if let Some(buffer) = self.buffer.take() {
            shared.buffers.release_receiver(buffer);
        }
        shared.buffers.drop_cut(&mut self.memory);
    }

    /// Returns the losses reported to the client. All connections of a kernel device are one
    /// client.
    fn reported(&self, shared: &Shared) -> u64 {
        match &shared.losses {
            Some(losses) if self.kernel => losses.common(),
            _ => self.reported,
        }
    }

    /// Checks whether a loss was reported while requests waited, or is about to be reported: what
    /// the socket holds when that reply is sent was sent before it. Requests that a kernel device
    /// sent on another connection count as sent after the report, unless that connection has
    /// stalled.
    pub(crate) fn note_reported(&mut self, shared: &Shared) {
        let reported = self.reported(shared);
        let seen = std::mem::replace(&mut self.backlog.seen, reported);
        let waits = self.backlog.report.is_some();
        if reported == seen || !(self.backlog.stalled || waits) {
            return;
        }
        let end = if waits { u64::MAX } else { self.arrived() };
        let older = self.older().unwrap_or(seen);
        self.backlog.older = Some((older, end));
    }

    /// Records that the reply of this row is about to be sent.
    fn note_sent(&mut self, row: u32) {
        if self.backlog.report == Some(row) {
            self.backlog.report = None;
            let end = self.arrived();
            self.backlog.older = self.backlog.older.map(|(reported, _)| (reported, end));
        }
    }

    /// Offset in the stream of the bytes that have arrived, received or not.
    fn arrived(&self) -> u64 {
        self.backlog.received + unread(&self.fd).unwrap_or(0) as u64
    }

    /// Records whether requests wait. Receiving stops meanwhile, so the ring is asked to report a
    /// hangup: without a new connection that triggers a check, it would go unnoticed.
    pub(crate) fn note_stall(&mut self, port: &Port) {
        self.backlog.stalled = self.receiving.is_none() && !matches!(self.phase, Phase::Ended);
        let unwatched = self.watching.is_none() && !self.half_closed;
        let watch = self.backlog.stalled && self.gate == Gate::Open && unwatched;
        if watch {
            let watch = RingOp::hangup(self.fd.clone());
            self.watching = Some(port.submit(watch, self.id.slot as u64));
        }
    }

    /// Handles a hangup of the client, or the end of what it sends. A receive in progress finds the
    /// end by itself, behind the bytes that were sent before.
    pub(crate) fn on_hangup(&mut self, port: &Port, shared: &mut Shared) {
        self.watching = None;
        if self.broken || self.receiving.is_some() {
            return;
        }
        match peer_end(&self.fd) {
            PeerEnd::Gone => self.abort(port, shared),
            PeerEnd::SendsNoMore => self.half_closed = true,
            PeerEnd::Open => {}
        }
    }

    /// Returns the losses that had been reported when the current request arrived, if they were
    /// fewer than now.
    fn older(&self) -> Option<u64> {
        if rtrs_core::mutated!(NbdBacklogForgotten) {
            return None;
        }
        let taken = self.backlog.received - (self.fill - self.start) as u64;
        self.backlog.older.filter(|(_, end)| taken <= *end).map(|(reported, _)| reported)
    }

    /// Ends a flush, which fails if a loss has not been reported to the client.
    fn end_flush(&mut self, row: u32, shared: &mut Shared) {
        let Some(losses) = &shared.losses else { return };
        let entry = shared.requests.row(row);
        let count = entry.loss_marks.at_end().unwrap_or_else(|| losses.count());
        let ended = entry.reply.status();
        let (status, reported) = losses.judge(ended, entry.loss_marks.reported(), count);
        let before = if self.kernel { losses.common() } else { self.reported };
        if reported > before {
            self.backlog.report = Some(row);
        }
        shared.stats.failed += u64::from(status != ended);
        entry.reply.set_status(status);
        if self.kernel {
            losses.report_common(reported);
        } else {
            self.reported = self.reported.max(reported);
        }
    }

    /// Handles a row that has finished or was given up: queues its reply.
    pub(crate) fn on_finished(&mut self, row: u32, shared: &mut Shared) {
        let entry = shared.requests.row(row);
        let told = entry.reply.late() == Late::Told;
        let gone = self.broken || entry.reply.is_silent() || told;
        if entry.command.io() == Some(IoOp::Flush) && !gone {
            self.end_flush(row, shared);
        }
        if gone {
            self.told(row, shared);
        } else {
            self.replies.push_back(row);
        }
    }

    fn free_row(&mut self, row: u32, shared: &mut Shared) {
        if !shared.free_row(row, &mut self.memory) {
            return;
        }
        self.rows -= 1;
        if self.rows == 0 {
            shared.buffers.drop_cut(&mut self.memory);
        }
    }

    /// Takes requests from the received bytes. Returns true when anything happened.
    pub(crate) fn take_requests(&mut self, now: Instant, port: &Port, shared: &mut Shared) -> bool {
        let mut any = false;
        self.note_reported(shared);
        while self.receiving.is_none() && self.step(port, shared) {
            any = true;
        }
        if !self.broken && self.deadline().is_some_and(|at| at <= now) {
            self.log_overdue(now, shared);
            self.abort(port, shared);
            any = true;
        }
        any
    }

    /// Logs why an overdue connection is closed.
    fn log_overdue(&self, now: Instant, shared: &mut Shared) {
        let notice = if self.waits_for_round() {
            Notice::ShardNotResponding
        } else if matches!(self.phase, Phase::Handshake(_)) && self.buffer.is_none() {
            Notice::NoBuffers
        } else {
            tracing::debug!("NBD client stopped in the middle of a message");
            return;
        };
        let Some(left_out) = shared.notices.admit(now, notice) else { return };
        let (export, peer) = (shared.terms.name(), notices::peer(&self.fd));
        if notice == Notice::NoBuffers {
            tracing::warn!(
                export,
                %peer,
                left_out,
                "NBD client turned away: all buffers of this shard are in use; set a larger \
                 buffer-size, or attach fewer volumes to the session"
            );
        } else {
            tracing::warn!(
                export,
                %peer,
                left_out,
                "NBD client closed: a shard has not served its connections for {} s; the client \
                 must reconnect",
                ROUND_TIMEOUT.as_secs()
            );
        }
    }

    /// Returns the time by which the client must make progress.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.broken || self.kernel {
            return None;
        }
        let to_receive = match self.phase {
            Phase::Payload { .. } | Phase::Skip { .. } => Some(self.heard + STALL_TIMEOUT),
            Phase::Header if self.fill > self.start => Some(self.heard + STALL_TIMEOUT),
            Phase::Handshake(_) | Phase::Header | Phase::Starved(_) | Phase::Ended => None,
        };
        let to_receive = to_receive.filter(|_| self.receiving.is_some());
        // Applies even when there is no memory to receive into.
        let shakes_hands = matches!(self.phase, Phase::Handshake(_));
        let by = shakes_hands.then(|| self.opened + HANDSHAKE_TIMEOUT);
        let to_receive = rtrs_core::time::earliest(to_receive, by);
        let to_begin = self.waits_for_round().then(|| self.heard + ROUND_TIMEOUT);
        let to_receive = rtrs_core::time::earliest(to_receive, to_begin);
        let to_send = self.sending.is_some().then_some(self.send_by);
        rtrs_core::time::earliest(to_receive, to_send)
    }
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conn")
            .field("id", &self.id)
            .field("phase", &self.phase)
            .field("rows", &self.rows)
            .field("replies", &self.replies.len())
            .field("receiving", &self.receiving)
            .field("sending", &self.sending)
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}
