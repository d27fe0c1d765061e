//! `/dev/nbdX`: a kernel block device on top of the bridge's shards.
//!
//! The kernel's nbd driver is given one socket per shard, already in the transmission phase; the
//! other end of each is adopted by that shard's [`Bridge`](crate::Bridge). The driver sends a CPU's
//! requests through the socket of that CPU's hardware queue, with at most [`QUEUE_DEPTH`] requests
//! in flight per socket.
//!
//! - `device`: lifecycle of a device from connect to disconnect, each step with a timeout;
//!   `options`: parameters for a connect; `error`: reasons for failure;
//! - `netlink`: the messages for these; `sockets`: a device's socket pairs;
//! - `takeover`: fresh sockets for a device whose process died; `claim`: ownership of a device;
//!   `resend`: when the kernel resends requests that a dead process had taken;
//! - `sysfs`, `usage`: the kernel's view of devices and of their users; `probe`: opening a device
//!   in a process that may be left behind.
//!
//! No thread of this process may open the device: if the device's IO is stuck, so is the open, and
//! a process with a stuck thread keeps its sockets, so even killing it frees nothing.

mod claim;
mod device;
mod error;
mod netlink;
mod options;
mod probe;
mod resend;
mod resize;
mod sockets;
mod sysfs;
mod takeover;
mod usage;

pub use device::{KernelDevice, check_device, free_left_behind};
pub use error::DeviceError;
pub use options::{
    BUSY_BYTES, BadDeviceName, DeviceChoice, DeviceOptions, QUEUE_DEPTH, REQUEST_BYTES,
};
pub use probe::{Probe, probe, settle};
pub use sockets::FIRST_BYTES;
pub use sysfs::{announce, backend_of};
pub use takeover::{Reached, reach};
pub use usage::{DeviceUse, device_uses};
