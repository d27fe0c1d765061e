//! Writes that a connection left unanswered when its user closed it.
//!
//! Such a write may have happened, may happen later, or never. But what overlaps it and is asked
//! for afterwards waits for it: when such a request has ended well, the write has happened or never
//! will. As any write that failed, it must not be seen after a newer one (`judge_failed`).

use super::{OPEN, Oracle};

impl Oracle {
    /// The connection that a write was asked for over is closed.
    pub(in super::super) fn write_dropped(&mut self, id: u32) {
        self.write_failed(id, false);
        self.dropped.push(id);
    }

    /// A write was acknowledged.
    pub(super) fn acked_over_dropped(&mut self, id: u32) {
        let write = &self.writes[id as usize];
        self.end_dropped(write.start, (write.sector, write.count));
    }

    /// A request for these sectors that began at `start` has ended well.
    pub(super) fn end_dropped(&mut self, start: u64, (sector, count): (u32, u32)) {
        if self.dropped.is_empty() {
            return;
        }
        let now = self.tick();
        let mut over = Vec::new();
        let writes = &self.writes;
        self.dropped.retain(|&id| {
            let write = &writes[id as usize];
            let overlaps = write.sector < sector + count && sector < write.sector + write.count;
            let ends = overlaps && write.failed < start;
            if ends && write.finish == OPEN {
                over.push(id);
            }
            !ends
        });
        over.into_iter().for_each(|id| self.close(id, now));
    }

    /// Nothing that was asked for over any connection is in flight any more.
    pub(in super::super) fn dropped_are_over(&mut self) {
        self.dropped.clear();
    }
}
