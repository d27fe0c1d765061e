//! Losses of acknowledged writes, as reported to the client of a connection.
//!
//! Requests may arrive before the client learns of a loss but be processed afterwards. A flush
//! among them fails because of that loss too, since it may cover writes that were lost. See
//! docs/explanation/fence.md.

use rtrs_core::losses::Losses;

use crate::requests::NbdRow;

/// Losses reported to a client, and the reports as seen by requests not yet taken.
#[derive(Debug)]
pub(super) struct LossReports {
    /// All connections of a kernel device count as one client.
    kernel: bool,
    /// Losses of acknowledged writes that have been reported to the client.
    reported: u64,
    /// Requests are waiting for rows, memory or the device, and receiving has stopped.
    stalled: bool,
    /// Row whose reply reports a loss and is waiting to be sent.
    report: Option<u32>,
    /// Losses reported to the client at the last check.
    seen: u64,
    /// A loss count, and the stream offset up to which requests arrived when only that count had
    /// been reported.
    older: Option<(u64, u64)>,
}

impl LossReports {
    /// Creates the reports for a client, starting with the losses known at the device's last
    /// successful flush.
    pub(super) fn new(kernel: bool, losses: Option<&Losses>) -> Self {
        let reported = losses.map_or(0, Losses::settled);
        let mut reports =
            Self { kernel, reported, stalled: false, report: None, seen: 0, older: None };
        reports.seen = reports.reported(losses);
        reports
    }

    /// Returns the losses reported to the client.
    fn reported(&self, losses: Option<&Losses>) -> u64 {
        match losses {
            Some(losses) if self.kernel => losses.common(),
            _ => self.reported,
        }
    }

    /// Returns the losses that had been reported when the request at `offset` of the stream
    /// arrived.
    pub(super) fn reported_before(&self, offset: u64, losses: Option<&Losses>) -> u64 {
        self.older(offset).unwrap_or_else(|| self.reported(losses))
    }

    /// Returns the losses that had been reported when the request at `offset` of the stream
    /// arrived, if they were fewer than now.
    fn older(&self, offset: u64) -> Option<u64> {
        if rtrs_core::mutated!(NbdBacklogForgotten) {
            return None;
        }
        self.older.filter(|(_, end)| offset <= *end).map(|(reported, _)| reported)
    }

    pub(super) fn set_stalled(&mut self, stalled: bool) {
        self.stalled = stalled;
    }

    /// Checks whether a loss was reported while requests were waiting, or is about to be reported:
    /// whatever the socket holds when that reply is sent was sent by the client before it. Requests
    /// that a kernel device sent on another connection count as sent after the report, unless that
    /// connection has stalled. `parsed` is the stream offset of the next request, and `arrived`
    /// returns the offset up to which bytes have arrived, received or not.
    pub(super) fn note_reported(
        &mut self,
        losses: Option<&Losses>,
        parsed: u64,
        arrived: impl FnOnce() -> u64,
    ) {
        let reported = self.reported(losses);
        let seen = std::mem::replace(&mut self.seen, reported);
        let waits = self.report.is_some();
        if reported == seen || !(self.stalled || waits) {
            return;
        }
        let end = if waits { u64::MAX } else { arrived() };
        let older = self.older(parsed).unwrap_or(seen);
        self.older = Some((older, end));
    }

    /// Row whose reply reports a loss and is waiting to be sent.
    pub(super) fn unsent(&self) -> Option<u32> {
        self.report
    }

    /// Records that the reply that reports a loss is about to be sent, when bytes up to `arrived`
    /// of the stream have arrived.
    pub(super) fn note_sent(&mut self, arrived: u64) {
        self.report = None;
        self.older = self.older.map(|(reported, _)| (reported, arrived));
    }

    /// Records that the client has disconnected after receiving all replies.
    pub(super) fn leave(&self, losses: Option<&Losses>) {
        if let Some(losses) = losses.filter(|_| !self.kernel) {
            losses.settle(self.reported);
        }
    }

    /// Ends a flush, which fails if a loss has not been reported to the client. Returns true if its
    /// status changed.
    pub(super) fn end_flush(&mut self, index: u32, row: &mut NbdRow, losses: &Losses) -> bool {
        let count = row.loss_marks.at_end().unwrap_or_else(|| losses.count());
        let ended = row.reply.status();
        let (status, reported) = losses.judge(ended, row.loss_marks.reported(), count);
        if reported > self.reported(Some(losses)) {
            self.report = Some(index);
        }
        row.reply.set_status(status);
        if self.kernel {
            losses.report_common(reported);
        } else {
            self.reported = self.reported.max(reported);
        }
        status != ended
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::status::IoStatus;

    use super::*;
    use crate::requests::Requests;

    #[test]
    fn flushes_that_arrived_before_the_report_was_sent_report_the_loss_too() {
        let losses = Losses::default();
        let mut reports = LossReports::new(false, Some(&losses));
        let mut requests = Requests::new(1, 1);
        let row = requests.take(0).unwrap();
        losses.add();
        assert!(reports.end_flush(row, requests.row(row), &losses));
        assert_eq!(requests.row(row).reply.status(), IoStatus::Io);
        assert_eq!(reports.unsent(), Some(row));
        reports.note_reported(Some(&losses), 28, || panic!("the report has not been sent"));
        assert_eq!(reports.reported_before(1 << 20, Some(&losses)), 0);
        reports.note_sent(100);
        assert_eq!(reports.unsent(), None);
        assert_eq!(reports.reported_before(100, Some(&losses)), 0);
        assert_eq!(reports.reported_before(101, Some(&losses)), 1);
    }

    #[test]
    fn a_stalled_kernel_connection_remembers_the_loss_that_another_one_reported() {
        let losses = Losses::default();
        let [mut stalled, mut other] = [true, false].map(|is_stalled| {
            let mut reports = LossReports::new(true, Some(&losses));
            reports.set_stalled(is_stalled);
            reports
        });
        losses.add();
        losses.report_common(1);
        stalled.note_reported(Some(&losses), 0, || 56);
        other.note_reported(Some(&losses), 0, || 56);
        assert_eq!(stalled.reported_before(56, Some(&losses)), 0);
        assert_eq!(stalled.reported_before(57, Some(&losses)), 1);
        assert_eq!(other.reported_before(0, Some(&losses)), 1);
        // A further loss does not hide the first one from requests that arrived before both.
        losses.add();
        losses.report_common(2);
        stalled.note_reported(Some(&losses), 28, || 84);
        assert_eq!(stalled.reported_before(84, Some(&losses)), 0);
        assert_eq!(stalled.reported_before(85, Some(&losses)), 2);
    }
}
