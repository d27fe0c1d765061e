//! Simulated connection: two ends and the messages between them.
//!
//! An end is a queue pair: posted work that was not flushed, work waiting to depart, departed work
//! awaiting its answer, and the posted receives. Local memory is read when a message departs and
//! written when one arrives, in virtual time, so a write by an end that closed long ago can still
//! reach a peer that has not noticed yet. Every end closes through [`SimConn::end`]: all posted
//! work completes once, followed by one last event.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::memory::{SimWindow, Want};
use super::net::{Event, Net, Timer};
use crate::fabric::{
    Access, CloseReason, ConnectFailure, FabricError, FabricEvent, PrivateData, QpLimits,
    RemoteMem, Sge, SgeList, WcOp, WcStatus, Window, WorkCompletion, WorkRequest, WrOp,
};
use crate::ids::{QpNum, Rkey};
use crate::mem::MemSlice;
use crate::time::{Duration, Instant};

/// Index of the connecting end.
pub(super) const CONNECTOR: usize = 0;
/// Index of the accepting end.
pub(super) const ACCEPTOR: usize = 1;

/// State of an end; the variants are in chronological order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    /// Not in use yet.
    Fresh,
    /// The connector has sent its request.
    Connecting,
    /// The listener has received the request but not answered it.
    Requested,
    /// Accepted; the reply is sent by the next flush.
    Accepting,
    /// The reply has been sent; waiting for the connector's confirmation.
    Replied,
    /// Established: work can be posted.
    Up,
    /// Closing after everything posted has been sent.
    Closing,
    /// Disconnect sent; waiting for the reply.
    Leaving,
    /// The last event has been reported.
    Gone,
}

/// Operation of a send queue entry.
#[derive(Debug)]
pub(super) enum Job {
    Work(WrOp, SgeList),
    Bind { window: Arc<dyn Window>, key: Rkey, slice: MemSlice, access: Access },
    Revoke { window: Arc<dyn Window> },
}

/// Entry of a send queue.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) seq: u64,
    wr_id: u64,
    pub(super) job: Job,
    signaled: bool,
    pub(super) done: bool,
}

impl Entry {
    pub(super) fn op(&self) -> WcOp {
        match &self.job {
            Job::Work(op, _) => op.completes_as(),
            Job::Bind { .. } | Job::Revoke { .. } => WcOp::Bind,
        }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct End {
    pub(super) node: usize,
    pub(super) core: usize,
    pub(super) qp: QpNum,
    pub(super) pd: u64,
    pub(super) addr: SocketAddr,
    pub(super) state: State,
    pub(super) limits: QpLimits,
    pub(super) reply: PrivateData,
    posted: VecDeque<Entry>,
    waiting: VecDeque<Entry>,
    pub(super) departed: VecDeque<Entry>,
    /// Number of successful unsignaled entries, freed by the next signaled one, as in verbs.
    unreported: u32,
    pub(super) receives: VecDeque<(u64, Option<Sge>)>,
    next_seq: u64,
    departing: bool,
}

impl End {
    /// Returns how long the next departure waits, if it is a revoke.
    fn waits_to_revoke(&self, net: &mut Net) -> Duration {
        let next = self.waiting.front().map(|entry| &entry.job);
        let most = net.options.revoke_max.filter(|_| matches!(next, Some(Job::Revoke { .. })));
        most.map_or(Duration::ZERO, |most| net.prng.duration(Duration::ZERO..=most))
    }

    pub(super) fn new(node: usize, addr: SocketAddr) -> Self {
        Self {
            node,
            core: 0,
            qp: QpNum(0),
            pd: 0,
            addr,
            state: State::Fresh,
            limits: QpLimits { send_max: 0, recv_max: 0 },
            reply: PrivateData::EMPTY,
            posted: VecDeque::new(),
            waiting: VecDeque::new(),
            departed: VecDeque::new(),
            unreported: 0,
            receives: VecDeque::new(),
            next_seq: 1,
            departing: false,
        }
    }

    pub(super) fn completion(&self, wr_id: u64, op: WcOp, status: WcStatus) -> WorkCompletion {
        WorkCompletion::new(self.qp, wr_id, op, status)
    }
}

/// Message on the wire.
#[derive(Debug)]
pub(super) enum Message {
    Request(PrivateData),
    Refuse,
    Accept(PrivateData),
    Reject(PrivateData),
    Ready,
    Send { seq: u64, imm: Option<u32>, invalidate: Option<Rkey>, bytes: Vec<u8> },
    Write { seq: u64, remote: RemoteMem, imm: Option<u32>, bytes: Vec<u8> },
    ReadRequest { seq: u64, remote: RemoteMem, len: usize },
    ReadResponse { seq: u64, bytes: Vec<u8> },
    Ack(u64),
    Nak { seq: u64, status: WcStatus, why: String },
    Disconnect,
    DisconnectReply,
    Reset,
}

impl Message {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Send { bytes, .. }
            | Self::Write { bytes, .. }
            | Self::ReadResponse { bytes, .. } => bytes.len(),
            _ => 0,
        }
    }
}

