//! Volumes that are added to a running session.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::attached::AttachedSession;
use super::events::READY_TIMEOUT;
use super::report::Identity;
use super::volume::{Volume, prepare};
use super::waiting::Add;
use crate::engine::{Change, DeviceIndex, VOLUMES_MAX, VolumeConfig};
use crate::error::{Error, ErrorKind};
use crate::plan::Front;

impl AttachedSession {
    /// Begins to attach another volume. The command gets a reply once the volume is served or has
    /// failed.
    pub(super) fn on_add(&mut self, add: Add) {
        match self.begin(&add) {
            Ok(()) => {
                tracing::info!("attaching {} as well", add.name);
                if let Some(volume) = self.volumes.last_mut() {
                    volume.add = Some(add);
                }
            }
            Err(error) => {
                let error = error.chain().to_string();
                tracing::warn!("{} is not attached: {error}", add.name);
                add.reply(Err(error));
            }
        }
    }

    /// Adds another volume at the end of the session's list.
    fn begin(&mut self, add: &Add) -> Result<(), Error> {
        let ending = || Error::new(ErrorKind::InUse, "the session is ending");
        let (plan, of_session) = self.roster.first().ok_or_else(ending)?;
        if self.is_ending() {
            return Err(ending());
        }
        if self.volumes.len() >= VOLUMES_MAX {
            let text = format!("the session already has {VOLUMES_MAX} volumes, the maximum");
            return Err(Error::new(ErrorKind::InUse, text));
        }
        let name = add.name.clone();
        let plan = plan.adding(&name, &add.settings)?;
        plan.check_volume()?;
        let prepared = prepare(&plan, &[])?;
        let index = self.add_to_engine(prepared.config.clone())?;
        let identity = Identity {
            name: name.clone(),
            export: plan.session.export_name.clone(),
            index,
            access: plan.session.access,
            uri: prepared.uri.clone(),
            device: Arc::default(),
            ending: Arc::default(),
            saved: prepared.saved.clone(),
            started: SystemTime::now(),
            ..of_session
        };
        let is_device = matches!(plan.front, Front::Device(_));
        let (volume, fronts) = Volume::new(&plan, prepared, identity, READY_TIMEOUT);
        let added = self.add(volume, plan);
        // Called after `add`, which creates the entry for the saved state.
        self.shards.add_fronts(index, &name, is_device, fronts);
        if added.is_err() {
            self.leave(self.volumes.len() - 1, Duration::ZERO);
        }
        added
    }

    /// Lets the engine open a volume. Returns its device.
    fn add_to_engine(&self, volume: VolumeConfig) -> Result<DeviceIndex, Error> {
        let export = volume.export.clone();
        let failed = |why: &str| Error::new(ErrorKind::System, format!("{export}: {why}"));
        self.shards.change(Change::AddVolume(volume)).map_err(|why| failed(&why))?;
        self.shards.device_of(&export).ok_or_else(|| {
            let export = export.clone();
            if let Err(why) = self.shards.change(Change::CloseVolume { export }) {
                tracing::warn!("{why}");
            }
            failed("the session does not answer")
        })
    }
}
