//! Common implementation of layers. The devices of a [`Layer`] hold delayed and failed IOs; its
//! [`Filter`] decides what happens to each IO.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::sync::Arc;

use rtrs_core::block::{
    BlockDevice, BlockSource, Completion, Core, Geometry, Io, Lost, SharedErrors, TargetName,
    TargetSize,
};
use rtrs_core::gateway::Gateway;
use rtrs_core::identity::ExportId;
use rtrs_core::mem::Region;
use rtrs_core::prng::Prng;
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Instant, earliest};

use crate::backend::immediate::Done;
use crate::backend::target::INFLIGHT_MAX;

/// Decision on an IO.
pub(super) enum Verdict {
    /// Pass the IO to the device below.
    Pass,
    /// Fail the IO here.
    Fail(IoStatus),
    /// Hold the IO until [`Filter::may_continue`] allows it.
    Hold,
}

/// Behavior of a layer.
pub(super) trait Filter: Debug + Send + Sync {
    /// Geometry above the layer.
    fn geometry(&self, below: Geometry) -> Geometry {
        below
    }

    /// Seed for each shard's random numbers.
    fn seed(&self) -> u64 {
        0
    }

    /// Decides what happens to an IO. `geometry` is the layer's.
    fn decide(&self, io: &Io, geometry: &Geometry, random: &mut Prng) -> Verdict;

    /// Undoes a decision after the device below has handed the IO back; the IO is submitted again.
    fn undo(&self, _io: &Io, _geometry: &Geometry) {}

    /// Whether the longest-held IO may continue. If so, the caller releases it.
    fn may_continue(&self, _since: Instant, _now: Instant) -> bool {
        true
    }

    /// Time of the next check of an IO that has been held since `since`.
    fn next_check(&self, since: Instant, _now: Instant) -> Instant {
        since
    }

    /// Handles held IOs that are dropped with their device.
    fn forget(&self, _count: usize) {}
}

/// A backend with a layer on top.
#[derive(Debug)]
pub struct Layer {
    pub(super) inner: Arc<dyn BlockSource>,
    pub(super) filter: Arc<dyn Filter>,
}

impl BlockSource for Layer {
    fn geometry(&self) -> Geometry {
        self.filter.geometry(self.inner.geometry())
    }

    fn identity(&self) -> Option<ExportId> {
        self.inner.identity()
    }

    fn shared_errors(&self) -> SharedErrors {
        self.inner.shared_errors()
    }

    fn is_volatile(&self) -> bool {
        self.inner.is_volatile()
    }

    fn is_exclusive(&self) -> bool {
        self.inner.is_exclusive()
    }

    fn is_sole_writer(&self) -> bool {
        self.inner.is_sole_writer()
    }

    fn open(&self, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        let inner = self.inner.open(core)?;
        Ok(Box::new(LayerDevice {
            geometry: self.filter.geometry(inner.geometry().clone()),
            inner,
            filter: Arc::clone(&self.filter),
            random: Prng::new(self.filter.seed() ^ (u64::from(core.index.0) << 48)),
            done: Done::new(),
            held: VecDeque::with_capacity(INFLIGHT_MAX),
            released: VecDeque::with_capacity(INFLIGHT_MAX),
            now: Instant::ZERO,
        }))
    }

    fn settle(&self) -> io::Result<()> {
        self.inner.settle()
    }

    fn target_size(&self) -> io::Result<TargetSize> {
        self.inner.target_size()
    }

    fn is_cut(&self) -> bool {
        self.inner.is_cut()
    }

    fn target_name(&self) -> Option<TargetName> {
        self.inner.target_name()
    }

    fn is_deleted(&self) -> bool {
        self.inner.is_deleted()
    }

    fn examine_name(&self) -> u64 {
        self.inner.examine_name()
    }

    fn is_examined(&self, number: u64) -> bool {
        self.inner.is_examined(number)
    }

    fn outage(&self) -> Option<String> {
        self.inner.outage()
    }

    fn gateway(&self) -> Option<&dyn Gateway> {
        self.inner.gateway()
    }

    fn resize(&self, size: u64, lost: &Lost<'_>) -> io::Result<()> {
        self.inner.resize(size, lost)
    }
}

#[derive(Debug)]
struct LayerDevice {
    geometry: Geometry,
    inner: Box<dyn BlockDevice>,
    filter: Arc<dyn Filter>,
    random: Prng,
    done: Done,
    /// Held IOs, with the time of their first poll, because `submit` does not know the time.
    held: VecDeque<(Option<Instant>, Io)>,
    /// Released IOs that are waiting because the backend was full.
    released: VecDeque<Io>,
    now: Instant,
}

impl BlockDevice for LayerDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn refresh(&mut self) {
        self.inner.refresh();
        self.geometry.size = self.inner.geometry().size;
    }

    fn attach_region(&mut self, region: &Arc<Region>) -> io::Result<()> {
        self.inner.attach_region(region)
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight() >= INFLIGHT_MAX {
            return Err(io);
        }
        match self.filter.decide(&io, &self.geometry, &mut self.random) {
            Verdict::Pass => {
                let Self { inner, filter, geometry, .. } = self;
                return inner.submit(io).inspect_err(|io| filter.undo(io, geometry));
            }
            Verdict::Fail(status) => self.done.push(io.tag, status),
            Verdict::Hold => self.held.push_back((None, io)),
        }
        Ok(())
    }

    fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        for (since, _) in self.held.iter_mut().rev().take_while(|(since, _)| since.is_none()) {
            *since = Some(now);
        }
        while let Some((since, _)) = self.held.front()
            && self.filter.may_continue(since.unwrap_or(now), now)
        {
            self.released.extend(self.held.pop_front().map(|(_, io)| io));
        }
        let mut any = false;
        while let Some(io) = self.released.pop_front() {
            if let Err(io) = self.inner.submit(io) {
                self.released.push_front(io);
                break;
            }
            any = true;
        }
        self.inner.poll(now) || any
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop().or_else(|| self.inner.reap())
    }

    fn inflight(&self) -> usize {
        self.inner.inflight() + self.done.len() + self.held.len() + self.released.len()
    }

    fn rests(&self) -> bool {
        self.inflight() == 0 && self.deadline().is_none() && self.inner.rests()
    }

    fn deadline(&self) -> Option<Instant> {
        // Released IOs wait for a completion from the backend.
        let held = self.held.front().map(|(since, _)| match since {
            Some(since) => self.filter.next_check(*since, self.now),
            None => Instant::ZERO,
        });
        let fresh = self.held.back().filter(|(since, _)| since.is_none()).map(|_| Instant::ZERO);
        let own = earliest(self.done.deadline(), earliest(held, fresh));
        earliest(own, self.inner.deadline())
    }
}

impl Drop for LayerDevice {
    fn drop(&mut self) {
        self.filter.forget(self.held.len());
    }
}
