//! The heartbeat of a connected path, on the home core: asked after silence, ended when unanswered.
//!
//! Servers of ours are asked more often than kernels and given up sooner. What is judged then is
//! the link, and a server that has no processor to run on must not be taken for a dead one. Two
//! things tell them apart. Where the provider knows that the peer's system acknowledges all we
//! send, the link works and the server's program is slow; it gets as long as a kernel's. And the
//! other paths are witnesses: when one is silent for a period after it was asked, they are asked
//! too. A server of ours answers heartbeats of all paths on one core, so when it has answered such
//! a later question, and still nothing comes over the silent path for a period, it runs, and the
//! path is dead, whatever acknowledges there. A turn of ours that came late does not count
//! (`Heartbeat`).

use rtrs_core::fabric::Fabric;
use rtrs_core::proto::{Heartbeat, HeartbeatAction};
use rtrs_core::time::Instant;

use super::control::{Path, SessionControl};
use super::{Rhythm, SessionConfig};
use crate::path::state::PathState;

impl SessionControl {
    pub(super) fn poll_heartbeat(
        &mut self,
        now: Instant,
        index: usize,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let path = &mut self.paths[index];
        let Some(heartbeat) = path.heartbeat.as_mut() else { return false };
        let received = path.shared.last_received();
        if received > path.seen {
            path.seen = received;
            heartbeat.on_traffic(received);
        }
        let before = heartbeat.missed();
        let action = heartbeat.poll(now);
        let missed = heartbeat.missed();
        if before == 0 {
            path.vouched = None;
        }
        if action == HeartbeatAction::Send {
            self.ask(now, index, fabrics);
            return true;
        }
        let dead = action == HeartbeatAction::Dead;
        if !dead && (before == 0 || missed <= before) {
            return false;
        }
        path.heartbeats.missed += 1;
        if rtrs_core::mutated!(ClientKeepsSilent) {
            return false;
        }
        let rhythm = path.rhythm(&self.config);
        let witnessed = self.is_witnessed(now, index, rhythm, fabrics);
        if !(dead || witnessed && missed > rhythm.witnessed_max) {
            return false;
        }
        let path = &self.paths[index];
        let silent = now.since(path.seen);
        let fabric = fabrics[path.target.provider].as_ref();
        let service = path.service.as_ref();
        if !witnessed
            && silent < self.config.heartbeat.silence_max()
            && service.is_some_and(|s| fabric.peer_has_all(s.qp()) == Some(true))
        {
            let ms = silent.as_millis();
            tracing::debug!(path = %path.target.name, "slow: no answer for {ms} ms");
            return true;
        }
        let besides = if witnessed { " while another path was answered" } else { "" };
        let why = format!("silent for {} ms{besides}", silent.as_millis());
        self.end_path(now, index, Some(why), fabrics);
        true
    }

    /// Sends HB_MSG over a path.
    fn ask(&mut self, now: Instant, index: usize, fabrics: &mut [Box<dyn Fabric>]) {
        let path = &mut self.paths[index];
        path.heartbeats.sent += 1;
        let fabric = fabrics[path.target.provider].as_mut();
        let sent = path.service.as_mut().map(|service| service.post_heartbeat(false, fabric));
        if let Some(Err(error)) = sent {
            self.end_path(now, index, Some(error.to_string()), fabrics);
        }
    }

    /// True when a server of ours has answered, a period ago or longer, what it was asked over
    /// another path after this one. Asks the others where none has yet.
    fn is_witnessed(
        &mut self,
        now: Instant,
        index: usize,
        rhythm: Rhythm,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let path = &self.paths[index];
        let doubted = path.heartbeat.as_ref().and_then(Heartbeat::doubted_since);
        let (Some(doubted), true) = (doubted, path.fences) else { return false };
        if let Some(since) = path.vouched {
            return now.since(since) >= rhythm.interval;
        }
        let other = |at: usize, path: &Path| {
            at != index && path.fences && path.state == PathState::Connected
        };
        let vouches = |path: &Path| {
            path.heartbeat.as_ref().is_some_and(|beat| beat.has_answered_since(doubted))
        };
        if self.paths.iter().enumerate().any(|(at, path)| other(at, path) && vouches(path)) {
            self.paths[index].vouched = Some(now);
            return false;
        }
        for at in 0..self.paths.len() {
            if other(at, &self.paths[at])
                && self.paths[at].heartbeat.as_mut().is_some_and(|beat| beat.ask(now))
            {
                self.ask(now, at, fabrics);
            }
        }
        false
    }
}

impl Path {
    /// The heartbeats that its server, as it said last, gets.
    pub(super) fn rhythm(&self, config: &SessionConfig) -> Rhythm {
        if self.fences { self.target.heartbeat } else { config.heartbeat }
    }
}
