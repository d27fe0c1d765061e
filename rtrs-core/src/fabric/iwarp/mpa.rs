//! MPA (RFC 5044, RFC 6581): start-up frames, frame lengths, and a preamble of our own.
//!
//! A start-up frame is read in two exact steps, header then private data, so that no byte after it
//! is consumed. Between two instances of this implementation, the private data starts with a
//! preamble (`RTIW`, version, features) that offers what plain iWARP lacks: immediate data (RFC
//! 7306), and an 8-byte prefix on every Send, which can carry a 32-bit immediate.

use crate::fabric::PrivateData;

/// Length of a start-up frame without its private data.
pub(super) const START_LEN: usize = 20;
/// Maximum length of private data in a start-up frame (RFC 5044 section 7.1.1).
pub(super) const START_DATA_MAX: usize = 512;
/// Minimum ULPDU length: a tagged header without a payload.
pub(super) const ULPDU_MIN: usize = 14;
/// Length of a frame's trailing checksum.
pub(super) const CRC_LEN: usize = 4;
/// Maximum length of a frame on the wire.
pub(super) const FPDU_MAX: usize = 2 + 65535 + 3 + CRC_LEN;
/// Maximum number of reads accepted from a peer, and of reads in flight to the peer.
pub(super) const READS_MAX: u16 = 16;

const REQUEST_KEY: [u8; 16] = *b"MPA ID Req Frame";
const REPLY_KEY: [u8; 16] = *b"MPA ID Rep Frame";
const MARKERS: u8 = 0x80;
const CRC: u8 = 0x40;
const REJECT: u8 = 0x20;
const ENHANCED: u8 = 0x10;
const PEER_TO_PEER: u16 = 0x8000;
const RTR_SEND: u16 = 0x4000;
const RTR_WRITE: u16 = 0x8000;
const RTR_READ: u16 = 0x4000;
const DEPTH: u16 = 0x3fff;

/// Number of padding bytes after a ULPDU of this length (RFC 5044 section 4.1).
pub(super) const fn pad_len(ulpdu_len: usize) -> usize {
    (2 + ulpdu_len).wrapping_neg() % 4
}

/// Total frame length of a ULPDU.
pub(super) const fn fpdu_len(ulpdu_len: usize) -> usize {
    2 + ulpdu_len + pad_len(ulpdu_len) + CRC_LEN
}

/// RFC 6581 control words that precede the private data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Enhanced {
    /// The initiator promises a ready-to-receive frame, or the responder requests one.
    pub(super) peer_to_peer: bool,
    pub(super) rtr_send: bool,
    pub(super) rtr_write: bool,
    pub(super) rtr_read: bool,
    /// Reads that the sender of the frame accepts; None if not negotiated here.
    pub(super) ird: Option<u16>,
    /// Reads that the sender intends to have in flight.
    pub(super) ord: Option<u16>,
}

impl Enhanced {
    fn encode(self) -> [u8; 4] {
        let first = self.ird.unwrap_or(DEPTH).min(DEPTH)
            | if self.peer_to_peer { PEER_TO_PEER } else { 0 }
            | if self.rtr_send { RTR_SEND } else { 0 };
        let second = self.ord.unwrap_or(DEPTH).min(DEPTH)
            | if self.rtr_write { RTR_WRITE } else { 0 }
            | if self.rtr_read { RTR_READ } else { 0 };
        let ([a, b], [c, d]) = (first.to_be_bytes(), second.to_be_bytes());
        [a, b, c, d]
    }

    fn decode(bytes: [u8; 4]) -> Self {
        let first = u16::from_be_bytes([bytes[0], bytes[1]]);
        let second = u16::from_be_bytes([bytes[2], bytes[3]]);
        let depth = |word: u16| (word & DEPTH != DEPTH).then_some(word & DEPTH);
        Self {
            peer_to_peer: first & PEER_TO_PEER != 0,
            rtr_send: first & RTR_SEND != 0,
            rtr_write: second & RTR_WRITE != 0,
            rtr_read: second & RTR_READ != 0,
            ird: depth(first),
            ord: depth(second),
        }
    }
}

/// Features of this implementation beyond plain iWARP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Features {
    /// RFC 7306 immediates, for RDMA write with immediate.
    pub(super) immediate: bool,
    /// A prefix before every Send payload, for send with immediate.
    pub(super) send_prefix: bool,
}

impl Features {
    const MAGIC: [u8; 4] = *b"RTIW";
    const VERSION: u8 = 1;
    /// Length of the preamble.
    pub(super) const LEN: usize = 8;
    /// Length of the prefix of each Send payload: flags (bit 0: immediate present), three zero
    /// bytes, and the big-endian immediate.
    pub(super) const PREFIX_LEN: usize = 8;

