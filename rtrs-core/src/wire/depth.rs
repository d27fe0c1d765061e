//! Extensions that a client announces in CON_REQ: its queue depth and supported features.
//!
//! A server that is short of memory grants fewer chunks to a new session of such a client, and
//! refuses other clients. On reconnect, the client repeats its session's depth, so that a server
//! that does not (or no longer) know the session grants the same depth. The extensions use bytes of
//! CON_REQ that kernels set to zero and do not read (docs/PROTOCOL.md, "The queue depth").

use super::bytes::{put, u16_at};

/// Mark at the start of the extensions in CON_REQ.
const MARK: [u8; 4] = *b"RTRX";
const SMALLER: u8 = 1;
const CHANGED: u8 = 2;
const TIMES: u8 = 4;
const AUTHENTICATES: u8 = 8;
const GATEWAYS: u8 = 16;
const INFO_REFUSALS: u8 = 32;

/// Client features beyond the kernel's: 11 bytes at offset 45 of CON_REQ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientExtensions {
    /// The client accepts a queue depth below the one in the server's settings.
    pub smaller_depth: bool,
    /// The client supports CHANGED on connection 0 ([`Imm::Changed`](super::Imm::Changed)).
    pub changed: bool,
    /// The client supports the server's times in answers ([`TimedRkeyRsp`](super::TimedRkeyRsp)).
    pub times: bool,
    /// The client can prove its identity ([`Auth`](super::Auth)).
    pub authenticates: bool,
    /// The client supports exports that this server does not serve at the moment (standby), and
    /// requests them with MOVE ([`Move`](super::Move)).
    pub gateways: bool,
    /// The client supports refusals in INFO_RSP ([`InfoRsp::refusal`](super::InfoRsp::refusal)).
    pub info_refusals: bool,
    /// Queue depth of the client's session; 0 before its first connection.
    pub queue_depth: u16,
}

impl ClientExtensions {
    /// Encodes the extensions for CON_REQ.
    pub fn encode(self) -> [u8; 11] {
        let mut out = [0; 11];
        if self != Self::default() {
            put(&mut out, 0, MARK);
            let bits = [
                (self.smaller_depth, SMALLER),
                (self.changed, CHANGED),
                (self.times, TIMES),
                (self.authenticates, AUTHENTICATES),
                (self.gateways, GATEWAYS),
                (self.info_refusals, INFO_REFUSALS),
            ];
            out[4] = bits.iter().fold(0, |all, (has, bit)| if *has { all | bit } else { all });
            put(&mut out, 5, self.queue_depth.to_le_bytes());
        }
        out
    }

    /// Decodes the extensions of CON_REQ. Without the mark, the client has no extensions; unknown
    /// bits and bytes are ignored.
    pub fn decode(ext: &[u8; 11]) -> Self {
        if ext[..4] != MARK {
            return Self::default();
        }
        let bits = ext[4];
        Self {
            smaller_depth: bits & SMALLER != 0,
            changed: bits & CHANGED != 0,
            times: bits & TIMES != 0,
            authenticates: bits & AUTHENTICATES != 0,
            gateways: bits & GATEWAYS != 0,
            info_refusals: bits & INFO_REFUSALS != 0,
            queue_depth: u16_at(ext, 5),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_round_trip_and_are_empty_for_other_peers() {
        let ours = ClientExtensions {
            smaller_depth: true,
            changed: true,
            times: true,
            authenticates: true,
            gateways: true,
            info_refusals: true,
            queue_depth: 0x0102,
        };
        let bytes = ours.encode();
        assert_eq!(bytes, *b"RTRX\x3f\x02\x01\0\0\0\0");
        assert_eq!(ClientExtensions::decode(&bytes), ours);
        assert_eq!(ClientExtensions::default().encode(), [0; 11], "as a kernel's client");
        for (at, byte) in [(0, 0), (3, b'Y')] {
            let mut other = bytes;
            other[at] = byte;
            assert_eq!(ClientExtensions::decode(&other), ClientExtensions::default());
        }
        let mut later = bytes;
        (later[4], later[7], later[10]) = (0xff, 9, 9);
        assert_eq!(ClientExtensions::decode(&later), ours);
        for bits in 0..64 {
            let has = |bit| bits & bit != 0;
            let other = ClientExtensions {
                smaller_depth: has(1),
                changed: has(2),
                times: has(4),
                authenticates: has(8),
                gateways: has(16),
                info_refusals: has(32),
                queue_depth: 7,
            };
            assert_eq!(ClientExtensions::decode(&other.encode()), other);
        }
    }
}
