//! Encoding of an IO as the bytes of one request, and decoding of an immediate as its answer.

use rtrs_core::block::{Geometry, IoFlags, IoOp};
use rtrs_core::fabric::RemoteMem;
use rtrs_core::ids::{PathId, PermitId, Rkey};
use rtrs_core::limits::SECTOR_SIZE;
use rtrs_core::mem::MemSlice;
use rtrs_core::status::IoStatus;
use rtrs_core::wire::{
    Imm, IoHeader, MemBits, OpenRsp, ReadMsg, RkeyRsp, Rw, SgDesc, TimedRkeyRsp, WriteMsg,
};

use super::fault::ConnectionFault;
use crate::engine::device_table::ZEROES_LEN;
use crate::engine::session::Granted;
use crate::parts::ServerTimes;

/// Room for the header of one request: RNBD IO message (32) and the larger RTRS message (24).
pub(crate) const HEADER_SLOT: usize = 64;

/// Request that is ready to be posted.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) permit: PermitId,
    pub(crate) device_id: u32,
    pub(crate) op: IoOp,
    pub(crate) flags: IoFlags,
    /// Offset on the device in bytes.
    pub(crate) offset: u64,
    pub(crate) len: u32,
    pub(crate) buf: Option<MemSlice>,
}

/// Placement of the encoded header, and the immediate that announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) header_len: usize,
    /// Offset of the first byte of the chunk that is written.
    pub(crate) chunk_offset: u64,
    pub(crate) imm: u32,
}

impl Request {
    /// Encodes the RNBD header and the RTRS message. The server writes a read's data to `target`.
    pub(crate) fn encode(
        &self,
        target: Option<RemoteMem>,
        granted: &Granted,
        bytes: &mut [u8; HEADER_SLOT],
    ) -> Layout {
        let rw = match self.op {
            IoOp::Read => Rw::READ.sync(),
            IoOp::Write if self.flags.partial => Rw::PARTIAL_WRITE.fua(self.flags.fua),
            IoOp::Write if self.flags.fua => Rw::WRITE.sync().fua(!rtrs_core::mutated!(FuaUnasked)),
            IoOp::Write => Rw::WRITE,
            IoOp::Flush => Rw::FLUSH.sync().fua(true),
            IoOp::Discard => Rw::DISCARD.fua(self.flags.fua),
            IoOp::WriteZeroes => Rw::WRITE_ZEROES
                .fua(self.flags.fua)
                .no_unmap(self.flags.no_unmap)
                .fast_only(self.flags.fast_only),
            IoOp::Extents => Rw::EXTENTS,
        };
        let header = IoHeader {
            device_id: self.device_id,
            // A flush has no position, which the kernel's block layer encodes as all ones.
            sector: if self.op == IoOp::Flush { u64::MAX } else { self.offset / 512 },
            rw,
            bi_size: self.len,
            prio: if self.flags.partial { (self.offset % 512) as u16 } else { 0 },
        };
        let user = header.encode();
        let usr_len = user.len();
        bytes[..usr_len].copy_from_slice(&user);
        let answer_len = match self.op {
            IoOp::Read => self.len,
            // The device examines `len` bytes, and describes them in fewer bytes.
            IoOp::Extents => self.buf.as_ref().map_or(0, |buf| buf.len() as u32),
            _ => 0,
        };
        let data_len = if self.op == IoOp::Write { self.len } else { answer_len } as usize;
        // The block operation's number determines the direction: odd ones use WRITE, even ones
        // (read, flush, extents) READ. WRITE_ZEROES is 5, DISCARD 3.
        let message_len = match self.op {
            IoOp::Read | IoOp::Flush | IoOp::Extents => {
                let desc = target.map(|t| SgDesc { addr: t.addr, key: t.rkey, len: answer_len });
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
            chunk_offset: u64::from(answer_len),
            imm: imm.encode_with(bits),
        }
    }
}

/// Answer to a request, from a completed receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) permit: PermitId,
    pub(crate) status: IoStatus,
    /// Errno as received: positive, 0 for success.
    pub(crate) errno: u16,
    /// New key of the chunk, if the answer carries one.
    pub(crate) rkey: Option<Rkey>,
    /// Time that the request spent on the server, if reported.
    pub(crate) times: Option<ServerTimes>,
}