    /// All features of this implementation.
    pub(super) const ALL: Self = Self { immediate: true, send_prefix: true };

    fn encode(self) -> [u8; Self::LEN] {
        let bits = u8::from(self.immediate) | u8::from(self.send_prefix) << 1;
        let m = Self::MAGIC;
        [m[0], m[1], m[2], m[3], Self::VERSION, bits, 0, 0]
    }

    /// Splits private data into the preamble and the data that follows.
    fn split(data: &[u8]) -> (Option<Self>, &[u8]) {
        match data.split_first_chunk::<{ Self::LEN }>() {
            Some((head, rest)) if head[..4] == Self::MAGIC && head[4] == Self::VERSION => {
                let immediate = head[5] & 1 != 0;
                (Some(Self { immediate, send_prefix: head[5] & 2 != 0 }), rest)
            }
            _ => (None, data),
        }
    }

    /// Returns the features that both sides support.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            immediate: self.immediate && other.immediate,
            send_prefix: self.send_prefix && other.send_prefix,
        }
    }
}

/// Error in a start-up frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StartError {
    #[error("not an MPA start-up frame of the expected kind")]
    Key,
    #[error("unknown MPA revision {0}")]
    Revision(u8),
    #[error("private data of {0} bytes is longer than 512")]
    TooLong(usize),
    #[error("an enhanced frame needs revision 2 and 4 bytes of private data")]
    Enhanced,
}

/// Validated first 20 bytes of a start-up frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StartHeader {
    flags: u8,
    revision: u8,
    /// Number of bytes that follow.
    pub(super) data_len: usize,
}

impl StartHeader {
    /// Validates the header of a request or reply (RFC 5044 section 7.1.1, RFC 6581 section 6).
    pub(super) fn decode(bytes: &[u8; START_LEN], reply: bool) -> Result<Self, StartError> {
        let key = if reply { REPLY_KEY } else { REQUEST_KEY };
        if bytes[..16] != key {
            return Err(StartError::Key);
        }
        let (flags, revision) = (bytes[16], bytes[17]);
        if !(1..=2).contains(&revision) {
            return Err(StartError::Revision(revision));
        }
        let data_len = usize::from(u16::from_be_bytes([bytes[18], bytes[19]]));
        if data_len > START_DATA_MAX {
            return Err(StartError::TooLong(data_len));
        }
        if flags & ENHANCED != 0 && (revision < 2 || data_len < 4) {
            return Err(StartError::Enhanced);
        }
        Ok(Self { flags, revision, data_len })
    }
}

/// Start-up frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StartFrame {
    pub(super) reply: bool,
    /// The sender requires markers in the data it receives.
    pub(super) markers: bool,
    pub(super) crc: bool,
    pub(super) reject: bool,
    pub(super) revision: u8,
    pub(super) enhanced: Option<Enhanced>,
    pub(super) features: Option<Features>,
    pub(super) private_data: PrivateData,
}

impl StartFrame {
    /// Combines header and private data. `data` has the announced length.
    pub(super) fn decode(header: StartHeader, data: &[u8], reply: bool) -> Self {
        let (enhanced, data) = match data.split_first_chunk::<4>() {
            Some((words, rest)) if header.flags & ENHANCED != 0 => {
                (Some(Enhanced::decode(*words)), rest)
            }
            _ => (None, data),
        };
        let (features, data) = Features::split(data);
        Self {
            reply,
            markers: header.flags & MARKERS != 0,
            crc: header.flags & CRC != 0,
            reject: header.flags & REJECT != 0,
            revision: header.revision,
            enhanced,
            features,
            private_data: PrivateData::new(data),
        }
    }

