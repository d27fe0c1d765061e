//! A shard's devices, by the index that ring tokens contain.

use super::device::CoreDevice;
use super::domain::VerbsPd;
use super::hint;
use super::sys::Wc;
use crate::fabric::FabricError;
use crate::rt::Port;

/// Ring tokens, which identify the descriptor that has become readable.
pub(super) mod token {
    pub(crate) const CM: u64 = 0;
    /// Completion channel of the device whose index is in the low half.
    pub(crate) const COMPLETIONS: u64 = 1 << 32;
    /// Asynchronous events of the device whose index is in the low half.
    pub(crate) const REPORTS: u64 = 2 << 32;
}

/// Devices that a shard uses, and the completions taken from them.
#[derive(Debug)]
pub(super) struct Devices {
    /// Devices by index; a removed device leaves its slot empty.
    places: Vec<Option<CoreDevice>>,
    /// Number of the shard.
    core: u64,
    completions: Vec<Wc>,
}

/// Outcome of a poll of all devices.
#[derive(Debug, Default)]
pub(super) struct Polled {
    /// Number of devices that had completions.
    pub(super) busy: u64,
    /// Key of a device on which a queue failed.
    pub(super) failed: Option<usize>,
}

impl Devices {
    /// Creates an empty list for the shard with this number.
    pub(super) fn new(core: u64) -> Self {
        Self { places: Vec::new(), core, completions: Vec::with_capacity(256) }
    }

    /// Returns the number of the shard.
    pub(super) fn core(&self) -> u64 {
        self.core
    }

    /// Returns the device at this index, unless it was removed.
    pub(super) fn at(&mut self, index: usize) -> Option<&mut CoreDevice> {
        self.places[index].as_mut()
    }

    /// Returns the state for the device with that key.
    pub(super) fn of(&mut self, context: usize) -> Option<&mut CoreDevice> {
        self.places.iter_mut().flatten().find(|device| device.context().key() == context)
    }

    /// Returns the state for a domain's device, creating it if needed.
    pub(super) fn open(
        &mut self,
        pd: &VerbsPd,
        port: &Port,
    ) -> Result<&mut CoreDevice, FabricError> {
        let context = pd.context();
        if context.is_removed() {
            return Err(hint::removed(context.name()));
        }
        let is_it = |device: &CoreDevice| device.context().key() == context.key();
        if let Some(at) = self.places.iter().position(|d| d.as_ref().is_some_and(is_it)) {
            return self.places[at].as_mut().ok_or(FabricError::QpState);
        }
        let at = self.places.len();
        let tokens = (token::COMPLETIONS | at as u64, token::REPORTS | at as u64);
        let mut device = CoreDevice::new(context, tokens, self.core)?;
        device.completions.arm(port);
        device.reports.arm(port);
        self.places.push(None);
        Ok(self.places[at].insert(device))
    }

    /// Releases the state for removed devices whose keys are not `in_use`.
    pub(super) fn retire_removed(&mut self, port: &Port, mut in_use: impl FnMut(usize) -> bool) {
        for place in &mut self.places {
            let Some(device) = place.as_ref().filter(|d| d.context().is_removed()) else {
                continue;
            };
            if !in_use(device.context().key()) {
                device.stop(port);
                *place = None;
            }
        }
    }

    /// Takes some completions from each device.
    pub(super) fn poll(&mut self) -> Polled {
        let mut polled = Polled::default();
        for device in self.places.iter_mut().flatten() {
            match device.take(&mut self.completions) {
                Ok(false) => {}
                Ok(true) => polled.busy += 1,
                Err(error) => {
                    tracing::error!(%error, "a completion queue failed");
                    polled.failed = Some(device.context().key());
                }
            }
        }
        polled
    }

    /// Takes all available completions.
    pub(super) fn drain(&mut self) {
        for device in self.places.iter_mut().flatten() {
            if let Err(error) = device.take_all(&mut self.completions) {
                tracing::error!(%error, device = device.context().name(), "draining failed");
            }
        }
    }

    /// Removes and returns the completions taken so far; `reuse_list` expects the emptied list.
    pub(super) fn take_completions(&mut self) -> Vec<Wc> {
        std::mem::take(&mut self.completions)
    }

    /// Takes back the emptied list from `take_completions`, so that its memory is reused.
    pub(super) fn reuse_list(&mut self, completions: Vec<Wc>) {
        self.completions = completions;
    }
}
