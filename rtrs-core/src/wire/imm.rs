//! The 32-bit immediate: four type bits and 28 payload bits.
//!
//! A request's payload contains the permit and the offset; the queue depth determines how many bits
//! each has ([`MemBits`]). Values here are host integers; a provider sends them big-endian.
//! Decoding never fails: an unknown immediate is [`Imm::Unknown`], which both ends log and ignore,
//! as the kernel does.

use super::errno;
use crate::ids::PermitId;
use crate::limits::{IMM_PAYLOAD_BITS, MemBits};

const TYPE_IO_REQ: u32 = 0;
const TYPE_IO_RSP: u32 = 1;
const TYPE_IO_RSP_W_INV: u32 = 2;
const TYPE_HB_MSG: u32 = 8;
const TYPE_HB_ACK: u32 = 9;
const TYPE_CHANGED: u32 = 10;

const PAYLOAD_MASK: u32 = (1 << IMM_PAYLOAD_BITS) - 1;
const RSP_ID_BITS: u32 = 19;
const RSP_ID_MASK: u32 = (1 << RSP_ID_BITS) - 1;
const RSP_ERRNO_MASK: u32 = 0x1ff;

/// Decoded immediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Imm {
    /// IO_REQ, client to server: this chunk contains a request.
    Request {
        /// Permit of the client, which selects the chunk.
        permit: PermitId,
        /// Offset of the RTRS message in the chunk.
        offset: u32,
    },
    /// IO_RSP or IO_RSP_W_INV, server to client: the request with this permit has completed.
    Response {
        /// Permit that is returned.
        permit: PermitId,
        /// 0, or a positive errno below 512.
        errno: u16,
        /// A SEND_WITH_INV was sent before this response.
        invalidated: bool,
    },
    /// HB_MSG: requires an immediate answer.
    Heartbeat {
        /// Extension: if the path stays idle, the sender's next HB_MSG follows within this number
        /// of milliseconds, below 2^28; 0 announces nothing. Sent only to a server that supports it
        /// ([`Extensions`](super::Extensions)).
        next_ms: u32,
    },
    /// HB_ACK: answer to HB_MSG.
    HeartbeatAck,
    /// CHANGED, server to client, an extension: the size of this device has changed, or its export
    /// has been removed. The client must reopen the export. Sent only to a client that supports it.
    Changed {
        /// ID of the device in the session, below 2^28.
        device: u32,
    },
    /// Any other immediate, unchanged.
    Unknown(u32),
}

impl Imm {
    /// Encodes any immediate except a request.
    ///
    /// # Panics
    /// Panics for a request, which needs [`Imm::encode_with`].
    pub fn encode(self) -> u32 {
        match self {
            Self::Request { .. } => panic!("a request's immediate needs the session's MemBits"),
            other => other.encode_with(MemBits::for_depth(1)),
        }
    }

    /// Encodes the immediate. An errno of more than nine bits is mapped, not truncated
    /// ([`errno::fit`]).
    ///
    /// # Panics
    /// Panics if a request's permit or offset, or a device's ID, does not fit, because the
    /// truncated value would refer to a different one.
    pub fn encode_with(self, bits: MemBits) -> u32 {
        let (kind, payload) = match self {
            Self::Request { permit, offset } => {
                assert!(bits.fits(permit, offset), "permit {permit}, offset {offset}: {bits:?}");
                // With one permit and 28 offset bits the shift yields zero, which is the permit.
                (TYPE_IO_REQ, (u32::from(permit.0) << bits.get()) | offset)
            }
            Self::Response { permit, errno, invalidated } => {
                let kind = if invalidated { TYPE_IO_RSP_W_INV } else { TYPE_IO_RSP };
                let errno = u32::from(errno::fit(i32::from(errno)));
                (kind, (errno << RSP_ID_BITS) | u32::from(permit.0))
            }
            Self::Heartbeat { next_ms } => (TYPE_HB_MSG, next_ms.min(PAYLOAD_MASK)),
            Self::HeartbeatAck => (TYPE_HB_ACK, 0),
            Self::Changed { device } => {
                assert!(device <= PAYLOAD_MASK, "device {device}");
                (TYPE_CHANGED, device)
            }
            Self::Unknown(whole) => return whole,
        };
        (kind << IMM_PAYLOAD_BITS) | payload
    }

