//! The heartbeat monitor of a path: a heartbeat after silence, the end of the path when it stays
//! unanswered.
//!
//! Servers of ours get heartbeats earlier than kernels and are given up sooner. What is judged then
//! is the link, and a server that has no processor to run on must not be taken for a dead one. Two
//! things tell them apart. Where the provider knows that the peer's system acknowledges all we
//! send, the link works and the server's program is slow; it gets as long as a kernel's. And the
//! other paths confirm that the server runs: when one path is silent for a period after its
//! heartbeat, the others send one too. A server of ours answers the heartbeats of all paths on one
//! shard. When it has answered such a later heartbeat, and nothing comes over the silent path for
//! another period, the server runs and the path is dead, whatever acknowledges there. A turn of
//! ours that came late does not count (`Heartbeat`).

use rtrs_core::fabric::Fabric;
use rtrs_core::proto::{Heartbeat, HeartbeatAction};
use rtrs_core::time::{Duration, Instant};
use serde::Serialize;

use super::control::{Path, SessionControl};
use super::{Rhythm, SessionConfig};
use crate::path::state::PathState;

/// Heartbeats of a path since it was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct HeartbeatCount {
    /// Sent.
    pub sent: u64,
    /// Periods after one in which nothing at all came.
    pub missed: u64,
}

/// What to do after a look at the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finding {
    /// Nothing.
    Fine,
    /// Send a heartbeat.
    Due,
    /// So many periods have passed in silence; `dead` when those are all it may miss.
    Silent { periods: u32, dead: bool },
}

/// Watches whether a path is alive, from its opening to its end.
#[derive(Debug, Default)]
pub(super) struct HeartbeatMonitor {
    beat: Option<Heartbeat>,
    /// When something last came that the monitor knows of.
    seen: Instant,
    /// Since when another path has confirmed that the server runs while this one is silent.
    confirmed: Option<Instant>,
    count: HeartbeatCount,
}

impl HeartbeatMonitor {
    /// The path begins to be watched.
    pub(super) fn start(&mut self, now: Instant, rhythm: Rhythm) {
        (self.seen, self.confirmed) = (now, None);
        self.beat = Some(Heartbeat::new(rhythm.interval, rhythm.missed_max, now));
    }

    /// The path ends.
    pub(super) fn stop(&mut self) {
        self.beat = None;
    }

    /// True while the path is watched.
    pub(super) fn is_running(&self) -> bool {
        self.beat.is_some()
    }

    /// When to look next.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.beat.as_ref().map(Heartbeat::deadline)
    }

    /// Since the path was added.
    pub(super) fn count(&self) -> HeartbeatCount {
        self.count
    }

    /// A heartbeat was answered. Returns its round trip time.
    pub(super) fn on_answer(&mut self, now: Instant) -> Option<Duration> {
        self.beat.as_mut().and_then(|beat| beat.on_ack(now))
    }

    /// Looks at the time; `received` is when something last came over the path.
    fn look(&mut self, now: Instant, received: Instant) -> Finding {
        let Some(beat) = self.beat.as_mut() else { return Finding::Fine };
        if received > self.seen {
            self.seen = received;
            beat.on_traffic(received);
        }
        let before = beat.missed();
        let action = beat.poll(now);
        let periods = beat.missed();
        if before == 0 {
            self.confirmed = None;
        }
        let dead = match action {
            HeartbeatAction::Send => return Finding::Due,
            HeartbeatAction::Dead => true,
            HeartbeatAction::None => false,
        };
        if !dead && (before == 0 || periods <= before) {
            return Finding::Fine;
        }
        self.count.missed += 1;
        Finding::Silent { periods, dead }
    }

    /// A heartbeat besides, for what its answer says of the server. False while another one is
    /// unanswered.
    fn ask(&mut self, now: Instant) -> bool {
        self.beat.as_mut().is_some_and(|beat| beat.ask(now))
    }

    /// True when the server has answered a heartbeat that was sent over this path at `since` or
    /// later.
    fn has_answered_since(&self, since: Instant) -> bool {
        self.beat.as_ref().is_some_and(|beat| beat.has_answered_since(since))
    }

    /// When the present silence began to be doubted; None while there is none.
    fn doubted_since(&self) -> Option<Instant> {
        self.beat.as_ref().and_then(Heartbeat::doubted_since)
    }
}

impl SessionControl {
    pub(super) fn poll_heartbeat(
        &mut self,
        now: Instant,
        index: usize,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let path = &mut self.paths[index];
        let (periods, dead) = match path.heartbeat.look(now, path.shared.last_received()) {
            Finding::Fine => return false,
            Finding::Due => {
                self.send_heartbeat(now, index, fabrics);
                return true;
            }
            Finding::Silent { periods, dead } => (periods, dead),
        };
        if rtrs_core::mutated!(ClientKeepsSilent) {
            return false;
        }
        let rhythm = path.rhythm(&self.config);
        let confirmed = self.is_confirmed(now, index, rhythm, fabrics);
        if !(dead || confirmed && periods > rhythm.witnessed_max) {
            return false;
        }
        let path = &self.paths[index];
        let silent = now.since(path.heartbeat.seen);
        let fabric = fabrics[path.target.provider].as_ref();
        let service = path.service.as_ref();
        if !confirmed
            && silent < self.config.heartbeat.silence_max()
            && service.is_some_and(|s| fabric.peer_has_all(s.qp()) == Some(true))
        {
            let ms = silent.as_millis();
            tracing::debug!(path = %path.target.name, "slow: no answer for {ms} ms");
            return true;
        }
        let besides = if confirmed { " while another path was answered" } else { "" };
        let why = format!("silent for {} ms{besides}", silent.as_millis());
        self.end_path(now, index, Some(why), fabrics);
        true
    }

    /// Sends HB_MSG over a path.
    fn send_heartbeat(&mut self, now: Instant, index: usize, fabrics: &mut [Box<dyn Fabric>]) {
        let path = &mut self.paths[index];
        path.heartbeat.count.sent += 1;
        let fabric = fabrics[path.target.provider].as_mut();
        let sent = path.service.as_mut().map(|service| service.post_heartbeat(false, fabric));
        if let Some(Err(error)) = sent {
            self.end_path(now, index, Some(error.to_string()), fabrics);
        }
    }

    /// True when a server of ours has answered, a period ago or longer, a heartbeat that was sent
    /// over another path after this one fell silent. Sends such heartbeats where there is none.
    fn is_confirmed(
        &mut self,
        now: Instant,
        index: usize,
        rhythm: Rhythm,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let path = &self.paths[index];
        let (Some(doubted), true) = (path.heartbeat.doubted_since(), path.fences) else {
            return false;
        };
        if let Some(since) = path.heartbeat.confirmed {
            return now.since(since) >= rhythm.interval;
        }
        let other = |at: usize, path: &Path| {
            at != index && path.fences && path.state == PathState::Connected
        };
        let confirms = |path: &Path| path.heartbeat.has_answered_since(doubted);
        if self.paths.iter().enumerate().any(|(at, path)| other(at, path) && confirms(path)) {
            self.paths[index].heartbeat.confirmed = Some(now);
            return false;
        }
        for at in 0..self.paths.len() {
            if other(at, &self.paths[at]) && self.paths[at].heartbeat.ask(now) {
                self.send_heartbeat(now, at, fabrics);
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
