//! Whether this program, on this host, can do `rdma://`, and the provider if it can.
//!
//! Owns [`Rdma`], the one face the daemons see, whether the feature `verbs` is built in or not, and
//! [`NoRdma`], which says what is missing and what would help. Called once when a daemon starts
//! (or checks its settings), then once per shard.

use std::rc::Rc;
use std::sync::Arc;

#[cfg(feature = "verbs")]
use super::verbs::{DeviceInfo, Transport, VerbsFabric, VerbsOptions, VerbsShared, devices};
use super::{Fabric, FabricError};
use crate::rt::Ring;
use crate::time::Duration;

/// The commands that make a device in software.
const SOFT_DEVICE: &str =
    "for soft-RoCE: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0";

/// How the provider of a daemon behaves; the rest is the provider's own defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// Bound of an accepted connection's start-up, and of a request waiting for its answer.
    pub startup_timeout: Duration,
    /// Requests of peers that wait for an answer; one more ends the oldest.
    pub half_open_max: u32,
    /// RDMA reads that either end may have outstanding: pings use them, sessions do not.
    pub reads_max: u8,
    /// How long a device repeats a packet that is not acknowledged; None is the provider's own.
    pub path_timeout: Option<Duration>,
}

/// A port of a device.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RdmaPort {
    /// The device, as `rdma link` names it.
    pub device: String,
    /// From 1.
    pub number: u8,
    /// As the kernel says it, in lower case: `active`, `down`.
    pub state: String,
    /// The network interface behind it, where the kernel tells.
    pub netdev: Option<String>,
    /// The addresses in its table of identifiers; link-local ones are left out.
    pub addresses: Vec<std::net::IpAddr>,
}

/// Whether memory windows of a device can be used, which a fresh key for each request needs.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub enum MemoryWindows {
    /// One was bound.
    Usable,
    /// None could be tried, for this reason. They are used if the device says that it has them.
    Untried(String),
    /// There is none, for this reason.
    Missing(String),
}

impl Default for MemoryWindows {
    fn default() -> Self {
        Self::Untried("not looked at".into())
    }
}

impl MemoryWindows {
    /// True when it is known that there is none.
    #[must_use]
    pub const fn is_missing(&self) -> bool {
        matches!(self, Self::Missing(_))
    }
}

/// A device that sessions can use.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RdmaDevice {
    /// As `rdma link` names it.
    pub name: String,
    /// Its ports.
    pub ports: Vec<RdmaPort>,
    /// Whether it has memory windows.
    pub windows: MemoryWindows,
}

impl RdmaDevice {
    /// True when a port of it has this address, or for the address that stands for all.
    #[must_use]
    pub fn has(&self, address: std::net::IpAddr) -> bool {
        let mut ports = self.ports.iter();
        address.is_unspecified() || ports.any(|port| port.addresses.contains(&address))
    }
}

/// Why there is no RDMA here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoRdma {
    /// The program was built without it.
    #[error(
        "this build has no RDMA support (feature verbs); build it with that feature, or use tcp://"
    )]
    Feature,
    /// The kernel's part is missing or may not be used. The error has a hint.
    #[error(transparent)]
    System(FabricError),
    /// There is no RDMA device.
    #[error(
        "this host has no RDMA device; load its driver, or make a device in software \
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

/// RDMA on this host: there is a device that sessions can use. Without the feature `verbs` there
/// is no value of it.
#[derive(Clone, Debug)]
pub struct Rdma {
    #[cfg(feature = "verbs")]
    shared: Arc<VerbsShared>,
    #[cfg(not(feature = "verbs"))]
    never: std::convert::Infallible,
    devices: Arc<[RdmaDevice]>,
}

impl Rdma {
    /// True when this build can do RDMA at all.
    pub const BUILT_IN: bool = cfg!(feature = "verbs");

    /// Looks for devices.
    ///
    /// # Errors
    /// What is missing, with a hint.
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

    /// This build has no RDMA.
    ///
    /// # Errors
    /// Always [`NoRdma::Feature`].
    #[cfg(not(feature = "verbs"))]
    pub const fn open() -> Result<Self, NoRdma> {
        Err(NoRdma::Feature)
    }

    /// The ports of the devices that sessions can use.
    pub fn ports(&self) -> impl Iterator<Item = &RdmaPort> {
        self.devices.iter().flat_map(|device| &device.ports)
    }

    /// The devices that sessions can use, as they were when this was opened.
    #[must_use]
    pub fn devices(&self) -> &[RdmaDevice] {
        &self.devices
    }

    /// A shard's provider.
    ///
    /// # Errors
    /// `System` when the connection manager cannot be reached.
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

    /// A shard's provider.
    ///
    /// # Errors
    /// None: there is no value to ask.
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
    fn what_is_missing_is_named_with_a_remedy() {
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
    fn a_build_without_the_feature_says_so() {
        assert_eq!(Rdma::BUILT_IN, cfg!(feature = "verbs"));
        if !Rdma::BUILT_IN {
            assert!(matches!(Rdma::open(), Err(NoRdma::Feature)));
        }
    }
}
