//! What a node reports to its operator.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::proto::Node;

/// A user's socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientReport {
    /// Its port.
    pub port: u16,
    /// The process that made it.
    pub pid: u32,
    /// The user that the process ran as.
    pub uid: u32,
}

/// A peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerReport {
    /// Its address.
    pub address: IpAddr,
    /// `up`, `connecting` or `down`.
    pub state: String,
    /// Number of the next message to it.
    pub next_tx: u64,
    /// Number expected next from it.
    pub next_rx: u64,
    /// Bytes that wait for it or are not acknowledged.
    pub queued_bytes: usize,
    /// Bytes that it has sent and nobody has read.
    pub unread_bytes: usize,
    /// Its ports that are congested.
    pub congested_ports: Vec<u16>,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Its address.
    pub address: IpAddr,
    /// Bytes that peers have sent and nobody has read.
    pub unread_bytes: usize,
    /// Bytes that users have sent and peers have not acknowledged.
    pub unacked_bytes: usize,
    /// The most that either may be.
    pub memory_max: usize,
    /// Its users' sockets.
    pub sockets: Vec<ClientReport>,
    /// Its peers.
    pub peers: Vec<PeerReport>,
    /// Its counters.
    pub counters: std::collections::BTreeMap<String, u64>,
}

impl NodeReport {
    /// Of a node with these users.
    pub(super) fn new(node: &Node, sockets: Vec<ClientReport>) -> Self {
        let (unread_bytes, unacked_bytes) = node.memory();
        let peers = node.connections().map(|info| PeerReport {
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
