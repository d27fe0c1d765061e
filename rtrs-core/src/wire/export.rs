//! RNBD's control messages: SESS_INFO, OPEN, CLOSE and the answers to the first two.
//!
//! A client sends them as user headers on the service connection; the server writes the answers to
//! memory given by the client. docs/PROTOCOL.md describes the meaning of the fields, and values
//! suitable for a kernel client; this module does not validate devices.

use super::bytes::{expect_type, fixed, put, take};
use super::error::{Fault, WireError};
use super::name::{Name, name_len};
use super::version::RNBD_VERSION;
use crate::gateway::Standing;
use crate::identity::{EvictionSecret, ExportId};
use crate::limits::NAME_FIELD_LEN;

pub(super) const TYPE_OPEN: u16 = 2;

message! {
    /// SESS_INFO: the first message of a session, with the client's version.
    pub struct SessInfo[36] = "SESS_INFO", type 0 {
        /// Major version of RNBD that the sender speaks.
        4 ver: u8,
    }
}

impl Default for SessInfo {
    /// Returns the message that this implementation sends.
    fn default() -> Self {
        Self { ver: RNBD_VERSION }
    }
}

message! {
    /// SESS_INFO_RSP: the negotiated version.
    pub struct SessInfoRsp[36] = "SESS_INFO_RSP", type 1 {
        /// Major version of RNBD: the smaller of the two.
        4 ver: u8,
    }
}

impl SessInfoRsp {
    /// Returns the answer to a client's SESS_INFO.
    pub fn answer(to: SessInfo) -> Self {
        Self { ver: to.ver.min(RNBD_VERSION) }
    }
}

codes! {
    /// Access to a device that a client requests.
    #[derive(Default)]
    pub enum AccessMode {
        /// Read only; any number of clients.
        ReadOnly = 0,
        /// Read and write; no other writer.
        #[default]
        ReadWrite = 1,
        /// Read and write alongside one other writer, for live migration.
        Migration = 2,
    }
}

impl AccessMode {
    /// Returns true if the client may write.
    pub const fn may_write(self) -> bool {
        !matches!(self, Self::ReadOnly)
    }

    /// Name of the mode, as in settings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReadOnly => "ro",
            Self::ReadWrite => "rw",
            Self::Migration => "migration",
        }
    }
}

/// Flags of an OPEN. An extension: valid only with room for the long [`OpenRsp`], since a kernel's
/// client does not set this byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// The client had the device open at this server before, and may still hold requests and data
    /// from that time.
    pub returns: bool,
    /// The session opens the device for a migration and runs no IO there until it is granted access
    /// `rw`.
    pub waits: bool,
}

impl OpenFlags {
    const RETURNS: u8 = 1;
    const WAITS: u8 = 2;

    fn to_wire(self) -> u8 {
        let Self { returns, waits } = self;
        (u8::from(returns) * Self::RETURNS) | (u8::from(waits) * Self::WAITS)
    }

    fn from_wire(byte: u8) -> Self {
        Self { returns: byte & Self::RETURNS != 0, waits: byte & Self::WAITS != 0 }
    }
}

/// OPEN: requests a device by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Open {
    /// Access mode.
    pub access: AccessMode,
    /// Flags, from a client that has room for the long [`OpenRsp`].
    pub flags: OpenFlags,
    /// Name of the device; the server defines the meaning of names.
    pub dev_name: Name,
}

impl Open {
    /// Length of the message in bytes.
    pub const LEN: usize = 264;
    const NAME: &str = "OPEN";

    /// Encodes the message.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, TYPE_OPEN.to_le_bytes());
        out[4] = self.access.to_wire();
        out[5] = self.flags.to_wire();
        put(&mut out, 6, *self.dev_name.field());
        out
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// Short message, wrong type, unknown access mode, unterminated name.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (access, flags, _) = Self::decode_in_place(bytes)?;
        Ok(Self { access, flags, dev_name: Name::from_field(Self::NAME, bytes, 6)? })
    }

    /// Like [`Open::decode`], but returns the name in place.
    pub(super) fn decode_in_place(
        bytes: &[u8],
    ) -> Result<(AccessMode, OpenFlags, &[u8]), WireError> {
        let bytes: &[u8; Self::LEN] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, bytes, (TYPE_OPEN, "2 (OPEN)"))?;
        let Some(access) = AccessMode::from_wire(bytes[4]) else {
            let found = u64::from(bytes[4]);
            return Err(WireError::value(Self::NAME, 4, "access_mode", found, "0, 1 or 2"));
        };
        let unterminated = WireError { message: Self::NAME, at: 6, fault: Fault::Unterminated };
        let field = bytes[6..].first_chunk::<NAME_FIELD_LEN>().ok_or(unterminated)?;
        let len = name_len(field).ok_or(unterminated)?;
        Ok((access, OpenFlags::from_wire(bytes[5]), &field[..usize::from(len)]))
    }
}

