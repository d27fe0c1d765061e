//! Whether this program, on this host, can do `rdma://`, and the provider if it can.
//!
//! Owns [`Rdma`], the one face the daemons see, whether the feature `verbs` is built in or not, and
//! [`NoRdma`], which says what is missing and what would help. Called once when a daemon starts
//! (or checks its settings), then once per core.

use std::fmt;
use std::rc::Rc;

use super::{Fabric, FabricError};
use crate::rt::Ring;
use crate::time::Duration;

/// Makes a device for those who have none.
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

/// A port of a device that sessions can use.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// Why there is no RDMA here.
#[derive(Debug)]
#[non_exhaustive]
pub enum NoRdma {
    /// The program was built without it.
    Feature,
    /// The kernel's part is missing or may not be used. The error says what would help.
    System(FabricError),
    /// There is no RDMA device.
    NoDevice,
    /// All devices are iWARP, which has no RDMA write with immediate.
    OnlyIwarp(Vec<String>),
}

impl fmt::Display for NoRdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Feature => f.write_str(
                "this build has no RDMA support (feature verbs); build it with that feature, or \
                 use tcp://",
            ),
            Self::System(error) => write!(f, "{error}"),
            Self::NoDevice => write!(
                f,
                "this host has no RDMA device; load its driver, or make a device in software \
                 ({SOFT_DEVICE}), or use tcp://"
            ),
            Self::OnlyIwarp(names) => write!(
                f,
                "the RDMA devices of this host ({}) are iWARP, which has no RDMA write with \
                 immediate; use tcp://, or an InfiniBand or RoCE device ({SOFT_DEVICE})",
                names.join(", ")
            ),
        }
    }
}

impl std::error::Error for NoRdma {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System(error) => std::error::Error::source(error),
            _ => None,
        }
    }
}

#[cfg(feature = "verbs")]
pub use with_verbs::Rdma;

#[cfg(not(feature = "verbs"))]
pub use without_verbs::Rdma;

#[cfg(feature = "verbs")]
mod with_verbs {
    use std::sync::Arc;

    use super::super::verbs::{
        DeviceInfo, Transport, VerbsFabric, VerbsOptions, VerbsShared, devices,
    };
    use super::{Fabric, FabricError, NoRdma, Rc, RdmaOptions, RdmaPort, Ring};

    /// RDMA on this host: there is a device that sessions can use.
    #[derive(Clone, Debug)]
    pub struct Rdma {
        shared: Arc<VerbsShared>,
        devices: Arc<[DeviceInfo]>,
    }

    impl Rdma {
        /// True when this build can do RDMA at all.
        pub const BUILT_IN: bool = true;

        /// Looks for devices.
        ///
        /// # Errors
        /// What is missing, with the remedy.
        pub fn open() -> Result<Self, NoRdma> {
            let shared = VerbsShared::open().map_err(NoRdma::System)?;
            let all = devices().map_err(NoRdma::System)?;
            if all.is_empty() {
                return Err(NoRdma::NoDevice);
            }
            let names = all.iter().map(|device| device.name.clone()).collect();
            let devices: Arc<[DeviceInfo]> =
                all.into_iter().filter(|device| device.transport != Transport::Iwarp).collect();
            if devices.is_empty() {
                return Err(NoRdma::OnlyIwarp(names));
            }
            Ok(Self { shared, devices })
        }

        /// Names of the devices that sessions can use.
        #[must_use]
        pub fn device_names(&self) -> Vec<&str> {
            self.devices.iter().map(|device| &*device.name).collect()
        }

        /// Their ports.
        #[must_use]
        pub fn ports(&self) -> Vec<RdmaPort> {
            let ports = self.devices.iter().flat_map(|device| {
                device.ports.iter().map(|port| RdmaPort {
                    device: device.name.clone(),
                    number: port.number,
                    state: port.state.clone(),
                    netdev: port.netdev.clone(),
                    addresses: port.addresses.clone(),
                })
            });
            ports.collect()
        }

        /// Names of those of them that have no memory windows.
        #[must_use]
        pub fn without_windows(&self) -> Vec<&str> {
            let without = self.devices.iter().filter(|device| device.windows == Some(false));
            without.map(|device| &*device.name).collect()
        }

        /// A core's provider.
        ///
        /// # Errors
        /// `System` when the connection manager cannot be reached.
        pub fn fabric(
            &self,
            ring: &Rc<Ring>,
            options: RdmaOptions,
        ) -> Result<Box<dyn Fabric>, FabricError> {
            let RdmaOptions { startup_timeout, half_open_max, reads_max, path_timeout } = options;
            let defaults = VerbsOptions::default();
            let path_timeout = path_timeout.unwrap_or(defaults.path_timeout);
            let options = VerbsOptions {
                startup_timeout,
                half_open_max,
                reads_max,
                path_timeout,
                ..defaults
            };
            Ok(Box::new(VerbsFabric::new(ring, Arc::clone(&self.shared), options)?))
        }
    }
}

#[cfg(not(feature = "verbs"))]
mod without_verbs {
    use super::{Fabric, FabricError, NoRdma, Rc, RdmaOptions, RdmaPort, Ring};

    /// RDMA on this host: never there in this build.
    #[derive(Clone, Debug)]
    pub enum Rdma {}

    impl Rdma {
        /// True when this build can do RDMA at all.
        pub const BUILT_IN: bool = false;

        /// Says that this build has no RDMA.
        ///
        /// # Errors
        /// Always [`NoRdma::Feature`].
        pub const fn open() -> Result<Self, NoRdma> {
            Err(NoRdma::Feature)
        }

        /// Names of the devices that sessions can use.
        #[must_use]
        pub fn device_names(&self) -> Vec<&str> {
            match *self {}
        }

        /// Their ports.
        #[must_use]
        pub fn ports(&self) -> Vec<RdmaPort> {
            match *self {}
        }

        /// Names of those of them that have no memory windows.
        #[must_use]
        pub fn without_windows(&self) -> Vec<&str> {
            match *self {}
        }

        /// A core's provider.
        ///
        /// # Errors
        /// None: there is no value to ask.
        pub fn fabric(
            &self,
            _ring: &Rc<Ring>,
            _options: RdmaOptions,
        ) -> Result<Box<dyn Fabric>, FabricError> {
            match *self {}
        }
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
