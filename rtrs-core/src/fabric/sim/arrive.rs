//! Effects of messages on arrival: connection setup and teardown, placement, completions.
//!
//! All of the receiver's checks are made here, when the message arrives: a receive is posted and
//! long enough; the key is known and belongs to this protection domain, and its bounds and rights
//! cover the access. A violation closes the connection: the peer gets a NAK, and both ends flush.

use super::conn::{ACCEPTOR, CONNECTOR, Job, Message, SimConn, State};
use super::net::{Event, Net, Timer};
use crate::fabric::{
    CloseReason, ConnRequest, ConnectFailure, FabricEvent, PeerIdentity, PrivateData, RemoteMem,
    WcOp, WcStatus,
};
use crate::ids::Rkey;
use crate::time::Duration;

impl SimConn {
    /// Delivers the next message from `from`, if the link permits.
    pub(super) fn deliver(&mut self, net: &mut Net, from: usize) {
        if self.broken {
            return;
        }
        let (a, b) = (self.ends[from].addr.ip(), self.ends[1 - from].addr.ip());
        let wire = &mut self.wires[from];
        if net.links.is_silent(a, b) {
            wire.held = true;
            return;
        }
        let Some((_, message)) = wire.messages.pop_front() else { return };
        wire.bytes -= message.len();
        if let Some(&(next, _)) = wire.messages.front() {
            // Messages that were held back arrive one by one, leaving the receiver time in between.
            let late = next < net.now;
            let pause = if late { net.prng.range(0..=20_000) } else { 0 };
            let at = next.max(net.now + Duration::from_nanos(pause));
            net.at(at, Event::Deliver(self.id, from));
        }
        self.kick(net, from);
        self.receive(net, 1 - from, message);
    }

    fn receive(&mut self, net: &mut Net, side: usize, message: Message) {
        let state = self.ends[side].state;
        match message {
            Message::Reset => {
                let reason = CloseReason::Lost("connection reset by the peer".into());
                self.end(net, side, ConnectFailure::Failed(reason), None);
            }
            Message::Request(private_data) => self.requested(net, private_data),
            Message::Accept(private_data) if state == State::Connecting => {
                self.established(net, side, private_data);
                if net.options.acknowledged {
                    self.transmit(net, side, Message::Ready);
                }
            }
            Message::Refuse if state == State::Connecting => {
                let reason = CloseReason::Lost("connection refused".into());
                self.end(net, side, ConnectFailure::Failed(reason), None);
            }
            Message::Reject(private_data) if state == State::Connecting => {
                self.end(net, side, ConnectFailure::Rejected(Box::new(private_data)), None);
            }
            Message::Ready if state == State::Replied => {
                self.established(net, side, PrivateData::EMPTY);
            }
            Message::Nak { seq, status, why } => {
                let reason = CloseReason::PeerTerminated(why);
                self.end(net, side, ConnectFailure::Failed(reason), Some((seq, status)));
            }
            Message::DisconnectReply => {
                self.end(net, side, ConnectFailure::Failed(CloseReason::Local), None);
            }
            Message::Disconnect if state != State::Gone => {
                self.transmit(net, side, Message::DisconnectReply);
                let ours = state == State::Leaving;
                let reason = if ours { CloseReason::Local } else { CloseReason::Peer };
                self.end(net, side, ConnectFailure::Failed(reason), None);
            }
            message if matches!(state, State::Up | State::Closing | State::Leaving) => {
                self.receive_data(net, side, message);
            }
            Message::Refuse | Message::Reject(_) | Message::Ready | Message::Ack(_) => {}
            // This end no longer exists, so notify the peer.
            _ => {
                self.transmit(net, side, Message::Reset);
            }
        }
    }

    fn requested(&mut self, net: &mut Net, private_data: PrivateData) {
        let (peer, local) = (self.ends[CONNECTOR].addr, self.ends[ACCEPTOR].addr);
        let Some(core) = net.listener(self.ends[ACCEPTOR].node, local) else {
            self.transmit(net, ACCEPTOR, Message::Refuse);
            return;
        };
        self.ends[ACCEPTOR].state = State::Requested;
        let inner = Box::new(net.ticket(self.id));
        net.emit(
            core,
            FabricEvent::Request(Box::new(ConnRequest {
                private_data,
                peer,
                local,
                identity: PeerIdentity::default(),
                inner,
            })),
        );
        net.after(net.options.accept_bound, Event::Timer(self.id, ACCEPTOR, Timer::Accept));
    }

    fn receive_data(&mut self, net: &mut Net, side: usize, message: Message) {
        let end = &mut self.ends[side];
        let (node, pd, core) = (end.node, end.pd, end.core);
        net.cores[core].counters.bytes_received += message.len() as u64;
        net.cores[core].counters.receives += 1;
        match message {
            Message::Ack(seq) => {
                let acked = end.departed.iter_mut().take_while(|e| e.seq <= seq);
                acked.filter(|e| e.op() != WcOp::RdmaRead).for_each(|e| e.done = true);
                self.retire(net, side);
            }
            Message::Send { seq, imm, invalidate, bytes } => {
                let received = self.receive_send(net, side, imm, invalidate, &bytes);
                self.answer(net, side, seq, received);
            }
            Message::Write { seq, remote, imm, bytes } => {
                let received = self.receive_write(net, side, remote, imm, &bytes);
                self.answer(net, side, seq, received);
            }
            Message::ReadRequest { seq, remote, len } => match net.fetch(node, pd, remote, len) {
                Ok(bytes) => {
                    self.transmit(net, side, Message::ReadResponse { seq, bytes });
                }
                Err(why) => self.refuse(net, side, seq, Violation::access(why)),
            },
            Message::ReadResponse { seq, bytes } => self.receive_response(net, side, seq, &bytes),
            _ => {}
        }
    }

