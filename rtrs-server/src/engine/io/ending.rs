//! Handling of requests whose path ends (`pipeline.rs` has all other steps).

use super::overlap::OrphanedWrite;
use super::pipeline::Step;
use super::request::{RequestState, State, Wait};
use crate::engine::ledger::FlushLedger;
use crate::engine::message::Outbox;

impl Step<'_> {
    /// Ends the request because its path is closing, unless the device is working on it. In that
    /// case the request stays `Submitted`, counts as in flight, and is an orphaned write if it
    /// changes anything.
    pub(super) fn close(&mut self, out: &mut Outbox) {
        let (permit, shared) = (self.at.permit, &self.path.shared);
        let request = &mut self.path.requests[permit];
        // The answer that reported a loss may not have arrived. The client then resends the flush
        // over a different path, and that answer must report the loss too.
        let reported = request.reported_loss.and_then(|id| shared.session.devices.ledger(id));
        reported.into_iter().for_each(FlushLedger::report_again);
        match request.get() {
            State::Free => return,
            // The request has no permit.
            State::Deferred(_) => return request.end(),
            State::Io(_, Wait::Submitted, io) => {
                if let Some(bytes) = io.may_change() {
                    let (session, path) = (shared.session.id, shared.key);
                    tracing::debug!(%path, %permit, ?bytes, "orphaned: still running on the disk");
                    let write = OrphanedWrite { session, path, permit };
                    self.devices.orphaned(io.export).enter(write, bytes);
                }
                // The next holder of the permit finds the write in that table.
                return self.path.release_permit(permit);
            }
            State::Io(_, Wait::Blocked, _) => self.path.counters().blocked.sub(1),
            State::Io(_, Wait::Settling(_), io) => io.count_settling(false, self.devices),
            _ => {}
        }
        self.release(out);
    }

    /// Removes an orphaned write that the device has completed.
    pub(super) fn orphaned_write_ended(&mut self, out: &mut Outbox) {
        self.end_turn(out);
        let request = &mut self.path.requests[self.at.permit];
        let own = (self.path.shared.key, self.at.permit);
        if let Some(io) = request.io() {
            let ended = |write: &OrphanedWrite| (write.path, write.permit) == own;
            self.devices.orphaned(io.export).leave(ended);
        }
        request.end();
        self.path.end_request();
    }

    /// Drops a request without a permit, because its path is ending.
    pub(super) fn drop_deferred(&mut self) -> bool {
        let request = self.request();
        let deferred = request.state() == RequestState::Deferred;
        if deferred {
            request.end();
        }
        deferred
    }
}
