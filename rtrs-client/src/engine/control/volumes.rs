//! Volumes of a session, by index.
//!
//! A closed volume keeps its index until no shard has IO for it and the server has closed it.
//! Then the index may be reused.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use rtrs_core::identity::{Identity, ServerId};
use rtrs_core::ids::{CoreIndex, PathId};
use rtrs_core::time::Instant;

use super::change::ChangeError;
use super::failure::{ONE_SERVER, SessionFailure};
use super::identity::PinnedServer;
use super::volume::Volume;
use crate::engine::device_set::DeviceIndex;
use crate::engine::session::{NoPath, SessionConfig, VOLUMES_MAX, VolumeConfig};

#[derive(Debug)]
pub(super) struct Volumes {
    config: Arc<SessionConfig>,
    rows: Vec<Option<Volume>>,
}

impl Volumes {
    /// Creates the volumes that a session starts with. Panics if there are none or too many, which
    /// is a bug in this crate.
    pub(super) fn new(now: Instant, config: &Arc<SessionConfig>) -> Self {
        let count = config.volumes.len();
        assert!((1..=VOLUMES_MAX).contains(&count), "a session of {count} volumes");
        let mut volumes = Self { config: Arc::clone(config), rows: Vec::new() };
        let server = first_server(config);
        let patient_until = now + config.open_patience;
        for volume in &config.volumes {
            let contradicts = contradicts(volume, server);
            let at = volumes.place().unwrap_or(DeviceIndex::FIRST);
            let mut volume = Volume::new(at, volume.clone(), config, patient_until);
            if contradicts {
                volume.fail(SessionFailure::Unusable(ONE_SERVER.to_owned()));
            }
            volumes.rows.push(Some(volume));
        }
        volumes
    }

    /// First unused index.
    fn place(&self) -> Option<DeviceIndex> {
        let free = |device: &DeviceIndex| self.get(*device).is_none();
        DeviceIndex::all().find(free)
    }

    /// Adds a volume of this server, if the server is known.
    pub(super) fn add(
        &mut self,
        now: Instant,
        volume: VolumeConfig,
        server: Option<ServerId>,
    ) -> Result<DeviceIndex, ChangeError> {
        if let Some(before) = self.iter().find(|before| before.export() == volume.export) {
            let closing = !before.is_used();
            return Err(ChangeError::VolumeExists { export: volume.export, closing });
        }
        if contradicts(&volume, server) {
            return Err(ChangeError::OtherServer(volume.export));
        }
        let at = self.place().ok_or(ChangeError::TooManyVolumes)?;
        let volume = Some(Volume::new(at, volume, &self.config, now));
        match self.rows.get_mut(at.index()) {
            Some(place) => *place = volume,
            None => self.rows.push(volume),
        }
        Ok(at)
    }

    /// Records that a volume's user claims the device on another shard, or no longer does.
    pub(super) fn claim(&mut self, volume: DeviceIndex, is_made: bool, now: Instant) {
        let Some(Some(volume)) = self.rows.get_mut(volume.index()) else { return };
        match is_made {
            true => volume.promotion.claim(now),
            false => volume.promotion.release(),
        }
    }

    /// Frees the index of a volume that no shard or server uses any longer.
    pub(super) fn remove(&mut self, volume: DeviceIndex) {
        self.rows[volume.index()] = None;
    }

    /// Applies new settings.
    pub(super) fn tune(&mut self, config: &Arc<SessionConfig>) {
        self.config = Arc::clone(config);
        self.set_no_path(config.no_path);
    }

    fn set_no_path(&mut self, policy: NoPath) {
        self.iter_mut().for_each(|volume| volume.no_path.set_policy(policy));
    }