/// Messages that one end sent and the other has not yet received.
#[derive(Debug, Default)]
pub(super) struct Wire {
    pub(super) messages: VecDeque<(Instant, Message)>,
    pub(super) bytes: usize,
    last_arrival: Instant,
    /// The first message has reached a silenced link and waits there.
    pub(super) held: bool,
}

/// Simulated connection.
#[derive(Debug)]
pub(super) struct SimConn {
    pub(super) id: u64,
    pub(super) ends: [End; 2],
    pub(super) wires: [Wire; 2],
    /// The link is down: nothing arrives anymore.
    pub(super) broken: bool,
}

impl SimConn {
    pub(super) fn new(id: u64, ends: [End; 2]) -> Self {
        Self { id, ends, wires: [Wire::default(), Wire::default()], broken: false }
    }

    /// Returns true if the connection can have no further effect.
    pub(super) fn is_over(&self) -> bool {
        let gone = self.ends.iter().all(|e| matches!(e.state, State::Gone | State::Fresh));
        gone && (self.broken || self.wires.iter().all(|w| w.messages.is_empty()))
    }

    /// Returns true if the connection runs between these two addresses, in either direction.
    pub(super) fn runs_between(&self, a: IpAddr, b: IpAddr) -> bool {
        let (x, y) = (self.ends[0].addr.ip(), self.ends[1].addr.ip());
        (x, y) == (a, b) || (x, y) == (b, a)
    }

    /// Adds a work request to the send batch.
    pub(super) fn post_send(
        &mut self,
        net: &Net,
        side: usize,
        wr: WorkRequest,
    ) -> Result<(), FabricError> {
        let end = &self.ends[side];
        if end.state != State::Up {
            return Err(FabricError::QpState);
        }
        let read = match wr.op {
            WrOp::RdmaRead { .. } if wr.sges.second.is_some() => {
                return Err(FabricError::Unsupported("a read into two pieces of memory"));
            }
            WrOp::Send { imm: Some(_), invalidate: Some(_) } => {
                return Err(FabricError::Unsupported("send with immediate and invalidate"));
            }
            WrOp::RdmaRead { .. } => true,
            _ => false,
        };
        let keys = net.keys(end.node).lock();
        if !wr.sges.iter().all(|sge| keys.check_local(end.pd, sge, read)) {
            return Err(FabricError::LocalMemory);
        }
        drop(keys);
        self.push(side, wr.wr_id, Job::Work(wr.op, wr.sges), wr.signaled)
    }

    /// Adds a job to the send batch.
    pub(super) fn push(
        &mut self,
        side: usize,
        wr_id: u64,
        job: Job,
        signaled: bool,
    ) -> Result<(), FabricError> {
        let end = &mut self.ends[side];
        if end.state != State::Up {
            return Err(FabricError::QpState);
        }
        let used = end.posted.len() + end.waiting.len() + end.departed.len();
        if used + end.unreported as usize >= end.limits.send_max as usize {
            return Err(FabricError::QueueFull);
        }
        let seq = end.next_seq;
        end.next_seq += 1;
        end.posted.push_back(Entry { seq, wr_id, job, signaled, done: false });
        Ok(())
    }

