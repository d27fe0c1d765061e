//! DISCOVER: an extension with which a client lists the exports that it may open.
//!
//! A server that supports DISCOVER announces this in CON_RSP
//! ([`Extensions`](super::Extensions::discover)); the message is never sent to other servers. It is
//! the user message of a READ. The answer is one page of the list, ordered by name; the next page
//! begins after the last name on this one. A page contains at least one entry, so that a client
//! that requests page after page makes progress.

use super::bytes::{expect_type, fixed, put, take, u16_at, u32_at};
use super::error::{Fault, WireError};
use super::name::{Name, name_len};
use crate::identity::ExportId;
use crate::limits::{NAME_FIELD_LEN, NAME_LEN_MAX};

const TYPE: u16 = 0x8002;
const EXPECTED: (u16, &str) = (TYPE, "0x8002 (DISCOVER)");

/// DISCOVER: requests the exports that follow this name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discover {
    /// Last name of the previous page; empty for the first page.
    pub after: Name,
}

impl Discover {
    /// Type of the message.
    pub const TYPE: u16 = TYPE;
    /// Length of the message in bytes.
    pub const LEN: usize = 264;
    const NAME: &str = "DISCOVER";

    /// Encodes the message.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, TYPE.to_le_bytes());
        put(&mut out, 6, *self.after.field());
        out
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// A message that is too short, a wrong type, or an unterminated name.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        Self::decode_in_place(bytes)?;
        Ok(Self { after: Name::from_field(Self::NAME, bytes, 6)? })
    }

    /// Like [`Discover::decode`], but returns the name without copying it.
    pub(super) fn decode_in_place(bytes: &[u8]) -> Result<&[u8], WireError> {
        let bytes: &[u8; Self::LEN] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, bytes, EXPECTED)?;
        let unterminated = WireError { message: Self::NAME, at: 6, fault: Fault::Unterminated };
        let field = bytes[6..].first_chunk::<NAME_FIELD_LEN>().ok_or(unterminated)?;
        let len = name_len(field).ok_or(unterminated)?;
        Ok(&field[..usize::from(len)])
    }
}

/// Export in a [`Page`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discovered {
    /// Name of the export; not empty.
    pub name: Name,
    /// Size in sectors of 512 bytes.
    pub sectors: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// The export is read-only.
    pub read_only: bool,
    /// Another session has the export open for writing.
    pub written: bool,
    /// Identity of the disk or file, if the server knows it.
    pub id: Option<ExportId>,
}

impl Discovered {
    /// Number of bytes before the name.
    const FIXED: usize = 32;
    const READ_ONLY: u8 = 1;
    const WRITTEN: u8 = 2;
    const PRESENT: u8 = 4;
    const WEAK: u8 = 8;

    fn encoded_len(&self) -> usize {
        Self::FIXED + self.name.as_bytes().len()
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let bit = |is_set, bit| if is_set { bit } else { 0 };
        let mut fixed = [0; Self::FIXED];
        put(&mut fixed, 0, self.sectors.to_le_bytes());
        put(&mut fixed, 8, self.block_size.to_le_bytes());
        fixed[12] = bit(self.read_only, Self::READ_ONLY) | bit(self.written, Self::WRITTEN);
        if let Some(id) = self.id {
            fixed[12] |= Self::PRESENT | bit(id.is_weak(), Self::WEAK);
            put(&mut fixed, 16, id.bytes());
        }
        let name = self.name.as_bytes();
        fixed[13] = u8::try_from(name.len()).unwrap_or(u8::MAX);
        out.extend(fixed);
        out.extend(name);
    }

    /// Decodes the entry at the start of `bytes`, which begin at offset `at` of the page.
    fn decode(bytes: &[u8], at: usize) -> Result<Self, WireError> {
        let short = |need| WireError::short(Page::NAME, at + need, at + bytes.len());
        let fixed: &[u8; Self::FIXED] = bytes.first_chunk().ok_or_else(|| short(Self::FIXED))?;
        let len = usize::from(fixed[13]);
        let name = bytes.get(Self::FIXED..Self::FIXED + len);
        let name = name.ok_or_else(|| short(Self::FIXED + len))?;
        let wrong = || WireError::value(Page::NAME, at + 13, "name", len as u64, "1 to 254 bytes");
        let name = Name::new(name).ok().filter(|name| !name.is_empty()).ok_or_else(wrong)?;
        let has = |bit| fixed[12] & bit != 0;
        Ok(Self {
            name,
            sectors: u64::from_le_bytes(take(fixed, 0)),
            block_size: u32_at(fixed, 8),
            read_only: has(Self::READ_ONLY),
            written: has(Self::WRITTEN),
            id: has(Self::PRESENT).then(|| ExportId::from_bytes(take(fixed, 16), has(Self::WEAK))),
        })
    }
}

