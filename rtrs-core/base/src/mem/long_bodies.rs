//! A ring's long message bodies, in an area of their own.

use std::collections::VecDeque;

use super::ring_area::Area;

/// A message's body.
#[derive(Clone, Copy)]
pub(super) struct LongBody<'a> {
    pub(super) bytes: &'a [u8],
    /// Position in the ring after the body's message.
    pub(super) end: u64,
}

/// A ring's long bodies, as seen by its writer.
#[derive(Default)]
pub(super) struct LongBodies {
    /// Position after the bodies that have been written.
    written: u64,
    /// Position after the bodies that readers have taken.
    released: u64,
    /// For each body in between, the positions after its message in the ring and after the body.
    ends: VecDeque<(u64, u64)>,
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
}
