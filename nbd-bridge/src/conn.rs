//! One NBD connection on one shard.
//!
//! Bytes are received into a buffer of the registered pool. The payload of a write is submitted to
//! the device from the buffer that received it: while large writes arrive, each receive is limited
//! so that the payload fills a fresh buffer and only the next header follows it; small writes are
//! received in bulk, many to a buffer. Only a request that straddles the end of a buffer is moved,
//! and for a large write that is at most its header. Reads are answered from the memory that the
//! device filled. Replies are sent in the order in which requests finish, many per system call.
//!
//! The kernel's end of a device ([`crate::kernel`]) is also such a connection, without a handshake
//! or timeouts: the kernel is trusted, has no alternative, and may read and write slowly when
//! memory is short. Closing this connection would fail IO that is merely late. It ends when the
//! device is disconnected, which has its own timeouts.
//!
//! This file holds the lifecycle and the timeouts of a connection; `parse` turns bytes into
//! requests, `socket` receives and sends. Each part of the state has a file: `link` holds the
//! socket and its operations, `input` the received bytes, `output` the replies, `gate` the check
//! before the first request, `loss_reports` the losses that the client knows about, `not_reading`
//! the memory of a client that does not read. Called by `bridge`.

mod gate;
mod input;
mod link;
mod loss_reports;
mod not_reading;
mod output;
mod parse;
mod socket;

use std::fmt;

use rtrs_core::block::IoOp;
use rtrs_core::rt::{Fd, PeerEnd, Port};
use rtrs_core::time::{Duration, Instant};

use self::gate::Gate;
use self::input::Input;
use self::link::Link;
pub(crate) use self::link::{STALL_TIMEOUT, TOKEN_SEND};
use self::loss_reports::LossReports;
use self::output::Output;
use crate::buffers::ReadMemory;
use crate::group::{Due, ROUND_TIMEOUT};
use crate::kernel::FIRST_BYTES;
use crate::notices::Notice;
use crate::peer::Peer;
use crate::proto::{Handshake, Rules, Terms, Validated};
use crate::requests::{ConnId, Late};
use crate::shared::Shared;

/// Timeout for the whole handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);

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
    /// A request that is waiting for a row or for memory.
    Starved(Validated),
    /// No further requests are accepted.
    Ended,
}

