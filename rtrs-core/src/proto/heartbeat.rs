//! The heartbeat of a path: silence is asked about, and unanswered questions end the path.
//!
//! Both ends run one per path on connection 0. Anything received counts as a sign of life. After
//! `interval` without one, HB_MSG is sent once; it is not repeated, since the connection below
//! is reliable. When another `interval * missed_max` passes in silence the path is dead: from
//! `interval * missed_max` to `interval * (missed_max + 1)` after the last sign of life plus the
//! time of one poll. A poll that comes late says that this end did not run: the peer's answer may
//! lie unread, or the peer may starve on the same machine, so that period does not count, eight
//! times in a row at most. The time from HB_MSG to HB_ACK is the path's round trip time.
//!
//! The first silence may be longer than `interval` while the path is idle. The asking end doubles
//! it with each HB_MSG since which the path was not in use, up to `idle_max`, and announces it in
//! the HB_MSG; the other end ([`Heartbeat::announced`]) waits for the next HB_MSG that long and
//! `interval` more before it asks by itself. [`Heartbeat::begin_io`] ends that at once. Once HB_MSG
//! is out, `interval` counts at all times.
//!
//! Rule of the kernel: rtrs.c hb_work (docs/PROTOCOL.md, heartbeat and failure detection).

use crate::time::{Duration, Instant};

/// Late periods in a row that do not count against the peer.
const LATE_MAX: u32 = 8;

/// What the owner of a heartbeat has to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeartbeatAction {
    /// Nothing.
    None,
    /// Send HB_MSG on connection 0.
    Send,
    /// The peer has been silent for too long: end the path.
    Dead,
}

/// One path's heartbeat.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    interval: Duration,
    /// The longest that `patience` may grow.
    idle_max: Duration,
    missed_max: u32,
    /// The first silence, after which HB_MSG is sent.
    patience: Duration,
    /// What the last HB_MSG announced.
    announces: Duration,
    /// The path was not in use since the last HB_MSG.
    idle: bool,
    heard: Instant,
    next: Instant,
    missed: u32,
    late: u32,
    /// When this silence was asked about.
    doubted: Instant,
    /// When the oldest question without an answer was asked.
    asked: Option<Instant>,
    /// When the newest question with an answer was asked.
    answered: Option<Instant>,
    rtt: Option<Duration>,
}

impl Heartbeat {
    /// A heartbeat that begins now. `missed_max` periods may pass without an answer.
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

    /// While the path is idle, HB_MSG is sent less often: at least every `idle_max`. The peer has
    /// to take announcements.
    pub fn back_off(&mut self, idle_max: Duration) {
        self.idle_max = idle_max.max(self.interval);
    }

    /// Something was received at `now`. Cheap enough for every completion; an older time than the
    /// newest is ignored.
    pub fn on_traffic(&mut self, now: Instant) {
        if now > self.heard {
            self.heard = now;
            (self.missed, self.late) = (0, 0);
        }
    }

    /// The path is in use. To be called before each [`Heartbeat::poll`] while it is.
    pub fn in_use(&mut self) {
        (self.idle, self.patience) = (false, self.interval);
        if self.missed == 0 {
            self.next = self.next.min(self.heard + self.interval);
        }
    }

    /// This end begins IO. True when the path was idle: HB_MSG is to be sent at once, because the
    /// peer expects it later, and because a path that has died meanwhile is to be noticed as early
    /// as one that was in use.
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

    /// The peer's HB_MSG was received, which announces its next one: after `next` at the latest.
    pub fn announced(&mut self, now: Instant, next: Duration) {
        self.on_traffic(now);
        self.patience = if next > self.interval { next + self.interval } else { self.interval };
        self.next = self.heard + self.patience;
    }

    /// Asks now, whatever the peer has announced. False while a silence is asked about; else
    /// HB_MSG is to be sent.
    pub fn hurry(&mut self, now: Instant) -> bool {
        let waits = self.missed == 0;
        if waits {
            self.doubt(now);
        }
        waits
    }