    pub(super) fn get(&self, volume: DeviceIndex) -> Option<&Volume> {
        self.rows.get(volume.index())?.as_ref()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Volume> + Clone {
        self.rows.iter().flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Volume> {
        self.rows.iter_mut().flatten()
    }

    /// Identity that a volume is pinned to, on this server.
    pub(super) fn identity(&self, volume: DeviceIndex, server: &PinnedServer) -> Identity {
        let export = self.get(volume).and_then(|volume| volume.pinned.id());
        Identity { server: server.id(), export }
    }

    /// Indexes of all volumes, including closing ones.
    pub(super) fn ids(&self) -> impl Iterator<Item = DeviceIndex> + use<> {
        self.iter().map(Volume::index).collect::<Vec<_>>().into_iter()
    }

    /// Volumes that have a user.
    pub(super) fn used(&self) -> impl Iterator<Item = &Volume> + Clone {
        self.iter().filter(|volume| volume.is_used())
    }

    /// Used volume of this export.
    pub(super) fn named(&self, export: &str) -> Option<DeviceIndex> {
        self.used().find(|volume| volume.export() == export).map(Volume::index)
    }

    /// Whether any volume was ever open.
    pub(super) fn were_open(&self) -> bool {
        self.iter().any(Volume::was_open)
    }

    /// Failure of the first volume if all used volumes have failed.
    pub(super) fn failure(&self) -> Option<&SessionFailure> {
        let mut used = self.used().map(Volume::failure);
        let first = used.next()??;
        used.all(|failure| failure.is_some()).then_some(first)
    }

    /// Whether a close has yet to be sent or answered. Until then the server may give the number of
    /// that volume to a different one.
    pub(super) fn are_closing(&self) -> bool {
        self.iter().any(Volume::is_closing)
    }

    /// Begins to close a volume that its user has released. Returns its index.
    pub(super) fn settle(&mut self, export: &str) -> Result<DeviceIndex, ChangeError> {
        let at = self.named(export).ok_or_else(|| ChangeError::NoVolume(export.to_owned()))?;
        if self.used().nth(1).is_none() {
            return Err(ChangeError::LastVolume(export.to_owned()));
        }
        let shards = self.config.shards;
        self[at].settle(shards);
        Ok(at)
    }

    /// Records that a shard's IO of a volume that is being closed has ended. Returns whether the
    /// volume must now be closed.
    pub(super) fn settled(&mut self, at: DeviceIndex, shard: CoreIndex) -> bool {
        self.get(at).is_some() && self[at].settled(shard)
    }

    /// Saves the epochs that are due, and returns the volumes whose IO has waited too long for a
    /// path. With `detaching`, returns none.
    pub(super) fn poll(&mut self, now: Instant, detaching: bool) -> Vec<DeviceIndex> {
        let mut expired = Vec::new();
        for volume in self.iter_mut() {
            if !detaching && volume.no_path.expire(now) {
                expired.push(volume.index());
            }
            volume.cache.keep(now);
        }
        expired
    }

    /// Time at which the IO of a volume has waited too long for a path.
    pub(super) fn no_path_deadline(&self) -> Option<Instant> {
        self.iter().filter_map(|volume| volume.no_path.deadline()).min()
    }

    /// Volume whose close this path has yet to answer.
    pub(super) fn closing_over(&self, path: PathId) -> Option<DeviceIndex> {
        self.iter().find(|volume| volume.is_closing_over(path)).map(Volume::index)
    }
}

/// Server that volumes are pinned to before the session begins.
pub(super) fn first_server(config: &SessionConfig) -> Option<ServerId> {
    config.volumes.iter().find_map(|volume| volume.identity?.server)
}

fn contradicts(volume: &VolumeConfig, server: Option<ServerId>) -> bool {
    let pinned = volume.identity.and_then(|identity| identity.server);
    pinned.zip(server).is_some_and(|(pinned, server)| pinned != server)
}

/// Panics if the session has no such volume, which is a bug in this crate.
impl Index<DeviceIndex> for Volumes {
    type Output = Volume;

    fn index(&self, volume: DeviceIndex) -> &Volume {
        self.get(volume).unwrap_or_else(|| panic!("no volume {volume:?}"))
    }
}

impl IndexMut<DeviceIndex> for Volumes {
    fn index_mut(&mut self, volume: DeviceIndex) -> &mut Volume {
        let row = self.rows.get_mut(volume.index()).and_then(Option::as_mut);
        row.unwrap_or_else(|| panic!("no volume {volume:?}"))
    }
}
