//! DDP segment headers (RFC 5041 section 4) with the RDMAP control byte that follows.
//!
//! An encoded header starts with MPA's length field, so one array is the complete start of a frame.
//! Decoding takes the bytes after the length field, checks only their count, and leaves validation
//! to the stream machine.

/// Length of a tagged header, without MPA's length field.
pub(super) const TAGGED_LEN: usize = 14;
/// Length of an untagged header, without MPA's length field.
pub(super) const UNTAGGED_LEN: usize = 18;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DDP_VERSION: u8 = 1;
const RDMAP_VERSION: u8 = 0x40;

/// Queue numbers of untagged messages (RFC 5040 section 5.4).
pub(super) mod queue {
    pub(crate) const SEND: u32 = 0;
    pub(crate) const READ_REQUEST: u32 = 1;
    pub(crate) const TERMINATE: u32 = 2;
}

/// Decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) last: bool,
    pub(super) ddp_version_good: bool,
    pub(super) rdmap_version_good: bool,
    pub(super) opcode: u8,
    pub(super) place: Place,
}

/// Destination of a segment's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Tagged { stag: u32, addr: u64 },
    Untagged { invalidate: u32, qn: u32, msn: u32, mo: u32 },
}

/// Destination of a tagged segment and the location of its payload in staging.
#[derive(Clone, Copy, Debug)]
pub(super) struct TaggedTarget {
    pub(super) stag: u32,
    pub(super) addr: u64,
    pub(super) payload_at: usize,
    pub(super) payload_len: usize,
}

/// Returns true if the control byte announces a tagged header.
pub(super) fn is_tagged(control: u8) -> bool {
    control & TAGGED != 0
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl Segment {
    /// Decodes a header. Returns None if there are too few bytes for its kind.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let control = *bytes.first()?;
        let place = if is_tagged(control) {
            if bytes.len() < TAGGED_LEN {
                return None;
            }
            let addr = u64::from(word(bytes, 6)) << 32 | u64::from(word(bytes, 10));
            Place::Tagged { stag: word(bytes, 2), addr }
        } else {
            if bytes.len() < UNTAGGED_LEN {
                return None;
            }
            Place::Untagged {
                invalidate: word(bytes, 2),
                qn: word(bytes, 6),
                msn: word(bytes, 10),
                mo: word(bytes, 14),
            }
        };
        Some(Self {
            last: control & LAST != 0,
            ddp_version_good: control & 0x03 == DDP_VERSION,
            rdmap_version_good: bytes[1] & 0xc0 == RDMAP_VERSION,
            opcode: bytes[1] & 0x0f,
            place,
        })
    }

    /// Returns the length of a header of this kind.
    pub(super) fn header_len(&self) -> usize {
        match self.place {
            Place::Tagged { .. } => TAGGED_LEN,
            Place::Untagged { .. } => UNTAGGED_LEN,
        }
    }
}

/// Encodes the length field and header of a tagged segment with `payload_len` bytes of payload.
pub(super) fn tagged(
    opcode: u8,
    last: bool,
    stag: u32,
    addr: u64,
    payload_len: usize,
) -> [u8; 2 + TAGGED_LEN] {
    let mut out = [0; 2 + TAGGED_LEN];
    out[0..2].copy_from_slice(&((TAGGED_LEN + payload_len) as u16).to_be_bytes());
    out[2] = TAGGED | if last { LAST } else { 0 } | DDP_VERSION;
    out[3] = RDMAP_VERSION | opcode;
    out[4..8].copy_from_slice(&stag.to_be_bytes());
    out[8..16].copy_from_slice(&addr.to_be_bytes());
    out
}

/// Fields of an untagged header other than opcode and length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Untagged {
    pub(super) invalidate: u32,
    pub(super) qn: u32,
    pub(super) msn: u32,
    pub(super) mo: u32,
}

/// Encodes the length field and header of an untagged segment with `payload_len` bytes of payload.
pub(super) fn untagged(
    opcode: u8,
    last: bool,
    fields: Untagged,
    payload_len: usize,
) -> [u8; 2 + UNTAGGED_LEN] {
    let mut out = [0; 2 + UNTAGGED_LEN];
    out[0..2].copy_from_slice(&((UNTAGGED_LEN + payload_len) as u16).to_be_bytes());
    out[2] = if last { LAST } else { 0 } | DDP_VERSION;
    out[3] = RDMAP_VERSION | opcode;
    out[4..8].copy_from_slice(&fields.invalidate.to_be_bytes());
    out[8..12].copy_from_slice(&fields.qn.to_be_bytes());
    out[12..16].copy_from_slice(&fields.msn.to_be_bytes());
    out[16..20].copy_from_slice(&fields.mo.to_be_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip() {
        let bytes = tagged(0, true, 0x1234_5600, 0x1000_2000, 4);
        assert_eq!(bytes[..4], [0x00, 0x12, 0xc1, 0x40]);
        let segment = Segment::decode(&bytes[2..]).unwrap();
        assert_eq!(segment.place, Place::Tagged { stag: 0x1234_5600, addr: 0x1000_2000 });
        assert!(segment.last && segment.ddp_version_good && segment.rdmap_version_good);
        let fields = Untagged { invalidate: 7, qn: 1, msn: 2, mo: 3 };
        let bytes = untagged(3, false, fields, 0);
        assert_eq!(bytes[..4], [0x00, 0x12, 0x01, 0x43]);
        let segment = Segment::decode(&bytes[2..]).unwrap();
        assert_eq!(segment.place, Place::Untagged { invalidate: 7, qn: 1, msn: 2, mo: 3 });
        assert!(!segment.last && segment.opcode == 3);
        for short in 0..18 {
            assert!(Segment::decode(&bytes[2..2 + short]).is_none());
        }
    }
}
