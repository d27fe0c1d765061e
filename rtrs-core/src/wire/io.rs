//! The two messages of every IO: RNBD's header, followed by RTRS's READ or WRITE.
//!
//! Both messages are in a chunk; `chunk.rs` places and locates them. They are the most frequent
//! messages, so they are plain values at constant offsets, without allocation.
//! [`super::ChunkRequest`] validates the combination of header and RTRS message.

use super::bytes::{Field, expect_type, fixed, put, take, u16_at};
use super::error::WireError;
use super::info::SgDesc;
use super::version::RNBD_VERSION;
use crate::ids::Rkey;

pub(super) const TYPE_READ: u16 = 3;

codes! {
    /// Operation of an IO, with RNBD's number.
    pub enum RwOp {
        /// Reads `bi_size` bytes.
        Read = 0,
        /// Writes `bi_size` bytes.
        Write = 1,
        /// Makes completed writes durable. The sector is all ones and has no meaning.
        Flush = 2,
        /// Discards `bi_size` bytes.
        Discard = 3,
        /// Erases `bi_size` bytes irrecoverably.
        SecureErase = 4,
        /// Writes `bi_size` zero bytes (Linux 6.8 and later).
        WriteZeroes = 5,
        /// Reports the holes in `bi_size` bytes. An extension: its number is far from the kernel's,
        /// and even, as for operations with data in the answer.
        Extents = 128,
        /// Writes `bi_size` bytes of one block and preserves the others. An extension: its number
        /// is odd, as for operations with data. `prio` is the first byte within the sector.
        PartialWrite = 129,
    }
}

/// The `rw` field: the operation in the low eight bits, flags above. Unknown flags are kept and
/// ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rw(pub u32);

impl Field for Rw {
    fn load(bytes: &[u8], at: usize) -> Self {
        Self(Field::load(bytes, at))
    }
    fn store(&self, out: &mut [u8], at: usize) {
        self.0.store(out, at);
    }
}

impl Rw {
    /// Read without flags; the kernel's client always adds [`Rw::sync`].
    pub const READ: Self = Self(0);
    /// Write without flags.
    pub const WRITE: Self = Self(1);
    /// Flush without flags; kernels send it as 0x302, and as 0x702 since Linux 7.0.
    pub const FLUSH: Self = Self(2);
    /// Discard.
    pub const DISCARD: Self = Self(3);
    /// Secure erase.
    pub const SECURE_ERASE: Self = Self(4);
    /// Write zeroes. Only for servers that announced a limit for it.
    pub const WRITE_ZEROES: Self = Self(5);
    /// Extents. An extension, for servers that announced
    /// [`OpenRsp::extents`](super::OpenRsp::extents).
    pub const EXTENTS: Self = Self(128);

    /// Partial write. An extension, for servers that announced
    /// [`OpenRsp::partial_writes`](super::OpenRsp::partial_writes).
    pub const PARTIAL_WRITE: Self = Self(129);

    const OP: u32 = 0xff;
    const SYNC: u32 = 0x100;
    const FUA: u32 = 0x200;
    const PREFLUSH: u32 = 0x400;
    const NOUNMAP: u32 = 0x800;
    /// Extension flag, far from the kernel's flags.
    const FAST_ONLY: u32 = 0x8000_0000;

    const fn with(self, flag: u32, on: bool) -> Self {
        if on { Self(self.0 | flag) } else { Self(self.0 & !flag) }
    }

    /// Marks the IO as synchronous: its submitter waits for it.
    #[must_use]
    pub const fn sync(self) -> Self {
        self.with(Self::SYNC, true)
    }

    /// Sets whether the write must be durable when it is answered.
    #[must_use]
    pub const fn fua(self, on: bool) -> Self {
        self.with(Self::FUA, on)
    }

    /// Sets whether earlier writes are made durable first (Linux 7.0).
    #[must_use]
    pub const fn preflush(self, on: bool) -> Self {
        self.with(Self::PREFLUSH, on)
    }

    /// Sets whether write zeroes must leave the range allocated (Linux 7.0).
    #[must_use]
    pub const fn no_unmap(self, on: bool) -> Self {
        self.with(Self::NOUNMAP, on)
    }

    /// Sets whether write zeroes must fail with EOPNOTSUPP unless it is faster than writing zeroes
    /// as data. An extension, for servers that announced
    /// [`OpenRsp::fast_zero`](super::OpenRsp::fast_zero).
    #[must_use]
    pub const fn fast_only(self, on: bool) -> Self {
        self.with(Self::FAST_ONLY, on)
    }

