//! Memory of a request, starting at a given byte.

use rtrs_core::mem::MemSlice;

/// Pieces of memory without their first bytes.
#[derive(Clone, Copy)]
pub(crate) struct Pieces<'a> {
    pub(crate) all: &'a [MemSlice],
    /// Number of bytes to skip.
    pub(crate) from: u64,
}

impl<'a> Pieces<'a> {
    /// Returns the pieces of the next `len` bytes.
    pub(crate) fn cut(self, len: usize) -> impl Iterator<Item = MemSlice> + use<'a> {
        let (mut skip, mut left) = (self.from, len);
        self.all.iter().filter_map(move |piece| {
            let begin = usize::try_from(skip).map_or(piece.len(), |skip| skip.min(piece.len()));
            skip -= begin as u64;
            let count = left.min(piece.len() - begin);
            left -= count;
            if count == 0 { None } else { piece.slice(begin, count) }
        })
    }

    /// Fills contiguous memory with the next bytes.
    pub(crate) fn copy_to(self, memory: &MemSlice) {
        self.each(memory, |part, piece| part.copy_from(piece));
    }

    /// Copies contiguous memory to the next bytes.
    pub(crate) fn copy_from(self, memory: &MemSlice) {
        self.each(memory, |part, piece| piece.copy_from(part));
    }

    fn each(self, memory: &MemSlice, copy: impl Fn(&MemSlice, &MemSlice)) {
        let mut at = 0;
        for piece in self.cut(memory.len()) {
            if let Some(part) = memory.slice(at, piece.len()) {
                copy(&part, &piece);
            }
            at += piece.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::mem::Region;

    use super::*;

    #[test]
    fn bytes_are_found_in_their_pieces() {
        let memory = Region::new(4096).unwrap();
        memory.copy_in(0, b"abcdefghij----");
        let all: Vec<_> =
            [(7, 3), (0, 1), (1, 6)].map(|(at, len)| memory.slice(at, len).unwrap()).into();
        let text = b"hijabcdefg";
        let buffer = Region::new(4096).unwrap();
        for from in 0..10 {
            let pieces = Pieces { all: &all, from };
            for len in 0..=10 - from as usize {
                let slice = buffer.slice(0, len).unwrap();
                pieces.copy_to(&slice);
                let bytes = &text[from as usize..from as usize + len];
                assert_eq!(slice.to_vec(), bytes, "{from} {len}");
                let cut: Vec<u8> = pieces.cut(len).flat_map(|piece| piece.to_vec()).collect();
                assert_eq!(cut, bytes);
            }
        }
        let pieces = Pieces { all: &all, from: 2 };
        buffer.copy_in(0, b"12345");
        pieces.copy_from(&buffer.slice(0, 5).unwrap());
        assert_eq!(memory.slice(0, 14).unwrap().to_vec(), b"2345efghi1----"[..]);
    }
}
