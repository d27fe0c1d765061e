//! Buffers for a workload's IO, with a record of their contents.
//!
//! A slot is lent to the device with an IO and returned when the IO ends. Afterwards, only the
//! workload may change it. In between, only the bytes that a read requested may change, but neither
//! a write's data nor the bytes after a short read. Whole slots are compared when a slot is
//! returned, when it is lent again, and at the end.

use std::sync::Arc;

use rtrs_core::mem::{MemSlice, PIECES_MAX, Pool, Region};
use rtrs_core::prng::Prng;

use super::Failure;

/// Pieces of memory that hold the bytes of slots.
#[derive(Debug)]
struct Pieces {
    pool: Pool,
    /// Pieces by slot.
    slots: Vec<Vec<MemSlice>>,
}

impl Pieces {
    fn new(count: usize, span: usize) -> Self {
        let memory = Region::new(2 * span * count).expect("memory for a workload");
        let mut pool = Pool::scattered(count as u32, span).expect("memory for a workload");
        let slots = (0..count).map(|slot| {
            let pieces = Self::cut(&memory, slot, span);
            let buffer = pool.take().expect("a buffer for each slot");
            pool.assign(buffer, pieces.clone()).expect("pieces of a buffer");
            pieces
        });
        let slots = slots.collect();
        Self { pool, slots }
    }

    /// Returns the pieces of a slot: of odd sizes, not adjacent, and in reverse order.
    fn cut(memory: &Arc<Region>, slot: usize, span: usize) -> Vec<MemSlice> {
        let prng = &mut Prng::new(slot as u64);
        let len_max = [700, 5000, span][slot % 3];
        let (mut left, mut end, mut pieces) = (span, 2 * span * (slot + 1), Vec::new());
        while left > 0 {
            let drawn = 1 + prng.index(len_max);
            let len = if pieces.len() + 1 == PIECES_MAX { left } else { drawn.min(left) };
            (left, end) = (left - len, end - len - 1);
            pieces.push(memory.slice(end, len).expect("memory of the slot"));
        }
        pieces
    }
}

/// The slots of one core's workload.
#[derive(Debug)]
pub(super) struct Buffers {
    region: Arc<Region>,
    /// Pieces that hold the bytes of `region`, if it has no memory of its own.
    pieces: Option<Pieces>,
    /// Contents of the slots at the last check.
    known: Vec<u8>,
    /// Whether each slot is lent to an IO that has not ended.
    lent: Vec<bool>,
    /// Size of a slot in bytes.
    span: usize,
    /// Scratch buffer for the current contents of a slot.
    now: Vec<u8>,
}

impl Buffers {
    pub(super) fn new(count: usize, span: usize, scattered: bool) -> Self {
        let pieces = scattered.then(|| Pieces::new(count, span));
        let region = pieces.as_ref().map(|pieces| Arc::clone(pieces.pool.region()));
        let new = || Region::new(span * count).expect("memory for a workload");
        Self {
            region: region.unwrap_or_else(new),
            pieces,
            known: vec![0; span * count],
            lent: vec![false; count],
            span,
            now: vec![0; span],
        }
    }

    pub(super) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the first `len` bytes of a slot.
    pub(super) fn slice(&self, slot: usize, len: usize) -> MemSlice {
        let slice = self.region.slice(slot * self.span, len).filter(|_| len <= self.span);
        slice.expect("a slot has room for the longest IO")
    }

    /// Lends a slot after filling it with `fill`.
    pub(super) fn lend(&mut self, slot: usize, fill: impl FnOnce(&Self)) -> Result<(), Failure> {
        self.look(slot, 0, "after it was returned")?;
        fill(self);
        self.lent[slot] = true;
        self.note(slot);
        Ok(())
    }

    /// Takes a slot back; a read may have changed its first `read` bytes.
    pub(super) fn back(&mut self, slot: usize, read: usize) -> Result<(), Failure> {
        self.look(slot, read, "which its IO does not read to")?;
        self.lent[slot] = false;
        self.note(slot);
        Ok(())
    }

    /// Checks all slots that are not lent.
    pub(super) fn check(&mut self) -> Result<(), Failure> {
        for slot in (0..self.lent.len()).filter(|&slot| !self.lent[slot]).collect::<Vec<_>>() {
            self.look(slot, 0, "after it was returned")?;
        }
        Ok(())
    }

    /// Replaces the memory, as in a newly started process. Lent slots stay lent.
    pub(super) fn renew(&mut self) {
        let (count, lent) = (self.lent.len(), std::mem::take(&mut self.lent));
        *self = Self { lent, ..Self::new(count, self.span, self.pieces.is_some()) };
    }

    /// Copies the contents of a slot from its memory.
    fn content(&self, slot: usize, into: &mut [u8]) {
        let Some(pieces) = &self.pieces else {
            return self.region.copy_out(slot * self.span, into);
        };
        let mut at = 0;
        for piece in &pieces.slots[slot] {
            piece.copy_out(0, &mut into[at..at + piece.len()]);
            at += piece.len();
        }
    }

    fn note(&mut self, slot: usize) {
        let (at, mut known) = (slot * self.span, std::mem::take(&mut self.known));
        self.content(slot, &mut known[at..at + self.span]);
        self.known = known;
    }

    /// Compares a slot with its record from byte `from` on.
    fn look(&mut self, slot: usize, from: usize, what: &str) -> Result<(), Failure> {
        let at = slot * self.span;
        let mut now = std::mem::take(&mut self.now);
        self.content(slot, &mut now);
        self.now = now;
        let (is, was) = (&self.now[from..], &self.known[at + from..at + self.span]);
        if is == was {
            return Ok(());
        }
        let first = from + is.iter().zip(was).take_while(|(is, was)| is == was).count();
        let text = format!("buffer {slot} changed at byte {first}, {what}");
        Err(Failure::new("buffers", text))
    }
}

#[cfg(test)]
mod tests {
    use super::Buffers;

    #[test]
    fn only_the_buffer_of_a_running_read_may_change() {
        for scattered in [false, true] {
            let mut buffers = Buffers::new(2, 1024, scattered);
            let fill = |buffers: &Buffers| buffers.slice(1, 512).fill(7);
            buffers.lend(1, fill).unwrap();
            buffers.slice(1, 512).fill(8);
            buffers.back(1, 512).unwrap();
            buffers.check().unwrap();
            buffers.lend(1, fill).unwrap();
            buffers.slice(1, 513).fill(8);
            let failure = buffers.back(1, 512).unwrap_err();
            assert!(failure.text.contains("buffer 1 changed at byte 512, which"), "{failure:?}");
            buffers.back(1, 1024).unwrap();
            buffers.slice(1, 3).fill(9);
            for failure in [buffers.check(), buffers.lend(1, fill)] {
                let failure = failure.unwrap_err();
                assert!(failure.text.contains("changed at byte 0, after"), "{failure:?}");
            }
            buffers.renew();
            buffers.check().unwrap();
        }
    }
}
