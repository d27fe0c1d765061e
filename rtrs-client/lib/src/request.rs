//! Requests and their completions.

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::extents;
use rtrs_core::mem::{MemSlice, SharedBytes};
use rtrs_core::status::IoStatus;

use rtrs_client::embed::Pieces;

use crate::buffer::Buffer;
use crate::error::IoError;
use crate::memory::Part;

/// Maximum number of buffers in a request.
pub const PIECES_MAX: usize = rtrs_core::mem::PIECES_MAX;

/// Memory held by a request or completion.
#[derive(Debug)]
pub(crate) enum Memory {
    None,
    One(Buffer),
    Several(Vec<Buffer>),
    Part(Part),
}

impl Memory {
    fn buffers(&self) -> &[Buffer] {
        match self {
            Self::None | Self::Part(_) => &[],
            Self::One(buffer) => std::slice::from_ref(buffer),
            Self::Several(buffers) => buffers,
        }
    }

    /// Returns the number of pieces, and the number of bytes.
    fn size(&self) -> (usize, usize) {
        if let Self::Part(part) = self {
            return (1, part.len());
        }
        let buffers = self.buffers();
        (buffers.len(), buffers.iter().map(|buffer| buffer.len()).sum())
    }
}

/// Request to a volume, for [`Queue::submit`](crate::Queue::submit).
///
/// Offsets and lengths are multiples of the logical block size
/// ([`Geometry::logical_block`](crate::Geometry::logical_block)).
///
/// ```
/// use rtrs::{Buffer, Request};
///
/// let read = Request::read(0, Buffer::zeroed(8192));
/// // Header and body in separate buffers; durable when the request completes.
/// let pieces = vec![Buffer::zeroed(512), Buffer::from(vec![7; 7680])];
/// let write = Request::write_vectored(8192, pieces).fua();
/// assert_eq!((read.len(), write.len()), (8192, 8192));
/// ```
#[derive(Debug)]
pub struct Request {
    pub(crate) op: IoOp,
    pub(crate) flags: IoFlags,
    pub(crate) offset: u64,
    len: u64,
    pub(crate) memory: Memory,
}

impl Request {
    fn new(op: IoOp, offset: u64, len: u64) -> Self {
        Self { op, flags: IoFlags::default(), offset, len, memory: Memory::None }
    }

    fn with_memory(op: IoOp, offset: u64, memory: Memory) -> Self {
        let len = memory.size().1 as u64;
        Self { memory, ..Self::new(op, offset, len) }
    }

    /// Reads as many bytes as the buffer holds.
    #[must_use]
    pub fn read(offset: u64, buffer: Buffer) -> Self {
        Self::with_memory(IoOp::Read, offset, Memory::One(buffer))
    }

    /// Reads into buffers, one after the other; at most [`PIECES_MAX`].
    #[must_use]
    pub fn read_vectored(offset: u64, buffers: Vec<Buffer>) -> Self {
        Self::with_memory(IoOp::Read, offset, Memory::Several(buffers))
    }

    /// Writes a buffer.
    #[must_use]
    pub fn write(offset: u64, buffer: Buffer) -> Self {
        Self::with_memory(IoOp::Write, offset, Memory::One(buffer))
    }

    /// Writes buffers, one after the other; at most [`PIECES_MAX`].
    #[must_use]
    pub fn write_vectored(offset: u64, buffers: Vec<Buffer>) -> Self {
        Self::with_memory(IoOp::Write, offset, Memory::Several(buffers))
    }

    /// Reads into a part of [`Memory`](crate::Memory), in place if the memory is registered.
    #[must_use]
    pub fn read_to(offset: u64, part: &Part) -> Self {
        Self::with_memory(IoOp::Read, offset, Memory::Part(part.clone()))
    }

    /// Writes from a part of [`Memory`](crate::Memory), in place if the memory is registered.
    #[must_use]
    pub fn write_from(offset: u64, part: &Part) -> Self {
        Self::with_memory(IoOp::Write, offset, Memory::Part(part.clone()))
    }

    /// Makes durable all writes that completed before this request was submitted, on any queue.
    #[must_use]
    pub fn flush() -> Self {
        Self::new(IoOp::Flush, 0, 0)
    }

    /// Discards the contents of a range, which may then read as anything.
    #[must_use]
    pub fn discard(offset: u64, len: u64) -> Self {
        Self::new(IoOp::Discard, offset, len)
    }

    /// Makes a range read as zeroes. The server may free its space.
    #[must_use]
    pub fn write_zeroes(offset: u64, len: u64) -> Self {
        Self::new(IoOp::WriteZeroes, offset, len)
    }

    /// Queries which parts of a range hold data; see [`Completion::extents`].
    #[must_use]
    pub fn extents(offset: u64, len: u64) -> Self {
        let memory = Memory::One(Buffer::zeroed(extents::LEN_MAX));
        Self { memory, ..Self::new(IoOp::Extents, offset, len) }
    }

    /// Makes a write, discard or write zeroes durable when it completes.
    #[must_use]
    pub fn fua(mut self) -> Self {
        self.flags.fua = true;
        self
    }

    /// Makes a write zeroes keep the space of the range allocated.
    #[must_use]
    pub fn no_unmap(mut self) -> Self {
        self.flags.no_unmap = true;
        self
    }

    /// Returns the length of the range in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the range is empty, as it is for a flush.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the buffers of the request, for example after it has been rejected.
    #[must_use]
    pub fn into_buffers(self) -> Vec<Buffer> {
        into_buffers(self.memory)
    }

