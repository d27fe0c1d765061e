//! The two messages of every IO: RNBD's header, and RTRS's READ or WRITE behind it.
//!
//! They lie in a chunk, where `chunk.rs` puts and finds them. The hottest messages of all: plain
//! values, no allocation, constant offsets. Which header fits which RTRS message is validated by
//! [`super::ChunkRequest`].

use super::RNBD_VERSION;
use super::bytes::{expect_type, fixed, put, take, u16_at};
use super::error::WireError;
use super::info::SgDesc;
use crate::ids::Rkey;

pub(super) const TYPE_READ: u16 = 3;

codes! {
    /// What an IO does, as RNBD numbers it.
    pub enum RwOp {
        /// Read `bi_size` bytes.
        Read = 0,
        /// Write them.
        Write = 1,
        /// Make completed writes durable. Its sector is all ones and means nothing.
        Flush = 2,
        /// Forget `bi_size` bytes.
        Discard = 3,
        /// Forget them for good.
        SecureErase = 4,
        /// Make them zero (Linux 6.8 and later).
        WriteZeroes = 5,
        /// Say which of them are holes. Ours, far from the kernel's numbers, and even as those of
        /// what has an answer.
        Extents = 128,
        /// Write `bi_size` bytes of one block and leave the others as they are. Ours, and odd as
        /// those of what comes with data. `prio` is the first byte within the sector.
        PartialWrite = 129,
    }
}

/// The `rw` field: operation in the low eight bits, flags above. Unknown flags are kept and
/// ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rw(pub u32);

impl Rw {
    /// A read without flags; the kernel's client always adds [`Rw::sync`].
    pub const READ: Self = Self(0);
    /// A write without flags.
    pub const WRITE: Self = Self(1);
    /// A flush without flags; kernels send it as 0x302, from 7.0 on as 0x702.
    pub const FLUSH: Self = Self(2);
    /// A discard.
    pub const DISCARD: Self = Self(3);
    /// A secure erase.
    pub const SECURE_ERASE: Self = Self(4);
    /// Write zeroes. Only for servers that announced a limit for it.
    pub const WRITE_ZEROES: Self = Self(5);
    /// Extents. Ours: for servers that announced [`OpenRsp::extents`](super::OpenRsp::extents).
    pub const EXTENTS: Self = Self(128);

    /// A partial write. Ours: for servers that announced
    /// [`OpenRsp::partial_writes`](super::OpenRsp::partial_writes).
    pub const PARTIAL_WRITE: Self = Self(129);

    const OP: u32 = 0xff;
    const SYNC: u32 = 0x100;
    const FUA: u32 = 0x200;
    const PREFLUSH: u32 = 0x400;
    const NOUNMAP: u32 = 0x800;
    /// Ours, far from the kernel's flags.
    const FAST_ONLY: u32 = 0x8000_0000;

    const fn with(self, flag: u32, on: bool) -> Self {
        if on { Self(self.0 | flag) } else { Self(self.0 & !flag) }
    }

    /// Somebody waits for it.
    #[must_use]
    pub const fn sync(self) -> Self {
        self.with(Self::SYNC, true)
    }

    /// Durable when answered.
    #[must_use]
    pub const fn fua(self, on: bool) -> Self {
        self.with(Self::FUA, on)
    }

    /// Earlier writes are made durable first (Linux 7.0).
    #[must_use]
    pub const fn preflush(self, on: bool) -> Self {
        self.with(Self::PREFLUSH, on)
    }

    /// Write zeroes must leave the range allocated (Linux 7.0).
    #[must_use]
    pub const fn no_unmap(self, on: bool) -> Self {
        self.with(Self::NOUNMAP, on)
    }

    /// Write zeroes fails with EOPNOTSUPP where it would not be quicker than writing zeroes. Ours:
    /// for servers that announced [`OpenRsp::fast_zero`](super::OpenRsp::fast_zero).
    #[must_use]
    pub const fn fast_only(self, on: bool) -> Self {
        self.with(Self::FAST_ONLY, on)
    }

