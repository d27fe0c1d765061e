//! The fixed head of everything that passes between a node and its users.
//!
//! Both are of one host and, as the version says, of one build: integers have the host's order.

use std::net::{IpAddr, Ipv6Addr};

/// Bytes of a packet.
pub(crate) const PACKET_LEN: usize = 32;
/// Changes with the meaning of packets or of the board.
const VERSION: u8 = 1;

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $name:ident = $code:literal,)+) => {
        /// What a packet is.
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
    /// User: make this connection a socket at `address` and `port` (0 for any).
    Bind = 1,
    /// Node: `value` is an errno or 0; then the socket has `port` and slot `extra` of the board,
    /// whose descriptor comes along. `len` is the serial number of the slot.
    Bound = 2,
    /// User: send the `len` bytes behind it to `address` and `port`.
    Send = 3,
    /// User: say when `port` of `address` is not congested any more.
    Watch = 4,
    /// Node: `len` bytes from `port` of `address`.
    Data = 5,
    /// Node: groups of ports, `value` and `extra` as the two halves of 64 bits, are congested no
    /// more.
    Update = 6,
    /// User: a question follows; this connection is no socket. The name of a socket behind it asks
    /// for its slot as well. The answer is [`Bound`](Self::Bound).
    Attach = 16,
    /// User: the slot's send buffer (`port` 0) or receive buffer (1) is `value`.
    SetBuffer = 17,
    /// User: messages without a destination go to `address` and `port`; none to forget it.
    Connect = 18,
    /// User: report ports that are not congested any more (`value` 1), or do not.
    Monitor = 19,
    /// User: give up what was sent to `address` and `port`.
    Cancel = 20,
    /// User: what the info option `value` says.
    Info = 21,
    /// User: whether there is a place for the peer `address`.
    Reach = 23,
    /// Node: done, or the errno in `value`. Of information: `len` bytes in a memfd, `extra` for
    /// each element.
    Done = 22,
}

/// A packet. What a field means depends on the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) kind: PacketKind,
    pub(crate) port: u16,
    pub(crate) len: u32,
    pub(crate) address: IpAddr,
    pub(crate) value: u32,
    pub(crate) extra: u32,
}

impl Packet {
    /// A packet of which only the kind matters.
    pub(crate) fn new(kind: PacketKind) -> Self {
        let address = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        Self { kind, port: 0, len: 0, address, value: 0, extra: 0 }
    }

    pub(crate) fn encode(&self) -> [u8; PACKET_LEN] {
        let mut out = [0; PACKET_LEN];
        (out[0], out[1]) = (self.kind as u8, VERSION);
        out[2..4].copy_from_slice(&self.port.to_ne_bytes());
        out[4..8].copy_from_slice(&self.len.to_ne_bytes());
        out[8..24].copy_from_slice(&mapped(self.address).octets());
        out[24..28].copy_from_slice(&self.value.to_ne_bytes());
        out[28..].copy_from_slice(&self.extra.to_ne_bytes());
        out
    }

    /// `None` for what is no packet, or of another version.
    pub(crate) fn decode(bytes: &[u8; PACKET_LEN]) -> Option<Self> {
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let mut address = [0; 16];
        address.copy_from_slice(&bytes[8..24]);
        let kind = PacketKind::of(bytes[0]).filter(|_| bytes[1] == VERSION)?;
        let port = u16::from_ne_bytes([bytes[2], bytes[3]]);
        let address = unmapped(address.into());
        Some(Self { kind, port, len: word(4), address, value: word(24), extra: word(28) })
    }

    /// The groups of ports of [`PacketKind::Update`].
    pub(crate) fn groups(&self) -> u64 {
        u64::from(self.extra) << 32 | u64::from(self.value)
    }

    /// [`PacketKind::Update`] of these groups of ports.
    #[allow(clippy::cast_possible_truncation, reason = "two halves")]
    pub(crate) fn update(groups: u64) -> Self {
        let (value, extra) = (groups as u32, (groups >> 32) as u32);
        Self { value, extra, ..Self::new(PacketKind::Update) }
    }
}

/// An address as 16 bytes.
pub(crate) fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

/// The reverse of [`mapped`].
pub(crate) fn unmapped(address: Ipv6Addr) -> IpAddr {
    address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_pass_and_others_do_not() {
        for address in ["10.0.0.1", "fd00::1", "::"] {
            let address = address.parse().unwrap();
            let value = 0xdead_beef;
            let kind = PacketKind::Send;
            let packet = Packet { kind, port: 4000, len: 70_000, address, value, extra: 3 };
            assert_eq!(Packet::decode(&packet.encode()), Some(packet));
        }
        let update = Packet::update(1 << 63 | 5);
        assert_eq!(
            Packet::decode(&update.encode()).map(|update| update.groups()),
            Some(1 << 63 | 5)
        );
        let mut bytes = update.encode();
        bytes[1] += 1;
        assert_eq!(Packet::decode(&bytes), None, "another version");
        assert_eq!(Packet::decode(&[0; PACKET_LEN]), None);
    }
}
