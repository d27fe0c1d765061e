//! Errors of `rds` commands.

use std::error::Error as StdError;

use rtrs_base::settings::{CommandError, ErrorClass, ExitStatus};

/// An error of this program, with its kind and cause.
pub type Error = CommandError<ErrorKind>;

/// Kind of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Invalid flags or keys: exit code 2.
    Usage,
    /// Configuration file with invalid contents: exit code 2.
    Config,
    /// Unreadable configuration file.
    ConfigFile,
    /// Node that cannot start or is not running.
    Node,
    /// Socket path that is in use, or directory owned by another user.
    InUse,
    /// Messages that were lost, late, out of order or altered.
    Messages,
    /// Other system errors.
    System,
}

impl ErrorClass for ErrorKind {
    const USAGE: Self = Self::Usage;
    const CONFIG: Self = Self::Config;
    const CONFIG_FILE: Self = Self::ConfigFile;
    const IN_USE: Self = Self::InUse;
    const SYSTEM: Self = Self::System;
    const EXIT_STATUSES: &'static [ExitStatus] =
        &[ExitStatus::SUCCESS, ExitStatus::FAILURE, ExitStatus::USAGE];

    fn exit_status(self) -> ExitStatus {
        match self {
            Self::Usage | Self::Config => ExitStatus::USAGE,
            _ => ExitStatus::FAILURE,
        }
    }
}

/// Returns a function that adds the failed operation to an error, for use in `map_err`.
pub(crate) fn failed<E: StdError + Send + Sync + 'static>(
    kind: ErrorKind,
    what: impl Into<String>,
) -> impl FnOnce(E) -> Error {
    move |source| Error::with_source(kind, what, source)
}

/// Returns a function that converts an error to this kind, with its text, for use in `map_err`.
pub(crate) fn as_kind<E: StdError>(kind: ErrorKind) -> impl FnOnce(E) -> Error {
    move |error| Error::new(kind, error.to_string())
}
