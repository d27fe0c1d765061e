//! Runs the pieces of a copy or comparison, a bounded number at a time.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use rtrs_core::mem::OwnedBytes;

use super::failure::Failure;
use super::planner::{ExtentMap, Piece, PieceSizes, Planner};
use super::progress::{Position, Progress};
use super::side::{Done, End, Limits, Op, Request, Sizes, Wake, Which};
use crate::error::{Error, ErrorKind};

/// Minimum alignment of holes.
const ALIGN_MIN: u64 = 4096;

/// The two ends, and the memory for requests.
pub(super) struct Ends {
    source: End,
    destination: End,
    /// Results from both ends, and signals.
    wakes: Receiver<Wake>,
    /// Maximum number of pieces at a time. Pieces use the slots below this number, and other
    /// requests use the slot with this number.
    requests: usize,
    spare: Vec<OwnedBytes>,
    /// Longest piece with data.
    piece: u64,
}

impl Ends {
    pub(super) fn new(source: End, destination: End, wakes: Receiver<Wake>, sizes: Sizes) -> Self {
        let requests = sizes.requests.into();
        let mut ends = Self { source, destination, wakes, requests, spare: Vec::new(), piece: 0 };
        let io_max = Which::ALL.map(|which| ends.limits(which).io_max.into());
        let align = ends.align();
        let io_max: u64 = io_max.into_iter().min().unwrap_or(align);
        ends.piece = (io_max - io_max % align).max(align);
        ends
    }

    fn end(&self, which: Which) -> &End {
        match which {
            Which::Source => &self.source,
            Which::Destination => &self.destination,
        }
    }

    pub(super) fn limits(&self, which: Which) -> &Limits {
        self.end(which).side.limits()
    }

    pub(super) fn name(&self, which: Which) -> &str {
        &self.end(which).name
    }

    fn submit(&mut self, which: Which, request: Request) {
        match which {
            Which::Source => self.source.side.submit(request),
            Which::Destination => self.destination.side.submit(request),
        }
    }

    /// Unit of pieces: a multiple of the block sizes of both ends.
    fn align(&self) -> u64 {
        let blocks = Which::ALL.map(|which| u64::from(self.limits(which).block));
        blocks.into_iter().fold(ALIGN_MIN, u64::max)
    }

    fn buffer(&mut self) -> OwnedBytes {
        let bytes = usize::try_from(self.piece).unwrap_or(usize::MAX);
        self.spare.pop().unwrap_or_else(|| vec![0; bytes].into())
    }

    fn failed(&self, done: &Done, failure: &Failure) -> Error {
        let (verb, name) = (done.op.verb(), self.name(done.side));
        let place = match done.op {
            Op::Finish { .. } => String::new(),
            _ => format!(" at offset {}", done.offset),
        };
        let why = self.end(done.side).side.explain();
        let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
        let text = format!("cannot {verb} {name}{place}: {failure}{why}");
        Error::new(ErrorKind::System, text)
    }

    /// Makes the first `size` bytes of the destination final, and durable if requested.
    pub(super) fn finish(&mut self, size: u64, durable: bool) -> Result<(), Error> {
        let op = Op::Finish { durable };
        let slot = self.requests;
        let request = Request { slot, op, offset: size, len: size, buffer: None };
        self.submit(Which::Destination, request);
        loop {
            match self.wakes.recv() {
                Ok(Wake::Done(done)) if done.slot == slot && done.op == op => {
                    let result = done.result.as_ref().map(|_| ());
                    return result.map_err(|failure| self.failed(&done, failure));
                }
                Ok(Wake::Done(_)) => {}
                Ok(Wake::Signal) => return Err(by_signal()),
                Err(_) => return Err(Error::new(ErrorKind::System, "the threads have ended")),
            }
        }
    }
}

fn by_signal() -> Error {
    Error::new(ErrorKind::System, "ended by a signal; the destination is incomplete")
}

/// Purpose of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Copy {
        /// The whole destination reads as zeroes.
        destination_is_zero: bool,
    },
    Compare,
    /// Comparison after a copy.
    Verify,
}

