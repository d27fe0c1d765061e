//! A layer that makes a backend read-only.
//!
//! Reads and flushes pass; everything else fails with `ReadOnly`. The geometry reflects that and
//! offers no capability to change data.

use std::sync::Arc;

use rtrs_core::block::{BlockSource, Geometry, Io};
use rtrs_core::prng::Prng;
use rtrs_core::status::IoStatus;

use super::filter::{Filter, Layer, Verdict};

#[derive(Debug)]
struct ReadOnly;

/// Makes a backend read-only.
pub fn read_only(inner: Arc<dyn BlockSource>) -> Layer {
    Layer { inner, filter: Arc::new(ReadOnly) }
}

impl Filter for ReadOnly {
    fn geometry(&self, below: Geometry) -> Geometry {
        Geometry {
            read_only: true,
            discard: false,
            discard_granularity: 0,
            discard_alignment: 0,
            secure_discard: false,
            write_zeroes: false,
            fast_zero: false,
            ..below
        }
    }

    fn decide(&self, io: &Io, geometry: &Geometry, _: &mut Prng) -> Verdict {
        match geometry.check(io) {
            IoStatus::Ok => Verdict::Pass,
            status => Verdict::Fail(status),
        }
    }
}
