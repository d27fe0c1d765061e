//! Requests from a driver, as described by a chain of descriptors.

use rtrs_core::block::{Geometry, IoFlags, IoOp};
use rtrs_core::mem::MemSlice;
use rtrs_core::status::IoStatus;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use crate::chain::Chain;
use crate::config::{SECTOR, sectors_max};
use crate::fault::Fault;

const HEADER_LEN: usize = 16;
/// Length of a range to discard or to zero.
const RANGE_LEN: usize = 16;

/// Status of an answered request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Ok,
    Failed,
    Unsupported,
}

impl Status {
    /// Returns the byte that the driver reads.
    pub(crate) fn byte(self) -> u8 {
        let status = match self {
            Self::Ok => VIRTIO_BLK_S_OK,
            Self::Failed => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        };
        status as u8
    }
}

impl From<IoStatus> for Status {
    fn from(status: IoStatus) -> Self {
        match status {
            IoStatus::Ok => Self::Ok,
            IoStatus::Unsupported => Self::Unsupported,
            _ => Self::Failed,
        }
    }
}

/// Work that a request requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// IO on the device.
    Io(Command),
    /// Copying the device's name to memory.
    Name,
    /// No work: the request is answered with this status.
    Answer(Status),
}

/// IO on a device, of any length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Command {
    pub(crate) op: IoOp,
    pub(crate) flags: IoFlags,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Command {
    pub(crate) const FLUSH: Self = Self::new(IoOp::Flush, 0, 0);

    const fn new(op: IoOp, offset: u64, len: u64) -> Self {
        let flags = IoFlags { fua: false, no_unmap: false, fast_only: false, partial: false };
        Self { op, flags, offset, len }
    }
}

/// Parsed request, without its head.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) work: Work,
    /// One byte of memory for the status.
    pub(crate) status: MemSlice,
}

