//! Results of getsockopt(SOL_RDS) about a node (options 10000 to 10017), byte for byte as the
//! kernel returns them: packed structures, integers in host byte order, addresses and ports in
//! network byte order.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::proto::{ConnectionState, MessageInfo, Node, QueueKind, TcpInfo};

const NAME_LEN: usize = 32;
/// Transport name in the connection structure.
const TRANSPORT: [u8; 16] = *b"tcp\0\0\0\0\0\0\0\0\0\0\0\0\0";

const SENDING: u8 = 1;
const CONNECTING: u8 = 2;
const CONNECTED: u8 = 4;

/// Requested information. Connections, sockets and messages come with IPv4 or IPv6 addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InfoOption {
    /// Counters.
    Counters,
    /// Connections.
    Connections {
        /// Selects IPv6 addresses.
        v6: bool,
    },
    /// Messages in queues.
    Messages {
        /// Queue of the messages.
        queue: QueueKind,
        /// Selects IPv6 addresses.
        v6: bool,
    },
    /// Sockets.
    Sockets {
        /// Selects IPv6 addresses.
        v6: bool,
    },
    /// TCP connections.
    Tcp {
        /// Selects IPv6 addresses.
        v6: bool,
    },
    /// Information about other transports, which a node does not support.
    Nothing,
}

impl InfoOption {
    /// Returns the option's number.
    pub fn number(self) -> u32 {
        // The kernel numbers the IPv6 options without the gap that the IPv4 options have.
        let six = |v4, v6, is_v6| if is_v6 { v6 } else { v4 };
        match self {
            Self::Counters => 10000,
            Self::Connections { v6 } => six(10001, 10011, v6),
            Self::Messages { queue: QueueKind::Send, v6 } => six(10003, 10012, v6),
            Self::Messages { queue: QueueKind::Retransmit, v6 } => six(10004, 10013, v6),
            Self::Messages { queue: QueueKind::Receive, v6 } => six(10005, 10014, v6),
            Self::Sockets { v6 } => six(10006, 10015, v6),
            Self::Tcp { v6 } => six(10007, 10016, v6),
            Self::Nothing => 10008,
        }
    }

    /// Returns the option with this number, or `None` if it is not an info option.
    pub fn of(number: u32) -> Option<Self> {
        let v6 = number >= 10011;
        Some(match number {
            10000 => Self::Counters,
            10001 | 10011 => Self::Connections { v6 },
            10003 | 10012 => Self::Messages { queue: QueueKind::Send, v6 },
            10004 | 10013 => Self::Messages { queue: QueueKind::Retransmit, v6 },
            10005 | 10014 => Self::Messages { queue: QueueKind::Receive, v6 },
            10006 | 10015 => Self::Sockets { v6 },
            10007 | 10016 => Self::Tcp { v6 },
            10008 | 10017 => Self::Nothing,
            _ => return None,
        })
    }

    /// Returns the size of an element in bytes.
    fn element_len(self) -> usize {
        match self {
            Self::Counters => NAME_LEN + 8,
            // The IPv6 connection structure has no type-of-service field.
            Self::Connections { v6 } => 16 + 2 * address_len(v6) + 16 + 1 + usize::from(!v6),
            Self::Messages { v6, .. } => 12 + 2 * address_len(v6) + 4 + 2,
            Self::Sockets { v6 } => 8 + 2 * address_len(v6) + 4 + 8,
            Self::Tcp { v6 } => 2 * (address_len(v6) + 2) + 2 * 8 + 3 * 4 + usize::from(!v6),
            Self::Nothing => 0,
        }
    }
}

const fn address_len(v6: bool) -> usize {
    if v6 { 16 } else { 4 }
}

fn put(out: &mut Vec<u8>, address: IpAddr, v6: bool) {
    match address {
        IpAddr::V4(v4) if !v6 => out.extend(v4.octets()),
        IpAddr::V4(v4) => out.extend(v4.to_ipv6_mapped().octets()),
        IpAddr::V6(address) if v6 => out.extend(address.octets()),
        IpAddr::V6(_) => out.extend([0; 4]),
    }
}