/// An NBD connection.
pub(crate) struct Conn {
    pub(crate) id: ConnId,
    link: Link,
    input: Input,
    output: Output,
    phase: Phase,
    gate: Gate,
    rules: Option<Rules>,
    reports: LossReports,
    /// The client has disconnected; its unanswered writes count as orphaned.
    departed: bool,
    /// The client sent a disconnect request; earlier requests are still carried out.
    in_order: bool,
    /// Number of rows of this connection.
    rows: usize,
    /// Memory held by the reads of this connection.
    memory: ReadMemory,
    opened: Instant,
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
        let link = Link::new(fd, id.slot, kernel, now)?;
        let mut greeting = Vec::new();
        let phase = if kernel {
            Phase::Header
        } else {
            Phase::Handshake(Box::new(Handshake::start(&mut greeting)))
        };
        let rules = kernel.then(|| {
            let keeps_blocks = true;
            Rules::new(&shared.export(), Terms { keeps_blocks, ..Terms::default() })
        });
        let sent_before = if kernel { FIRST_BYTES.len() } else { 0 };
        Ok(Self {
            id,
            link,
            input: Input::default(),
            output: Output::new(greeting, shared.requests.capacity(), sent_before)?,
            phase,
            gate: Gate::Shut,
            rules,
            reports: LossReports::new(kernel, shared.losses.as_deref()),
            departed: false,
            in_order: false,
            rows: 0,
            memory: ReadMemory::default(),
            opened: now,
        })
    }

    /// Whether the connection holds no more requests and may be dropped.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self.phase, Phase::Ended)
            && self.rows == 0
            && self.link.is_idle()
            && (self.link.is_broken() || self.output.is_empty())
    }

    /// Client using the export; None during the handshake, after a disconnect, and for the kernel.
    pub(crate) fn client(&self) -> Option<Peer> {
        let is_over = self.link.is_kernel() || self.link.is_broken() || self.departed;
        let is_serving = !matches!(self.phase, Phase::Handshake(_) | Phase::Ended);
        (is_serving && !is_over).then(|| self.link.peer())
    }

    /// Returns when the connection was accepted, if its handshake is not over.
    pub(crate) fn handshake_since(&self) -> Option<Instant> {
        matches!(self.phase, Phase::Handshake(_)).then_some(self.opened)
    }

    /// Number of rows of this connection.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Number of buffers held for receiving and for reads. Write buffers are not included.
    pub(crate) fn buffers(&self) -> (usize, usize) {
        (usize::from(self.input.buffer().is_some()), self.memory.held())
    }

    /// Stops taking requests. Requests in flight are still answered, except for a write whose
    /// payload did not arrive in full.
    pub(crate) fn end(&mut self, port: &Port, shared: &mut Shared) {
        let phase = std::mem::replace(&mut self.phase, Phase::Ended);
        shared.first_reader.stop(self.id.slot);
        self.link.cancel_receive(port);
        if let Phase::Payload { row, .. } = phase {
            let entry = shared.requests.row(row);
            entry.progress.set_complete();
            entry.reply.silence();
            shared.finish_if_done(row);
        }
    }

    /// Handles a client that has disconnected or will send nothing more: like [`Conn::end`], but
    /// its changes in flight also hold up overlapping requests from other connections.
    pub(crate) fn depart(&mut self, port: &Port, shared: &mut Shared) {
        if !matches!(self.phase, Phase::Ended) {
            self.end(port, shared);
        }
        if !std::mem::replace(&mut self.departed, true) {
            shared.orphan(self.id);
        }
    }

    /// Handles a client that no longer sends or reads.
    fn on_gone(&mut self, port: &Port, shared: &mut Shared) {
        if self.rows == 0 && self.link.has_read_everything() {
            self.reports.leave(shared.losses.as_deref());
        }
        self.abort(port, shared);
    }

    /// Checks whether the client has disconnected, on behalf of a connection that is waiting for
    /// this round. Bytes that the client sent and that have not been read are dropped, because
    /// those requests would be carried out after newer ones. A TCP client that has only shut down
    /// its sending side therefore loses its unread requests without an answer, unless it is the
    /// only client that has asked since the last check. A client that has disconnected altogether
    /// may have been replaced before its socket arrived here, so it counts in its own round too.
    pub(crate) fn look(&mut self, due: Due, port: &Port, shared: &mut Shared) {
        if self.link.is_broken() {
            return;
        }
        let own = self.gate.is_only_one_of(due);
        match self.link.peer_end() {
            PeerEnd::Gone => self.on_gone(port, shared),
            PeerEnd::SendsNoMore if self.link.is_tcp() && !own => self.depart(port, shared),
            PeerEnd::SendsNoMore | PeerEnd::Open => {}
        }
    }

    /// Whether the first request is waiting for other shards.
    pub(crate) fn waits_for_round(&self) -> bool {
        self.gate.is_waiting() && !matches!(self.phase, Phase::Ended)
    }

    /// Aborts the connection: cancels running operations and sends no more replies.
    pub(crate) fn abort(&mut self, port: &Port, shared: &mut Shared) {
        if !self.link.break_off() {
            return;
        }
        self.depart(port, shared);
        // A read that was repeated after the end may be waiting again.
        shared.first_reader.stop(self.id.slot);
        if !self.in_order {
            shared.drop_unbegun(self.id);
        }
        self.link.cancel_send(port);
        while let Some(row) = self.output.drop_reply() {
            self.told(row, shared);
        }
    }

    /// Handles a row whose reply was sent or can no longer be delivered. The device may still be
    /// working on a row that was given up. A piece of a long read is followed by the next piece.
    fn told(&mut self, row: u32, shared: &mut Shared) {
        let entry = shared.requests.row(row);
        if entry.is_between() {
            if !self.link.is_broken() {
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
        shared.first_reader.stop(self.id.slot);
        self.input.release(&mut shared.buffers);
        shared.buffers.drop_cut(&mut self.memory);
    }

    /// Checks whether a loss was reported while requests waited, or is about to be reported.
    pub(crate) fn note_reported(&mut self, shared: &Shared) {
        let Self { reports, input, link, .. } = self;
        let arrived = || input.received() + link.unread();
        reports.note_reported(shared.losses.as_deref(), input.parsed(), arrived);
    }

    /// Records whether requests are waiting. While they are, receiving stops, so the ring is asked
    /// to report a hangup, which would otherwise go unnoticed until a new connection triggers a
    /// check.
    pub(crate) fn note_stall(&mut self, port: &Port) {
        let stalled = !self.link.is_receiving() && !matches!(self.phase, Phase::Ended);
        self.reports.set_stalled(stalled);
        if stalled && self.gate.is_open() && self.link.is_unwatched() {
            self.link.watch(port);
        }
    }

    /// Handles a hangup of the client, or the end of its stream. A receive in progress finds the
    /// end on its own, after the bytes sent before it.
    pub(crate) fn on_hangup(&mut self, port: &Port, shared: &mut Shared) {
        self.link.watch_ended();
        if self.link.is_broken() || self.link.is_receiving() {
            return;
        }
        match self.link.peer_end() {
            PeerEnd::Gone => self.on_gone(port, shared),
            PeerEnd::SendsNoMore => self.link.set_half_closed(),
            PeerEnd::Open => {}
        }
    }

    /// Handles a row that has finished or was given up: queues its reply.
    pub(crate) fn on_finished(&mut self, row: u32, shared: &mut Shared) {
        let entry = shared.requests.row(row);
        let told = entry.reply.late() == Late::Told;
        let gone = self.link.is_broken() || entry.reply.is_silent() || told;
        if let Some(losses) = &shared.losses
            && entry.command.io() == Some(IoOp::Flush)
            && !gone
        {
            shared.stats.failed += u64::from(self.reports.end_flush(row, entry, losses));
        }
        if gone {
            self.told(row, shared);
        } else {
            self.output.push(row);
        }
    }

    fn free_row(&mut self, row: u32, shared: &mut Shared) {
        if !shared.free_row(row, self.rows, &mut self.memory) {
            return;
        }
        self.rows -= 1;
        if self.rows == 0 {
            shared.buffers.drop_cut(&mut self.memory);
        }
    }

    /// Takes requests from the received bytes. Returns true if anything happened.
    pub(crate) fn take_requests(&mut self, now: Instant, port: &Port, shared: &mut Shared) -> bool {
        let mut any = false;
        self.note_reported(shared);
        any |= self.read_again(shared);
        while !self.link.is_receiving() && self.step(port, shared) {
            any = true;
        }
        if !self.link.is_broken() && self.deadline().is_some_and(|at| at <= now) {
            log_overdue(self, now, shared);
            self.abort(port, shared);
            any = true;
        }
        any
    }

    /// Returns the time by which the client must make progress.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.link.is_broken() || self.link.is_kernel() {
            return None;
        }
        let to_receive = match self.phase {
            Phase::Payload { .. } | Phase::Skip { .. } => self.link.receive_by(),
            Phase::Header if self.input.available() > 0 => self.link.receive_by(),
            Phase::Handshake(_) | Phase::Header | Phase::Starved(_) | Phase::Ended => None,
        };
        // Applies even when there is no memory to receive into.
        let shakes_hands = matches!(self.phase, Phase::Handshake(_));
        let by = shakes_hands.then(|| self.opened + HANDSHAKE_TIMEOUT);
        let to_receive = rtrs_core::time::earliest(to_receive, by);
        let to_begin = self.waits_for_round().then(|| self.link.heard() + ROUND_TIMEOUT);
        let to_receive = rtrs_core::time::earliest(to_receive, to_begin);
        rtrs_core::time::earliest(to_receive, self.link.send_by())
    }
}

/// Logs why an overdue connection is closed.
fn log_overdue(conn: &Conn, now: Instant, shared: &mut Shared) {
    let notice = if conn.waits_for_round() {
        Notice::ShardNotResponding
    } else if matches!(conn.phase, Phase::Handshake(_)) && conn.input.buffer().is_none() {
        Notice::NoBuffers
    } else {
        tracing::debug!("NBD client stopped in the middle of a message");
        return;
    };
    let Some(left_out) = shared.notices.admit(now, notice) else { return };
    let (export, peer) = (shared.terms.name(), conn.link.peer());
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

/// Whether the client has disconnected, whether or not the ring has reported it.
pub(crate) fn is_client_gone(conn: &Conn) -> bool {
    conn.link.peer_end() != PeerEnd::Open
}

/// Whether the client used the export and sent no disconnect request. False for the kernel.
pub(crate) fn may_return(conn: &Conn) -> bool {
    conn.rules.is_some() && !conn.in_order && !conn.link.is_kernel()
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conn")
            .field("id", &self.id)
            .field("phase", &self.phase)
            .field("rows", &self.rows)
            .field("replies", &self.output.waiting())
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}
