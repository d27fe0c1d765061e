//! Rate limits of exports, shared by all shards.
//!
//! Each limit is a `Bucket`: one atomic word, which holds the time up to which its rate is used up.
//! Starting a request advances that time in each bucket that applies, by the cost of one request or
//! of its bytes. A request may start once that time is at most `burst` ahead of now. So an idle
//! export saves up no more than `burst`, and a request that costs more still starts but delays the
//! next requests. Delayed requests wait in their shards' queues (`delayed.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rtrs_core::block::IoOp;
use rtrs_core::time::Instant;

use crate::rate_limits::RateLimits;

const SECOND_NS: u64 = 1_000_000_000;

/// Maximum number of bytes charged for a discard or write zeroes, which may be much longer than a
/// chunk: other requests must not have to wait for minutes behind it.
const UNSENT_MAX: u32 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// Cost of a request against the limits: one request and its bytes, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Charge {
    pub(super) direction: Direction,
    bytes: u32,
}

impl Charge {
    /// Charge for an IO; None for operations that are never limited.
    pub(super) fn of(op: IoOp, len: u32) -> Option<Self> {
        let (direction, bytes) = match op {
            IoOp::Read => (Direction::Read, len),
            IoOp::Write => (Direction::Write, len),
            IoOp::Discard | IoOp::WriteZeroes => (Direction::Write, len.min(UNSENT_MAX)),
            IoOp::Flush | IoOp::Extents => return None,
        };
        Some(Self { direction, bytes })
    }
}

#[derive(Debug)]
struct Bucket {
    /// Units per second, at least 1.
    rate: u64,
    /// Time up to which the rate is used up, in nanoseconds.
    used_until: AtomicU64,
}

impl Bucket {
    fn new(rate: u64) -> Self {
        Self { rate: rate.max(1), used_until: AtomicU64::new(0) }
    }

    /// Time that `units` take at this rate, in nanoseconds, rounded to nearest.
    const fn cost(&self, units: u32) -> u64 {
        (units as u64 * SECOND_NS + self.rate / 2) / self.rate
    }

    /// Takes `units` at `now`. Returns the time up to which the rate had been used up before.
    fn take(&self, units: u32, now: u64) -> u64 {
        let cost = self.cost(units);
        let mut before = self.used_until.load(Ordering::Relaxed);
        loop {
            let after = before.max(now).saturating_add(cost);
            let swapped = self.used_until.compare_exchange_weak(
                before,
                after,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match swapped {
                Ok(_) => return before,
                Err(other) => before = other,
            }
        }
    }

    /// Returns to the bucket `units` that were taken but not used.
    fn give_back(&self, units: u32) {
        self.used_until.fetch_sub(self.cost(units), Ordering::Relaxed);
    }
}

/// Buckets that count one unit, requests or bytes: for all IO, for reads and for writes.
#[derive(Debug)]
struct Buckets {
    all: Option<Bucket>,
    reads: Option<Bucket>,
    writes: Option<Bucket>,
}

impl Buckets {
    fn new(all: Option<u64>, reads: Option<u64>, writes: Option<u64>) -> Self {
        let [all, reads, writes] = [all, reads, writes].map(|rate| rate.map(Bucket::new));
        Self { all, reads, writes }
    }

    /// Buckets that apply to IO in a direction.
    fn of(&self, direction: Direction) -> impl Iterator<Item = &Bucket> {
        let own = match direction {
            Direction::Read => &self.reads,
            Direction::Write => &self.writes,
        };
        self.all.iter().chain(own)
    }
}

/// Buckets for all limits on an export. Changed limits get new buckets, which are full.
#[derive(Debug)]
pub(super) struct Budget {
    limits: RateLimits,
    requests: Buckets,
    bytes: Buckets,
}

impl Budget {
    fn new(limits: RateLimits) -> Self {
        let RateLimits { iops, iops_read, iops_write, .. } = limits;
        let RateLimits { bandwidth, bandwidth_read, bandwidth_write, .. } = limits;
        Self {
            limits,
            requests: Buckets::new(iops, iops_read, iops_write),
            bytes: Buckets::new(bandwidth, bandwidth_read, bandwidth_write),
        }
    }

    fn buckets(&self, charge: Charge) -> impl Iterator<Item = (&Bucket, u32)> {
        let Charge { direction, bytes } = charge;
        let requests = self.requests.of(direction).map(|bucket| (bucket, 1));
        requests.chain(self.bytes.of(direction).map(move |bucket| (bucket, bytes)))
    }

    /// Charges a request to its buckets. Returns the earliest time at which the request may start.
    pub(super) fn take(&self, charge: Charge, now: Instant) -> Instant {
        let now = now.as_nanos();
        let taken = self.buckets(charge).map(|(bucket, units)| bucket.take(units, now));
        let burst = self.limits.burst_ms.saturating_mul(1_000_000);
        Instant::from_nanos(taken.max().unwrap_or(0).saturating_sub(burst))
    }

    /// Refunds the charge for a request that will not start.
    pub(super) fn give_back(&self, charge: Charge) {
        self.buckets(charge).for_each(|(bucket, units)| bucket.give_back(units));
    }
}

/// Rate limits on an export.
#[derive(Debug, Default)]
pub struct Throttle(Mutex<Option<Arc<Budget>>>);

impl Throttle {
    /// Creates the limits on an export.
    pub fn new(limits: RateLimits) -> Self {
        let throttle = Self::default();
        throttle.set(limits);
        throttle
    }

    /// Changes the limits. Shards that have the export open apply them on
    /// [`ShardMessage::Limits`](crate::engine::message::ShardMessage::Limits).
    pub fn set(&self, limits: RateLimits) {
        let budget = (!limits.is_unlimited()).then(|| Arc::new(Budget::new(limits)));
        *self.0.lock() = budget;
    }

    /// Returns the limits; None if the export has none.
    pub fn limits(&self) -> Option<RateLimits> {
        self.0.lock().as_ref().map(|budget| budget.limits)
    }

    /// Returns the buckets for the limits; None if the export has none.
    pub(super) fn budget(&self) -> Option<Arc<Budget>> {
        self.0.lock().clone()
    }
}
