//! Errors for targets that cannot be exported, and common limits.

use std::io;
use std::path::Path;

/// Maximum number of IOs that a backend accepts per shard before it hands further ones back.
pub const INFLIGHT_MAX: usize = 1024;
/// Maximum size of a memory or null export in bytes: the kernel counts bytes in an i64.
pub const SIZE_MAX: u64 = i64::MAX.unsigned_abs();

/// Whether a path bypasses the page cache (O_DIRECT). The default is yes for block devices that
/// support it and no for regular files, so that any size and alignment works and reads use the page
/// cache.
pub use rtrs_core::settings::AutoSwitch as Direct;

pub use crate::settings::Target;

/// Reason why a target cannot be exported: the target, the problem and a hint.
#[derive(Debug, thiserror::Error)]
#[error("{target} {problem}{}; {hint}", cause(.source))]
pub struct BackendError {
    target: String,
    problem: String,
    hint: &'static str,
    source: Option<io::Error>,
    /// Whether another program is holding the image.
    is_held: bool,
}

fn cause(source: &Option<io::Error>) -> String {
    source.as_ref().map(|error| format!(": {error}")).unwrap_or_default()
}

impl BackendError {
    pub(crate) fn new(target: &str, problem: impl Into<String>, hint: &'static str) -> Self {
        Self {
            target: target.to_owned(),
            problem: problem.into(),
            hint,
            source: None,
            is_held: false,
        }
    }

    pub(crate) fn path(path: &Path, problem: impl Into<String>, hint: &'static str) -> Self {
        Self::new(&path.display().to_string(), problem, hint)
    }

    pub(crate) fn because(mut self, source: io::Error) -> Self {
        self.source = Some(source);
        self
    }

    /// Marks the error as a conflict with another program that holds the image.
    pub(crate) fn held(mut self) -> Self {
        self.is_held = true;
        self
    }

    /// Whether another program holds the image, for example a virtual machine.
    pub(crate) fn is_held(&self) -> bool {
        self.is_held
    }

    /// Underlying system error, if any.
    pub fn io_error(&self) -> Option<&io::Error> {
        self.source.as_ref()
    }
}

/// Rounds a size down to whole blocks, and logs a warning if that leaves out bytes.
pub(super) fn whole_blocks(target: &str, size: u64, block: u64) -> u64 {
    let whole = size / block * block;
    if whole != size {
        tracing::warn!(
            target_size = size,
            exported = whole,
            "{target}: the last {} bytes do not fill a block of {block} and are not exported",
            size - whole
        );
    }
    whole
}
