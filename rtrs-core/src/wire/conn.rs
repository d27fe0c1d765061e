//! CON_REQ and CON_RSP: the private data of connect, accept and reject, 56 bytes each.
//!
//! Decoding makes every check that the kernel makes on the bytes alone (rtrs-srv.c,
//! rtrs_rdma_connect; rtrs-clt.c, rtrs_rdma_conn_established); a server refuses an invalid CON_REQ
//! with ECONNRESET. Input may be longer than 56 bytes, since CM pads it. Sessions make the checks
//! that need state (UUIDs, queue depth across reconnects).

use super::bytes::{fixed, put, u16_at};
use super::errno;
use super::error::{Fault, WireError};
use super::version::VERSION;
use crate::ids::{ConnIndex, PathUuid, SessionId};
use crate::limits::{CONNS_PER_PATH_MAX, IMM_PAYLOAD_BITS, Limits, MAX_HDR_SIZE, ceil_log2};

/// Magic number at the start of both messages.
const MAGIC: u16 = 0x1bbd;

fn put_magic(out: &mut [u8], at: usize) {
    put(out, at, MAGIC.to_le_bytes());
    put(out, at + 2, VERSION.to_le_bytes());
}

fn check_magic(message: &'static str, bytes: &[u8], at: usize) -> Result<(), WireError> {
    let magic = u16_at(bytes, at);
    if magic != MAGIC {
        return Err(WireError::value(message, at, "magic", u64::from(magic), "0x1bbd"));
    }
    let version = u16_at(bytes, at + 2);
    if version >> 8 != VERSION >> 8 {
        let found = u64::from(version);
        return Err(WireError::value(message, at + 2, "version", found, "major version 2"));
    }
    Ok(())
}

message! {
    /// CON_REQ: private data of each connection request.
    #[derive(Default)]
    pub struct ConnReq[56] = "CON_REQ" {
        /// Index of this connection, below `cid_num`. 0 is the service connection.
        6 cid: ConnIndex,
        /// Number of connections on this path, including the service connection; 1 to 4096.
        8 cid_num: u16,
        /// Number of connects of this path so far, including this one. Kernels do not check it.
        10 recon_cnt: u16,
        /// UUID of the path; stable across reconnects.
        12 path_uuid: PathUuid,
        /// ID of the session; the same on all its paths.
        28 session_id: SessionId,
        /// The server may create the session.
        44 & 1 first_conn: bool,
        /// Room for extensions ([`ClientExtensions`](super::ClientExtensions)). Kernels send zero
        /// and ignore it.
        45 ext: [u8; 11],
    }
}

impl ConnReq {
    /// Encodes the message.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = self.store();
        put_magic(&mut out, 2);
        out
    }

    /// Decodes and validates the private data of a connect.
    ///
    /// # Errors
    /// If the data is too short, or the magic number, major version, connection count or connection
    /// number is invalid.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; Self::LEN] = fixed(Self::NAME, bytes)?;
        check_magic(Self::NAME, bytes, 2)?;
        let request = Self::load(bytes);
        let (cid, cid_num) = (request.cid.0, request.cid_num);
        if cid_num == 0 || cid_num > CONNS_PER_PATH_MAX {
            let found = u64::from(cid_num);
            return Err(WireError::value(Self::NAME, 8, "cid_num", found, "1 to 4096"));
        }
        if cid >= cid_num {
            let (found, bound) = (u64::from(cid), u64::from(cid_num));
            let fault = Fault::Mismatch { field: "cid", found, against: "cid_num", bound };
            return Err(WireError { message: Self::NAME, at: 6, fault });
        }
        Ok(request)
    }
}

message! {
    /// CON_RSP: private data of an accept or a reject.
    ///
    /// Bounds and flags are valid only on connection 0.
    pub struct ConnRsp[56] = "CON_RSP" {
        /// 0 in an accept, a negative errno in a reject.
        4 errno: i16,
        /// Number of chunks of the session; stable across reconnects.
        6 queue_depth: u16,
        /// Maximum user data of a request, in bytes.
        8 max_io_size: u32,
        /// Room for the user header and the RTRS message, in bytes.
        12 max_hdr_size: u32,
        /// Each answer is a SEND_WITH_IMM that carries a new key (`always_invalidate`).
        16 & 2 new_rkey: bool,
        /// Room for extensions ([`Extensions`](super::Extensions)). Kernels send zero and ignore
        /// it.
        20 ext: [u8; 36],
    }
}

impl Default for ConnRsp {
    fn default() -> Self {
        Self::load(&[0; Self::LEN])
    }
}

impl ConnRsp {
    /// Creates an accept with these limits.
    pub fn accept(limits: Limits, new_rkey: bool) -> Self {
        Self {
            queue_depth: limits.queue_depth(),
            max_io_size: limits.max_io_size(),
            max_hdr_size: MAX_HDR_SIZE,
            new_rkey,
            ..Self::default()
        }
    }

