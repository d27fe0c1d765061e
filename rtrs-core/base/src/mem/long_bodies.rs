//! Long bodies of messages of a ring, in an area of their own.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{FallocateFlags, fallocate};

use super::ring_area::Area;

/// A body of a message.
#[derive(Clone, Copy)]
pub(super) struct LongBody<'a> {
    pub(super) bytes: &'a [u8],
    /// Position after its message in the ring.
    pub(super) end: u64,
}

/// Long bodies of a ring, for its writer.
#[derive(Default)]
pub(super) struct LongBodies {
    /// Position after the bodies that were written.
    written: u64,
    /// Position after those that readers have taken.
    released: u64,
    /// Positions after the other ones: of their messages in the ring, and of the bodies.
    ends: VecDeque<(u64, u64)>,
    /// Value of `written` when the memory was last given back.
    trimmed: u64,
    /// Value of `written` at the last look.
    seen: u64,
}

impl LongBodies {
    /// Returns the position of the next body.
    pub(super) fn position(&self) -> u64 {
        self.written
    }

    /// Writes a body. Returns false if there is no room. `tail` is that of the ring.
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

    /// Returns the position in the ring after the messages to be taken before there is room for a
    /// body of this length; 0 if there is.
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

    /// Gives the memory back to the system, if all bodies are released and there was none since the
    /// last call. Returns whether to call again.
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
