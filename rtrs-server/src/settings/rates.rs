//! Values of the rate limits of an export.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use rtrs_core::settings::{ByteSize, Value, ValueError, deserialize_text};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// No limit; `0` is accepted too.
const NONE: &str = "none";
/// Valid limits in requests per second. Up to the maximum, rounding the time per request to whole
/// nanoseconds changes it by less than one percent.
const REQUESTS: RangeInclusive<u64> = 1..=10_000_000;
/// Valid limits in bytes per second. Below the minimum, a single request would take many
/// seconds.
const BYTES: RangeInclusive<u64> = 64 << 10..=1 << 40;

/// Maximum number of requests per second, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestRate(Option<u64>);

/// Maximum number of bytes per second, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByteRate(Option<u64>);

impl RequestRate {
    /// Returns the limit in requests per second.
    #[must_use]
    pub const fn get(self) -> Option<u64> {
        self.0
    }
}

impl ByteRate {
    /// Returns the limit in bytes per second.
    #[must_use]
    pub const fn get(self) -> Option<u64> {
        self.0
    }
}

impl FromStr for RequestRate {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let hint = format!("use {}", Self::range());
        let refuse = |problem| Err(ValueError::new("rate", text, problem, hint));
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse::<u64>() {
            _ if text == NONE => Ok(Self(None)),
            Ok(_) if !digits => refuse("is not a whole number of requests per second"),
            Ok(0) => Ok(Self(None)),
            Ok(rate) if REQUESTS.contains(&rate) => Ok(Self(Some(rate))),
            Ok(_) => refuse("is out of range"),
            Err(_) => refuse("is not a whole number of requests per second"),
        }
    }
}

impl FromStr for ByteRate {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let hint = format!("use {}, in bytes per second", Self::range());
        let refuse = |problem: String| Err(ValueError::new("rate", text, problem, hint));
        match text.parse::<ByteSize>().map(ByteSize::bytes) {
            _ if text == NONE => Ok(Self(None)),
            Ok(0) => Ok(Self(None)),
            Ok(rate) if BYTES.contains(&rate) => Ok(Self(Some(rate))),
            Ok(_) => refuse("is out of range".to_owned()),
            Err(error) => refuse(format!("is refused: {error}")),
        }
    }
}

impl fmt::Display for RequestRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(rate) => rate.fmt(f),
            None => f.write_str(NONE),
        }
    }
}

impl fmt::Display for ByteRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(rate) => ByteSize::new(rate).fmt(f),
            None => f.write_str(NONE),
        }
    }
}

impl Serialize for RequestRate {
    /// Writes a number, which needs no quotes in a file, or `none`.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(rate) => serializer.serialize_u64(rate),
            None => serializer.serialize_str(NONE),
        }
    }
}

impl<'de> Deserialize<'de> for RequestRate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a whole number of requests per second, or none")
    }
}

impl Value for RequestRate {
    const NAME: &'static str = "RATE";

    fn range() -> String {
        format!("{NONE} or {} to {}", REQUESTS.start(), REQUESTS.end())
    }
}

rtrs_core::text_values! {
    serde ByteRate, "a size such as 10M per second, or none"
}

impl Value for ByteRate {
    const NAME: &'static str = "RATE";

    fn range() -> String {
        let [min, max] = [*BYTES.start(), *BYTES.end()].map(ByteSize::new);
        format!("{NONE} or {min} to {max}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_print_as_they_are_read() {
        for (text, rate, printed) in [
            ("none", None, "none"),
            ("0", None, "none"),
            ("1", Some(1), "1"),
            ("10000000", Some(10_000_000), "10000000"),
        ] {
            let read: RequestRate = text.parse().unwrap();
            assert_eq!((read.get(), read.to_string().as_str()), (rate, printed));
            let yaml = serde_yaml::to_string(&read).unwrap();
            assert_eq!((yaml.trim(), serde_yaml::from_str(&yaml).ok()), (printed, Some(read)));
        }
        for (text, rate, printed) in [
            ("none", None, "none"),
            ("0", None, "none"),
            ("64k", Some(64 << 10), "64k"),
            ("10M", Some(10 << 20), "10M"),
            ("1T", Some(1 << 40), "1T"),
            ("1000000", Some(1_000_000), "1000000"),
        ] {
            let read: ByteRate = text.parse().unwrap();
            assert_eq!((read.get(), read.to_string().as_str()), (rate, printed));
            let yaml = serde_yaml::to_string(&read).unwrap();
            assert_eq!(serde_yaml::from_str::<ByteRate>(&yaml).unwrap(), read, "{yaml}");
        }
    }

    #[test]
    fn errors_name_the_value_and_the_range() {
        for (text, problem) in [
            ("10000001", "is out of range"),
            ("+1", "is not a whole number of requests per second"),
            ("-1", "is not a whole number of requests per second"),
            ("2k", "is not a whole number of requests per second"),
            ("", "is not a whole number of requests per second"),
            ("off", "is not a whole number of requests per second"),
        ] {
            let error = text.parse::<RequestRate>().unwrap_err().to_string();
            assert_eq!(error, format!("rate {text:?} {problem}; use none or 1 to 10000000"));
        }
        for (text, problem) in [
            ("10", "is out of range"),
            ("2T", "is out of range"),
            ("fast", "is refused: size \"fast\" does not begin with a digit"),
            ("10MB/s", "is refused: size \"10MB/s\" has the unknown unit"),
        ] {
            let error = text.parse::<ByteRate>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("rate {text:?} {problem}")), "{error}");
            assert!(error.ends_with("; use none or 64k to 1T, in bytes per second"), "{error}");
        }
    }
}