    /// Creates a reject with this positive errno. 0 becomes ECONNRESET, because the kernel's client
    /// ignores a reject without an error and waits for its 30 s timeout to expire.
    pub fn reject(errno: u16) -> Self {
        let errno = match errno::fit(i32::from(errno)) {
            0 => errno::ECONNRESET,
            errno => errno,
        };
        Self { errno: -errno.cast_signed(), ..Self::default() }
    }

    /// Encodes the message.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = self.store();
        put_magic(&mut out, 0);
        out
    }

    /// Decodes the private data of an accept or a reject. The limits are validated by
    /// [`ConnRsp::chunk_size`], since only connection 0 has them.
    ///
    /// # Errors
    /// If the data is too short, or the magic number or major version is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; Self::LEN] = fixed(Self::NAME, bytes)?;
        check_magic(Self::NAME, bytes, 0)?;
        Ok(Self::load(bytes))
    }

    /// Returns the chunk size in bytes: data and space for headers together. Validates the limits
    /// of an accept: a depth, space for a header, and the 28-bit rule. The sum need not be a power
    /// of two.
    ///
    /// # Errors
    /// If a limit is not usable; the error names it.
    pub fn chunk_size(&self) -> Result<u32, WireError> {
        if self.queue_depth == 0 {
            return Err(WireError::value(Self::NAME, 6, "queue_depth", 0, "1 to 65535"));
        }
        let wrong_io = |expected| {
            WireError::value(Self::NAME, 8, "max_io_size", u64::from(self.max_io_size), expected)
        };
        if self.max_io_size < 512 {
            return Err(wrong_io("at least one sector"));
        }
        if self.max_hdr_size < 512 {
            let found = u64::from(self.max_hdr_size);
            return Err(WireError::value(Self::NAME, 12, "max_hdr_size", found, "at least 512"));
        }
        let sum = self.max_io_size.checked_add(self.max_hdr_size);
        let chunk_size = sum.ok_or_else(|| wrong_io("less than 4 GiB with max_hdr_size"))?;
        let bits = ceil_log2(u32::from(self.queue_depth)) + ceil_log2(chunk_size);
        if bits > IMM_PAYLOAD_BITS {
            return Err(wrong_io("chunk and depth within 28 bits"));
        }
        Ok(chunk_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> ConnReq {
        ConnReq { cid: ConnIndex(1), cid_num: 5, recon_cnt: 1, ..ConnReq::default() }
    }

    #[test]
    fn a_connect_is_validated_field_by_field() {
        let good = request().encode();
        let fault = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            ConnReq::decode(&bytes).map_err(|e| e.at)
        };
        assert_eq!(fault(2, 0xbc), Err(2));
        assert_eq!(fault(5, 1), Err(4), "major version");
        assert!(fault(4, 9).is_ok(), "minor version");
        assert_eq!(fault(8, 0), Err(8), "no connections");
        assert_eq!(fault(9, 0x11), Err(8), "too many connections");
        assert_eq!(fault(6, 5), Err(6), "cid at cid_num");
        assert_eq!(fault(0, 0xff), Ok(request()), "CMA bytes are not ours");
        assert_eq!(ConnReq::decode(&good[..55]).map_err(|e| e.at), Err(55));
        let mut padded = [0xee; 92];
        padded[..56].copy_from_slice(&good);
        assert_eq!(ConnReq::decode(&padded), Ok(request()));
    }

    #[test]
    fn a_reject_always_has_an_error() {
        assert_eq!(ConnRsp::reject(104).errno, -104);
        assert_eq!(ConnRsp::reject(0).errno, -104);
        assert_eq!(ConnRsp::reject(524).errno, -95);
        assert_eq!(ConnRsp::reject(u16::MAX).errno, -5);
        assert_eq!(ConnRsp::reject(6).encode()[4..6], [0xfa, 0xff]);
    }

    #[test]
    fn the_limits_in_an_accept_are_validated() {
        let good = ConnRsp::accept(Limits::DEFAULT, true);
        assert_eq!(good.chunk_size(), Ok(131_072));
        let fault = |change: fn(&mut ConnRsp)| {
            let mut rsp = good;
            change(&mut rsp);
            rsp.chunk_size().map_err(|e| e.at)
        };
        assert_eq!(fault(|r| r.queue_depth = 0), Err(6));
        assert_eq!(fault(|r| r.max_io_size = 511), Err(8));
        assert_eq!(fault(|r| r.max_hdr_size = 0), Err(12));
        assert_eq!(fault(|r| r.max_io_size = u32::MAX), Err(8));
        assert_eq!(fault(|r| r.max_io_size = 1 << 19), Err(8), "one bit too many");
        assert_eq!(fault(|r| r.max_io_size = (1 << 19) - 4096), Ok(1 << 19));
    }
}
