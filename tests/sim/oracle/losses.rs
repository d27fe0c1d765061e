//! Writes that a disk lost on their way out of its cache: a flush that fails tells of them. And
//! those that a durable write with PREFLUSH has flushed.

use super::{Oracle, Write};

impl Oracle {
    /// A write flushed what was acknowledged before it began, as far as no power cut lies between.
    pub(in super::super) fn flushed_before(&mut self, id: u32) {
        let (start, cut) = (self.writes[id as usize].start, self.last_cut);
        for write in self.writes.iter_mut().filter(|w| w.acked && w.finish < start) {
            write.durable |= write.start > cut;
        }
    }

    /// A flush has failed where the disk loses writes: nothing is asked for any more of what was
    /// submitted by now and is not durable.
    pub(in super::super) fn excuse_unflushed(&mut self) {
        for write in self.writes.iter_mut().filter(|write| !write.durable) {
            write.excused = Some(0);
        }
    }

    /// Nothing is asked of flushes that begin after `since`, as far as the power took it before it
    /// was flushed.
    pub(super) fn excuse(&mut self, since: u64, which: impl Fn(&Write) -> bool) {
        let cut = self.last_cut;
        let lost = |write: &Write| write.acked && !write.durable && write.finish < cut;
        for write in self.writes.iter_mut().filter(|write| lost(write) && which(write)) {
            write.excused = Some(write.excused.map_or(since, |earlier| earlier.min(since)));
        }
    }
}
