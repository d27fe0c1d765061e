//! State of a node, for `rds info` and the info options of sockets.

use std::net::IpAddr;

/// State of a bound socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketInfo {
    /// Port of the socket.
    pub port: u16,
    /// Send buffer size in bytes.
    pub sndbuf: usize,
    /// Receive buffer size in bytes.
    pub rcvbuf: usize,
    /// Payload of the messages that have been sent but not acknowledged.
    pub in_flight: usize,
    /// Number of messages that have been sent but not acknowledged.
    pub in_flight_messages: usize,
    /// Payload of the messages that the socket's user has not read.
    pub waiting: usize,
}

/// State of a connection to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectionState {
    /// No connection exists or is needed.
    Down,
    /// An attempt to connect is in progress.
    Connecting,
    /// The connection is established.
    Up,
    /// The connection was lost or could not be established, and the next attempt is pending.
    Error,
}

impl ConnectionState {
    /// All states.
    pub const ALL: [Self; 4] = [Self::Down, Self::Connecting, Self::Up, Self::Error];

    /// Returns the name of the state.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Connecting => "connecting",
            Self::Up => "up",
            Self::Error => "error",
        }
    }
}

/// State of a path to a peer, and of the path's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// Address of the peer.
    pub peer: IpAddr,
    /// Number of the path, starting at 0.
    pub path: usize,
    /// Sequence number of the next message to the peer.
    pub next_tx: u64,
    /// Sequence number expected next from the peer.
    pub next_rx: u64,
    /// State of the connection.
    pub state: ConnectionState,
    /// Whether data is being written to the peer.
    pub is_sending: bool,
    /// Cost of messages waiting to be sent to the peer or acknowledged by it.
    pub queued: usize,
    /// Cost of messages that the peer has sent and users have not read, over all paths; reported
    /// only for path 0.
    pub held: usize,
}

/// State of a TCP connection that carries messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpInfo {
    /// Address of the peer.
    pub peer: IpAddr,
    /// Number of the path to the peer.
    pub path: usize,
    /// TCP port on this node.
    pub own_port: u16,
    /// TCP port on the peer.
    pub peer_port: u16,
    /// Bytes missing from the header that is being received; 0 between messages.
    pub header_left: usize,
    /// Bytes missing from the payload that is being received.
    pub payload_left: usize,
    /// Bytes written to the connection.
    pub written: u64,
    /// Bytes up to the end of the last message that was written completely.
    pub complete: u64,
    /// Bytes that the peer's system has acknowledged.
    pub acked: u64,
}

/// Queue that a message is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// Not yet passed to a connection.
    Send,
    /// Not acknowledged.
    Retransmit,
    /// Not read by its user.
    Receive,
}

/// Message in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageInfo {
    /// Queue of the message.
    pub queue: QueueKind,
    /// Sequence number; 0 if no number is assigned.
    pub sequence: u64,
    /// Length of the payload in bytes.
    pub len: usize,
    /// Address of the peer.
    pub peer: IpAddr,
    /// Port on this node.
    pub local_port: u16,
    /// Port on the peer.
    pub peer_port: u16,
}
