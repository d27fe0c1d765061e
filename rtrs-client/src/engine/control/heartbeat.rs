//! The heartbeat monitor of a path: a heartbeat after silence, and how long the silence is.

use rtrs_core::proto::{Heartbeat, HeartbeatAction};
use rtrs_core::time::{Duration, Instant};
use serde::Serialize;

use crate::engine::session::HeartbeatSettings;

/// A session that was not in use for so long is idle.
const IDLE_AFTER: Duration = Duration::from_secs(1);

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
pub(super) enum Finding {
    /// Nothing.
    Fine,
    /// Send a heartbeat.
    Due,
    /// The path is silent.
    Silent(Silence),
}

/// The silence of a path after a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Silence {
    /// Since something last came.
    pub(super) length: Duration,
    /// The same, for a path that was idle as if its interval had not grown.
    pub(super) asked: Duration,
    /// As many periods have passed as the path may miss.
    pub(super) dead: bool,
    /// More have passed than it may miss when another path confirms that the server runs.
    pub(super) dead_if_confirmed: bool,
}

/// Watches whether a path is alive, from its opening to its end.
#[derive(Debug)]
pub(super) struct HeartbeatMonitor {
    /// How, where the server is a kernel's and where it is one of ours.
    settings: [HeartbeatSettings; 2],
    beat: Option<(Heartbeat, HeartbeatSettings)>,
    /// When something last came that the monitor knows of.
    seen: Instant,
    /// Since when another path has confirmed that the server runs while this one is silent.
    confirmed: Option<Instant>,
    /// The longest interval of an idle path that the server takes.
    takes: Duration,
    count: HeartbeatCount,
}

impl HeartbeatMonitor {
    /// Watches nothing yet. The settings are those for a kernel's server and for one of ours.
    pub(super) fn new(settings: [HeartbeatSettings; 2]) -> Self {
        let (seen, count) = (Instant::ZERO, HeartbeatCount::default());
        Self { settings, beat: None, seen, confirmed: None, takes: Duration::ZERO, count }
    }

    /// The path begins to be watched; `ours`: the server is one of ours. `takes`: the longest
    /// interval of an idle path that the server takes; zero if it takes none but the usual.
    pub(super) fn start(&mut self, now: Instant, ours: bool, takes: Duration) {
        (self.seen, self.confirmed, self.takes) = (now, None, takes);
        let settings = self.settings[usize::from(ours)];
        let mut beat = Heartbeat::new(settings.interval, settings.missed_max, now);
        beat.back_off(settings.idle_max.min(takes));
        self.beat = Some((beat, settings));
    }

    /// Other settings hold. Where they change how the path is watched, its silence counts anew.
    pub(super) fn tune(&mut self, now: Instant, settings: [HeartbeatSettings; 2]) {
        let before = std::mem::replace(&mut self.settings, settings);
        let watched = self.beat.as_ref().map(|(_, settings)| *settings);
        let is = |at: usize| before[at] != settings[at] && watched == Some(before[at]);
        if let Some(at) = (0..2).find(|at| is(*at)) {
            self.start(now, at == 1, self.takes);
        }
    }

    /// The path ends.
    pub(super) fn stop(&mut self) {
        self.beat = None;
    }

    /// The longest silence that counts as life; None while the path is not watched.
    pub(super) fn silence_max_ms(&self) -> Option<u64> {
        let (_, settings) = self.beat.as_ref()?;
        Some(u64::try_from(settings.silence_max().as_millis()).unwrap_or(u64::MAX))
    }

    /// When to look next.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.beat.as_ref().map(|(beat, _)| beat.deadline())
    }

    /// Since the path was added.
    pub(super) fn count(&self) -> HeartbeatCount {
        self.count
    }

    /// A heartbeat goes out.
    pub(super) fn sent(&mut self) {
        self.count.sent += 1;
    }

    /// A heartbeat was answered. Returns its round trip time.
    pub(super) fn on_answer(&mut self, now: Instant) -> Option<Duration> {
        self.seen = self.seen.max(now);
        self.beat.as_mut().and_then(|(beat, _)| beat.on_ack(now))
    }

    /// The path is in use. True when it was idle: a heartbeat is to be sent.
    pub(super) fn begin_io(&mut self, now: Instant) -> bool {
        self.beat.as_mut().is_some_and(|(beat, _)| beat.begin_io(now))
    }

    /// In how many milliseconds the next heartbeat follows the one that is sent now, if the path
    /// stays idle; None for a server that gets no announcements.
    pub(super) fn announces(&self) -> Option<(u32, bool)> {
        let (beat, settings) = self.beat.as_ref().filter(|_| !self.takes.is_zero())?;
        let kept = rtrs_core::mutated!(IdleKept);
        let next = if kept { settings.idle_max } else { beat.announces() };
        let next_ms = u32::try_from(next.as_millis()).unwrap_or(u32::MAX);
        Some((next_ms, next > settings.interval))
    }

    /// Looks at the time; `received` is when something that was no heartbeat last came over the
    /// path, and `used` when its session was last in use.
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

    /// A heartbeat besides, for what its answer says of the server. False while another one is
    /// unanswered.
    pub(super) fn ask(&mut self, now: Instant) -> bool {
        self.beat.as_mut().is_some_and(|(beat, _)| beat.ask(now))
    }

    /// True when the server has answered a heartbeat that was sent over this path at `since` or
    /// later.
    pub(super) fn has_answered_since(&self, since: Instant) -> bool {
        self.beat.as_ref().is_some_and(|(beat, _)| beat.has_answered_since(since))
    }

    /// When the present silence began to be doubted; None while there is none.
    pub(super) fn doubted_since(&self) -> Option<Instant> {
        self.beat.as_ref().and_then(|(beat, _)| beat.doubted_since())
    }

    /// Another path confirms that the server runs.
    pub(super) fn confirm(&mut self, now: Instant) {
        self.confirmed = Some(now);
    }

    /// True when another path has confirmed that; Some(true) a period ago or longer.
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
    fn the_silence_of_an_idle_path_counts_from_the_question() {
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
        // Until it is asked every ten seconds.
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
