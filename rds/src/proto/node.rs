//! A node: its sockets, its peers and the data exchanged between them.

mod receive;
mod users;

use std::io::IoSlice;
use std::net::IpAddr;

use rtrs_base::log_limit::LogLimit;
use rtrs_base::mutated;
use rtrs_base::prng::Prng;
use rtrs_base::time::Instant;

use super::config::Config;
use super::event::{LinkId, Order, TcpEvent};
use super::link::{Role, TcpPorts};
use super::outbox::Owner;
use super::peer::Greeting;
use super::peers::{Effect, Peers};
use super::ports::{PortLimits, Ports};
use super::stats::Stats;

/// The node of one address.
///
/// The driver moves bytes between the node and TCP connections, carries out [`Order`]s and passes
/// [`Event`](super::Event)s to users. Before the first bytes of an accepted connection, the driver
/// reads the remaining data of the [`predecessors`](Peers::predecessors), and before the next
/// accept, the remaining data of the [`candidates`](Peers::candidates). The driver reports how much
/// of the written data the peer's system has acknowledged.
#[derive(Debug)]
pub struct Node {
    config: Config,
    ports: Ports,
    peers: Peers,
    /// Counters of data exchanged between peers and sockets.
    stats: Stats,
    /// Rate limit for log lines that peers can trigger.
    bad_streams: LogLimit,
}

/// Progress of a connection with unacknowledged bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckProgress {
    /// Bytes written.
    pub written: u64,
    /// Bytes known to be acknowledged.
    pub acked: u64,
    /// Whether a user, or a peer that pings, waits for more acknowledgments.
    pub is_awaited: bool,
    /// Whether unacknowledged data exceeds the limit above which a check follows each write.
    pub is_much: bool,
}

// Connections.
impl Node {
    /// Creates a node without sockets or connections.
    pub fn new(config: Config) -> Self {
        let mut prng = Prng::new(config.seed);
        let limits = PortLimits {
            sockets: config.sockets_max,
            port_memory: config.port_memory,
            memory: config.memory,
        };
        Self {
            ports: Ports::new(limits, prng.fork()),
            peers: Peers::new(config.clone(), prng),
            config,
            stats: Stats::default(),
            bad_streams: LogLimit::default(),
        }
    }

    /// Returns the node's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the node's counters.
    pub fn stats(&self) -> Stats {
        self.stats.plus(self.peers.stats).plus(self.ports.stats())
    }

    /// Returns the bytes that peers have sent and users have not read, and the bytes that users
    /// have sent and peers have not acknowledged, both as counted in memory limits.
    pub fn memory(&self) -> (usize, usize) {
        (self.ports.memory.received, self.ports.memory.sent)
    }

    /// Returns the sockets.
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Returns the sockets, for use by their users.
    pub fn ports_mut(&mut self) -> &mut Ports {
        &mut self.ports
    }

    /// Returns the peers and the connections to them.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// Returns the next order for connections.
    pub fn take_order(&mut self) -> Option<Order> {
        self.peers.links.take_order()
    }

    /// Returns the time at which to call [`tick`](Self::tick).
    pub fn deadline(&self) -> Option<Instant> {
        self.peers.timers.deadline()
    }

    /// Runs timers. Returns true if any was due.
    pub fn tick(&mut self, now: Instant) -> bool {
        let mut any = false;
        while self.peers.tick(now) {
            any = true;
            self.apply_effects();
        }
        any
    }

    /// Handles the establishment of a connection that the node ordered.
    pub fn connected(&mut self, now: Instant, id: LinkId) {
        self.peers.connected(now, id);
        self.apply_effects();
    }

    /// Records an event of a TCP connection, for counters and [`Peers::tcp_sockets`].
    pub fn tcp_event(&mut self, id: LinkId, event: TcpEvent) {
        match event {
            TcpEvent::Ports { own, peer } => {
                if let Some(link) = self.peers.links.get_mut(id) {
                    link.tcp_ports = TcpPorts { own, peer };
                }
            }
            TcpEvent::Input => self.stats.tcp_data_ready_calls += 1,
            TcpEvent::Room => self.stats.tcp_write_space_calls += 1,
            TcpEvent::NoRoom => self.stats.tcp_sndbuf_full += 1,
        }
    }

