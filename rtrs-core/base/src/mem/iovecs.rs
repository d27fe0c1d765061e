//! I/O vectors for `sendmsg` and `recvmsg`.

use std::fmt;

use super::region::MemSlice;

/// Reusable list of slices in the form that `sendmsg` and `recvmsg` take.
///
/// Users box it and move it into the operation; the completion returns it.
pub struct IoVecs {
    slices: Vec<MemSlice>,
    raw: Vec<libc::iovec>,
    header: libc::msghdr,
    first: usize,
}

// SAFETY: the raw pointers point into regions that `slices` keeps alive; regions are Send.
unsafe impl Send for IoVecs {}

impl IoVecs {
    /// Creates an empty list with room for `capacity` slices; it never grows beyond that.
    pub fn new(capacity: usize) -> Box<Self> {
        // SAFETY: msghdr is plain data, for which all zeroes is the empty header.
        let header: libc::msghdr = unsafe { std::mem::zeroed() };
        Box::new(Self {
            slices: Vec::with_capacity(capacity),
            raw: Vec::with_capacity(capacity),
            header,
            first: 0,
        })
    }

    /// Drops all slices and keeps the allocation.
    pub fn clear(&mut self) {
        self.slices.clear();
        self.raw.clear();
        self.first = 0;
    }

    /// Returns how many more slices fit.
    pub fn room(&self) -> usize {
        self.slices.capacity() - self.slices.len()
    }

    /// Appends a slice. Empty slices are ignored, and a slice that continues the previous one in
    /// memory extends it. A scattered slice needs room for each of its parts
    /// ([`MemSlice::len_of_parts`]). Panics if there is no room.
    pub fn push(&mut self, slice: MemSlice) {
        if slice.is_empty() {
            return;
        }
        if slice.region().is_scattered() {
            return self.push_parts(&slice);
        }
        if let (Some(last), Some(raw)) = (self.slices.last_mut(), self.raw.last_mut())
            && last.extend(&slice)
        {
            raw.iov_len += slice.len();
            return;
        }
        assert!(self.room() > 0, "no room in the vector list");
        self.raw.push(libc::iovec { iov_base: slice.address().cast(), iov_len: slice.len() });
        self.slices.push(slice);
    }

    /// Appends the parts of a scattered slice. If its owner has since assigned more pieces than
    /// there is room for, the list ends with bounce memory to reach the promised length.
    fn push_parts(&mut self, slice: &MemSlice) {
        let (Some(parts), mut done) = (slice.region().parts(), 0) else { return };
        while done < slice.len() {
            let (offset, left) = (slice.offset() + done, slice.len() - done);
            let bounce = parts.bounce().slice(offset, left).filter(|_| self.room() <= 1);
            let part = bounce.unwrap_or_else(|| parts.first_part(offset, left));
            done += part.len();
            self.push(part);
        }
    }

    /// Returns the number of bytes not yet skipped by [`IoVecs::advance`].
    pub fn remaining(&self) -> usize {
        self.raw[self.first..].iter().map(|v| v.iov_len).sum()
    }

    /// Returns true if no bytes remain.
    pub fn is_empty(&self) -> bool {
        self.first == self.raw.len()
    }

    /// Fills the slices in order, as a receive would; returns the number of bytes that fit. For
    /// state machines driven without a socket. Must be called before any `advance`.
    pub fn fill_from(&self, bytes: &[u8]) -> usize {
        let mut at = 0;
        for slice in &self.slices {
            let take = slice.len().min(bytes.len() - at);
            slice.copy_in(0, &bytes[at..at + take]);
            at += take;
        }
        at
    }

    /// Appends a copy of all bytes to `into`, as a send would take them; the counterpart of
    /// `fill_from`.
    pub fn gather(&self, into: &mut Vec<u8>) {
        for slice in &self.slices {
            let at = into.len();
            into.resize(at + slice.len(), 0);
            slice.copy_out(0, &mut into[at..]);
        }
    }

