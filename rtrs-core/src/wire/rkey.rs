//! RKEY_RSP: the fresh key of a chunk, 8 bytes of payload in a SEND_WITH_IMM.
//!
//! With NEW_RKEY every answer carries one, errors too. The key may be any value, also the old
//! one; a receiver only stores it. That `permit` equals the one in the immediate is for the
//! client to check ([`RkeyRsp::check`]).

use super::bytes::{expect_type, fixed, put, u16_at, u32_at};
use super::error::WireError;
use crate::ids::{PermitId, Rkey};

/// RKEY_RSP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RkeyRsp {
    /// `buf_id`: the chunk, that is the permit of the request answered.
    pub permit: PermitId,
    /// Its key from now on.
    pub rkey: Rkey,
}

impl RkeyRsp {
    /// Bytes of the message.
    pub const LEN: usize = 8;
    const NAME: &str = "RKEY_RSP";
    const TYPE: u16 = 4;

    /// The message as it travels.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, Self::TYPE.to_le_bytes());
        put(&mut out, 2, self.permit.0.to_le_bytes());
        put(&mut out, 4, self.rkey.0.to_le_bytes());
        out
    }

    /// Reads the message.
    ///
    /// # Errors
    /// Short message, wrong type.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; Self::LEN] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, bytes, (Self::TYPE, "4 (RKEY_RSP)"))?;
        Ok(Self { permit: PermitId(u16_at(bytes, 2)), rkey: Rkey(u32_at(bytes, 4)) })
    }

    /// Holds the message against the permit in the immediate it came with.
    ///
    /// # Errors
    /// They differ: the path is not to be trusted any more.
    pub fn check(&self, permit: PermitId) -> Result<(), WireError> {
        if self.permit == permit {
            return Ok(());
        }
        let (found, bound) = (u64::from(self.permit.0), u64::from(permit.0));
        Err(WireError::mismatch(Self::NAME, 2, ("buf_id", found), ("the immediate's id", bound)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_permit_must_be_the_immediates() {
        let rsp = RkeyRsp { permit: PermitId(3), rkey: Rkey(0x1234_5678) };
        assert_eq!(RkeyRsp::decode(&rsp.encode()), Ok(rsp));
        assert_eq!(rsp.check(PermitId(3)), Ok(()));
        assert_eq!(rsp.check(PermitId(4)).unwrap_err().at, 2);
    }

    #[test]
    fn zeroed_memory_is_no_key() {
        assert_eq!(RkeyRsp::decode(&[0; 8]).unwrap_err().at, 0);
        assert_eq!(RkeyRsp::decode(&[4, 0, 0, 0, 0, 0, 0]).unwrap_err().at, 7);
    }
}
