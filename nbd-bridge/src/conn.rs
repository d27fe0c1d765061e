//! One NBD connection on one shard.
//!
//! Bytes are received into a buffer of the registered pool. A write's payload goes to the device
//! from where it was received: while large writes arrive, each receive is bounded so that the
//! payload fills a fresh buffer and only the next header follows it; small ones are received in
//! bulk, many to a buffer. Only a request that straddles the end of a buffer is moved, and for a
//! large write that is at most its header. Reads are answered from the memory that the device
//! filled. Replies go out in the order in which requests finish, many to a system call.
//!
//! The kernel's end of a device ([`crate::kernel`]) is such a connection too, without a handshake
//! and without bounds in time: it is trusted, it has nothing else to turn to, and memory may be so
//! short that it reads and writes slowly. Cutting it off would fail IO that is only late. It ends
//! when the device is disconnected, which has bounds of its own.
//!
//! This file is the connection's life and its bounds in time; `parse` turns bytes into requests,
//! `socket` receives and sends. Called by `bridge`.

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
use crate::proto::{Handshake, Rules, Terms, Validated, reply};
use crate::requests::{ConnId, Late};
use crate::shared::Shared;

/// Bound of the whole handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);
/// Bound between two receives in the middle of a message, and of a send beside the time that its
/// bytes take.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes in a second that a client has to read at least while a reply is being sent.
const SEND_RATE_MIN: u64 = 256 * 1024;
/// Replies that go out in one system call at most.
const REPLIES_MAX: usize = 64;
/// Slices of one system call: a 32 MiB piece of a read in parts, or many small reads.
const SLICES_MAX: usize = 320;
/// Tokens of this connection's operations, above the slot number.
pub(crate) const TOKEN_SEND: u64 = 1 << 32;

/// What is being received at the moment.
#[derive(Debug)]
enum Phase {
    Handshake(Box<Handshake>),
    Header,
    /// Payload of this row: bytes still to come.
    Payload {
        row: u32,
        left: u32,
    },
    /// Payload that nobody wants.
    Skip {
        left: u32,
    },
    /// A request that waits for a row or for memory.
    Starved(Validated),
    /// Nothing more is taken from the client.
    Ended,
}

/// Whether requests of a connection may be handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    /// The first one has not come.
    Shut,
    /// It waits until all shards have looked for clients that are gone.
    Asked(u64),
    Open,
}

/// One connection.
pub(crate) struct Conn {
    fd: Fd,
    pub(crate) id: ConnId,
    phase: Phase,
    gate: Gate,
    /// Over TCP a client that is gone looks like one that only sends no more.
    tcp: bool,
    /// What it left unanswered counts as orphaned writes.
    departed: bool,
    /// It disconnected with a request, and what came before that is carried out.
    in_order: bool,
    rules: Option<Rules>,
    /// Buffer we receive into, first byte not yet consumed, end of what was received.
    buffer: Option<u32>,
    start: usize,
    fill: usize,
    /// Requests for which receives are still bounded to fit large writes.
    large: u8,
    receiving: Option<OpId>,
    sending: Option<OpId>,
    /// Tells when the client is gone, also while nothing is received.
    watching: Option<OpId>,
    /// The client sends no more, so a poll could not tell anything else.
    half_closed: bool,
    vecs: Option<Box<IoVecs>>,
    staging: MemSlice,
    /// Handshake bytes to be sent.
    greeting: Vec<u8>,
    replies: VecDeque<u32>,
    in_send: Vec<u32>,
    /// A simple reply of which a piece was sent and not the last one.
    cut_short: Option<u32>,
    /// Rows that belong to this connection.
    rows: usize,
    /// What its reads hold.
    memory: ReadMemory,
    opened: Instant,
    /// Last time that bytes came, or that we began to wait for them.
    heard: Instant,
    /// When the send that is under way has to be done.
    send_by: Instant,
    /// The socket is unusable: send and receive no more.
    broken: bool,
    /// The other end is the kernel, for which there are no bounds in time.
    kernel: bool,
    /// Bytes of the next send that have left already.
    sent_before: usize,
    /// Losses of acknowledged writes that have been reported to the client.
    reported: u64,
    /// What is known of that for requests that wait to be taken.
    backlog: Backlog,
}

