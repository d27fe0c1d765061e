//! A backend that fails chosen IOs on purpose, before they touch anything.
//!
//! What fails is a plan: a share of all, every n-th, or a range of the device; several may be
//! set. The share is drawn from a seeded generator per core, so a run can be repeated; the
//! n-th is counted over all cores. An IO that is wrong by itself is not counted: it fails as it
//! would anyway.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rtrs_core::block::{
    BlockDevice, BlockSource, Completion, Core, Geometry, Io, IoOp, SharedErrors,
};
use rtrs_core::mem::Region;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Instant, earliest};

use crate::backend::done::Done;
use crate::backend::target::INFLIGHT_MAX;

/// Which IOs fail, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorPlan {
    /// IOs in a million that fail; 0 for none.
    pub per_million: u32,
    /// Every n-th IO fails; 0 for none.
    pub every: u64,
    /// IOs that touch these bytes fail. Flushes touch none.
    pub range: Range<u64>,
    /// Only these fail; empty for all operations.
    pub ops: Vec<IoOp>,
    /// How they fail.
    pub status: IoStatus,
    /// Seed of the draw.
    pub seed: u64,
}

impl Default for ErrorPlan {
    fn default() -> Self {
        let (ops, status) = (Vec::new(), IoStatus::Io);
        Self { per_million: 0, every: 0, range: 0..0, ops, status, seed: 1 }
    }
}

impl ErrorPlan {
    /// Fails this many IOs in a million with an I/O error.
    pub fn per_million(per_million: u32) -> Self {
        Self { per_million, ..Self::default() }
    }
}

/// Fails chosen IOs of a backend.
#[derive(Debug)]
pub struct ErrorSource {
    inner: Arc<dyn BlockSource>,
    plan: Arc<ErrorPlan>,
    count: Arc<AtomicU64>,
}

impl ErrorSource {
    /// Over a backend, by a plan.
    pub fn new(inner: Arc<dyn BlockSource>, plan: ErrorPlan) -> Self {
        Self { inner, plan: Arc::new(plan), count: Arc::new(AtomicU64::new(0)) }
    }
}

impl BlockSource for ErrorSource {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn shared_errors(&self) -> SharedErrors {
        self.inner.shared_errors()
    }

    fn is_volatile(&self) -> bool {
        self.inner.is_volatile()
    }

    fn open(&self, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        Ok(Box::new(ErrorDevice {
            inner: self.inner.open(core)?,
            plan: Arc::clone(&self.plan),
            count: Arc::clone(&self.count),
            random: self.plan.seed ^ (u64::from(core.index.0) << 48),
            done: Done::new(),
        }))
    }

    fn settle(&self) -> io::Result<()> {
        self.inner.settle()
    }
}

#[derive(Debug)]
struct ErrorDevice {
    inner: Box<dyn BlockDevice>,
    plan: Arc<ErrorPlan>,
    count: Arc<AtomicU64>,
    random: u64,
    done: Done,
}

impl ErrorDevice {
    /// A draw between 0 and 999,999 (SplitMix64).
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % 1_000_000
    }

    /// True for an IO that the plan speaks of.
    fn counts(&self, io: &Io) -> bool {
        (self.plan.ops.is_empty() || self.plan.ops.contains(&io.op))
            && self.inner.geometry().check(io).is_ok()
    }

    fn is_chosen(&mut self, io: &Io) -> bool {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        let drawn = self.plan.per_million > 0 && self.draw() < u64::from(self.plan.per_million);
        let plan = &self.plan;
        let nth = plan.every > 0 && count.is_multiple_of(plan.every);
        let end = io.offset.saturating_add(u64::from(io.len));
        let inside = io.op != IoOp::Flush && io.offset < plan.range.end && plan.range.start < end;
        nth || drawn || inside
    }
}

impl BlockDevice for ErrorDevice {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn attach_region(&mut self, region: &Arc<Region>) -> io::Result<()> {
        self.inner.attach_region(region)
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight() >= INFLIGHT_MAX {
            return Err(io);
        }
        let counted = self.counts(&io);
        if counted && self.is_chosen(&io) {
            self.done.push(io.tag, self.plan.status);
            return Ok(());
        }
        self.inner.submit(io).inspect_err(|_| {
            // It comes again, and is counted then.
            self.count.fetch_sub(u64::from(counted), Ordering::Relaxed);
        })
    }

    fn poll(&mut self, now: Instant) -> bool {
        self.inner.poll(now)
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop().or_else(|| self.inner.reap())
    }

    fn inflight(&self) -> usize {
        self.inner.inflight() + self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        let own = (!self.done.is_empty()).then_some(Instant::ZERO);
        earliest(own, self.inner.deadline())
    }
}
