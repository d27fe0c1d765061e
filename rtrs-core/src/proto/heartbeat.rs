//! Heartbeat of a path: probes a silent peer, and closes the path if there is no answer.
//!
//! Both ends run one per path on connection 0. Any received message counts as a sign of life. After
//! `interval` without one, HB_MSG is sent once; it is not repeated, since the underlying connection
//! is reliable. When another `interval * missed_max` passes in silence, the path is dead: this
//! happens between `interval * missed_max` and `interval * (missed_max + 1)` after the last sign of
//! life, plus the duration of one poll. A late poll indicates that this end was not running: the
//! peer's answer may be unread, or the peer may be starved on the same machine. The period before a
//! late poll therefore does not count, at most eight times in a row. The time from HB_MSG to HB_ACK
//! is the path's round trip time.
//!
//! The first silence may be longer than `interval` while the path is idle. The probing end doubles
//! it with each HB_MSG after which the path remained unused, up to `idle_max`, and announces it in
//! the HB_MSG; the other end ([`Heartbeat::announced`]) waits for the next HB_MSG for that time
//! plus `interval` before it sends a probe of its own. [`Heartbeat::begin_io`] ends this
//! immediately. Once HB_MSG has been sent, `interval` always applies.
//!
//! The kernel's rules are in rtrs.c hb_work (docs/PROTOCOL.md, heartbeat and failure detection).

use crate::time::{Duration, Instant};

/// Maximum number of consecutive late periods that do not count against the peer.
const LATE_MAX: u32 = 8;

/// Action required from the owner of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeartbeatAction {
    /// No action.
    None,
    /// Send HB_MSG on connection 0.
    Send,
    /// The peer has been silent for too long: close the path.
    Dead,
}

/// Heartbeat of one path.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    interval: Duration,
    /// Maximum of `patience`.
    idle_max: Duration,
    missed_max: u32,
    /// Silence after which HB_MSG is sent.
    patience: Duration,
    /// Interval announced by the last HB_MSG.
    announces: Duration,
    /// The path has not been used since the last HB_MSG.
    idle: bool,
    heard: Instant,
    next: Instant,
    missed: u32,
    late: u32,
    /// Time of the probe for the current silence.
    doubted: Instant,
    /// Time of the oldest unanswered probe.
    asked: Option<Instant>,
    /// Time of the newest answered probe.
    answered: Option<Instant>,
    rtt: Option<Duration>,
}

impl Heartbeat {
    /// Creates a heartbeat that begins now. `missed_max` periods may pass without an answer.
    pub fn new(interval: Duration, missed_max: u32, now: Instant) -> Self {
        let interval = interval.max(Duration::from_millis(1));
        Self {
            interval,
            idle_max: interval,
            missed_max: missed_max.max(1),
            patience: interval,
            announces: interval,
            idle: true,
            heard: now,
            next: now + interval,
            missed: 0,
            late: 0,
            doubted: now,
            asked: None,
            answered: None,
            rtt: None,
        }
    }

    /// Sends HB_MSG less often while the path is idle: at least once per `idle_max`. The peer must
    /// support announcements.
    pub fn back_off(&mut self, idle_max: Duration) {
        self.idle_max = idle_max.max(self.interval);
    }

    /// Records that a message was received at `now`. Cheap enough for every completion; a time
    /// older than the newest is ignored.
    pub fn on_traffic(&mut self, now: Instant) {
        if now > self.heard {
            self.heard = now;
            (self.missed, self.late) = (0, 0);
        }
    }

    /// Records that the path is in use. While it is, call this before each [`Heartbeat::poll`].
    pub fn in_use(&mut self) {
        (self.idle, self.patience) = (false, self.interval);
        if self.missed == 0 {
            self.next = self.next.min(self.heard + self.interval);
        }
    }

    /// Records that this end is beginning IO. Returns true if the path was idle: the caller must
    /// send HB_MSG immediately, because the peer does not expect the next one until later, and
    /// because a path that has died must be detected as quickly as one in use.
    pub fn begin_io(&mut self, now: Instant) -> bool {
        self.in_use();
        if self.announces <= self.interval {
            return false;
        }
        self.announces = self.interval;
        if self.missed == 0 {
            self.doubt(now);
        }
        true
    }

