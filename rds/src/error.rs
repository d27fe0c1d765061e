//! What ends a command of `rds`.

use std::error::Error as StdError;

use rtrs_core::settings::{CommandError, ErrorClass};

/// An error of this program, with its kind and cause.
pub type Error = CommandError<ErrorKind>;

/// What kind of thing went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Flags or keys that are wrong by themselves: exit code 2.
    Usage,
    /// A configuration file with wrong contents: exit code 2.
    Config,
    /// A configuration file that cannot be read.
    ConfigFile,
    /// A node that cannot be started, or that is not there.
    Node,
    /// A socket path that is in use, or a directory that is not ours.
    InUse,
    /// Messages were lost, late, out of order or altered.
    Messages,
    /// Anything the system refused.
    System,
}

impl ErrorClass for ErrorKind {
    const USAGE: Self = Self::Usage;
    const CONFIG: Self = Self::Config;
    const CONFIG_FILE: Self = Self::ConfigFile;
    const IN_USE: Self = Self::InUse;
    const SYSTEM: Self = Self::System;

    /// 2 for wrong usage, 1 for the rest.
    fn exit_code(self) -> u8 {
        match self {
            Self::Usage | Self::Config => 2,
            _ => 1,
        }
    }
}

/// Says what failed, for `map_err`.
pub(crate) fn failed<E: StdError + Send + Sync + 'static>(
    kind: ErrorKind,
    what: impl Into<String>,
) -> impl FnOnce(E) -> Error {
    move |source| Error::with_source(kind, what, source)
}

/// An error of this kind, for `map_err`: with the text of its cause and nothing else.
pub(crate) fn as_kind<E: StdError>(kind: ErrorKind) -> impl FnOnce(E) -> Error {
    move |error| Error::new(kind, error.to_string())
}