    /// Posts a receive.
    pub(super) fn post_recv(
        &mut self,
        net: &Net,
        side: usize,
        wr_id: u64,
        buf: Option<Sge>,
    ) -> Result<(), FabricError> {
        let end = &mut self.ends[side];
        if matches!(end.state, State::Closing | State::Leaving | State::Gone) {
            return Err(FabricError::QpState);
        }
        if let Some(sge) = &buf
            && !net.keys(end.node).lock().check_local(end.pd, sge, true)
        {
            return Err(FabricError::LocalMemory);
        }
        if end.receives.len() >= end.limits.recv_max as usize {
            return Err(FabricError::QueueFull);
        }
        end.receives.push_back((wr_id, buf));
        Ok(())
    }

    /// Submits the posted batch, and sends the pending reply of an accepted connection.
    pub(super) fn flush(&mut self, net: &mut Net, side: usize) {
        let end = &mut self.ends[side];
        if end.state == State::Accepting {
            let reply = Message::Accept(end.reply);
            end.state = State::Replied;
            self.transmit(net, side, reply);
            if !net.options.acknowledged {
                self.established(net, side, PrivateData::EMPTY);
            }
        }
        let end = &mut self.ends[side];
        if !end.posted.is_empty() {
            net.cores[end.core].counters.sends += 1;
            end.waiting.append(&mut end.posted);
            self.kick(net, side);
        }
    }

    /// Disconnects gracefully.
    pub(super) fn disconnect(&mut self, net: &mut Net, side: usize) {
        match self.ends[side].state {
            State::Up => {
                self.flush(net, side);
                self.ends[side].state = State::Closing;
                net.after(net.options.close_bound, Event::Timer(self.id, side, Timer::Close));
                self.kick(net, side);
            }
            State::Closing | State::Leaving | State::Gone => {}
            _ => self.abort(net, side),
        }
    }

    /// Aborts the connection.
    pub(super) fn abort(&mut self, net: &mut Net, side: usize) {
        if self.ends[side].state != State::Gone {
            self.transmit(net, side, Message::Reset);
            self.end(net, side, ConnectFailure::Failed(CloseReason::Local), None);
        }
    }

    /// Puts a queue pair into the error state at its oldest work request, as when its retries are
    /// exhausted. If `reset` is set, the peer sees a reset; otherwise the peer must detect the
    /// failure itself.
    pub(super) fn fail(&mut self, net: &mut Net, side: usize, reset: bool) {
        let end = &self.ends[side];
        if !matches!(end.state, State::Up | State::Closing | State::Leaving) {
            return;
        }
        let mut entries = end.departed.iter().chain(&end.waiting).chain(&end.posted);
        let failed = entries.find(|e| !e.done).map(|e| (e.seq, WcStatus::RetryExceeded));
        if reset {
            self.transmit(net, side, Message::Reset);
        }
        let reason = CloseReason::Lost("the queue pair is in error".into());
        self.end(net, side, ConnectFailure::Failed(reason), failed);
    }

    /// Handles an expired timer of this connection.
    pub(super) fn timer(&mut self, net: &mut Net, side: usize, timer: Timer) {
        let reason = match (timer, self.ends[side].state) {
            (Timer::Connect, State::Connecting)
            | (Timer::Accept, State::Requested | State::Accepting | State::Replied) => {
                CloseReason::TimedOut
            }
            (Timer::Close, State::Closing | State::Leaving) => CloseReason::Local,
            (Timer::Detect, State::Up | State::Closing | State::Leaving) => {
                let failed = self.ends[side].departed.front().map(|e| e.seq);
                let failed = failed.map(|seq| (seq, WcStatus::RetryExceeded));
                let reason = CloseReason::Lost("the link is down".into());
                self.end(net, side, ConnectFailure::Failed(reason), failed);
                return;
            }
            _ => return,
        };
        self.transmit(net, side, Message::Reset);
        self.end(net, side, ConnectFailure::Failed(reason), None);
    }

