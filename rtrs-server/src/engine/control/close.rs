//! CLOSE: an export is given back when nothing of the session runs there any more.
//!
//! From the close on the device id means nothing, so no request is begun there. Those that a
//! backend works on already run on, as do those that wait for it, and until the last of them has
//! ended the session keeps its right to the export, as the one that is evicted does: a write of it
//! must not land after those of the session that opens the export next. The close is answered then,
//! as by the kernel's server (rnbd-srv.c, `rnbd_destroy_sess_dev`); a client that does not wait for
//! it leaves its session behind until then. Each shard is asked once and answers when it is
//! through.

use std::mem;

use rtrs_core::ids::{CoreIndex, SessionId};

use crate::engine::message::{CloseNumber, Closed, Outbox, ReplyTo, ShardMessage};
use crate::export::ExportIndex;

/// A close that waits for requests.
#[derive(Debug)]
pub(super) struct Closing {
    closed: Closed,
    /// Shards that have not answered.
    cores: u16,
    /// None: the export was removed.
    reply_to: Option<ReplyTo>,
}

/// The closes that wait on the control shard.
#[derive(Debug, Default)]
pub(super) struct Closings {
    last: u64,
    waiting: Vec<Closing>,
}

impl Closings {
    /// True while requests of a session that closed the export may still run there.
    pub(super) fn contains(&self, session: SessionId, export: ExportIndex) -> bool {
        self.waiting.iter().any(|one| one.closed.session == session && one.closed.export == export)
    }

    /// The exports that a session has closed and still holds.
    pub(super) fn of(&self, session: SessionId) -> impl Iterator<Item = ExportIndex> {
        let mine = self.waiting.iter().filter(move |one| one.closed.session == session);
        mine.map(|one| one.closed.export)
    }

    /// The exports that a session which has ended did not get to give back.
    pub(super) fn forget(&mut self, session: SessionId) -> Vec<ExportIndex> {
        let all = mem::take(&mut self.waiting);
        let (ended, rest) = all.into_iter().partition(|one| one.closed.session == session);
        self.waiting = rest;
        let ended: Vec<Closing> = ended;
        ended.iter().map(|one| one.closed.export).collect()
    }

    /// CLOSE came, or the export was removed: asks every shard whether requests of the session
    /// still run at the export.
    pub(super) fn begin(
        &mut self,
        (session, export): (SessionId, ExportIndex),
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

    /// A shard is through with a closed export. Some: all are, and the close is to be answered.
    pub(super) fn retired(&mut self, close: CloseNumber) -> Option<(Closed, Option<ReplyTo>)> {
        // None: the session has ended meanwhile.
        let at = self.waiting.iter().position(|one| one.closed.close == close)?;
        self.waiting[at].cores -= 1;
        if self.waiting[at].cores > 0 {
            return None;
        }
        let Closing { closed, reply_to, .. } = self.waiting.swap_remove(at);
        Some((closed, reply_to))
    }
}
