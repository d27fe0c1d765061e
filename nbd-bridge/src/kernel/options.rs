//! How a kernel device is asked for.

use std::fmt;
use std::str::FromStr;

/// Requests that the kernel has in flight on one socket at most (`nbd_dev_add`).
pub const QUEUE_DEPTH: u32 = 128;
/// Bytes of one request as long as nobody raises `max_sectors_kb` (`nbd_dev_add`); 32 MiB is the
/// most it can be raised to.
pub const REQUEST_BYTES: usize = 128 * 1024;
/// Bytes of buffers that a shard needs for all that the kernel sends it at once: memory that must
/// be there before memory is short, since IO may be what frees memory.
pub const BUSY_BYTES: usize = QUEUE_DEPTH as usize * REQUEST_BYTES * 5 / 4;

/// One connection has at most half of a shard's requests (`Shared::take_row`).
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
#[error("{0:?} is not an NBD device; use auto or a whole device such as /dev/nbd0")]
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

/// How a device is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Which one.
    pub choice: DeviceChoice,
    /// Seconds after which the kernel takes a socket for dead whose request has no answer, and
    /// sends the request again through another. It must be longer than any request can take here:
    /// a request that is sent again could overtake a later one. None stands for no bound and a
    /// quick takeover ([`super::reach`]): the device then has one socket.
    pub timeout_s: Option<u64>,
    /// Seconds that the kernel keeps requests when all sockets are dead, for somebody to connect
    /// others; then they fail.
    pub dead_timeout_s: u64,
    /// Tells what the device is connected to: text without a newline, the same for the same
    /// session and export. Shown in `/sys/block/nbdX/backend`.
    pub backend: String,
    /// Take over a device that a process which is gone had connected with the same identifier.
    pub takeover: bool,
}

impl DeviceOptions {
    /// Takes one of these devices where any would do.
    pub(super) fn prefer(&mut self, devices: &[u32]) {
        if let (DeviceChoice::Auto, Some(index)) = (self.choice, devices.first()) {
            self.choice = DeviceChoice::Index(*index);
        }
    }
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