    /// Takes the link down: messages on it are lost, and a write may be placed partially.
    pub(super) fn break_link(&mut self, net: &mut Net) {
        if self.broken {
            return;
        }
        self.broken = true;
        for from in [CONNECTOR, ACCEPTOR] {
            let to = 1 - from;
            let lost = self.wires[from].messages.pop_front();
            self.wires[from] = Wire::default();
            let end = &self.ends[to];
            if let Some((_, Message::Write { remote, bytes, .. })) = lost
                && matches!(end.state, State::Up | State::Closing | State::Leaving)
                && net.prng.chance(net.options.torn_writes)
                && !bytes.is_empty()
            {
                let part = 1 + net.prng.index(bytes.len());
                let keys = net.keys(end.node).lock();
                if let Ok(target) = keys.check_remote(end.pd, remote, bytes.len(), Want::Write)
                    && target.region().admit_write(target.offset(), part)
                {
                    target.region().copy_in(target.offset(), &bytes[..part]);
                }
            }
        }
        let (a, b) = (self.ends[0].addr.ip(), self.ends[1].addr.ip());
        for (side, from, to) in [(0, b, a), (1, a, b)] {
            if let Some(detect) = net.links.options(from, to).detect {
                let after = net.prng.duration(detect / 2..=detect);
                net.after(after, Event::Timer(self.id, side, Timer::Detect));
            }
        }
    }

    /// Reopens a silenced direction.
    pub(super) fn release(&mut self, net: &mut Net, from: usize) {
        if std::mem::take(&mut self.wires[from].held) {
            net.after(Duration::ZERO, Event::Deliver(self.id, from));
        }
    }

    /// Removes an end whose whole node or process has disappeared, without a last event.
    pub(super) fn vanish(&mut self, net: &mut Net, side: usize) {
        let end = &mut self.ends[side];
        end.state = State::Gone;
        end.posted.clear();
        end.waiting.clear();
        end.departed.clear();
        end.receives.clear();
        net.cores[end.core].qps.remove(&end.qp);
    }

    pub(super) fn established(&mut self, net: &mut Net, side: usize, private_data: PrivateData) {
        let end = &mut self.ends[side];
        end.state = State::Up;
        net.emit(
            end.core,
            FabricEvent::Established { qp: end.qp, private_data: Box::new(private_data) },
        );
    }

    /// Puts a message on the wire. Returns the time at which its last byte leaves.
    pub(super) fn transmit(&mut self, net: &mut Net, side: usize, message: Message) -> Instant {
        if self.broken {
            return net.now;
        }
        let (end, len) = (&self.ends[side], message.len());
        if end.state > State::Requested {
            net.cores[end.core].counters.bytes_sent += len as u64;
        }
        let (from, to) = (end.addr.ip(), self.ends[1 - side].addr.ip());
        let (left, arrives) = net.links.times(&mut net.prng, net.now, from, to, len);
        let wire = &mut self.wires[side];
        wire.last_arrival = arrives.max(wire.last_arrival);
        wire.messages.push_back((wire.last_arrival, message));
        wire.bytes += len;
        if wire.messages.len() == 1 {
            net.at(wire.last_arrival, Event::Deliver(self.id, side));
        }
        left
    }

    /// Starts the next departure if the send queue permits.
    pub(super) fn kick(&mut self, net: &mut Net, side: usize) {
        let end = &mut self.ends[side];
        let work = !end.waiting.is_empty() || end.state == State::Closing;
        let room = self.wires[side].bytes < net.options.buffered_max;
        if work && room && !end.departing && matches!(end.state, State::Up | State::Closing) {
            end.departing = true;
            let pause = Duration::from_nanos(net.prng.range(50..=500)) + end.waits_to_revoke(net);
            net.after(pause, Event::Depart(self.id, side));
        }
    }

