//! Writes that a connection left unanswered when its user closed the connection.
//!
//! Such a write may have happened, may happen later, or may never happen. Overlapping requests that
//! are submitted afterwards wait for it: when such a request has succeeded, the write has either
//! happened or never will. Like any failed write, it must not be seen after a newer write
//! (`judge_failed`).

use super::{OPEN, Oracle};

impl Oracle {
    /// Records that the connection of a write was closed.
    pub(in super::super) fn write_dropped(&mut self, id: u32) {
        self.write_failed(id, false);
        self.dropped.push(id);
    }

    /// Records an acknowledged write, which ends the dropped writes that it overlaps.
    pub(super) fn acked_over_dropped(&mut self, id: u32) {
        let write = &self.writes[id as usize];
        self.end_dropped(write.start, write.sector, write.count);
    }

    /// Records the success of a request for these sectors that began at `start`.
    pub(super) fn end_dropped(&mut self, start: u64, sector: u32, count: u32) {
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

    /// Ends all dropped writes. Requires that no connection has any request left in flight.
    pub(in super::super) fn dropped_are_over(&mut self) {
        self.dropped.clear();
    }
}
