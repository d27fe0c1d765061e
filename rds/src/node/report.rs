//! The state of a node, as reported to its operator.

use std::collections::BTreeMap;
use std::net::IpAddr;

use rtrs_base::rt::PeerCredentials;
use rtrs_base::time::{Duration, Instant};
use serde::{Deserialize, Serialize};

use super::blocked::Blocked;
use crate::proto::{ConnectionInfo, Node};
use crate::wire::CongestionMap;

/// A user's socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientReport {
    /// Port of the socket.
    pub port: u16,
    /// Process that created the socket; 0 if it is outside the PID namespace of the node.
    pub pid: u32,
    /// User ID of that process.
    pub uid: u32,
    /// Bytes of received payload that the user has not read.
    pub unread_bytes: usize,
    /// Bytes of payload sent but not yet acknowledged.
    pub unacked_bytes: usize,
    /// Seconds for which the port has been congested: peers must not send to it.
    pub congested_seconds: Option<u64>,
}

/// A congested port of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CongestedPort {
    /// The port.
    pub port: u16,
    /// Seconds for which the port has been congested.
    pub seconds: u64,
}

/// State of a path to a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathReport {
    /// Number of the path, starting at 0.
    pub path: usize,
    /// Name of a [`ConnectionState`](crate::proto::ConnectionState).
    pub state: String,
    /// Sequence number of the next message to the peer.
    pub next_tx: u64,
    /// Sequence number expected next from the peer.
    pub next_rx: u64,
    /// Bytes waiting to be sent to the peer or acknowledged by it.
    pub queued_bytes: usize,
}

/// State of a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerReport {
    /// Address of the peer.
    pub address: IpAddr,
    /// State of path 0.
    pub state: String,
    /// Sequence number of the next message sent to the peer on path 0.
    pub next_tx: u64,
    /// Sequence number expected next from the peer on path 0.
    pub next_rx: u64,
    /// Bytes waiting to be sent to the peer or acknowledged by it.
    pub queued_bytes: usize,
    /// Bytes that the peer has sent and users have not read.
    pub unread_bytes: usize,
    /// Seconds for which the peer has acknowledged nothing on a path on which messages are waiting:
    /// the maximum of all paths.
    pub stuck_seconds: Option<u64>,
    /// Congested ports of the peer.
    pub congested_ports: Vec<CongestedPort>,
    /// Paths to the peer, each with its own connection.
    pub paths: Vec<PathReport>,
}

impl PeerReport {
    /// Returns the state of all peers of a node.
    fn all(now: Instant, node: &Node, blocked: &Blocked) -> Vec<Self> {
        let mut peers: Vec<Self> = Vec::new();
        for info in node.peers().connections() {
            let path = PathReport::new(&info);
            if let Some(peer) = peers.last_mut().filter(|peer| peer.address == info.peer) {
                peer.queued_bytes += info.queued;
                peer.unread_bytes += info.held;
                peer.paths.push(path);
                continue;
            }
            let ports = node.congestion(info.peer).into_iter().flat_map(CongestionMap::ports);
            let congested = |port| {
                let seconds = blocked.congested(now, info.peer, port).map_or(0, seconds);
                CongestedPort { port, seconds }
            };
            peers.push(Self {
                address: info.peer,
                state: path.state.clone(),
                next_tx: info.next_tx,
                next_rx: info.next_rx,
                queued_bytes: info.queued,
                unread_bytes: info.held,
                stuck_seconds: blocked.stuck(now, info.peer).map(seconds),
                congested_ports: ports.map(congested).collect(),
                paths: vec![path],
            });
        }
        peers
    }
}

fn seconds(span: Duration) -> u64 {
    span.as_secs()
}

impl PathReport {
    fn new(info: &ConnectionInfo) -> Self {
        Self {
            path: info.path,
            state: info.state.name().into(),
            next_tx: info.next_tx,
            next_rx: info.next_rx,
            queued_bytes: info.queued,
        }
    }
}

/// State of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Address of the node.
    pub address: IpAddr,
    /// Bytes that peers have sent and users have not read.
    pub unread_bytes: usize,
    /// Bytes that users have sent and peers have not acknowledged.
    pub unacked_bytes: usize,
    /// Limit on each of `unread_bytes` and `unacked_bytes`.
    pub memory_max: usize,
    /// Sockets of the node's users.
    pub sockets: Vec<ClientReport>,
    /// Peers of the node.
    pub peers: Vec<PeerReport>,
    /// Counters of the node.
    pub counters: BTreeMap<String, u64>,
}

impl NodeReport {
    /// Creates the report on a node whose sockets have these owners.
    pub(super) fn new(
        now: Instant,
        node: &Node,
        blocked: &Blocked,
        owners: &BTreeMap<u16, PeerCredentials>,
    ) -> Self {
        let (unread_bytes, unacked_bytes) = node.memory();
        let address = node.config().address;
        let sockets = node.ports().sockets().filter_map(|info| {
            let PeerCredentials { pid, uid } = *owners.get(&info.port)?;
            Some(ClientReport {
                port: info.port,
                pid: pid.unwrap_or(0),
                uid,
                unread_bytes: info.waiting,
                unacked_bytes: info.in_flight,
                congested_seconds: blocked.congested(now, address, info.port).map(seconds),
            })
        });
        let counters = node.stats().all();
        Self {
            address,
            unread_bytes,
            unacked_bytes,
            memory_max: node.config().memory,
            sockets: sockets.collect(),
            peers: PeerReport::all(now, node, blocked),
            counters: counters.into_iter().map(|(name, value)| (name.into(), value)).collect(),
        }
    }
}
