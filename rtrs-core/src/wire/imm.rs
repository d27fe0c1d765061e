//! The 32-bit immediate: four bits of type, 28 of payload.
//!
//! A request's payload holds permit and offset; how many bits each gets follows from the queue
//! depth and is a [`MemBits`]. Values here are host integers; a provider puts them on the wire
//! big-endian. Decoding is total: what is no known immediate is [`Imm::Unknown`], which both ends
//! log and pass over, as kernels do.

use super::errno;
use crate::ids::PermitId;
use crate::limits::{IMM_PAYLOAD_BITS, ceil_log2};

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

/// Offset bits of a request's immediate; the permit has the rest of the 28.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemBits(u8);

impl MemBits {
    /// `28 - ceil(log2(queue_depth))`: 12 to 28. A depth of 0 counts as 1.
    #[allow(clippy::cast_possible_truncation, reason = "12 to 28")]
    pub const fn for_depth(queue_depth: u16) -> Self {
        Self((IMM_PAYLOAD_BITS - ceil_log2(queue_depth as u32)) as u8)
    }

    /// The number of offset bits.
    pub const fn get(self) -> u32 {
        self.0 as u32
    }

    /// True when the permit and an offset of that many bytes fit. A [`crate::limits::Limits`]
    /// guarantees it for its permits and offsets inside its chunks.
    pub const fn fits(self, permit: PermitId, offset: u32) -> bool {
        offset >> self.0 == 0 && (permit.0 as u32) >> (IMM_PAYLOAD_BITS - self.0 as u32) == 0
    }
}

/// What an immediate says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Imm {
    /// IO_REQ, client to server: a request lies in this chunk.
    Request {
        /// The chunk, named by the client's permit.
        permit: PermitId,
        /// Where the RTRS message lies, in bytes from the chunk's start.
        offset: u32,
    },
    /// IO_RSP or IO_RSP_W_INV, server to client: the request of this permit ended.
    Response {
        /// The permit that comes home.
        permit: PermitId,
        /// 0, or a positive errno below 512.
        errno: u16,
        /// A SEND_WITH_INV went before.
        invalidated: bool,
    },
    /// HB_MSG: answer at once.
    Heartbeat {
        /// Ours: if the path stays idle, the sender's next one follows within so many milliseconds,
        /// below 2^28. 0: nothing is said. Sent only to a server that takes it
        /// ([`Extensions`](super::Extensions)).
        next_ms: u32,
    },
    /// HB_ACK: the answer.
    HeartbeatAck,
    /// CHANGED, server to client, ours: the size of this device has changed, or its export was
    /// removed. The client is to open the export again. Sent only to a client that takes it.
    Changed {
        /// The device's ID in the session, below 2^28.
        device: u32,
    },
    /// Anything else, whole.
    Unknown(u32),
}

impl Imm {
    /// The immediate of anything but a request.
    ///
    /// # Panics
    /// For a request, which needs [`Imm::encode_with`].
    pub fn encode(self) -> u32 {
        match self {
            Self::Request { .. } => panic!("a request's immediate needs the session's MemBits"),
            other => other.encode_with(MemBits(0)),
        }
    }

    /// The immediate. An errno above nine bits is mapped, not cut ([`errno::fit`]).
    ///
    /// # Panics
    /// When a request's permit or offset do not fit, or a device's ID: it would name another.
    pub fn encode_with(self, bits: MemBits) -> u32 {
        let (kind, payload) = match self {
            Self::Request { permit, offset } => {
                assert!(bits.fits(permit, offset), "permit {permit}, offset {offset}: {bits:?}");
                // One permit and 28 offset bits: the shift leaves zero, which is the permit.
                (TYPE_IO_REQ, (u32::from(permit.0) << bits.0) | offset)
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

    /// Reads an immediate at a client, where requests do not arrive: they are unknown.
    pub fn decode(imm: u32) -> Self {
        let payload = imm & PAYLOAD_MASK;
        match imm >> IMM_PAYLOAD_BITS {
            kind @ (TYPE_IO_RSP | TYPE_IO_RSP_W_INV) => {
                // 19 bits of id on the wire, but a depth has 16: higher ids are nobody's.
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

    /// Reads an immediate at a server. Permit and offset are still to be held against the queue
    /// depth and the chunk size: outside them the path ends.
    pub fn decode_with(imm: u32, bits: MemBits) -> Self {
        if imm >> IMM_PAYLOAD_BITS != TYPE_IO_REQ {
            return Self::decode(imm);
        }
        // At least 12 offset bits, so that at most 16 are left for the permit.
        #[allow(clippy::cast_possible_truncation, reason = "at most 16 bits")]
        let permit = PermitId((imm >> bits.0) as u16);
        Self::Request { permit, offset: imm & ((1 << bits.0) - 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offset_bits_follow_the_depth() {
        for (depth, bits) in [(0, 28), (1, 28), (2, 27), (500, 19), (512, 19), (513, 18)] {
            assert_eq!(MemBits::for_depth(depth).get(), bits, "{depth}");
        }
        assert_eq!(MemBits::for_depth(u16::MAX).get(), 12);
    }

    #[test]
    fn the_documents_examples() {
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
    fn what_does_not_fit_is_seen() {
        let bits = MemBits::for_depth(512);
        assert!(bits.fits(PermitId(511), (1 << 19) - 1));
        assert!(!bits.fits(PermitId(511), 1 << 19));
        assert!(!bits.fits(PermitId(512), 0));
        // A depth that is no power of two has numbers to spare; the depth itself rules them out.
        assert!(MemBits::for_depth(500).fits(PermitId(511), 0));
    }

    #[test]
    fn nobodys_ids_and_requests_to_a_client_are_unknown() {
        assert_eq!(Imm::decode(0x1001_0000), Imm::Unknown(0x1001_0000));
        assert_eq!(Imm::decode(0x0028_1020), Imm::Unknown(0x0028_1020));
        for kind in [3u32, 4, 5, 6, 7, 11, 15] {
            assert_eq!(Imm::decode(kind << 28), Imm::Unknown(kind << 28));
        }
    }

    #[test]
    fn only_heartbeats_that_ask_have_a_payload() {
        assert_eq!(Imm::decode(0x8fff_ffff), Imm::Heartbeat { next_ms: 0x0fff_ffff });
        assert_eq!(Imm::decode(0x9000_0001), Imm::HeartbeatAck);
    }
}
