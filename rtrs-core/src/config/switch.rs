//! Switches and counts that may be left to the program: `on`, `off`, `auto`, a number.
//!
//! Owns [`Switch`], [`AutoSwitch`] and [`Shards`]. In a configuration file `true` and `false` read
//! as `on` and `off`.

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::ValueError;
use super::file::deserialize_text;

/// `on` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Switch {
    /// Switched on.
    On,
    /// Switched off.
    Off,
}

impl Switch {
    /// Whether the switch is on.
    #[must_use]
    pub const fn is_on(self) -> bool {
        matches!(self, Self::On)
    }
}

impl From<bool> for Switch {
    fn from(on: bool) -> Self {
        if on { Self::On } else { Self::Off }
    }
}

impl FromStr for Switch {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "on" | "true" => Ok(Self::On),
            "off" | "false" => Ok(Self::Off),
            _ => Err(ValueError::new("switch", text, "is neither on nor off", "use on or off")),
        }
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_on() { "on" } else { "off" })
    }
}

/// `on`, `off`, or `auto`: the program decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AutoSwitch {
    /// The program decides.
    #[default]
    Auto,
    /// Switched on, or an error.
    On,
    /// Switched off.
    Off,
}

impl FromStr for AutoSwitch {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "auto" => Ok(Self::Auto),
            "on" | "true" => Ok(Self::On),
            "off" | "false" => Ok(Self::Off),
            _ => Err(ValueError::new(
                "switch",
                text,
                "is none of auto, on and off",
                "use auto, on or off",
            )),
        }
    }
}

impl fmt::Display for AutoSwitch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        })
    }
}

/// How many shards (threads, one per CPU) to run: a number, or `auto` for one per CPU the process
/// may run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Shards {
    /// One per CPU the process may run on.
    #[default]
    Auto,
    /// Exactly this many.
    Count(NonZeroU16),
}

impl Shards {
    /// Most shards a daemon runs. With the service connection a path then has 1024 connections,
    /// well under the 4096 an RTRS server accepts (kernel rtrs-srv.c, `rtrs_rdma_connect`).
    pub const MAX: u16 = 1023;

    /// The number of shards to run, 1 to [`Shards::MAX`]. `Auto` asks the system for the CPUs
    /// allowed by affinity and control group, and takes one if that fails.
    #[must_use]
    pub fn count(self) -> usize {
        match self {
            Self::Auto => std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(usize::from(Self::MAX)),
            Self::Count(count) => usize::from(count.get()),
        }
    }
}

impl FromStr for Shards {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        text.parse::<NonZeroU16>()
            .ok()
            .filter(|count| count.get() <= Self::MAX && !text.starts_with('+'))
            .map(Self::Count)
            .ok_or_else(|| {
                ValueError::new(
                    "number of shards",
                    text,
                    "is not usable",
                    format!("use auto or 1 to {}", Self::MAX),
                )
            })
    }
}

impl fmt::Display for Shards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Count(count) => write!(f, "{count}"),
        }
    }
}

impl Serialize for Switch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Switch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "on or off")
    }
}

impl Serialize for AutoSwitch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for AutoSwitch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "auto, on or off")
    }
}

impl Serialize for Shards {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Count(count) => serializer.serialize_u16(count.get()),
        }
    }
}

impl<'de> Deserialize<'de> for Shards {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "auto or a number of shards")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches() {
        for text in ["on", "off"] {
            assert_eq!(text.parse::<Switch>().unwrap().to_string(), text);
            assert_eq!(text.parse::<AutoSwitch>().unwrap().to_string(), text);
        }
        assert_eq!("auto".parse(), Ok(AutoSwitch::Auto));
        assert_eq!("true".parse(), Ok(Switch::On));
        assert_eq!(
            "yes".parse::<Switch>().unwrap_err().to_string(),
            "switch \"yes\" is neither on nor off; use on or off"
        );
        assert_eq!(
            "always".parse::<AutoSwitch>().unwrap_err().to_string(),
            "switch \"always\" is none of auto, on and off; use auto, on or off"
        );
    }

    #[test]
    fn shards() {
        for text in ["auto", "1", "64", "1023"] {
            assert_eq!(text.parse::<Shards>().unwrap().to_string(), text);
        }
        assert_eq!("3".parse::<Shards>().unwrap().count(), 3);
        assert!(Shards::Auto.count() >= 1);
        for text in ["0", "1024", "-1", "+1", "many", ""] {
            assert_eq!(
                text.parse::<Shards>().unwrap_err().to_string(),
                format!("number of shards {text:?} is not usable; use auto or 1 to 1023")
            );
        }
    }
}