    /// Sends the next entry of the send queue.
    pub(super) fn depart(&mut self, net: &mut Net, side: usize) {
        let end = &mut self.ends[side];
        end.departing = false;
        if !matches!(end.state, State::Up | State::Closing) {
            return;
        }
        let Some(mut entry) = end.waiting.pop_front() else {
            if end.state == State::Closing {
                end.state = State::Leaving;
                self.transmit(net, side, Message::Disconnect);
            }
            return;
        };
        let seq = entry.seq;
        let message = match &entry.job {
            Job::Work(op, sges) => {
                let keys = net.keys(end.node).lock();
                let read = matches!(op, WrOp::RdmaRead { .. });
                if !sges.iter().all(|sge| keys.check_local(end.pd, sge, read)) {
                    drop(keys);
                    end.departed.push_back(entry);
                    self.transmit(net, side, Message::Reset);
                    let reason = CloseReason::Lost("local memory is not registered".into());
                    let failed = Some((seq, WcStatus::LocalError));
                    self.end(net, side, ConnectFailure::Failed(reason), failed);
                    return;
                }
                drop(keys);
                Some(message(seq, op, sges))
            }
            Job::Bind { window, key, slice, access } => {
                if let Some(window) = window.as_any().downcast_ref::<SimWindow>() {
                    window.put(*key, slice, *access);
                }
                None
            }
            Job::Revoke { window } => {
                if let Some(window) = window.as_any().downcast_ref::<SimWindow>() {
                    window.take();
                }
                None
            }
        };
        let read = matches!(message, Some(Message::ReadRequest { .. }));
        entry.done = message.is_none() || (!net.options.acknowledged && !read);
        end.departed.push_back(entry);
        let left = message.map_or(net.now, |message| self.transmit(net, side, message));
        self.retire(net, side);
        let end = &mut self.ends[side];
        let more = !end.waiting.is_empty() || end.state == State::Closing;
        if more && self.wires[side].bytes < net.options.buffered_max {
            end.departing = true;
            let pause = Duration::from_nanos(net.prng.range(20..=200)) + end.waits_to_revoke(net);
            net.at(left + pause, Event::Depart(self.id, side));
        }
    }

    /// Completes finished entries, in order.
    pub(super) fn retire(&mut self, net: &mut Net, side: usize) {
        let end = &mut self.ends[side];
        while end.departed.front().is_some_and(|e| e.done)
            && let Some(entry) = end.departed.pop_front()
        {
            if entry.signaled {
                end.unreported = 0;
                let wc = end.completion(entry.wr_id, entry.op(), WcStatus::Success);
                net.emit(end.core, FabricEvent::Completion(wc));
            } else {
                end.unreported += 1;
            }
        }
    }

    /// Closes an end: every entry and receive completes, then the last event follows. `failed`
    /// names the entry that completes with its own status.
    pub(super) fn end(
        &mut self,
        net: &mut Net,
        side: usize,
        ending: ConnectFailure,
        failed: Option<(u64, WcStatus)>,
    ) {
        let end = &mut self.ends[side];
        let state = std::mem::replace(&mut end.state, State::Gone);
        if matches!(state, State::Gone | State::Fresh | State::Requested) {
            return;
        }
        let mut entries = std::mem::take(&mut end.departed);
        entries.append(&mut end.waiting);
        entries.append(&mut end.posted);
        for entry in entries {
            let status = match failed {
                Some((seq, status)) if seq == entry.seq => status,
                _ if entry.done && !entry.signaled => continue,
                _ if entry.done => WcStatus::Success,
                _ => WcStatus::Flushed,
            };
            let wc = end.completion(entry.wr_id, entry.op(), status);
            net.emit(end.core, FabricEvent::Completion(wc));
        }
        for (wr_id, _) in std::mem::take(&mut end.receives) {
            let wc = end.completion(wr_id, WcOp::Recv, WcStatus::Flushed);
            net.emit(end.core, FabricEvent::Completion(wc));
        }
        let qp = end.qp;
        net.cores[end.core].qps.remove(&qp);
        let event = FabricEvent::ended(qp, state != State::Connecting, ending);
        match net.linger.get(&end.node) {
            Some(linger) => net.after(*linger, Event::Emit(end.core, Box::new(event))),
            None => net.emit(end.core, event),
        }
    }
}

/// Creates the message for a work request, with the current content of its memory.
fn message(seq: u64, op: &WrOp, sges: &SgeList) -> Message {
    let gather = || {
        let mut bytes = vec![0; sges.len()];
        let mut at = 0;
        for sge in sges.iter() {
            sge.slice.copy_out(0, &mut bytes[at..at + sge.slice.len()]);
            at += sge.slice.len();
        }
        bytes
    };
    match *op {
        WrOp::Send { imm, invalidate } => Message::Send { seq, imm, invalidate, bytes: gather() },
        WrOp::RdmaWrite { remote, imm } => Message::Write { seq, remote, imm, bytes: gather() },
        WrOp::RdmaRead { remote } => Message::ReadRequest { seq, remote, len: sges.len() },
    }
}
