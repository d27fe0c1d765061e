//! A volume's cache epoch, as reported over its paths, and the epoch saved for the next process.

use std::sync::Arc;

use rtrs_core::identity::{Comparison, ExportId};
use rtrs_core::time::{Duration, Instant};

use crate::engine::cache_epoch::{CacheWatch, Outstanding};
use crate::engine::device_table::OpenDevice;
use crate::engine::session::{SessionConfig, VolumeConfig};

/// Delay after a failed flush until its loss is considered reported. Until then, the answer may
/// still be on its way to the user.
const REPORTED_AFTER: Duration = Duration::from_secs(2);

/// Epoch of the server's cache for one volume.
#[derive(Debug)]
pub(super) struct CacheEpoch {
    shards: u16,
    /// Time after the first open during which requests accepted by an earlier process may be
    /// resent.
    resent_for: Duration,
    /// Epoch in which the earlier process may have left unflushed writes.
    inherited: Option<u64>,
    /// Export that the earlier process used, if known.
    inherited_export: Option<ExportId>,
    /// Whether the user may have left unflushed writes on another host.
    promotes: bool,
    /// None until a path has opened the device.
    watch: Option<Arc<CacheWatch>>,
    /// Epoch saved for the next process.
    kept: Option<u64>,
    /// Time at which a different epoch began to wait to be saved.
    since: Option<Instant>,
}

impl CacheEpoch {
    pub(super) fn new(config: &SessionConfig, volume: &VolumeConfig) -> Self {
        let SessionConfig { shards, resent_for, .. } = *config;
        let VolumeConfig { inherited_epoch: inherited, inherited_export, promotes, .. } = *volume;
        let (watch, kept, since) = (None, None, None);
        Self { shards, resent_for, inherited, inherited_export, promotes, watch, kept, since }
    }

    /// Records the server's cache epoch when a path opens the device, before the path carries IO.
    /// The first call returns the watch that shards must notify of writes and flushes.
    pub(super) fn observe(&mut self, now: Instant, device: &OpenDevice) -> Option<Arc<CacheWatch>> {
        let (epoch, volatile) = (device.cache_id, device.volatile);
        if let Some(watch) = &self.watch {
            if epoch != 0 {
                report(watch.observe(epoch, volatile), volatile);
            }
            return None;
        }
        self.drop_of_another(device);
        let inherited = self.inherited.filter(|_| !rtrs_core::mutated!(InheritedForgotten));
        // A guest that moves here relies on a flush for writes of its old host.
        let arrives = self.promotes && !rtrs_core::mutated!(ArrivalForgotten);
        let before = inherited.or_else(|| arrives.then_some(epoch));
        let begins = before.filter(|epoch| *epoch != 0).unwrap_or(epoch);
        let mut watch = CacheWatch::new(self.shards, begins, volatile);
        if before.is_some() && epoch != 0 {
            // A monitor transfers no requests in flight to another host.
            let resent_for = inherited.map_or(Duration::ZERO, |_| self.resent_for);
            watch.inherit(now + resent_for);
            report(watch.observe(epoch, volatile), volatile);
        }
        if inherited.is_none() {
            // Saved before anything is written, because the process may die before `keep` runs.
            self.kept = watch.settled_epoch();
        }
        let watch = self.watch.insert(Arc::new(watch));
        Some(Arc::clone(watch))
    }

    /// Drops the epoch of an earlier process that used a different export. A restarted server's
    /// memory also has a new ID, and its content is lost.
    fn drop_of_another(&mut self, device: &OpenDevice) {
        let exports = self.inherited_export.zip(device.export_id);
        let differs = exports.is_some_and(|(a, b)| a.compare(b) == Comparison::Different);
        if differs && !device.volatile && self.inherited.take().is_some() {
            tracing::info!("an earlier process of this name used another export");
        }
    }

    /// Compares the device found by a connecting path with the last one, and records a loss if the
    /// device shrank. (A connected path learns of this from the server's epoch.)
    pub(super) fn compare(&self, last: Option<&OpenDevice>, device: &OpenDevice) {
        let shrank = last.is_some_and(|last| device.geometry.size < last.geometry.size);
        let watch = self.watch.as_ref().filter(|_| shrank);
        let lost = watch.map_or(0, |watch| watch.cut());
        if lost > 0 {
            tracing::error!(
                "the device was made smaller and may have lost {lost} unflushed writes; flushes \
                 fail until one has reported the loss"
            );
        }
    }

    /// Saves the epoch in which this process may leave unflushed writes.
    pub(super) fn keep(&mut self, now: Instant) {
        let Some(watch) = &self.watch else { return };
        let settled = watch.settled_epoch().filter(|epoch| self.kept != Some(*epoch));
        let settled = settled.filter(|_| !watch.is_resending(now));
        match (settled, self.since) {
            (None, _) => self.since = None,
            // No other epoch has seen writes.
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

    /// Epoch saved for the process that takes over if this one dies; see
    /// [`VolumeConfig::inherited_epoch`](crate::engine::session::VolumeConfig::inherited_epoch).
    pub(super) fn kept(&self) -> Option<u64> {
        self.kept
    }

    /// Acknowledged writes that the users could lose without noticing if this process ended now and
    /// its saved epoch were removed.
    pub(super) fn outstanding(&self) -> Outstanding {
        let Some(watch) = &self.watch else { return Outstanding::Nothing };
        match watch.outstanding(self.inherited.is_some()) {
            Outstanding::Nothing if self.kept != watch.settled_epoch() => Outstanding::Reported,
            outstanding => outstanding,
        }
    }

    /// Reviews the epoch after a path has ended. `connected` contains the epoch and start time of
    /// each remaining path. If no path is in the epoch that was last reported (by a late, stale
    /// answer), the epoch of the newest path applies.
    pub(super) fn review(&self, connected: impl Iterator<Item = (u64, Instant)> + Clone) {
        let Some(watch) = &self.watch else { return };
        let known = connected.filter(|(epoch, _)| *epoch != 0);
        let current = watch.epoch();
        if known.clone().any(|(epoch, _)| epoch == current) {
            return;
        }
        if let Some((epoch, _)) = known.max_by_key(|(_, started)| *started) {
            let volatile = watch.is_volatile();
            report(watch.observe(epoch, volatile), volatile);
        }
    }
}

fn report(lost: u64, volatile: bool) {
    if lost > 0 && volatile {
        tracing::error!(
            "the server was restarted, and its export was in memory: at least {lost} acknowledged \
             writes are lost; flushes fail until one has reported the loss"
        );
    } else if lost > 0 {
        tracing::error!(
            "the server was restarted and may have lost {lost} unflushed writes; flushes fail \
             until one has reported the loss"
        );
    }
}
