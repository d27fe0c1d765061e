//! Times as people write them: `500ms`, `10s`, `1m`.
//!
//! Owns [`Time`]: a whole number of microseconds within a range, printed with the largest unit that
//! divides it. A number without a unit is an error.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::declare::Value;
use super::error::ValueError;
use super::file::deserialize_text;

/// One millisecond, in the unit of [`Time`]'s bounds.
pub const MILLISECOND: u64 = 1000;
/// One second, in the unit of [`Time`]'s bounds.
pub const SECOND: u64 = 1000 * MILLISECOND;
/// One minute, in the unit of [`Time`]'s bounds.
pub const MINUTE: u64 = 60 * SECOND;
/// One hour, in the unit of [`Time`]'s bounds.
pub const HOUR: u64 = 60 * MINUTE;

const UNITS: [(&str, u64); 5] =
    [("h", HOUR), ("m", MINUTE), ("s", SECOND), ("ms", MILLISECOND), ("us", 1)];

/// Duration from `MIN` to `MAX`, both in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time<const MIN: u64 = 0, const MAX: u64 = { u64::MAX }>(u64);

impl<const MIN: u64, const MAX: u64> Time<MIN, MAX> {
    /// Creates the time in whole microseconds, clamped to the range.
    #[must_use]
    pub fn new(time: Duration) -> Self {
        Self(u64::try_from(time.as_micros()).unwrap_or(u64::MAX).clamp(MIN, MAX))
    }

    /// Returns the number of whole milliseconds.
    #[must_use]
    pub const fn millis(self) -> u64 {
        self.0 / MILLISECOND
    }

    /// Returns the duration.
    #[must_use]
    pub const fn get(self) -> Duration {
        Duration::from_micros(self.0)
    }
}

impl<const MIN: u64, const MAX: u64> FromStr for Time<MIN, MAX> {
    type Err = ValueError;

    /// Reads digits and one of `us`, `ms`, `s`, `m`, `h`; zero needs no unit.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse = |problem: String| {
            let hint = "use a whole number with us, ms, s, m or h, as in 500ms";
            Err(ValueError::new("time", text, problem, hint))
        };
        let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(split);
        let factor = match unit {
            _ if digits.is_empty() => return refuse("does not begin with a digit".into()),
            _ if unit.starts_with(['.', ',']) => return refuse("is not a whole number".into()),
            "" if digits.bytes().all(|byte| byte == b'0') => 1,
            "" => {
                let hint = format!("write {digits}s or {digits}ms");
                return Err(ValueError::new("time", text, "has no unit", hint));
            }
            _ => match UNITS.iter().find(|(name, _)| *name == unit) {
                Some((_, factor)) => *factor,
                None => return refuse(format!("has the unknown unit {unit:?}")),
            },
        };
        match digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)) {
            Some(micros) if (MIN..=MAX).contains(&micros) => Ok(Self(micros)),
            _ => {
                let hint = format!("use {}", Self::range());
                Err(ValueError::new("time", text, "is out of range", hint))
            }
        }
    }
}

impl<const MIN: u64, const MAX: u64> fmt::Display for Time<MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, factor) in UNITS {
            if self.0 != 0 && self.0.is_multiple_of(factor) {
                return write!(f, "{}{unit}", self.0 / factor);
            }
        }
        write!(f, "0s")
    }
}

impl<const MIN: u64, const MAX: u64> Serialize for Time<MIN, MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de, const MIN: u64, const MAX: u64> Deserialize<'de> for Time<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a time such as 500ms")
    }
}

impl<const MIN: u64, const MAX: u64> Value for Time<MIN, MAX> {
    const NAME: &'static str = "TIME";

    fn range() -> String {
        match (MIN, MAX) {
            (0, u64::MAX) => String::new(),
            _ => format!("{} to {}", Self(MIN), Self(MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_parsed() {
        for (text, micros) in [
            ("0", 0),
            ("0ms", 0),
            ("7us", 7),
            ("500ms", 500_000),
            ("10s", 10_000_000),
            ("1m", 60_000_000),
            ("2h", 7_200_000_000),
        ] {
            let time = text.parse::<Time>().unwrap();
            assert_eq!(time.get(), Duration::from_micros(micros), "{text}");
        }
    }

    #[test]
    fn errors_name_the_problem() {
        for (text, expected) in [
            ("", "does not begin with a digit; use a whole number with us, ms, s, m or h"),
            ("ms", "does not begin with a digit"),
            ("-5ms", "does not begin with a digit"),
            ("0.5s", "is not a whole number"),
            ("30", "has no unit; write 30s or 30ms"),
            ("10ns", "has the unknown unit \"ns\""),
            ("10S", "has the unknown unit \"S\""),
            ("10 s", "has the unknown unit \" s\""),
            ("18446744073709551615s", "is out of range"),
            ("9ms", "is out of range; use 10ms to 1m"),
            ("61s", "is out of range; use 10ms to 1m"),
        ] {
            let error = text.parse::<Time<{ 10 * MILLISECOND }, { MINUTE }>>().unwrap_err();
            let error = error.to_string();
            assert!(error.starts_with(&format!("time {text:?} {expected}")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn values_print_as_they_are_read(
            number in 0u64..1_000_000,
            factor in prop::sample::select(vec![1u64, 10, 1000, 1_000_000, 3_600_000_000]),
        ) {
            let time = Time::<0, { u64::MAX }>::new(Duration::from_micros(number * factor));
            prop_assert_eq!(time.to_string().parse(), Ok(time));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,12}|[0-9]{0,22}[a-z]{0,3}") {
            let _ = text.parse::<Time>();
        }
    }
}
