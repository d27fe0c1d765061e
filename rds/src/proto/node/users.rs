//! Operations of a node's users.

use std::net::IpAddr;

use rtrs_base::time::Instant;

use super::Node;
use crate::proto::config::Config;
use crate::proto::event::{BindError, Outgoing, SendError, SocketId};
use crate::proto::info::{MessageInfo, QueueKind};
use crate::proto::outbox::{Completion, Message, Owner};
use crate::proto::peers::Crowded;
use crate::proto::ports::{Buffers, Closed, Received};
use crate::proto::shares::UserId;
use crate::wire::{ArrivalTimes, CongestionMap, PAYLOAD_MAX, PING_PORT};

/// Returns the group of a port.
const fn group(port: u16) -> u64 {
    1 << (port % 64)
}

impl Node {
    /// Binds a port (0 for any) for the node's own process.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(&mut self, port: u16) -> Result<SocketId, BindError> {
        self.bind_for(UserId::NODE, port)
    }

    /// Binds a port (0 for any). Messages of the port count toward the user's share of the memory.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind_for(&mut self, user: UserId, port: u16) -> Result<SocketId, BindError> {
        let Config { sndbuf, rcvbuf, .. } = self.config;
        self.ports.bind(user, port, Buffers { sndbuf, rcvbuf })
    }

    /// Frees a port. Messages waiting for the reader are dropped. Messages sent from the port are
    /// resent at most once, over the current connection if one is up.
    pub fn close_socket(&mut self, id: SocketId) {
        let Some(closed) = self.ports.close(id) else { return };
        let Closed { inbox, map_changed, has_sent } = closed;
        self.stats.recv_drop_dead_sock += inbox.len() as u64;
        for received in &inbox {
            self.stats.recv_bytes_freed_fromsock += received.payload.len() as u64;
            if let Some(peer) = self.peers.get_mut(received.from) {
                peer.inbound.discharge(received.cost());
            }
        }
        if map_changed {
            self.map_changed(group(id.port));
        }
        if has_sent {
            self.peers.socket_closed(id);
        }
    }

    /// Cancels unacknowledged messages from a socket to a port on a peer. They may still arrive,
    /// but are not resent.
    pub fn cancel(&mut self, id: SocketId, to: IpAddr, port: u16) {
        let amount = self.peers.cancel(id, to, port);
        self.apply_effects();
        self.ports.discharge(id, amount);
    }

    /// Sets a socket's buffer sizes: how much payload may be sent without an acknowledgment, and
    /// how much may wait for the reader before peers must stop.
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
        self.config.check(socket.sndbuf, to, len)?;
        if self.congestion(to).is_some_and(|map| map.get(port)) {
            self.stats.cong_send_error += 1;
            return Err(SendError::Congested);
        }
        if !self.ports.has_room(id) {
            self.stats.send_queue_full += 1;
            return Err(SendError::Full);
        }
        Ok(())
    }

    /// Checks whether messages can be sent to a node, and reserves an entry for the peer.
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn reach(&mut self, now: Instant, to: IpAddr) -> Result<(), SendError> {
        self.config.check(PAYLOAD_MAX, to, 0)?;
        if to == self.config.address {
            return Ok(());
        }
        let admitted = self.peers.admit(now, to);
        self.apply_effects();
        admitted.map_err(|Crowded| SendError::TooManyPeers(self.config.peers_max))
    }

    /// Sends a message. Call [`may_send`](Self::may_send) first; a caller that has done its own
    /// checks may also send to a port that has become congested, or from a socket that has become
    /// full. If the message has a cookie, the cookie is returned to the socket, even after an
    /// error.
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn send(&mut self, now: Instant, id: SocketId, message: Outgoing) -> Result<(), SendError> {
        let Outgoing { to, port, payload, cookie } = message;
        let completion = cookie.map(|cookie| Completion { socket: id, cookie });
        let is_own = to == self.config.address;
        let socket = self.ports.get(id).ok_or(SendError::Closed)?;
        let user = socket.user;
        let mut checked = self.config.check(socket.sndbuf, to, payload.len());
        if checked.is_ok() {
            self.stats.copy_from_user += payload.len() as u64;
            if !is_own {
                checked = self.reach(now, to).inspect_err(|_| self.stats.send_dropped += 1);
            }
        }
        if let Some(completion) = completion.filter(|_| is_own || checked.is_err()) {
            self.ports.complete(completion);
        }
        checked?;
        if is_own {
            self.send_to_self(now, id, Outgoing::new(to, port, payload));
            return Ok(());
        }
        let message = Message {
            owner: Owner::Socket(id),
            user,
            sport: id.port,
            dport: port,
            payload,
            extensions: [0; 16],
            sequence: None,
            is_begun: false,
            completion,
        };
        self.ports.charge(id, &message);
        self.stats.send_queued += 1;
        self.peers.queue(now, to, message);
        Ok(())
    }

    /// Sends a message to the node itself; the message never leaves the node. The limits are the
    /// same as for peers.
    fn send_to_self(&mut self, now: Instant, id: SocketId, message: Outgoing) {
        let Outgoing { to: from, port, payload, .. } = message;
        let times = ArrivalTimes::at(now);
        self.stats.send_queued += 1;
        if port != PING_PORT {
            match !self.ports.is_bound(port) || self.ports.fits(port, payload.len()) {
                true => self.deliver(port, Received { from, port: id.port, payload, times }),
                false => self.stats.recv_drop_no_memory += 1,
            }
        } else if self.ports.congested().get(id.port) || !self.ports.fits(id.port, 0) {
            self.stats.send_pong_dropped += 1;
        } else if self.config.ping {
            self.deliver(id.port, Received { from, port: PING_PORT, payload: Vec::new(), times });
        }
    }

    /// Returns the next message for a socket's reader.
    pub fn receive(&mut self, id: SocketId) -> Option<Received> {
        let received = self.pass(id)?;
        self.taken(id, received.payload.len());
        Some(received)
    }

    /// Returns the next message for a reader in another process. The message counts against the
    /// receive buffer until [`taken`](Self::taken) is called.
    pub fn pass(&mut self, id: SocketId) -> Option<Received> {
        let received = self.ports.pass(id)?;
        self.stats.recv_delivered += 1;
        let len = received.payload.len() as u64;
        self.stats.copy_to_user += len;
        self.stats.recv_bytes_freed_fromsock += len;
        if let Some(peer) = self.peers.get_mut(received.from) {
            peer.inbound.discharge(received.cost());
        }
        Some(received)
    }

    /// Records that a reader has taken messages with a payload of this many bytes in total.
    pub fn taken(&mut self, id: SocketId, payload: usize) {
        if self.ports.taken(id, payload) {
            self.map_changed(group(id.port));
        }
    }

    /// Watches a port on a peer on behalf of a socket. The user is notified by [`take_updates`]
    /// once the port is no longer congested, or immediately if it is not congested.
    ///
    /// [`take_updates`]: crate::proto::Ports::take_updates
    pub fn watch(&mut self, id: SocketId, to: IpAddr, port: u16) {
        match self.congestion(to).is_some_and(|map| map.get(port)) {
            true => self.ports.watch(id, group(port)),
            false => self.ports.notify(id, group(port)),
        }
    }

    /// Returns the congested ports of a peer, if the peer has ever sent a map; for the node's own
    /// address, the congested ports of the node.
    pub fn congestion(&self, peer: IpAddr) -> Option<&CongestionMap> {
        if peer == self.config.address {
            return Some(self.ports.congested());
        }
        self.peers.get(peer)?.inbound.map()
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
            let messages = peer.paths().iter().flat_map(|path| path.outbound.messages());
            messages.map(move |message| of(QueueKind::Send, address, message))
        });
        let unacked = self.peers.links.iter().flat_map(move |link| {
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