/// Encodes an option for a node. Returns the elements and the size of each. `inode` returns the
/// inode of a socket.
pub(crate) fn encode(
    node: &Node,
    option: InfoOption,
    inode: impl Fn(u16) -> u64,
) -> (Vec<u8>, usize) {
    let mut out = Vec::new();
    let own = node.config().address;
    let fits = |v6: bool| v6 == own.is_ipv6();
    let word = |size: usize| u32::try_from(size).unwrap_or(u32::MAX).to_ne_bytes();
    match option {
        InfoOption::Counters => {
            for (name, value) in node.stats().all() {
                let mut room = [0; NAME_LEN];
                let len = name.len().min(NAME_LEN - 1);
                room[..len].copy_from_slice(&name.as_bytes()[..len]);
                out.extend(room);
                out.extend(value.to_ne_bytes());
            }
        }
        InfoOption::Connections { v6 } if fits(v6) => {
            for info in node.peers().connections() {
                out.extend(info.next_tx.to_ne_bytes());
                out.extend(info.next_rx.to_ne_bytes());
                put(&mut out, own, v6);
                put(&mut out, info.peer, v6);
                out.extend(TRANSPORT);
                let flag = |is: bool, flag| if is { flag } else { 0 };
                out.push(
                    flag(info.is_sending, SENDING)
                        | flag(info.state == ConnectionState::Connecting, CONNECTING)
                        | flag(info.state == ConnectionState::Up, CONNECTED),
                );
                if !v6 {
                    out.push(0);
                }
            }
        }
        InfoOption::Messages { queue, v6 } if fits(v6) => {
            for info in node.messages().filter(|info| info.queue == queue) {
                put_message(&mut out, own, &info, v6);
            }
        }
        InfoOption::Sockets { v6 } if fits(v6) => {
            for info in node.ports().sockets() {
                out.extend(word(info.sndbuf));
                put(&mut out, own, v6);
                put(&mut out, Ipv6Addr::UNSPECIFIED.into(), v6);
                out.extend(info.port.to_be_bytes());
                out.extend([0; 2]);
                out.extend(word(info.rcvbuf));
                out.extend(inode(info.port).to_ne_bytes());
            }
        }
        InfoOption::Tcp { v6 } if fits(v6) => {
            for info in node.peers().tcp_sockets() {
                put_tcp(&mut out, own, &info, v6);
            }
        }
        _ => {}
    }
    (out, option.element_len())
}

fn put_message(out: &mut Vec<u8>, own: IpAddr, info: &MessageInfo, v6: bool) {
    out.extend(info.sequence.to_ne_bytes());
    out.extend(u32::try_from(info.len).unwrap_or(u32::MAX).to_ne_bytes());
    put(out, own, v6);
    put(out, info.peer, v6);
    out.extend(info.local_port.to_be_bytes());
    out.extend(info.peer_port.to_be_bytes());
    out.extend([0; 2]);
}

fn put_tcp(out: &mut Vec<u8>, own: IpAddr, info: &TcpInfo, v6: bool) {
    put(out, own, v6);
    out.extend(info.own_port.to_be_bytes());
    put(out, info.peer, v6);
    out.extend(info.peer_port.to_be_bytes());
    out.extend((info.header_left as u64).to_ne_bytes());
    out.extend((info.payload_left as u64).to_ne_bytes());
    for position in [info.written, info.complete, info.acked] {
        // Modulo 2^32, like TCP's sequence numbers.
        let [a, b, c, d, ..] = position.to_le_bytes();
        out.extend(u32::from_le_bytes([a, b, c, d]).to_ne_bytes());
    }
    if !v6 {
        out.push(0);
    }
}