    /// Encodes the frame.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(256);
        if let Some(enhanced) = self.enhanced {
            data.extend_from_slice(&enhanced.encode());
        }
        if let Some(features) = self.features {
            data.extend_from_slice(&features.encode());
        }
        data.extend_from_slice(self.private_data.as_bytes());
        let mut out = Vec::with_capacity(START_LEN + data.len());
        out.extend_from_slice(if self.reply { &REPLY_KEY } else { &REQUEST_KEY });
        out.push(
            (if self.markers { MARKERS } else { 0 })
                | (if self.crc { CRC } else { 0 })
                | (if self.reject { REJECT } else { 0 })
                | (if self.enhanced.is_some() { ENHANCED } else { 0 }),
        );
        out.push(self.revision);
        out.extend_from_slice(&(data.len() as u16).to_be_bytes());
        out.extend_from_slice(&data);
        out
    }

    /// Creates a request. A plain request offers neither the extra features nor peer-to-peer mode.
    pub(super) fn request(crc: bool, plain: bool, private_data: PrivateData) -> Self {
        Self {
            crc,
            revision: 2,
            enhanced: Some(Enhanced {
                peer_to_peer: !plain,
                rtr_write: !plain,
                ird: Some(READS_MAX),
                ord: Some(READS_MAX),
                ..Enhanced::default()
            }),
            features: (!plain).then_some(Features::ALL),
            private_data,
            ..Self::default()
        }
    }

    /// Creates the reply that accepts this request, and returns the negotiated terms.
    pub(super) fn accept(
        &self,
        crc: bool,
        plain: bool,
        private_data: PrivateData,
    ) -> (Self, Terms) {
        let crc = crc || self.crc;
        let offered = self.enhanced.unwrap_or_default();
        let kinds = offered.rtr_write || offered.rtr_read || offered.rtr_send;
        let peer_to_peer = offered.peer_to_peer && kinds;
        let rtr_write = peer_to_peer && offered.rtr_write;
        let rtr_read = peer_to_peer && !rtr_write && offered.rtr_read;
        let rtr_send = peer_to_peer && !rtr_write && !rtr_read;
        let ord = offered.ird.unwrap_or(READS_MAX).min(READS_MAX);
        let features = if plain { None } else { self.features.map(|f| f.and(Features::ALL)) };
        let reply = Self {
            reply: true,
            crc,
            revision: self.revision,
            enhanced: self.enhanced.map(|_| Enhanced {
                peer_to_peer,
                rtr_send,
                rtr_write,
                rtr_read,
                ird: Some(READS_MAX),
                ord: Some(ord),
            }),
            features,
            private_data,
            ..Self::default()
        };
        let terms = Terms {
            crc,
            ird: READS_MAX,
            ord,
            features: features.unwrap_or_default(),
            rtr_expected: peer_to_peer,
            rtr_is_send: rtr_send,
            ..Terms::default()
        };
        (reply, terms)
    }

    /// Creates the reply that refuses this request.
    pub(super) fn refuse(&self, private_data: PrivateData) -> Self {
        Self {
            reply: true,
            crc: self.crc,
            reject: true,
            revision: self.revision,
            enhanced: self.enhanced.map(|_| Enhanced {
                ird: Some(0),
                ord: Some(0),
                ..Enhanced::default()
            }),
            private_data,
            ..Self::default()
        }
    }

    /// Returns the terms that this reply to `request` establishes.
    pub(super) fn settle(&self, request: &Self) -> Result<Terms, &'static str> {
        if self.markers {
            return Err("the peer demands markers");
        }
        let offered = request.enhanced.unwrap_or_default();
        let agreed = self.enhanced.unwrap_or_default();
        if agreed.ord.is_some_and(|ord| ord > READS_MAX && ord > offered.ird.unwrap_or(DEPTH)) {
            return Err("the peer requests more reads in flight than allowed");
        }
        let rtr = self.enhanced.is_some() && agreed.peer_to_peer && offered.peer_to_peer;
        if rtr && !agreed.rtr_write {
            return Err("the peer requests a ready-to-receive frame that was not offered");
        }
        let features = match (self.features, request.features) {
            (Some(theirs), Some(ours)) => theirs.and(ours),
            _ => Features::default(),
        };
        Ok(Terms {
            crc: self.crc || request.crc,
            ird: READS_MAX,
            ord: agreed.ird.unwrap_or(READS_MAX).min(READS_MAX),
            features,
            initiator: true,
            rtr_write: rtr,
            ..Terms::default()
        })
    }
}

