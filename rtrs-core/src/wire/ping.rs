//! The ping: messages of rping and of our own ping, and the distinction between a ping and a
//! session.
//!
//! [`PingInfo`] is the 16-byte message of rping and krping, in both directions, big-endian. Their
//! connections have no private data. Ours have a [`PingHello`], answered by a [`PingReply`];
//! neither can be mistaken for a CON_REQ or CON_RSP, whose magic is at another offset. The pattern
//! of the data is rping's ([`fill_pattern`]). Layouts: docs/PROTOCOL.md, "Ping".

use super::bytes::{fixed, put, take};
use super::error::WireError;
use crate::ids::Rkey;

/// Memory from which a ping's data may be read or to which it may be written, or a go-ahead, which
/// is all zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PingInfo {
    /// Address of the first byte.
    pub addr: u64,
    /// Key of the memory.
    pub rkey: Rkey,
    /// Length of the data in bytes.
    pub size: u32,
}

impl PingInfo {
    /// Length of the message: the only property that rping checks.
    pub const LEN: usize = 16;
    /// Go-ahead: zeroes, as sent by rping's server.
    pub const GO_AHEAD: Self = Self { addr: 0, rkey: Rkey(0), size: 0 };

    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, self.addr.to_be_bytes());
        put(&mut out, 8, self.rkey.0.to_be_bytes());
        put(&mut out, 12, self.size.to_be_bytes());
        out
    }

    /// Decodes a message of the correct length; any content is valid.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            addr: u64::from_be_bytes(take(bytes, 0)),
            rkey: Rkey(u32::from_be_bytes(take(bytes, 8))),
            size: u32::from_be_bytes(take(bytes, 12)),
        }
    }
}

codes! {
    /// Operation of a ping.
    pub enum PingMode {
        /// rping's rounds: the server reads the client's data and writes it back.
        PingPong = 0,
        /// The client reads, one read after another.
        ReadLatency = 1,
        /// The client writes with an immediate, and the server writes the same back.
        WriteLatency = 2,
        /// The client keeps many reads in flight.
        ReadBandwidth = 3,
        /// The client keeps many writes in flight.
        WriteBandwidth = 4,
    }
}

impl PingMode {
    /// Returns true if the client writes; with duplex, the server writes too.
    #[must_use]
    pub const fn writes(self) -> bool {
        matches!(self, Self::WriteLatency | Self::WriteBandwidth)
    }

    /// Returns true for the two modes that keep many operations in flight.
    #[must_use]
    pub const fn is_bandwidth(self) -> bool {
        matches!(self, Self::ReadBandwidth | Self::WriteBandwidth)
    }
}

/// Private data of a ping's connection request: what the client intends to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PingHello {
    /// Measurement to run.
    pub mode: PingMode,
    /// In a bandwidth mode, the server does the same in the other direction.
    pub duplex: bool,
    /// Go-aheads invalidate the most recently used key.
    pub server_invalidate: bool,
    /// The server deregisters each read's sink once the read has completed.
    pub read_invalidate: bool,
    /// Number of operations in flight, 1 to [`PingHello::DEPTH_MAX`].
    pub depth: u16,
    /// Length of the data in bytes, 1 to [`PingHello::SIZE_MAX`].
    pub size: u32,
}

const HELLO_MAGIC: [u8; 8] = *b"RTRSPING";
const REPLY_MAGIC: [u8; 8] = *b"RTRSPONG";
/// Version of the hello and the reply.
const PING_VERSION: u8 = 1;
const DUPLEX: u8 = 1;
const SERVER_INVALIDATE: u8 = 2;
const READ_INVALIDATE: u8 = 4;

impl PingHello {
    /// Length of the message in bytes.
    pub const LEN: usize = 24;
    /// Maximum length of the data in bytes.
    pub const SIZE_MAX: u32 = 1 << 20;
    /// Maximum number of operations in flight.
    pub const DEPTH_MAX: u16 = 256;
    const NAME: &str = "PING_HELLO";

