//! Ends of a copy, and requests to them.

use std::sync::mpsc;

use rtrs_core::extents::Extent;
use rtrs_core::mem::OwnedBytes;

use super::failure::Failure;

/// Number and size of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Maximum number of pieces at a time.
    pub(crate) requests: u16,
    /// Longest read or write.
    pub(crate) io_max: u32,
}

/// Parameters of an end to be opened.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) sizes: Sizes,
    pub(super) results: Results,
}

/// Position of an end in a copy or comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Source,
    Destination,
}

impl Which {
    pub(super) const ALL: [Self; 2] = [Self::Source, Self::Destination];
}

/// Size and capabilities of an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Number of bytes that the end holds or can hold; None for a stream or a file that grows.
    pub(super) size: Option<u64>,
    /// Block size; offsets are multiples of it.
    pub(super) block: u32,
    /// Longest read or write.
    pub(super) io_max: u32,
    /// Longest write of zeroes.
    pub(super) zeroes_max: u64,
    /// Whether [`Op::Extents`] is worth a request.
    pub(super) extents: bool,
    /// Whether everything reads as zeroes before the first write.
    pub(super) is_zero: bool,
}

/// Operation on an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Read,
    Write,
    /// Makes a range read as zeroes.
    Zero,
    /// Lists one or more extents, starting at the offset.
    Extents,
    /// Ends the writes: `len` is the number of bytes in the result.
    Finish {
        /// Whether the result must be durable.
        durable: bool,
    },
}

impl Op {
    /// Verb for errors, followed by the name of the end.
    pub(super) fn verb(self) -> &'static str {
        match self {
            Self::Read => "read from",
            Self::Write => "write to",
            Self::Zero => "write zeroes to",
            Self::Extents => "list the extents of",
            Self::Finish { .. } => "flush",
        }
    }
}

/// Request to an end.
#[derive(Debug)]
pub(super) struct Request {
    /// Number of the request, unique among the end's requests in flight.
    pub(super) slot: usize,
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Memory of a read or write: at least `len` bytes, rounded up to the block size of the end.
    pub(super) buffer: Option<OwnedBytes>,
}

/// Result of a successful request.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// Number of bytes that a read returned; fewer than requested at the end of a stream.
    pub(super) len: u64,
    pub(super) extents: Vec<Extent>,
}

/// Finished request.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) side: Which,
    pub(super) slot: usize,
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) buffer: Option<OwnedBytes>,
    pub(super) result: Result<Answer, Failure>,
}

/// Reason to wake the thread that runs a copy.
#[derive(Debug)]
pub(super) enum Wake {
    Done(Done),
    /// A signal asked the copy to end.
    Signal,
}

/// Sender for an end's results.
#[derive(Clone, Debug)]
pub(super) struct Results {
    pub(super) side: Which,
    pub(super) wakes: mpsc::Sender<Wake>,
}

impl Results {
    /// Reports the result of a request. Returns false if the copy has ended.
    pub(super) fn send(&self, request: Request, result: Result<Answer, Failure>) -> bool {
        let Request { slot, op, offset, buffer, .. } = request;
        let done = Done { side: self.side, slot, op, offset, buffer, result };
        self.wakes.send(Wake::Done(done)).is_ok()
    }
}

/// End of a copy. The results of requests arrive in any order as [`Wake::Done`].
pub(super) trait Side {
    fn limits(&self) -> &Limits;

    fn submit(&mut self, request: Request);

    /// Reason why all requests fail, if any.
    fn explain(&self) -> Option<String> {
        None
    }
}

/// End of a copy, with its name for messages.
pub(super) struct End {
    pub(super) side: Box<dyn Side>,
    pub(super) name: String,
}
