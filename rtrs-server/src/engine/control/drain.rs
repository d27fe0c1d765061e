//! The server's end: by a signal, or drained by its operator.
//!
//! Either way no new connection is taken, requests that run are answered, and paths close when
//! they have none left. At a signal all paths finish at once. A drain lets one path of each
//! session finish after the other, so that a client goes on over its other paths meanwhile; when
//! half of its time is over, those that are left finish at once, since one may wait for a backend
//! that never answers. What still runs at the end of the time is abandoned, and counted.

use rtrs_core::ids::CoreIndex;
use rtrs_core::time::{Duration, Instant};

use super::Control;
use crate::engine::ctx::Ctx;
use crate::engine::message::{AdminAnswer, AdminReply, ShardMessage};
use crate::path::state::PathState;
use crate::path::{PathEnd, PathKey};

/// How long the ends of connections may take at the end, after the time for requests.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// How far the server's end is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stop {
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
    /// Cores were told to end.
    Done,
}

impl Control {
    /// A signal: nothing new is taken, what runs is answered. It hurries a drain.
    pub(super) fn shutdown(&mut self, ctx: &mut Ctx<'_>) {
        self.begin_stop(ctx.now, ctx.now + self.params.shutdown_grace, ctx);
    }

    /// The operator drains the server. The answer comes when that is done.
    pub(super) fn drain(&mut self, within: Duration, reply: AdminReply, ctx: &mut Ctx<'_>) {
        if self.stop.is_some() {
            return reply.send(AdminAnswer::Refused("the server ends already".to_owned()));
        }
        let within_ms = within.as_millis();
        tracing::info!(sessions = self.sessions.len(), within_ms, "draining");
        self.drain = Some(reply);
        self.begin_stop(ctx.now + within / 2, ctx.now + within, ctx);
    }

    fn begin_stop(&mut self, all_at: Instant, until: Instant, ctx: &mut Ctx<'_>) {
        let stop = match self.stop {
            None => Stop::Finishing { all_at, until },
            Some(Stop::Finishing { all_at: before, until: bound }) => {
                Stop::Finishing { all_at: all_at.min(before), until: until.min(bound) }
            }
            Some(Stop::Aborting { .. } | Stop::Done) => return,
        };
        self.stop = Some(stop);
        let half = |key: &PathKey| {
            self.paths.get(key).is_some_and(|path| path.state == PathState::Connecting)
        };
        let keys: Vec<PathKey> = self.paths.keys().copied().filter(half).collect();
        for key in keys {
            self.end_path(key, &PathEnd::Shutdown, ctx);
        }
        self.advance_stop(ctx);
    }

    /// Lets the next path of each session finish, or all.
    fn finish_paths(&mut self, all: bool, ctx: &mut Ctx<'_>) {
        let mut keys = Vec::new();
        for session in self.sessions.values() {
            let is = |key: &PathKey, state| self.paths.get(key).is_some_and(|p| p.state == state);
            let up = session.paths.iter().copied().filter(|key| is(key, PathState::Connected));
            if all {
                keys.extend(up);
            } else if !session.paths.iter().any(|key| is(key, PathState::Finishing)) {
                keys.extend(up.take(1));
            }
        }
        for key in keys {
            let Some(path) = self.paths.get_mut(&key) else { continue };
            path.heartbeat = None;
            path.go(PathState::Finishing);
            for debt in &path.cores {
                ctx.out.shard(debt.core, ShardMessage::Finish { path: key });
            }
        }
    }

    /// Goes on with the end, if one was begun.
    pub(super) fn advance_stop(&mut self, ctx: &mut Ctx<'_>) {
        let Some(stop) = self.stop else { return };
        let stop = match stop {
            Stop::Done => return,
            Stop::Finishing { .. } if self.paths.is_empty() => {
                self.tell_drained(0);
                Stop::Done
            }
            Stop::Finishing { until, .. } if ctx.now >= until => {
                let keys: Vec<PathKey> = self.paths.keys().copied().collect();
                let paths = self.paths.values();
                let unfinished = paths.map(|path| path.shared.counters.totals().inflight).sum();
                tracing::warn!(paths = keys.len(), unfinished, "requests did not end in time");
                for key in keys {
                    self.end_path(key, &PathEnd::Shutdown, ctx);
                }
                Stop::Aborting { until: ctx.now + ABORT_GRACE, unfinished }
            }
            Stop::Finishing { all_at, until } => {
                self.finish_paths(ctx.now >= all_at, ctx);
                Stop::Finishing { all_at, until }
            }
            Stop::Aborting { until, unfinished } if ctx.now >= until || self.paths.is_empty() => {
                self.tell_drained(unfinished);
                Stop::Done
            }
            waiting @ Stop::Aborting { .. } => waiting,
        };
        self.stop = Some(stop);
        match stop {
            Stop::Done => {
                for core in 0..self.params.cores {
                    ctx.out.shard(CoreIndex(core), ShardMessage::Exit);
                }
            }
            Stop::Finishing { all_at, until } if ctx.now >= all_at => self.wake(until),
            Stop::Finishing { all_at, .. } => self.wake(all_at),
            Stop::Aborting { until, .. } => self.wake(until),
        }
    }

    fn tell_drained(&mut self, unfinished: u64) {
        if let Some(reply) = self.drain.take() {
            reply.send(AdminAnswer::Drained { unfinished });
        }
    }
}