    /// Returns true if this is the private data of a ping of any version.
    #[must_use]
    pub fn is_ping(bytes: &[u8]) -> bool {
        bytes.starts_with(&HELLO_MAGIC)
    }

    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, HELLO_MAGIC);
        out[8] = PING_VERSION;
        out[9] = self.mode.to_wire();
        out[10] = if self.duplex { DUPLEX } else { 0 }
            | if self.server_invalidate { SERVER_INVALIDATE } else { 0 }
            | if self.read_invalidate { READ_INVALIDATE } else { 0 };
        put(&mut out, 12, self.depth.to_be_bytes());
        put(&mut out, 16, self.size.to_be_bytes());
        out
    }

    /// Decodes and validates private data that [is a ping's](Self::is_ping).
    ///
    /// # Errors
    /// Data that is too short, or an invalid version, mode, flag, depth or size.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; Self::LEN] = fixed(Self::NAME, bytes)?;
        let wrong = |at: usize, field, found: u64, expected| {
            Err(WireError::value(Self::NAME, at, field, found, expected))
        };
        if bytes[..8] != HELLO_MAGIC {
            return wrong(0, "magic", u64::from_be_bytes(take(bytes, 0)), "RTRSPING");
        }
        if bytes[8] != PING_VERSION {
            return wrong(8, "version", bytes[8].into(), "1");
        }
        let Some(mode) = PingMode::from_wire(bytes[9]) else {
            return wrong(9, "mode", bytes[9].into(), "0 to 4");
        };
        let flags = bytes[10];
        if flags & !(DUPLEX | SERVER_INVALIDATE | READ_INVALIDATE) != 0 {
            return wrong(10, "flags", flags.into(), "0 to 7");
        }
        let depth = u16::from_be_bytes(take(bytes, 12));
        if depth == 0 || depth > Self::DEPTH_MAX {
            return wrong(12, "depth", depth.into(), "1 to 256");
        }
        let size = u32::from_be_bytes(take(bytes, 16));
        if size == 0 || size > Self::SIZE_MAX {
            return wrong(16, "size", size.into(), "1 to 1048576");
        }
        Ok(Self {
            mode,
            duplex: flags & DUPLEX != 0,
            server_invalidate: flags & SERVER_INVALIDATE != 0,
            read_invalidate: flags & READ_INVALIDATE != 0,
            depth,
            size,
        })
    }
}

/// Server's answer to a [`PingHello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PingStatus {
    /// Accepted.
    Good,
    /// The server does not answer pings.
    Off,
    /// The maximum number of pings is already running.
    Busy,
    /// The server does not support a value in the hello.
    Unusable,
    /// Memory could not be allocated.
    Memory,
    /// Status known only to newer versions.
    Other(u8),
}

impl PingStatus {
    const KNOWN: [Self; 5] = [Self::Good, Self::Off, Self::Busy, Self::Unusable, Self::Memory];
    #[allow(clippy::cast_possible_truncation, reason = "one of five")]
    fn code(self) -> u8 {
        match self {
            Self::Other(code) => code,
            known => Self::KNOWN.iter().position(|status| *status == known).unwrap_or(0) as u8,
        }
    }
}

/// Private data of the answer to a ping's connection request, whether accepted or rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PingReply {
    /// Status of the request.
    pub status: PingStatus,
}

impl PingReply {
    /// Length of the message in bytes.
    pub const LEN: usize = 16;
    const NAME: &str = "PING_REPLY";

    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, REPLY_MAGIC);
        out[8] = PING_VERSION;
        out[9] = self.status.code();
        out
    }

    /// Decodes private data of an accept or a reject.
    ///
    /// # Errors
    /// Data that is too short, a wrong magic, or an unknown version.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; Self::LEN] = fixed(Self::NAME, bytes)?;
        if bytes[..8] != REPLY_MAGIC {
            let found = u64::from_be_bytes(take(bytes, 0));
            return Err(WireError::value(Self::NAME, 0, "magic", found, "RTRSPONG"));
        }
        if bytes[8] != PING_VERSION {
            return Err(WireError::value(Self::NAME, 8, "version", bytes[8].into(), "1"));
        }
        let known = PingStatus::KNOWN.get(usize::from(bytes[9])).copied();
        let status = known.unwrap_or(PingStatus::Other(bytes[9]));
        Ok(Self { status })
    }
}

/// Minimum data length in rping, required by its text.
pub const RPING_SIZE_MIN: u32 = 23;
/// Maximum data length in rping.
pub const RPING_SIZE_MAX: u32 = 65535;
/// Port of rping.
pub const RPING_PORT: u16 = 7174;

/// Fills in the data of round `n`, as rping generates it: `rdma-ping-N: `, then letters that start
/// one letter later in each round, then a NUL as the last byte. The data is truncated to the
/// buffer.
pub fn fill_pattern(n: u64, out: &mut [u8]) {
    const FIRST: u8 = b'A';
    const LETTERS: u8 = b'z' - b'A' + 1;
    let Some((last, body)) = out.split_last_mut() else { return };
    let text = format!("rdma-ping-{n}: ");
    let head = text.len().min(body.len());
    body[..head].copy_from_slice(&text.as_bytes()[..head]);
    #[allow(clippy::cast_possible_truncation, reason = "below LETTERS")]
    let mut letter = (n % u64::from(LETTERS)) as u8;
    for byte in &mut body[head..] {
        *byte = FIRST + letter;
        letter = (letter + 1) % LETTERS;
    }
    *last = 0;
}

