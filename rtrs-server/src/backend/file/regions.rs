//! Memory regions that a queue has attached to its ring.

use std::sync::{Arc, Weak};

use rtrs_core::mem::Region;
use rtrs_core::rt::Ring;
use rtrs_core::time::{Duration, Instant};

/// Interval between checks for dropped regions.
const SWEEP: Duration = Duration::from_secs(1);

/// Attached regions of a queue.
#[derive(Default)]
pub(super) struct Regions {
    /// Regions by ID.
    attached: Vec<(u64, Weak<Region>)>,
    sweep_at: Instant,
}

impl Regions {
    /// Attaches a region unless it is already attached.
    pub(super) fn attach(&mut self, ring: &Ring, region: &Arc<Region>) {
        if self.attached.iter().any(|(id, _)| *id == region.id()) {
            return;
        }
        ring.attach_region(region);
        self.attached.push((region.id(), Arc::downgrade(region)));
    }

    /// Detaches dropped regions from time to time, so that their pages are released.
    pub(super) fn poll(&mut self, ring: &Ring, now: Instant) {
        if now >= self.sweep_at {
            self.sweep_at = now + SWEEP;
            self.sweep(ring);
        }
    }

    /// Detaches dropped regions.
    pub(super) fn sweep(&mut self, ring: &Ring) {
        self.attached.retain(|(id, region)| {
            let alive = region.strong_count() > 0;
            if !alive {
                ring.detach_region(*id);
            }
            alive
        });
    }

    pub(super) fn detach_all(&mut self, ring: &Ring) {
        for (id, _) in self.attached.drain(..) {
            ring.detach_region(id);
        }
    }
}
