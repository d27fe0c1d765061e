//! Loss counts that decide the results of flushes; see docs/explanation/fence.md.

use rtrs_core::losses::Losses;

/// Loss counts noted while a request runs.
#[derive(Debug)]
pub(crate) struct LossMarks {
    /// Losses that had been reported to the client before this flush arrived.
    reported: u64,
    /// Loss count when the first of several IOs of a change completed, or when a flush ended.
    count: Option<u64>,
}

impl LossMarks {
    pub(crate) const fn none() -> Self {
        Self { reported: 0, count: None }
    }

    /// Losses that had been reported to the client before this flush arrived.
    pub(crate) fn reported(&self) -> u64 {
        self.reported
    }

    pub(crate) fn set_reported(&mut self, reported: u64) {
        self.reported = reported;
    }

    /// Loss count at the end of a flush, if the device reported it.
    pub(crate) fn at_end(&self) -> Option<u64> {
        self.count
    }

    /// Records the loss count at the end of a flush.
    pub(crate) fn set_at_end(&mut self, count: Option<u64>) {
        self.count = count;
    }

    /// Records the loss count after the first IO of a change has succeeded.
    pub(crate) fn note_first(&mut self, losses: Option<&Losses>) {
        if self.count.is_none() {
            self.count = losses.map(Losses::shared);
        }
    }

    /// Takes the loss count at which the first IO of a change succeeded.
    pub(crate) fn take_first(&mut self) -> Option<u64> {
        self.count.take()
    }
}
