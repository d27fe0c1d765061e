//! A shard's queue for an image that moves between servers.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rtrs_core::block::{BlockDevice, BlockSource, Completion, Core, Geometry, Io};
use rtrs_core::status::IoStatus;
use rtrs_core::time::{Duration, Instant, earliest};

use super::inner::{Inner, State};
use crate::backend::immediate::Done;
use crate::backend::target::INFLIGHT_MAX;

/// Interval between checks of whether held IO may continue.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// One shard's queue for the image.
#[derive(Debug)]
pub(super) struct GatewayDevice {
    inner: Arc<Inner>,
    core: Core,
    geometry: Geometry,
    /// Generation of the image on which `device` was opened.
    generation: u64,
    device: Box<dyn BlockDevice>,
    /// Devices on previously opened images, with IO that has not completed.
    former: Vec<Box<dyn BlockDevice>>,
    /// IO that arrived while the lock was being released.
    held: VecDeque<Io>,
    done: Done,
    now: Instant,
}

impl GatewayDevice {
    pub(super) fn open(inner: &Arc<Inner>, core: &Core) -> io::Result<Self> {
        let (generation, device) = open(inner, core)?;
        Ok(Self {
            inner: Arc::clone(inner),
            core: core.clone(),
            geometry: device.geometry().clone(),
            generation,
            device,
            former: Vec::new(),
            held: VecDeque::with_capacity(INFLIGHT_MAX),
            done: Done::new(),
            now: Instant::ZERO,
        })
    }

    /// Reopens the device if the image was reopened.
    fn follow(&mut self) {
        if self.inner.generation.load(Ordering::SeqCst) == self.generation {
            return;
        }
        match open(&self.inner, &self.core) {
            Ok((generation, device)) => {
                self.generation = generation;
                let former = std::mem::replace(&mut self.device, device);
                if former.inflight() > 0 {
                    self.former.push(former);
                }
            }
            // Submitted IO fails, because the cluster refuses this client.
            Err(error) => tracing::warn!("{}: {error}", self.inner.name),
        }
    }

    /// Begins an IO if this server is active.
    fn begin(&mut self, io: Io) -> Result<(), Io> {
        // Done first, so that a server that has become active again uses the reopened image.
        self.follow();
        match self.inner.state() {
            State::Active => return self.device.submit(io),
            State::Leaving => self.held.push_back(io),
            State::Standby => self.done.push(io.tag, IoStatus::Moved),
        }
        Ok(())
    }
}

fn open(inner: &Inner, core: &Core) -> io::Result<(u64, Box<dyn BlockDevice>)> {
    let image = inner.image.lock();
    let Some(image) = image.as_ref() else {
        return Err(io::Error::other("the image is being closed"));
    };
    // The generation and the image change together.
    Ok((inner.generation.load(Ordering::SeqCst), image.open(core)?))
}

impl BlockDevice for GatewayDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn refresh(&mut self) {
        self.follow();
        self.device.refresh();
        self.geometry.size = self.device.geometry().size;
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight() >= INFLIGHT_MAX {
            return Err(io);
        }
        // The lock is not released until `starting` has dropped to zero.
        self.inner.starting.fetch_add(1, Ordering::SeqCst);
        let begun = self.begin(io);
        self.inner.starting.fetch_sub(1, Ordering::SeqCst);
        begun
    }

    fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        let mut any = self.device.poll(now);
        self.former.iter_mut().for_each(|former| any |= former.poll(now));
        // IO is held again if the lock is being released.
        for _ in 0..self.held.len() {
            let Some(io) = self.held.pop_front() else { break };
            if let Err(io) = self.submit(io) {
                self.held.push_front(io);
                break;
            }
        }
        any || self.done.len() > 0
    }

    fn reap(&mut self) -> Option<Completion> {
        let ended = self.done.pop().or_else(|| self.device.reap());
        if ended.is_some() || self.former.is_empty() {
            return ended;
        }
        let ended = self.former.iter_mut().find_map(|former| former.reap());
        self.former.retain(|former| former.inflight() > 0);
        ended
    }

    fn inflight(&self) -> usize {
        let former: usize = self.former.iter().map(|former| former.inflight()).sum();
        self.device.inflight() + former + self.held.len() + self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        let held = (!self.held.is_empty()).then(|| self.now + POLL_INTERVAL);
        earliest(earliest(held, self.done.deadline()), self.device.deadline())
    }
}
