//! The mode of a Unix socket.
//!
//! Owns [`SocketMode`].

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::{Serialize, Serializer};

use super::declare::Value;
use super::error::ValueError;

/// Read and write permission of the owner.
const OWNER: u32 = 0o600;
/// Modes that a file may also give as bits. Their decimal forms do not look like octal modes; the
/// decimal form of 0o670 (440) would, so 0o670 is left out.
const AS_BITS: [u32; 12] =
    [0o600, 0o640, 0o644, 0o660, 0o664, 0o666, 0o700, 0o750, 0o755, 0o770, 0o775, 0o777];

/// Permissions of a Unix socket, in octal: `660`. The owner can read and write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SocketMode(u32);

impl SocketMode {
    /// Returns the bits, 0o600 to 0o777.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the mode for an integer in a YAML file: 660 for `660`, and for `0o660`, which YAML
    /// reads as 432.
    fn from_integer(value: u64) -> Result<Self, ValueError> {
        value.to_string().parse::<Self>().or_else(|error| {
            let bits = u32::try_from(value).ok().filter(|bits| AS_BITS.contains(bits));
            bits.map(Self).ok_or(error)
        })
    }
}

impl FromStr for SocketMode {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let digits = text.strip_prefix("0o").unwrap_or(text);
        let is_octal =
            (1..=4).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
        match u32::from_str_radix(digits, 8).ok().filter(|mode| is_octal && *mode <= 0o777) {
            Some(mode) if mode & OWNER == OWNER => Ok(Self(mode)),
            Some(_) => {
                let problem = "does not let the owner read and write";
                Err(ValueError::new("mode", text, problem, "use 600, 660 or 666"))
            }
            None => Err(ValueError::new(
                "mode",
                text,
                "is not an octal mode",
                "use 600 to 777, as in 660",
            )),
        }
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:o}", self.0)
    }
}

impl Value for SocketMode {
    const NAME: &'static str = "MODE";
}

impl Serialize for SocketMode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SocketMode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ModeVisitor)
    }
}

struct ModeVisitor;

impl Visitor<'_> for ModeVisitor {
    type Value = SocketMode;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an octal mode such as 660")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<SocketMode, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<SocketMode, E> {
        SocketMode::from_integer(value).map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        for (text, mode) in
            [("660", 0o660), ("0600", 0o600), ("0o666", 0o666), ("777", 0o777), ("622", 0o622)]
        {
            let read: SocketMode = text.parse().unwrap();
            assert_eq!(read, SocketMode(mode));
            assert_eq!(read.to_string().parse(), Ok(read));
        }
        for text in ["", "668", "1777", "rw", "-1", "+60", "00660", "0o", "0x660", "o660"] {
            let error = text.parse::<SocketMode>().unwrap_err().to_string();
            assert!(error.contains("is not an octal mode; use 600 to 777, as in 660"), "{error}");
        }
        for text in ["0", "440", "040", "0o440", "066", "432", "577"] {
            let error = text.parse::<SocketMode>().unwrap_err().to_string();
            let expected = "does not let the owner read and write; use 600, 660 or 666";
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn yaml_modes_are_digits_or_octal_integers() {
        let read = |yaml: &str| serde_yaml::from_str::<SocketMode>(yaml);
        for (yaml, mode) in [
            ("660", 0o660),
            ("0660", 0o660),
            ("'0o660'", 0o660),
            ("0o660", 0o660),
            ("0o600", 0o600),
            ("0o777", 0o777),
            ("432", 0o660),
            ("384", 0o600),
        ] {
            assert_eq!(read(yaml).unwrap(), SocketMode(mode), "{yaml}");
        }
        for bits in AS_BITS {
            assert_eq!(read(&format!("{bits:#o}")).unwrap(), SocketMode(bits));
        }
        for yaml in ["440", "040", "400", "444", "500", "0o066", "0", "'432'"] {
            let error = read(yaml).unwrap_err().to_string();
            assert!(error.contains("does not let the owner read and write"), "{yaml}: {error}");
        }
        for yaml in ["0o440", "-1", "1000", "660.5", "true", "[660]", "99999999999"] {
            assert!(read(yaml).is_err(), "{yaml}");
        }
    }
}
