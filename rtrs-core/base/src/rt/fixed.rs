//! Table of the memory registered with a ring, in pieces.
//!
//! Registering memory pins its pages, which blocks the calling thread, and no other thread can do
//! it for a ring while this one uses it (both hold the ring's lock). The chunks of one path take up
//! 130 MiB, whose registration takes 50 ms on a fast host and close to a second in a slow guest. So
//! a ring registers at most one piece of [`PIECE`] bytes per turn, and only used pieces: an
//! operation whose piece is not registered runs without it, and queues the piece for registration,
//! for the benefit of later operations. Released memory is unregistered in small steps too.
//!
//! This module is only the table; the system calls are in `ring.rs`.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use crate::mem::{MemSlice, Region, unit_of};

/// Maximum number of bytes that one turn pins.
pub(super) const PIECE: usize = 512 << 10;
/// Maximum number of registered pieces, limited by the kernel.
pub(super) const SLOTS: u16 = 1 << 14;

/// Division of a region into pieces. No piece crosses a multiple of the stride, and the pieces of
/// each stride start at its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    stride: usize,
    piece: usize,
    /// Number of pieces per stride.
    per: usize,
}

impl Layout {
    fn of(region: &Region) -> Self {
        match region.stride() {
            0 => Self { stride: PIECE, piece: PIECE, per: 1 },
            stride if stride > PIECE => Self { stride, piece: PIECE, per: stride.div_ceil(PIECE) },
            stride => {
                let stride = unit_of(stride);
                Self { stride, piece: stride, per: 1 }
            }
        }
    }

    fn count(self, len: usize) -> usize {
        len.div_ceil(self.stride) * self.per
    }

    /// Returns the piece that contains a slice, if there is one.
    fn find(self, offset: usize, len: usize) -> Option<usize> {
        let (row, at) = (offset / self.stride, offset % self.stride);
        let (part, from) = (at / self.piece, at % self.piece);
        let fits = from + len <= self.piece && at + len <= self.stride;
        fits.then_some(row * self.per + part)
    }

    /// Returns the offset and length of a piece in a region of `len` bytes.
    fn place(self, index: usize, len: usize) -> (usize, usize) {
        let (row, part) = (index / self.per, index % self.per);
        let start = row * self.stride + part * self.piece;
        let end = (start + self.piece).min((row + 1) * self.stride).min(len);
        (start, end.saturating_sub(start))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Unused,
    /// In use, and queued for registration.
    Wanted,
    Registered(u16),
}

#[derive(Debug)]
struct Attached {
    id: u64,
    region: Weak<Region>,
    /// Number of attachments.
    holders: u32,
    layout: Layout,
    pieces: Box<[Piece]>,
    /// The system refused, so no more of the region is registered.
    refused: bool,
}

/// Piece to register now.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) slot: u16,
    pub(super) region: Arc<Region>,
    pub(super) start: usize,
    pub(super) len: usize,
    index: usize,
}

/// State of registered and requested pieces.
#[derive(Debug, Default)]
pub(super) struct Fixed {
    regions: Vec<Attached>,
    free: Vec<u16>,
    /// Requested pieces, by region and index.
    wanted: VecDeque<(u64, usize)>,
    /// Slots whose pieces have been released.
    leaving: VecDeque<u16>,
    prepared: bool,
}

impl Fixed {
    /// Returns true once, before the first region: the ring must reserve [`SLOTS`] slots.
    pub(super) fn needs_room(&mut self) -> bool {
        !std::mem::replace(&mut self.prepared, true)
    }

    /// Records that the ring has reserved the slots.
    pub(super) fn add_room(&mut self) {
        self.free = (0..SLOTS).rev().collect();
    }

    /// Allows pieces of a region to be registered when they are used.
    pub(super) fn attach(&mut self, region: &Arc<Region>) {
        if let Some(known) = self.regions.iter_mut().find(|known| known.id == region.id()) {
            known.holders += 1;
            return;
        }
        let layout = Layout::of(region);
        let count = layout.count(region.len());
        self.wanted.reserve(count);
        self.regions.push(Attached {
            id: region.id(),
            region: Arc::downgrade(region),
            holders: 1,
            layout,
            pieces: vec![Piece::Unused; count].into(),
            refused: false,
        });
    }

    /// Undoes one `attach`. The last one releases all pieces.
    pub(super) fn detach(&mut self, id: u64) {
        let Some(at) = self.regions.iter().position(|known| known.id == id) else { return };
        self.regions[at].holders -= 1;
        if self.regions[at].holders > 0 {
            return;
        }
        let gone = self.regions.swap_remove(at);
        let slots = gone.pieces.iter().filter_map(|piece| match piece {
            Piece::Registered(slot) => Some(*slot),
            _ => None,
        });
        self.leaving.extend(slots);
        self.wanted.retain(|(of, _)| *of != id);
    }

    /// Returns the slot of a slice. If its piece has none, the piece is queued for registration.
    pub(super) fn slot(&mut self, buf: &MemSlice) -> Option<u16> {
        let id = buf.region().id();
        let known = self.regions.iter_mut().find(|known| known.id == id)?;
        let index = known.layout.find(buf.offset(), buf.len())?;
        match known.pieces[index] {
            Piece::Registered(slot) => return Some(slot),
            Piece::Unused if !known.refused => {
                known.pieces[index] = Piece::Wanted;
                self.wanted.push_back((id, index));
            }
            _ => {}
        }
        None
    }

    /// Returns true if nothing is waiting to be registered or released.
    pub(super) fn is_settled(&self) -> bool {
        self.wanted.is_empty() && self.leaving.is_empty()
    }