    /// Places a send into the next receive and completes it.
    fn receive_send(
        &mut self,
        net: &mut Net,
        side: usize,
        imm: Option<u32>,
        invalidate: Option<Rkey>,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        let end = &mut self.ends[side];
        let (node, pd, core) = (end.node, end.pd, end.core);
        let Some((wr_id, buf)) = end.receives.pop_front() else {
            return Err(Violation::operation("no receive posted"));
        };
        let mut wc = end.completion(wr_id, WcOp::Recv, WcStatus::Success);
        let target = buf.and_then(|sge| {
            let sound = net.keys(node).lock().check_local(pd, &sge, true);
            sound.then_some(sge.slice)?.slice(0, bytes.len())
        });
        let mut placed = match target {
            Some(target) => {
                target.copy_in(0, bytes);
                Ok(())
            }
            None if bytes.is_empty() => Ok(()),
            None => Err("message longer than the receive"),
        };
        if let Some(key) = invalidate
            && placed.is_ok()
        {
            placed = net.keys(node).lock().invalidate(pd, key);
        }
        if let Err(why) = placed {
            wc.status = WcStatus::LocalError;
            net.emit(core, FabricEvent::Completion(wc));
            return Err(Violation::operation(why));
        }
        wc.byte_len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        (wc.imm, wc.invalidated) = (imm, invalidate);
        net.emit(core, FabricEvent::Completion(wc));
        Ok(())
    }

    /// Places a write into memory; an immediate completes the next receive.
    fn receive_write(
        &mut self,
        net: &mut Net,
        side: usize,
        remote: RemoteMem,
        imm: Option<u32>,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        let end = &mut self.ends[side];
        net.place(end.node, end.pd, remote, bytes).map_err(Violation::access)?;
        net.cores[end.core].counters.bytes_direct += bytes.len() as u64;
        if imm.is_some() {
            let Some((wr_id, _)) = end.receives.pop_front() else {
                return Err(Violation::operation("no receive posted"));
            };
            let mut wc = end.completion(wr_id, WcOp::RecvRdmaWithImm, WcStatus::Success);
            wc.imm = imm;
            net.emit(end.core, FabricEvent::Completion(wc));
        }
        Ok(())
    }

    /// Completes a read with the data returned by the peer.
    fn receive_response(&mut self, net: &mut Net, side: usize, seq: u64, bytes: &[u8]) {
        let end = &mut self.ends[side];
        let Some(entry) = end.departed.iter_mut().find(|e| e.seq == seq) else { return };
        if let Job::Work(_, sges) = &entry.job
            && let Some(sge) = &sges.first
        {
            if !net.keys(end.node).lock().check_local(end.pd, sge, true) {
                self.transmit(net, side, Message::Reset);
                let reason = CloseReason::Lost("local memory is not registered".into());
                let failed = Some((seq, WcStatus::LocalError));
                self.end(net, side, ConnectFailure::Failed(reason), failed);
                return;
            }
            net.keys(end.node).lock().reached(&sge.slice).copy_in(0, bytes);
            net.cores[end.core].counters.bytes_direct += bytes.len() as u64;
        }
        entry.done = true;
        self.retire(net, side);
    }

    /// Acknowledges a received message, or closes the connection after a violation.
    fn answer(&mut self, net: &mut Net, side: usize, seq: u64, received: Result<(), Violation>) {
        match received {
            Ok(()) => self.acknowledge(net, side, seq),
            Err(violation) => self.refuse(net, side, seq, violation),
        }
    }

    fn acknowledge(&mut self, net: &mut Net, side: usize, seq: u64) {
        if net.options.acknowledged {
            self.transmit(net, side, Message::Ack(seq));
        }
    }

    /// Handles a violation by the peer: notifies it and closes the connection.
    fn refuse(&mut self, net: &mut Net, side: usize, seq: u64, violation: Violation) {
        let Violation { status, why } = violation;
        self.transmit(net, side, Message::Nak { seq, status, why: why.into() });
        let reason = CloseReason::Protocol(why.into());
        self.end(net, side, ConnectFailure::Failed(reason), None);
    }
}

/// A message refused by the receiver.
#[derive(Clone, Copy)]
struct Violation {
    /// Status of the peer's work request.
    status: WcStatus,
    why: &'static str,
}

impl Violation {
    const fn access(why: &'static str) -> Self {
        Self { status: WcStatus::RemoteAccess, why }
    }

    const fn operation(why: &'static str) -> Self {
        Self { status: WcStatus::RemoteOperation, why }
    }
}
