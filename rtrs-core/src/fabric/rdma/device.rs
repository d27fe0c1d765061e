//! RDMA devices of a host as seen by the daemons, whatever the provider.

use std::net::IpAddr;

/// Port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RdmaPort {
    /// Device name, as in `rdma link`.
    pub device: String,
    /// Port number, starting at 1.
    pub number: u8,
    /// Port state as reported by the kernel, in lower case, such as `active` or `down`.
    pub state: String,
    /// Network interface behind the port, if the kernel reports it.
    pub netdev: Option<String>,
    /// IP addresses in the port's GID table, excluding link-local ones.
    pub addresses: Vec<IpAddr>,
}

/// Whether a device's memory windows work; they are required for using a new key for each request.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub enum MemoryWindows {
    /// A window was bound successfully.
    Usable,
    /// Windows could not be tested, for this reason. They are used if the device claims to have
    /// them.
    Untried(String),
    /// The device has no usable windows, for this reason.
    Missing(String),
}

impl Default for MemoryWindows {
    fn default() -> Self {
        Self::Untried("not tested".into())
    }
}

impl MemoryWindows {
    /// Returns true if the device is known to have no usable windows.
    #[must_use]
    pub const fn is_missing(&self) -> bool {
        matches!(self, Self::Missing(_))
    }
}

/// RDMA device that sessions can use.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RdmaDevice {
    /// Device name, as in `rdma link`.
    pub name: String,
    /// Ports of the device.
    pub ports: Vec<RdmaPort>,
    /// Whether the device's memory windows work.
    pub windows: MemoryWindows,
}

impl RdmaDevice {
    /// Returns true if a port of the device has this address, or if it is the wildcard address.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        let mut ports = self.ports.iter();
        address.is_unspecified() || ports.any(|port| port.addresses.contains(&address))
    }
}
