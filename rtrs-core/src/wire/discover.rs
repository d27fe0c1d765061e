//! DISCOVER: our own addition, by which a client lists the exports that it may open.
//!
//! A server that answers it says so in CON_RSP ([`Extensions`](super::Extensions::discover)); to
//! others it is never sent. It travels as a user message of a READ. The answer is one page of the
//! list, in the order of the names; the last name of a page is where the next one begins. A page
//! holds at least one entry, so that a client that asks for the next one gets on.

use super::bytes::{expect_type, fixed, put, take, u16_at, u32_at};
use super::error::{Fault, WireError};
use super::name::{Name, name_len};
use crate::identity::ExportId;
use crate::limits::{NAME_FIELD_LEN, NAME_LEN_MAX};

const TYPE: u16 = 0x8002;
const EXPECTED: (u16, &str) = (TYPE, "0x8002 (DISCOVER)");

/// DISCOVER: which exports come after this name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discover {
    /// The last name of the page before; empty for the first page.
    pub after: Name,
}

impl Discover {
    /// Its type.
    pub const TYPE: u16 = TYPE;
    /// Bytes of the message.
    pub const LEN: usize = 264;
    const NAME: &str = "DISCOVER";

    /// The message as it travels.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, TYPE.to_le_bytes());
        put(&mut out, 6, *self.after.field());
        out
    }

    /// Reads the message.
    ///
    /// # Errors
    /// Short message, wrong type, unterminated name.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        Self::decode_in_place(bytes)?;
        Ok(Self { after: Name::from_field(Self::NAME, bytes, 6)? })
    }

    /// As [`Discover::decode`], with the name left where it is.
    pub(super) fn decode_in_place(bytes: &[u8]) -> Result<&[u8], WireError> {
        let bytes: &[u8; Self::LEN] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, bytes, EXPECTED)?;
        let unterminated = WireError { message: Self::NAME, at: 6, fault: Fault::Unterminated };
        let field = bytes[6..].first_chunk::<NAME_FIELD_LEN>().ok_or(unterminated)?;
        let len = name_len(field).ok_or(unterminated)?;
        Ok(&field[..usize::from(len)])
    }
}

/// An export in a [`Page`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discovered {
    /// What to open; not empty.
    pub name: Name,
    /// Size in sectors of 512 bytes.
    pub sectors: u64,
    /// Unit of IO in bytes.
    pub block_size: u32,
    /// Nobody may write.
    pub read_only: bool,
    /// Another session has it open for writing.
    pub written: bool,
    /// Which disk or file it is, if the server knows.
    pub id: Option<ExportId>,
}

impl Discovered {
    /// Bytes before the name.
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

    /// The entry at the start of `bytes`, which start at `at` of the page.
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

/// DISCOVER_RSP: a page of the list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// In the order of their names.
    pub exports: Vec<Discovered>,
    /// There are exports behind the last of these.
    pub more: bool,
}

impl Page {
    /// Room that a client must leave for the answer: for any one export.
    pub const LEN_MIN: usize = Self::HEAD + Discovered::FIXED + NAME_LEN_MAX;
    /// Room that a server uses at most.
    pub const LEN_MAX: usize = 4096;
    /// Exports that a page can have at most.
    pub const EXPORTS_MAX: usize = (Self::LEN_MAX - Self::HEAD) / (Discovered::FIXED + 1);
    const NAME: &str = "DISCOVER_RSP";
    const HEAD: usize = 8;
    const MORE: u32 = 1;

    /// The page that so much room holds of these exports, which are in order.
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

    /// The message as it travels.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; Self::HEAD];
        put(&mut out, 0, TYPE.to_le_bytes());
        let count = u16::try_from(self.exports.len()).unwrap_or(u16::MAX);
        put(&mut out, 2, count.to_le_bytes());
        put(&mut out, 4, if self.more { Self::MORE } else { 0 }.to_le_bytes());
        self.exports.iter().for_each(|export| export.encode(&mut out));
        out
    }

    /// Reads the message.
    ///
    /// # Errors
    /// Short message, wrong type, a name that is none, a page without entries before others.
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
    fn the_least_room_holds_any_export() {
        let long = export(&[b'x'; NAME_LEN_MAX]);
        for (room, count) in [(Page::LEN_MIN, 1), (Page::LEN_MIN - 1, 0), (0, 0)] {
            let page = Page::fill([long, export(b"y")].into_iter(), room);
            assert_eq!((page.exports.len(), page.more), (count, true), "{room}");
            assert!(page.encode().len() <= room.max(8));
        }
        // Both.
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
        assert_eq!(fault(8 + 13, 255).unwrap_err(), good.len(), "a name over the end");
        assert_eq!(fault(8 + 32, 0), Err(8 + 13), "a NUL in the name");
        assert!(fault(8 + 14, 7).is_ok(), "reserved");
        // The second entry's fault counts from the start of the page.
        assert_eq!(fault(8 + 35 + 13, 0), Err(8 + 35 + 13));
    }
}