/// A counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Name of the counter.
    pub name: String,
    /// Value of the counter.
    pub value: u64,
}

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoConnection {
    /// Sequence number of the next message to the peer.
    pub next_tx: u64,
    /// Sequence number expected next from the peer.
    pub next_rx: u64,
    /// Address of the node.
    pub local: IpAddr,
    /// Address of the peer.
    pub peer: IpAddr,
    /// Name of the transport.
    pub transport: String,
    /// Data is being sent.
    pub is_sending: bool,
    /// A connection attempt is in progress.
    pub is_connecting: bool,
    /// The connection is up.
    pub is_connected: bool,
}

/// A message in a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoMessage {
    /// Sequence number of the message.
    pub sequence: u64,
    /// Length of the payload in bytes.
    pub len: u32,
    /// The node's address and port.
    pub local: (IpAddr, u16),
    /// The peer's address and port.
    pub peer: (IpAddr, u16),
}

/// A socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoSocket {
    /// Address and port that the socket is bound to.
    pub bound: (IpAddr, u16),
    /// Default destination; port 0 for none.
    pub connected: (IpAddr, u16),
    /// Send buffer size in bytes.
    pub sndbuf: u32,
    /// Receive buffer size in bytes.
    pub rcvbuf: u32,
    /// Inode of the socket.
    pub inode: u64,
}

/// A TCP connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoTcp {
    /// The node's address and TCP port.
    pub local: (IpAddr, u16),
    /// The peer's address and TCP port.
    pub peer: (IpAddr, u16),
    /// Bytes still missing from the header that is being received.
    pub header_left: u64,
    /// Bytes still missing from the payload that is being received.
    pub payload_left: u64,
    /// Bytes written, modulo 2^32.
    pub written: u32,
    /// Bytes up to the end of the last whole message, modulo 2^32.
    pub complete: u32,
    /// Bytes acknowledged, modulo 2^32.
    pub acked: u32,
}

/// Reads fields one after another.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().unwrap_or((&[0; N], &[]));
        self.0 = rest;
        *field
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    fn port(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }

    fn address(&mut self, v6: bool) -> IpAddr {
        match v6 {
            true => Ipv6Addr::from(self.take::<16>()).into(),
            false => Ipv4Addr::from(self.take::<4>()).into(),
        }
    }

    fn text<const N: usize>(&mut self) -> String {
        let bytes = self.take::<N>();
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(N);
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }
}

/// Splits the result of an option into elements of `size` bytes.
fn elements(bytes: &[u8], size: usize) -> impl Iterator<Item = Fields<'_>> {
    bytes.chunks_exact(size.max(1)).map(Fields)
}

/// Decodes counters.
pub fn counters_of(bytes: &[u8], size: usize) -> Vec<Counter> {
    let read = |mut fields: Fields<'_>| Counter { name: fields.text::<32>(), value: fields.u64() };
    elements(bytes, size).map(read).collect()
}

/// Decodes connections.
pub fn connections_of(bytes: &[u8], size: usize, v6: bool) -> Vec<InfoConnection> {
    let read = |mut fields: Fields<'_>| {
        let (next_tx, next_rx) = (fields.u64(), fields.u64());
        let (local, peer) = (fields.address(v6), fields.address(v6));
        let transport = fields.text::<16>();
        let [flags] = fields.take();
        InfoConnection {
            next_tx,
            next_rx,
            local,
            peer,
            transport,
            is_sending: flags & SENDING != 0,
            is_connecting: flags & CONNECTING != 0,
            is_connected: flags & CONNECTED != 0,
        }
    };
    elements(bytes, size).map(read).collect()
}

/// Decodes messages.
pub fn messages_of(bytes: &[u8], size: usize, v6: bool) -> Vec<InfoMessage> {
    let read = |mut fields: Fields<'_>| {
        let (sequence, len) = (fields.u64(), fields.u32());
        let (local, peer) = (fields.address(v6), fields.address(v6));
        let (local, peer) = ((local, fields.port()), (peer, fields.port()));
        InfoMessage { sequence, len, local, peer }
    };
    elements(bytes, size).map(read).collect()
}