/// DISCOVER_RSP: page of the list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Exports, ordered by name.
    pub exports: Vec<Discovered>,
    /// More exports follow after the last of these.
    pub more: bool,
}

impl Page {
    /// Minimum space that a client must provide for the answer: enough for any one export.
    pub const LEN_MIN: usize = Self::HEAD + Discovered::FIXED + NAME_LEN_MAX;
    /// Maximum space that a server uses.
    pub const LEN_MAX: usize = 4096;
    /// Maximum number of exports in a page.
    pub const EXPORTS_MAX: usize = (Self::LEN_MAX - Self::HEAD) / (Discovered::FIXED + 1);
    const NAME: &str = "DISCOVER_RSP";
    const HEAD: usize = 8;
    const MORE: u32 = 1;

    /// Creates a page of as many of these exports, which are in order, as fit in `room` bytes.
    pub fn fill(exports: impl Iterator<Item = Discovered>, room: usize) -> Self {
        let (mut left, mut page) =
            (room.min(Self::LEN_MAX).saturating_sub(Self::HEAD), Self::default());
        for export in exports {
            let len = export.encoded_len();
            if len > left {
                page.more = true;
                break;
            }
            left -= len;
            page.exports.push(export);
        }
        page
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; Self::HEAD];
        put(&mut out, 0, TYPE.to_le_bytes());
        let count = u16::try_from(self.exports.len()).unwrap_or(u16::MAX);
        put(&mut out, 2, count.to_le_bytes());
        put(&mut out, 4, if self.more { Self::MORE } else { 0 }.to_le_bytes());
        self.exports.iter().for_each(|export| export.encode(&mut out));
        out
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// A short message, wrong type or invalid name, or a page without entries that is not the last.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let head: &[u8; Self::HEAD] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, head, EXPECTED)?;
        let (count, more) = (u16_at(head, 2), u32_at(head, 4) & Self::MORE != 0);
        if count == 0 && more {
            return Err(WireError::value(Self::NAME, 2, "count", 0, "1 or more before others"));
        }
        let (mut exports, mut at) = (Vec::new(), Self::HEAD);
        for _ in 0..count {
            let export = Discovered::decode(&bytes[at..], at)?;
            at += export.encoded_len();
            exports.push(export);
        }
        Ok(Self { exports, more })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(name: &[u8]) -> Discovered {
        Discovered {
            name: Name::new(name).unwrap(),
            sectors: 8,
            block_size: 512,
            read_only: false,
            written: true,
            id: None,
        }
    }

    #[test]
    fn the_minimum_buffer_holds_any_export() {
        let long = export(&[b'x'; NAME_LEN_MAX]);
        for (room, count) in [(Page::LEN_MIN, 1), (Page::LEN_MIN - 1, 0), (0, 0)] {
            let page = Page::fill([long, export(b"y")].into_iter(), room);
            assert_eq!((page.exports.len(), page.more), (count, true), "{room}");
            assert!(page.encode().len() <= room.max(8));
        }
        // Both exports fit.
        let page = Page::fill([long, export(b"y")].into_iter(), Page::LEN_MIN + 33);
        assert_eq!((page.exports.len(), page.more), (2, false));
        assert_eq!(Page::decode(&page.encode()), Ok(page));
        let page = Page::fill(std::iter::repeat_n(long, 1000), usize::MAX);
        assert!(page.more && page.encode().len() <= Page::LEN_MAX);
    }

    #[test]
    fn a_page_is_validated() {
        let page = Page { exports: vec![export(b"vol"), export(b"w")], more: true };
        let good = page.encode();
        for len in 0..good.len() {
            assert!(Page::decode(&good[..len]).is_err(), "{len} bytes");
        }
        let fault = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            Page::decode(&bytes).map_err(|error| error.at)
        };
        assert_eq!(fault(0, 1), Err(0), "type");
        assert_eq!(fault(2, 0), Err(2), "none, and more");
        assert_eq!(fault(2, 3).unwrap_err(), good.len(), "one that is not there");
        assert_eq!(fault(8 + 13, 0), Err(8 + 13), "no name");
        assert_eq!(fault(8 + 13, 255).unwrap_err(), good.len(), "a name beyond the end");
        assert_eq!(fault(8 + 32, 0), Err(8 + 13), "a NUL in the name");
        assert!(fault(8 + 14, 7).is_ok(), "reserved");
        // The offset of an error in the second entry counts from the start of the page.
        assert_eq!(fault(8 + 35 + 13, 0), Err(8 + 35 + 13));
    }
}
