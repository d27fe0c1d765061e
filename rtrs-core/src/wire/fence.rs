//! FENCE: an extension with which a client makes the server discard late requests from a dead path.
//!
//! A server that supports FENCE announces this in bytes of CON_RSP that the kernel's server leaves
//! zero ([`Extensions`]); FENCE is never sent to other servers. FENCE is the user message of a
//! WRITE without data, on a connection of a different path of the session, and is answered like a
//! CLOSE. The answer guarantees that no further request of the named path, from any connect up to
//! the named one, will begin; running requests hold their permits until they have ended
//! (docs/explanation/fence.md).

use super::bytes::{put, take, u32_at};
use super::error::WireError;
use crate::identity::ServerProcess;
use crate::ids::PathUuid;

/// Mark at the start of the extensions in CON_RSP.
const MARK: [u8; 4] = *b"RTRX";
const LENGTHS: u32 = 1;
const FENCE: u32 = 2;
const CACHE_ID: u32 = 4;
const IDENTITY: u32 = 8;
const CHANGED: u32 = 16;
const TIMES: u32 = 32;
const DISCOVER: u32 = 64;
const AUTHENTICATE: u32 = 128;
const GATEWAYS: u32 = 256;
const IDLE: u32 = 512;
const PROCESS: u32 = 1024;

/// Guarantees and features of a server beyond the kernel's: 36 bytes at offset 20 of CON_RSP, where
/// kernels send zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    /// The server's discards and write zeroes clear the whole requested length. Kernel servers in
    /// Linux 6.12 to 6.18 lose that length, do nothing and report success, and nothing in their
    /// messages distinguishes them from others.
    pub lengths: bool,
    /// The server supports FENCE.
    pub fence: bool,
    /// OPEN_RSP shows when unflushed writes are lost.
    pub cache_id: bool,
    /// The server has an identity and a long OPEN_RSP. In an accept, these are the bytes of its
    /// [`ServerId`](crate::identity::ServerId), zeroes for none; in a reject with ESTALE, those of
    /// the session's [`EvictionSecret`](crate::identity::EvictionSecret).
    pub identity: Option<[u8; 16]>,
    /// The server sends CHANGED ([`Imm::Changed`](super::Imm::Changed)) to clients that support it.
    pub changed: bool,
    /// Answers on this path contain the server's times ([`TimedRkeyRsp`](super::TimedRkeyRsp)). Set
    /// only with NEW_RKEY and for clients that support the times.
    pub times: bool,
    /// The server supports DISCOVER.
    pub discover: bool,
    /// In an accept: the server answers nothing else on this path until the client has proved its
    /// identity with AUTH. In a reject: a client that can prove its identity may be admitted.
    pub authenticate: bool,
    /// The server has exports that move between servers, and supports MOVE ([`Move`](super::Move)).
    pub gateways: bool,
    /// The server supports announcements in HB_MSG ([`Imm::Heartbeat`](super::Imm::Heartbeat)): the
    /// longest heartbeat interval that the server accepts on an idle path, in milliseconds.
    pub idle_ms: Option<u32>,
    /// Process of the server. A FENCE names the process to which its path was connected.
    pub process: Option<ServerProcess>,
}

impl Extensions {
    /// All features of this implementation's server that apply to every path, without an ID.
    pub const OURS: Self = Self {
        lengths: true,
        fence: true,
        cache_id: true,
        identity: Some([0; 16]),
        changed: true,
        times: false,
        discover: true,
        authenticate: false,
        gateways: false,
        idle_ms: None,
        process: None,
    };

    /// Encodes the extensions for CON_RSP.
    pub fn encode(self) -> [u8; 36] {
        let mut out = [0; 36];
        if self != Self::default() {
            let bits = [
                (self.lengths, LENGTHS),
                (self.fence, FENCE),
                (self.cache_id, CACHE_ID),
                (self.identity.is_some(), IDENTITY),
                (self.changed, CHANGED),
                (self.times, TIMES),
                (self.discover, DISCOVER),
                (self.authenticate, AUTHENTICATE),
                (self.gateways, GATEWAYS),
                (self.idle_ms.is_some(), IDLE),
                (self.process.is_some(), PROCESS),
            ];
            let bits = bits.iter().fold(0, |all, (has, bit)| if *has { all | bit } else { all });
            put(&mut out, 0, MARK);
            put(&mut out, 4, bits.to_le_bytes());
            put(&mut out, 8, self.identity.unwrap_or_default());
            put(&mut out, 24, self.idle_ms.unwrap_or_default().to_le_bytes());
            put(&mut out, 28, self.process.unwrap_or(ServerProcess::NONE).0);
        }
        out
    }

