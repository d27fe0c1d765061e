//! Divides a copy or comparison into pieces, following the extents at both ends.

use std::collections::VecDeque;

use rtrs_core::extents::Extent;

/// Range for which extents are requested at a time.
const EXTENTS_RANGE: u64 = 1 << 31;
/// Number of known ranges below which more extents are requested.
const RANGES_LOW: usize = 64;

/// Known extents of an end, starting at the planner's position.
#[derive(Debug)]
pub(super) struct ExtentMap {
    /// Number of bytes that the map covers.
    size: u64,
    /// Alignment in bytes of the starts and ends of holes.
    align: u64,
    /// Ends of ranges, in order, and whether each range is a hole. Adjacent ranges differ.
    ranges: VecDeque<(u64, bool)>,
    /// Everything before this offset is known, or was known and has been forgotten.
    end: u64,
    /// Whether a request for extents is in flight.
    requested: bool,
}

impl ExtentMap {
    /// Creates a map whose extents are yet to be requested.
    pub(super) fn new(size: u64, align: u64) -> Self {
        Self { size, align, ranges: VecDeque::new(), end: 0, requested: false }
    }

    /// Creates the map of an end that consists entirely of a hole, or entirely of data.
    pub(super) fn uniform(hole: bool) -> Self {
        Self { ranges: [(u64::MAX, hole)].into(), end: u64::MAX, ..Self::new(u64::MAX, 1) }
    }

    /// Returns the offset and length of the next request for extents, if one is due.
    pub(super) fn next_request(&mut self) -> Option<(u64, u64)> {
        if self.requested || self.end >= self.size || self.ranges.len() >= RANGES_LOW {
            return None;
        }
        self.requested = true;
        Some((self.end, (self.size - self.end).min(EXTENTS_RANGE)))
    }

    /// Adds the answer to a request.
    pub(super) fn add(&mut self, extents: &[Extent]) {
        self.requested = false;
        for extent in extents {
            let (from, to) = (self.end, self.end.saturating_add(extent.len).min(self.size));
            if extent.hole {
                self.push(from.next_multiple_of(self.align).min(to), false);
                self.push(if to == self.size { to } else { to - to % self.align }, true);
            }
            self.push(to, false);
        }
    }

    /// Treats everything unknown as data.
    pub(super) fn give_up(&mut self) {
        self.push(self.size, false);
    }

    /// Extends the map to `end` if that is beyond its current end.
    fn push(&mut self, end: u64, hole: bool) {
        if end <= self.end {
            return;
        }
        self.end = end;
        match self.ranges.back_mut() {
            Some((last, same)) if *same == hole => *last = end,
            _ => self.ranges.push_back((end, hole)),
        }
    }

    /// Returns the end of the range at an offset and whether it is a hole; None if that is not
    /// known yet. There are no holes beyond the size.
    fn at(&self, offset: u64) -> Option<(u64, bool)> {
        if offset >= self.size {
            return Some((u64::MAX, false));
        }
        self.ranges.iter().find(|(end, _)| *end > offset).copied()
    }

    fn forget_before(&mut self, offset: u64) {
        while self.ranges.front().is_some_and(|(end, _)| *end <= offset) {
            self.ranges.pop_front();
        }
    }
}

/// Part of a copy or comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Whether the piece is a hole in the source.
    pub(super) source_hole: bool,
    /// Whether the piece reads as zeroes in the destination.
    pub(super) destination_hole: bool,
}

/// Lengths of pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct PieceSizes {
    /// Maximum length of a piece with data.
    pub(super) data: u64,
    /// Maximum length of a piece that is a hole only in the source.
    pub(super) zeroes: u64,
}

/// Divides the range from 0 to `limit` into pieces, in order.
#[derive(Debug)]
pub(super) struct Planner {
    pub(super) source: ExtentMap,
    pub(super) destination: ExtentMap,
    sizes: PieceSizes,
    limit: u64,
    next: u64,
}

impl Planner {
    pub(super) fn new(
        source: ExtentMap,
        destination: ExtentMap,
        sizes: PieceSizes,
        limit: u64,
    ) -> Self {
        Self { source, destination, sizes, limit, next: 0 }
    }

    /// Returns the next piece; None if its extents are not known yet or there are no more pieces.
    pub(super) fn next_piece(&mut self) -> Option<Piece> {
        let offset = self.next;
        if self.is_finished() {
            return None;
        }
        let (source_end, source_hole) = self.source.at(offset)?;
        let (destination_end, destination_hole) = self.destination.at(offset)?;
        let end = source_end.min(destination_end).min(self.limit);
        let len = match (source_hole, destination_hole) {
            (true, true) => end - offset,
            (true, false) => (end - offset).min(self.sizes.zeroes),
            // Ends at a multiple of the maximum length, so that requests are aligned.
            (false, _) => (end - offset).min(self.sizes.data - offset % self.sizes.data),
        };
        self.next += len;
        self.source.forget_before(self.next);
        self.destination.forget_before(self.next);
        Some(Piece { offset, len, source_hole, destination_hole })
    }