message! {
    /// OPEN_RSP: description of the device. Limits are fixed while it is open.
    #[derive(Default)]
    pub struct OpenRsp[56] = "OPEN_RSP", type 3 {
        /// Number of the device in this session; starts at 0.
        4 device_id: u32,
        /// Size in sectors of 512 bytes, regardless of the block size.
        8 nsectors: u64,
        /// Maximum transfer in sectors; clients ignore it.
        16 max_hw_sectors: u32,
        /// Maximum write zeroes in sectors, 0 if unsupported. Linux 6.8 and later; in earlier
        /// versions an unused field that servers send as 0.
        20 max_write_zeroes_sectors: u32,
        /// Maximum discard in sectors, 0 if unsupported.
        24 max_discard_sectors: u32,
        /// Unit of discards in bytes.
        28 discard_granularity: u32,
        /// First discard-aligned byte.
        32 discard_alignment: u32,
        /// Preferred unit in bytes; at least the logical one, at most 32768.
        36 physical_block_size: u16,
        /// Unit of IO in bytes; a client refuses 0.
        38 logical_block_size: u16,
        /// Maximum number of segments in a transfer; clients ignore it.
        40 max_segments: u16,
        /// Nonzero if secure erase is supported. Always 0, since the kernel's client fails on it.
        42 secure_discard: u16,
        /// The device is a rotating disk. Obsolete.
        44 rotational: bool,
        /// FUA is honored (cache policy bit 0).
        45 & 1 fua: bool,
        /// The device has a volatile cache (cache policy bit 1). Without one, clients send neither
        /// flushes nor FUA, and each write must be durable when it is answered.
        45 & 2 write_cache: bool,
        /// Epoch of the cache: acknowledged writes that were not flushed survive as long as the
        /// epoch does not change; 0 if unknown. An extension: valid only with
        /// [`Extensions::cache_id`](super::Extensions::cache_id), since kernel servers leave these
        /// bytes uninitialized.
        48 cache_id: u64,
        /// When the epoch changes, all data is lost, flushed or not. Also an extension.
        46 & 1 volatile: bool,
        /// Write zeroes is faster than writing data, and a request may require that
        /// ([`Rw::fast_only`](super::Rw::fast_only)). An extension: valid only with
        /// [`Extensions::lengths`](super::Extensions::lengths).
        46 & 2 fast_zero: bool,
        /// The server reports extents ([`Rw::EXTENTS`](super::Rw::EXTENTS)). An extension: valid
        /// only with [`Extensions::lengths`](super::Extensions::lengths).
        46 & 4 extents: bool,
        /// A write may change part of a block ([`Rw::PARTIAL_WRITE`](super::Rw::PARTIAL_WRITE)). An
        /// extension: valid only with [`Extensions::lengths`](super::Extensions::lengths).
        46 & 8 partial_writes: bool,
    }
}

/// Fields of the long OPEN_RSP beyond the short one. An extension: a client requests it with a
/// longer read descriptor, if the server announced it
/// ([`Extensions`](super::Extensions::identity)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenRspTail {
    /// Identity of the export, if the server knows it.
    pub export: Option<ExportId>,
    /// Secret that the server repeats if it evicts the session.
    pub secret: EvictionSecret,
    /// State of the server as a gateway, if the export can move between servers. A client that does
    /// not support this ([`ClientExtensions::gateways`](super::ClientExtensions::gateways)) can
    /// open an export only through its active gateway.
    pub standing: Option<Standing>,
}

impl OpenRspTail {
    /// Length of the long message in bytes, including the short one.
    pub const LONG_LEN: usize = 128;
    const NAME: &str = "OPEN_RSP (long)";
    const PRESENT: u8 = 1;
    const WEAK: u8 = 2;
    const MOVES: u8 = 4;
    const STANDBY: u8 = 8;

    /// Encodes the long message.
    pub fn encode(&self, rsp: &OpenRsp) -> [u8; Self::LONG_LEN] {
        let mut out = [0; Self::LONG_LEN];
        put(&mut out, 0, rsp.encode());
        if let Some(export) = self.export {
            put(&mut out, 56, export.bytes());
            out[72] = Self::PRESENT | if export.is_weak() { Self::WEAK } else { 0 };
        }
        put(&mut out, 80, self.secret.0);
        if let Some(Standing { active, term }) = self.standing {
            out[72] |= Self::MOVES | if active { 0 } else { Self::STANDBY };
            put(&mut out, 96, term.to_le_bytes());
        }
        out
    }

    /// Decodes the part that follows the short message.
    ///
    /// # Errors
    /// The message is too short.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; Self::LONG_LEN] = fixed(Self::NAME, bytes)?;
        let id = ExportId::from_bytes(take(bytes, 56), bytes[72] & Self::WEAK != 0);
        Ok(Self {
            export: (bytes[72] & Self::PRESENT != 0).then_some(id),
            secret: EvictionSecret(take(bytes, 80)),
            standing: (bytes[72] & Self::MOVES != 0).then(|| Standing {
                active: bytes[72] & Self::STANDBY == 0,
                term: u64::from_le_bytes(take(bytes, 96)),
            }),
        })
    }
}

