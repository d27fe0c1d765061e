//! Main loop of a shard. Each turn collects completions, lets the shard work and submits once. An
//! idle shard sleeps, and first polls for a while if polling has paid off recently.
//!
//! The poll budget adapts as in KVM's halt polling: a sleep that ended sooner than the largest
//! budget would have been caught by polling, so the budget grows; a longer one makes it shrink. An
//! idle shard therefore costs no CPU. While it polls, a shard yields its CPU to any other thread
//! that wants it, and stops polling once another has run: polling does not cost throughput when
//! CPUs are scarce. With few requests in flight, a turn's submissions are held for one more turn,
//! so that they can be combined with a sleep that may follow: one system call instead of two.

use std::io;
use std::rc::Rc;

use super::clock::Clock;
use super::mailbox::Inbox;
use super::ring::Ring;
use crate::time::{Duration, Instant};

/// State machine that runs on a shard.
pub trait Shard {
    /// Message from other threads.
    type Message;
    /// Does all available work. Returns true if anything happened.
    fn turn(&mut self, now: Instant) -> bool;
    /// Returns the time by which `turn` must be called even if nothing happens.
    fn deadline(&self) -> Option<Instant>;
    /// Returns the number of requests in flight. If there are many, a turn lets other threads on
    /// this CPU run before it submits, so that one system call carries more.
    fn inflight(&self) -> usize {
        0
    }
    /// Whether there is input that neither the ring nor the inbox reports; polling looks for it.
    fn has_input(&self) -> bool {
        false
    }
    /// Prepares a sleep. Input that only `has_input` reports must end the sleep with a ring event.
    /// Returns false if there already is such input.
    fn prepare_sleep(&mut self) -> bool {
        true
    }
    /// Returns true if the shard is finished and the thread may end.
    fn is_done(&self) -> bool;
    /// Returns the shard's inbox, if there is one; its messages end a sleep.
    fn inbox(&mut self) -> Option<&mut Inbox<Self::Message>>;
}

/// Polling before a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollPolicy {
    /// Maximum polling time; zero disables polling.
    pub budget_max: Duration,
}

/// Statistics of a reactor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ReactorStats {
    /// Number of turns in which anything happened.
    pub turns: u64,
    /// Number of sleeps.
    pub sleeps: u64,
    /// Number of times that polling found work before a sleep.
    pub poll_hits: u64,
    /// Number of times that polling found no work.
    pub poll_misses: u64,
}

/// Number of requests in flight at which throughput begins to matter more than the latency of one
/// request.
const BATCH_FROM: usize = 8;

/// Runs a shard until it is done.
///
/// # Errors
/// Returns the ring's error, which is fatal for the shard.
pub fn run(
    ring: &Rc<Ring>,
    policy: PollPolicy,
    shard: &mut impl Shard,
) -> io::Result<ReactorStats> {
    let clock = Clock;
    let mut stats = ReactorStats::default();
    let mut budget = Duration::ZERO;
    // Submissions of the last turn are held, to be combined with the sleep that may follow.
    let mut held = false;
    loop {
        let mut busy = if held { ring.collect() } else { ring.turn()? };
        // Read the time after the system call, which also submits, so that the time applies to the
        // collected completions.
        let now = clock.now();
        busy |= shard.turn(now);
        if shard.is_done() {
            ring.turn()?;
            return Ok(stats);
        }
        if busy {
            stats.turns += 1;
            let few = shard.inflight() < BATCH_FROM;
            if !few {
                std::thread::yield_now();
            }
            // Hold only once: work that has since arrived must not delay the submissions further.
            held = few && !held && budget.is_zero() && !ring.has_backlog();
            continue;
        }
        let ready = held && !ring.has_backlog();
        held = false;
        if ring.has_work() || (ring.has_submissions() && !ready) {
            continue;
        }
        let deadline = shard.deadline();
        if deadline.is_some_and(|at| at <= now) {
            continue;
        }
        if !budget.is_zero() {
            let end = deadline.map_or(now + budget, |at| at.min(now + budget));
            if poll(ring, shard, clock, end) {
                stats.poll_hits += 1;
                continue;
            }
            stats.poll_misses += 1;
            if deadline.is_some_and(|at| at <= clock.now()) {
                continue;
            }
        }
        if shard.inbox().is_some_and(|inbox| !inbox.prepare_sleep()) {
            continue;
        }
        if !shard.prepare_sleep() {
            if let Some(inbox) = shard.inbox() {
                inbox.awake();
            }
            continue;
        }
        stats.sleeps += 1;
        ring.turn_or_sleep(deadline.map(|at| at.since(now)))?;
        if let Some(inbox) = shard.inbox() {
            inbox.awake();
        }
        budget = adapt(budget, policy.budget_max, clock.now().since(now));
    }
}

/// A yield that takes longer than this gave the CPU to another thread.
const SHARED: Duration = Duration::from_micros(3);

/// Polls until `end`. Returns true if there is work. Gives up early on a CPU that other threads
/// want too: a thread that sleeps is placed on an idle CPU when it wakes, while a thread that
/// yields stays where it is.
fn poll(ring: &Ring, shard: &mut impl Shard, clock: Clock, end: Instant) -> bool {
    let mut has_work = || {
        ring.has_work() || shard.has_input() || shard.inbox().is_some_and(|inbox| !inbox.is_empty())
    };
    let mut before = clock.now();
    loop {
        for _ in 0..16 {
            if has_work() {
                return true;
            }
            std::hint::spin_loop();
        }
        std::thread::yield_now();
        let now = clock.now();
        if now >= end || now.since(before) >= SHARED {
            return has_work();
        }
        before = now;
    }
}

/// Returns the next polling budget after an idle time of `idle`, including polling.
fn adapt(budget: Duration, max: Duration, idle: Duration) -> Duration {
    const START: Duration = Duration::from_micros(10);
    if max.is_zero() {
        return Duration::ZERO;
    }
    if idle <= max {
        (budget * 2).clamp(START.min(max), max)
    } else if budget <= START {
        Duration::ZERO
    } else {
        budget / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_poll_budget_grows_after_short_idle_times_and_drops_to_zero_after_long_ones() {
        let max = Duration::from_micros(80);
        let mut budget = Duration::ZERO;
        for _ in 0..10 {
            budget = adapt(budget, max, Duration::from_micros(20));
        }
        assert_eq!(budget, max);
        for _ in 0..10 {
            budget = adapt(budget, max, Duration::from_millis(5));
        }
        assert_eq!(budget, Duration::ZERO);
        assert_eq!(adapt(budget, Duration::ZERO, Duration::ZERO), Duration::ZERO);
    }
}