    /// Returns the number of pieces, and the number of bytes.
    pub(crate) fn memory_size(&self) -> (usize, usize) {
        self.memory.size()
    }
}

fn into_buffers(memory: Memory) -> Vec<Buffer> {
    match memory {
        Memory::None | Memory::Part(_) => Vec::new(),
        Memory::One(buffer) => vec![buffer],
        Memory::Several(buffers) => buffers,
    }
}

/// Part of a range that is entirely data or entirely a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes.
    pub len: u64,
    /// Whether the extent is a hole: not allocated, and read as zeroes.
    pub hole: bool,
}

/// Request that has ended.
#[derive(Debug)]
pub struct Completion {
    /// Token of the request.
    pub token: u64,
    /// Outcome.
    pub result: Result<(), IoError>,
    memory: Memory,
    extents: Vec<Extent>,
}

impl Completion {
    /// Returns the request's buffer, if it had one. After a failed read its contents are undefined.
    #[must_use]
    pub fn into_buffer(self) -> Option<Buffer> {
        match self.memory {
            Memory::One(buffer) => Some(buffer),
            Memory::None | Memory::Several(_) | Memory::Part(_) => None,
        }
    }

    /// Returns all buffers of the request.
    #[must_use]
    pub fn into_buffers(self) -> Vec<Buffer> {
        into_buffers(self.memory)
    }

    /// Returns the extents found by [`Request::extents`], in order from its offset. The list may
    /// end before the range does; the rest can be queried with another request.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }
}

/// Memory of a request in flight.
#[derive(Debug)]
enum Held {
    None,
    One(SharedBytes),
    Several(Vec<SharedBytes>),
}

/// Request in flight.
#[derive(Debug)]
pub(crate) struct InFlight {
    token: u64,
    op: IoOp,
    len: u32,
    held: Held,
}

fn slice(bytes: &SharedBytes) -> MemSlice {
    bytes.region().whole()
}

impl InFlight {
    /// Splits a request into the part that stays in the queue and the memory that the session uses.
    /// The request must have passed the queue's check.
    pub(crate) fn new(token: u64, len: u32, op: IoOp, memory: Memory) -> (Self, Pieces) {
        let (held, pieces) = match memory {
            Memory::None => (Held::None, Pieces::None),
            Memory::Part(part) => (Held::None, Pieces::One(part.slice().clone())),
            Memory::One(buffer) => {
                let bytes = buffer.share();
                let piece = slice(&bytes);
                (Held::One(bytes), Pieces::One(piece))
            }
            Memory::Several(buffers) => {
                let all: Vec<_> = buffers.into_iter().map(Buffer::share).collect();
                let pieces = all.iter().map(slice).collect();
                (Held::Several(all), Pieces::Several(pieces))
            }
        };
        (Self { token, op, len, held }, pieces)
    }

    /// Completes the request.
    pub(crate) fn complete(self, status: IoStatus) -> Completion {
        let Self { token, op, len, held } = self;
        let mut result = IoError::check(status);
        let mut extents = Vec::new();
        let memory = match held {
            Held::None => Memory::None,
            Held::One(list) if op == IoOp::Extents => {
                if result.is_ok() {
                    let is_valid = extents::read(&slice(&list), len, |extent| {
                        extents.push(Extent { len: extent.len, hole: extent.hole });
                        true
                    });
                    result = IoError::check(if is_valid { status } else { IoStatus::Io });
                }
                Memory::None
            }
            Held::One(bytes) => Memory::One(Buffer::reclaim(bytes)),
            Held::Several(all) => Memory::Several(all.into_iter().map(Buffer::reclaim).collect()),
        };
        Completion { token, result, memory, extents }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_returns_the_buffers_in_order() {
        let buffers = vec![Buffer::from(vec![1; 512]), Buffer::from(vec![2; 1024])];
        let request = Request::write_vectored(0, buffers);
        assert_eq!((request.len(), request.memory_size()), (1536, (2, 1536)));
        let (inflight, pieces) = InFlight::new(7, 1536, request.op, request.memory);
        let Pieces::Several(pieces) = pieces else { panic!("{pieces:?}") };
        assert_eq!(pieces.iter().map(MemSlice::len).collect::<Vec<_>>(), [512, 1024]);
        drop(pieces);
        let completion = inflight.complete(IoStatus::Io);
        assert_eq!((completion.token, completion.result.unwrap_err().errno()), (7, 5));
        let buffers = completion.into_buffers();
        assert_eq!((&buffers[0][..], &buffers[1][..]), (&[1; 512][..], &[2; 1024][..]));
    }

    #[test]
    fn extents_are_validated() {
        let list = |fill: &dyn Fn(&MemSlice)| {
            let request = Request::extents(0, 4096);
            let (inflight, pieces) = InFlight::new(0, 4096, request.op, request.memory);
            let Pieces::One(piece) = pieces else { panic!("{pieces:?}") };
            fill(&piece);
            inflight.complete(IoStatus::Ok)
        };
        let completion = list(&|list| {
            let mut extents = extents::ExtentList::new(list);
            assert!(extents.push(extents::Extent { len: 512, hole: true }));
            assert!(extents.push(extents::Extent { len: 1 << 20, hole: false }));
        });
        assert_eq!(completion.result, Ok(()));
        let expected = [Extent { len: 512, hole: true }, Extent { len: 3584, hole: false }];
        assert_eq!(completion.extents(), expected);
        assert_eq!(list(&|_| ()).result.unwrap_err().errno(), 5, "an empty list");
    }
}
