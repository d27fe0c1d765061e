//! A layer that deliberately fails selected IOs before they change anything.
//!
//! A plan selects the IOs: a random share, every n-th, or those in a range of the device; the three
//! can be combined. The share is drawn from a seeded generator per shard, so runs can be repeated;
//! every n-th is counted across all shards. Invalid IOs are not counted, since they fail anyway.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rtrs_core::block::{BlockSource, Geometry, Io, IoOp};
use rtrs_core::prng::Prng;
use rtrs_core::status::IoStatus;

use super::filter::{Filter, Layer, Verdict};

/// Selects the IOs that fail, and their status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorPlan {
    /// Number of IOs in a million that fail; 0 for none.
    pub per_million: u32,
    /// Every n-th IO fails; 0 for none.
    pub every: u64,
    /// Byte range in which IOs fail; flushes are outside any range.
    pub range: Range<u64>,
    /// Operations that can fail; empty for all.
    pub ops: Vec<IoOp>,
    /// Status of the failed IOs.
    pub status: IoStatus,
    /// Seed of the random generator.
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

#[derive(Debug)]
struct Errors {
    plan: ErrorPlan,
    /// Number of valid IOs with one of the plan's operations, across all shards.
    count: AtomicU64,
}

/// Adds a layer that fails selected IOs to a backend.
pub fn errors(inner: Arc<dyn BlockSource>, plan: ErrorPlan) -> Layer {
    Layer { inner, filter: Arc::new(Errors { plan, count: AtomicU64::new(0) }) }
}

impl Errors {
    /// Whether the plan applies to an IO.
    fn counts(&self, io: &Io, geometry: &Geometry) -> bool {
        let named = self.plan.ops.is_empty() || self.plan.ops.contains(&io.op);
        named && geometry.check(io).is_ok()
    }
}

impl Filter for Errors {
    fn seed(&self) -> u64 {
        self.plan.seed
    }

    fn decide(&self, io: &Io, geometry: &Geometry, random: &mut Prng) -> Verdict {
        let plan = &self.plan;
        if !self.counts(io, geometry) {
            return Verdict::Pass;
        }
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        let drawn = plan.per_million > 0 && random.below(1_000_000) < plan.per_million.into();
        let nth = plan.every > 0 && count.is_multiple_of(plan.every);
        let end = io.offset.saturating_add(u64::from(io.len));
        let inside = io.op != IoOp::Flush && io.offset < plan.range.end && plan.range.start < end;
        if nth || drawn || inside { Verdict::Fail(plan.status) } else { Verdict::Pass }
    }

    fn undo(&self, io: &Io, geometry: &Geometry) {
        self.count.fetch_sub(u64::from(self.counts(io, geometry)), Ordering::Relaxed);
    }
}
