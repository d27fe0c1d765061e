//! FENCE: our own addition, by which a client has a dead path's late requests discarded.
//!
//! A server that knows it says so in bytes of CON_RSP that the kernel's server leaves zero
//! ([`Extensions`]); to others it is never sent. It travels as a user message of a WRITE without
//! data, on a connection of another path of the session, and is answered like a CLOSE. The answer
//! promises: no request of the named path, from connects up to the named one, will begin any more;
//! those that run hold their permits until they have ended (docs/ARCHITECTURE.md, "The fence").

use super::bytes::{expect_type, fixed, put, take, u16_at};
use super::error::WireError;
use crate::ids::PathUuid;

pub(super) const TYPE_FENCE: u16 = 0x8001;
/// Opens the extensions in CON_RSP.
const MARK: [u8; 4] = *b"RTRX";
const FENCE: u8 = 1;

/// What a server can do beyond the kernel's: six bytes at 20 of CON_RSP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    /// It takes FENCE.
    pub fence: bool,
}

impl Extensions {
    /// Everything this implementation's server can do.
    pub const OURS: Self = Self { fence: true };

    /// As the room for extensions of CON_RSP holds it.
    pub fn encode(self) -> [u8; 36] {
        let mut out = [0; 36];
        if self != Self::default() {
            put(&mut out, 0, MARK);
            out[4] = 1;
            out[5] = if self.fence { FENCE } else { 0 };
        }
        out
    }

    /// What a server says. Anything but our mark and version 1 or later is a server without any;
    /// bits we do not know are ignored.
    pub fn decode(ext: &[u8; 36]) -> Self {
        if ext[..4] != MARK || ext[4] == 0 {
            return Self::default();
        }
        Self { fence: ext[5] & FENCE != 0 }
    }
}

/// FENCE: a path of this session is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Which path.
    pub path: PathUuid,
    /// Its last connect that is meant, as CON_REQ counts them; earlier ones are meant too.
    pub recon_cnt: u16,
}

impl Fence {
    /// Bytes of the message.
    pub const LEN: usize = 28;
    const NAME: &str = "FENCE";

    /// The message as it travels.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, TYPE_FENCE.to_le_bytes());
        put(&mut out, 4, self.path.0);
        put(&mut out, 20, self.recon_cnt.to_le_bytes());
        out
    }

    /// Reads the message.
    ///
    /// # Errors
    /// Short message, wrong type.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; Self::LEN] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, bytes, (TYPE_FENCE, "0x8001 (FENCE)"))?;
        Ok(Self { path: PathUuid(take(bytes, 4)), recon_cnt: u16_at(bytes, 20) })
    }

    /// True when a connect with this count is meant. Counts wrap: the nearer half is earlier.
    pub const fn covers(&self, recon_cnt: u16) -> bool {
        self.recon_cnt.wrapping_sub(recon_cnt) < 0x8000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_survive_and_strangers_have_none() {
        let ours = Extensions::OURS.encode();
        assert_eq!(ours[..8], [b'R', b'T', b'R', b'X', 1, 1, 0, 0]);
        assert_eq!(Extensions::decode(&ours), Extensions::OURS);
        assert_eq!(Extensions::default().encode(), [0; 36], "as the kernel's server");
        for (at, byte) in [(0, 0), (4, 0), (5, 0xfe)] {
            let mut other = ours;
            other[at] = byte;
            assert_eq!(Extensions::decode(&other), Extensions::default(), "byte {at}");
        }
        let mut newer = ours;
        (newer[4], newer[5]) = (2, 0xff);
        assert!(Extensions::decode(&newer).fence);
    }

    #[test]
    fn a_fence_survives_and_covers_what_came_before() {
        let fence = Fence { path: PathUuid([7; 16]), recon_cnt: 3 };
        assert_eq!(Fence::decode(&fence.encode()), Ok(fence));
        assert!(Fence::decode(&fence.encode()[..27]).is_err());
        assert!(Fence::decode(&[5; 28]).is_err());
        assert!(fence.covers(3) && fence.covers(2) && fence.covers(0xfff0));
        assert!(!fence.covers(4));
    }
}
