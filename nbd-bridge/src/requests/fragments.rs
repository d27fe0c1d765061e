//! A request's writes to parts of blocks: their progress and their memory.

use std::ops::Range;

use rtrs_core::mem::MemSlice;

use crate::buffers::Part;
use crate::cut::Cut;

/// Progress of a write to part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fragment {
    /// There is no such write, its bytes have not been received yet, or it has completed.
    None,
    /// Waiting for its turn.
    Waiting,
    /// Its turn has come, but the device queue was too full for the read of the block.
    ToRead,
    /// The block is being read.
    Reading,
    /// The block is being read, but the write was canceled and nothing follows.
    Dropped,
    /// The bytes have been merged into the block, but the device queue was full.
    ToWrite,
    /// The block is being written.
    Writing,
    /// The device itself is writing the partial block.
    WritingPart,
}

impl Fragment {
    /// Whether the fragment has begun and not yet ended. Open fragments count as pending.
    pub(crate) fn is_open(self) -> bool {
        self != Self::None
    }

    /// Whether the fragment has an IO in flight at the device.
    pub(crate) fn is_at_device(self) -> bool {
        matches!(self, Self::Reading | Self::Dropped | Self::Writing | Self::WritingPart)
    }

    /// Whether the fragment is waiting for other requests, or for room in the device queue.
    pub(crate) fn waits(self) -> bool {
        matches!(self, Self::Waiting | Self::ToRead | Self::ToWrite)
    }
}

/// The two fragments of a request, in the order of `Cut::rest`.
#[derive(Debug)]
pub(crate) struct Fragments {
    states: [Fragment; 2],
    /// Whether the device has rejected a partial write, so that blocks are read, modified and
    /// written back.
    whole_blocks: bool,
    /// Two blocks for each fragment: the block, and the new bytes at their position in the block.
    memory: Option<Part>,
}

impl Fragments {
    pub(crate) const fn none() -> Self {
        Self { states: [Fragment::None; 2], whole_blocks: false, memory: None }
    }

    pub(crate) fn state(&self, which: usize) -> Fragment {
        self.states[which]
    }

    pub(crate) fn set(&mut self, which: usize, state: Fragment) {
        self.states[which] = state;
    }

    /// Number of open fragments.
    pub(crate) fn open(&self) -> usize {
        self.states.iter().filter(|state| state.is_open()).count()
    }

    /// Whether a fragment has an IO in flight at the device.
    pub(crate) fn any_at_device(&self) -> bool {
        self.states.iter().any(|state| state.is_at_device())
    }

    /// Whether fragment `which`, which may be out of range, has an IO in flight at the device.
    pub(crate) fn is_at_device(&self, which: usize) -> bool {
        self.states.get(which).is_some_and(|state| state.is_at_device())
    }

    /// Whether a fragment is waiting for other requests, or for room in the device queue.
    pub(crate) fn any_waits(&self) -> bool {
        self.states.iter().any(|state| state.waits())
    }

    /// Whether blocks must be read, modified and written back.
    pub(crate) fn whole_blocks(&self) -> bool {
        self.whole_blocks
    }

    /// Restarts a fragment without a partial write, because the device has rejected one.
    pub(crate) fn retry_whole(&mut self, which: usize) {
        (self.states[which], self.whole_blocks) = (Fragment::ToRead, true);
    }

    /// Sets the memory of the fragments.
    pub(crate) fn set_memory(&mut self, memory: Option<Part>) {
        self.memory = memory;
    }

    pub(crate) fn take_memory(&mut self) -> Option<Part> {
        self.memory.take()
    }

    pub(crate) fn has_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// Returns the memory of a fragment: its block, and the new bytes.
    pub(crate) fn slices(&self, cut: &Cut, which: usize) -> Option<(MemSlice, MemSlice)> {
        let block = cut.block;
        let bytes = &cut.rest[which];
        #[allow(clippy::cast_possible_truncation, reason = "below the size of a block")]
        let (from, len) = ((bytes.start % block) as usize, (bytes.end - bytes.start) as usize);
        let before = cut.rest[..which].iter().filter(|bytes| !bytes.is_empty()).count();
        let at = 2 * before * block as usize;
        let part = |at, len| self.memory.as_ref().and_then(|memory| memory.slice.slice(at, len));
        part(at, block as usize).zip(part(at + block as usize + from, len))
    }

    /// Merges the new bytes of a fragment into its block. Returns false if they lie outside the
    /// block.
    pub(crate) fn merge(&self, cut: &Cut, which: usize) -> bool {
        let from = cut.rest[which].start % cut.block;
        let Some((block, bytes)) = self.slices(cut, which) else { return false };
        let place = usize::try_from(from).ok().and_then(|from| block.slice(from, bytes.len()));
        if let Some(place) = &place {
            place.copy_from(&bytes);
        }
        place.is_some()
    }
}

/// Returns the block that a fragment partly changes.
pub(crate) fn block_of(cut: &Cut, which: usize) -> Range<u64> {
    let start = cut.rest[which].start / cut.block * cut.block;
    start..start + cut.block
}
