//! Extents: the parts of a device's range that hold data, and the parts that are holes.
//!
//! An extent list is the answer to [`IoOp::Extents`](crate::block::IoOp::Extents). It has the same
//! layout in the IO's buffer and on the wire: a count, then the extents in order from the first
//! byte of the range. Anything beyond the end of the list is unknown and can be requested
//! separately. Devices write lists with [`ExtentList`]; readers validate everything ([`read`]).

use crate::mem::MemSlice;

/// Part of a range that is entirely data or entirely a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, greater than 0.
    pub len: u64,
    /// The extent is not allocated and reads as zeroes.
    pub hole: bool,
}

/// Length of the header before the extents: their count and four zero bytes.
const HEAD: usize = 8;
/// Size of an encoded extent: its length, with the lowest bit set for a hole. Lengths are whole
/// sectors.
const ENTRY: usize = 8;
const HOLE: u64 = 1;
/// Minimum buffer size for an answer: room for one extent.
pub const LEN_MIN: usize = HEAD + ENTRY;
/// Maximum buffer size that is used: room for 511 extents.
pub const LEN_MAX: usize = 4096;
const COUNT_MAX: usize = (LEN_MAX - HEAD) / ENTRY;

/// Writes the extents of a range into a buffer.
#[derive(Debug)]
pub struct ExtentList<'a> {
    room: &'a MemSlice,
    count: u32,
    last: Option<Extent>,
}

impl<'a> ExtentList<'a> {
    /// Creates an empty list. Clears the whole buffer, which may hold old data.
    pub fn new(room: &'a MemSlice) -> Self {
        room.fill(0);
        Self { room, count: 0, last: None }
    }

    /// Appends an extent, or extends the last one. Returns false if there is no room; the list then
    /// ends before `extent`.
    pub fn push(&mut self, extent: Extent) -> bool {
        if extent.len == 0 {
            return true;
        }
        let joined = self.last.filter(|last| last.hole == extent.hole);
        let at = HEAD + ENTRY * (self.count as usize - usize::from(joined.is_some()));
        if at + ENTRY > self.room.len().min(LEN_MAX) {
            return false;
        }
        let len = extent.len + joined.map_or(0, |last| last.len);
        let word = len | if extent.hole { HOLE } else { 0 };
        self.room.copy_in(at, &word.to_le_bytes());
        self.count += u32::from(joined.is_none());
        self.room.copy_in(0, &self.count.to_le_bytes());
        self.last = Some(Extent { len, ..extent });
        true
    }
}

/// Writes a list in which all `len` bytes hold data, for a device without holes. `len` may exceed
/// the requested range.
pub fn all_data(room: &MemSlice, len: u64) {
    ExtentList::new(room).push(Extent { len, hole: false });
}

/// Returns the number of bytes of its buffer that a list uses, capped at the buffer's length.
pub fn used_len(list: &MemSlice) -> usize {
    let mut count = [0; 4];
    let Some(head) = list.slice(0, count.len()) else { return list.len() };
    head.copy_out(0, &mut count);
    let count = usize::try_from(u32::from_le_bytes(count)).unwrap_or(usize::MAX);
    count.saturating_mul(ENTRY).saturating_add(HEAD).min(list.len())
}

/// Size of a buffer for `count` extents, at most [`LEN_MAX`].
pub fn room_for(count: usize) -> usize {
    HEAD + ENTRY * count.clamp(1, COUNT_MAX)
}

/// Maximum number of extents in a buffer of `len` bytes.
pub fn count_in(len: usize) -> usize {
    len.min(LEN_MAX).saturating_sub(HEAD) / ENTRY
}

/// Visits the extents of a list for a range of `len` bytes, truncated at the end of the range,
/// until `visit` returns false. Returns false if the list is empty or invalid.
pub fn read(list: &MemSlice, len: u32, mut visit: impl FnMut(Extent) -> bool) -> bool {
    let mut left = u64::from(len);
    read_all(list, |extent| {
        let len = extent.len.min(left);
        left -= len;
        visit(Extent { len, ..extent }) && left > 0
    })
}

