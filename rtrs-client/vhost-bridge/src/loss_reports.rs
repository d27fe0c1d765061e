//! Losses of acknowledged writes, as reported to the guest.
//!
//! A guest may offer flushes that the shard takes only after a different flush has reported a loss.
//! They began before that report, and their issuers rely on them: they fail because of that loss
//! too. See docs/explanation/fence.md. All rings of a guest are one user of the device
//! (`rtrs_core::losses`).

use rtrs_core::losses::Losses;
use rtrs_core::mutated;

use crate::vring::Vring;

/// Losses that had been reported to the guest when it offered the requests of a ring.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LossReports {
    /// Losses reported at the last check.
    seen: u64,
    /// Losses reported before the ring was started, and so to requests of an earlier process.
    left: u64,
    /// A loss count, and the index up to which requests were offered when only that count had been
    /// reported.
    older: Option<(u64, u16)>,
}

/// Whether an index precedes another.
fn precedes(index: u16, end: u16) -> bool {
    (1..=1 << 15).contains(&end.wrapping_sub(index))
}

impl LossReports {
    /// Creates the reports for a ring that starts with requests up to index `available`, which may
    /// be older than reports on other rings.
    pub(crate) fn new(losses: Option<&Losses>, available: impl FnOnce() -> u16) -> Self {
        let (seen, left) = losses.map_or((0, 0), |losses| (losses.common(), losses.settled()));
        // A request that is offered after a report that was just read would pass for a later one.
        Self { seen, left, older: Some((left, available())) }
    }

    /// Checks whether a loss was reported since the last call, when requests up to index
    /// `available` had been offered. `next` is the index of the next request to be taken. Called
    /// before at most [`SIZE_MAX`](crate::vring::SIZE_MAX) further requests are taken.
    pub(crate) fn note_reported(
        &mut self,
        losses: &Losses,
        next: u16,
        available: impl FnOnce() -> Option<u16>,
    ) {
        // Indices wrap: later requests would seem to precede it again.
        self.older = self.older.filter(|(_, end)| precedes(next, *end));
        let reported = losses.common();
        let seen = std::mem::replace(&mut self.seen, reported);
        if seen == reported || mutated!(VhostBacklogForgotten) {
            return;
        }
        let Some(end) = available() else { return };
        self.older = Some((self.older.map_or(seen, |(older, _)| older), end));
    }

    /// Returns the losses that had been reported when the request at `index` was offered.
    fn reported_before(&self, index: u16) -> u64 {
        let older = self.older.filter(|(_, end)| precedes(index, *end));
        older.map_or(self.seen, |(reported, _)| reported)
    }

    /// Returns the losses that had been reported when the next request of the ring was offered.
    pub(crate) fn reported_before_next(&self, vring: &Vring) -> u64 {
        match vring.has_repeated() {
            true => self.left,
            false => self.reported_before(vring.next_available()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_offered_before_a_report_do_not_know_it() {
        let losses = Losses::default();
        let mut reports = LossReports::new(Some(&losses), || 65_530);
        assert_eq!((reports.reported_before(65_529), reports.reported_before(65_530)), (0, 0));
        losses.add();
        losses.report_common(1);
        reports.note_reported(&losses, 65_534, || Some(2));
        let before = [65_534, 1, 2, 3].map(|index| reports.reported_before(index));
        assert_eq!(before, [0, 0, 1, 1]);
        reports.note_reported(&losses, 0, || panic!("no further report"));
        // A further report does not hide the first one from requests that precede both.
        losses.report_common(2);
        reports.note_reported(&losses, 1, || Some(7));
        assert_eq!([1, 6, 7].map(|index| reports.reported_before(index)), [0, 0, 2]);
        losses.report_common(3);
        reports.note_reported(&losses, 7, || Some(9));
        assert_eq!([8, 9].map(|index| reports.reported_before(index)), [2, 3]);
    }

    #[test]
    fn requests_that_wait_when_a_ring_starts_may_precede_reports_on_other_rings() {
        let losses = Losses::default();
        losses.report_common(1);
        let reports = LossReports::new(Some(&losses), || 5);
        assert_eq!([4, 5].map(|index| reports.reported_before(index)), [0, 1]);
        losses.settle(1);
        let reports = LossReports::new(Some(&losses), || 5);
        assert_eq!([4, 5].map(|index| reports.reported_before(index)), [1, 1]);
    }
    /// A flush that failed for a loss again and again would take a file system down.
    #[test]
    fn a_report_is_old_only_once_although_indices_wrap() {
        let losses = Losses::default();
        let mut reports = LossReports::new(Some(&losses), || 7);
        losses.report_common(1);
        reports.note_reported(&losses, 5, || Some(7));
        assert_eq!([5, 6, 7].map(|index| reports.reported_before(index)), [0, 0, 1]);
        for taken in (7..200_000_usize).step_by(256) {
            let next = taken as u16;
            reports.note_reported(&losses, next, || panic!("no further report"));
            assert_eq!(reports.reported_before(next), 1, "{taken}");
        }
        // All requests of the longest ring may wait.
        losses.report_common(2);
        reports.note_reported(&losses, 100, || Some(100 + (1 << 15)));
        assert_eq!([100, 99].map(|index| reports.reported_before(index)), [1, 2]);
    }
}
