//! Log lines about failed syncs of an export, at a limited rate.
//!
//! The shards share the limit, so that a disk that fails every sync does not fill the log, and
//! other lines do not crowd these out. All of this runs only when a sync has failed.

use parking_lot::Mutex;
use rtrs_core::log_limit::LogLimits;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

/// Rate limit on one export's lines.
#[derive(Debug, Default)]
pub(crate) struct SyncFailures(Mutex<LogLimits<()>>);

/// Failed syncs as they are logged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailedSyncs<'a> {
    pub(crate) export: &'a str,
    pub(crate) epoch: u64,
    /// Number of failed syncs of the export since the start of the process.
    pub(crate) failures: u32,
}

impl SyncFailures {
    /// Logs a failed sync, unless the limit suppresses it. Returns when the suppressed lines are to
    /// be reported, if there are any.
    #[cold]
    pub(crate) fn log(
        &self,
        failed: FailedSyncs<'_>,
        status: IoStatus,
        now: Instant,
    ) -> Option<Instant> {
        let FailedSyncs { export, epoch, failures } = failed;
        let (admitted, deadline) = {
            let mut lines = self.0.lock();
            (lines.admit(now, ()), lines.deadline())
        };
        if let Some(left_out) = admitted {
            tracing::error!(
                export,
                epoch,
                %status,
                failures,
                left_out,
                "a sync failed: data written since the last successful flush may be lost; the next \
                 flush of each session that has written fails"
            );
        }
        deadline
    }

    /// Logs the number of suppressed lines if that is due. Returns when the next report is due.
    pub(crate) fn log_suppressed(&self, failed: FailedSyncs<'_>, now: Instant) -> Option<Instant> {
        let FailedSyncs { export, epoch, failures } = failed;
        let (overdue, deadline) = {
            let mut lines = self.0.lock();
            (lines.overdue(now), lines.deadline())
        };
        if let Some(((), left_out)) = overdue {
            tracing::error!(export, epoch, failures, left_out, "more syncs failed");
        }
        deadline
    }
}