    /// The operation.
    ///
    /// # Errors
    /// The byte of an unknown one. (The kernel's server would run it as a read.)
    pub const fn op(self) -> Result<RwOp, u8> {
        let code = (self.0 & Self::OP) as u8;
        match RwOp::from_wire(code) {
            Some(op) => Ok(op),
            None => Err(code),
        }
    }

    /// Somebody waits for it.
    pub const fn is_sync(self) -> bool {
        self.0 & Self::SYNC != 0
    }

    /// Durable when answered.
    pub const fn is_fua(self) -> bool {
        self.0 & Self::FUA != 0
    }

    /// Earlier writes are made durable first.
    pub const fn is_preflush(self) -> bool {
        self.0 & Self::PREFLUSH != 0
    }

    /// Write zeroes must leave the range allocated.
    pub const fn is_no_unmap(self) -> bool {
        self.0 & Self::NOUNMAP != 0
    }

    /// Write zeroes must be quicker than writing zeroes, or fail.
    pub const fn is_fast_only(self) -> bool {
        self.0 & Self::FAST_ONLY != 0
    }
}

message! {
    /// IO: RNBD's header of a read, write, flush, discard or write zeroes.
    #[derive(Default)]
    pub struct IoHeader[32] = "IO" {
        /// The device, as OPEN_RSP named it.
        4 device_id: u32,
        /// First sector, in units of 512 bytes. Meaningless in a flush.
        8 sector: u64,
        /// Operation and flags.
        16 rw: Rw,
        /// Bytes the IO covers.
        20 bi_size: u32,
        /// IO priority as Linux encodes it, 0 for none. Of a partial write the byte of `sector`
        /// where it begins.
        24 prio: u16,
    }
}

impl IoHeader {
    /// Bytes that a peer sends at least: version 1 has 24, a 32-bit version 2 has 28.
    pub const LEN_MIN: usize = 24;
    pub(super) const TYPE: u16 = 4;

    /// The message as it travels.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = self.store();
        put(&mut out, 0, Self::TYPE.to_le_bytes());
        out
    }

    /// Reads the message. The priority counts only in a full message of a session whose
    /// negotiated version `ver` is 2 or later; otherwise it is garbage and read as 0.
    ///
    /// # Errors
    /// Fewer than 24 bytes, wrong type.
    pub fn decode(bytes: &[u8], ver: u8) -> Result<Self, WireError> {
        let head: &[u8; Self::LEN_MIN] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, head, (Self::TYPE, "4 (IO)"))?;
        let mut full = [0; Self::LEN];
        match bytes.first_chunk() {
            Some(bytes) if ver >= RNBD_VERSION => full = *bytes,
            _ => put(&mut full, 0, *head),
        }
        Ok(Self::load(&full))
    }
}

message! {
    /// WRITE: RTRS's message of a request whose data, if any, lies in the chunk.
    #[derive(Default)]
    pub struct WriteMsg[4] = "WRITE", type 2 {
        /// Bytes of the user header, which ends where this message begins.
        2 usr_len: u16,
    }
}

/// READ: RTRS's message of a request whose answer goes to the client's memory. A flush travels as
/// a READ without descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadMsg {
    /// Bytes of the user header, which ends where this message begins.
    pub usr_len: u16,
    /// The server invalidates the descriptor's key with its answer, also with a failure.
    pub need_inval: bool,
    /// Where the server writes the result.
    pub desc: Option<SgDesc>,
}

impl ReadMsg {
    /// Bytes without a descriptor.
    pub const LEN_MIN: usize = 8;
    /// Bytes with one; there are never two.
    pub const LEN_MAX: usize = Self::LEN_MIN + SgDesc::LEN;
    const NAME: &str = "READ";
    const NEED_INVAL: u16 = 1;

    /// Bytes of this message.
    pub const fn encoded_len(&self) -> usize {
        if self.desc.is_some() { Self::LEN_MAX } else { Self::LEN_MIN }
    }