/// Length of the memory.
fn length(pieces: &[MemSlice]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

/// Copies the first bytes of the memory, if the memory has that many.
fn copy_front<const N: usize>(pieces: &[MemSlice]) -> Option<[u8; N]> {
    let (mut bytes, mut filled) = ([0; N], 0);
    for piece in pieces {
        let count = piece.len().min(N - filled);
        piece.copy_out(0, &mut bytes[filled..filled + count]);
        filled += count;
    }
    (filled == N).then_some(bytes)
}

/// Removes this many bytes from the front.
fn cut_front(pieces: &mut Vec<MemSlice>, count: usize) {
    let mut left = count;
    let whole = pieces
        .iter()
        .take_while(|piece| {
            let is_whole = piece.len() <= left;
            left -= if is_whole { piece.len() } else { 0 };
            is_whole
        })
        .count();
    pieces.drain(..whole);
    if left > 0
        && let Some(first) = pieces.first_mut()
        && let Some(rest) = first.slice(left, first.len() - left)
    {
        *first = rest;
    }
}

/// Removes and returns the last byte.
fn cut_last(pieces: &mut Vec<MemSlice>) -> Option<MemSlice> {
    let last = pieces.pop()?;
    let end = last.len().checked_sub(1)?;
    if end > 0 {
        pieces.push(last.slice(0, end)?);
    }
    last.slice(end, 1)
}

/// Returns the number at an offset.
fn word(bytes: &[u8; 16], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// Splits a chain into header, data and status. The chain keeps the memory of the data. All bytes
/// that affect a decision are copied once, because the guest may change them in the meantime.
///
/// # Errors
/// Returns the fault of a request that cannot be answered.
pub(crate) fn parse(chain: &mut Chain, geometry: &Geometry) -> Result<Parsed, Fault> {
    let short = Fault::Header(length(&chain.readable));
    let header: [u8; HEADER_LEN] = copy_front(&chain.readable).ok_or(short)?;
    cut_front(&mut chain.readable, HEADER_LEN);
    let status = cut_last(&mut chain.writable).ok_or(Fault::NoStatus)?;
    let sector = u64::from(word(&header, 8)) | u64::from(word(&header, 12)) << 32;
    let work = match word(&header, 0) {
        VIRTIO_BLK_T_IN => data(IoOp::Read, sector, length(&chain.writable), geometry),
        VIRTIO_BLK_T_OUT => data(IoOp::Write, sector, length(&chain.readable), geometry),
        VIRTIO_BLK_T_FLUSH => Work::Io(Command::FLUSH),
        VIRTIO_BLK_T_GET_ID => Work::Name,
        VIRTIO_BLK_T_DISCARD => range(IoOp::Discard, chain, geometry),
        VIRTIO_BLK_T_WRITE_ZEROES => range(IoOp::WriteZeroes, chain, geometry),
        _ => Work::Answer(Status::Unsupported),
    };
    Ok(Parsed { work, status })
}

/// Returns the work for a range of sectors, or a failure if the device does not have the range.
fn within(op: IoOp, sector: u64, len: u64, geometry: &Geometry) -> Work {
    let block = u64::from(geometry.logical_block);
    let offset = sector.checked_mul(SECTOR).filter(|at| at.is_multiple_of(block));
    let fits = |at: &u64| at.checked_add(len).is_some_and(|end| end <= geometry.size);
    match offset.filter(fits) {
        Some(offset) if len.is_multiple_of(block) => match len {
            0 => Work::Answer(Status::Ok),
            _ => Work::Io(Command::new(op, offset, len)),
        },
        _ => Work::Answer(Status::Failed),
    }
}

/// Returns the work of a read or a write.
fn data(op: IoOp, sector: u64, len: u64, geometry: &Geometry) -> Work {
    if op.changes() && geometry.read_only {
        return Work::Answer(Status::Failed);
    }
    within(op, sector, len, geometry)
}

/// Returns the work for a discard or write zeroes, which has one range.
fn range(op: IoOp, chain: &Chain, geometry: &Geometry) -> Work {
    let is_discard = op == IoOp::Discard;
    let (is_offered, max) = match is_discard {
        true => (geometry.discard, geometry.discard_max),
        false => (geometry.write_zeroes, geometry.zeroes_max),
    };
    if !is_offered {
        return Work::Answer(Status::Unsupported);
    }
    let range = copy_front(&chain.readable);
    let Some(range) = range.filter(|_| length(&chain.readable) == RANGE_LEN as u64) else {
        return Work::Answer(Status::Failed);
    };
    let sector = u64::from(word(&range, 0)) | u64::from(word(&range, 4)) << 32;
    let (count, flags) = (word(&range, 8), word(&range, 12));
    let may_unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
    if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || (is_discard && may_unmap) {
        return Work::Answer(Status::Unsupported);
    }
    if geometry.read_only || count > sectors_max(max) {
        return Work::Answer(Status::Failed);
    }
    match within(op, sector, u64::from(count) * SECTOR, geometry) {
        Work::Io(mut command) => {
            command.flags.no_unmap = !is_discard && !may_unmap;
            Work::Io(command)
        }
        work => work,
    }
}

/// Copies the device's name to memory, padded with zeroes. Returns the number of bytes.
pub(crate) fn put_name(name: &str, pieces: &[MemSlice]) -> u32 {
    let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
    let count = name.len().min(id.len());
    id[..count].copy_from_slice(&name.as_bytes()[..count]);
    let mut written = 0;
    for piece in pieces {
        let count = piece.len().min(id.len() - written);
        if count > 0 {
            piece.copy_in(0, &id[written..written + count]);
            written += count;
        }
    }
    written as u32
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rtrs_core::mem::Region;

    use super::*;

    const BLOCKS: u64 = 64;

    fn geometry() -> Geometry {
        let plain = Geometry::plain(BLOCKS * SECTOR);
        Geometry { discard: true, discard_max: 16 << 9, write_zeroes: true, ..plain }
    }

    fn header(kind: u32, sector: u64) -> Vec<u8> {
        [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
    }

    fn segment(sector: u64, count: u32, flags: u32) -> Vec<u8> {
        [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
    }

    /// Returns memory with these bytes, in pieces of this length.
    fn cut(memory: &Arc<Region>, bytes: &[u8], piece: usize) -> Vec<MemSlice> {
        memory.copy_in(0, bytes);
        let starts = (0..bytes.len()).step_by(piece);
        starts.map(|at| memory.slice(at, piece.min(bytes.len() - at)).unwrap()).collect()
    }

    /// Returns the work for a request with this readable memory and this many writable bytes.
    fn work(readable: &[u8], writable: usize, geometry: &Geometry) -> Result<Work, Fault> {
        let (memory, answer) = (Region::new(1 << 16).unwrap(), Region::new(1 << 16).unwrap());
        let mut works = [1, 3, 16, 17, 1 << 15].map(|piece| {
            let readable = cut(&memory, readable, piece);
            let writable = cut(&answer, &vec![0; writable], piece);
            let mut chain = Chain { readable, writable };
            parse(&mut chain, geometry).map(|parsed| {
                assert_eq!(parsed.status.len(), 1);
                parsed.work
            })
        });
        let last = works.len() - 1;
        works.swap(0, last);
        for other in &works[1..] {
            assert_eq!(*other, works[0], "the layout does not matter");
        }
        works[0]
    }

    fn io(op: IoOp, offset: u64, len: u64) -> Result<Work, Fault> {
        Ok(Work::Io(Command::new(op, offset, len)))
    }

    #[test]
    fn data_is_in_whole_sectors_of_the_device() {
        let geometry = geometry();
        let read = |sector, len: usize| work(&header(0, sector), len + 1, &geometry);
        assert_eq!(read(2, 1024), io(IoOp::Read, 1024, 1024));
        assert_eq!(read(63, 512), io(IoOp::Read, 63 * 512, 512));
        assert_eq!(read(1, 0), Ok(Work::Answer(Status::Ok)));
        let failed = Ok(Work::Answer(Status::Failed));
        for (sector, len) in [(63, 1024), (64, 512), (1, 511), (u64::MAX, 512), (1 << 55, 512)] {
            assert_eq!(read(sector, len), failed, "{sector} {len}");
        }
        let write =
            |geometry: &Geometry| work(&[header(1, 8), vec![0; 4096]].concat(), 1, geometry);
        assert_eq!(write(&geometry), io(IoOp::Write, 4096, 4096));
        assert_eq!(write(&Geometry { read_only: true, ..geometry.clone() }), failed);
        let large = Geometry { logical_block: 4096, ..geometry };
        assert_eq!(write(&large), io(IoOp::Write, 4096, 4096));
        assert_eq!(work(&header(0, 7), 4097, &large), failed, "within a block");
        assert_eq!(work(&header(0, 8), 513, &large), failed, "part of a block");
    }

    #[test]
    fn a_request_has_a_header_and_a_status() {
        let geometry = geometry();
        assert_eq!(work(&header(4, 0), 1, &geometry), io(IoOp::Flush, 0, 0));
        assert_eq!(work(&header(8, 0), 21, &geometry), Ok(Work::Name));
        let unsupported = Ok(Work::Answer(Status::Unsupported));
        assert_eq!(work(&header(0x8000_0001, 0), 1, &geometry), unsupported);
        assert_eq!(work(&header(4, 0)[..15], 1, &geometry), Err(Fault::Header(15)));
        assert_eq!(work(&[], 1, &geometry), Err(Fault::Header(0)));
        assert_eq!(work(&header(4, 0), 0, &geometry), Err(Fault::NoStatus));
    }

    #[test]
    fn a_range_has_known_flags_and_a_limited_length() {
        let geometry = geometry();
        let range = |kind, sector, count, flags| {
            let bytes = [header(kind, 0), segment(sector, count, flags)].concat();
            work(&bytes, 1, &geometry)
        };
        assert_eq!(range(11, 4, 16, 0), io(IoOp::Discard, 2048, 8192));
        let zeroes = |no_unmap| {
            let mut command = Command::new(IoOp::WriteZeroes, 2048, 512);
            command.flags.no_unmap = no_unmap;
            Ok(Work::Io(command))
        };
        assert_eq!((range(13, 4, 1, 0), range(13, 4, 1, 1)), (zeroes(true), zeroes(false)));
        assert_eq!(range(13, 4, 0, 0), Ok(Work::Answer(Status::Ok)));
        let (failed, unsupported) = (Status::Failed, Status::Unsupported);
        for (kind, sector, count, flags, status) in [
            (11, 4, 17, 0, failed),
            (11, 63, 2, 0, failed),
            (13, u64::MAX, 1, 0, failed),
            (11, 4, 1, 1, unsupported),
            (13, 4, 1, 2, unsupported),
        ] {
            assert_eq!(range(kind, sector, count, flags), Ok(Work::Answer(status)));
        }
        let two = [header(11, 0), segment(0, 1, 0), segment(8, 1, 0)].concat();
        for bytes in [&two[..], &two[..31], &two[..33]] {
            assert_eq!(work(bytes, 1, &geometry), Ok(Work::Answer(failed)));
        }
        let none = Geometry { discard: false, write_zeroes: false, ..geometry };
        for kind in [11, 13] {
            assert_eq!(work(&header(kind, 0), 1, &none), Ok(Work::Answer(unsupported)));
        }
    }

    #[test]
    fn the_name_is_padded_and_cut() {
        let memory = Region::new(4096).unwrap();
        for (name, room, written) in
            [("vol", 20, 20), ("twenty-two characters.", 30, 20), ("v", 7, 7)]
        {
            memory.fill(0, 64, 0xEE);
            let pieces = cut(&memory, &vec![0xEE; room], 3);
            assert_eq!(put_name(name, &pieces), written);
            let mut expected = name.as_bytes()[..name.len().min(20)].to_vec();
            expected.resize(written as usize, 0);
            assert_eq!(memory.slice(0, written as usize).unwrap().to_vec(), expected);
            assert_eq!(memory.slice(written as usize, 1).unwrap().to_vec(), [0xEE]);
        }
    }
}