impl Mode {
    fn is_copy(self) -> bool {
        matches!(self, Self::Copy { .. })
    }

    fn progress_verb(self) -> &'static str {
        match self {
            Self::Copy { .. } => "copied",
            Self::Compare => "compared",
            Self::Verify => "verified",
        }
    }
}

/// Byte counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// Bytes that were read from the source.
    pub(super) read: u64,
    /// Bytes of data that were written.
    pub(super) data: u64,
    /// Bytes that were zeroed.
    pub(super) zeroes: u64,
    /// Bytes that are zero at both ends without a write, or holes at both.
    pub(super) skipped: u64,
}

/// Result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) totals: Totals,
    /// Number of bytes up to the end of a source of unknown size, or the limit of the run.
    pub(super) size: u64,
    /// Lowest offset at which the ends differ.
    pub(super) difference: Option<u64>,
}

/// Piece in progress.
struct Work {
    piece: Piece,
    /// Number of bytes from the source; less than the piece's length at the end of a stream.
    len: u64,
    /// Data from the source while the destination is being read.
    data: Option<OwnedBytes>,
}

/// Runs the pieces from 0 to `limit`, which is the maximum if the source is a stream.
///
/// # Errors
/// The first failed request, with its end and offset, or a signal.
pub(super) fn run(
    ends: &mut Ends,
    mode: Mode,
    limit: u64,
    progress: &mut Progress,
) -> Result<Outcome, Error> {
    let planner = planner(ends, mode, limit);
    let requests = ends.requests;
    progress.begin();
    let mut run = Run {
        ends,
        mode,
        planner,
        work: (0..requests).map(|_| None).collect(),
        free: (0..requests).rev().collect(),
        limit,
        totals: Totals::default(),
        difference: None,
        listing: 0,
    };
    let result = run.run(progress);
    progress.end();
    result?;
    Ok(Outcome { totals: run.totals, size: run.limit, difference: run.difference })
}

fn planner(ends: &Ends, mode: Mode, limit: u64) -> Planner {
    let align = ends.align();
    let map = |which: Which| {
        let limits = ends.limits(which);
        let is_zero = match mode {
            Mode::Copy { destination_is_zero } => destination_is_zero || limits.is_zero,
            Mode::Compare | Mode::Verify => false,
        };
        if is_zero && which == Which::Destination {
            return ExtentMap::uniform(true);
        }
        match limits.extents {
            true => ExtentMap::new(limit.min(limits.size.unwrap_or(limit)), align),
            false => ExtentMap::uniform(false),
        }
    };
    let zeroes = match mode {
        Mode::Copy { .. } => ends.limits(Which::Destination).zeroes_max,
        // A hole in the source is compared with the destination's data.
        Mode::Compare | Mode::Verify => 0,
    };
    let zeroes = (zeroes - zeroes % align).max(ends.piece);
    let sizes = PieceSizes { data: ends.piece, zeroes };
    Planner::new(map(Which::Source), map(Which::Destination), sizes, limit)
}

struct Run<'a> {
    ends: &'a mut Ends,
    mode: Mode,
    planner: Planner,
    /// Pieces in progress, by slot.
    work: Vec<Option<Work>>,
    free: Vec<usize>,
    limit: u64,
    totals: Totals,
    difference: Option<u64>,
    /// Number of requests for extents in flight.
    listing: usize,
}