    /// What an HB_MSG that is sent now announces: the time to the next one, if the path stays idle.
    pub fn announces(&self) -> Duration {
        self.announces
    }

    /// The present silence is asked about.
    fn doubt(&mut self, now: Instant) {
        (self.missed, self.late, self.doubted) = (1, 0, now);
        self.asked.get_or_insert(now);
        self.next = now + self.interval;
    }

    /// HB_ACK was received. Returns the round trip time, or None when nothing was asked.
    pub fn on_ack(&mut self, now: Instant) -> Option<Duration> {
        self.on_traffic(now);
        self.next = self.heard + self.patience;
        let asked = self.asked.take()?;
        let rtt = now.since(asked);
        (self.answered, self.rtt) = (Some(asked), Some(rtt));
        Some(rtt)
    }

    /// A question besides, for what its answer says of the peer. False while another one is
    /// unanswered; else HB_MSG is to be sent.
    pub fn ask(&mut self, now: Instant) -> bool {
        let free = self.asked.is_none();
        self.asked.get_or_insert(now);
        free
    }

    /// True when a question was answered that had been asked at `since` or later.
    pub fn has_answered_since(&self, since: Instant) -> bool {
        self.answered.is_some_and(|asked| asked >= since)
    }

    /// When the present silence was asked about; None while there is none.
    pub fn doubted_since(&self) -> Option<Instant> {
        (self.missed > 0).then_some(self.doubted)
    }

    /// Looks at the time. To be called when [`Heartbeat::deadline`] has passed; calls before
    /// that do nothing. After `Dead` the owner may go on waiting: it comes again every period.
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

    /// When to call [`Heartbeat::poll`].
    pub fn deadline(&self) -> Instant {
        self.next
    }

    /// The last round trip time, if one was measured.
    pub fn rtt(&self) -> Option<Duration> {
        self.rtt
    }

    /// Periods that have begun without a sign of life.
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

    /// Polls at every deadline until `end`; returns what came when.
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
    fn silence_is_asked_about_once_and_then_kills() {
        let mut beat = Heartbeat::new(100 * MS, 5, at(0));
        let seen = run(&mut beat, at(10_000));
        assert_eq!(seen, [(100, HeartbeatAction::Send), (600, HeartbeatAction::Dead)]);
    }

    #[test]
    fn traffic_keeps_it_quiet() {
        let mut beat = Heartbeat::new(100 * MS, 2, at(0));
        for ms in (50..5000).step_by(50) {
            beat.on_traffic(at(ms));
            assert_eq!(beat.poll(at(ms)), HeartbeatAction::None);
        }
        assert_eq!(run(&mut beat, at(5049)), []);
        assert_eq!(run(&mut beat, at(5051)), [(5050, HeartbeatAction::Send)]);
    }

    #[test]
    fn a_period_whose_poll_came_late_does_not_count() {
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        assert_eq!(beat.poll(at(100)), HeartbeatAction::Send);
        let mut now = 100;
        // Stalls of our own, one after the other: each gives the peer a new period.
        for stall in [151, 400, 1000, 160] {
            now += stall;
            assert_eq!(beat.poll(at(now)), HeartbeatAction::None);
            assert_eq!(beat.missed(), 1, "after {stall} ms");
        }
        // On time again the silence counts, and a little late is not late.
        for time in [100, 149] {
            now += time;
            assert_eq!(beat.poll(at(now)), HeartbeatAction::None);
        }
        assert_eq!(beat.poll(at(now + 100)), HeartbeatAction::Dead);
        assert_eq!(beat.poll(at(now + 150)), HeartbeatAction::None);
        assert_eq!(beat.poll(at(now + 200)), HeartbeatAction::Dead, "every period");
    }

    #[test]
    fn a_core_that_is_always_late_notices_too() {
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        let polls = (1..).map(|round| at(round * 300)).map(|now| beat.poll(now));
        let count = polls.take_while(|action| *action != HeartbeatAction::Dead).count();
        assert_eq!(count, 1 + 8 + 2, "asked, eight late ones, two that counted");
    }

