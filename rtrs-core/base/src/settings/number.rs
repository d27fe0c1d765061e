//! Numbers in a range, and values that the user may leave to the program.
//!
//! Defines [`Int`], [`Auto`] and [`Shards`].

use std::fmt::{self, Display};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::declare::Value;
use super::error::ValueError;
use super::file::deserialize_text;

/// Whole number from `MIN` to `MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Int<T, const MIN: u64, const MAX: u64>(T);

impl<T: Copy, const MIN: u64, const MAX: u64> Int<T, MIN, MAX> {
    /// Returns the number.
    pub const fn get(self) -> T {
        self.0
    }
}

impl<T: TryFrom<u64>, const MIN: u64, const MAX: u64> FromStr for Int<T, MIN, MAX> {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        let number: Option<u64> = text.parse().ok().filter(|_| digits);
        let problem = match number {
            Some(number) if (MIN..=MAX).contains(&number) => match T::try_from(number) {
                Ok(number) => return Ok(Self(number)),
                Err(_) => "is out of range",
            },
            Some(_) => "is out of range",
            None => "is not a whole number",
        };
        Err(ValueError::new("number", text, problem, format!("use {MIN} to {MAX}")))
    }
}

impl<T: Display, const MIN: u64, const MAX: u64> Display for Int<T, MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: Serialize, const MIN: u64, const MAX: u64> Serialize for Int<T, MIN, MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de, T: TryFrom<u64>, const MIN: u64, const MAX: u64> Deserialize<'de> for Int<T, MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a whole number")
    }
}

impl<T, const MIN: u64, const MAX: u64> Value for Int<T, MIN, MAX>
where
    T: TryFrom<u64> + Serialize + Clone + Send + Sync + 'static,
{
    const NAME: &'static str = "N";

    fn range() -> String {
        format!("{MIN} to {MAX}")
    }
}

/// A value, or `auto` to let the program decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Auto<T> {
    /// The program decides.
    Auto,
    /// This value.
    Is(T),
}

impl<T> Auto<T> {
    /// Converts `&Auto<T>` to `Auto<&T>`.
    pub const fn as_ref(&self) -> Auto<&T> {
        match self {
            Self::Auto => Auto::Auto,
            Self::Is(value) => Auto::Is(value),
        }
    }

    /// Returns the value, unless the program decides.
    pub fn get(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Is(value) => Some(value),
        }
    }
}

impl<T: FromStr<Err = ValueError>> FromStr for Auto<T> {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().map(Self::Is).map_err(|error: ValueError| error.or("auto")),
        }
    }
}

impl<T: Display> Display for Auto<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Is(value) => value.fmt(f),
        }
    }
}

impl<T: Serialize> Serialize for Auto<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Is(value) => value.serialize(serializer),
        }
    }
}

impl<'de, T: FromStr<Err = ValueError>> Deserialize<'de> for Auto<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "auto or a value")
    }
}

impl<T: Value + FromStr<Err = ValueError>> Value for Auto<T> {
    const NAME: &'static str = T::NAME;

    fn range() -> String {
        match T::range() {
            range if range.is_empty() => range,
            range => format!("auto or {range}"),
        }
    }
}

/// Number of shards (threads, one per CPU): a number, or `auto` for one per CPU that the process
/// may run on. With the service connection, a path has at most 1024 connections, well below the
/// 4096 that an RTRS server accepts (kernel rtrs-srv.c, `rtrs_rdma_connect`).
pub type Shards = Auto<Int<u16, 1, 1023>>;

impl Shards {
    /// Exactly one shard.
    pub const ONE: Self = Self::Is(Int(1));

    /// Returns the number of shards, 1 to 1023. `Auto` means the number of CPUs allowed by affinity
    /// and control group, or one if the system does not report it.
    #[must_use]
    pub fn count(self) -> u16 {
        match self {
            Self::Auto => std::thread::available_parallelism()
                .map_or(1, |cpus| u16::try_from(cpus.get()).unwrap_or(u16::MAX).min(1023)),
            Self::Is(count) => count.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_ranges_are_enforced() {
        type Few = Int<u16, 2, 9>;
        assert_eq!(("2".parse::<Few>().unwrap().get(), Few::range().as_str()), (2, "2 to 9"));
        for (text, problem) in [
            ("1", "is out of range"),
            ("10", "is out of range"),
            ("99999999999999999999", "is not a whole number"),
            ("", "is not a whole number"),
            ("-3", "is not a whole number"),
            ("+3", "is not a whole number"),
            ("many", "is not a whole number"),
        ] {
            let error = text.parse::<Few>().unwrap_err().to_string();
            assert_eq!(error, format!("number {text:?} {problem}; use 2 to 9"));
        }
        assert!("300".parse::<Int<u8, 0, 1000>>().is_err());
    }

    #[test]
    fn shards() {
        for text in ["auto", "1", "64", "1023"] {
            assert_eq!(text.parse::<Shards>().unwrap().to_string(), text);
        }
        assert_eq!("3".parse::<Shards>().unwrap().count(), 3);
        assert!(Shards::Auto.count() >= 1);
        assert_eq!(Shards::range(), "auto or 1 to 1023");
        for text in ["0", "1024", "many", ""] {
            assert!(text.parse::<Shards>().is_err(), "{text}");
        }
    }
}