    /// Makes the range end at `limit` if it would end later.
    pub(super) fn end_at(&mut self, limit: u64) {
        self.limit = self.limit.min(limit);
    }

    pub(super) fn is_finished(&self) -> bool {
        self.next >= self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: PieceSizes = PieceSizes { data: 64 << 10, zeroes: 1 << 20 };

    fn map(size: u64, extents: &[(u64, bool)]) -> ExtentMap {
        let mut map = ExtentMap::new(size, 4096);
        assert!(map.next_request().is_some());
        let extents: Vec<_> = extents.iter().map(|&(len, hole)| Extent { len, hole }).collect();
        map.add(&extents);
        map
    }

    /// Offset, length, and the holes of source and destination of all pieces.
    fn pieces(mut planner: Planner) -> Vec<(u64, u64, bool, bool)> {
        let pieces = std::iter::from_fn(|| planner.next_piece());
        pieces.map(|one| (one.offset, one.len, one.source_hole, one.destination_hole)).collect()
    }

    #[test]
    fn data_is_split_at_multiples_and_holes_are_longer() {
        let size = 8 << 20;
        let source = map(size, &[(12 << 10, false), (3 << 20, true), (70 << 10, false)]);
        let mut planner = Planner::new(source, ExtentMap::uniform(false), SIZES, size);
        planner.source.give_up();
        planner.end_at((12 << 10) + (3 << 20) + (130 << 10));
        let begin = (12 << 10) + (3 << 20);
        assert_eq!(
            pieces(planner),
            [
                (0, 12 << 10, false, false),
                (12 << 10, 1 << 20, true, false),
                ((12 << 10) + (1 << 20), 1 << 20, true, false),
                ((12 << 10) + (2 << 20), 1 << 20, true, false),
                (begin, 52 << 10, false, false),
                (begin + (52 << 10), 64 << 10, false, false),
                (begin + (116 << 10), 14 << 10, false, false),
            ]
        );
    }

    #[test]
    fn a_hole_at_both_ends_is_one_piece() {
        let size = 1 << 40;
        let source = map(size, &[(size, true)]);
        let planner = Planner::new(source, ExtentMap::uniform(true), SIZES, size);
        assert_eq!(pieces(planner), [(0, size, true, true)]);
    }

    #[test]
    fn holes_shrink_to_whole_blocks_but_not_at_the_end() {
        let size = 20_001;
        let found = |extents| {
            let planner = Planner::new(map(size, extents), ExtentMap::uniform(true), SIZES, size);
            pieces(planner)
                .into_iter()
                .map(|(at, len, hole, _)| (at, len, hole))
                .collect::<Vec<_>>()
        };
        let extents = [(100, false), (10_000, true), (1, false), (9_900, true)];
        let expected =
            [(0, 4096, false), (4096, 4096, true), (8192, 4096, false), (12_288, 7713, true)];
        assert_eq!(found(&extents), expected);
        // A hole within a block.
        assert_eq!(found(&[(100, false), (512, true), (20_000, false)]), [(0, 20_001, false)]);
    }

    #[test]
    fn pieces_end_where_the_extents_of_either_end_do() {
        let source = map(16_384, &[(8192, true), (8192, false)]);
        let destination = map(16_384, &[(4096, true), (8192, false), (4096, true)]);
        let planner = Planner::new(source, destination, SIZES, 16_384);
        assert_eq!(
            pieces(planner),
            [
                (0, 4096, true, true),
                (4096, 4096, true, false),
                (8192, 4096, false, false),
                (12_288, 4096, false, true),
            ]
        );
    }

    #[test]
    fn extents_are_requested_ahead_and_one_at_a_time() {
        let size = 3 * EXTENTS_RANGE;
        let mut map = ExtentMap::new(size, 4096);
        assert_eq!(map.next_request(), Some((0, EXTENTS_RANGE)));
        assert_eq!((map.next_request(), map.at(0)), (None, None));
        map.add(&[Extent { len: 8192, hole: true }]);
        assert_eq!(map.next_request(), Some((8192, EXTENTS_RANGE)));
        let many = (0..RANGES_LOW as u64).map(|at| Extent { len: 4096, hole: at % 2 == 1 });
        map.add(&many.collect::<Vec<_>>());
        assert_eq!(map.next_request(), None, "enough is known");
        map.forget_before(map.end);
        let from = 8192 + 4096 * RANGES_LOW as u64;
        assert_eq!(map.next_request(), Some((from, EXTENTS_RANGE)));
        map.add(&[Extent { len: size, hole: true }]);
        assert_eq!((map.end, map.next_request()), (size, None));
    }

    #[test]
    fn a_stream_has_pieces_until_its_end() {
        let data = || ExtentMap::uniform(false);
        let mut planner = Planner::new(data(), data(), SIZES, u64::MAX);
        assert_eq!(planner.next_piece().map(|piece| piece.len), Some(64 << 10));
        assert_eq!(planner.next_piece().map(|piece| piece.offset), Some(64 << 10));
        planner.end_at(70_000);
        assert!(planner.is_finished() && planner.next_piece().is_none());
    }
}