/// Returns the length of the text in `data` with its NUL, as rping's server writes it back: the
/// whole length if there is no NUL.
#[must_use]
pub fn text_len(data: &[u8]) -> usize {
    data.iter().position(|byte| *byte == 0).map_or(data.len(), |nul| nul + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{ConnReq, ConnRsp};

    #[test]
    fn the_info_matches_rping() {
        let info = PingInfo { addr: 0x5607_db66_1470, rkey: Rkey(0xd58e_bd00), size: 100 };
        let bytes = info.encode();
        let seen =
            [0, 0, 0x56, 0x07, 0xdb, 0x66, 0x14, 0x70, 0xd5, 0x8e, 0xbd, 0x00, 0, 0, 0, 0x64];
        assert_eq!(bytes, seen);
        assert_eq!(PingInfo::decode(&bytes), info);
        assert_eq!(PingInfo::GO_AHEAD.encode(), [0; 16]);
    }

    #[test]
    fn the_pattern_matches_rping() {
        for (n, text) in [
            (0, "rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqr\0"),
            (1, "rdma-ping-1: BCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrs\0"),
        ] {
            let mut data = [0xff; 64];
            fill_pattern(n, &mut data);
            assert_eq!(std::str::from_utf8(&data).unwrap(), text);
            assert_eq!(text_len(&data), 64);
        }
        let mut data = [0; 30];
        fill_pattern(57, &mut data);
        assert_eq!(&data[..17], b"rdma-ping-57: zAB");
        fill_pattern(58, &mut data);
        assert_eq!(&data[..17], b"rdma-ping-58: ABC");
        for len in 0..40 {
            let mut data = vec![0xff; len];
            fill_pattern(u64::MAX, &mut data);
            assert_eq!(text_len(&data), len);
        }
        assert_eq!(text_len(&[7; 9]), 9);
        assert_eq!(text_len(b"ab\0d\0"), 3);
    }

    fn hello() -> PingHello {
        PingHello {
            mode: PingMode::ReadBandwidth,
            duplex: true,
            server_invalidate: false,
            read_invalidate: true,
            depth: 16,
            size: 65536,
        }
    }

    #[test]
    fn hello_and_reply_round_trip_with_padding() {
        for mode in (0..5).map(|code| PingMode::from_wire(code).unwrap()) {
            let hello = PingHello { mode, ..hello() };
            let mut padded = [0; 56];
            padded[..24].copy_from_slice(&hello.encode());
            assert!(PingHello::is_ping(&padded));
            assert_eq!(PingHello::decode(&padded), Ok(hello));
        }
        for code in 0..=255 {
            let mut bytes = PingReply { status: PingStatus::Good }.encode();
            bytes[9] = code;
            let reply = PingReply::decode(&bytes).unwrap();
            assert_eq!(reply.encode(), bytes);
        }
    }

    #[test]
    fn pings_and_sessions_are_distinguished() {
        let session = ConnReq { cid_num: 1, ..ConnReq::default() }.encode();
        assert!(!PingHello::is_ping(&session));
        PingHello::decode(&session).unwrap_err();
        let mut padded = [0; 56];
        padded[..24].copy_from_slice(&hello().encode());
        ConnReq::decode(&padded).unwrap_err();
        let mut reply = [0; 56];
        reply[..16].copy_from_slice(&PingReply { status: PingStatus::Busy }.encode());
        ConnRsp::decode(&reply).unwrap_err();
        PingReply::decode(&ConnRsp::reject(5).encode()).unwrap_err();
        assert!(!PingHello::is_ping(&[0; 56]) && !PingHello::is_ping(b""));
    }

    #[test]
    fn a_bad_hello_names_its_field() {
        let good = hello().encode();
        for (at, bytes, field) in [
            (0, &b"X"[..], "magic"),
            (8, &[2], "version"),
            (9, &[5], "mode"),
            (10, &[8], "flags"),
            (12, &[0, 0], "depth"),
            (12, &[1, 1], "depth"),
            (16, &[0, 0, 0, 0], "size"),
            (16, &[0, 0x10, 0, 1], "size"),
        ] {
            let mut bad = good;
            bad[at..at + bytes.len()].copy_from_slice(bytes);
            let error = PingHello::decode(&bad).unwrap_err();
            assert_eq!(error.at, at);
            assert!(error.to_string().contains(field), "{error}");
        }
        for len in 0..PingHello::LEN {
            PingHello::decode(&good[..len]).unwrap_err();
        }
    }
}