    /// Decodes the extensions in CON_RSP. Without the mark, the server has no extensions; unknown
    /// bits are ignored.
    pub fn decode(ext: &[u8; 36]) -> Self {
        if ext[..4] != MARK {
            return Self::default();
        }
        let bits = u32_at(ext, 4);
        Self {
            lengths: bits & LENGTHS != 0,
            fence: bits & FENCE != 0,
            cache_id: bits & CACHE_ID != 0,
            identity: (bits & IDENTITY != 0).then(|| take(ext, 8)),
            changed: bits & CHANGED != 0,
            times: bits & TIMES != 0,
            discover: bits & DISCOVER != 0,
            authenticate: bits & AUTHENTICATE != 0,
            gateways: bits & GATEWAYS != 0,
            idle_ms: (bits & IDLE != 0).then(|| u32_at(ext, 24)),
            process: (bits & PROCESS != 0).then(|| ServerProcess(take(ext, 28))),
        }
    }
}

message! {
    /// FENCE: fences off a dead path of this session.
    pub struct Fence[28] = "FENCE", type 0x8001 {
        /// UUID of the path.
        4 path: PathUuid,
        /// Number of the last connect to fence, from CON_REQ; earlier ones are fenced too.
        20 recon_cnt: u16,
        /// Server process to which that connect led; [`ServerProcess::NONE`] if unknown.
        22 process: ServerProcess,
    }
}

impl Fence {
    /// Returns true if the fence covers a connect with this count. Counts wrap around: the nearer
    /// half is earlier.
    pub const fn covers(&self, recon_cnt: u16) -> bool {
        self.recon_cnt.wrapping_sub(recon_cnt) < 0x8000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_round_trip_and_are_empty_for_other_peers() {
        let ours = Extensions::OURS.encode();
        assert_eq!(ours[..8], *b"RTRX\x5f\0\0\0");
        assert_eq!(Extensions::decode(&ours), Extensions::OURS);
        assert_eq!(Extensions::default().encode(), [0; 36], "as the kernel's server");
        for (at, byte) in [(0, 0), (3, 0), (4, 0)] {
            let mut other = ours;
            other[at] = byte;
            assert_eq!(Extensions::decode(&other), Extensions::default(), "byte {at}");
        }
        for bits in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 0x7ff_u16] {
            let mut other = ours;
            other[4..6].copy_from_slice(&bits.to_le_bytes());
            let has = |bit| bits & bit != 0;
            (other[8], other[24], other[25], other[33]) = (7, 0x30, 0x75, 9);
            let mut id = [0; 16];
            id[0] = 7;
            let expected = Extensions {
                lengths: has(1),
                fence: has(2),
                cache_id: has(4),
                identity: has(8).then_some(id),
                changed: has(16),
                times: has(32),
                discover: has(64),
                authenticate: has(128),
                gateways: has(256),
                idle_ms: has(512).then_some(30_000),
                process: has(1024).then_some(ServerProcess([0, 0, 0, 0, 0, 9])),
            };
            assert_eq!(Extensions::decode(&other), expected);
            if bits == 0x7ff {
                assert_eq!(expected.encode(), other);
            }
        }
    }

    #[test]
    fn a_fence_round_trips_and_covers_earlier_connects() {
        let fence = Fence {
            path: PathUuid([7; 16]),
            recon_cnt: 3,
            process: ServerProcess::new(0x0102_0304_0506),
        };
        assert_eq!(Fence::decode(&fence.encode()), Ok(fence));
        assert!(Fence::decode(&fence.encode()[..27]).is_err());
        assert!(Fence::decode(&[5; 28]).is_err());
        assert!(fence.covers(3) && fence.covers(2) && fence.covers(0xfff0));
        assert!(!fence.covers(4));
    }
}
