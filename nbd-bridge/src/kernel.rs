//! `/dev/nbdX`: a block device of the kernel over the bridge's cores.
//!
//! The kernel's nbd driver is given one socket per core, already in transmission phase; the other
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
mod sockets;
mod sysfs;
mod takeover;
mod usage;

use std::fmt;
use std::str::FromStr;

pub use device::{KernelDevice, free_left_behind};
pub use error::DeviceError;
pub use options::DeviceOptions;
pub use probe::{Probe, probe, settle};
pub use sockets::FIRST_BYTES;
pub use takeover::{Reached, reach};
pub use usage::DeviceUse;

use sysfs::Places;

/// Requests that the kernel has in flight on one socket at most (`nbd_dev_add`).
pub const QUEUE_DEPTH: u32 = 128;
/// Bytes of one request as long as nobody raises `max_sectors_kb` (`nbd_dev_add`); 32 MiB is the
/// most it can be raised to.
pub const REQUEST_BYTES: usize = 128 * 1024;
/// Bytes of buffers that a core needs for all that the kernel sends it at once: memory that must
/// be there before memory is short, since IO may be what frees memory.
pub const BUSY_BYTES: usize = QUEUE_DEPTH as usize * REQUEST_BYTES * 5 / 4;

/// One connection has at most half of a core's requests (`Shared::take_row`).
const _: () = assert!(QUEUE_DEPTH * 2 <= 1024);

/// Which device to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// A free one: the kernel takes the first, or makes one more.
    Auto,
    /// This one: 0 is `/dev/nbd0`. The kernel makes it if it does not exist.
    Index(u32),
}

/// A text that names no NBD device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no NBD device; use auto or a whole device such as /dev/nbd0")]
pub struct BadDeviceName(String);

impl FromStr for DeviceChoice {
    type Err = BadDeviceName;

    fn from_str(text: &str) -> Result<Self, BadDeviceName> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let name = text.strip_prefix("/dev/").unwrap_or(text);
        name.strip_prefix("nbd")
            .filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))
            .filter(|digits| *digits == "0" || !digits.starts_with('0'))
            .and_then(|digits| digits.parse().ok())
            // Minor numbers have 20 bits (MINORBITS), of which partitions take some.
            .filter(|index| *index < 1 << 20)
            .map(Self::Index)
            .ok_or_else(|| BadDeviceName(text.to_owned()))
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Index(index) => write!(f, "/dev/nbd{index}"),
        }
    }
}

/// Who uses a device, most telling first; empty when nobody is seen to.
pub fn device_uses(index: u32) -> Vec<DeviceUse> {
    usage::uses(&Places::default(), index)
}

/// Looks whether a device could be connected now, without changing anything: the module, the
/// privilege, the device. `backend` is what it would be connected with.
///
/// # Errors
/// What is in the way, with the remedy.
pub fn check_device(choice: DeviceChoice, backend: &str) -> Result<(), DeviceError> {
    device::check(&Places::default(), choice, backend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names() {
        for (text, choice, printed) in [
            ("auto", DeviceChoice::Auto, "auto"),
            ("/dev/nbd0", DeviceChoice::Index(0), "/dev/nbd0"),
            ("nbd17", DeviceChoice::Index(17), "/dev/nbd17"),
        ] {
            assert_eq!(text.parse(), Ok(choice));
            assert_eq!(choice.to_string(), printed);
            assert_eq!(printed.parse(), Ok(choice));
        }
        for text in [
            "",
            "nbd",
            "/dev/nbd",
            "/dev/nbd01",
            "/dev/nbd0p1",
            "/dev/sda",
            "/dev/dev/nbd0",
            "0",
            "nbd+1",
            "nbd-1",
            "nbd1048576",
            "nbd4294967296",
            "AUTO",
            "/dev/nbd0 ",
        ] {
            let error = text.parse::<DeviceChoice>().unwrap_err().to_string();
            assert!(error.ends_with("use auto or a whole device such as /dev/nbd0"), "{error}");
        }
    }
}
