//! Operations of a node's users.

use std::net::IpAddr;

use rtrs_core::time::Instant;

use super::Node;
use crate::proto::config::Config;
use crate::proto::event::{BindError, SendError, SocketId};
use crate::proto::info::{ConnectionInfo, MessageInfo, QueueKind, SocketInfo};
use crate::proto::outbox::{Message, Owner, orphan};
use crate::proto::peer::Phase;
use crate::proto::ports::{Buffers, Closed, Received};
use crate::wire::{CongestionMap, PAYLOAD_MAX, PING_PORT};

/// Returns the group of a port.
const fn group(port: u16) -> u64 {
    1 << (port % 64)
}

impl Node {
    /// Binds a port, 0 for any.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(&mut self, port: u16) -> Result<SocketId, BindError> {
        let Config { sndbuf, rcvbuf, .. } = self.config;
        self.ports.bind(port, Buffers { sndbuf, rcvbuf })
    }

    /// Frees a port. Messages that wait for its reader are dropped. Messages that it has sent are
    /// sent at most once more, over the current connection if one is up.
    pub fn close_socket(&mut self, id: SocketId) {
        let Some(closed) = self.ports.close(id) else { return };
        let Closed { inbox, map_changed, has_sent } = closed;
        self.stats.recv_drop_dead_sock += inbox.len() as u64;
        for received in &inbox {
            if let Some(peer) = self.peers.get_mut(&received.from) {
                peer.held -= received.cost();
            }
        }
        if map_changed {
            self.map_changed(group(id.port));
        }
        if has_sent {
            self.closed.insert(id);
        }
    }

    /// Cancels unacknowledged messages from a socket to a port of a peer. They may still arrive,
    /// but are not resent.
    pub fn cancel(&mut self, id: SocketId, to: IpAddr, port: u16) {
        let is_meant =
            |message: &Message| message.owner == Owner::Socket(id) && message.dport == port;
        let cost = self.abandon_to(to, is_meant, true);
        self.ports.discharge(id, cost);
    }

    /// Abandons the messages of all closed sockets at once, since all queues have to be searched.
    pub(super) fn abandon_closed(&mut self) {
        if self.closed.is_empty() {
            return;
        }
        let closed = std::mem::take(&mut self.closed);
        let is_meant = |m: &Message| matches!(m.owner, Owner::Socket(id) if closed.contains(&id));
        let peers: Vec<IpAddr> = self.peers.keys().copied().collect();
        for peer in peers {
            self.abandon_to(peer, is_meant, false);
        }
    }

    /// Abandons messages to a peer. Those in the outbox are dropped if `waiting`, if no connection
    /// is up, or if one was sent before. The others lose their owner; returns their cost.
    fn abandon_to(
        &mut self,
        address: IpAddr,
        is_meant: impl Fn(&Message) -> bool + Copy,
        waiting: bool,
    ) -> usize {
        let Some(peer) = self.peers.get_mut(&address) else { return 0 };
        let link = peer.up().and_then(|id| self.links.get_mut(&id));
        // Messages sent before would be sent a second time, and those behind them would leave a
        // gap.
        let again = peer.outbox.iter().any(|m| m.is_begun && is_meant(m));
        let drops = waiting || link.is_none() || again;
        let dropped = peer.outbox.remove(|m| drops && is_meant(m));
        let mut cost = peer.outbox.orphan(is_meant);
        if let Some(link) = link {
            cost += orphan(link.messages_mut(), is_meant);
        }
        self.drop_messages(address, dropped);
        cost
    }

    /// Sets a socket's buffer sizes: how much may be sent without an acknowledgment, and how much
    /// may wait for the reader before peers stop.
    pub fn set_buffers(&mut self, id: SocketId, sndbuf: Option<usize>, rcvbuf: Option<usize>) {
        let Some(socket) = self.ports.get(id) else { return };
        let sndbuf = sndbuf.map_or(socket.sndbuf, |size| self.config.buffer(size));
        let rcvbuf = rcvbuf.map_or(socket.rcvbuf, |size| self.config.buffer(size));
        if self.ports.set_buffers(id, Buffers { sndbuf, rcvbuf }) {
            self.map_changed(group(id.port));
        }
    }

    /// Checks whether a socket may send a message of this length now.
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn may_send(
        &mut self,
        id: SocketId,
        to: IpAddr,
        port: u16,
        len: usize,
    ) -> Result<(), SendError> {
        let socket = self.ports.get(id).ok_or(SendError::Closed)?;
        self.check(socket.sndbuf, to, len)?;
        if self.congestion(to).is_some_and(|map| map.get(port)) {
            self.stats.cong_send_error += 1;
            return Err(SendError::Congested);
        }
        if !self.ports.admits(id) {
            self.stats.send_queue_full += 1;
            return Err(SendError::Full);
        }
        Ok(())
    }

    fn check(&self, sndbuf: usize, to: IpAddr, len: usize) -> Result<(), SendError> {
        let is_broadcast = matches!(to, IpAddr::V4(v4) if v4.is_broadcast());
        if to.is_unspecified() || to.is_multicast() || is_broadcast {
            return Err(SendError::Address(to));
        }
        if to.is_ipv4() != self.config.address.is_ipv4() {
            return Err(SendError::Family(to));
        }
        let max = PAYLOAD_MAX.min(sndbuf);
        if len > max {
            return Err(SendError::TooLong { len, max });
        }
        Ok(())
    }

    /// Checks whether messages can be sent to a node, and reserves a place for the peer.
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn reach(&mut self, now: Instant, to: IpAddr) -> Result<(), SendError> {
        self.check(PAYLOAD_MAX, to, 0)?;
        if to == self.config.address {
            return Ok(());
        }
        self.make_peer(now, to).map_err(|()| SendError::TooManyPeers(self.peers.len()))
    }

    /// Sends a message. Call [`may_send`](Self::may_send) first; a caller that has checked by
    /// itself may also send to a port that has become congested, or from a socket that has become
    /// full.
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn send(
        &mut self,
        now: Instant,
        id: SocketId,
        to: IpAddr,
        port: u16,
        payload: Vec<u8>,
    ) -> Result<(), SendError> {
        let socket = self.ports.get(id).ok_or(SendError::Closed)?;
        self.check(socket.sndbuf, to, payload.len())?;
        if to == self.config.address {
            self.send_to_self(id, port, payload);
            return Ok(());
        }
        if self.make_peer(now, to).is_err() {
            self.stats.send_dropped += 1;
            return Err(SendError::TooManyPeers(self.peers.len()));
        }
        let Some(peer) = self.peers.get_mut(&to) else { return Ok(()) };
        let (owner, sport, extensions) = (Owner::Socket(id), id.port, [0; 16]);
        let (sequence, is_begun, dport) = (None, false, port);
        let message = Message { owner, sport, dport, payload, extensions, sequence, is_begun };
        self.ports.charge(id, message.cost());
        peer.outbox.push(message);
        self.stats.send_queued += 1;
        self.wake(now, to);
        Ok(())
    }

    /// Sends a message to the node itself, which never leaves it. The limits are the same as for
    /// peers.
    fn send_to_self(&mut self, id: SocketId, port: u16, payload: Vec<u8>) {
        let from = self.config.address;
        self.stats.send_queued += 1;
        if port != PING_PORT {
            match self.ports.at(port).is_none_or(|socket| self.has_memory(socket, payload.len())) {
                true => self.deliver(port, Received { from, port: id.port, payload }),
                false => self.stats.recv_drop_no_memory += 1,
            }
        } else if self.ports.congested().get(id.port) {
            self.stats.send_pong_dropped += 1;
        } else if self.config.ping {
            self.deliver(id.port, Received { from, port: PING_PORT, payload: Vec::new() });
        }
    }

    /// Returns the next message for a socket's reader.
    pub fn receive(&mut self, id: SocketId) -> Option<Received> {
        let (received, map_changed) = self.ports.take(id)?;
        self.stats.recv_delivered += 1;
        if let Some(peer) = self.peers.get_mut(&received.from) {
            peer.held -= received.cost();
        }
        if map_changed {
            self.map_changed(group(id.port));
        }
        Some(received)
    }

    /// Returns the next message without removing it.
    pub fn peek(&mut self, id: SocketId) -> Option<&Received> {
        self.ports.peek(id)
    }

    /// Watches a port of a peer on behalf of a socket. The user is notified by
    /// [`take_updates`](Self::take_updates) when the port is no longer congested; at once if it is
    /// not congested.
    pub fn watch(&mut self, id: SocketId, to: IpAddr, port: u16) {
        match self.congestion(to).is_some_and(|map| map.get(port)) {
            true => self.ports.watch(id, group(port)),
            false => self.ports.notify(id, group(port)),
        }
    }

    /// Whether a socket may send more; if not, [`Event::Writable`] follows when it may.
    ///
    /// [`Event::Writable`]: crate::proto::Event::Writable
    pub fn has_room(&mut self, id: SocketId) -> bool {
        self.ports.admits(id)
    }

    /// Whether a socket was refused and waits for room.
    pub fn has_refused(&self) -> bool {
        self.ports.has_refused()
    }

    /// Returns the groups that [`take_updates`](Self::take_updates) would return.
    pub fn updates(&self, id: SocketId) -> u64 {
        self.ports.get(id).map_or(0, |socket| socket.updates)
    }

    /// Returns the watched groups that have a port that is no longer congested: bit N covers
    /// ports with remainder N when divided by 64.
    pub fn take_updates(&mut self, id: SocketId) -> u64 {
        self.ports.take_updates(id)
    }

    /// Returns the congested ports of a peer, if it ever sent a map, or the node's own for its own
    /// address.
    pub fn congestion(&self, peer: IpAddr) -> Option<&CongestionMap> {
        if peer == self.config.address {
            return Some(self.ports.congested());
        }
        self.peers.get(&peer)?.map.as_ref()
    }

    /// Returns the state of all sockets.
    pub fn sockets(&self) -> impl Iterator<Item = SocketInfo> {
        self.ports.iter().map(|(id, socket)| SocketInfo {
            port: id.port,
            sndbuf: socket.sndbuf,
            rcvbuf: socket.rcvbuf,
            in_flight: socket.in_flight,
            waiting: socket.waiting,
        })
    }

    /// Returns the state of all peers.
    pub fn connections(&self) -> impl Iterator<Item = ConnectionInfo> {
        self.peers.iter().map(|(address, peer)| {
            let link = peer.up().and_then(|id| self.links.get(&id));
            let handed = link.into_iter().flat_map(|link| link.messages());
            ConnectionInfo {
                peer: *address,
                next_tx: peer.outbox.next_tx(),
                next_rx: peer.next_rx,
                is_connecting: matches!(peer.phase, Phase::Connecting(..)),
                is_up: link.is_some(),
                is_sending: link.is_some_and(|link| link.has_output()),
                queued: peer.outbox.iter().chain(handed).map(Message::cost).sum(),
                held: peer.held,
            }
        })
    }

    /// Returns all messages in the node's queues.
    pub fn messages(&self) -> impl Iterator<Item = MessageInfo> {
        let of = |queue, peer, message: &Message| MessageInfo {
            queue,
            sequence: message.sequence.unwrap_or(0),
            len: message.payload.len(),
            peer,
            local_port: message.sport,
            peer_port: message.dport,
        };
        let waiting = self.peers.iter().flat_map(move |(address, peer)| {
            peer.outbox.iter().map(move |message| of(QueueKind::Send, *address, message))
        });
        let unacked = self.links.values().flat_map(move |link| {
            link.messages().map(move |message| of(QueueKind::Retransmit, link.peer, message))
        });
        let unread = self.ports.iter().flat_map(|(id, socket)| {
            socket.inbox().map(move |received| MessageInfo {
                queue: QueueKind::Receive,
                sequence: 0,
                len: received.payload.len(),
                peer: received.from,
                local_port: id.port,
                peer_port: received.port,
            })
        });
        waiting.chain(unacked).chain(unread)
    }
}
