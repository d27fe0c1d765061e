//! Fixed header of all packets between a node and its users.
//!
//! Both sides are on the same host and, as the version ensures, from the same build, so integers
//! are in host byte order.

use std::net::{IpAddr, Ipv6Addr};

/// Length of a packet in bytes.
pub(crate) const PACKET_LEN: usize = 48;
/// Changes whenever the format of packets or of the board changes.
const VERSION: u8 = 7;

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $name:ident = $code:literal,)+) => {
        /// Type of a packet.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum PacketKind { $($(#[doc = $doc])+ $name = $code,)+ }

        impl PacketKind {
            fn of(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$name),)+ _ => None }
            }
        }
    };
}

kinds! {
    /// User: turn this connection into a socket at `address` and `port` (0 for any).
    Bind = 1,
    /// Node: `value` is an errno, or 0 if the socket has `port` and slot `extra` of the board.
    /// `len` is the serial number of the slot. The descriptors of the board and of the socket's
    /// counters are attached.
    Bound = 2,
    /// User: send the `len` bytes that follow to `address` and `port`. With `extra` 1, `value` is
    /// the cookie for [`Completed`](Self::Completed). Has a ring position.
    Send = 3,
    /// User: notify when `port` of `address` is no longer congested.
    Watch = 4,
    /// Node: `len` bytes from `port` of `address`. `value` and `extra` are the two halves of the
    /// time in nanoseconds since 1970.
    Data = 5,
    /// Node: groups of ports are no longer congested; `value` and `extra` are the two halves of a
    /// 64-bit mask.
    Update = 6,
    /// Node: the message with the cookie `value` is complete.
    Completed = 7,
    /// User, on a socket: its send buffer is full. The node leaves the packet unread until there is
    /// room, so the connection is not writable until then. Has a ring position.
    Full = 8,
    /// User, on a control connection: messages of the slot `extra` with the serial number `len`
    /// were taken, up to the mark on the board. Has no answer.
    Taken = 9,
    /// User, on a socket: messages are in its ring.
    Wake = 10,
    /// Node: messages are in the ring for users. This packet is a token with the number `value`;
    /// users take it when they have taken the last message. User, on a control connection: the slot
    /// `extra` with the serial number `len` needs another one, because a user took one while
    /// messages waited. Has no answer.
    Token = 11,
    /// User: return the board; this connection is not a socket. The answer is
    /// [`Bound`](Self::Bound), without counters.
    Attach = 16,
    /// User: set the slot's send buffer (`port` 0) or receive buffer (1) to `value`.
    SetBuffer = 17,
    /// User: set the default destination to `address` and `port`, or clear it if there is none.
    Connect = 18,
    /// User: turn on (`value` 1) or off reports of ports that are no longer congested.
    Monitor = 19,
    /// User: cancel what was sent to `address` and `port`.
    Cancel = 20,
    /// User: return the info option `value`.
    Info = 21,
    /// User: reserve an entry for the peer `address`, if one is free.
    Reach = 23,
    /// User, on a socket: the attached connection may change this socket. If `value` and `extra`
    /// hold the number of a control connection, that connection may do so instead, and the attached
    /// one only receives the answer: [`Bound`](Self::Bound) with the socket's slot, and in
    /// `address` the number of the control connection.
    Control = 24,
    /// Node: success, or the errno in `value`. For information: `len` bytes in a memfd, with
    /// elements of `extra` bytes.
    Done = 22,
}

/// A packet. The meaning of a field depends on the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) kind: PacketKind,
    pub(crate) port: u16,
    pub(crate) len: u32,
    pub(crate) address: IpAddr,
    pub(crate) value: u32,
    pub(crate) extra: u32,
    pub(crate) times: PacketTimes,
}

/// Times of a message in the node, for [`PacketKind::Data`]. Packets from users carry a ring
/// position in place of `header`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacketTimes {
    /// Time that the header took to arrive, in nanoseconds.
    pub(crate) header: u32,
    /// Time that the payload took to arrive, in nanoseconds.
    pub(crate) payload: u32,
    /// Time at which the message was queued for its reader, in nanoseconds of the monotonic clock.
    pub(crate) queued: u64,
}

impl PacketTimes {
    pub(crate) const NONE: Self = Self { header: 0, payload: 0, queued: 0 };
}

impl Packet {
    /// Creates a packet with no contents except the kind.
    pub(crate) fn new(kind: PacketKind) -> Self {
        let address = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        Self { kind, port: 0, len: 0, address, value: 0, extra: 0, times: PacketTimes::NONE }
    }

