//! CLOSE: an export is released once the session has no requests left there.
//!
//! The device ID becomes invalid immediately, so no new requests begin. Requests that the backend
//! is executing continue, as do requests that wait for the backend. Until the last such request has
//! ended, the session keeps its right to the export, as an evicted session does: its writes must
//! not take effect after the writes of the next session that opens the export. The close is
//! answered at that point, as in the kernel's server (rnbd-srv.c, `rnbd_destroy_sess_dev`); if a
//! client does not wait for the answer, its session remains until then. Each shard is asked once
//! and answers when it has no more requests.

use std::mem;

use rtrs_core::ids::{CoreIndex, SessionId};

use crate::engine::message::{CloseNumber, Closed, Outbox, ReplyTo, ShardMessage};
use crate::export::ExportIndex;

/// A close that is waiting for requests.
#[derive(Debug)]
pub(super) struct Closing {
    closed: Closed,
    /// Number of shards that have not answered.
    cores: u16,
    /// Destination of the answer; None if the export was removed.
    reply_to: Option<ReplyTo>,
}

/// Pending closes of the control shard.
#[derive(Debug, Default)]
pub(super) struct Closings {
    last: u64,
    waiting: Vec<Closing>,
}

impl Closings {
    /// Whether a session that closed the export may still have requests running there.
    pub(super) fn contains(&self, session: SessionId, export: ExportIndex) -> bool {
        self.waiting.iter().any(|one| one.closed.session == session && one.closed.export == export)
    }

    /// Exports that a session has closed but still holds.
    pub(super) fn of(&self, session: SessionId) -> impl Iterator<Item = ExportIndex> {
        let mine = self.waiting.iter().filter(move |one| one.closed.session == session);
        mine.map(|one| one.closed.export)
    }

    /// Removes and returns the exports that a session that has ended still held.
    pub(super) fn forget(&mut self, session: SessionId) -> Vec<ExportIndex> {
        let all = mem::take(&mut self.waiting);
        let (ended, rest) = all.into_iter().partition(|one| one.closed.session == session);
        self.waiting = rest;
        let ended: Vec<Closing> = ended;
        ended.iter().map(|one| one.closed.export).collect()
    }

    /// Begins a close, after CLOSE or the removal of the export: asks every shard whether the
    /// session has requests left there.
    pub(super) fn begin(
        &mut self,
        session: SessionId,
        export: ExportIndex,
        reply_to: Option<ReplyTo>,
        cores: u16,
        out: &mut Outbox,
    ) {
        self.last += 1;
        let closed = Closed { close: CloseNumber(self.last), session, export };
        self.waiting.push(Closing { closed, cores, reply_to });
        for core in 0..cores {
            out.shard(CoreIndex(core), ShardMessage::Retire(closed));
        }
    }

    /// Records that a shard has no more requests for a closed export. Returns the close if it was
    /// the last shard, so that the close can be answered.
    pub(super) fn retired(&mut self, close: CloseNumber) -> Option<(Closed, Option<ReplyTo>)> {
        // None if the session has since ended.
        let at = self.waiting.iter().position(|one| one.closed.close == close)?;
        self.waiting[at].cores -= 1;
        if self.waiting[at].cores > 0 {
            return None;
        }
        let Closing { closed, reply_to, .. } = self.waiting.swap_remove(at);
        Some((closed, reply_to))
    }
}