/// Size of the buffer for an answer.
pub(crate) const ANSWER_SLOT: usize = TimedRkeyRsp::LEN;

/// Maximum size of an answer in bytes; if answers carry times, the exact size.
pub(crate) const fn answer_len(timed: bool) -> usize {
    if timed { TimedRkeyRsp::LEN } else { RkeyRsp::LEN }
}

impl Answer {
    /// Decodes an immediate and the bytes that came with it: a key with times if times were
    /// negotiated, otherwise a key or nothing. Returns `None` if it is not an answer: unknown
    /// immediates are ignored, as in the kernel.
    ///
    /// # Errors
    /// Returns the server's protocol violation.
    pub(crate) fn decode(
        imm: u32,
        bytes: &[u8],
        timed: bool,
    ) -> Result<Option<Self>, ConnectionFault> {
        let Imm::Response { permit, errno, .. } = Imm::decode(imm) else {
            tracing::debug!("immediate {imm:#010x} is not an answer");
            return Ok(None);
        };
        if bytes.len() > answer_len(timed) {
            return Err(ConnectionFault::AnswerSize(bytes.len()));
        }
        let (fresh, times) = if timed {
            let fresh = TimedRkeyRsp::decode(bytes)?;
            let TimedRkeyRsp { queue_us, backend_us, .. } = fresh;
            (Some(fresh.key()), Some(ServerTimes { queue_us, backend_us }))
        } else if bytes.is_empty() {
            (None, None)
        } else {
            (Some(RkeyRsp::decode(bytes)?), None)
        };
        fresh.map_or(Ok(()), |fresh| fresh.check(permit))?;
        let (status, rkey) = (IoStatus::from_errno(errno), fresh.map(|fresh| fresh.rkey));
        Ok(Some(Self { permit, status, errno, rkey, times }))
    }
}

/// Purpose of a work request. Its ID also contains the slot of the path, so a completion is matched
/// to the slot without a search; the queue pair tells the slot's connections apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WrId {
    Receive(u32),
    Request,
    Bind(PermitId),
    Revoke(PermitId),
}

impl WrId {
    pub(crate) fn encode(self, path: PathId) -> u64 {
        let (kind, number) = match self {
            Self::Receive(slot) => (1, slot),
            Self::Request => (2, 0),
            Self::Bind(permit) => (3, permit.0.into()),
            Self::Revoke(permit) => (4, permit.0.into()),
        };
        kind << 48 | u64::from(path.0) << 32 | u64::from(number)
    }

    #[allow(clippy::cast_possible_truncation, reason = "fields of fixed width")]
    pub(crate) const fn decode(raw: u64) -> Option<(Self, PathId)> {
        let work = match raw >> 48 {
            1 => Self::Receive(raw as u32),
            2 => Self::Request,
            3 => Self::Bind(PermitId(raw as u16)),
            4 => Self::Revoke(PermitId(raw as u16)),
            _ => return None,
        };
        Some((work, PathId((raw >> 32) as u16)))
    }
}

/// Whether the server itself writes zeroes correctly. The server must have announced a limit for
/// write zeroes, since older servers treat the operation as a read, and must keep the operation's
/// length ([`rtrs_core::wire::Extensions`]). Otherwise the session writes zeroes
/// (`engine/io/zeroes.rs`).
pub(crate) fn writes_zeroes(rsp: &OpenRsp, keeps_lengths: bool) -> bool {
    keeps_lengths && rsp.max_write_zeroes_sectors >= u32::from(rsp.logical_block_size) / SECTOR_SIZE
}