impl Run<'_> {
    fn run(&mut self, progress: &mut Progress) -> Result<(), Error> {
        let requests = self.ends.requests;
        loop {
            self.request_extents();
            while let Some(slot) = self.free.pop() {
                let Some(piece) = self.planner.next_piece() else {
                    self.free.push(slot);
                    break;
                };
                self.start(slot, piece);
            }
            let is_idle = self.free.len() == requests && self.listing == 0;
            if is_idle && self.planner.is_finished() {
                return Ok(());
            }
            match self.ends.wakes.recv_timeout(progress.wait_max()) {
                Ok(Wake::Done(done)) => self.take(done)?,
                Ok(Wake::Signal) => return Err(self.ended_by_signal()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(ErrorKind::System, "the threads have ended"));
                }
            }
            progress.update(|elapsed| self.position(elapsed));
        }
    }

    fn ended_by_signal(&self) -> Error {
        match self.mode {
            Mode::Copy { .. } => by_signal(),
            Mode::Compare | Mode::Verify => Error::new(ErrorKind::System, "ended by a signal"),
        }
    }

    fn position(&self, elapsed: Duration) -> Position {
        let Totals { read, zeroes, skipped, data } = self.totals;
        let done = if self.mode.is_copy() { data + zeroes + skipped } else { read + skipped };
        let total = (self.limit != u64::MAX).then_some(self.limit);
        Position { verb: self.mode.progress_verb(), done, total, elapsed }
    }

    fn map(&mut self, which: Which) -> &mut ExtentMap {
        match which {
            Which::Source => &mut self.planner.source,
            Which::Destination => &mut self.planner.destination,
        }
    }

    fn request_extents(&mut self) {
        for which in Which::ALL {
            // After the last piece, further extents do not matter.
            if !self.planner.is_finished()
                && let Some((offset, len)) = self.map(which).next_request()
            {
                let slot = self.ends.requests;
                let request = Request { slot, op: Op::Extents, offset, len, buffer: None };
                self.ends.submit(which, request);
                self.listing += 1;
            }
        }
    }

    fn start(&mut self, slot: usize, piece: Piece) {
        let Piece { len, source_hole, destination_hole, .. } = piece;
        self.work[slot] = Some(Work { piece, len, data: None });
        match (source_hole, destination_hole) {
            (true, true) => {
                self.totals.skipped += len;
                self.free(slot);
            }
            (true, false) if self.mode.is_copy() => self.zero(slot, len),
            (true, false) => self.read_destination(slot),
            (false, _) => self.read(slot, Which::Source, len),
        }
    }

    fn read(&mut self, slot: usize, which: Which, len: u64) {
        let buffer = Some(self.ends.buffer());
        let request = Request { slot, op: Op::Read, offset: self.offset(slot), len, buffer };
        self.ends.submit(which, request);
    }

    fn write(&mut self, slot: usize, len: u64, data: OwnedBytes) {
        self.totals.data += len;
        let (offset, buffer) = (self.offset(slot), Some(data));
        let request = Request { slot, op: Op::Write, offset, len, buffer };
        self.ends.submit(Which::Destination, request);
    }

    fn zero(&mut self, slot: usize, len: u64) {
        self.totals.zeroes += len;
        let (offset, buffer) = (self.offset(slot), None);
        let request = Request { slot, op: Op::Zero, offset, len, buffer };
        self.ends.submit(Which::Destination, request);
    }

    fn offset(&self, slot: usize) -> u64 {
        self.work[slot].as_ref().map_or(0, |work| work.piece.offset)
    }

    fn free(&mut self, slot: usize) {
        if let Some(work) = self.work[slot].take() {
            self.ends.spare.extend(work.data);
            self.free.push(slot);
        }
    }

    /// Handles a result.
    fn take(&mut self, mut done: Done) -> Result<(), Error> {
        if done.op == Op::Extents {
            self.listing -= 1;
            return self.take_extents(&done);
        }
        let answer = match &done.result {
            Ok(answer) => answer.len,
            Err(failure) => return Err(self.ends.failed(&done, failure)),
        };
        let (slot, buffer) = (done.slot, done.buffer.take());
        match (done.side, done.op, buffer) {
            (Which::Source, Op::Read, Some(data)) => return self.take_data(slot, data, answer),
            (Which::Destination, Op::Read, Some(found)) => {
                self.compare(slot, &found, answer);
                self.ends.spare.push(found);
            }
            (_, _, buffer) => self.ends.spare.extend(buffer),
        }
        self.free(slot);
        Ok(())
    }

    fn take_extents(&mut self, done: &Done) -> Result<(), Error> {
        match &done.result {
            Ok(answer) if !answer.extents.is_empty() => self.map(done.side).add(&answer.extents),
            Ok(_) | Err(Failure::Unsupported) => self.map(done.side).give_up(),
            Err(failure) => return Err(self.ends.failed(done, failure)),
        }
        Ok(())
    }

    /// Handles data from the source.
    fn take_data(&mut self, slot: usize, data: OwnedBytes, len: u64) -> Result<(), Error> {
        let Some(work) = &mut self.work[slot] else { return Ok(()) };
        let Piece { offset, destination_hole, len: requested, .. } = work.piece;
        work.len = len;
        if len < requested {
            self.limit = self.limit.min(offset + len);
            self.planner.end_at(self.limit);
        }
        self.totals.read += len;
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let is_zero = is_zero(&data[..bytes]);
        if self.mode.is_copy() {
            self.check_capacity(offset + len)?;
            if len > 0 && !is_zero {
                self.write(slot, len, data);
                return Ok(());
            }
            self.ends.spare.push(data);
            if len > 0 && !destination_hole {
                self.zero(slot, len);
                return Ok(());
            }
            self.totals.skipped += len;
        } else {
            work.data = Some(data);
            if len > 0 && !destination_hole {
                self.read_destination(slot);
                return Ok(());
            }
            if !is_zero {
                self.compare_with_zeroes(slot);
            }
        }
        self.free(slot);
        Ok(())
    }

    /// Fails if the destination cannot hold the bytes before `end`.
    fn check_capacity(&self, end: u64) -> Result<(), Error> {
        match self.ends.limits(Which::Destination).size {
            Some(size) if end > size => {
                let (source, destination) =
                    (self.ends.name(Which::Source), self.ends.name(Which::Destination));
                let text = format!("cannot copy all of {source}: {destination} has {size} bytes");
                Err(Error::new(ErrorKind::System, text))
            }
            _ => Ok(()),
        }
    }

    /// Reads the part of a piece that the destination has.
    fn read_destination(&mut self, slot: usize) {
        let Some(work) = &self.work[slot] else { return };
        let size = self.ends.limits(Which::Destination).size.unwrap_or(u64::MAX);
        let len = work.len.min(size.saturating_sub(work.piece.offset));
        if len == 0 {
            self.differ(size);
            return self.free(slot);
        }
        self.read(slot, Which::Destination, len);
    }

    /// Compares the source's part of a piece with `len` bytes of the destination.
    fn compare(&mut self, slot: usize, found: &[u8], len: u64) {
        let Some(work) = &self.work[slot] else { return };
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let place = match &work.data {
            Some(data) => first_difference(&data[..bytes], &found[..bytes]),
            None => {
                self.totals.read += len;
                first_nonzero(&found[..bytes])
            }
        };
        let end = (len < work.len).then_some(bytes);
        if let Some(place) = place.or(end) {
            self.differ(work.piece.offset + place as u64);
        }
    }

    fn compare_with_zeroes(&mut self, slot: usize) {
        let Some(work) = &self.work[slot] else { return };
        let bytes = usize::try_from(work.len).unwrap_or(usize::MAX);
        let place = work.data.as_ref().and_then(|data| first_nonzero(&data[..bytes]));
        if let Some(place) = place {
            self.differ(work.piece.offset + place as u64);
        }
    }

    /// Records a difference. Pieces after it need no comparison.
    fn differ(&mut self, offset: u64) {
        let lowest = self.difference.map_or(offset, |other| other.min(offset));
        self.difference = Some(lowest);
        self.planner.end_at(lowest);
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    // Avoids a branch for each byte.
    bytes.chunks(4096).all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}

fn first_nonzero(bytes: &[u8]) -> Option<usize> {
    if is_zero(bytes) { None } else { bytes.iter().position(|byte| *byte != 0) }
}

fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    if one == other {
        return None;
    }
    one.iter().zip(other).position(|(one, other)| one != other)
}
