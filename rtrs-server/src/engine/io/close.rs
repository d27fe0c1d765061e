//! Exports that a session has closed: which requests of it still run on this shard.

use std::mem;

use super::Shard;
use super::request::RequestState;
use crate::engine::message::{Closed, ControlMail, Outbox};

impl Shard {
    pub(super) fn retire(&mut self, closed: Closed, out: &mut Outbox) {
        self.retiring.push(closed);
        self.tell_retired(out);
    }

    /// Tells of the closed exports that nothing runs on here any more.
    pub(super) fn tell_retired(&mut self, out: &mut Outbox) {
        if self.retiring.is_empty() {
            return;
        }
        let mut retiring = mem::take(&mut self.retiring);
        retiring.retain(|one| {
            let runs = self.runs(one) && !rtrs_core::mutated!(CloseWhileBusy);
            if !runs {
                out.control(ControlMail::Retired { close: one.close });
            }
            runs
        });
        self.retiring = retiring;
    }

    fn runs(&self, closed: &Closed) -> bool {
        let rows = self.paths.iter().flatten();
        let of_session = rows.filter(|row| row.shared.session.id == closed.session);
        of_session.flat_map(|row| &row.requests).any(|request| {
            let begun = matches!(
                request.state(),
                RequestState::Barred
                    | RequestState::Queued
                    | RequestState::Submitted
                    | RequestState::Settling
            );
            begun && request.io.is_some_and(|io| io.export == closed.export)
        })
    }
}
