//! The error type of commands, shared by both daemons.
//!
//! A [`CommandError`] has a kind to match on, a sentence for people, and a cause. A program prints
//! the whole [`Chain`] and takes its exit code from the kind. Each daemon defines its own kinds
//! with [`ErrorClass`].

use std::error::Error as StdError;
use std::fmt;

use super::exit_status::ExitStatus;

/// The kinds of errors of one daemon.
pub trait ErrorClass: Copy + fmt::Debug + Send + Sync + 'static {
    /// Invalid flags or keys.
    const USAGE: Self;
    /// A configuration file with invalid contents.
    const CONFIG: Self;
    /// A configuration file that cannot be read.
    const CONFIG_FILE: Self;
    /// A socket path that is in use, or a run directory that belongs to another user.
    const IN_USE: Self;
    /// Anything that the system refused.
    const SYSTEM: Self;

    /// Exit codes of the program, in ascending order.
    const EXIT_STATUSES: &'static [ExitStatus];

    /// Returns the exit status for this kind, one of [`EXIT_STATUSES`](Self::EXIT_STATUSES).
    fn exit_status(self) -> ExitStatus;
}

/// Error from a command, with its kind and cause.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct CommandError<K: ErrorClass> {
    kind: K,
    text: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl<K: ErrorClass> CommandError<K> {
    /// Creates an error without a further cause.
    #[must_use]
    pub fn new(kind: K, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), source: None }
    }

    /// Creates an error without text, for an exit code that reports a result rather than a failure.
    #[must_use]
    pub const fn exit(kind: K) -> Self {
        Self { kind, text: String::new(), source: None }
    }

    /// Creates an error with its cause.
    #[must_use]
    pub fn with_source(
        kind: K,
        text: impl Into<String>,
        source: impl StdError + Send + Sync + 'static,
    ) -> Self {
        Self { kind, text: text.into(), source: Some(Box::new(source)) }
    }

    /// Returns the kind.
    #[must_use]
    pub const fn kind(&self) -> K {
        self.kind
    }

    /// Returns the process's exit code.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        self.kind.exit_status().code
    }

    /// Formats the error and its causes on one line.
    #[must_use]
    pub fn chain(&self) -> Chain<'_> {
        Chain(self)
    }
}

/// An error and its causes, joined by colons. See [`CommandError::chain`].
#[derive(Debug)]
pub struct Chain<'a>(&'a (dyn StdError + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut printed = self.0.to_string();
        f.write_str(&printed)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            let text = error.to_string();
            // Some errors already include their cause.
            if !printed.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            printed = text;
            source = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Kind {
        Usage,
        Config,
        File,
    }

    impl ErrorClass for Kind {
        const USAGE: Self = Self::Usage;
        const CONFIG: Self = Self::Config;
        const CONFIG_FILE: Self = Self::File;
        const IN_USE: Self = Self::File;
        const SYSTEM: Self = Self::File;
        const EXIT_STATUSES: &'static [ExitStatus] = &[ExitStatus::FAILURE, ExitStatus::USAGE];

        fn exit_status(self) -> ExitStatus {
            if self == Self::File { ExitStatus::FAILURE } else { ExitStatus::USAGE }
        }
    }

    type Error = CommandError<Kind>;

    #[test]
    fn causes_are_printed_once() {
        let error =
            Error::with_source(Kind::File, "cannot open /x", std::io::Error::from_raw_os_error(13));
        assert_eq!((error.kind(), error.exit_code()), (Kind::File, 1));
        let text = error.chain().to_string();
        assert!(text.starts_with("cannot open /x: Permission denied"), "{text}");
        // A cause that the text already contains is not printed again.
        let cause = || std::io::Error::other("no such disk");
        let error = Error::with_source(Kind::Usage, format!("no IO: {}", cause()), cause());
        assert_eq!(error.chain().to_string(), "no IO: no such disk");
        assert_eq!(error.exit_code(), 2);
    }
}
