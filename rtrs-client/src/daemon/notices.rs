//! Notifications from shard 0 to the process.

use rtrs_core::block::Geometry;
use rtrs_core::ids::CoreIndex;
use rtrs_core::time::{Duration, Instant};

use super::endings::LeftToUsers;
use super::saved::UsedExport;
use crate::engine::{ClientEngine, DeviceIndex, PathProgress, SessionFailure};

/// Notification from shard 0.
#[derive(Debug)]
pub(crate) enum Event {
    /// The device is open.
    Ready(DeviceIndex, Box<Geometry>),
    /// The volume has failed.
    Failed(DeviceIndex, SessionFailure),
    /// The size of the device has changed.
    Resized(DeviceIndex, u64),
    /// The NBD front end of the device could not start.
    FrontFailed(DeviceIndex, std::io::Error),
    /// The kernel has closed this shard's socket for the device.
    KernelGone(DeviceIndex, CoreIndex),
    /// All front ends of the device have stopped.
    FrontStopped {
        device: DeviceIndex,
        /// Number of IOs that had not ended.
        abandoned: usize,
        left: Option<LeftToUsers>,
    },
    /// The session has closed the volume of this export.
    VolumeGone(String),
    /// Paths have connected, failed or been refused a volume since the process began to watch them.
    PathsChanged,
    /// All addresses of this path have failed, so its host should be resolved again.
    Unreached(String),
    /// A shard's thread ended with this error.
    ShardFailed(CoreIndex, String),
    /// Epoch of the server's cache, to be saved for a process that takes over.
    SavedEpoch(DeviceIndex, u64),
    /// Identity of the export, to be saved for a process that takes over.
    Pinned(DeviceIndex, UsedExport),
    /// Everything has ended.
    Done {
        /// Number of IOs that had not ended by their time limit.
        abandoned: usize,
        /// Volumes whose front ends stopped with the session, unless a shard is stuck.
        left: Vec<(DeviceIndex, LeftToUsers)>,
    },
}

/// Minimum time between two checks of several volumes.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// State of a volume, as known to the process.
#[derive(Debug)]
struct Known {
    device: DeviceIndex,
    failed: bool,
    /// Size of the device; None until the front end has the device.
    size: Option<u64>,
    saved_epoch: Option<u64>,
    export: Option<UsedExport>,
}

impl Known {
    /// Appends the changes since the last check.
    fn look(&mut self, engine: &ClientEngine, events: &mut Vec<Event>) {
        let device = self.device;
        if !self.failed
            && let Some(failure) = engine.volume_failure(device)
        {
            self.failed = true;
            events.push(Event::Failed(device, failure.clone()));
        }
        let epoch = engine.saved_epoch(device);
        if self.saved_epoch != epoch {
            self.saved_epoch = epoch;
            events.extend(epoch.map(|epoch| Event::SavedEpoch(device, epoch)));
        }
        if self.size.is_some() {
            let size = engine.size(device);
            if self.size != size {
                self.size = size;
                events.extend(size.map(|size| Event::Resized(device, size)));
            }
        }
        let identity = engine.pinned_identity(device);
        let export =
            identity.map(|identity| UsedExport { identity, memory: engine.is_memory(device) });
        if self.export != export {
            self.export = export;
            events.extend(export.map(|export| Event::Pinned(device, export)));
        }
    }
}

/// States of the volumes, as known to the process.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    volumes: Vec<Known>,
    /// Exports of volumes that are being closed.
    ending: Vec<String>,
    /// Time of the next check of several volumes.
    next_look: Instant,
    /// Whether a check was skipped.
    skipped: bool,
    /// Progress of the paths when the process began to watch them; None once it has changed.
    watched: Option<Vec<PathProgress>>,
}

impl Notices {
    /// Records that a front end has its device, which has this size. Returns the changes.
    pub(crate) fn ready(
        &mut self,
        device: DeviceIndex,
        size: u64,
        engine: &ClientEngine,
    ) -> Vec<Event> {
        let (mut events, known) = (Vec::new(), self.known(device));
        known.look(engine, &mut events);
        known.size = Some(size);
        events
    }

    /// Makes [`Self::changes`] report the end of this volume.
    pub(crate) fn await_end(&mut self, export: Option<String>) {
        self.ending.extend(export);
    }

    /// Makes [`Self::changes`] report, once, when a path next makes progress.
    pub(crate) fn watch_paths(&mut self, engine: &ClientEngine) {
        self.watched = engine.path_progress();
    }

    /// Ends the watch begun by [`Self::watch_paths`].
    pub(crate) fn ignore_paths(&mut self) {
        self.watched = None;
    }

    fn known(&mut self, device: DeviceIndex) -> &mut Known {
        let at = self.volumes.iter().position(|known| known.device == device);
        let at = at.unwrap_or_else(|| {
            let (failed, size, saved_epoch, export) = (false, None, None, None);
            self.volumes.push(Known { device, failed, size, saved_epoch, export });
            self.volumes.len() - 1
        });
        &mut self.volumes[at]
    }

    /// Time by which the next check is due even if nothing happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.skipped.then_some(self.next_look)
    }

    /// Returns the changes to these devices' volumes, and whether a path has made progress.
    pub(crate) fn changes(
        &mut self,
        now: Instant,
        devices: impl Iterator<Item = DeviceIndex> + Clone,
        engine: &ClientEngine,
    ) -> Vec<Event> {
        let mut events = Vec::new();
        if self.watched.as_ref().is_some_and(|known| !engine.is_path_progress(known)) {
            self.watched = None;
            events.push(Event::PathsChanged);
        }
        let many = self.volumes.len() > 1;
        self.skipped = many && self.ending.is_empty() && now < self.next_look;
        if self.skipped {
            return events;
        }
        self.next_look = now + LOOK_EVERY;
        // Drop other states: a reused device number starts without a known state.
        self.volumes.retain(|known| devices.clone().any(|device| device == known.device));
        for device in devices {
            self.known(device).look(engine, &mut events);
        }
        self.ending.retain(|export| {
            let left = engine.has_volume(export);
            if !left {
                events.push(Event::VolumeGone(export.clone()));
            }
            left
        });
        events
    }
}
