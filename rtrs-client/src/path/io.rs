//! An IO as the bytes of one request, and an immediate as its answer.

use rtrs_core::block::{Geometry, IoFlags, IoOp};
use rtrs_core::fabric::RemoteMem;
use rtrs_core::ids::{PermitId, Rkey};
use rtrs_core::mem::MemSlice;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{Imm, IoHeader, MemBits, OpenRsp, ReadMsg, RkeyRsp, Rw, SgDesc, WriteMsg};

use crate::session::Granted;

/// Room for the header of one request: RNBD IO message (32) and the larger RTRS message (24).
pub(crate) const HEADER_SLOT: usize = 64;

/// One request, ready to be posted.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) permit: PermitId,
    pub(crate) device_id: u32,
    pub(crate) op: IoOp,
    pub(crate) flags: IoFlags,
    /// Bytes on the device.
    pub(crate) offset: u64,
    pub(crate) len: u32,
    pub(crate) buf: Option<MemSlice>,
}

/// Where the encoded header goes and what announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) header_len: usize,
    /// First byte of the chunk that is written.
    pub(crate) chunk_offset: u64,
    pub(crate) imm: u32,
}

impl Request {
    /// Encodes RNBD header and RTRS message. `target` is where the server writes a read's data.
    pub(crate) fn encode(
        &self,
        target: Option<RemoteMem>,
        granted: &Granted,
        bytes: &mut [u8; HEADER_SLOT],
    ) -> Layout {
        let rw = match self.op {
            IoOp::Read => Rw::READ.sync(),
            IoOp::Write if self.flags.fua => Rw::WRITE.sync().fua(true),
            IoOp::Write => Rw::WRITE,
            IoOp::Flush => Rw::FLUSH.sync().fua(true),
            IoOp::Discard => Rw::DISCARD.fua(self.flags.fua),
            IoOp::WriteZeroes => Rw::WRITE_ZEROES.fua(self.flags.fua).no_unmap(self.flags.no_unmap),
        };
        let header = IoHeader {
            device_id: self.device_id,
            // A flush has no place; the kernel's block layer says so with all ones.
            sector: if self.op == IoOp::Flush { u64::MAX } else { self.offset / 512 },
            rw,
            bi_size: self.len,
            prio: 0,
        };
        let user = header.encode();
        let usr_len = user.len();
        bytes[..usr_len].copy_from_slice(&user);
        let data_len = match self.op {
            IoOp::Read | IoOp::Write => self.len as usize,
            _ => 0,
        };
        // Block operation numbers decide the direction: odd ones travel as WRITE, even ones
        // (read, flush) as READ. WRITE_ZEROES is 5, DISCARD 3.
        let message_len = match self.op {
            IoOp::Read | IoOp::Flush => {
                let desc = target.map(|t| SgDesc { addr: t.addr, key: t.rkey, len: self.len });
                ReadMsg { usr_len: usr_len as u16, need_inval: false, desc }
                    .encode(&mut bytes[usr_len..])
            }
            _ => {
                let message = WriteMsg { usr_len: usr_len as u16 }.encode();
                bytes[usr_len..usr_len + message.len()].copy_from_slice(&message);
                message.len()
            }
        };
        let bits = MemBits::for_depth(granted.queue_depth);
        let imm = Imm::Request { permit: self.permit, offset: (data_len + usr_len) as u32 };
        Layout {
            header_len: usr_len + message_len,
            chunk_offset: if self.op == IoOp::Read { u64::from(self.len) } else { 0 },
            imm: imm.encode_with(bits),
        }
    }
}

/// What a completed receive said about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) permit: PermitId,
    pub(crate) status: IoStatus,
    /// As it came: positive, 0 for success.
    pub(crate) errno: u16,
    /// The chunk's new key, if one came along.
    pub(crate) rkey: Option<Rkey>,
}

impl Answer {
    /// Reads an immediate and the bytes that came with it, of which there may be none. `None`
    /// when it is no answer: unknown immediates are passed over, as kernels do.
    ///
    /// # Errors
    /// How the server broke the protocol.
    pub(crate) fn decode(imm: u32, bytes: &[u8]) -> Result<Option<Self>, String> {
        let Imm::Response { permit, errno, .. } = Imm::decode(imm) else {
            tracing::debug!("immediate {imm:#010x} is no answer");
            return Ok(None);
        };
        let rkey = if bytes.is_empty() {
            None
        } else {
            let fresh = RkeyRsp::decode(bytes).map_err(|e| e.to_string())?;
            fresh.check(permit).map_err(|e| e.to_string())?;
            Some(fresh.rkey)
        };
        Ok(Some(Self { permit, status: IoStatus::from_errno(errno), errno, rkey }))
    }
}

/// What a completion's `wr_id` says: kind in the high half, number in the low half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WrId {
    Receive(u32),
    Request,
    Bind(PermitId),
    Revoke(PermitId),
    Other(u64),
}

impl WrId {
    pub(crate) const fn encode(self) -> u64 {
        match self {
            Self::Receive(slot) => 1 << 32 | slot as u64,
            Self::Request => 2 << 32,
            Self::Bind(permit) => 3 << 32 | permit.0 as u64,
            Self::Revoke(permit) => 4 << 32 | permit.0 as u64,
            Self::Other(raw) => raw,
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "two parts of one number")]
    pub(crate) const fn decode(raw: u64) -> Self {
        match raw >> 32 {
            1 => Self::Receive(raw as u32),
            2 => Self::Request,
            3 => Self::Bind(PermitId(raw as u16)),
            4 => Self::Revoke(PermitId(raw as u16)),
            _ => Self::Other(raw),
        }
    }
}

/// The device as OPEN_RSP describes it.
///
/// # Errors
/// What cannot be worked with.
pub(crate) fn geometry_of(rsp: &OpenRsp) -> Result<Geometry, String> {
    let logical = u32::from(rsp.logical_block_size);
    if !logical.is_power_of_two() || !(512..=32768).contains(&logical) {
        return Err(format!("the server's block size is {logical}"));
    }
    let size = rsp
        .nsectors
        .checked_mul(512)
        .ok_or_else(|| format!("the server's device has {} sectors", rsp.nsectors))?;
    let bytes = |sectors: u32| sectors.saturating_mul(512) / logical * logical;
    let discard_max = bytes(rsp.max_discard_sectors);
    let zeroes_max = bytes(rsp.max_write_zeroes_sectors);
    let both = [discard_max, zeroes_max].into_iter().filter(|max| *max > 0).min();
    Ok(Geometry {
        size: size / u64::from(logical) * u64::from(logical),
        logical_block: logical,
        physical_block: u32::from(rsp.physical_block_size).max(logical).next_power_of_two(),
        // The session splits; a submitter need not know the server's limit.
        io_max: 32 << 20,
        discard_max: both.unwrap_or(logical),
        read_only: false,
        write_cache: rsp.write_cache,
        fua: rsp.fua,
        discard: discard_max > 0,
        discard_granularity: rsp.discard_granularity,
        discard_alignment: rsp.discard_alignment,
        secure_discard: rsp.secure_discard != 0,
        write_zeroes: zeroes_max > 0,
        fast_zero: zeroes_max > 0,
        rotational: rsp.rotational,
    })
}