/// Reason for refusing an OPEN, as text. An extension: if the client requested the long OPEN_RSP, a
/// server writes the text before it sends the answer with the errno.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRefusal(String);

impl OpenRefusal {
    const MARK: [u8; 4] = *b"RTRX";
    const TEXT_AT: usize = 8;

    /// Creates the text; it is truncated if it does not fit.
    pub fn new(text: &str) -> Self {
        let mut end = text.len().min(OpenRspTail::LONG_LEN - Self::TEXT_AT);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        Self(text[..end].to_owned())
    }

    /// Encodes the text.
    pub fn encode(&self) -> [u8; OpenRspTail::LONG_LEN] {
        let mut out = [0; OpenRspTail::LONG_LEN];
        put(&mut out, 0, Self::MARK);
        out[4] = u8::try_from(self.0.len()).unwrap_or(u8::MAX);
        out[Self::TEXT_AT..][..self.0.len()].copy_from_slice(self.0.as_bytes());
        out
    }

    /// Decodes the text that a server may have written to a cleared answer buffer; None if it wrote
    /// nothing. Control characters are replaced, since the text is shown in logs and terminals.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let text = bytes.strip_prefix(&Self::MARK)?;
        let text = text.get(Self::TEXT_AT - 4..)?.get(..usize::from(*text.first()?))?;
        let text = String::from_utf8_lossy(text);
        Some(Self(text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()))
    }

    /// Returns the text.
    pub fn text(&self) -> &str {
        &self.0
    }
}

message! {
    /// CLOSE: closes a device. Closing an unknown device succeeds.
    #[derive(Default)]
    pub struct Close[8] = "CLOSE", type 5 {
        /// Number of the device, from OPEN_RSP.
        4 device_id: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_bytes_are_not_validated() {
        let mut bytes = [0xcc; SessInfo::LEN];
        bytes[..2].fill(0);
        bytes[4] = 9;
        let info = SessInfo::decode(&bytes).unwrap();
        assert_eq!(info.ver, 9);
        assert_eq!(SessInfoRsp::answer(info).ver, 2);
        assert_eq!(SessInfoRsp::answer(SessInfo { ver: 1 }).ver, 1);

        let mut bytes = [0xcc; Open::LEN];
        bytes[..2].copy_from_slice(&[2, 0]);
        bytes[4] = 1;
        bytes[6..9].copy_from_slice(b"v0\0");
        let open = Open::decode(&bytes).unwrap();
        let v0 = Name::new(b"v0").unwrap();
        let flags = OpenFlags::default();
        assert_eq!(open, Open { access: AccessMode::ReadWrite, flags, dev_name: v0 });
        assert!(open.encode()[9..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn an_open_is_validated() {
        let good = Open {
            access: AccessMode::Migration,
            flags: OpenFlags { returns: true, waits: true },
            dev_name: Name::new(b"v").unwrap(),
        };
        let mut bytes = good.encode();
        bytes[4] = 3;
        assert_eq!(Open::decode(&bytes).unwrap_err().at, 4);
        bytes[4] = 0;
        bytes[6..261].fill(b'x');
        assert_eq!(Open::decode(&bytes).unwrap_err().fault, Fault::Unterminated);
        bytes[260] = 0;
        assert_eq!(Open::decode(&bytes).unwrap().dev_name.as_bytes().len(), 254);
        assert_eq!(Open::decode(&bytes[..263]).unwrap_err().at, 263);
    }

    #[test]
    fn a_refusal_carries_as_much_text_as_fits() {
        let refusal = OpenRefusal::new("client 'db1' may not open \"vol0\"");
        let bytes = refusal.encode();
        assert_eq!(bytes[..9], *b"RTRX\x20\0\0\0c");
        assert_eq!(OpenRefusal::decode(&bytes), Some(refusal));
        let long = OpenRefusal::new(&"\u{e9}".repeat(100));
        assert_eq!(OpenRefusal::decode(&long.encode()).unwrap().text().len(), 120);
        // The answer is empty, has invalid lengths, or contains a forged log line.
        assert_eq!(OpenRefusal::decode(&[0; OpenRspTail::LONG_LEN]), None);
        assert_eq!(OpenRefusal::decode(b"RTRX"), None);
        assert_eq!(OpenRefusal::decode(b"RTRX\x05\0\0\0four"), None);
        assert_eq!(OpenRefusal::decode(b"RTRX\x03\0\0\0a\nb").unwrap().text(), "a?b");
    }

    #[test]
    fn access_modes_round_trip() {
        for byte in 0..=u8::MAX {
            match AccessMode::from_wire(byte) {
                Some(mode) => assert_eq!(mode.to_wire(), byte),
                None => assert!(byte > 2),
            }
        }
        assert!(!AccessMode::ReadOnly.may_write() && AccessMode::Migration.may_write());
    }
}
