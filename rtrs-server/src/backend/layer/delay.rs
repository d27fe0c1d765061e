//! A backend that waits a fixed time before it runs an IO.
//!
//! IOs wait in a queue in the order they came, so they still start in that order; no thread
//! sleeps. The wait begins with the first `poll` after `submit`, as `submit` knows no time.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, BlockSource, Completion, Core, Geometry, Io, SharedErrors};
use rtrs_core::mem::Region;
use rtrs_core::time::{Duration, Instant, earliest};

use crate::backend::target::INFLIGHT_MAX;

/// Delays every IO of a backend.
#[derive(Debug)]
pub struct DelaySource {
    inner: Arc<dyn BlockSource>,
    delay: Duration,
}

impl DelaySource {
    /// Over a backend; every IO waits `delay` first.
    pub fn new(inner: Arc<dyn BlockSource>, delay: Duration) -> Self {
        Self { inner, delay }
    }
}

impl BlockSource for DelaySource {
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
        Ok(Box::new(DelayDevice {
            inner: self.inner.open(core)?,
            delay: self.delay,
            fresh: VecDeque::with_capacity(INFLIGHT_MAX),
            waiting: VecDeque::with_capacity(INFLIGHT_MAX),
            blocked: false,
        }))
    }

    fn settle(&self) -> io::Result<()> {
        self.inner.settle()
    }
}

#[derive(Debug)]
struct DelayDevice {
    inner: Box<dyn BlockDevice>,
    delay: Duration,
    /// Taken since the last poll.
    fresh: VecDeque<Io>,
    /// With the time at which they run.
    waiting: VecDeque<(Instant, Io)>,
    /// The backend gave the first one back: only its next completion helps.
    blocked: bool,
}

impl BlockDevice for DelayDevice {
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
        self.fresh.push_back(io);
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        while let Some(io) = self.fresh.pop_front() {
            self.waiting.push_back((now + self.delay, io));
        }
        let mut any = false;
        self.blocked = false;
        while self.waiting.front().is_some_and(|(at, _)| *at <= now) {
            let Some((at, io)) = self.waiting.pop_front() else { break };
            if let Err(io) = self.inner.submit(io) {
                self.waiting.push_front((at, io));
                self.blocked = true;
                break;
            }
            any = true;
        }
        self.inner.poll(now) || any
    }

    fn reap(&mut self) -> Option<Completion> {
        self.inner.reap()
    }

    fn inflight(&self) -> usize {
        self.fresh.len() + self.waiting.len() + self.inner.inflight()
    }

    fn deadline(&self) -> Option<Instant> {
        let own = if !self.fresh.is_empty() {
            Some(Instant::ZERO)
        } else if self.blocked {
            None
        } else {
            self.waiting.front().map(|(at, _)| *at)
        };
        earliest(own, self.inner.deadline())
    }
}
