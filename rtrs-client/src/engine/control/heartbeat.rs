//! Heartbeat monitor of a path: sends heartbeats after silence, and measures the length of the
//! silence.

use rtrs_core::proto::{Heartbeat, HeartbeatAction};
use rtrs_core::time::{Duration, Instant};

use crate::engine::session::HeartbeatSettings;

/// Time without use after which a session counts as idle.
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// Heartbeat counters of a path since it was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeartbeatCount {
    /// Heartbeats sent.
    pub sent: u64,
    /// Periods after a heartbeat in which nothing was received.
    pub missed: u64,
}

/// Result of a heartbeat check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// Nothing is due.
    Fine,
    /// Send a heartbeat.
    Due,
    /// The path is silent.
    Silent(Silence),
}

/// Silence of a path after a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Silence {
    /// Time since anything was last received.
    pub(super) length: Duration,
    /// `length`, corrected to exclude the growth of the interval on an idle path.
    pub(super) asked: Duration,
    /// Whether the path has missed the maximum number of periods.
    pub(super) dead: bool,
    /// Whether the path has missed the maximum that applies when another path confirms that the
    /// server is running.
    pub(super) dead_if_confirmed: bool,
}

/// Monitors a path from its opening to its end.
#[derive(Debug)]
pub(super) struct HeartbeatMonitor {
    /// Settings for kernel servers and for `rtrs-server`, in that order.
    settings: [HeartbeatSettings; 2],
    beat: Option<(Heartbeat, HeartbeatSettings)>,
    /// Time of the last receipt that the monitor knows about.
    seen: Instant,
    /// Time at which another path confirmed that the server was running while this path was silent.
    confirmed: Option<Instant>,
    /// Longest heartbeat interval that the server accepts on an idle path.
    server_idle_max: Duration,
    count: HeartbeatCount,
}

impl HeartbeatMonitor {
    /// Creates an inactive monitor. The settings are for kernel servers and for `rtrs-server`.
    pub(super) fn new(settings: [HeartbeatSettings; 2]) -> Self {
        let (seen, count) = (Instant::ZERO, HeartbeatCount::default());
        Self { settings, beat: None, seen, confirmed: None, server_idle_max: Duration::ZERO, count }
    }

    /// Starts monitoring the path. `ours` means that the server is `rtrs-server`; `server_idle_max`
    /// is the longest interval that the server accepts on an idle path, or zero if it accepts only
    /// the usual interval.
    pub(super) fn start(&mut self, now: Instant, ours: bool, server_idle_max: Duration) {
        (self.seen, self.confirmed, self.server_idle_max) = (now, None, server_idle_max);
        let settings = self.settings[usize::from(ours)];
        let mut beat = Heartbeat::new(settings.interval, settings.missed_max, now);
        beat.back_off(settings.idle_max.min(server_idle_max));
        self.beat = Some((beat, settings));
    }

    /// Applies new settings. If they change how the path is monitored, its silence starts from
    /// zero.
    pub(super) fn tune(&mut self, now: Instant, settings: [HeartbeatSettings; 2]) {
        let before = std::mem::replace(&mut self.settings, settings);
        let watched = self.beat.as_ref().map(|(_, settings)| *settings);
        let is = |at: usize| before[at] != settings[at] && watched == Some(before[at]);
        if let Some(at) = (0..2).find(|at| is(*at)) {
            self.start(now, at == 1, self.server_idle_max);
        }
    }

    pub(super) fn stop(&mut self) {
        self.beat = None;
    }

    /// Longest silence of a path that is alive; None while the path is not monitored.
    pub(super) fn silence_max_ms(&self) -> Option<u64> {
        let (_, settings) = self.beat.as_ref()?;
        Some(u64::try_from(settings.silence_max().as_millis()).unwrap_or(u64::MAX))
    }

