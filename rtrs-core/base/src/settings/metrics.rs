//! Address of the metrics endpoint.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use super::address::{parse_address, write_address};
use super::error::ValueError;

/// Address of the metrics endpoint: `ADDR:PORT` or `unix:PATH`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum MetricsAddress {
    /// A TCP address; with port 0, the system chooses a port.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

impl FromStr for MetricsAddress {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refused = |problem: &'static str| {
            let hint = "use ADDR:PORT, as in 127.0.0.1:9823 or [::]:9823, or unix:/PATH";
            ValueError::new("address", text, problem, hint)
        };
        match text.strip_prefix("unix:") {
            Some(path) if !path.starts_with('/') => Err(refused("lacks an absolute path")),
            Some(path) if path.contains('\0') => Err(refused("contains a NUL")),
            Some(path) if path.len() > 107 => Err(refused("is too long for a unix socket")),
            Some(path) => Ok(Self::Unix(path.into())),
            None => parse_address(text)
                .map(Self::Tcp)
                .ok_or_else(|| refused("is not a numeric address with a port")),
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write_address(address, f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

crate::text_values! {
    MetricsAddress, "ADDRESS", "an address such as 127.0.0.1:9823 or unix:/PATH";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_paths_are_parsed() {
        for text in ["127.0.0.1:9823", "[::]:0", "[fe80::1%lo]:9823", "unix:/run/m.sock"] {
            assert_eq!(text.parse::<MetricsAddress>().unwrap().to_string(), text);
        }
        for (text, problem) in [
            ("", "is not a numeric address"),
            ("9823", "is not a numeric address"),
            ("localhost:9823", "is not a numeric address"),
            ("127.0.0.1", "is not a numeric address"),
            ("127.0.0.1:65536", "is not a numeric address"),
            ("unix:", "lacks an absolute path"),
            ("unix:m.sock", "lacks an absolute path"),
            ("unix:/a\0b", "contains a NUL"),
            (&format!("unix:/{}", "x".repeat(107)), "is too long for a unix socket"),
        ] {
            let error = text.parse::<MetricsAddress>().unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("unix:/PATH"), "{error}");
        }
    }
}