/// Decodes sockets.
pub fn sockets_of(bytes: &[u8], size: usize, v6: bool) -> Vec<InfoSocket> {
    let read = |mut fields: Fields<'_>| {
        let sndbuf = fields.u32();
        let (bound, connected) = (fields.address(v6), fields.address(v6));
        let (bound_port, connected_port) = (fields.port(), fields.port());
        let (rcvbuf, inode) = (fields.u32(), fields.u64());
        let (bound, connected) = ((bound, bound_port), (connected, connected_port));
        InfoSocket { bound, connected, sndbuf, rcvbuf, inode }
    };
    elements(bytes, size).map(read).collect()
}

/// Decodes TCP connections.
pub fn tcp_of(bytes: &[u8], size: usize, v6: bool) -> Vec<InfoTcp> {
    let read = |mut fields: Fields<'_>| InfoTcp {
        local: (fields.address(v6), fields.port()),
        peer: (fields.address(v6), fields.port()),
        header_left: fields.u64(),
        payload_left: fields.u64(),
        written: fields.u32(),
        complete: fields.u32(),
        acked: fields.u32(),
    };
    elements(bytes, size).map(read).collect()
}

#[cfg(test)]
mod tests {
    use rtrs_base::time::Instant;

    use super::*;
    use crate::proto::{Config, Outgoing};

    fn node(own: IpAddr, peer: IpAddr) -> Node {
        let mut node = Node::new(Config::new(own, 1, 1));
        let id = node.bind(4000).unwrap();
        node.send(Instant::ZERO, id, Outgoing::new(peer, 4001, b"hello".to_vec())).unwrap();
        node.send(Instant::ZERO, id, Outgoing::new(own, 4000, b"me".to_vec())).unwrap();
        node
    }

    fn check(own: IpAddr, peer: IpAddr, v6: bool) {
        let node = node(own, peer);
        let get = |option| encode(&node, option, |_| 77);
        let (bytes, size) = get(InfoOption::Counters);
        let counters = counters_of(&bytes, size);
        assert!(counters.iter().any(|c| c.name == "send_queued" && c.value == 2), "{counters:?}");
        let (bytes, size) = get(InfoOption::Connections { v6 });
        let found = connections_of(&bytes, size, v6);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].local, found[0].peer, found[0].next_tx), (own, peer, 1));
        assert!(found[0].is_connecting && !found[0].is_connected && found[0].transport == "tcp");
        let (bytes, size) = get(InfoOption::Messages { queue: QueueKind::Send, v6 });
        let found = messages_of(&bytes, size, v6);
        let (local, peer) = ((own, 4000), (peer, 4001));
        assert_eq!(found, [InfoMessage { sequence: 0, len: 5, local, peer }]);
        let (bytes, size) = get(InfoOption::Messages { queue: QueueKind::Receive, v6 });
        assert_eq!(messages_of(&bytes, size, v6).len(), 1);
        let (bytes, size) = get(InfoOption::Sockets { v6 });
        let found = sockets_of(&bytes, size, v6);
        assert_eq!((found.len(), found[0].bound, found[0].inode), (1, (own, 4000), 77));
        assert_eq!(get(InfoOption::Sockets { v6: !v6 }).0.len(), 0, "other family");
    }

    #[test]
    fn encoding_round_trips() {
        check([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), false);
        check("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap(), true);
    }

    /// Sizes of the kernel's packed structures.
    #[test]
    fn element_sizes_match_the_kernel() {
        let sizes = [
            (10000, 40),
            (10001, 42),
            (10003, 26),
            (10004, 26),
            (10005, 26),
            (10006, 28),
            (10007, 41),
        ];
        let v6 = [(10011, 65), (10012, 50), (10013, 50), (10014, 50), (10015, 52), (10016, 64)];
        for (number, size) in sizes.into_iter().chain(v6) {
            let option = InfoOption::of(number).unwrap();
            assert_eq!((option.number(), option.element_len()), (number, size));
        }
        for number in [0, 9999, 10002, 10009, 10010, 10018, u32::MAX] {
            assert_eq!(InfoOption::of(number), None, "{number}");
        }
        assert_eq!(InfoOption::of(10017), Some(InfoOption::Nothing));
    }
}
