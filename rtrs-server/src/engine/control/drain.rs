//! Shutdown of the server, on a signal or by an operator's drain.
//!
//! In both cases, new connections are refused, running requests are answered, and each path closes
//! when it has no requests left. On a signal, all paths finish together. A drain finishes the paths
//! of each session one by one, so that a client can keep using its other paths. After half the
//! time, the remaining paths finish together, because a path may be waiting for a backend that
//! never responds. Requests that are still running when time runs out are abandoned and counted.

use rtrs_core::time::{Duration, Instant};

use super::registry::Registry;
use crate::engine::message::{AdminReply, AdminReplyTo};
use crate::path::PathKey;
use crate::path::state::PathState;

/// Time for closing connections, after the time for requests.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// State of the shutdown.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// Running requests may still complete.
    Finishing {
        /// Time from which all paths finish.
        all_at: Instant,
        /// Deadline for requests.
        until: Instant,
    },
    /// Connections are being closed.
    Aborting {
        /// Deadline for closing the connections.
        until: Instant,
        /// Number of requests that did not complete.
        unfinished: u64,
    },
    /// Shards are exiting.
    Done,
}

/// Next action of the shutdown.
pub(super) enum Order {
    /// Nothing before that time, if any.
    Wait(Option<Instant>),
    /// Finish these paths, and check again at that time.
    Finish(Vec<PathKey>, Instant),
    /// End all paths, even those with running requests.
    EndAll(Instant),
    /// Exit the shards.
    Exit,
}

/// The shutdown, if it has begun.
#[derive(Debug, Default)]
pub(super) struct Drain {
    stop: Option<Stop>,
    /// Reply to the operator who requested a drain.
    reply: Option<AdminReplyTo>,
}

impl Drain {
    /// Whether a stop was requested.
    pub(super) fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    /// Sets the reply for the operator who is waiting for a drain.
    pub(super) fn set_reply(&mut self, reply: AdminReplyTo) {
        self.reply = Some(reply);
    }

    /// Begins the shutdown, or accelerates it: all paths finish at `all_at` and end at `until`.
    /// Returns false if connections are already being closed.
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

    /// Advances the shutdown.
    pub(super) fn advance(&mut self, now: Instant, registry: &Registry) -> Order {
        let left = registry.paths().count();
        match self.stop {
            None | Some(Stop::Done) => Order::Wait(None),
            Some(Stop::Finishing { .. }) if left == 0 => self.done(0),
            Some(Stop::Finishing { until, .. }) if now >= until => {
                let totals = registry.paths().map(|path| path.shared().counters.totals());
                let unfinished = totals.map(|io| io.inflight).sum();
                tracing::warn!(paths = left, unfinished, "requests did not finish in time");
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

/// Paths to finish now: the next one of each session, or all.
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

/// Logs the server's totals.
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
        "the server is stopping"
    );
}
