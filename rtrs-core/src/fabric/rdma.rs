//! Detection of RDMA support (`rdma://`) on this host, and the provider if it is available.
//!
//! [`Rdma`] is the daemons' interface, whether or not the feature `verbs` is built in. [`NoRdma`]
//! reports what is missing, with a hint. Daemons call [`Rdma::open`] once when they start (or check
//! their settings), then [`Rdma::fabric`] once per shard.

pub(super) mod device;

use std::rc::Rc;
use std::sync::Arc;

#[cfg(feature = "verbs")]
use super::verbs::{DeviceInfo, Transport, VerbsFabric, VerbsOptions, VerbsShared, devices};
use super::{Fabric, FabricError};
use crate::rt::Ring;
use crate::time::Duration;
pub use device::{MemoryWindows, RdmaDevice, RdmaPort};

/// Commands that create a software device.
const SOFT_DEVICE: &str =
    "for soft-RoCE: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0";

/// Provider options set by a daemon; all others keep the provider's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// Timeout for an accepted connection's start-up, and for a request waiting for its answer.
    pub startup_timeout: Duration,
    /// Maximum number of connect requests from peers that are waiting for an answer; one more
    /// closes the oldest.
    pub half_open_max: u32,
    /// Maximum number of outstanding RDMA reads from either end; pings use them, sessions do not.
    pub reads_max: u8,
    /// Time for which a device resends an unacknowledged packet; None selects the provider's
    /// default.
    pub path_timeout: Option<Duration>,
}

/// Reason why RDMA is not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoRdma {
    /// The program was built without RDMA support.
    #[error(
        "this build has no RDMA support (feature verbs); build it with that feature, or use tcp://"
    )]
    Feature,
    /// The kernel modules are missing or cannot be used. The error includes a hint.
    #[error(transparent)]
    System(FabricError),
    /// There is no RDMA device.
    #[error(
        "this host has no RDMA device; load its driver, or create a software device \
         ({SOFT_DEVICE}), or use tcp://"
    )]
    NoDevice,
    /// All devices are iWARP, which has no RDMA write with immediate.
    #[error(
        "the RDMA devices of this host ({}) are iWARP, which has no RDMA write with immediate; \
         use tcp://, or an InfiniBand or RoCE device ({SOFT_DEVICE})",
        .0.join(", ")
    )]
    OnlyIwarp(Vec<String>),
}

/// RDMA on this host, with at least one device that sessions can use. Without the feature `verbs`,
/// no value of this type exists.
#[derive(Clone, Debug)]
pub struct Rdma {
    #[cfg(feature = "verbs")]
    shared: Arc<VerbsShared>,
    #[cfg(not(feature = "verbs"))]
    never: std::convert::Infallible,
    devices: Arc<[RdmaDevice]>,
}

impl Rdma {
    /// Whether this build supports RDMA.
    pub const BUILT_IN: bool = cfg!(feature = "verbs");

    /// Looks for devices.
    ///
    /// # Errors
    /// Reports what is missing, with a hint.
    #[cfg(feature = "verbs")]
    pub fn open() -> Result<Self, NoRdma> {
        let shared = VerbsShared::open().map_err(NoRdma::System)?;
        let all = devices().map_err(NoRdma::System)?;
        if all.is_empty() {
            return Err(NoRdma::NoDevice);
        }
        let usable = all.iter().filter(|device| device.transport != Transport::Iwarp);
        let usable: Vec<_> = usable.collect();
        if usable.is_empty() {
            return Err(NoRdma::OnlyIwarp(all.into_iter().map(|device| device.name).collect()));
        }
        let devices = usable.into_iter().map(|device| {
            let DeviceInfo { name, ports, windows, .. } = device.clone();
            RdmaDevice { name, ports, windows }
        });
        Ok(Self { shared, devices: devices.collect() })
    }

    /// Fails, because this build has no RDMA support.
    ///
    /// # Errors
    /// Always [`NoRdma::Feature`].
    #[cfg(not(feature = "verbs"))]
    pub const fn open() -> Result<Self, NoRdma> {
        Err(NoRdma::Feature)
    }

    /// Returns the ports of the devices that sessions can use.
    pub fn ports(&self) -> impl Iterator<Item = &RdmaPort> {
        self.devices.iter().flat_map(|device| &device.ports)
    }

    /// Returns the devices that sessions can use, as found by [`Self::open`].
    #[must_use]
    pub fn devices(&self) -> &[RdmaDevice] {
        &self.devices
    }

    /// Creates a shard's provider.
    ///
    /// # Errors
    /// `System` if the connection manager cannot be reached.
    #[cfg(feature = "verbs")]
    pub fn fabric(
        &self,
        ring: &Rc<Ring>,
        options: RdmaOptions,
    ) -> Result<Box<dyn Fabric>, FabricError> {
        let RdmaOptions { startup_timeout, half_open_max, reads_max, path_timeout } = options;
        let defaults = VerbsOptions::default();
        let path_timeout = path_timeout.unwrap_or(defaults.path_timeout);
        let options =
            VerbsOptions { startup_timeout, half_open_max, reads_max, path_timeout, ..defaults };
        Ok(Box::new(VerbsFabric::new(ring, Arc::clone(&self.shared), options)?))
    }

    /// Creates a shard's provider.
    ///
    /// # Errors
    /// Never called, since no value of this type exists.
    #[cfg(not(feature = "verbs"))]
    pub fn fabric(
        &self,
        _ring: &Rc<Ring>,
        _options: RdmaOptions,
    ) -> Result<Box<dyn Fabric>, FabricError> {
        match self.never {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_part_is_named_with_a_remedy() {
        for (missing, words) in [
            (NoRdma::Feature, ["feature verbs", "tcp://"]),
            (NoRdma::NoDevice, ["no RDMA device", "rdma link add rxe0 type rxe netdev eth0"]),
            (NoRdma::OnlyIwarp(vec!["siw0".into()]), ["(siw0) are iWARP", "tcp://"]),
        ] {
            let text = missing.to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
    }

    #[test]
    fn a_build_without_rdma_reports_that() {
        assert_eq!(Rdma::BUILT_IN, cfg!(feature = "verbs"));
        if !Rdma::BUILT_IN {
            assert!(matches!(Rdma::open(), Err(NoRdma::Feature)));
        }
    }
}
