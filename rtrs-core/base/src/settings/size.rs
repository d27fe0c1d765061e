//! Sizes in bytes, as people write them: `4096`, `4k`, `256M`, `1T`.
//!
//! Units are powers of 1024. A [`ByteSize`] is a whole number of bytes and prints with the largest
//! unit that divides it, so printing it and parsing the result loses nothing.

use std::fmt;
use std::str::FromStr;

use super::error::ValueError;

/// Unit letters and their powers of two, largest first.
const UNITS: [(&str, u32); 6] = [("E", 60), ("P", 50), ("T", 40), ("G", 30), ("M", 20), ("k", 10)];
const HINT: &str = "use a whole number of bytes, or a number with k, M, G, T or P, as in 128k";

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(u64);

impl ByteSize {
    /// Creates a size of `bytes` bytes.
    #[must_use]
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = ValueError;

    /// Reads digits and an optional unit: `k`, `M`, `G`, `T`, `P`, `E`, each in either case and
    /// with an optional `iB`, or `B` alone for bytes.
    ///
    /// # Errors
    /// [`ValueError`] for anything else, and for sizes of 2^64 bytes or more.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse = |problem: String| ValueError::new("size", text, problem, HINT);
        let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(split);
        if digits.is_empty() {
            return Err(refuse("does not begin with a digit".into()));
        }
        if unit.starts_with(['.', ',']) {
            return Err(refuse("is not a whole number".into()));
        }
        let letter = match unit.len() {
            3 => unit.strip_suffix("iB").or_else(|| unit.strip_suffix("ib")).unwrap_or(unit),
            _ => unit,
        };
        let shift = if letter.is_empty() || letter.eq_ignore_ascii_case("b") {
            0
        } else {
            UNITS
                .iter()
                .find(|(name, _)| name.eq_ignore_ascii_case(letter))
                .map(|(_, shift)| *shift)
                .ok_or_else(|| refuse(format!("has the unknown unit {unit:?}")))?
        };
        digits
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(1 << shift))
            .map(Self)
            .ok_or_else(|| refuse("does not fit in 64 bits".into()))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, shift) in UNITS {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

crate::text_values! {
    ByteSize, "SIZE", "a size such as 128k";
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<u64, String> {
        text.parse().map(ByteSize::bytes).map_err(|e| e.to_string())
    }

    #[test]
    fn units_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("1", 1),
            ("4096", 4096),
            ("512b", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4KiB", 4096),
            ("256M", 256 << 20),
            ("3g", 3 << 30),
            ("1T", 1 << 40),
            ("2P", 2 << 50),
            ("15E", 15 << 60),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn errors_name_the_problem() {
        for (text, part) in [
            ("", "does not begin with a digit"),
            ("k", "does not begin with a digit"),
            ("-1", "does not begin with a digit"),
            (" 4k", "does not begin with a digit"),
            ("1.5G", "is not a whole number"),
            ("12q", "has the unknown unit \"q\""),
            ("4kB", "has the unknown unit \"kB\""),
            ("4 k", "has the unknown unit \" k\""),
            ("4k4", "has the unknown unit \"k4\""),
            ("16E", "does not fit in 64 bits"),
            ("18446744073709551616", "does not fit in 64 bits"),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error, format!("size {text:?} {part}; {HINT}"));
        }
    }

    proptest! {
        #[test]
        fn printed_values_parse_back(bytes in any::<u64>(), shift in 0u32..64) {
            let size = ByteSize::new(bytes << shift);
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn parsing_never_panics(text in "\\PC{0,12}|[0-9]{0,22}[a-zA-Z]{0,4}") {
            let _ = text.parse::<ByteSize>();
        }
    }
}