    pub(crate) fn encode(&self) -> [u8; PACKET_LEN] {
        let mut out = [0; PACKET_LEN];
        (out[0], out[1]) = (self.kind as u8, VERSION);
        out[2..4].copy_from_slice(&self.port.to_ne_bytes());
        out[4..8].copy_from_slice(&self.len.to_ne_bytes());
        out[8..24].copy_from_slice(&mapped(self.address).octets());
        out[24..28].copy_from_slice(&self.value.to_ne_bytes());
        out[28..32].copy_from_slice(&self.extra.to_ne_bytes());
        out[32..36].copy_from_slice(&self.times.header.to_ne_bytes());
        out[36..40].copy_from_slice(&self.times.payload.to_ne_bytes());
        out[40..].copy_from_slice(&self.times.queued.to_ne_bytes());
        out
    }

    /// Decodes a packet. Returns `None` if the bytes are not a packet of this version.
    pub(crate) fn decode(bytes: &[u8; PACKET_LEN]) -> Option<Self> {
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let mut address = [0; 16];
        address.copy_from_slice(&bytes[8..24]);
        let kind = PacketKind::of(bytes[0]).filter(|_| bytes[1] == VERSION)?;
        let port = u16::from_ne_bytes([bytes[2], bytes[3]]);
        let address = unmapped(address.into());
        let mut queued = [0; 8];
        queued.copy_from_slice(&bytes[40..]);
        let queued = u64::from_ne_bytes(queued);
        let times = PacketTimes { header: word(32), payload: word(36), queued };
        let (value, extra) = (word(24), word(28));
        Some(Self { kind, port, len: word(4), address, value, extra, times })
    }

    /// Returns the number whose halves are `value` and `extra`: the groups of ports of a
    /// [`PacketKind::Update`], the time of a [`PacketKind::Data`].
    pub(crate) fn wide(&self) -> u64 {
        u64::from(self.extra) << 32 | u64::from(self.value)
    }

    /// Creates a packet with a number in `value` and `extra`.
    #[allow(clippy::cast_possible_truncation, reason = "two halves")]
    pub(crate) fn with_wide(kind: PacketKind, number: u64) -> Self {
        let (value, extra) = (number as u32, (number >> 32) as u32);
        Self { value, extra, ..Self::new(kind) }
    }

    /// Sets the cookie of a [`PacketKind::Send`].
    pub(crate) fn with_cookie(self, cookie: Option<u32>) -> Self {
        Self { value: cookie.unwrap_or(0), extra: cookie.is_some().into(), ..self }
    }

    /// Returns the cookie of a [`PacketKind::Send`].
    pub(crate) fn cookie(&self) -> Option<u32> {
        (self.extra == 1).then_some(self.value)
    }

    /// Sets the position in the ring of the messages that precede this packet.
    pub(crate) fn with_position(self, position: u32) -> Self {
        Self { times: PacketTimes { header: position, ..PacketTimes::NONE }, ..self }
    }

    /// Returns the position in the ring of the messages that precede this packet.
    pub(crate) fn position(&self) -> Option<u32> {
        let has_position = matches!(self.kind, PacketKind::Send | PacketKind::Full);
        has_position.then_some(self.times.header)
    }

    /// Creates a [`PacketKind::Update`] for these groups of ports.
    pub(crate) fn update(groups: u64) -> Self {
        Self::with_wide(PacketKind::Update, groups)
    }
}

/// Returns an address as 16 bytes.
pub(crate) fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

/// Inverse of [`mapped`].
pub(crate) fn unmapped(address: Ipv6Addr) -> IpAddr {
    address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_packets_pass_and_others_are_refused() {
        for address in ["10.0.0.1", "fd00::1", "::"] {
            let address = address.parse().unwrap();
            let value = 0xdead_beef;
            let kind = PacketKind::Send;
            let times = PacketTimes { header: 1, payload: 2, queued: 1 << 40 };
            let packet = Packet { kind, port: 4000, len: 70_000, address, value, extra: 3, times };
            assert_eq!(Packet::decode(&packet.encode()), Some(packet));
        }
        let update = Packet::update(1 << 63 | 5);
        assert_eq!(Packet::decode(&update.encode()).map(|update| update.wide()), Some(1 << 63 | 5));
        let mut bytes = update.encode();
        bytes[1] += 1;
        assert_eq!(Packet::decode(&bytes), None, "another version");
        assert_eq!(Packet::decode(&[0; PACKET_LEN]), None);
    }
}
