//! The client of `rds stress`: keeps requests in flight on its sockets and receives the answers.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use hdrhistogram::Histogram;
use rtrs_base::time::{Duration, Instant};

use super::ends::{Ends, Machine, Refusal};
use super::message::Head;

/// Parameters of a client.
#[derive(Clone, Debug)]
pub(crate) struct ClientPlan {
    /// Destination of each socket.
    pub(crate) to: Vec<SocketAddr>,
    /// Number of requests in flight on each socket.
    pub(crate) depth: u64,
    pub(crate) request_len: usize,
    pub(crate) answer_len: usize,
    /// Duration of the load, after which no requests are sent.
    pub(crate) time: Duration,
    /// Time allowed for answers to arrive afterwards.
    pub(crate) grace: Duration,
    /// Number of requests per socket; None for no limit.
    pub(crate) count: Option<u64>,
    pub(crate) is_checked: bool,
    pub(crate) session: u32,
    /// Number of signals so far: the first stops the requests, the second stops the wait for
    /// answers.
    pub(crate) stop: Arc<AtomicU32>,
}

/// Maximum time to the first answer; longer if `grace` is above 10 s.
const SILENCE_MAX: Duration = Duration::from_secs(3);
/// Interval between checks for signals.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Longest time that the histogram can record, in nanoseconds.
const TIME_MAX: u64 = 60_000_000_000;

/// Creates a histogram of times from 1 ns to a minute, with three significant digits.
pub(super) fn new_times() -> Histogram<u64> {
    Histogram::new_with_bounds(1, TIME_MAX, 3)
        .unwrap_or_else(|_| unreachable!("the bounds are valid"))
}

/// A client's results.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    pub(crate) sent: u64,
    pub(crate) answered: u64,
    /// Number of answers that were out of order, duplicated, or altered.
    pub(crate) wrong: u64,
    /// Number of errors that the server reported: requests lost, duplicated, reordered or altered.
    pub(crate) wrong_there: u64,
    pub(crate) congested: u64,
    pub(crate) full: u64,
    /// Time from the first request to the last answer.
    pub(crate) took: Duration,
    /// Times from request to answer, in nanoseconds.
    pub(crate) times: Histogram<u64>,
    /// Reason for stopping early.
    pub(crate) failed: Option<String>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    next: u64,
    answered: u64,
}

#[derive(Debug)]
pub(crate) struct StressClient {
    plan: ClientPlan,
    flows: Vec<Flow>,
    readable: BTreeSet<usize>,
    /// Sockets that may send.
    open: BTreeSet<usize>,
    /// Sockets whose last send was refused.
    blocked: BTreeSet<usize>,
    begun: Option<Instant>,
    /// Time of the last call to [`Machine::turn`].
    seen: Instant,
    /// Time of the first signal.
    stopped: Option<Instant>,
    ended: bool,
    tally: Tally,
}

impl StressClient {
    pub(crate) fn new(plan: ClientPlan) -> Self {
        let count = plan.to.len();
        let tally = Tally {
            sent: 0,
            answered: 0,
            wrong: 0,
            wrong_there: 0,
            congested: 0,
            full: 0,
            took: Duration::ZERO,
            times: new_times(),
            failed: None,
        };
        Self {
            plan,
            flows: vec![Flow::default(); count],
            readable: BTreeSet::new(),
            open: (0..count).collect(),
            blocked: BTreeSet::new(),
            begun: None,
            seen: Instant::ZERO,
            stopped: None,
            ended: false,
            tally,
        }
    }

    /// Returns the results.
    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    fn signals(&self) -> u32 {
        self.plan.stop.load(Ordering::Relaxed)
    }

    fn receive(&mut self, now: Instant, ends: &mut dyn Ends) -> bool {
        let mut any = false;
        for socket in std::mem::take(&mut self.readable) {
            let Self { plan, flows, tally, open, .. } = self;
            let flow = &mut flows[socket];
            let mut take = |from: SocketAddr, message: &[u8]| {
                let head = Head::of(message).filter(|head| {
                    let own = (head.is_answer, head.session) == (true, plan.session);
                    own && from == plan.to[socket] && message.len() == plan.answer_len
                });
                match head.filter(|head| (flow.answered..flow.next).contains(&head.number)) {
                    Some(head) => {
                        // The answers in between were lost or reordered.
                        tally.wrong += u64::from(head.number != flow.answered);
                        flow.answered = head.number + 1;
                        tally.answered += 1;
                        tally.wrong_there = tally.wrong_there.max(head.wrong);
                        let time = now.as_nanos().saturating_sub(head.sent_at);
                        tally.times.saturating_record(time.max(1));
                    }
                    None => tally.wrong += 1,
                }
            };
            while ends.receive(socket, &mut take) {
                any = true;
            }
            open.insert(socket);
        }
        any
    }

