//! The state of a node, for `rds info` and the info options of sockets.

use std::net::IpAddr;

/// A bound socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketInfo {
    /// Its port.
    pub port: u16,
    /// Its send buffer, bytes.
    pub sndbuf: usize,
    /// Its receive buffer, bytes.
    pub rcvbuf: usize,
    /// Bytes sent and not acknowledged, with [`MESSAGE_COST`](super::MESSAGE_COST) for each.
    pub in_flight: usize,
    /// Bytes that wait for its reader, likewise.
    pub waiting: usize,
}

/// A peer and the connection to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// The peer's address.
    pub peer: IpAddr,
    /// Number of the next message to it.
    pub next_tx: u64,
    /// Number expected next from it.
    pub next_rx: u64,
    /// An attempt to connect runs.
    pub is_connecting: bool,
    /// The connection is up.
    pub is_up: bool,
    /// Something is being written to it.
    pub is_sending: bool,
    /// Cost of what waits for it or is not acknowledged.
    pub queued: usize,
    /// Cost of what it sent and users have not read.
    pub held: usize,
}

/// Which queue a message is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// Not handed to a connection yet.
    Send,
    /// Not acknowledged.
    Retransmit,
    /// Not read by its user.
    Receive,
}

/// A message in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageInfo {
    /// The queue.
    pub queue: QueueKind,
    /// Its number; 0 if it has none yet, or no longer.
    pub sequence: u64,
    /// Bytes of its payload.
    pub len: usize,
    /// The peer.
    pub peer: IpAddr,
    /// The port at this node.
    pub local_port: u16,
    /// The port at the peer.
    pub peer_port: u16,
}
