//! Errors of the library and of requests.

use std::fmt;
use std::io;

use rtrs_client::ErrorKind as Cause;
use rtrs_core::status::IoStatus;

/// Kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting or URI is invalid.
    Settings,
    /// No path opens the volume.
    Path,
    /// The system refused an operation.
    System,
    /// The volume belongs to another process, from which this process was forked.
    Forked,
    /// The volume is closed, or its session has ended.
    Closed,
    /// The queue is full: poll it for completions.
    Full,
    /// The request is invalid: it is too long or has too many buffers.
    Invalid,
    /// A blocking call's request failed with this error.
    Io(IoError),
    /// A blocking call's request did not complete in time. It may still take effect.
    TimedOut,
    /// One of the library's threads did not answer in time.
    Busy,
}

/// Error returned by a call.
///
/// ```
/// let error = rtrs::Builder::new("vol0").open().unwrap_err();
/// assert_eq!(error.kind(), rtrs::ErrorKind::Settings);
/// assert!(error.to_string().contains("no path to the server"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    text: String,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}

impl From<rtrs_client::Error> for Error {
    fn from(error: rtrs_client::Error) -> Self {
        let kind = match error.kind() {
            Cause::Usage | Cause::Config => ErrorKind::Settings,
            Cause::Path => ErrorKind::Path,
            _ => ErrorKind::System,
        };
        Self::new(kind, error.chain().to_string())
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match error.kind {
            ErrorKind::Io(failed) => return failed.into(),
            ErrorKind::Settings | ErrorKind::Invalid => io::ErrorKind::InvalidInput,
            ErrorKind::Path => io::ErrorKind::NotConnected,
            ErrorKind::Closed => io::ErrorKind::BrokenPipe,
            ErrorKind::Full | ErrorKind::Busy => io::ErrorKind::WouldBlock,
            ErrorKind::TimedOut => io::ErrorKind::TimedOut,
            ErrorKind::System | ErrorKind::Forked => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

/// Reason why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IoError(IoStatus);

impl IoError {
    pub(crate) fn check(status: IoStatus) -> Result<(), Self> {
        if status.is_ok() { Ok(()) } else { Err(Self(status)) }
    }

    /// Returns the positive Linux errno, such as 5 (EIO) or 28 (ENOSPC).
    #[must_use]
    pub fn errno(self) -> i32 {
        self.0.to_errno().into()
    }

    /// Returns true if the request certainly had no effect.
    #[must_use]
    pub fn is_refusal(self) -> bool {
        self.0.is_refusal()
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for IoError {}

impl From<IoError> for io::Error {
    fn from(error: IoError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_requests_keep_their_errno() {
        let failed = IoError::check(IoStatus::NoSpace).unwrap_err();
        let error = io::Error::from(Error::new(ErrorKind::Io(failed), "cannot write"));
        assert_eq!((error.raw_os_error(), failed.errno()), (Some(28), 28));
        assert_eq!(IoError::check(IoStatus::Ok), Ok(()));
        let error = io::Error::from(Error::new(ErrorKind::Closed, "closed"));
        assert_eq!((error.kind(), error.to_string()), (io::ErrorKind::BrokenPipe, "closed".into()));
    }
}
