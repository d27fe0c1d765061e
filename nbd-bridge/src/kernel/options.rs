//! Options of a kernel device.

use std::fmt;
use std::str::FromStr;

/// Maximum number of requests that the kernel has in flight on one socket (`nbd_dev_add`).
pub const QUEUE_DEPTH: u32 = 128;
/// Size of one request with the default `max_sectors_kb` (`nbd_dev_add`), which can be raised to at
/// most 32 MiB.
pub const REQUEST_BYTES: usize = 128 * 1024;
/// Bytes of buffers that a shard needs for all requests that the kernel has in flight. They must be
/// available before memory runs short, since freeing memory may require IO.
pub const BUSY_BYTES: usize = QUEUE_DEPTH as usize * REQUEST_BYTES * 5 / 4;

/// One connection may use at most half of a shard's requests (`Shared::take_row`).
const _: () = assert!(QUEUE_DEPTH * 2 <= 1024);

/// Device to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// Any free device: the kernel picks the first, or creates one.
    Auto,
    /// The device with this number: 0 is `/dev/nbd0`. The kernel creates it if it does not exist.
    Index(u32),
}

/// Error for a string that does not name an NBD device.
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
            // Minor numbers have 20 bits (MINORBITS), some of which partitions use.
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

/// Options for connecting a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Device to connect.
    pub choice: DeviceChoice,
    /// Seconds without an answer after which the kernel considers a socket dead and resends the
    /// request through another. Must be longer than any request can take here, because a resent
    /// request could overtake a later one. None means no limit and a quick takeover
    /// ([`super::reach`]); the device then has one socket.
    pub timeout_s: Option<u64>,
    /// Seconds for which the kernel keeps requests when all sockets are dead, so that new ones can
    /// be connected; then the requests fail.
    pub dead_timeout_s: u64,
    /// Identifier of the session and export that the device is connected to: text without a
    /// newline, stable across restarts. Shown in `/sys/block/nbdX/backend`.
    pub backend: String,
    /// Whether to take over a device that an exited process connected with the same identifier.
    pub takeover: bool,
}

impl DeviceOptions {
    /// Selects one of these devices if any device would do.
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
    fn device_names_are_parsed() {
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
