//! What ends a command of the client.
//!
//! Owns [`Error`]: a kind to match on, a sentence for people, and the cause underneath. The binary
//! prints the whole chain and takes its exit code from the kind.

use std::error::Error as StdError;
use std::fmt;

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
    /// Anything the system refused while running.
    System,
}

/// An error of the client, with its kind and cause.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Error {
    kind: ErrorKind,
    text: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error without a further cause.
    #[must_use]
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), source: None }
    }

    /// An error with the error that caused it.
    #[must_use]
    pub fn with_source(
        kind: ErrorKind,
        text: impl Into<String>,
        source: impl StdError + Send + Sync + 'static,
    ) -> Self {
        Self { kind, text: text.into(), source: Some(Box::new(source)) }
    }

    /// The kind.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The process's exit code: 2 for wrong usage, 1 for the rest.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self.kind {
            ErrorKind::Usage | ErrorKind::Config => 2,
            _ => 1,
        }
    }

    /// The error and its causes on one line.
    #[must_use]
    pub fn chain(&self) -> Chain<'_> {
        Chain(self)
    }
}

/// Prints an error and its causes, joined by colons. See [`Error::chain`].
#[derive(Debug)]
pub struct Chain<'a>(&'a Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            let text = error.to_string();
            // Some errors say their cause themselves.
            if !said.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            said = text;
            source = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_and_chain() {
        assert_eq!(Error::new(ErrorKind::Usage, "x").exit_code(), 2);
        assert_eq!(Error::new(ErrorKind::Config, "x").exit_code(), 2);
        let error = Error::with_source(
            ErrorKind::InUse,
            "cannot open /x",
            std::io::Error::from_raw_os_error(13),
        );
        assert_eq!(error.exit_code(), 1);
        let text = error.chain().to_string();
        assert!(text.starts_with("cannot open /x: Permission denied"), "{text}");
        // A cause that is in the text already is not said again.
        let cause = || std::io::Error::other("the disk is gone");
        let error = Error::with_source(ErrorKind::System, format!("no IO: {}", cause()), cause());
        assert_eq!(error.chain().to_string(), "no IO: the disk is gone");
    }
}
