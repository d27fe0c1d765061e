//! RDMAP (RFC 5040, RFC 7306): opcodes, the Read Request, and the Terminate message.
//!
//! This module only encodes and decodes; the stream machine makes the decisions. Terminate is
//! always written in the bit order of the RFC; Linux siw on little-endian hosts swaps the bits,
//! which the decoder recognizes.

use std::fmt;

/// RDMAP message types (RFC 5040 section 4.2, RFC 7306 section 4).
pub(super) mod opcode {
    pub(crate) const WRITE: u8 = 0;
    pub(crate) const READ_REQUEST: u8 = 1;
    pub(crate) const READ_RESPONSE: u8 = 2;
    pub(crate) const SEND: u8 = 3;
    pub(crate) const SEND_INV: u8 = 4;
    // 5 is Send with Solicited Event, which is handled as a Send; it is within the range 3 to 6.
    pub(crate) const SEND_SE_INV: u8 = 6;
    pub(crate) const TERMINATE: u8 = 7;
    pub(crate) const IMMEDIATE: u8 = 8;
    pub(crate) const IMMEDIATE_SE: u8 = 9;
}

/// Payload of a Read Request (RFC 5040 section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadRequest {
    pub(super) sink_stag: u32,
    pub(super) sink_addr: u64,
    pub(super) size: u32,
    pub(super) source_stag: u32,
    pub(super) source_addr: u64,
}

impl ReadRequest {
    pub(super) const LEN: usize = 28;

    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0..4].copy_from_slice(&self.sink_stag.to_be_bytes());
        out[4..12].copy_from_slice(&self.sink_addr.to_be_bytes());
        out[12..16].copy_from_slice(&self.size.to_be_bytes());
        out[16..20].copy_from_slice(&self.source_stag.to_be_bytes());
        out[20..28].copy_from_slice(&self.source_addr.to_be_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> Self {
        let word = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
        Self {
            sink_stag: word(0),
            sink_addr: long(4),
            size: word(12),
            source_stag: word(16),
            source_addr: long(20),
        }
    }
}

/// Error code of a Terminate: layer, error type and code (RFC 5040 section 4.8, RFC 5041 section
/// 6.2, RFC 5044 section 8).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct TermCode {
    pub(super) layer: u8,
    pub(super) etype: u8,
    pub(super) code: u8,
}

/// Declares the codes that are sent or described, one per line: layer, type, code, text.
macro_rules! codes {
    ($($($name:ident)? $layer:literal/$etype:literal/$code:literal $text:literal,)+) => {
        impl TermCode {
            $($(pub(super) const $name: Self =
                Self { layer: $layer, etype: $etype, code: $code };)?)+
            fn text(self) -> &'static str {
                match (self.layer, self.etype, self.code) {
                    $(($layer, $etype, $code) => $text,)+
                    (0 | 1, 0, _) => "local catastrophic error",
                    _ => "unspecified",
                }
            }
        }
    };
}
codes! {
    READ_STAG 0/1/0x00 "read of an invalid STag",
    READ_BOUNDS 0/1/0x01 "read outside its bounds",
    ACCESS 0/1/0x02 "access rights",
    READ_FOREIGN 0/1/0x03 "STag not of this stream",
    READ_WRAP 0/1/0x04 "address wraps",
    CANNOT_INVALIDATE 0/1/0x09 "STag cannot be invalidated",
    RDMAP_VERSION 0/2/0x05 "RDMAP version",
    OPCODE 0/2/0x06 "unexpected opcode",
    0/2/0x07 "catastrophic error",
    0/2/0x08 "catastrophic error",
    0/2/0x09 "STag cannot be invalidated",
    OTHER 0/2/0xff "unspecified",
    TAGGED_STAG 1/1/0x00 "write to an invalid STag",
    TAGGED_BOUNDS 1/1/0x01 "write outside its bounds",
    TAGGED_FOREIGN 1/1/0x02 "write to an STag not of this stream",
    TAGGED_WRAP 1/1/0x03 "address wraps",
    TAGGED_VERSION 1/1/0x04 "DDP version",
    QN 1/2/0x01 "invalid queue number",
    NO_BUFFER 1/2/0x02 "no receive posted",
    MSN 1/2/0x03 "message sequence number",
    MO 1/2/0x04 "message offset",
    TOO_LONG 1/2/0x05 "message too long for the receive",
    UNTAGGED_VERSION 1/2/0x06 "DDP version",
    2/0/0x01 "TCP lost",
    CRC 2/0/0x02 "wrong CRC",
    2/0/0x03 "markers",
    2/0/0x04 "start-up frame",
    2/0/0x05 "local catastrophic error of MPA",
    2/0/0x06 "too few inbound reads",
    2/0/0x07 "no matching RTR",
}