    fn send(&mut self, now: Instant, begun: Instant, ends: &mut dyn Ends) -> bool {
        let is_over = now >= self.last_request(begun);
        let mut any = false;
        for socket in std::mem::take(&mut self.open) {
            let to = self.plan.to[socket];
            loop {
                let flow = &mut self.flows[socket];
                let is_last = self.plan.count.is_some_and(|count| flow.next >= count);
                if is_over || is_last || flow.next - flow.answered >= self.plan.depth {
                    break;
                }
                let len = self.plan.request_len;
                let head = Head {
                    is_answer: false,
                    is_checked: self.plan.is_checked,
                    session: self.plan.session,
                    number: flow.next,
                    answer_len: u32::try_from(self.plan.answer_len).unwrap_or(u32::MAX),
                    sent_at: now.as_nanos(),
                    wrong: 0,
                };
                let sent = ends.may_send(socket, to, len);
                match sent.and_then(|()| ends.send(socket, to, head.message(len))) {
                    Ok(()) => {
                        flow.next += 1;
                        self.tally.sent += 1;
                        any = true;
                    }
                    Err(Refusal::Never(why)) => {
                        self.tally.failed = Some(why);
                        return false;
                    }
                    Err(refusal) => {
                        match refusal {
                            Refusal::Congested => self.tally.congested += 1,
                            _ => self.tally.full += 1,
                        }
                        self.blocked.insert(socket);
                        break;
                    }
                }
            }
        }
        any
    }

    /// Returns the time after which no requests are sent.
    fn last_request(&self, begun: Instant) -> Instant {
        let planned = begun + self.plan.time;
        self.stopped.map_or(planned, |stopped| stopped.min(planned))
    }

    /// Ends the run if it is over or has failed.
    fn end(&mut self, now: Instant, begun: Instant) {
        let count = self.plan.count;
        let is_last = |flow: &Flow| count.is_some_and(|count| flow.next >= count);
        let last = self.last_request(begun);
        let is_over = now >= last || self.flows.iter().all(is_last);
        let is_idle = self.flows.iter().all(|flow| flow.next == flow.answered);
        let is_late = now >= last + self.plan.grace || self.signals() > 1;
        let silence = SILENCE_MAX.max(self.plan.grace * 3 / 10);
        let is_silent = self.tally.answered == 0 && now.since(begun) >= silence;
        let has_failed = self.tally.failed.is_some() || is_silent;
        if has_failed || is_over && (is_idle || is_late) {
            self.ended = true;
            self.tally.took = now.since(begun);
        }
    }
}

#[allow(private_interfaces, reason = "`Machine::turn` takes the private `Ends`")]
impl Machine for StressClient {
    fn readable(&mut self, socket: usize) {
        self.readable.insert(socket);
    }

    fn writable(&mut self) {
        self.open.append(&mut self.blocked);
    }

    fn turn(&mut self, now: Instant, ends: &mut dyn Ends) -> bool {
        if self.ended {
            return false;
        }
        let begun = *self.begun.get_or_insert(now);
        self.seen = now;
        if self.stopped.is_none() && self.signals() > 0 {
            self.stopped = Some(now);
        }
        let any = self.receive(now, ends) | self.send(now, begun, ends);
        self.end(now, begun);
        any
    }

    fn deadline(&self) -> Option<Instant> {
        let begun = self.begun?;
        let is_idle = self.flows.iter().all(|flow| flow.next == flow.answered);
        let grace = if is_idle { Duration::ZERO } else { self.plan.grace };
        (!self.ended).then(|| (self.last_request(begun) + grace).min(self.seen + POLL_INTERVAL))
    }

    fn is_blocked(&self) -> bool {
        !self.blocked.is_empty()
    }

    fn is_done(&self) -> bool {
        self.ended
    }
}