    #[test]
    fn an_answer_gives_the_round_trip_and_a_new_period() {
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
    fn an_idle_path_is_asked_less_and_less_often() {
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
        // From then on all is as on any path: the answer is due within the time of a fast one.
        let end = run(&mut beat, at(10_000));
        assert_eq!(end, [(6508, HeartbeatAction::Send), (6808, HeartbeatAction::Dead)]);
    }

    /// A path whose last HB_MSG, at 100 ms, announced the next one after 200 ms.
    fn idle() -> Heartbeat {
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        beat.back_off(1000 * MS);
        assert_eq!(run(&mut beat, at(100)), [(100, HeartbeatAction::Send)]);
        beat
    }

    #[test]
    fn the_first_io_asks_at_once_and_ends_the_idle_time() {
        let mut beat = idle();
        beat.on_ack(at(101));
        assert_eq!(run(&mut beat, at(250)), []);
        assert!(beat.begin_io(at(250)), "HB_MSG goes out");
        assert_eq!(beat.announces(), 100 * MS);
        assert!(!beat.begin_io(at(251)), "once");
        assert_eq!(beat.doubted_since(), Some(at(250)));
        assert_eq!(run(&mut beat, at(1000)), [(550, HeartbeatAction::Dead)]);
        // While the path is in use nothing grows.
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
    fn use_during_a_question_does_not_prolong_it() {
        let mut beat = idle();
        assert!(beat.begin_io(at(150)), "the peer still has to know");
        beat.in_use();
        assert_eq!(beat.announces(), 100 * MS);
        assert_eq!(run(&mut beat, at(1000)), [(400, HeartbeatAction::Dead)]);
    }

    #[test]
    fn what_the_peer_announces_is_waited_for() {
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        beat.announced(at(50), 1000 * MS);
        let end = run(&mut beat, at(5000));
        assert_eq!(end, [(1150, HeartbeatAction::Send), (1450, HeartbeatAction::Dead)]);
        // What lives is waited for anew, and fast again when the peer says so.
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        beat.announced(at(50), 1000 * MS);
        assert_eq!(run(&mut beat, at(1150)), [(1150, HeartbeatAction::Send)]);
        beat.on_ack(at(1151));
        assert_eq!(beat.deadline(), at(2251));
        beat.announced(at(1200), 100 * MS);
        assert_eq!(run(&mut beat, at(1300)), [(1300, HeartbeatAction::Send)]);
        // Whoever cannot wait asks at once.
        let mut beat = Heartbeat::new(100 * MS, 3, at(0));
        beat.announced(at(50), 1000 * MS);
        assert!(beat.hurry(at(60)) && !beat.hurry(at(61)));
        assert_eq!(run(&mut beat, at(1000)), [(360, HeartbeatAction::Dead)]);
    }

    #[test]
    fn a_question_besides_tells_when_the_peer_answered() {
        let mut beat = Heartbeat::new(100 * MS, 2, at(0));
        assert_eq!(beat.doubted_since(), None);
        assert!(beat.ask(at(10)), "to be sent");
        assert!(!beat.ask(at(20)), "one at a time");
        assert!(!beat.has_answered_since(at(0)));
        assert_eq!(beat.on_ack(at(30)), Some(20 * MS));
        assert!(beat.has_answered_since(at(10)) && !beat.has_answered_since(at(11)));
        // The question of a silence does not make the answer to an older one a new answer.
        assert!(beat.ask(at(40)));
        assert_eq!(run(&mut beat, at(130)), [(130, HeartbeatAction::Send)]);
        assert_eq!(beat.doubted_since(), Some(at(130)));
        beat.on_ack(at(140));
        assert!(beat.has_answered_since(at(40)) && !beat.has_answered_since(at(130)));
        assert_eq!(beat.doubted_since(), None);
    }
}
