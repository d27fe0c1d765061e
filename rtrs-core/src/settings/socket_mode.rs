//! The mode of a unix socket.
//!
//! Owns [`SocketMode`].

use std::fmt;
use std::str::FromStr;

use super::error::ValueError;

/// Permissions of a Unix socket, in octal: `660`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SocketMode(u32);

impl SocketMode {
    /// Returns the bits, 0 to 0o777.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl FromStr for SocketMode {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let is_octal = (1..=4).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| is_octal && *mode <= 0o777);
        mode.map(Self).ok_or_else(|| {
            ValueError::new("mode", text, "is not an octal mode", "use 0 to 777, as in 660")
        })
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:o}", self.0)
    }
}

crate::text_values! {
    SocketMode, "MODE", "an octal mode such as 660";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        for (text, mode) in [("660", 0o660), ("0600", 0o600), ("0", 0), ("777", 0o777)] {
            let read: SocketMode = text.parse().unwrap();
            assert_eq!(read, SocketMode(mode));
            assert_eq!(read.to_string().parse(), Ok(read));
        }
        for text in ["", "668", "1777", "rw", "-1", "+60", "00660"] {
            let error = text.parse::<SocketMode>().unwrap_err().to_string();
            assert!(error.contains("is not an octal mode; use 0 to 777, as in 660"), "{error}");
        }
    }
}