/// Negotiated terms of the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) crc: bool,
    /// Reads accepted from the peer.
    pub(super) ird: u16,
    /// Reads that may be in flight to the peer.
    pub(super) ord: u16,
    pub(super) features: Features,
    /// This side opened the connection and may send first.
    pub(super) initiator: bool,
    /// The peer promised a ready-to-receive frame.
    pub(super) rtr_expected: bool,
    /// The promised frame will be an empty Send, which consumes no receive.
    pub(super) rtr_is_send: bool,
    /// This side promised a ready-to-receive frame, an empty Write.
    pub(super) rtr_write: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: String = hex.split_whitespace().collect();
        (0..digits.len() / 2)
            .map(|i| u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).unwrap())
            .collect()
    }

    fn parse(frame: &[u8], reply: bool) -> Result<StartFrame, StartError> {
        let header = StartHeader::decode(frame[..20].try_into().unwrap(), reply)?;
        assert_eq!(header.data_len, frame.len() - 20);
        Ok(StartFrame::decode(header, &frame[20..], reply))
    }

    #[test]
    fn golden_start_up_frames() {
        let plain = bytes(
            "4d 50 41 20 49 44 20 52 65 71 20 46 72 61 6d 65 40 01 00 08 a0 a1 a2 a3 a4 a5 a6 a7",
        );
        let frame = parse(&plain, false).unwrap();
        assert!(frame.crc && !frame.markers && frame.enhanced.is_none());
        assert_eq!(frame.private_data.as_bytes(), &plain[20..]);
        assert_eq!(frame.encode(), plain);
        let enhanced = bytes(
            "4d 50 41 20 49 44 20 52 65 71 20 46 72 61 6d 65 50 02 00 0c 00 01 00 01
             a0 a1 a2 a3 a4 a5 a6 a7",
        );
        let frame = parse(&enhanced, false).unwrap();
        let words = frame.enhanced.unwrap();
        assert_eq!((words.ird, words.ord, words.peer_to_peer), (Some(1), Some(1), false));
        assert_eq!(frame.private_data.as_bytes().len(), 8);
        assert_eq!(frame.encode(), enhanced);
        let reply =
            bytes("4d 50 41 20 49 44 20 52 65 70 20 46 72 61 6d 65 50 02 00 04 00 01 00 01");
        assert_eq!(parse(&reply, true).unwrap().encode(), reply);
        assert_eq!(parse(&reply, false), Err(StartError::Key), "two initiators");
        let mut p2p =
            bytes("4d 50 41 20 49 44 20 52 65 71 20 46 72 61 6d 65 10 02 00 04 80 01 c0 01");
        let frame = parse(&p2p, false).unwrap();
        let words = frame.enhanced.unwrap();
        assert!(words.peer_to_peer && words.rtr_write && words.rtr_read && !words.rtr_send);
        let (answer, terms) = frame.accept(true, true, PrivateData::EMPTY);
        let words = answer.enhanced.unwrap();
        assert!(words.peer_to_peer && words.rtr_write && !words.rtr_read);
        assert!(terms.crc && terms.rtr_expected && terms.ord == 1);
        p2p[17] = 3;
        assert_eq!(parse(&p2p, false), Err(StartError::Revision(3)));
        p2p[17] = 1;
        assert_eq!(parse(&p2p, false), Err(StartError::Enhanced));
    }

    #[test]
    fn features_are_offered_and_echoed_but_not_to_plain_peers() {
        let data = PrivateData::new(b"hello");
        let ours = StartFrame::request(true, false, data);
        let seen = parse(&ours.encode(), false).unwrap();
        assert_eq!(seen, ours);
        let (reply, terms) = seen.accept(false, false, PrivateData::new(b"yes"));
        assert_eq!(terms.features, Features::ALL);
        assert!(terms.rtr_expected);
        let reply = parse(&reply.encode(), true).unwrap();
        let settled = reply.settle(&ours).unwrap();
        assert!(settled.rtr_write && settled.crc && settled.features == Features::ALL);
        assert_eq!(reply.private_data.as_bytes(), b"yes");
        let (reply, terms) = seen.accept(true, true, data);
        assert_eq!(terms.features, Features::default());
        let settled = reply.settle(&ours).unwrap();
        assert_eq!(settled.features, Features::default());
        assert_eq!(reply.private_data.as_bytes(), b"hello");
        let no = seen.refuse(PrivateData::new(b"no"));
        let no = parse(&no.encode(), true).unwrap();
        assert!(no.reject && no.private_data.as_bytes() == b"no");
    }

    #[test]
    fn markers_and_too_many_reads_are_refused() {
        let ours = StartFrame::request(true, true, PrivateData::EMPTY);
        let (mut reply, _) = ours.accept(true, true, PrivateData::EMPTY);
        reply.markers = true;
        assert!(reply.settle(&ours).is_err());
        reply.markers = false;
        reply.enhanced = Some(Enhanced { ord: Some(17), ..Enhanced::default() });
        assert!(reply.settle(&ours).is_err());
    }

    #[test]
    fn frames_are_multiples_of_four() {
        for len in ULPDU_MIN..2000 {
            assert_eq!(fpdu_len(len) % 4, 0);
            assert!(pad_len(len) < 4);
        }
        assert_eq!(fpdu_len(26), 32, "an immediate");
    }
}