    /// Time of the next check.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.beat.as_ref().map(|(beat, _)| beat.deadline())
    }

    pub(super) fn count(&self) -> HeartbeatCount {
        self.count
    }

    /// Counts a heartbeat that is being sent.
    pub(super) fn sent(&mut self) {
        self.count.sent += 1;
    }

    /// Records the answer to a heartbeat and returns its round-trip time.
    pub(super) fn on_answer(&mut self, now: Instant) -> Option<Duration> {
        self.seen = self.seen.max(now);
        self.beat.as_mut().and_then(|(beat, _)| beat.on_ack(now))
    }

    /// Records that the path is in use. Returns whether it was idle, in which case a heartbeat is
    /// due.
    pub(super) fn begin_io(&mut self, now: Instant) -> bool {
        self.beat.as_mut().is_some_and(|(beat, _)| beat.begin_io(now))
    }

    /// Milliseconds from the heartbeat that is being sent to the next one, if the path remains
    /// idle, and whether that is longer than the usual interval. None for a server that does not
    /// accept announcements.
    pub(super) fn announces(&self) -> Option<(u32, bool)> {
        let (beat, settings) = self.beat.as_ref().filter(|_| !self.server_idle_max.is_zero())?;
        let kept = rtrs_core::mutated!(IdleKept);
        let next = if kept { settings.idle_max } else { beat.announces() };
        let next_ms = u32::try_from(next.as_millis()).unwrap_or(u32::MAX);
        Some((next_ms, next > settings.interval))
    }

    /// Checks the heartbeats. `received` is the time when anything but a heartbeat was last
    /// received over the path, `used` the time when its session was last used.
    pub(super) fn look(&mut self, now: Instant, received: Instant, used: Instant) -> Finding {
        let Some((beat, settings)) = self.beat.as_mut() else { return Finding::Fine };
        if received > self.seen {
            self.seen = received;
            beat.on_traffic(received);
        }
        if now.since(used) < IDLE_AFTER {
            beat.in_use();
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
        let dead_if_confirmed = periods > settings.confirmed_missed_max;
        let length = now.since(self.seen);
        let doubted = beat.doubted_since().unwrap_or(now);
        let asked = length.min(now.since(doubted) + settings.interval);
        Finding::Silent(Silence { length, asked, dead, dead_if_confirmed })
    }

    /// Requests an additional heartbeat, to find out whether the server is answering. Returns false
    /// while an earlier one is unanswered.
    pub(super) fn ask(&mut self, now: Instant) -> bool {
        self.beat.as_mut().is_some_and(|(beat, _)| beat.ask(now))
    }

    /// Whether the server has answered a heartbeat that was sent over this path at `since` or
    /// later.
    pub(super) fn has_answered_since(&self, since: Instant) -> bool {
        self.beat.as_ref().is_some_and(|(beat, _)| beat.has_answered_since(since))
    }

    /// Time at which the current silence became suspicious; None if the path is not silent.
    pub(super) fn doubted_since(&self) -> Option<Instant> {
        self.beat.as_ref().and_then(|(beat, _)| beat.doubted_since())
    }

    /// Records that another path confirms that the server is running.
    pub(super) fn confirm(&mut self, now: Instant) {
        self.confirmed = Some(now);
    }

    /// Whether the confirmation is at least one period old; None if there is no confirmation.
    pub(super) fn is_confirmed(&self, now: Instant) -> Option<bool> {
        let ((_, settings), since) = (self.beat.as_ref()?, self.confirmed?);
        Some(now.since(since) >= settings.interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_silence_of_an_idle_path_counts_from_the_heartbeat() {
        let at = |ms: u32| Instant::ZERO + MS * ms;
        let settings = HeartbeatSettings {
            interval: 100 * MS,
            missed_max: 3,
            confirmed_missed_max: 3,
            idle_max: 10_000 * MS,
        };
        let mut monitor = HeartbeatMonitor::new([settings; 2]);
        monitor.start(at(0), true, 10_000 * MS);
        let (mut now, mut asked) = (0, 0);
        // Runs until the interval has grown to ten seconds.
        while monitor.announces() != Some((10_000, true)) {
            now += 10;
            if monitor.look(at(now), Instant::ZERO, Instant::ZERO) == Finding::Due {
                monitor.on_answer(at(now));
                asked = now;
            }
        }
        let due = asked + 10_000;
        assert_eq!(monitor.look(at(due - 1), Instant::ZERO, Instant::ZERO), Finding::Fine);
        assert_eq!(monitor.look(at(due), Instant::ZERO, Instant::ZERO), Finding::Due);
        let mut last = Finding::Fine;
        for period in 1..=3 {
            last = monitor.look(at(due + 100 * period), Instant::ZERO, Instant::ZERO);
        }
        let silence =
            Silence { length: 10_300 * MS, asked: 400 * MS, dead: true, dead_if_confirmed: false };
        assert_eq!(last, Finding::Silent(silence));
    }
}
