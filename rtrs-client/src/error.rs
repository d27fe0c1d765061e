//! Errors that end a command of the client.
//!
//! This module defines [`ErrorKind`], which determines the exit code of the binary. The error
//! itself, with its text and its chain of causes, is [`CommandError`].

use std::io;

use rtrs_core::settings::{CommandError, ErrorClass, ExitStatus};

/// Error of this program, with its kind and cause.
pub type Error = CommandError<ErrorKind>;

const DIFFERS: ExitStatus = ExitStatus {
    code: 1,
    meaning: "the sessions differ from the file, or serve no IO",
    more: "",
    command: Some("diff"),
};
const NOT_COMPARED: ExitStatus = ExitStatus {
    code: 2,
    meaning: "the sessions were not compared with the file",
    more: "This includes every failure, even a file that cannot be read.",
    command: Some("diff"),
};
const UNEQUAL: ExitStatus =
    ExitStatus { code: 1, meaning: "the contents differ", more: "", command: Some("compare") };
const NO_COMPARISON: ExitStatus = ExitStatus {
    code: 2,
    meaning: "the contents were not compared",
    more: "This includes every failure, even a file or volume that cannot be opened.",
    command: Some("compare"),
};
const CHANGED: ExitStatus = ExitStatus {
    code: 3,
    meaning: "with --detailed-exitcode: sessions were changed, or with --dry-run would be",
    more: "If a session fails, the exit code is that of the failure, even after changes.",
    command: Some("apply"),
};
const NO_SERVICE: ExitStatus =
    ExitStatus { code: 3, meaning: "the session serves no IO", more: "", command: Some("status") };

/// Kind of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Flags or keys that are invalid on their own: exit code 2.
    Usage,
    /// A configuration file with invalid contents: exit code 2.
    Config,
    /// A configuration file that cannot be read.
    ConfigFile,
    /// A socket path that is in use, or a run directory that other users own or can write to.
    InUse,
    /// A path whose host has no address, or that cannot connect.
    Path,
    /// A session name that no session has.
    NotAttached,
    /// IO was still running at the time limit.
    Abandoned,
    /// The running sessions differ from those in a file.
    Differs,
    /// The running sessions could not be compared with those in a file: exit code 2.
    NotCompared,
    /// Two volumes or files have different contents.
    Unequal,
    /// Two volumes or files could not be compared: exit code 2.
    NoComparison,
    /// Sessions were changed as requested, which is not a failure: exit code 3.
    Changed,
    /// The session exists but serves no IO: exit code 3.
    NoService,
    /// Any other system error.
    System,
}

impl ErrorClass for ErrorKind {
    const USAGE: Self = Self::Usage;
    const CONFIG: Self = Self::Config;
    const CONFIG_FILE: Self = Self::ConfigFile;
    const IN_USE: Self = Self::InUse;
    const SYSTEM: Self = Self::System;
    const EXIT_STATUSES: &'static [ExitStatus] = &[
        ExitStatus::SUCCESS,
        ExitStatus::FAILURE,
        DIFFERS,
        UNEQUAL,
        ExitStatus::USAGE,
        NOT_COMPARED,
        NO_COMPARISON,
        CHANGED,
        NO_SERVICE,
    ];

    fn exit_status(self) -> ExitStatus {
        match self {
            Self::Usage | Self::Config => ExitStatus::USAGE,
            Self::Differs => DIFFERS,
            Self::NotCompared => NOT_COMPARED,
            Self::Unequal => UNEQUAL,
            Self::NoComparison => NO_COMPARISON,
            Self::Changed => CHANGED,
            Self::NoService => NO_SERVICE,
            _ => ExitStatus::FAILURE,
        }
    }
}

pub(crate) fn usage(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, text)
}

/// Adds a description to a system error, for use in `map_err`.
pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::with_source(ErrorKind::System, what, source)
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
            (ErrorKind::Differs, 1),
            (ErrorKind::NotCompared, 2),
            (ErrorKind::Unequal, 1),
            (ErrorKind::NoComparison, 2),
            (ErrorKind::Changed, 3),
            (ErrorKind::NoService, 3),
            (ErrorKind::System, 1),
        ] {
            assert_eq!(Error::new(kind, "x").exit_code(), code);
        }
    }
}