    /// Returns the next piece to register.
    pub(super) fn next_order(&mut self) -> Option<Order> {
        let (id, index) = self.wanted.pop_front()?;
        let known = self.regions.iter_mut().find(|known| known.id == id)?;
        known.pieces[index] = Piece::Unused;
        let region = known.region.upgrade()?;
        let slot = self.free.pop()?;
        let (start, len) = known.layout.place(index, region.len());
        Some(Order { slot, region, start, len, index })
    }

    /// Records the outcome of a registration.
    pub(super) fn registered(&mut self, order: &Order, done: bool) {
        let known = self.regions.iter_mut().find(|known| known.id == order.region.id());
        match known {
            Some(known) if done => known.pieces[order.index] = Piece::Registered(order.slot),
            Some(known) => {
                known.refused = true;
                self.free.push(order.slot);
            }
            None => self.leaving.push_back(order.slot),
        }
    }

    /// Returns the next slot to clear.
    pub(super) fn next_leaving(&mut self) -> Option<u16> {
        self.leaving.pop_front()
    }

    /// Records that a slot has been cleared.
    pub(super) fn cleared(&mut self, slot: u16) {
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Registers the requested pieces; returns their total length.
    fn turn(fixed: &mut Fixed, done: bool) -> usize {
        let order = fixed.next_order();
        order.map_or(0, |order| {
            fixed.registered(&order, done);
            order.len
        })
    }

    fn ready() -> Fixed {
        let mut fixed = Fixed::default();
        assert!(fixed.needs_room() && !fixed.needs_room());
        fixed.add_room();
        fixed
    }

    #[test]
    fn chunks_lie_within_one_short_piece() {
        for chunk in [4 << 10, 64 << 10, 128 << 10, 256 << 10, 508 << 10, 512 << 10, 4 << 20] {
            let stride = chunk + 4096;
            let region = Region::with_stride(stride * 9 - 4096, stride).unwrap();
            let layout = Layout::of(&region);
            let mut at = 0;
            for index in 0..layout.count(region.len()) {
                let (start, len) = layout.place(index, region.len());
                assert!(len <= PIECE && (start == at || len == 0), "{layout:?}: {start}+{len}");
                at = start + len;
            }
            assert_eq!(at, region.len(), "{layout:?}");
            for n in 0..9 {
                let found = layout.find(n * stride, chunk.min(PIECE));
                let (start, len) = layout.place(found.unwrap(), region.len());
                assert!(start <= n * stride && n * stride + chunk.min(PIECE) <= start + len);
            }
        }
        let plain = Region::new(3 * PIECE / 2).unwrap();
        let layout = Layout::of(&plain);
        assert_eq!((layout.find(PIECE - 1, 2), layout.find(PIECE, 2)), (None, Some(1)));
        assert_eq!(layout.place(1, plain.len()), (PIECE, PIECE / 2));
    }

    #[test]
    fn used_pieces_are_registered_one_at_a_time() {
        let mut fixed = ready();
        let region = Region::with_stride(8 * PIECE, PIECE).unwrap();
        let piece = |n: usize| region.slice(n * PIECE, 4096).unwrap();
        assert_eq!(fixed.slot(&piece(0)), None, "not attached");
        assert!(fixed.is_settled());
        fixed.attach(&region);
        assert!(fixed.is_settled(), "nothing is registered before it is used");
        for n in [3, 5, 3, 5] {
            assert_eq!(fixed.slot(&piece(n)), None);
        }
        assert_eq!([turn(&mut fixed, true), turn(&mut fixed, true)], [PIECE; 2]);
        assert!(fixed.is_settled(), "and each once");
        assert!(fixed.slot(&piece(3)).is_some() && fixed.slot(&piece(5)).is_some());
        assert_ne!(fixed.slot(&piece(3)), fixed.slot(&piece(5)));
        assert_eq!(fixed.slot(&region.slice(3 * PIECE, 2 * PIECE).unwrap()), None, "two pieces");
    }

    #[test]
    fn a_refusal_is_final() {
        let mut fixed = ready();
        let region = Region::new(4 * PIECE).unwrap();
        fixed.attach(&region);
        assert_eq!(fixed.slot(&region.slice(0, 1).unwrap()), None);
        turn(&mut fixed, false);
        assert_eq!(fixed.slot(&region.slice(0, 1).unwrap()), None);
        assert!(fixed.is_settled() && fixed.free.len() == usize::from(SLOTS));
        // Models a kernel without such tables.
        let mut fixed = Fixed::default();
        fixed.attach(&region);
        assert_eq!(fixed.slot(&region.slice(0, 1).unwrap()), None);
        assert_eq!(turn(&mut fixed, true), 0);
        assert!(fixed.is_settled());
    }

    #[test]
    fn the_last_holder_releases_all_pieces() {
        let mut fixed = ready();
        let region = Region::new(4 * PIECE).unwrap();
        fixed.attach(&region);
        fixed.attach(&region);
        for n in 0..3 {
            fixed.slot(&region.slice(n * PIECE, 1).unwrap());
        }
        turn(&mut fixed, true);
        turn(&mut fixed, true);
        fixed.detach(region.id());
        assert!(fixed.slot(&region.slice(0, 1).unwrap()).is_some(), "one still holds it");
        fixed.detach(region.id());
        fixed.detach(region.id());
        assert_eq!(fixed.slot(&region.slice(0, 1).unwrap()), None);
        assert_eq!(turn(&mut fixed, true), 0, "the requested piece no longer is");
        let mut left = 0;
        while let Some(slot) = fixed.next_leaving() {
            fixed.cleared(slot);
            left += 1;
        }
        assert_eq!((left, fixed.free.len()), (2, usize::from(SLOTS)));
    }
}
