//! What goes between a node's machines and what moves their bytes and serves their users.

use std::net::IpAddr;

/// A bound socket. A port that is bound again is another socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SocketId {
    /// Its port.
    pub port: u16,
    /// Tells it apart from others that had this port.
    pub(super) serial: u64,
}

/// A TCP connection, from the order to connect or the accept on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkId(pub(super) u64);

impl LinkId {
    /// Its number, below 2^62.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// The link of a number.
    pub const fn of(number: u64) -> Self {
        Self(number)
    }
}

/// What is to be done with TCP connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Connect from the node's address to this one, then call
    /// [`connected`](super::Node::connected) or [`lost`](super::Node::lost).
    Connect {
        /// Its name from now on.
        link: LinkId,
        /// The peer.
        to: IpAddr,
    },
    /// Close it; nothing is to be reported about it any more.
    Close(LinkId),
}

/// What users of sockets want to know. Each is reported once until it is dealt with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Messages or congestion updates wait for this socket.
    Readable(SocketId),
    /// A socket that was full may send again.
    Writable(SocketId),
    /// This peer's congestion map is another one.
    Congestion(IpAddr),
}

/// Why a port cannot be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// Port 1 is for probes.
    #[error("port 1 is for probes; use another one, or 0 for any")]
    Reserved,
    /// Somebody has it.
    #[error("port {0} is in use")]
    InUse(u16),
    /// There are as many sockets as there may be.
    #[error("the node has {0} sockets already, its limit (sockets-max)")]
    TooMany(usize),
}

/// Why a message is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The socket is closed.
    #[error("the socket is closed")]
    Closed,
    /// No node can have this address.
    #[error("{0} is not the address of one node")]
    Address(IpAddr),
    /// An IPv4 node sends to IPv4 nodes, an IPv6 node to IPv6 nodes.
    #[error("{0} is of the other family of addresses than this node")]
    Family(IpAddr),
    /// Longer than a message or the send buffer may be.
    #[error("the message has {len} bytes; the longest that this socket sends has {max}")]
    TooLong {
        /// Bytes of the message.
        len: usize,
        /// The most.
        max: usize,
    },
    /// The send buffer is full; [`Event::Writable`] follows.
    #[error("the send buffer is full")]
    Full,
    /// The destination port is congested; [`Event::Congestion`] follows.
    #[error("the destination port is congested")]
    Congested,
    /// There are as many peers as there may be.
    #[error("the node has {0} peers already, its limit (peers-max)")]
    TooManyPeers(usize),
}
