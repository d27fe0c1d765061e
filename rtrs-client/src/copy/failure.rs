//! Errors of requests to either end of a copy.

use std::fmt;
use std::io;

use rtrs_core::status::IoStatus;
use rtrs_core::wire::errno_name;

/// Reason for the failure of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The end does not support the operation.
    Unsupported,
    /// Any other reason, with the name of its errno if it has one.
    Other(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let errno = error.raw_os_error().and_then(|errno| u16::try_from(errno).ok());
        Self::Other(match errno.map(errno_name) {
            Some(name) => format!("{name}, {error}"),
            None => error.to_string(),
        })
    }
}

impl From<IoStatus> for Failure {
    fn from(status: IoStatus) -> Self {
        match status {
            IoStatus::Unsupported => Self::Unsupported,
            status => Self::Other(format!("{}, {status}", errno_name(status.to_errno()))),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported => f.write_str("EOPNOTSUPP, operation not supported"),
            Self::Other(text) => f.write_str(text),
        }
    }
}
