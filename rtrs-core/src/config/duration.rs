//! Times as people write them: `500ms`, `10s`, `1m`.
//!
//! Owns [`Millis`]. A time is a whole number of milliseconds and prints with the largest unit that
//! divides it. What a number without a unit means is the caller's choice ([`TimeUnit`]), since
//! `--runtime 10` means seconds and `delay=10` milliseconds.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::ValueError;
use super::file::deserialize_text;

const UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];
const REMEDY: &str = "use a whole number with ms, s, m or h, as in 500ms";

/// What a number without a unit stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeUnit {
    /// Thousandths of a second.
    Milliseconds,
    /// Seconds.
    Seconds,
}

/// A span of time in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Millis(u64);

impl Millis {
    /// A span of `millis` milliseconds.
    #[must_use]
    pub const fn new(millis: u64) -> Self {
        Self(millis)
    }

    /// The span in milliseconds.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The span as a [`Duration`].
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_millis(self.0)
    }

    /// Reads a span; a number without a unit is in `bare`.
    ///
    /// # Errors
    /// [`ValueError`] for anything but digits and one of `ms`, `s`, `m`, `h`, and on overflow.
    pub fn parse(text: &str, bare: TimeUnit) -> Result<Self, ValueError> {
        let refuse = |problem: String| ValueError::new("time", text, problem, REMEDY);
        let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(split);
        if digits.is_empty() {
            return Err(refuse("does not begin with a digit".into()));
        }
        if unit.starts_with(['.', ',']) {
            return Err(refuse("is not a whole number".into()));
        }
        let factor = match (unit, bare) {
            ("", TimeUnit::Milliseconds) => 1,
            ("", TimeUnit::Seconds) => 1000,
            _ => UNITS
                .iter()
                .find(|(name, _)| *name == unit)
                .map(|(_, factor)| *factor)
                .ok_or_else(|| refuse(format!("has the unknown unit {unit:?}")))?,
        };
        digits
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(factor))
            .map(Self)
            .ok_or_else(|| refuse("does not fit in 64 bits of milliseconds".into()))
    }
}

impl FromStr for Millis {
    type Err = ValueError;

    /// [`Millis::parse`] with bare numbers in milliseconds.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        Self::parse(text, TimeUnit::Milliseconds)
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, factor) in UNITS {
            if self.0 != 0 && self.0.is_multiple_of(factor) {
                return write!(f, "{}{unit}", self.0 / factor);
            }
        }
        write!(f, "0ms")
    }
}

impl Serialize for Millis {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Millis {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a time such as 500ms")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units() {
        for (text, millis) in
            [("0", 0), ("7", 7), ("500ms", 500), ("10s", 10_000), ("1m", 60_000), ("2h", 7_200_000)]
        {
            assert_eq!(text.parse(), Ok(Millis::new(millis)), "{text}");
        }
        assert_eq!(Millis::parse("10", TimeUnit::Seconds), Ok(Millis::new(10_000)));
        assert_eq!(Millis::parse("10ms", TimeUnit::Seconds), Ok(Millis::new(10)));
    }

    #[test]
    fn errors_say_what_is_wrong() {
        for (text, part) in [
            ("", "does not begin with a digit"),
            ("ms", "does not begin with a digit"),
            ("-5ms", "does not begin with a digit"),
            ("0.5s", "is not a whole number"),
            ("10us", "has the unknown unit \"us\""),
            ("10S", "has the unknown unit \"S\""),
            ("10 s", "has the unknown unit \" s\""),
            ("18446744073709551615s", "does not fit in 64 bits of milliseconds"),
        ] {
            let error = text.parse::<Millis>().unwrap_err().to_string();
            assert_eq!(error, format!("time {text:?} {part}; {REMEDY}"));
        }
    }

    proptest! {
        #[test]
        fn prints_what_it_reads(
            number in 0u64..1_000_000,
            factor in prop::sample::select(vec![1u64, 10, 1000, 60_000, 3_600_000]),
        ) {
            let span = Millis::new(number * factor);
            prop_assert_eq!(span.to_string().parse(), Ok(span));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,12}|[0-9]{0,22}[a-z]{0,3}") {
            let _ = text.parse::<Millis>();
        }
    }
}
