//! The server's end: by a signal, or drained by its operator.
//!
//! Either way no new connection is taken, requests that run are answered, and paths close when
//! they have none left. At a signal all paths finish at once. A drain lets one path of each
//! session finish after the other, so that a client goes on over its other paths meanwhile; when
//! half of its time is over, those that are left finish at once, since one may wait for a backend
//! that never answers. What still runs at the end of the time is abandoned, and counted.

use rtrs_core::time::{Duration, Instant};

use super::registry::Registry;
use crate::engine::message::{AdminReply, AdminReplyTo};
use crate::path::PathKey;
use crate::path::state::PathState;

/// How long the ends of connections may take at the end, after the time for requests.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// How far the server's end is.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// Requests that run may end.
    Finishing {
        /// From then on all paths finish.
        all_at: Instant,
        /// Until then.
        until: Instant,
    },
    /// Connections are being ended.
    Aborting {
        /// Until then.
        until: Instant,
        /// Requests that had not ended.
        unfinished: u64,
    },
    /// Shards are ending.
    Done,
}

/// What the end of the server asks for next.
pub(super) enum Order {
    /// Nothing before that time, if any.
    Wait(Option<Instant>),
    /// These paths finish; to be looked at again at that time.
    Finish(Vec<PathKey>, Instant),
    /// All paths end, whatever they still do.
    EndAll(Instant),
    /// The shards end.
    Exit,
}

/// The server's end, if one was begun.
#[derive(Debug, Default)]
pub(super) struct Drain {
    stop: Option<Stop>,
    /// Who asked for a drain.
    reply: Option<AdminReplyTo>,
}

impl Drain {
    /// True from the moment a stop was asked for.
    pub(super) fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    /// The operator waits for the answer to a drain.
    pub(super) fn set_reply(&mut self, reply: AdminReplyTo) {
        self.reply = Some(reply);
    }

    /// Begins the end, or hurries it: all paths finish at one time, and end at another. False when
    /// connections are ended already.
    pub(super) fn begin(&mut self, all_at: Instant, until: Instant) -> bool {
        let stop = match self.stop {
            None => Stop::Finishing { all_at, until },
            Some(Stop::Finishing { all_at: before, until: bound }) => {
                Stop::Finishing { all_at: all_at.min(before), until: until.min(bound) }
            }
            Some(Stop::Aborting { .. } | Stop::Done) => return false,
        };
        self.stop = Some(stop);
        true
    }

    /// Goes on with the end.
    pub(super) fn advance(&mut self, now: Instant, registry: &Registry) -> Order {
        let left = registry.paths().count();
        match self.stop {
            None | Some(Stop::Done) => Order::Wait(None),
            Some(Stop::Finishing { .. }) if left == 0 => self.done(0),
            Some(Stop::Finishing { until, .. }) if now >= until => {
                let totals = registry.paths().map(|path| path.shared().counters.totals());
                let unfinished = totals.map(|io| io.inflight).sum();
                tracing::warn!(paths = left, unfinished, "requests did not end in time");
                let until = now + ABORT_GRACE;
                self.stop = Some(Stop::Aborting { until, unfinished });
                Order::EndAll(until)
            }
            Some(Stop::Finishing { all_at, until }) => {
                let all = now >= all_at;
                Order::Finish(to_finish(all, registry), if all { until } else { all_at })
            }
            Some(Stop::Aborting { until, unfinished }) if now >= until || left == 0 => {
                self.done(unfinished)
            }
            Some(Stop::Aborting { until, .. }) => Order::Wait(Some(until)),
        }
    }

    fn done(&mut self, unfinished: u64) -> Order {
        self.stop = Some(Stop::Done);
        if let Some(reply) = self.reply.take() {
            reply.send(AdminReply::Drained { unfinished });
        }
        Order::Exit
    }
}

/// The next path of each session, or all.
fn to_finish(all: bool, registry: &Registry) -> Vec<PathKey> {
    let mut keys = Vec::new();
    for session in registry.sessions() {
        let paths = |state| {
            let paths = registry.paths_of(session.id());
            paths.filter(move |path| path.state() == state).map(|path| path.key())
        };
        let most = match all {
            true => usize::MAX,
            false => usize::from(paths(PathState::Finishing).next().is_none()),
        };
        keys.extend(paths(PathState::Connected).take(most));
    }
    keys
}

/// Logs what the server did until its end.
pub(super) fn log_totals(registry: &Registry, refused: u64) {
    let (sessions, io) = registry.totals();
    tracing::info!(
        sessions,
        reads = io.reads,
        read_bytes = io.read_bytes,
        writes = io.writes,
        write_bytes = io.write_bytes,
        flushes = io.flushes,
        errors = io.errors,
        device_errors = io.device_errors,
        unfinished = io.inflight,
        refused,
        "the server stops"
    );
}
