//! Errors that prevent the server from starting.
//!
//! Defines [`ErrorKind`], which determines the exit code of the binary. The error itself, with its
//! text and its chain of causes, is [`CommandError`].

use std::error::Error as StdError;

use rtrs_core::settings::{CommandError, ErrorClass, ExitStatus};

/// An error of this program, with its kind and cause.
pub type Error = CommandError<ErrorKind>;

/// Kind of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Invalid flags or keys: exit code 2.
    Usage,
    /// A configuration file with invalid contents: exit code 2.
    Config,
    /// A configuration file that cannot be read.
    ConfigFile,
    /// An export whose target cannot be served.
    Export,
    /// A portal on which the server cannot listen.
    Listen,
    /// A control socket that is in use, or a run directory that belongs to another user.
    InUse,
    /// A failed system call at run time.
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

/// Adds a description of the failed operation to an error, for use in `map_err`.
pub(crate) fn failed<E: StdError + Send + Sync + 'static>(
    kind: ErrorKind,
    what: impl Into<String>,
) -> impl FnOnce(E) -> Error {
    move |source| Error::with_source(kind, what, source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_follow_the_error_kind() {
        for (kind, code) in [
            (ErrorKind::Usage, 2),
            (ErrorKind::Config, 2),
            (ErrorKind::ConfigFile, 1),
            (ErrorKind::System, 1),
        ] {
            assert_eq!(Error::new(kind, "x").exit_code(), code);
        }
    }
}