    /// Returns the operation.
    ///
    /// # Errors
    /// Returns the code of an unknown operation. (The kernel's server would run it as a read.)
    pub const fn op(self) -> Result<RwOp, u8> {
        let code = (self.0 & Self::OP) as u8;
        match RwOp::from_wire(code) {
            Some(op) => Ok(op),
            None => Err(code),
        }
    }

    /// Returns true if the submitter waits for the IO.
    pub const fn is_sync(self) -> bool {
        self.0 & Self::SYNC != 0
    }

    /// Returns true if the write must be durable when it is answered.
    pub const fn is_fua(self) -> bool {
        self.0 & Self::FUA != 0
    }

    /// Returns true if earlier writes are made durable first.
    pub const fn is_preflush(self) -> bool {
        self.0 & Self::PREFLUSH != 0
    }

    /// Returns true if write zeroes must leave the range allocated.
    pub const fn is_no_unmap(self) -> bool {
        self.0 & Self::NOUNMAP != 0
    }

    /// Returns true if write zeroes must be faster than writing zeroes as data, or fail.
    pub const fn is_fast_only(self) -> bool {
        self.0 & Self::FAST_ONLY != 0
    }
}

message! {
    /// IO: RNBD's header for a read, write, flush, discard or write zeroes.
    #[derive(Default)]
    pub struct IoHeader[32] = "IO" {
        /// Number of the device, from OPEN_RSP.
        4 device_id: u32,
        /// First sector, in units of 512 bytes. Meaningless in a flush.
        8 sector: u64,
        /// Operation and flags.
        16 rw: Rw,
        /// Length of the IO in bytes.
        20 bi_size: u32,
        /// IO priority in Linux's encoding, 0 for none. In a partial write, the byte of `sector` at
        /// which it begins.
        24 prio: u16,
    }
}

impl IoHeader {
    /// Minimum number of bytes that a peer sends: version 1 sends 24, a 32-bit version 2 sends 28.
    pub const LEN_MIN: usize = 24;
    pub(super) const TYPE: u16 = 4;

    /// Encodes the message.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = self.store();
        put(&mut out, 0, Self::TYPE.to_le_bytes());
        out
    }

    /// Decodes the message. The priority is valid only in a full message of a session whose
    /// negotiated version `ver` is 2 or later; otherwise it is garbage and decoded as 0.
    ///
    /// # Errors
    /// Fails if there are fewer than 24 bytes or the type is wrong.
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
    /// WRITE: RTRS's message for a request whose data, if any, is in the chunk.
    #[derive(Default)]
    pub struct WriteMsg[4] = "WRITE", type 2 {
        /// Length of the user header, which ends where this message begins.
        2 usr_len: u16,
    }
}

/// READ: RTRS's message for a request whose answer is written to the client's memory. A flush is
/// sent as a READ without a descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadMsg {
    /// Length of the user header, which ends where this message begins.
    pub usr_len: u16,
    /// The server invalidates the descriptor's key with its answer, even if the request fails.
    pub need_inval: bool,
    /// Memory to which the server writes the result.
    pub desc: Option<SgDesc>,
}

impl ReadMsg {
    /// Length without a descriptor.
    pub const LEN_MIN: usize = 8;
    /// Length with a descriptor; there are never two.
    pub const LEN_MAX: usize = Self::LEN_MIN + SgDesc::LEN;
    const NAME: &str = "READ";
    const NEED_INVAL: u16 = 1;

    /// Returns the length of this message.
    pub const fn encoded_len(&self) -> usize {
        if self.desc.is_some() { Self::LEN_MAX } else { Self::LEN_MIN }
    }

    /// Writes the message to the start of `out` and returns its length.
    ///
    /// # Panics
    /// Panics if `out` is shorter than [`ReadMsg::encoded_len`], which is a bug in the caller.
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

    /// Decodes the message.
    ///
    /// # Errors
    /// Fails for a short message, a wrong type, or more than one descriptor.
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

    /// Returns the key to invalidate with the answer, if any. The flag has no meaning without a
    /// descriptor.
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
    fn flags_do_not_change_the_operation() {
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
    fn short_headers_of_old_peers_are_accepted_without_priority() {
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
    fn a_read_has_at_most_one_descriptor() {
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