    /// Writes the message to the front of `out` and returns its length.
    ///
    /// # Panics
    /// When `out` is shorter than [`ReadMsg::encoded_len`]: the room is the caller's own.
    pub fn encode(&self, out: &mut [u8]) -> usize {
        let out = &mut out[..self.encoded_len()];
        put(out, 0, TYPE_READ.to_le_bytes());
        put(out, 2, self.usr_len.to_le_bytes());
        put(out, 4, if self.need_inval { Self::NEED_INVAL } else { 0 }.to_le_bytes());
        put(out, 6, u16::from(self.desc.is_some()).to_le_bytes());
        if let Some(desc) = self.desc {
            put(out, Self::LEN_MIN, desc.encode());
        }
        out.len()
    }

    /// Reads the message.
    ///
    /// # Errors
    /// Short message, wrong type, more than one descriptor.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let head: &[u8; Self::LEN_MIN] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, head, (TYPE_READ, "3 (READ)"))?;
        let desc = match u16_at(head, 6) {
            0 => None,
            1 => {
                let full: &[u8; Self::LEN_MAX] = fixed(Self::NAME, bytes)?;
                Some(SgDesc::decode(&take::<{ SgDesc::LEN }>(full, Self::LEN_MIN))?)
            }
            many => {
                return Err(WireError::value(Self::NAME, 6, "sg_cnt", u64::from(many), "0 or 1"));
            }
        };
        let need_inval = u16_at(head, 4) & Self::NEED_INVAL != 0;
        Ok(Self { usr_len: u16_at(head, 2), need_inval, desc })
    }

    /// The key to invalidate with the answer, if any. The flag without a descriptor means
    /// nothing.
    pub const fn invalidate(&self) -> Option<Rkey> {
        match self.desc {
            Some(desc) if self.need_inval => Some(desc.key),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_leave_the_operation_alone() {
        assert_eq!(Rw::FLUSH.sync().fua(true).0, 0x302);
        assert_eq!(Rw::FLUSH.sync().fua(true).preflush(true).0, 0x702);
        assert_eq!(Rw::WRITE.fua(true).fua(false), Rw::WRITE);
        let zeroes = Rw::WRITE_ZEROES.no_unmap(true);
        assert_eq!(zeroes.op(), Ok(RwOp::WriteZeroes));
        assert!(zeroes.is_no_unmap() && !zeroes.is_fua() && !zeroes.is_sync());
        assert_eq!(Rw(0xffff_ff06).op(), Err(6));
        assert_eq!(Rw(0xffff_ff00).op(), Ok(RwOp::Read));
    }

    #[test]
    fn short_headers_of_old_peers_are_taken_without_priority() {
        let header = IoHeader { device_id: 1, sector: 2, bi_size: 512, prio: 7, rw: Rw::WRITE };
        let bytes = header.encode();
        assert_eq!(IoHeader::decode(&bytes, 2), Ok(header));
        let bare = IoHeader { prio: 0, ..header };
        assert_eq!(IoHeader::decode(&bytes, 1), Ok(bare));
        assert_eq!(IoHeader::decode(&bytes[..28], 2), Ok(bare));
        assert_eq!(IoHeader::decode(&bytes[..24], 2), Ok(bare));
        assert_eq!(IoHeader::decode(&bytes[..23], 2).unwrap_err().at, 23);
    }

    #[test]
    fn a_read_has_one_descriptor_at_most() {
        let desc = Some(SgDesc { addr: u64::MAX, key: Rkey(9), len: 4096 });
        let msg = ReadMsg { usr_len: 32, need_inval: true, desc };
        let mut bytes = [0xff; 24];
        assert_eq!(msg.encode(&mut bytes), 24);
        assert_eq!(ReadMsg::decode(&bytes), Ok(msg));
        assert_eq!(msg.invalidate(), Some(Rkey(9)));
        assert_eq!(ReadMsg::decode(&bytes[..23]).unwrap_err().at, 23);
        bytes[6] = 2;
        assert_eq!(ReadMsg::decode(&bytes).unwrap_err().at, 6);
        bytes[6] = 0;
        let bare = ReadMsg::decode(&bytes[..8]).unwrap();
        assert_eq!((bare.need_inval, bare.desc, bare.invalidate()), (true, None, None));
        bytes[7] = 1;
        assert_eq!(ReadMsg::decode(&bytes).unwrap_err().at, 6, "sg_cnt has 16 bits");
    }
}
