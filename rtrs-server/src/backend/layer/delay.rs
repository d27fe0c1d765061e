//! A layer that delays every IO by a fixed time.
//!
//! IOs start in order of arrival; no thread sleeps.

use std::sync::Arc;

use rtrs_core::block::{BlockSource, Geometry, Io};
use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant};

use super::filter::{Filter, Layer, Verdict};

#[derive(Debug)]
struct Delay(Duration);

/// Delays every IO of a backend.
pub fn delay(inner: Arc<dyn BlockSource>, delay: Duration) -> Layer {
    Layer { inner, filter: Arc::new(Delay(delay)) }
}

impl Filter for Delay {
    fn decide(&self, _: &Io, _: &Geometry, _: &mut Prng) -> Verdict {
        Verdict::Hold
    }

    fn may_continue(&self, since: Instant, now: Instant) -> bool {
        since + self.0 <= now
    }

    fn next_check(&self, since: Instant, _: Instant) -> Instant {
        since + self.0
    }
}
