//! Processing of received data.

use rtrs_base::time::Instant;

use super::Node;
use crate::proto::event::LinkId;
use crate::proto::ports::Received;
use crate::wire::{
    ACK_REQUIRED, ArrivalTimes, CongestionMap, Decoder, Header, Kind, PING_PORT, PROBE_PORT, Step,
};

/// A message that has arrived from a peer.
#[derive(Debug)]
struct Arrived {
    header: Header,
    /// `None` if the payload was not wanted.
    payload: Option<Vec<u8>>,
    times: ArrivalTimes,
}

impl Node {
    /// Handles bytes received on a connection.
    pub fn received(&mut self, now: Instant, id: LinkId, bytes: &[u8]) {
        let Some(link) = self.peers.links.get_mut(id) else { return };
        let from = link.peer;
        let mut decoder = std::mem::take(&mut link.decoder);
        decoder.set_time(now);
        let mut input = bytes;
        loop {
            match decoder.step(&mut input) {
                Ok(None) => break,
                Ok(Some(Step::Header(header, kind))) => {
                    self.peers.valid(now, id, &header, kind);
                    self.apply_effects();
                    // The header may have closed this link: a path keeps its newest connection.
                    let Some(link) = self.peers.links.get(id) else { return };
                    let path = link.path;
                    let (memory, len) = (self.config.peer_memory, header.len as usize);
                    let peer = self.peers.get(from);
                    let is_wanted = peer.is_some_and(|peer| peer.wants(path, &header, memory))
                        && self.ports.fits(header.dport, len);
                    if kind == Kind::Message && !is_wanted {
                        decoder.skip();
                    }
                }
                Ok(Some(Step::Message(header, Kind::Map, payload))) => {
                    if let Some(map) = payload.and_then(CongestionMap::from_payload) {
                        self.stats.cong_update_received += 1;
                        let cleared = self.peers.map_received(now, id, &header, map);
                        self.apply_effects();
                        if let Some(cleared) = cleared {
                            self.ports.congestion_changed(from, cleared);
                        }
                        if self.peers.links.get(id).is_none() {
                            return;
                        }
                    }
                }
                Ok(Some(Step::Message(header, Kind::Message, payload))) => {
                    let times = decoder.times();
                    self.message_received(now, id, Arrived { header, payload, times });
                }
                Err(error) => {
                    if let Some(left_out) = self.bad_streams.admit(now) {
                        tracing::warn!(peer = %from, left_out, "connection closed: {error}");
                    }
                    self.stats.recv_bad_stream += 1;
                    self.peers.close(now, id);
                    self.apply_effects();
                    return;
                }
            }
        }
        self.keep(id, decoder);
    }

    /// Stores the decoder of a connection. Unfinished messages count towards the memory limits too,
    /// because many peers could begin long messages.
    fn keep(&mut self, id: LinkId, mut decoder: Decoder) {
        let Some((peer, link)) = self.peers.pair(id) else { return };
        peer.inbound.discharge(link.held);
        let others = self.ports.memory.received - link.held;
        let held = decoder.held();
        if peer.inbound.held() + held > self.config.peer_memory
            || others + held > self.config.memory
        {
            decoder.skip();
        }
        link.held = decoder.held();
        peer.inbound.charge(link.held);
        self.ports.memory.received = others + link.held;
        link.decoder = decoder;
    }

    fn message_received(&mut self, now: Instant, id: LinkId, message: Arrived) {
        let Arrived { ref header, payload, times } = message;
        let Some((peer, link)) = self.peers.pair(id) else { return };
        let from = link.peer;
        let path = peer.path_mut(peer.numbering(link.path));
        if !path.accept(header) {
            self.stats.recv_drop_old_seq += 1;
            return;
        }
        self.stats.recv_ack_required += u64::from(header.flags & ACK_REQUIRED != 0);
        match (header.sport, header.dport) {
            (PING_PORT, PING_PORT) => {}
            (sport, PING_PORT) => {
                self.stats.recv_ping += 1;
                if sport == PROBE_PORT {
                    self.peers.probed(now, from, header);
                }
                if sport == PROBE_PORT || self.config.ping {
                    self.peers.answer(now, id, sport);
                }
                self.apply_effects();
            }
            (PING_PORT, PROBE_PORT) => {
                self.peers.probed(now, from, header);
                self.apply_effects();
            }
            (port, dport) => {
                let Some(payload) = payload else {
                    match self.ports.is_bound(dport) {
                        true => self.stats.recv_drop_no_memory += 1,
                        false => self.stats.recv_drop_no_sock += 1,
                    }
                    return;
                };
                path.connection.carried();
                peer.inbound.note_sent();
                self.deliver(dport, Received { from, port, payload, times });
            }
        }
    }

    /// Queues a message for a user.
    pub(super) fn deliver(&mut self, port: u16, received: Received) {
        let (from, cost) = (received.from, received.cost());
        let len = received.payload.len() as u64;
        let Some(map_changed) = self.ports.deliver(port, received) else {
            self.stats.recv_drop_no_sock += 1;
            return;
        };
        self.stats.recv_queued += 1;
        self.stats.recv_bytes_added_to_sock += len;
        if let Some(peer) = self.peers.get_mut(from) {
            peer.inbound.charge(cost);
        }
        if map_changed {
            self.map_changed(0);
        }
    }
}
