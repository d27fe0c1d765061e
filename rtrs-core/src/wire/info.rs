//! INFO_REQ and INFO_RSP: the introduction of a path on its service connection.
//!
//! The client names its session; the server answers with the descriptors of its chunks: one for all
//! chunks, or up to one per chunk. [`InfoRsp::chunks`] expands them to a table with one entry per
//! permit, and performs every check that the kernel's client makes (rtrs-clt.c, process_info_rsp).
//! This runs once per connect and may allocate.

use std::ops::Range;

use super::bytes::{expect_type, fixed, put, u16_at, u32_at};
use super::errno;
use super::error::{Fault, WireError};
use super::name::Name;
use crate::ids::Rkey;
use crate::limits::{IMM_PAYLOAD_BITS, ceil_log2};

/// INFO_REQ, the client's first message on connection 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InfoReq {
    /// Name of the session. Servers refuse '/' and '.' in it: [`Name::check_session_name`].
    pub session_name: Name,
}

impl InfoReq {
    /// Length of the message in bytes.
    pub const LEN: usize = 272;
    /// Space for extensions: zero, and ignored by kernels.
    pub const EXT: Range<usize> = 257..272;
    const NAME: &str = "INFO_REQ";
    const TYPE: u16 = 0;

    /// Encodes the message.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, Self::TYPE.to_le_bytes());
        put(&mut out, 2, *self.session_name.field());
        out
    }

    /// Decodes the message. The name is not yet validated as a session name.
    ///
    /// # Errors
    /// Fails for a short message, a wrong type or an unterminated name.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; Self::LEN] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, bytes, (Self::TYPE, "0 (INFO_REQ)"))?;
        Ok(Self { session_name: Name::from_field(Self::NAME, bytes, 2)? })
    }
}

message! {
    /// sg_desc: memory of the sender that the peer may write.
    #[derive(Default)]
    pub struct SgDesc[16] = "sg_desc" {
        /// Address at which the peer accesses the first byte; opaque.
        0 addr: u64,
        /// Key of the memory.
        8 key: Rkey,
        /// Length in bytes.
        12 len: u32,
    }
}

impl SgDesc {
    /// Encodes the descriptor.
    pub fn encode(&self) -> [u8; Self::LEN] {
        self.store()
    }

    /// Decodes a descriptor; any 16 bytes are valid.
    ///
    /// # Errors
    /// Fails if there are fewer than 16 bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        Ok(Self::load(fixed(Self::NAME, bytes)?))
    }
}

/// INFO_RSP, the server's first message on connection 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InfoRsp {
    /// Descriptors of the chunks, ordered by chunk number.
    pub descs: Vec<SgDesc>,
}

impl InfoRsp {
    /// Number of bytes before the descriptors.
    pub const HEAD_LEN: usize = 8;
    /// Errno of a refusal ([`InfoRsp::refusal`]); otherwise zero, and ignored by kernels.
    pub const EXT: Range<usize> = 4..8;
    const NAME: &str = "INFO_RSP";
    const TYPE: u16 = 1;

    /// Returns the length of a message with that many descriptors. A client posts a receive of
    /// `len_for(queue_depth)`.
    pub const fn len_for(descs: usize) -> usize {
        Self::HEAD_LEN + SgDesc::LEN * descs
    }

    /// Returns the length of this message.
    pub const fn encoded_len(&self) -> usize {
        Self::len_for(self.descs.len())
    }

    /// Writes the message to the start of `out` and returns its length.
    ///
    /// # Panics
    /// Panics if `out` is shorter than [`InfoRsp::encoded_len`], or if there are more than 65535
    /// descriptors: the caller controls both.
    pub fn encode(&self, out: &mut [u8]) -> usize {
        let count = u16::try_from(self.descs.len()).expect("at most one descriptor per chunk");
        let (head, tail) = out[..self.encoded_len()].split_at_mut(Self::HEAD_LEN);
        put(head, 0, Self::TYPE.to_le_bytes());
        put(head, 2, count.to_le_bytes());
        put(head, 4, [0; 4]);
        for (desc, at) in self.descs.iter().zip(tail.chunks_exact_mut(SgDesc::LEN)) {
            put(at, 0, desc.encode());
        }
        self.encoded_len()
    }

