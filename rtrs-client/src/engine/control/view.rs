//! Read access to a session's state, for listings and decisions outside the engine.

use rtrs_core::identity::Identity;
use rtrs_core::time::Instant;

use super::bounds::Bounds;
use super::failure::SessionFailure;
use super::identity::PinnedServer;
use super::path::Path;
use super::paths::Paths;
use super::status::{PathProgress, PathStatus, VolumeStatus};
use super::volume::Volume;
use super::volumes::Volumes;
use crate::engine::cache_epoch::Outstanding;
use crate::engine::device_set::DeviceIndex;
use crate::engine::path_end::PathEnd;
use crate::engine::session::SessionConfig;
use crate::path::state::PathState;

/// State of a session on its control shard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionView<'a> {
    pub(super) config: &'a SessionConfig,
    pub(super) paths: &'a Paths,
    pub(super) volumes: &'a Volumes,
    pub(super) bounds: &'a Bounds,
    pub(super) server: &'a PinnedServer,
    pub(super) detaching: bool,
}

impl<'a> SessionView<'a> {
    /// Current configuration.
    pub(crate) fn config(self) -> &'a SessionConfig {
        self.config
    }

    /// Whether a volume is open on the server.
    pub(crate) fn is_open(self, volume: DeviceIndex) -> bool {
        self.volumes.get(volume).is_some_and(Volume::is_open)
    }

    /// Whether a detach has finished.
    pub(crate) fn is_done(self) -> bool {
        self.detaching && self.paths.iter().all(|path| path.state() == PathState::Gone)
    }

    /// Whether the session has a volume for this export, or is closing one.
    pub(crate) fn has_volume(self, export: &str) -> bool {
        self.volumes.iter().any(|volume| volume.export() == export)
    }

    /// The volume's failure, if any.
    pub(crate) fn volume_failure(self, volume: DeviceIndex) -> Option<&'a SessionFailure> {
        self.bounds.failure().or_else(|| self.volumes.get(volume)?.failure())
    }

    /// The identity to which a volume is pinned, if any.
    pub(crate) fn pinned_identity(self, volume: DeviceIndex) -> Option<Identity> {
        let identity = self.volumes.identity(volume, self.server);
        Some(identity).filter(|identity| !identity.is_unknown())
    }

    /// Whether the content of a volume's export is lost when the server process exits.
    pub(crate) fn is_memory(self, volume: DeviceIndex) -> bool {
        self.volumes.get(volume).is_some_and(Volume::is_memory)
    }

    /// The server's cache epoch, saved for the process that takes over if this process dies.
    pub(crate) fn saved_epoch(self, volume: DeviceIndex) -> Option<u64> {
        self.volumes.get(volume)?.cache.kept()
    }

    /// Acknowledged writes to a volume that await a flush or a report of their loss.
    pub(crate) fn outstanding(self, volume: DeviceIndex) -> Option<Outstanding> {
        Some(self.volumes.get(volume)?.outstanding())
    }

    /// All volumes, for listings.
    pub(crate) fn volumes(self, now: Instant) -> Vec<VolumeStatus> {
        let status = |volume: &Volume| {
            let failed = self.volume_failure(volume.index()).is_some();
            VolumeStatus {
                device: volume.index(),
                export: volume.export().to_owned(),
                used: volume.is_used(),
                // An open sent before the volume failed may still be answered.
                open: volume.is_open() && !failed,
                failed,
                obstacle: self.bounds.obstacle().or_else(|| volume.obstacle()).cloned(),
                held_by: volume.promotion.refusal(),
                no_path: volume.no_path.wait(now),
                identity: self.pinned_identity(volume.index()),
                memory: volume.is_memory(),
                refusals: self.refusals(volume.index()),
            }
        };
        self.volumes.iter().map(status).collect()
    }

    /// Reasons why paths do not serve a volume, by path name.
    fn refusals(self, volume: DeviceIndex) -> Vec<(String, PathEnd)> {
        let refusal = |path: &Path| {
            Some((path.channel.name().to_owned(), path.volumes.terms.refusal(volume)?.clone()))
        };
        self.paths.listed().filter_map(refusal).collect()
    }

    /// All paths, for listings.
    pub(crate) fn paths(self) -> Vec<PathStatus> {
        self.paths.listed().map(PathStatus::from).collect()
    }

    /// Progress of all listed paths on which an attach depends.
    pub(crate) fn progress(self) -> impl Iterator<Item = PathProgress> + 'a {
        self.paths.listed().map(PathProgress::from)
    }

    /// Names of all paths by slot, including removed ones.
    pub(crate) fn path_names(self) -> Vec<String> {
        self.paths.iter().map(|path| path.channel.name().to_owned()).collect()
    }
}