    /// Handles an HB_MSG from the peer, which announces its next one within `next`.
    pub fn announced(&mut self, now: Instant, next: Duration) {
        self.on_traffic(now);
        self.patience = if next > self.interval { next + self.interval } else { self.interval };
        self.next = self.heard + self.patience;
    }

    /// Starts a probe now, whatever the peer has announced. Returns false if a silence is being
    /// probed already; otherwise the caller must send HB_MSG.
    pub fn hurry(&mut self, now: Instant) -> bool {
        let waits = self.missed == 0;
        if waits {
            self.doubt(now);
        }
        waits
    }

    /// Returns the interval to announce in an HB_MSG sent now: the time until the next one, if the
    /// path stays idle.
    pub fn announces(&self) -> Duration {
        self.announces
    }

    /// Starts probing the current silence.
    fn doubt(&mut self, now: Instant) {
        (self.missed, self.late, self.doubted) = (1, 0, now);
        self.asked.get_or_insert(now);
        self.next = now + self.interval;
    }

    /// Handles an HB_ACK. Returns the round trip time, or None if there was no probe.
    pub fn on_ack(&mut self, now: Instant) -> Option<Duration> {
        self.on_traffic(now);
        self.next = self.heard + self.patience;
        let asked = self.asked.take()?;
        let rtt = now.since(asked);
        (self.answered, self.rtt) = (Some(asked), Some(rtt));
        Some(rtt)
    }

    /// Starts an additional probe, for information about the peer. Returns false if another one is
    /// unanswered; otherwise the caller must send HB_MSG.
    pub fn ask(&mut self, now: Instant) -> bool {
        let free = self.asked.is_none();
        self.asked.get_or_insert(now);
        free
    }

    /// Returns true if a probe sent at `since` or later was answered.
    pub fn has_answered_since(&self, since: Instant) -> bool {
        self.answered.is_some_and(|asked| asked >= since)
    }

    /// Returns when the current silence was first probed; None if it has not been.
    pub fn doubted_since(&self) -> Option<Instant> {
        (self.missed > 0).then_some(self.doubted)
    }

    /// Checks the time. Must be called when [`Heartbeat::deadline`] has passed; earlier calls do
    /// nothing. After `Dead` the owner may keep waiting: `Dead` is returned again every period.
    pub fn poll(&mut self, now: Instant) -> HeartbeatAction {
        if now < self.next {
            return HeartbeatAction::None;
        }
        if self.missed == 0 {
            let due = self.heard + self.patience;
            if now < due {
                self.next = due;
                return HeartbeatAction::None;
            }
            if self.idle {
                let longer = (self.patience * 2).min(self.idle_max);
                self.patience = self.patience.max(longer);
            }
            (self.idle, self.announces) = (true, self.patience);
            self.doubt(now);
            return HeartbeatAction::Send;
        }
        let late = now.since(self.next) > self.interval / 2;
        self.next = now + self.interval;
        if late && self.late < LATE_MAX {
            self.late += 1;
            return HeartbeatAction::None;
        }
        if self.missed >= self.missed_max {
            return HeartbeatAction::Dead;
        }
        self.missed += 1;
        HeartbeatAction::None
    }

    /// Returns when to call [`Heartbeat::poll`].
    pub fn deadline(&self) -> Instant {
        self.next
    }

    /// Returns the last round trip time, if one was measured.
    pub fn rtt(&self) -> Option<Duration> {
        self.rtt
    }

