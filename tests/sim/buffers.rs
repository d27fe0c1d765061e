//! Buffers of a workload's IO, with a record of their content.
//!
//! A slot is lent to the device with an IO and returned when the IO ends. Afterwards only the
//! workload may change it. In between only the bytes that a read requested may change: neither the
//! data of a write, nor the bytes after a short read. Whole slots are compared when a slot is
//! returned, when it is lent again, and at the end.

use std::sync::Arc;

use rtrs_core::mem::{MemSlice, Region};

use super::Failure;

/// Slots of one core's workload.
#[derive(Debug)]
pub(super) struct Buffers {
    region: Arc<Region>,
    /// Content of the slots at the last check.
    known: Vec<u8>,
    /// Whether each slot is lent to an IO that has not ended.
    lent: Vec<bool>,
    /// Size of a slot in bytes.
    span: usize,
    /// Scratch buffer for the current content of a slot.
    now: Vec<u8>,
}

impl Buffers {
    pub(super) fn new(count: usize, span: usize) -> Self {
        Self {
            region: Region::new(span * count).expect("memory for a workload"),
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

    /// Lends a slot, filled by `fill`.
    pub(super) fn lend(&mut self, slot: usize, fill: impl FnOnce(&Self)) -> Result<(), Failure> {
        self.look(slot, 0, "after it was handed back")?;
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
            self.look(slot, 0, "after it was handed back")?;
        }
        Ok(())
    }

    /// Replaces the memory, as in a newly started process. Lent slots stay lent.
    pub(super) fn renew(&mut self) {
        self.region = Region::new(self.region.len()).expect("memory for a workload");
        self.known.fill(0);
    }

    fn note(&mut self, slot: usize) {
        let at = slot * self.span;
        self.region.copy_out(at, &mut self.known[at..at + self.span]);
    }

    /// Compares a slot with its record from byte `from` on.
    fn look(&mut self, slot: usize, from: usize, what: &str) -> Result<(), Failure> {
        let at = slot * self.span;
        self.region.copy_out(at, &mut self.now);
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
        let mut buffers = Buffers::new(2, 1024);
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