impl fmt::Display for TermCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}/{}/{:02x})", self.text(), self.layer, self.etype, self.code)
    }
}

impl fmt::Debug for TermCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Headers of the offending segment that a Terminate includes (RFC 5040 section 4.8).
#[derive(Clone, Copy, Debug)]
pub(super) struct Blame {
    /// DDP header, then the Read Request.
    bytes: [u8; 18 + ReadRequest::LEN],
    ddp_len: u8,
    read: bool,
    segment_len: u16,
}

impl Blame {
    /// No headers.
    pub(super) const NONE: Self = Self { bytes: [0; 46], ddp_len: 0, read: false, segment_len: 0 };

    /// DDP header (14 or 18 bytes) of a segment of `segment_len` bytes.
    pub(super) fn ddp(header: &[u8], segment_len: u16) -> Self {
        let mut blame = Self { segment_len, ..Self::NONE };
        let len = header.len().min(18);
        blame.bytes[..len].copy_from_slice(&header[..len]);
        blame.ddp_len = len as u8;
        blame
    }

    /// DDP header of a Read Request and the request itself.
    pub(super) fn read(header: &[u8], request: &[u8; ReadRequest::LEN], segment_len: u16) -> Self {
        let mut blame = Self::ddp(header, segment_len);
        let at = usize::from(blame.ddp_len);
        blame.bytes[at..at + ReadRequest::LEN].copy_from_slice(request);
        blame.read = true;
        blame
    }
}

/// Terminate to send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terminate {
    pub(super) code: TermCode,
    pub(super) blame: Blame,
}

impl Terminate {
    pub(super) const LEN_MAX: usize = 4 + 2 + 18 + ReadRequest::LEN;

    /// Returns the payload that follows the DDP header, and its length.
    pub(super) fn encode(&self) -> ([u8; Self::LEN_MAX], usize) {
        let mut out = [0; Self::LEN_MAX];
        out[0] = self.code.layer << 4 | self.code.etype;
        out[1] = self.code.code;
        let ddp = usize::from(self.blame.ddp_len);
        if ddp == 0 {
            return (out, 4);
        }
        out[2] = 0xc0 | if self.blame.read { 0x20 } else { 0 };
        out[4..6].copy_from_slice(&self.blame.segment_len.to_be_bytes());
        let inner = ddp + if self.blame.read { ReadRequest::LEN } else { 0 };
        out[6..6 + inner].copy_from_slice(&self.blame.bytes[..inner]);
        (out, 6 + inner)
    }

    /// Decodes the error code of a received Terminate, and whether its bit order appears to be
    /// siw's swapped one.
    pub(super) fn decode(payload: &[u8]) -> Option<(TermCode, bool)> {
        let &[first, code, bits, ..] = payload else { return None };
        let swapped = bits & 0x07 != 0 && bits & 0xe0 == 0;
        let (high, low) = (first >> 4, first & 0x0f);
        let (layer, etype) = if swapped { (low, high) } else { (high, low) };
        Some((TermCode { layer, etype, code }, swapped))
    }

    /// Describes a Terminate for the log, with both readings if the bit order is ambiguous.
    pub(super) fn describe(payload: &[u8]) -> String {
        match Self::decode(payload) {
            None => "no reason given".into(),
            Some((code, true)) => format!("{code}, in siw's bit order"),
            Some((code, false)) => {
                let other = TermCode { layer: code.etype, etype: code.layer, code: code.code };
                let silent = payload.get(2).is_some_and(|bits| bits & 0xe0 == 0);
                if silent && code.layer != code.etype && other.text() != "unspecified" {
                    format!("{code}; in siw's bit order: {other}")
                } else {
                    code.to_string()
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siw_order_is_recognized() {
        assert_eq!(Terminate::decode(&[0x11, 0, 0x03, 0]), Some((TermCode::TAGGED_STAG, true)));
        assert_eq!(Terminate::decode(&[0x10, 0, 0x07, 0]), Some((TermCode::READ_STAG, true)));
        assert!(Terminate::describe(&[0x20, 0x06, 0, 0]).contains("unexpected opcode"));
        assert!(Terminate::describe(&[0x02, 0x06, 0, 0]).starts_with("unexpected opcode"));
        assert_eq!(Terminate::describe(&[1]), "no reason given");
    }
}
