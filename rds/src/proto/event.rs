//! Interface between a node's state machines and the code that moves bytes and serves users.

use std::net::IpAddr;

/// A bound socket. Rebinding a port creates another socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SocketId {
    /// Port of the socket.
    pub port: u16,
    /// Distinguishes successive sockets bound to the port.
    pub(super) serial: u64,
}

/// A message to send.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Destination node of the message.
    pub to: IpAddr,
    /// Port on that node.
    pub port: u16,
    /// Payload of the message.
    pub payload: Vec<u8>,
    /// Number that identifies the message's completion to the sender, if the sender wants a
    /// completion.
    pub cookie: Option<u32>,
}

impl Outgoing {
    /// Creates a message without a cookie.
    pub fn new(to: IpAddr, port: u16, payload: Vec<u8>) -> Self {
        Self { to, port, payload, cookie: None }
    }
}

/// A TCP connection, from the order to connect or the accept onwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkId(pub(super) u64);

impl LinkId {
    /// Returns the number of the link, below 2^62.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// Returns the link with this number.
    pub const fn of(number: u64) -> Self {
        Self(number)
    }
}

/// Event on a TCP connection, for counters and diagnostics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpEvent {
    /// The TCP ports of the connection are known.
    Ports {
        /// Local port.
        own: u16,
        /// The peer's port.
        peer: u16,
    },
    /// There is input.
    Input,
    /// There is room for output again.
    Room,
    /// There is no room for more output.
    NoRoom,
}

/// Order to the owner of the TCP connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Connect from the node's address to the peer's address, then call
    /// [`connected`](super::Node::connected) or [`lost`](super::Node::lost).
    Connect {
        /// Identifier of the new connection.
        link: LinkId,
        /// Address of the peer.
        to: IpAddr,
    },
    /// Close the connection and report nothing more about it.
    Close(LinkId),
}

/// Event for the users of sockets. An event is not reported again until it has been handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Messages or congestion updates are waiting for this socket.
    Readable(SocketId),
    /// This socket was full and may send again.
    Writable(SocketId),
    /// The congestion map of this peer has changed.
    Congestion(IpAddr),
}

/// Reason why a port cannot be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// Port 1 is reserved for probes.
    #[error("port 1 is reserved for probes; use another one, or 0 for a free one")]
    Reserved,
    /// The port is in use.
    #[error("port {0} is in use")]
    InUse(u16),
    /// The limit on sockets is reached.
    #[error("the node has {0} sockets already, its limit (sockets-max)")]
    TooMany(usize),
}

/// Reason why a message cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The socket is closed.
    #[error("the socket is closed")]
    Closed,
    /// The address cannot belong to a single node.
    #[error("{0} is not the address of one node")]
    Address(IpAddr),
    /// The address family differs from that of the node.
    #[error("{0} is not in the address family of this node")]
    Family(IpAddr),
    /// The message is longer than the send buffer or the longest possible message.
    #[error("the message has {len} bytes; the limit of this socket is {max}")]
    TooLong {
        /// Length of the message in bytes.
        len: usize,
        /// Maximum length.
        max: usize,
    },
    /// The send buffer is full; [`Event::Writable`] is reported when the socket may send again.
    #[error("the send buffer is full")]
    Full,
    /// The destination port is congested; [`Event::Congestion`] is reported when the map changes.
    #[error("the destination port is congested")]
    Congested,
    /// The limit on peers is reached.
    #[error("the node has {0} peers already, its limit (peers-max)")]
    TooManyPeers(usize),
}
