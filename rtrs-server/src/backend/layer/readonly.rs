//! A backend that nothing can change, whatever is below.
//!
//! Reads and flushes pass; everything else ends with `ReadOnly` here. The geometry says so and
//! takes back every ability to change.

use std::io;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, BlockSource, Completion, Core, Geometry, Io, SharedErrors};
use rtrs_core::mem::Region;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Instant, earliest};

use crate::backend::done::Done;
use crate::backend::target::INFLIGHT_MAX;

/// Makes a backend read-only.
#[derive(Debug)]
pub struct ReadOnlySource {
    inner: Arc<dyn BlockSource>,
}

impl ReadOnlySource {
    /// Over a backend.
    pub fn new(inner: Arc<dyn BlockSource>) -> Self {
        Self { inner }
    }
}

impl BlockSource for ReadOnlySource {
    fn geometry(&self) -> Geometry {
        Geometry {
            read_only: true,
            discard: false,
            discard_granularity: 0,
            discard_alignment: 0,
            secure_discard: false,
            write_zeroes: false,
            fast_zero: false,
            ..self.inner.geometry()
        }
    }

    fn shared_errors(&self) -> SharedErrors {
        self.inner.shared_errors()
    }

    fn is_volatile(&self) -> bool {
        self.inner.is_volatile()
    }

    fn open(&self, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        let inner = self.inner.open(core)?;
        Ok(Box::new(ReadOnlyDevice { geometry: self.geometry(), inner, done: Done::new() }))
    }
}

#[derive(Debug)]
struct ReadOnlyDevice {
    geometry: Geometry,
    inner: Box<dyn BlockDevice>,
    done: Done,
}

impl BlockDevice for ReadOnlyDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn attach_region(&mut self, region: &Arc<Region>) -> io::Result<()> {
        self.inner.attach_region(region)
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight() >= INFLIGHT_MAX {
            return Err(io);
        }
        let status = self.geometry.check(&io);
        if status == IoStatus::Ok {
            return self.inner.submit(io);
        }
        self.done.push(io.tag, status);
        Ok(())
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