/// Geometry of the device in OPEN_RSP, as adapted by the session: write zeroes is always available.
///
/// # Errors
/// Returns the reason why the device is unusable.
pub(crate) fn geometry_of(rsp: &OpenRsp, keeps_lengths: bool) -> Result<Geometry, ConnectionFault> {
    let logical = u32::from(rsp.logical_block_size);
    if !logical.is_power_of_two() || !(512..=32768).contains(&logical) {
        return Err(ConnectionFault::BlockSize(logical));
    }
    let size = rsp
        .nsectors
        .checked_mul(512)
        // The system's limit: rounding up to blocks must not overflow.
        .filter(|size| i64::try_from(*size).is_ok())
        .ok_or(ConnectionFault::Sectors(rsp.nsectors))?;
    let bytes = |sectors: u32| sectors.saturating_mul(512) / logical * logical;
    let discard_max = bytes(rsp.max_discard_sectors);
    let own_zeroes = !writes_zeroes(rsp, keeps_lengths);
    Ok(Geometry {
        size: size / u64::from(logical) * u64::from(logical),
        logical_block: logical,
        physical_block: u32::from(rsp.physical_block_size).max(logical).next_power_of_two(),
        // The session splits IOs, so a submitter need not know the server's limit.
        io_max: 32 << 20,
        discard_max: discard_max.max(logical),
        zeroes_max: if own_zeroes { ZEROES_LEN } else { bytes(rsp.max_write_zeroes_sectors) },
        read_only: false,
        write_cache: rsp.write_cache,
        fua: rsp.fua,
        discard: discard_max > 0,
        discard_granularity: rsp.discard_granularity,
        discard_alignment: rsp.discard_alignment,
        secure_discard: rsp.secure_discard != 0,
        write_zeroes: true,
        fast_zero: !own_zeroes && rsp.fast_zero,
        rotational: rsp.rotational,
        extents: keeps_lengths && rsp.extents,
        partial_writes: keeps_lengths && rsp.partial_writes,
    })
}

#[cfg(test)]
mod tests {
    use rtrs_core::mem::Region;

    use super::*;

