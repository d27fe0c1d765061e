//! Destination of the audit log.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use rtrs_core::settings::{ValueError, text_values};

const JOURNALD: &str = "journald";

/// Destination of the audit log: an absolute path, or `journald`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuditLog {
    /// The systemd journal.
    Journal,
    /// A file.
    File(PathBuf),
}

impl FromStr for AuditLog {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            JOURNALD => Ok(Self::Journal),
            path if path.starts_with('/') && !path.contains('\0') => Ok(Self::File(path.into())),
            _ => Err(ValueError::new(
                "audit log",
                text,
                "is not an absolute path",
                "write the path of a file, as in /var/log/rtrs/audit.log, or journald",
            )),
        }
    }
}

impl fmt::Display for AuditLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Journal => f.write_str(JOURNALD),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

text_values! {
    AuditLog, "FILE|journald", "an absolute path, or journald";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_a_path_or_the_journal() {
        for text in ["journald", "/var/log/audit"] {
            assert_eq!(text.parse::<AuditLog>().unwrap().to_string(), text);
        }
        for text in ["", "audit.log", "/a\0b"] {
            text.parse::<AuditLog>().unwrap_err();
        }
    }
}