    /// Copies remaining bytes into `to`, as many as fit, and skips them. Returns their number.
    pub fn take_into(&mut self, to: &mut [u8]) -> usize {
        let mut at = 0;
        while at < to.len() && self.first < self.raw.len() {
            let (slice, left) = (&self.slices[self.first], self.raw[self.first].iov_len);
            let take = left.min(to.len() - at);
            slice.copy_out(slice.len() - left, &mut to[at..at + take]);
            at += take;
            self.advance(take);
        }
        at
    }

    /// Skips `count` bytes that were sent or received. Panics if fewer remain.
    pub fn advance(&mut self, mut count: usize) {
        while count > 0 {
            let raw = &mut self.raw[self.first];
            if count < raw.iov_len {
                raw.iov_base = raw.iov_base.cast::<u8>().wrapping_add(count).cast();
                raw.iov_len -= count;
                return;
            }
            count -= raw.iov_len;
            raw.iov_len = 0;
            self.first += 1;
        }
    }

    /// Returns the message header for the remaining bytes; valid until the box is moved from or
    /// changed.
    pub fn header(&mut self) -> *mut libc::msghdr {
        self.header.msg_iov = self.raw[self.first..].as_mut_ptr();
        self.header.msg_iovlen = self.raw.len() - self.first;
        &raw mut self.header
    }
}

impl fmt::Debug for IoVecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.slices[self.first.min(self.slices.len())..]).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::IoVecs;
    use crate::mem::{Pool, Region};

    #[test]
    fn vectors_merge_and_advance() {
        let region = Region::new(4096).unwrap();
        let mut vecs = IoVecs::new(2);
        vecs.push(region.slice(0, 10).unwrap());
        vecs.push(region.slice(10, 10).unwrap());
        vecs.push(region.slice(100, 5).unwrap());
        assert_eq!((vecs.room(), vecs.remaining()), (0, 25));
        vecs.advance(19);
        assert_eq!(vecs.remaining(), 6);
        vecs.advance(1);
        assert_eq!(vecs.remaining(), 5);
        vecs.advance(5);
        assert!(vecs.is_empty());
    }

    #[test]
    fn vectors_are_consumed_in_parts() {
        let region = Region::new(4096).unwrap();
        region.copy_in(0, b"0123456789");
        let mut vecs = IoVecs::new(2);
        vecs.push(region.slice(0, 3).unwrap());
        vecs.push(region.slice(5, 5).unwrap());
        let mut part = [0; 4];
        assert_eq!((vecs.take_into(&mut part), &part), (4, b"0125"));
        assert_eq!((vecs.take_into(&mut part), &part), (4, b"6789"));
        assert_eq!(vecs.take_into(&mut part), 0);
        assert!(vecs.is_empty());
    }

    #[test]
    fn a_list_takes_the_parts_of_a_scattered_slice() {
        let memory = Region::new(4096).unwrap();
        memory.copy_in(0, b"0123456789");
        let mut pool = Pool::scattered(1, 4096).unwrap();
        let buffer = pool.take().unwrap();
        let pieces = [(7, 3), (0, 2), (2, 1), (5, 1)];
        let pieces = pieces.map(|(at, len)| memory.slice(at, len).unwrap());
        let bytes = pool.assign(buffer, pieces).unwrap();
        let mut vecs = IoVecs::new(4);
        vecs.push(bytes.clone());
        assert_eq!((vecs.remaining(), vecs.room()), (7, 1), "two pieces are adjacent");
        let mut seen = Vec::new();
        vecs.gather(&mut seen);
        assert_eq!(seen, b"7890125");
        assert_eq!(vecs.fill_from(b"abcdefg"), 7);
        assert_eq!(memory.slice(0, 10).unwrap().to_vec(), b"def34g6abc");

        // More pieces than announced: the list still has the right length.
        let mut short = IoVecs::new(2);
        short.push(bytes);
        assert_eq!((short.remaining(), short.room()), (7, 0));
        short.fill_from(b"ABCDEFG");
        assert_eq!(memory.slice(0, 10).unwrap().to_vec(), b"def34g6ABC");
    }
}
