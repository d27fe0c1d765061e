//! What our client says in CON_REQ of the queue depth and of what it takes: our own addition.
//!
//! A server that is short of memory gives a new session of such a client fewer chunks, and refuses
//! others. The client repeats the depth that its session has when it connects, so that a server
//! that does not know the session (any more) gives it the same. It travels in bytes of CON_REQ that
//! kernels leave zero and do not look at (docs/PROTOCOL.md, "The queue depth").

use super::bytes::{put, u16_at};

/// Opens the extensions in CON_REQ.
const MARK: [u8; 4] = *b"RTRX";
const SMALLER: u8 = 1;
const CHANGED: u8 = 2;
const TIMES: u8 = 4;
const AUTHENTICATES: u8 = 8;
const GATEWAYS: u8 = 16;

/// What a client keeps to beyond the kernel's: 11 bytes at 45 of CON_REQ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientExtensions {
    /// It takes a smaller queue depth than the server is set to.
    pub smaller_depth: bool,
    /// It takes CHANGED on connection 0 ([`Imm::Changed`](super::Imm::Changed)).
    pub changed: bool,
    /// It takes the server's times in answers ([`TimedRkeyRsp`](super::TimedRkeyRsp)).
    pub times: bool,
    /// It can prove who it is ([`Auth`](super::Auth)).
    pub authenticates: bool,
    /// It takes exports that this server does not serve at the moment (standby), and asks for them
    /// with MOVE ([`Move`](super::Move)).
    pub gateways: bool,
    /// The queue depth that its session has; 0 before its first connect.
    pub queue_depth: u16,
}

impl ClientExtensions {
    /// As the room for extensions of CON_REQ holds it.
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
            ];
            out[4] = bits.iter().fold(0, |all, (has, bit)| if *has { all | bit } else { all });
            put(&mut out, 5, self.queue_depth.to_le_bytes());
        }
        out
    }

    /// What a client says. Without our mark it is a client that says nothing; bits and bytes that
    /// we do not know are ignored.
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
            queue_depth: u16_at(ext, 5),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_survive_and_strangers_have_none() {
        let ours = ClientExtensions {
            smaller_depth: true,
            changed: true,
            times: true,
            authenticates: true,
            gateways: true,
            queue_depth: 0x0102,
        };
        let bytes = ours.encode();
        assert_eq!(bytes, *b"RTRX\x1f\x02\x01\0\0\0\0");
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
        for bits in 0..32 {
            let has = |bit| bits & bit != 0;
            let other = ClientExtensions {
                smaller_depth: has(1),
                changed: has(2),
                times: has(4),
                authenticates: has(8),
                gateways: has(16),
                queue_depth: 7,
            };
            assert_eq!(ClientExtensions::decode(&other.encode()), other);
        }
    }
}