    /// Returns the number of periods that have begun without a sign of life.
    pub fn missed(&self) -> u32 {
        self.missed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    /// Polls at every deadline until `end`; returns the actions with their times.
    fn run(beat: &mut Heartbeat, end: Instant) -> Vec<(u64, HeartbeatAction)> {
        let mut seen = Vec::new();
        while beat.deadline() <= end {
            let now = beat.deadline();
            match beat.poll(now) {
                HeartbeatAction::None => {}
                action => seen.push((now.as_nanos() / 1_000_000, action)),
            }
            if matches!(seen.last(), Some((_, HeartbeatAction::Dead))) {
                break;
            }
        }
        seen
    }

    #[test]
    fn silence_is_probed_once_and_then_fatal() {
        let mut beat = Heartbeat::new(100 * MS, 5, at(0));
        let seen = run(&mut beat, at(10_000));
        assert_eq!(seen, [(100, HeartbeatAction::Send), (600, HeartbeatAction::Dead)]);
    }

    #[test]
    fn traffic_suppresses_probes() {
        let mut beat = Heartbeat::new(100 * MS, 2, at(0));
        for ms in (50..5000).step_by(50) {
            beat.on_traffic(at(ms));
            assert_eq!(beat.poll(at(ms)), HeartbeatAction::None);
        }
        assert_eq!(run(&mut beat, at(5049)), []);
        assert_eq!(run(&mut beat, at(5051)), [(5050, HeartbeatAction::Send)]);
    }

    #[test]
    fn a_period_with_a_late_poll_does_not_count() {
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        assert_eq!(beat.poll(at(100)), HeartbeatAction::Send);
        let mut now = 100;
        // Consecutive stalls of this end each give the peer a new period.
        for stall in [151, 400, 1000, 160] {
            now += stall;
            assert_eq!(beat.poll(at(now)), HeartbeatAction::None);
            assert_eq!(beat.missed(), 1, "after {stall} ms");
        }
        // With timely polls the silence counts, and a slightly delayed poll is not late.
        for time in [100, 149] {
            now += time;
            assert_eq!(beat.poll(at(now)), HeartbeatAction::None);
        }
        assert_eq!(beat.poll(at(now + 100)), HeartbeatAction::Dead);
        assert_eq!(beat.poll(at(now + 150)), HeartbeatAction::None);
        assert_eq!(beat.poll(at(now + 200)), HeartbeatAction::Dead, "every period");
    }

    #[test]
    fn a_core_that_is_always_late_still_detects_silence() {
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        let polls = (1..).map(|round| at(round * 300)).map(|now| beat.poll(now));
        let count = polls.take_while(|action| *action != HeartbeatAction::Dead).count();
        assert_eq!(count, 1 + 8 + 2, "the probe, eight late polls, two that counted");
    }

    #[test]
    fn an_answer_yields_the_round_trip_and_starts_a_period() {
        let mut beat = Heartbeat::new(100 * MS, 2, at(0));
        assert_eq!(beat.on_ack(at(1)), None, "nothing was asked");
        assert_eq!(run(&mut beat, at(101)), [(101, HeartbeatAction::Send)]);
        assert_eq!(beat.on_ack(at(108)), Some(7 * MS));
        assert_eq!(beat.rtt(), Some(7 * MS));
        assert_eq!(run(&mut beat, at(300)), [(208, HeartbeatAction::Send)]);
        beat.on_traffic(at(350));
        assert_eq!(beat.missed(), 0, "any traffic is an answer");
        assert_eq!(run(&mut beat, at(460)), [(450, HeartbeatAction::Send)]);
    }

    #[test]
    fn idle_paths_are_probed_less_and_less_often() {
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        beat.back_off(1000 * MS);
        let (mut now, mut sent, mut announced) = (0, Vec::new(), Vec::new());
        while now < 5000 {
            now = beat.deadline().as_nanos() / 1_000_000;
            match beat.poll(at(now)) {
                HeartbeatAction::Send => {
                    sent.push(now);
                    announced.push(beat.announces().as_millis());
                    now += 1;
                    beat.on_ack(at(now));
                }
                action => assert_eq!(action, HeartbeatAction::None),
            }
        }
        assert_eq!(sent, [100, 301, 702, 1503, 2504, 3505, 4506, 5507], "each once, nothing else");
        assert_eq!(announced, [200, 400, 800, 1000, 1000, 1000, 1000, 1000]);
        // After a probe the timing is that of a busy path: the answer is due after short periods.
        let end = run(&mut beat, at(10_000));
        assert_eq!(end, [(6508, HeartbeatAction::Send), (6808, HeartbeatAction::Dead)]);
    }

    /// Returns a path whose last HB_MSG, at 100 ms, announced the next one after 200 ms.
    fn idle() -> Heartbeat {
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        beat.back_off(1000 * MS);
        assert_eq!(run(&mut beat, at(100)), [(100, HeartbeatAction::Send)]);
        beat
    }

    #[test]
    fn the_first_io_probes_at_once_and_ends_idling() {
        let mut beat = idle();
        beat.on_ack(at(101));
        assert_eq!(run(&mut beat, at(250)), []);
        assert!(beat.begin_io(at(250)), "HB_MSG goes out");
        assert_eq!(beat.announces(), 100 * MS);
        assert!(!beat.begin_io(at(251)), "once");
        assert_eq!(beat.doubted_since(), Some(at(250)));
        assert_eq!(run(&mut beat, at(1000)), [(550, HeartbeatAction::Dead)]);
        // While the path is in use, the interval does not grow.
        let mut beat = idle();
        beat.on_ack(at(101));
        for ms in (150..2000).step_by(50) {
            beat.on_traffic(at(ms));
            beat.in_use();
            assert_eq!(beat.poll(at(ms)), HeartbeatAction::None);
        }
        assert_eq!(run(&mut beat, at(2060)), [(2050, HeartbeatAction::Send)]);
        assert_eq!(beat.announces(), 100 * MS, "it was in use until now");
    }

    #[test]
    fn io_during_a_probe_does_not_prolong_it() {
        let mut beat = idle();
        assert!(beat.begin_io(at(150)), "the peer still has to know");
        beat.in_use();
        assert_eq!(beat.announces(), 100 * MS);
        assert_eq!(run(&mut beat, at(1000)), [(400, HeartbeatAction::Dead)]);
    }

    #[test]
    fn the_peers_announced_interval_is_respected() {
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        beat.announced(at(50), 1000 * MS);
        let end = run(&mut beat, at(5000));
        assert_eq!(end, [(1150, HeartbeatAction::Send), (1450, HeartbeatAction::Dead)]);
        // After an answer the announced interval applies again, until a shorter one is announced.
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        beat.announced(at(50), 1000 * MS);
        assert_eq!(run(&mut beat, at(1150)), [(1150, HeartbeatAction::Send)]);
        beat.on_ack(at(1151));
        assert_eq!(beat.deadline(), at(2251));
        beat.announced(at(1200), 100 * MS);
        assert_eq!(run(&mut beat, at(1300)), [(1300, HeartbeatAction::Send)]);
        // An end that cannot wait sends a probe immediately.
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        beat.announced(at(50), 1000 * MS);
        assert!(beat.hurry(at(60)) && !beat.hurry(at(61)));
        assert_eq!(run(&mut beat, at(1000)), [(360, HeartbeatAction::Dead)]);
    }

    #[test]
    fn an_extra_probe_shows_when_the_peer_answered() {
        let mut beat = Heartbeat::new(100 * MS, 2, at(0));
        assert_eq!(beat.doubted_since(), None);
        assert!(beat.ask(at(10)), "to be sent");
        assert!(!beat.ask(at(20)), "one at a time");
        assert!(!beat.has_answered_since(at(0)));
        assert_eq!(beat.on_ack(at(30)), Some(20 * MS));
        assert!(beat.has_answered_since(at(10)) && !beat.has_answered_since(at(11)));
        // The answer to an older probe does not count for a newer one sent before it arrives.
        assert!(beat.ask(at(40)));
        assert_eq!(run(&mut beat, at(130)), [(130, HeartbeatAction::Send)]);
        assert_eq!(beat.doubted_since(), Some(at(130)));
        beat.on_ack(at(140));
        assert!(beat.has_answered_since(at(40)) && !beat.has_answered_since(at(130)));
        assert_eq!(beat.doubted_since(), None);
    }
}
