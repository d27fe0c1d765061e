//! Errors for certificates and keys that cannot be used.

use std::io;
use std::path::PathBuf;

/// Reason why certificates or keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsConfigError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// System error.
        #[source]
        source: io::Error,
    },
    /// Other users could use a private key.
    #[error(
        "cannot use the private key {}: its mode {mode:03o} gives access to others; \
         run chmod 600 {}", path.display(), path.display()
    )]
    Unsafe {
        /// Path of the file.
        path: PathBuf,
        /// Permissions of the file.
        mode: u32,
    },
    /// A file has no usable content.
    #[error("cannot use {}: {why}", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        why: String,
    },
}

impl TlsConfigError {
    /// Returns the full text, including the system's error.
    #[must_use]
    pub fn chain(&self) -> String {
        match self {
            Self::Read { source, .. } => format!("{self}: {source}"),
            Self::Unsafe { .. } | Self::Content { .. } => self.to_string(),
        }
    }
}
