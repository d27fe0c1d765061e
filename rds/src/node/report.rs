//! State of a node, as reported to its operator.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::proto::Node;

/// A user's socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientReport {
    /// Port of the socket.
    pub port: u16,
    /// Process that created the socket.
    pub pid: u32,
    /// User ID of that process.
    pub uid: u32,
}

/// State of a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerReport {
    /// Address of the peer.
    pub address: IpAddr,
    /// `up`, `connecting` or `down`.
    pub state: String,
    /// Sequence number of the next message to the peer.
    pub next_tx: u64,
    /// Sequence number expected next from the peer.
    pub next_rx: u64,
    /// Bytes that wait to be sent to the peer or to be acknowledged by it.
    pub queued_bytes: usize,
    /// Bytes that the peer has sent and that have not been read.
    pub unread_bytes: usize,
    /// Congested ports of the peer.
    pub congested_ports: Vec<u16>,
}

/// State of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Address of the node.
    pub address: IpAddr,
    /// Bytes that peers have sent and that have not been read.
    pub unread_bytes: usize,
    /// Bytes that users have sent and peers have not acknowledged.
    pub unacked_bytes: usize,
    /// Limit of each of the two.
    pub memory_max: usize,
    /// Sockets of the node's users.
    pub sockets: Vec<ClientReport>,
    /// Peers of the node.
    pub peers: Vec<PeerReport>,
    /// Counters of the node.
    pub counters: std::collections::BTreeMap<String, u64>,
}

impl NodeReport {
    /// Creates the report of a node with these users.
    pub(super) fn new(node: &Node, sockets: Vec<ClientReport>) -> Self {
        let (unread_bytes, unacked_bytes) = node.memory();
        let peers = node.peers().connections().map(|info| PeerReport {
            address: info.peer,
            state: match (info.is_up, info.is_connecting) {
                (true, _) => "up",
                (_, true) => "connecting",
                _ => "down",
            }
            .into(),
            next_tx: info.next_tx,
            next_rx: info.next_rx,
            queued_bytes: info.queued,
            unread_bytes: info.held,
            congested_ports: node
                .congestion(info.peer)
                .map(|map| map.ports().collect())
                .unwrap_or_default(),
        });
        let counters = node.stats().all();
        Self {
            address: node.config().address,
            unread_bytes,
            unacked_bytes,
            memory_max: node.config().memory,
            sockets,
            peers: peers.collect(),
            counters: counters.into_iter().map(|(name, value)| (name.into(), value)).collect(),
        }
    }
}