    /// Returns the message that refuses INFO_REQ with this positive errno: no descriptors. Only for
    /// clients that support it
    /// ([`ClientExtensions::info_refusals`](super::ClientExtensions::info_refusals)). 0 becomes
    /// ECONNRESET.
    pub fn refusal(errno: u16) -> [u8; Self::HEAD_LEN] {
        let errno = match errno::fit(i32::from(errno)) {
            0 => errno::ECONNRESET,
            errno => errno,
        };
        let mut out = [0; Self::HEAD_LEN];
        put(&mut out, 0, Self::TYPE.to_le_bytes());
        put(&mut out, Self::EXT.start, u32::from(errno).to_le_bytes());
        out
    }

    /// Returns the errno of a refusal; None for any other message.
    pub fn refused(bytes: &[u8]) -> Option<u16> {
        let head: &[u8; Self::HEAD_LEN] = fixed(Self::NAME, bytes).ok()?;
        let errno = u16::try_from(u32_at(head, Self::EXT.start)).ok()?;
        let refuses = u16_at(head, 0) == Self::TYPE && u16_at(head, 2) == 0;
        (refuses && (1..errno::ERRNO_END).contains(&errno)).then_some(errno)
    }

    /// Decodes the message. Its descriptors are validated by [`InfoRsp::chunks`].
    ///
    /// # Errors
    /// Fails for a short message, a wrong type or no descriptor.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let head: &[u8; Self::HEAD_LEN] = fixed(Self::NAME, bytes)?;
        expect_type(Self::NAME, head, (Self::TYPE, "1 (INFO_RSP)"))?;
        let count = usize::from(u16_at(head, 2));
        if count == 0 {
            return Err(WireError::value(Self::NAME, 2, "sg_cnt", 0, "at least 1"));
        }
        let need = Self::len_for(count);
        let Some(body) = bytes.get(Self::HEAD_LEN..need) else {
            return Err(WireError::short(Self::NAME, need, bytes.len()));
        };
        let descs = body.chunks_exact(SgDesc::LEN).map(SgDesc::decode);
        Ok(Self { descs: descs.collect::<Result<_, _>>()? })
    }

    /// Returns the chunks, one entry per permit, each `chunk_size` bytes long.
    ///
    /// # Errors
    /// Fails if the count does not divide the depth; a length is zero or not a multiple of the
    /// chunk size; the chunks are not covered exactly; the pool exceeds 32 bits; the descriptor
    /// count and chunk size violate the 28-bit rule; or an address overflows.
    pub fn chunks(&self, queue_depth: u16, chunk_size: u32) -> Result<Vec<SgDesc>, WireError> {
        let depth = usize::from(queue_depth);
        let count = self.descs.len();
        let mismatch = |at, field, found: u64, against, bound: u64| {
            let fault = Fault::Mismatch { field, found, against, bound };
            WireError { message: Self::NAME, at, fault }
        };
        if count == 0 || !depth.is_multiple_of(count) || depth == 0 {
            return Err(mismatch(2, "sg_cnt", count as u64, "queue depth", depth as u64));
        }
        // At most 65535, because it divides the depth.
        #[allow(clippy::cast_possible_truncation, reason = "at most 65535")]
        let bits = ceil_log2(count as u32) + ceil_log2(chunk_size);
        let pool = u32::from(queue_depth).checked_mul(chunk_size);
        let (Some(pool), true) = (pool, chunk_size > 0 && bits <= IMM_PAYLOAD_BITS) else {
            return Err(mismatch(2, "sg_cnt", count as u64, "chunk size", chunk_size.into()));
        };
        let mut table = Vec::with_capacity(depth);
        for (index, desc) in self.descs.iter().enumerate() {
            let at = Self::len_for(index);
            let len_at = at + 12;
            if desc.len == 0 || !desc.len.is_multiple_of(chunk_size) {
                let len = u64::from(desc.len);
                return Err(mismatch(len_at, "len", len, "chunk size", chunk_size.into()));
            }
            let chunks = (desc.len / chunk_size) as usize;
            if chunks > depth - table.len() {
                let len = u64::from(desc.len);
                return Err(mismatch(len_at, "len", len, "pool size", pool.into()));
            }
            if desc.addr.checked_add(u64::from(desc.len) - 1).is_none() {
                let len = u64::from(desc.len);
                return Err(mismatch(at, "addr", desc.addr, "its length", len));
            }
            let addrs = (desc.addr..=u64::MAX).step_by(chunk_size as usize).take(chunks);
            table.extend(addrs.map(|addr| SgDesc { addr, key: desc.key, len: chunk_size }));
        }
        if table.len() != depth {
            let (have, depth) = (table.len() as u64, depth as u64);
            return Err(mismatch(2, "chunks described", have, "queue depth", depth));
        }
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_an_errno_and_no_descriptors() {
        let bytes = InfoRsp::refusal(17);
        assert_eq!(bytes, [1, 0, 0, 0, 17, 0, 0, 0]);
        assert_eq!(InfoRsp::refused(&bytes), Some(17));
        assert!(InfoRsp::decode(&bytes).is_err(), "a client without the extension ends the path");
        assert_eq!(InfoRsp::refused(&InfoRsp::refusal(0)), Some(errno::ECONNRESET));
        assert_eq!(InfoRsp::refused(&InfoRsp::refusal(524)), Some(errno::EOPNOTSUPP));
        for (at, byte) in [(0, 0), (2, 1), (4, 0), (5, 2), (7, 1)] {
            let mut other = bytes;
            other[at] = byte;
            assert_eq!(InfoRsp::refused(&other), None, "byte {at}");
        }
        assert_eq!(InfoRsp::refused(&bytes[..7]), None);
    }

    fn desc(addr: u64, key: u32, len: u32) -> SgDesc {
        SgDesc { addr, key: Rkey(key), len }
    }

    #[test]
    fn one_descriptor_covers_all_chunks() {
        let rsp = InfoRsp { descs: vec![desc(0x1000, 7, 4 * 8192)] };
        let table = rsp.chunks(4, 8192).unwrap();
        assert_eq!(table.len(), 4);
        assert_eq!(table[3], desc(0x1000 + 3 * 8192, 7, 8192));
    }

    #[test]
    fn each_chunk_may_have_a_descriptor() {
        let descs: Vec<_> = (0..512).map(|i| desc(u64::from(i) << 32, i, 131_072)).collect();
        let table = InfoRsp { descs: descs.clone() }.chunks(512, 131_072).unwrap();
        assert_eq!(table, descs);
    }

    #[test]
    fn a_pool_may_end_with_the_address_space() {
        let rsp = InfoRsp { descs: vec![desc(u64::MAX - 16383, 1, 16384)] };
        assert_eq!(rsp.chunks(2, 8192).unwrap()[1].addr, u64::MAX - 8191);
        let rsp = InfoRsp { descs: vec![desc(u64::MAX - 16382, 1, 16384)] };
        assert_eq!(rsp.chunks(2, 8192).unwrap_err().at, 8);
    }

    #[test]
    fn invalid_tables_are_refused() {
        let fault = |descs: &[SgDesc], depth, chunk| {
            InfoRsp { descs: descs.to_vec() }.chunks(depth, chunk).map_err(|e| e.at)
        };
        let one = desc(0, 1, 8192);
        assert_eq!(fault(&[], 1, 8192), Err(2), "no descriptor");
        assert_eq!(fault(&[one; 3], 4, 8192), Err(2), "3 does not divide 4");
        assert_eq!(fault(&[one], 0, 8192), Err(2), "no depth");
        assert_eq!(fault(&[one], 1, 0), Err(2), "no chunk size");
        assert_eq!(fault(&[desc(0, 1, 0)], 1, 8192), Err(20), "empty");
        assert_eq!(fault(&[desc(0, 1, 8193)], 1, 8192), Err(20), "not a multiple");
        assert_eq!(fault(&[one], 2, 8192), Err(2), "one chunk is missing");
        assert_eq!(fault(&[desc(0, 1, 3 * 8192)], 2, 8192), Err(20), "one too many");
        let uneven = [desc(0, 1, 4 * 8192), one];
        assert_eq!(fault(&uneven, 4, 8192), Err(36), "covered before the last descriptor");
        assert_eq!(fault(&[one; 2], 2, 1 << 28), Err(2), "28-bit rule");
        assert_eq!(fault(&[desc(0, 1, 1 << 27)], 64, 1 << 27), Err(2), "pool of 8 GiB");
        assert_eq!(fault(&[desc(0, 1, u32::MAX)], u16::MAX, 1), Err(20), "no huge table");
    }

    #[test]
    fn a_truncated_table_is_refused() {
        let mut bytes = [0; 40];
        let len = InfoRsp { descs: vec![desc(1, 2, 3); 2] }.encode(&mut bytes);
        assert_eq!(len, 40);
        assert_eq!(InfoRsp::decode(&bytes[..39]).unwrap_err().at, 39);
        bytes[2] = 0;
        assert_eq!(InfoRsp::decode(&bytes).unwrap_err().at, 2);
        bytes[0] = 9;
        assert_eq!(InfoRsp::decode(&bytes).unwrap_err().at, 0);
    }
}
