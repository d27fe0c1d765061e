//! RKEY_RSP: the new key of a chunk, 8 bytes of payload in a SEND_WITH_IMM, or 16 with the server's
//! times (an extension).
//!
//! With NEW_RKEY, every answer, including an error, contains an RKEY_RSP. The key may be any value,
//! even the old one; a receiver only stores it. The client must check that `permit` equals the one
//! in the immediate ([`RkeyRsp::check`]).

use super::error::{Fault, WireError};
use crate::ids::{PermitId, Rkey};

message! {
    /// RKEY_RSP.
    #[derive(Default)]
    pub struct RkeyRsp[8] = "RKEY_RSP", type 4 {
        /// `buf_id`: the chunk, which is the permit of the answered request.
        2 permit: PermitId,
        /// New key of the chunk.
        4 rkey: Rkey,
    }
}

message! {
    /// Long RKEY_RSP, with the time that the request took on the server. An extension, for paths on
    /// which both ends agreed on it ([`Extensions::times`](super::Extensions)).
    #[derive(Default)]
    pub struct TimedRkeyRsp[16] = "RKEY_RSP with times", type 4 {
        /// Permit of the answered request.
        2 permit: PermitId,
        /// New key of the chunk.
        4 rkey: Rkey,
        /// Microseconds that the request spent in the server, excluding its disk.
        8 queue_us: u32,
        /// Microseconds that the request spent on the disk or file.
        12 backend_us: u32,
    }
}

impl TimedRkeyRsp {
    /// Returns the message without the times.
    pub const fn key(&self) -> RkeyRsp {
        RkeyRsp { permit: self.permit, rkey: self.rkey }
    }
}

impl RkeyRsp {
    /// Compares the message's permit with the permit in the immediate that it arrived with.
    ///
    /// # Errors
    /// The permits differ: the path can no longer be trusted.
    pub fn check(&self, permit: PermitId) -> Result<(), WireError> {
        if self.permit == permit {
            return Ok(());
        }
        let (found, bound) = (u64::from(self.permit.0), u64::from(permit.0));
        let against = "the immediate's id";
        let fault = Fault::Mismatch { field: "buf_id", found, against, bound };
        Err(WireError { message: Self::NAME, at: 2, fault })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_permit_must_match_the_immediate() {
        let rsp = RkeyRsp { permit: PermitId(3), rkey: Rkey(0x1234_5678) };
        assert_eq!(RkeyRsp::decode(&rsp.encode()), Ok(rsp));
        assert_eq!(rsp.check(PermitId(3)), Ok(()));
        assert_eq!(rsp.check(PermitId(4)).unwrap_err().at, 2);
    }

    #[test]
    fn the_long_form_starts_with_the_short_one() {
        let key = RkeyRsp { permit: PermitId(3), rkey: Rkey(0x1234_5678) };
        let (permit, rkey) = (key.permit, key.rkey);
        let timed = TimedRkeyRsp { permit, rkey, queue_us: 7, backend_us: u32::MAX };
        let bytes = timed.encode();
        assert_eq!((TimedRkeyRsp::decode(&bytes), timed.key()), (Ok(timed), key));
        assert_eq!(RkeyRsp::decode(&bytes), Ok(key));
        assert_eq!(TimedRkeyRsp::decode(&key.encode()).unwrap_err().at, 8);
    }

    #[test]
    fn zeroed_memory_is_not_a_key() {
        assert_eq!(RkeyRsp::decode(&[0; 8]).unwrap_err().at, 0);
        assert_eq!(RkeyRsp::decode(&[4, 0, 0, 0, 0, 0, 0]).unwrap_err().at, 7);
    }
}