    /// Handles a connection accepted from a peer. On `None`, the caller closes the connection.
    pub fn accepted(&mut self, now: Instant, from: IpAddr) -> Option<LinkId> {
        let link = self.peers.accepted(now, from);
        self.apply_effects();
        link
    }

    /// Handles a connection that was lost or could not be established.
    pub fn lost(&mut self, now: Instant, id: LinkId) {
        self.peers.lost(now, id);
        self.apply_effects();
    }

    /// Passes the effects of changes to connections on to the sockets.
    fn apply_effects(&mut self) {
        for effect in std::mem::take(&mut self.peers.effects) {
            match effect {
                Effect::InputDiscarded(held) => self.ports.memory.received -= held,
                Effect::Dropped(message) => self.ports.release(&message),
                Effect::MapForgotten(peer) => self.ports.congestion_changed(peer, 0),
            }
        }
    }

    /// Sends our changed map to all peers. `cleared` is the groups of ports that may have been
    /// cleared.
    fn map_changed(&mut self, cleared: u64) {
        self.ports.congestion_changed(self.config.address, cleared);
        if !mutated!(RdsMapUnsent) {
            self.peers.links.send_map_to_all();
        }
    }
}

// Output.
impl Node {
    /// Returns the next connection with data to write. The connection is returned again when it has
    /// more data.
    pub fn next_ready(&mut self) -> Option<LinkId> {
        self.peers.links.next_ready()
    }

    /// Collects the bytes to write to a connection in as many slices as fit. Returns the number of
    /// slices, 0 if there is nothing to write.
    pub fn output<'a>(&'a mut self, id: LinkId, room: &mut [IoSlice<'a>]) -> usize {
        let generation = self.config.sent_generation();
        let (paths, congested) = (self.config.paths(), self.ports.congested());
        let greeting = Greeting { generation, paths, congested };
        let pair = self.peers.pair(id).filter(|(_, link)| link.role == Role::Up);
        if let Some((peer, link)) = pair {
            let filled = peer.path_mut(link.path).outbound.fill(link, greeting);
            self.stats.cong_update_queued += filled.maps;
            self.stats.send_retransmitted += filled.repeats;
        }
        self.peers.links.get(id).map_or(0, |link| link.slices(room))
    }

    /// Records that `count` bytes of the output were written.
    pub fn wrote(&mut self, id: LinkId, count: usize) {
        if let Some(link) = self.peers.links.get_mut(id) {
            link.wrote(count);
        }
    }

    /// Records that the first `acked` bytes written to a connection have arrived at the peer's
    /// system. Ignored until data has been received on the connection.
    pub fn acked(&mut self, id: LinkId, acked: u64) {
        let believes = self.config.generation == 0 || mutated!(RdsAckUnaccepted);
        let Some((peer, link)) = self.peers.pair(id) else { return };
        if !link.is_taken && !believes {
            return;
        }
        let mut has_synced = false;
        let path = peer.path_mut(link.path);
        while let Some(message) = link.pop_acked(acked) {
            self.stats.send_drop_acked += 1;
            has_synced |= path.outbound.acked(&message);
            if matches!(message.owner, Owner::Socket(_) | Owner::Nobody) {
                path.connection.carried();
            }
            self.ports.release(&message);
        }
        if has_synced {
            self.peers.links.wake(id);
        }
    }

    /// Returns the progress of a connection with unacknowledged bytes.
    pub fn awaits_ack(&self, id: LinkId) -> Option<AckProgress> {
        let link = self.peers.links.get(id).filter(|link| link.is_unacked())?;
        let is_awaited = self.peers.get(link.peer).is_none_or(|peer| {
            let outbound = &peer.path(link.path).outbound;
            !outbound.is_synced() || outbound.has_many_pongs(self.config.pongs_max)
        });
        let (written, acked) = link.progress();
        let is_awaited = is_awaited || self.ports.awaits_acks();
        let is_much = self.config.tuning.is_much(link.unacked_frames(), written - acked);
        Some(AckProgress { written, acked, is_awaited, is_much })
    }
}