/// Visits the extents of a list, the last of which may extend beyond the range, until `visit`
/// returns false. Returns false if the list is empty or invalid.
pub fn read_all(list: &MemSlice, mut visit: impl FnMut(Extent) -> bool) -> bool {
    let word = |at| {
        let mut bytes = [0; ENTRY];
        list.slice(at, ENTRY).map(|slice| {
            slice.copy_out(0, &mut bytes);
            u64::from_le_bytes(bytes)
        })
    };
    let count = word(0).and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
    if count > COUNT_MAX {
        return false;
    }
    for number in 0..count {
        let extent = word(HEAD + ENTRY * number);
        let extent = extent.map(|word| Extent { len: word & !HOLE, hole: word & HOLE != 0 });
        let Some(extent) = extent.filter(|extent| extent.len > 0) else { return false };
        if !visit(extent) {
            return true;
        }
    }
    count > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Region;

    fn room(len: usize) -> MemSlice {
        let region = Region::new(len).unwrap();
        region.fill(0, region.len(), 0xff);
        region.slice(0, len).unwrap()
    }

    fn all(list: &MemSlice, len: u32) -> Option<Vec<(u64, bool)>> {
        let mut seen = Vec::new();
        read(list, len, |extent| {
            seen.push((extent.len, extent.hole));
            true
        })
        .then_some(seen)
    }

    #[test]
    fn written_extents_are_read_back() {
        let list = room(64);
        let mut extents = ExtentList::new(&list);
        for (len, hole) in [(512, false), (512, false), (0, true), (4096, true), (1 << 40, true)] {
            assert!(extents.push(Extent { len, hole }));
        }
        let whole = u32::MAX - 511;
        assert_eq!(all(&list, whole), Some(vec![(1024, false), (u64::from(whole) - 1024, true)]));
        assert_eq!(all(&list, 600), Some(vec![(600, false)]));
        let mut last = 0;
        assert!(read_all(&list, |extent| {
            last = extent.len;
            true
        }));
        assert_eq!(last, 4096 + (1 << 40), "the last one is not cut");
        assert_eq!(
            list.to_vec()[..16],
            [[2, 0, 0, 0, 0, 0, 0, 0], [0, 4, 0, 0, 0, 0, 0, 0]].concat()
        );
        assert!(list.to_vec()[24..].iter().all(|byte| *byte == 0), "nothing else leaks");
        all_data(&list, 512);
        assert_eq!(all(&list, 512), Some(vec![(512, false)]));
    }

    #[test]
    fn a_list_is_limited_by_its_buffer() {
        for (len, most) in [(LEN_MIN, 1), (LEN_MIN + 7, 1), (LEN_MAX, 511), (8192, 511)] {
            let list = room(len);
            let mut extents = ExtentList::new(&list);
            let taken =
                (0..600).take_while(|n| extents.push(Extent { len: 512, hole: n % 2 == 1 }));
            assert_eq!(taken.count(), most);
            let last = Extent { len: 512, hole: most % 2 == 0 };
            assert!(extents.push(last), "the last one may become longer");
            assert_eq!(all(&list, u32::MAX).unwrap().len(), most);
        }
    }

    #[test]
    fn a_list_uses_the_bytes_of_its_extents() {
        let list = room(LEN_MAX);
        assert_eq!(used_len(&list), LEN_MAX, "not beyond the buffer");
        let mut extents = ExtentList::new(&list);
        for count in 1..=COUNT_MAX {
            assert!(extents.push(Extent { len: 512, hole: count % 2 == 0 }));
            assert_eq!(used_len(&list), room_for(count));
            assert_eq!(count_in(room_for(count)), count);
        }
        assert_eq!((room_for(0), room_for(COUNT_MAX + 1)), (LEN_MIN, LEN_MAX));
        assert_eq!((count_in(0), count_in(LEN_MIN + 7), count_in(8192)), (0, 1, COUNT_MAX));
        assert_eq!(used_len(&list.slice(0, 3).unwrap()), 3);
    }

    #[test]
    fn invalid_lists_are_rejected() {
        let list = room(64);
        assert_eq!(all(&list, 512), None, "only ones");
        list.fill(0);
        assert_eq!(all(&list, 512), None, "no extent");
        list.copy_in(0, &[2]);
        assert_eq!(all(&list, 512), None, "empty extents");
        list.copy_in(8, &[0, 2]);
        assert_eq!(all(&list, 512), Some(vec![(512, false)]), "enough");
        assert_eq!(all(&list, 1024), None, "an empty extent");
        list.copy_in(0, &[200]);
        list.slice(8, 56).unwrap().fill(8);
        assert_eq!(all(&list, u32::MAX), Some(vec![(u64::from(u32::MAX), false)]));
        let short = list.slice(0, 4).unwrap();
        assert_eq!(all(&short, 512), None);
    }
}
