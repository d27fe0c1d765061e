//! `/dev/nbdX`: a block device of the kernel over the bridge's shards.
//!
//! The kernel's nbd driver is given one socket per shard, already in transmission phase; the other
//! end of each is adopted by that core's [`Bridge`](crate::Bridge). It sends the requests of a CPU
//! through the socket of that CPU's hardware queue, at most [`QUEUE_DEPTH`] at a time and socket.
//!
//! - `device`: a device's life, from the connect to the disconnect, each step with a bound;
//!   `options`: how it is asked for; `error`: what is in the way;
//! - `netlink`: the messages for it; `sockets`: what it is connected with;
//! - `takeover`: fresh sockets for a device whose process died; `claim`: who has a device;
//!   `resend`: when the kernel sends again what a dead process had taken;
//! - `sysfs`, `usage`: what the kernel shows of devices and of who uses them; `probe`: opening a
//!   device, in a process that may be left behind.
//!
//! No thread of this process may open the device: if its IO is stuck, so is the open, and a process
//! with a stuck thread keeps its sockets, so that even killing it frees nothing.

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