/// Requests that came before the client heard of a loss, and are taken after it. A flush among them
/// fails for the loss as well, since it may cover writes that were lost.
#[derive(Clone, Copy, Debug, Default)]
struct Backlog {
    /// Bytes received so far.
    received: u64,
    /// Requests wait for rows, memory or the device, and nothing more is received.
    stalled: bool,
    /// Losses reported to the client when we looked last.
    seen: u64,
    /// So many were reported when the requests up to this byte came.
    older: Option<(u64, u64)>,
}

impl Conn {
    /// A client that is about to begin its handshake; or the kernel, which learned the export by
    /// other means, begins with requests and has [`FIRST_BYTES`] of the first reply.
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
            // The client begins with what the device's last good flush knew of.
            reported: settled,
            backlog: Backlog::default(),
        };
        conn.backlog.seen = conn.reported(shared);
        Ok(conn)
    }

    /// True when the connection holds no request any more and may be dropped.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self.phase, Phase::Ended)
            && self.rows == 0
            && self.receiving.is_none()
            && self.sending.is_none()
            && self.watching.is_none()
            && (self.broken || (self.greeting.is_empty() && self.replies.is_empty()))
    }

    /// Rows that belong to this connection.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Buffers that this connection holds for other than writes: for receiving, for reads.
    pub(crate) fn buffers(&self) -> (usize, usize) {
        (usize::from(self.buffer.is_some()), self.memory.held())
    }

    /// Takes no more requests; what is in flight is still answered, except for a write whose
    /// payload did not arrive in full.
    pub(crate) fn end(&mut self, port: &Port, shared: &mut Shared) {
        let phase = std::mem::replace(&mut self.phase, Phase::Ended);
        shared.stop_waiting(self.id.slot);
        for id in [self.receiving, self.watching].into_iter().flatten() {
            port.cancel(id);
        }
        if let Phase::Payload { row, .. } = phase {
            let entry = shared.requests.row(row);
            (entry.complete, entry.silent) = (true, true);
            shared.finish_if_done(row);
        }
    }

    /// The client is gone, or will send nothing more: as [`Conn::end`], and what is in flight holds
    /// up what overlaps it on other connections.
    pub(crate) fn depart(&mut self, port: &Port, shared: &mut Shared) {
        if !matches!(self.phase, Phase::Ended) {
            self.end(port, shared);
        }
        if !std::mem::replace(&mut self.departed, true) {
            shared.orphan(self.id);
        }
    }

    /// Looks whether the client is gone, for a connection that waits for this round. What it sent
    /// and nobody has read is dropped: it would be carried out after newer requests. A TCP client
    /// that has only shut down its sending side loses its unread requests by that, unanswered; not
    /// so where nobody but itself has asked since the last look. One that is gone altogether may
    /// have been replaced before its socket came here, so that counts in its own round too.
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

    /// True while the first request waits for other shards.
    pub(crate) fn waits_for_round(&self) -> bool {
        matches!(self.gate, Gate::Asked(_)) && !matches!(self.phase, Phase::Ended)
    }

    /// True when requests may be handled: all shards have looked for clients that are gone since
    /// the first one came.
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

    /// Gives the connection up: cancels what runs and answers nothing more.
    pub(crate) fn abort(&mut self, port: &Port, shared: &mut Shared) {
        if self.broken {
            return;
        }
        self.broken = true;
        // What the device still has may keep the connection here for long.
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

    /// A row's reply is out, or nobody is there to get it. The device may still have what it gave
    /// up. A piece of a long read is followed by the next one.
    fn told(&mut self, row: u32, shared: &mut Shared) {
        let entry = shared.requests.row(row);
        if entry.is_between() {
            if !self.broken {
                entry.next_piece();
                return shared.submit(row);
            }
            entry.complete = true;
        }
        if entry.is_done() {
            self.free_row(row, shared);
        } else {
            entry.late = Late::Told;
        }
    }

    /// Releases what a connection that is gone still held.
    pub(crate) fn release(&mut self, shared: &mut Shared) {
        if let Some(buffer) = self.buffer.take() {
            shared.buffers.release_receiver(buffer);
        }
        shared.buffers.drop_cut(&mut self.memory);
    }

    /// Losses reported to the client. All connections of a kernel device are one client.
    fn reported(&self, shared: &Shared) -> u64 {
        match &shared.losses {
            Some(losses) if self.kernel => losses.common(),
            _ => self.reported,
        }
    }

    /// Looks whether a loss has been reported since, while requests waited.
    pub(crate) fn note_reported(&mut self, shared: &Shared) {
        let reported = self.reported(shared);
        let seen = std::mem::replace(&mut self.backlog.seen, reported);
        if reported == seen || !self.backlog.stalled {
            return;
        }
        let end = self.backlog.received + unread(&self.fd).unwrap_or(0) as u64;
        let older = self.older().unwrap_or(seen);
        self.backlog.older = Some((older, end));
    }

    /// Notes whether requests wait. Nothing is received then, so the shard asks the ring to tell
    /// when the client goes: where no new connection has it look, nothing else would.
    pub(crate) fn note_stall(&mut self, port: &Port) {
        self.backlog.stalled = self.receiving.is_none() && !matches!(self.phase, Phase::Ended);
        let unwatched = self.watching.is_none() && !self.half_closed;
        let watch = self.backlog.stalled && self.gate == Gate::Open && unwatched;
        if watch {
            let watch = RingOp::hangup(self.fd.clone());
            self.watching = Some(port.submit(watch, self.id.slot as u64));
        }
    }

    /// The client is gone, or sends no more. Where bytes are received at the moment, that finds its
    /// end too, behind what it sent before.
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

    /// Losses that had been reported when the request came that is being taken, if those were
    /// fewer than now.
    fn older(&self) -> Option<u64> {
        if rtrs_core::mutated!(NbdBacklogForgotten) {
            return None;
        }
        let taken = self.backlog.received - (self.fill - self.start) as u64;
        self.backlog.older.filter(|(_, end)| taken <= *end).map(|(reported, _)| reported)
    }

    /// A flush has ended: it fails if a loss has not been reported to the client.
    fn end_flush(&mut self, row: u32, shared: &mut Shared) {
        let Some(losses) = &shared.losses else { return };
        let entry = shared.requests.row(row);
        let (status, reported) = losses.judge(entry.status, entry.reported);
        shared.stats.failed += u64::from(status != entry.status);
        entry.status = status;
        if self.kernel {
            losses.report_common(reported);
        } else {
            self.reported = self.reported.max(reported);
        }
    }

    /// A row of this connection is finished, or was given up, and wants its reply.
    pub(crate) fn on_finished(&mut self, row: u32, shared: &mut Shared) {
        let late = shared.requests.row(row).late;
        let gone = self.broken || shared.requests.row(row).silent || late == Late::Told;
        if shared.requests.row(row).io == Some(IoOp::Flush) && !gone {
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

    /// Takes requests from what has arrived. True when anything happened.
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

    /// Logs why a connection is closed that did not go on in time.
    fn log_overdue(&self, now: Instant, shared: &mut Shared) {
        let notice = if self.waits_for_round() {
            Notice::ShardNotLooking
        } else if matches!(self.phase, Phase::Handshake(_)) && self.buffer.is_none() {
            Notice::NoBuffers
        } else {
            tracing::debug!("NBD client stopped in the middle of a message");
            return;
        };
        let Some(left_out) = shared.notices.admit(now, notice) else { return };
        let (export, peer) = (shared.name(), notices::peer(&self.fd));
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
                "NBD client closed: a shard has not looked at its connections for {} s; the \
                 client has to connect again",
                ROUND_TIMEOUT.as_secs()
            );
        }
    }

    /// When the client has to have gone on.
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
        // Also where there is no memory to receive into.
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
