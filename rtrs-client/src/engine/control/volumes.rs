//! The volumes of a session, by index.
//!
//! A volume that was closed keeps its index until nothing of it is left on any shard and the server
//! has closed it; then another volume may have the index.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use rtrs_core::identity::ServerId;
use rtrs_core::ids::PathId;
use rtrs_core::time::Instant;

use super::failure::SessionFailure;
use super::volume::Volume;
use crate::engine::device_set::DeviceIndex;
use crate::engine::session::{NoPath, SessionConfig, VOLUMES_MAX, VolumeConfig};

/// Why volumes of different servers are not of one session.
const ONE_SERVER: &str = "all volumes of a session are at one server, and another identity of it \
                          is known";

/// All volumes.
#[derive(Debug)]
pub(super) struct Volumes {
    config: Arc<SessionConfig>,
    rows: Vec<Option<Volume>>,
}

impl Volumes {
    /// Those that a session begins with. Panics when there are none or too many: that is a bug of
    /// this crate.
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

    /// The first index that nobody has.
    fn place(&self) -> Option<DeviceIndex> {
        let free = |device: &DeviceIndex| self.get(*device).is_none();
        DeviceIndex::all().find(free)
    }

    /// Adds a volume of this server, if that is known. The error says why it cannot be added.
    pub(super) fn add(
        &mut self,
        now: Instant,
        volume: VolumeConfig,
        server: Option<ServerId>,
    ) -> Result<DeviceIndex, String> {
        let export = &volume.export;
        if let Some(before) = self.iter().find(|before| before.export() == export) {
            let still = if before.is_used() { "" } else { " and is still being closed" };
            return Err(format!("volume {export} already exists{still}"));
        }
        if contradicts(&volume, server) {
            return Err(format!("cannot add volume {export}: {ONE_SERVER}"));
        }
        let Some(at) = self.place() else {
            return Err(format!("the session has {VOLUMES_MAX} volumes, and no more are possible"));
        };
        let volume = Some(Volume::new(at, volume, &self.config, now));
        match self.rows.get_mut(at.index()) {
            Some(place) => *place = volume,
            None => self.rows.push(volume),
        }
        Ok(at)
    }

    /// Nothing of a volume is left: another may have its index.
    pub(super) fn remove(&mut self, volume: DeviceIndex) {
        self.rows[volume.index()] = None;
    }

    /// Other settings hold.
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

    /// The indexes of all, those included that are being closed.
    pub(super) fn ids(&self) -> impl Iterator<Item = DeviceIndex> + use<> {
        self.iter().map(Volume::index).collect::<Vec<_>>().into_iter()
    }

    /// Those that the session has for its users.
    pub(super) fn used(&self) -> impl Iterator<Item = &Volume> + Clone {
        self.iter().filter(|volume| volume.is_used())
    }

    /// The volume of this export that the session has for its users.
    pub(super) fn named(&self, export: &str) -> Option<DeviceIndex> {
        self.used().find(|volume| volume.export() == export).map(Volume::index)
    }

    /// True when one was open once.
    pub(super) fn were_open(&self) -> bool {
        self.iter().any(Volume::was_open)
    }

    /// Why none of them can go on; that of the first.
    pub(super) fn failure(&self) -> Option<&SessionFailure> {
        let mut used = self.used().map(Volume::failure);
        let first = used.next()??;
        used.all(|failure| failure.is_some()).then_some(first)
    }

    /// True while a close is to be sent or answered: until then the server may give the number of
    /// that volume to another.
    pub(super) fn are_closing(&self) -> bool {
        self.iter().any(Volume::is_closing)
    }

    /// The volume whose close this path is to answer.
    pub(super) fn closing_over(&self, path: PathId) -> Option<DeviceIndex> {
        self.iter().find(|volume| volume.is_closing_over(path)).map(Volume::index)
    }
}

/// The server that volumes are pinned to before the session begins.
pub(super) fn first_server(config: &SessionConfig) -> Option<ServerId> {
    config.volumes.iter().find_map(|volume| volume.identity?.server)
}

fn contradicts(volume: &VolumeConfig, server: Option<ServerId>) -> bool {
    let pinned = volume.identity.and_then(|identity| identity.server);
    pinned.zip(server).is_some_and(|(pinned, server)| pinned != server)
}

/// A volume that the session has. Panics otherwise: that is a bug of this crate.
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
