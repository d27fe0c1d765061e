//! What ends a command of the client.
//!
//! Owns [`ErrorKind`], which the binary takes its exit code from. The error itself, with its text
//! and its chain of causes, is [`CommandError`].

use std::io;

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
    /// A socket path that is in use, or a run directory that is not ours.
    InUse,
    /// A path whose host has no address, or that cannot be connected.
    Path,
    /// There is no session of that name.
    NotAttached,
    /// IO was still running when its time was over.
    Abandoned,
    /// What runs is not what a file says.
    Differs,
    /// The session is there and serves no IO: exit code 3.
    NoService,
    /// Anything the system refused while running.
    System,
}

impl ErrorClass for ErrorKind {
    const USAGE: Self = Self::Usage;
    const CONFIG: Self = Self::Config;
    const CONFIG_FILE: Self = Self::ConfigFile;
    const IN_USE: Self = Self::InUse;
    const SYSTEM: Self = Self::System;

    /// 2 for wrong usage, 3 for a session that serves no IO, 1 for the rest.
    fn exit_code(self) -> u8 {
        match self {
            Self::Usage | Self::Config => 2,
            Self::NoService => 3,
            _ => 1,
        }
    }
}

/// Wrong usage.
pub(crate) fn usage(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, text)
}

/// Says what the system refused, for `map_err`.
pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::with_source(ErrorKind::System, what, source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes() {
        for (kind, code) in [
            (ErrorKind::Usage, 2),
            (ErrorKind::Config, 2),
            (ErrorKind::ConfigFile, 1),
            (ErrorKind::NoService, 3),
            (ErrorKind::System, 1),
        ] {
            assert_eq!(Error::new(kind, "x").exit_code(), code);
        }
    }
}
