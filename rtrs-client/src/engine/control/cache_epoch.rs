//! Which epoch of the server's cache the paths have met with a volume, and which is kept for the
//! next process.

use std::sync::Arc;

use rtrs_core::time::{Duration, Instant};

use crate::engine::cache_epoch::CacheWatch;
use crate::engine::device_table::OpenDevice;
use crate::engine::session::SessionConfig;

/// How long after a flush failed for a loss this counts as reported: the answer may still be on its
/// way to the user.
const REPORTED_AFTER: Duration = Duration::from_secs(2);

/// The epoch of the server's cache, for a volume.
#[derive(Debug)]
pub(super) struct CacheEpoch {
    shards: u16,
    /// How long, from the first open on, requests may come again that an earlier process had taken.
    resent_for: Duration,
    /// In which epoch that one may have left writes that were not flushed.
    inherited: Option<u64>,
    /// None until a path has opened the device.
    watch: Option<Arc<CacheWatch>>,
    /// Which is kept for the next process.
    kept: Option<u64>,
    /// Since when another one is to be kept.
    since: Option<Instant>,
}

impl CacheEpoch {
    pub(super) fn new(config: &SessionConfig, inherited: Option<u64>) -> Self {
        let SessionConfig { shards, resent_for, .. } = *config;
        Self { shards, resent_for, inherited, watch: None, kept: None, since: None }
    }

    /// A path opened the device: which epoch the server's cache is in. Comes before the path
    /// carries IO. Some, the first time: who is to be notified of writes and flushes.
    pub(super) fn meet(&mut self, now: Instant, device: &OpenDevice) -> Option<Arc<CacheWatch>> {
        let (epoch, volatile) = (device.cache_id, device.volatile);
        if let Some(watch) = &self.watch {
            if epoch != 0 {
                report(watch.meet(epoch, volatile), volatile);
            }
            return None;
        }
        let before = self.inherited;
        let before = before.filter(|_| !rtrs_core::mutated!(InheritedForgotten));
        let begins = before.filter(|epoch| *epoch != 0).unwrap_or(epoch);
        let mut watch = CacheWatch::new(self.shards, begins, volatile);
        if before.is_some() && epoch != 0 {
            watch.inherit(now + self.resent_for);
            report(watch.meet(epoch, volatile), volatile);
        } else {
            // Before anything is written: the process may die before `keep` comes.
            self.kept = watch.settled_epoch();
        }
        let watch = self.watch.insert(Arc::new(watch));
        Some(Arc::clone(watch))
    }

    /// A path that connects found this device, which may be smaller than it was. (A path that is
    /// connected hears of that by the server's epoch.)
    pub(super) fn compare(&self, last: Option<&OpenDevice>, device: &OpenDevice) {
        let shrank = last.is_some_and(|last| device.geometry.size < last.geometry.size);
        let watch = self.watch.as_ref().filter(|_| shrank);
        let lost = watch.map_or(0, |watch| watch.cut());
        if lost > 0 {
            tracing::error!(
                "the device was made smaller and may have lost {lost} writes that were not \
                 flushed: flushes fail until one has reported it"
            );
        }
    }

    /// Notes the epoch in which this process may leave writes that were not flushed.
    pub(super) fn keep(&mut self, now: Instant) {
        let Some(watch) = &self.watch else { return };
        let settled = watch.settled_epoch().filter(|epoch| self.kept != Some(*epoch));
        let settled = settled.filter(|_| !watch.is_resending(now));
        match (settled, self.since) {
            (None, _) => self.since = None,
            // Nothing was written in any other.
            (Some(epoch), _) if self.kept.is_none() && self.inherited.is_none() => {
                (self.kept, self.since) = (Some(epoch), None);
            }
            (Some(_), None) => self.since = Some(now),
            (Some(epoch), Some(since)) if now.since(since) >= REPORTED_AFTER => {
                (self.kept, self.since) = (Some(epoch), None);
            }
            _ => {}
        }
    }

    /// The epoch, for the process that takes over if this one dies; see
    /// [`VolumeConfig::inherited_epoch`](crate::engine::session::VolumeConfig::inherited_epoch).
    pub(super) fn kept(&self) -> Option<u64> {
        self.kept
    }

    /// A path ended; those that are still connected came up in these epochs, at these times. If
    /// none is of the epoch that we met last (its answer was an old one, which came late) the epoch
    /// is that of the paths that are left.
    pub(super) fn review(&self, connected: impl Iterator<Item = (u64, Instant)> + Clone) {
        let Some(watch) = &self.watch else { return };
        let met = connected.filter(|(epoch, _)| *epoch != 0);
        let current = watch.epoch();
        if met.clone().any(|(epoch, _)| epoch == current) {
            return;
        }
        if let Some((epoch, _)) = met.max_by_key(|(_, started)| *started) {
            let volatile = watch.is_volatile();
            report(watch.meet(epoch, volatile), volatile);
        }
    }
}

fn report(lost: u64, volatile: bool) {
    if lost > 0 && volatile {
        tracing::error!(
            "the server has started anew, and its export in memory with it: acknowledged writes \
             are lost ({lost}); flushes fail until one has reported it"
        );
    } else if lost > 0 {
        tracing::error!(
            "the server has started anew and may have lost {lost} writes that were not flushed: \
             flushes fail until one has reported it"
        );
    }
}
