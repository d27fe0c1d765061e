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
    missed_max: u32,
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
            missed_max: missed_max.max(1),
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

    /// Something was received at `now`. Cheap enough for every completion; an older time than the
    /// newest is ignored.
    pub fn on_traffic(&mut self, now: Instant) {
        if now > self.heard {
            self.heard = now;
            (self.missed, self.late) = (0, 0);
        }
    }

    /// HB_ACK was received. Returns the round trip time, or None when nothing was asked.
    pub fn on_ack(&mut self, now: Instant) -> Option<Duration> {
        self.on_traffic(now);
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
            let due = self.heard + self.interval;
            if now < due {
                self.next = due;
                return HeartbeatAction::None;
            }
            (self.missed, self.doubted) = (1, now);
            self.asked.get_or_insert(now);
            self.next = now + self.interval;
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