    /// Returns a vector of `tests/golden/rtrs.hex`.
    fn golden(wanted: &str) -> Vec<u8> {
        let mut found: Option<Vec<u8>> = None;
        for line in include_str!("../../../tests/golden/rtrs.hex").lines() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if let Some(name) = line.strip_suffix(':') {
                if found.is_some() {
                    break;
                }
                found = (name == wanted).then(Vec::new);
                continue;
            }
            if let Some(bytes) = found.as_mut() {
                for token in line.split_whitespace() {
                    let (hex, count) = token.split_once('*').unwrap_or((token, "1"));
                    let byte = u8::from_str_radix(hex, 16).expect(token);
                    bytes.extend(std::iter::repeat_n(byte, count.parse().expect(token)));
                }
            }
        }
        found.unwrap_or_else(|| panic!("no vector {wanted}"))
    }

    const GRANTED: Granted = Granted {
        queue_depth: 512,
        max_io_size: 126_976,
        chunk_size: 131_072,
        keeps_lengths: true,
        fences: false,
    };
    /// Read target of the vectors.
    const TARGET: RemoteMem = RemoteMem { addr: 0x7060_5040_3020_1000, rkey: Rkey(0x3b6) };

    fn encode(op: IoOp, flags: IoFlags, permit: u16, offset: u64, len: u32) -> (Vec<u8>, Layout) {
        let buf = Region::new(4096).ok().map(|region| region.whole());
        let permit = PermitId(permit);
        let request = Request { permit, device_id: 0, op, flags, offset, len, buf };
        let mut bytes = [0xff; HEADER_SLOT];
        let target = matches!(op, IoOp::Read | IoOp::Extents).then_some(TARGET);
        let layout = request.encode(target, &GRANTED, &mut bytes);
        assert!(bytes[layout.header_len..].iter().all(|&b| b == 0xff), "nothing beyond its length");
        (bytes[..layout.header_len].to_vec(), layout)
    }

    fn imm(name: &str) -> u32 {
        u32::from_be_bytes(golden(name).try_into().expect("four bytes"))
    }

    /// Returns a captured tail without the priority from the kernel's block layer.
    fn tail(name: &str) -> Vec<u8> {
        let mut bytes = golden(name);
        bytes[24..26].fill(0);
        bytes
    }

    #[test]
    fn requests_match_the_kernel_client() {
        let none = IoFlags::default();
        let (bytes, layout) = encode(IoOp::Extents, none, 1, 1 << 20, 1 << 31);
        assert_eq!((bytes, layout.chunk_offset), (golden("tail_extents"), 4096));
        assert_eq!(layout.imm, imm("imm_req_1_read"));
        let (bytes, layout) = encode(IoOp::Read, none, 1, 0, 4096);
        let mut expected = tail("tail_read");
        // The kernel lets the server invalidate its memory; this client closes its windows itself.
        expected[36] = 0;
        assert_eq!(bytes, expected);
        assert_eq!((layout.chunk_offset, layout.imm), (4096, imm("imm_req_1_read")));

        let fua = IoFlags { fua: true, ..none };
        let (bytes, layout) = encode(IoOp::Write, fua, 0, 0x800 * 512, 4096);
        assert_eq!(bytes[..32], golden("io_write_4k_fua"));
        assert_eq!(bytes[32..], golden("write_usr32"));
        assert_eq!((layout.chunk_offset, layout.imm), (0, imm("imm_req_0_write")));
        let part = IoFlags { partial: true, ..fua };
        let (bytes, layout) = encode(IoOp::Write, part, 0, 0x800 * 512 + 300, 20);
        assert_eq!((bytes, layout.chunk_offset), (golden("tail_partial_write"), 0));
        let (bytes, _) = encode(IoOp::Write, none, 0, 0x800 * 512, 4096);
        let mut expected = tail("tail_write");
        // Captured from a synchronous write.
        expected[17] = 0;
        assert_eq!(bytes, expected);

        let (bytes, layout) = encode(IoOp::Flush, none, 0, 0, 0);
        assert_eq!(bytes, golden("tail_flush"));
        assert_eq!((layout.chunk_offset, layout.imm), (0, imm("imm_req_0_flush")));

        let (bytes, layout) = encode(IoOp::Discard, none, 0, 1 << 20, 65536);
        let mut expected = tail("tail_discard");
        expected[17] = 0;
        assert_eq!(bytes, expected);
        assert_eq!((layout.chunk_offset, layout.imm), (0, imm("imm_req_0_flush")));

        let flags = IoFlags { fua: true, no_unmap: true, fast_only: true, partial: false };
        let (bytes, layout) = encode(IoOp::WriteZeroes, flags, 0, 1 << 20, 65536);
        assert_eq!(bytes[16..24], [5, 0x0a, 0, 0x80, 0, 0, 1, 0], "FUA, NOUNMAP, our FAST_ONLY");
        assert_eq!((bytes.len(), layout.chunk_offset), (36, 0));
    }

    #[test]
    fn the_largest_request_of_the_last_permit_fits() {
        let (_, layout) = encode(IoOp::Write, IoFlags::default(), 511, 0, 126_976);
        assert_eq!(layout.imm, 511 << 19 | (126_976 + 32));
    }

    #[test]
    fn answers_are_checked() {
        let answer = |imm, bytes: &[u8]| Answer::decode(imm, bytes, false);
        let good = answer(0x1000_0007, &[]).unwrap().unwrap();
        assert_eq!((good.permit, good.status, good.rkey), (PermitId(7), IoStatus::Ok, None));
        let bad = answer(0x22f8_012c, &[]).unwrap().unwrap();
        assert_eq!((bad.permit.0, bad.errno, bad.status), (300, 95, IoStatus::Unsupported));
        let fresh = answer(0x1000_0000, &golden("rkey_rsp_0")).unwrap().unwrap();
        assert_eq!(fresh.rkey, Some(Rkey(0x3b6)));
        assert!(answer(0x1000_0001, &golden("rkey_rsp_0")).is_err(), "another permit");
        for len in 1..8 {
            assert!(answer(0x1000_0000, &golden("rkey_rsp_0")[..len]).is_err(), "{len} bytes");
        }
        for imm in [0, 0x3000_0000, 0x8000_0000, 0x9000_0000, 0x1001_0000, u32::MAX] {
            assert_eq!(answer(imm, &[]), Ok(None), "{imm:#x}");
        }
    }

    #[test]
    fn answers_must_have_the_negotiated_form() {
        let (short, long) = (golden("rkey_rsp_0"), golden("rkey_rsp_7_times"));
        let answer = Answer::decode(0x1000_0007, &long, true).unwrap().unwrap();
        assert_eq!((answer.permit, answer.rkey), (PermitId(7), Some(Rkey(0x3b6))));
        let times = ServerTimes { queue_us: 300, backend_us: 0x0102_0304 };
        assert_eq!(answer.times, Some(times));
        assert!(Answer::decode(0x1000_0001, &long, true).is_err(), "another permit");
        for len in 0..16 {
            assert!(Answer::decode(0x1000_0007, &long[..len], true).is_err(), "{len} bytes");
        }
        assert!(Answer::decode(0x1000_0000, &short, true).is_err(), "no times");
        assert!(Answer::decode(0x1000_0007, &long, false).is_err(), "unrequested times");
        let longer = [&long[..], &[0]].concat();
        assert!(Answer::decode(0x1000_0007, &longer, true).is_err(), "17 bytes");
    }

    #[test]
    fn work_ids_round_trip() {
        let all = [
            WrId::Receive(0),
            WrId::Receive(u32::MAX),
            WrId::Request,
            WrId::Bind(PermitId(u16::MAX)),
            WrId::Revoke(PermitId(0)),
        ];
        for (id, path) in all.into_iter().zip([0, 1, 127, 0x8000, u16::MAX].map(PathId)) {
            assert_eq!(WrId::decode(id.encode(path)), Some((id, path)));
        }
        assert_eq!((WrId::decode(9), WrId::decode(u64::MAX)), (None, None));
    }

    #[test]
    fn no_device_description_causes_a_panic() {
        let good = OpenRsp { nsectors: 2048, logical_block_size: 512, ..OpenRsp::default() };
        let geometry = geometry_of(&good, true).unwrap();
        assert_eq!((geometry.size, geometry.physical_block), (1 << 20, 512));
        assert!(!geometry.discard && geometry.write_zeroes && !geometry.fast_zero);
        for logical in [0, 1, 511, 513, 768, 65535] {
            let rsp = OpenRsp { logical_block_size: logical, ..good };
            assert!(geometry_of(&rsp, true).is_err(), "{logical}");
        }
        for nsectors in [u64::MAX / 512 + 1, u64::MAX / 512, 1 << 54] {
            assert!(geometry_of(&OpenRsp { nsectors, ..good }, true).is_err(), "{nsectors}");
        }
        assert!(geometry_of(&OpenRsp { nsectors: (1 << 54) - 1, ..good }, true).is_ok());
        let odd = OpenRsp {
            logical_block_size: 4096,
            nsectors: 15,
            physical_block_size: u16::MAX,
            max_discard_sectors: u32::MAX,
            max_write_zeroes_sectors: 9,
            ..good
        };
        let geometry = geometry_of(&odd, true).unwrap();
        assert_eq!((geometry.size, geometry.zeroes_max), (4096, 4096));
        assert_eq!(geometry.physical_block, 65536);
    }
}
