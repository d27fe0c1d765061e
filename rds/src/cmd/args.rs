//! Types of command-line values that settings do not use.

use std::fmt;
use std::str::FromStr;

use rtrs_base::settings::{ByteSize, HOUR, Int, MILLISECOND, Time, ValueError};
use rtrs_base::time::Duration;

/// Port that a socket can be bound to: 0 is the port of pings, 1 that of probes.
pub(super) type Port = Int<u16, 2, 65535>;
/// Same as [`Port`], or 0 for any port.
pub(super) type PortOrAny = Int<u16, 0, 65535>;
/// A TCP port.
pub(super) type TcpPort = Int<u16, 1, 65535>;

/// Number of bytes from `MIN` to `MAX`, such as 4096 or 4k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bytes<const MIN: u32, const MAX: u32>(u32);

impl<const MIN: u32, const MAX: u32> Bytes<MIN, MAX> {
    pub(super) const fn get(self) -> u32 {
        self.0
    }
}

impl<const MIN: u32, const MAX: u32> FromStr for Bytes<MIN, MAX> {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let size: ByteSize = text.parse()?;
        let bytes = u32::try_from(size.bytes()).ok();
        bytes.filter(|bytes| (MIN..=MAX).contains(bytes)).map(Self).ok_or_else(|| {
            let max = ByteSize::new(MAX.into());
            ValueError::new("size", text, "is out of range", format!("use {MIN} to {max}"))
        })
    }
}

impl<const MIN: u32, const MAX: u32> fmt::Display for Bytes<MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ByteSize::new(self.0.into()).fmt(f)
    }
}

/// Time from 1 ms to an hour. A number without a unit is in seconds, as in rds-tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seconds(Time<MILLISECOND, HOUR>);

impl Seconds {
    pub(super) const fn get(self) -> Duration {
        self.0.get()
    }
}

impl FromStr for Seconds {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let is_bare = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let unit = if is_bare { "s" } else { "" };
        format!("{text}{unit}").parse().map(Self)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_and_a_range() {
        type Size = Bytes<40, { 1 << 20 }>;
        for (text, bytes) in [("40", 40), ("4k", 4096), ("1M", 1 << 20)] {
            assert_eq!(text.parse::<Size>().unwrap().get(), bytes);
        }
        for text in ["39", "1048577", "5G"] {
            let error = text.parse::<Size>().unwrap_err().to_string();
            assert_eq!(error, format!("size {text:?} is out of range; use 40 to 1M"));
        }
    }

    #[test]
    fn a_bare_number_is_seconds() {
        for (text, millis) in [("2", 2000), ("200ms", 200), ("1m", 60_000)] {
            let time = text.parse::<Seconds>().unwrap().get();
            assert_eq!(time, Duration::from_millis(millis), "{text}");
        }
        for text in ["0", "3601", "", "2x"] {
            assert!(text.parse::<Seconds>().is_err(), "{text}");
        }
    }
}
