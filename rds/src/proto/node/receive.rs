//! Processing of received data.

use std::net::IpAddr;

use rtrs_core::mutated;
use rtrs_core::time::Instant;

use super::Node;
use crate::proto::config::MESSAGE_COST;
use crate::proto::event::LinkId;
use crate::proto::link::Role;
use crate::proto::outbox::{Message, Owner};
use crate::proto::ports::{Received, Socket};
use crate::wire::{CongestionMap, Extensions, Header, Kind, PING_PORT, PROBE_PORT, Step};

impl Node {
    /// Handles bytes received on a connection.
    pub fn received(&mut self, now: Instant, id: LinkId, bytes: &[u8]) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let from = link.peer;
        let mut decoder = std::mem::take(&mut link.decoder);
        let mut input = bytes;
        loop {
            match decoder.step(&mut input) {
                Ok(None) => break,
                Ok(Some(Step::Header(header, kind))) => {
                    self.valid(now, id, from);
                    if kind == Kind::Message && !self.wants(from, &header) {
                        decoder.skip();
                    }
                }
                Ok(Some(Step::Message(header, Kind::Map, payload))) => {
                    if let Some(map) = payload.and_then(CongestionMap::from_payload) {
                        self.map_received(now, id, from, &header, map);
                    }
                }
                Ok(Some(Step::Message(header, Kind::Message, payload))) => {
                    self.message_received(now, from, &header, payload);
                }
                Err(error) => {
                    if let Some(left_out) = self.bad_streams.admit(now) {
                        tracing::warn!(peer = %from, left_out, "connection closed: {error}");
                    }
                    self.stats.recv_bad_stream += 1;
                    self.close(now, id);
                    return;
                }
            }
        }
        // Unfinished messages count as well: many peers could begin long messages.
        let limit = (self.config.peer_memory, self.config.memory);
        let (Some(link), Some(peer)) = (self.links.get_mut(&id), self.peers.get_mut(&from)) else {
            return;
        };
        let memory = &mut self.ports.memory;
        (peer.held, memory.received) = (peer.held - link.held, memory.received - link.held);
        let held = decoder.held();
        if peer.held + held > limit.0 || memory.received + held > limit.1 {
            decoder.skip();
        }
        link.held = decoder.held();
        (peer.held, memory.received) = (peer.held + link.held, memory.received + link.held);
        link.decoder = decoder;
    }

    /// Handles the first valid data of a peer on a connection.
    fn valid(&mut self, now: Instant, id: LinkId, from: IpAddr) {
        let (Some(peer), Some(link)) = (self.peers.get_mut(&from), self.links.get_mut(&id)) else {
            return;
        };
        link.is_taken = true;
        peer.is_proven = true;
        if peer.candidate == Some(id)
            && let Some(former) = peer.up()
        {
            // The other connection takes over as soon as the current one is lost.
            self.close(now, former);
        }
    }

    /// Whether the payload of a message is wanted.
    fn wants(&self, from: IpAddr, header: &Header) -> bool {
        let Some(peer) = self.peers.get(&from) else { return false };
        let Some(socket) = self.ports.at(header.dport) else { return false };
        let len = header.len as usize;
        let is_old = header.is_retransmitted() && header.sequence < peer.next_rx;
        let is_data = header.dport != PING_PORT;
        is_data
            && (!is_old || mutated!(RdsDuplicateAccepted))
            && peer.held + len + MESSAGE_COST <= self.config.peer_memory
            && self.has_memory(socket, len)
    }

    /// Whether there is memory for a message of this length to wait for the reader of a socket.
    pub(super) fn has_memory(&self, socket: &Socket, len: usize) -> bool {
        let cost = len + MESSAGE_COST;
        socket.waiting + cost <= self.config.port_memory
            && self.ports.memory.received + cost <= self.config.memory
    }

    fn map_received(
        &mut self,
        now: Instant,
        id: LinkId,
        from: IpAddr,
        header: &Header,
        map: CongestionMap,
    ) {
        self.stats.cong_update_received += 1;
        let Some(peer) = self.peers.get_mut(&from) else { return };
        if let Some(generation) = Extensions::decode(&header.extensions).generation {
            peer.generation_in_map = true;
            let known = peer.generation.replace(generation);
            if known.is_some_and(|known| known != generation) {
                // Sequence numbers restart. The first probe of a run restarts them too: it is never
                // a repeat, and precedes everything else.
                peer.next_rx = 0;
                self.peer_restarted(now, from);
            }
        }
        let Some(peer) = self.peers.get_mut(&from) else { return };
        if peer.hold_until.take().is_some() {
            self.ready.insert(id);
        }
        let cleared = peer.map.as_ref().map_or(0, |old| old.cleared(&map));
        let is_new = peer.map.as_ref() != Some(&map);
        peer.map = Some(map);
        if is_new {
            self.ports.congestion_changed(from, cleared);
        }
    }

    fn message_received(
        &mut self,
        now: Instant,
        from: IpAddr,
        header: &Header,
        payload: Option<Vec<u8>>,
    ) {
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let is_old = header.is_retransmitted() && header.sequence < peer.next_rx;
        if is_old && !mutated!(RdsDuplicateAccepted) {
            self.stats.recv_drop_old_seq += 1;
            return;
        }
        peer.next_rx = header.sequence.wrapping_add(1);
        match (header.sport, header.dport) {
            (PING_PORT, PING_PORT) => {}
            (sport, PING_PORT) => {
                self.stats.recv_ping += 1;
                if sport == PROBE_PORT {
                    self.probed(now, from, header);
                }
                if sport == PROBE_PORT || self.config.ping {
                    self.answer(now, from, sport);
                }
            }
            (PING_PORT, PROBE_PORT) => self.probed(now, from, header),
            (port, dport) => {
                let Some(payload) = payload else {
                    match self.ports.at(dport) {
                        Some(_) => self.stats.recv_drop_no_memory += 1,
                        None => self.stats.recv_drop_no_sock += 1,
                    }
                    return;
                };
                peer.has_sent = true;
                self.deliver(dport, Received { from, port, payload });
            }
        }
    }

    /// Queues a message for a user.
    pub(super) fn deliver(&mut self, port: u16, received: Received) {
        let (from, cost) = (received.from, received.cost());
        let Some(map_changed) = self.ports.deliver(port, received) else {
            self.stats.recv_drop_no_sock += 1;
            return;
        };
        self.stats.recv_queued += 1;
        if let Some(peer) = self.peers.get_mut(&from) {
            peer.held += cost;
        }
        if map_changed {
            self.map_changed(0);
        }
    }

    /// Sends our changed map to all peers. `cleared` are the groups of ports that may have been
    /// cleared.
    pub(super) fn map_changed(&mut self, cleared: u64) {
        self.ports.congestion_changed(self.config.address, cleared);
        if mutated!(RdsMapUnsent) {
            return;
        }
        for (id, link) in &mut self.links {
            if link.role == Role::Up {
                link.map_is_due = true;
                self.ready.insert(*id);
            }
        }
    }

    /// Handles a probe or the answer to one.
    fn probed(&mut self, now: Instant, from: IpAddr, header: &Header) {
        let Some(generation) = Extensions::decode(&header.extensions).generation else { return };
        // Its sequence number already belongs to the new run, and so does the one expected before
        // it.
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let known = peer.generation.replace(generation);
        if known.is_some_and(|known| known != generation) {
            self.peer_restarted(now, from);
        }
    }

    /// Drops messages that a former run of the peer may have delivered; they must not be resent.
    fn peer_restarted(&mut self, now: Instant, from: IpAddr) {
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let dropped = peer.outbox.remove(|m| m.is_begun && !mutated!(RdsRestartIgnored));
        if let Some(left_out) = self.restarts.admit(now) {
            tracing::info!(peer = %from, dropped = dropped.len(), left_out, "peer has restarted");
        }
        self.drop_messages(from, dropped);
    }

    /// Queues the answer to a ping or probe.
    fn answer(&mut self, now: Instant, to: IpAddr, dport: u16) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        if peer.pongs >= self.config.pongs_max || peer.is_congested(dport) {
            self.stats.send_pong_dropped += 1;
            return;
        }
        peer.pongs += 1;
        self.stats.send_pong += 1;
        let extensions = match dport {
            PROBE_PORT => {
                Extensions { npaths: Some(1), generation: self.config.sent_generation() }.encode()
            }
            _ => [0; 16],
        };
        let (owner, sport, payload) = (Owner::Pong, PING_PORT, Vec::new());
        let (sequence, is_begun) = (None, false);
        let pong = Message { owner, sport, dport, payload, extensions, sequence, is_begun };
        peer.outbox.push(pong);
        self.wake(now, to);
    }
}