    /// Decodes an immediate at a client. Requests, which clients never receive, decode as unknown.
    pub fn decode(imm: u32) -> Self {
        let payload = imm & PAYLOAD_MASK;
        match imm >> IMM_PAYLOAD_BITS {
            kind @ (TYPE_IO_RSP | TYPE_IO_RSP_W_INV) => {
                // The ID has 19 bits on the wire, but queue depths have 16: higher IDs are invalid.
                let Ok(permit) = u16::try_from(payload & RSP_ID_MASK) else {
                    return Self::Unknown(imm);
                };
                #[allow(clippy::cast_possible_truncation, reason = "nine bits")]
                let errno = ((payload >> RSP_ID_BITS) & RSP_ERRNO_MASK) as u16;
                let invalidated = kind == TYPE_IO_RSP_W_INV;
                Self::Response { permit: PermitId(permit), errno, invalidated }
            }
            TYPE_HB_MSG => Self::Heartbeat { next_ms: payload },
            TYPE_HB_ACK => Self::HeartbeatAck,
            TYPE_CHANGED => Self::Changed { device: payload },
            _ => Self::Unknown(imm),
        }
    }

    /// Decodes an immediate at a server. The caller must check the permit and the offset against
    /// the queue depth and the chunk size, and close the path if they are exceeded.
    pub fn decode_with(imm: u32, bits: MemBits) -> Self {
        if imm >> IMM_PAYLOAD_BITS != TYPE_IO_REQ {
            return Self::decode(imm);
        }
        // There are at least 12 offset bits, so at most 16 are left for the permit.
        #[allow(clippy::cast_possible_truncation, reason = "at most 16 bits")]
        let permit = PermitId((imm >> bits.get()) as u16);
        Self::Request { permit, offset: imm & ((1 << bits.get()) - 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_of_the_protocol_document() {
        let bits = MemBits::for_depth(512);
        let req = Imm::Request { permit: PermitId(5), offset: 4128 };
        let rsp = |permit, errno, invalidated| Imm::Response {
            permit: PermitId(permit),
            errno,
            invalidated,
        };
        let cases = [
            (req, 0x0028_1020),
            (rsp(7, 0, false), 0x1000_0007),
            (rsp(7, 0, true), 0x2000_0007),
            (rsp(7, errno::EIO, false), 0x1028_0007),
            (rsp(300, errno::EOPNOTSUPP, true), 0x22f8_012c),
            (Imm::Heartbeat { next_ms: 0 }, 0x8000_0000),
            (Imm::Heartbeat { next_ms: 30_000 }, 0x8000_7530),
            (Imm::HeartbeatAck, 0x9000_0000),
            (Imm::Changed { device: 7 }, 0xa000_0007),
            (Imm::Changed { device: PAYLOAD_MASK }, 0xafff_ffff),
            (Imm::Unknown(0x3000_0001), 0x3000_0001),
        ];
        for (imm, value) in cases {
            assert_eq!(imm.encode_with(bits), value, "{imm:?}");
            assert_eq!(Imm::decode_with(value, bits), imm);
        }
    }

    #[test]
    fn one_chunk_leaves_all_bits_to_the_offset() {
        let bits = MemBits::for_depth(1);
        let imm = Imm::Request { permit: PermitId(0), offset: PAYLOAD_MASK };
        assert_eq!(imm.encode_with(bits), PAYLOAD_MASK);
        assert_eq!(Imm::decode_with(PAYLOAD_MASK, bits), imm);
        assert!(!bits.fits(PermitId(1), 0));
    }

    #[test]
    fn oversize_values_are_detected() {
        let bits = MemBits::for_depth(512);
        assert!(bits.fits(PermitId(511), (1 << 19) - 1));
        assert!(!bits.fits(PermitId(511), 1 << 19));
        assert!(!bits.fits(PermitId(512), 0));
        // A depth that is not a power of two leaves some numbers unused, which the depth check
        // rejects.
        assert!(MemBits::for_depth(500).fits(PermitId(511), 0));
    }

    #[test]
    fn unassigned_ids_and_requests_to_a_client_are_unknown() {
        assert_eq!(Imm::decode(0x1001_0000), Imm::Unknown(0x1001_0000));
        assert_eq!(Imm::decode(0x0028_1020), Imm::Unknown(0x0028_1020));
        for kind in [3u32, 4, 5, 6, 7, 11, 15] {
            assert_eq!(Imm::decode(kind << 28), Imm::Unknown(kind << 28));
        }
    }

    #[test]
    fn only_heartbeat_probes_have_a_payload() {
        assert_eq!(Imm::decode(0x8fff_ffff), Imm::Heartbeat { next_ms: 0x0fff_ffff });
        assert_eq!(Imm::decode(0x9000_0001), Imm::HeartbeatAck);
    }
}
