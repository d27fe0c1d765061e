//! Long message bodies of a ring, in an area of their own.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{FallocateFlags, fallocate};

use super::ring_area::Area;

/// A message's body.
#[derive(Clone, Copy)]
pub(super) struct LongBody<'a> {
    pub(super) bytes: &'a [u8],
    /// Position in the ring after the body's message.
    pub(super) end: u64,
}

/// Long bodies of a ring, for its writer.
#[derive(Default)]
pub(super) struct LongBodies {
    /// Position after the bodies that were written.
    written: u64,
    /// Position after those that readers have taken.
    released: u64,
    /// For each other body, the positions after its message in the ring and after the body itself.
    ends: VecDeque<(u64, u64)>,
    /// Value of `written` when the memory was last given back.
    trimmed: u64,
    /// Value of `written` when `trim` last compared it.
    seen: u64,
}

impl LongBodies {
    /// Returns the position of the next body.
    pub(super) fn position(&self) -> u64 {
        self.written
    }

    /// Writes a body. Returns false if there is no room. `tail` is the ring's.
    pub(super) fn write(&mut self, area: &Area, tail: u64, body: LongBody<'_>) -> bool {
        self.release(tail);
        let used = usize::try_from(self.written - self.released).unwrap_or(usize::MAX);
        if area.len.saturating_sub(used) < body.bytes.len() {
            return false;
        }
        area.write(self.written as usize, body.bytes);
        self.written += body.bytes.len() as u64;
        self.ends.push_back((body.end, self.written));
        true
    }

    /// Returns the position in the ring up to which messages must be taken before a body of this
    /// length fits; 0 if it fits now.
    pub(super) fn end_with_room(&self, area: &Area, len: usize) -> u64 {
        let has_room = |released: u64| self.written - released + len as u64 <= area.len as u64;
        if has_room(self.released) {
            return 0;
        }
        let mut ends = self.ends.iter();
        ends.find(|(_, end)| has_room(*end)).map_or(0, |(at, _)| *at)
    }

    /// Releases the bodies of messages before the tail.
    fn release(&mut self, tail: u64) {
        while let Some((_, end)) = self.ends.pop_front_if(|(at, _)| *at <= tail) {
            self.released = end;
        }
    }

    /// Frees the memory if all bodies are released and none was written since the last call.
    /// Returns whether to call again.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn trim(&mut self, area: &Area, tail: u64, fd: BorrowedFd<'_>) -> io::Result<bool> {
        if self.trimmed == self.written {
            return Ok(false);
        }
        let is_unused = std::mem::replace(&mut self.seen, self.written) == self.written;
        self.release(tail);
        if !is_unused || !self.ends.is_empty() {
            return Ok(true);
        }
        self.trimmed = self.written;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(fd, flags, area.data as u64, area.len as u64)?;
        Ok(false)
    }
}
