//! Outcome of a request, and the state of its reply.

use rtrs_core::status::IoStatus;

use crate::proto::wire::NbdError;
use crate::status::{nbd_error, reason};

/// State of a request with respect to its device's time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Late {
    /// Within the limit.
    No,
    /// Overdue; an error is sent to the client once the payload has been received.
    Noted,
    /// The error reply is on its way to the client; the device is still working on the request.
    GivenUp,
    /// The reply has been sent, or the client has disconnected.
    Told,
}

/// Outcome of a request, and the state of its reply.
#[derive(Debug)]
pub(crate) struct ReplyState {
    /// First error.
    status: IoStatus,
    /// NBD error and reason to send instead of a status.
    refusal: Option<(NbdError, &'static str)>,
    /// No reply is sent, because the payload did not arrive in full.
    silent: bool,
    late: Late,
}

impl ReplyState {
    pub(crate) const fn new() -> Self {
        Self { status: IoStatus::Ok, refusal: None, silent: false, late: Late::No }
    }

    pub(crate) fn status(&self) -> IoStatus {
        self.status
    }

    /// Records a status, unless the request has already failed.
    pub(crate) fn note(&mut self, status: IoStatus) {
        if self.status.is_ok() {
            self.status = status;
        }
    }

    /// Replaces the status with the verdict on a flush.
    pub(crate) fn set_status(&mut self, status: IoStatus) {
        self.status = status;
    }

    /// Sets an error and its reason to be sent instead of a status.
    pub(crate) fn refuse(&mut self, error: NbdError, reason: &'static str) {
        self.refusal = Some((error, reason));
    }

    /// Returns the NBD error to send, and its reason.
    pub(crate) fn error(&self) -> Option<(NbdError, &'static str)> {
        self.refusal.or_else(|| nbd_error(self.status).map(|e| (e, reason(self.status))))
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.silent
    }

    pub(crate) fn silence(&mut self) {
        self.silent = true;
    }

    pub(crate) fn late(&self) -> Late {
        self.late
    }

    pub(crate) fn set_late(&mut self, late: Late) {
        self.late = late;
    }
}
