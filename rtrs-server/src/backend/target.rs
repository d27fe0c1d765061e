//! Why an export cannot be made of its target, and the bounds of all.

use std::io;
use std::path::Path;

/// IOs a backend takes per shard before it gives them back.
pub const INFLIGHT_MAX: usize = 1024;
/// Largest export of memory or nothing, in bytes: the kernel counts bytes in a signed word.
pub const SIZE_MAX: u64 = i64::MAX.unsigned_abs();

/// Whether a path is used past the page cache (O_DIRECT): for block devices yes, where they allow
/// it; for regular files no, so that any size and alignment works and reads find the page cache.
pub use rtrs_core::settings::AutoSwitch as Direct;

pub use crate::settings::Target;

/// Why a target cannot be exported: which, what is wrong, and what would do.
#[derive(Debug, thiserror::Error)]
#[error("{target} {problem}{}; {hint}", cause(.source))]
pub struct BackendError {
    target: String,
    problem: String,
    hint: &'static str,
    source: Option<io::Error>,
}

fn cause(source: &Option<io::Error>) -> String {
    source.as_ref().map(|error| format!(": {error}")).unwrap_or_default()
}

impl BackendError {
    pub(crate) fn new(target: &str, problem: impl Into<String>, hint: &'static str) -> Self {
        Self { target: target.to_owned(), problem: problem.into(), hint, source: None }
    }

    pub(crate) fn path(path: &Path, problem: impl Into<String>, hint: &'static str) -> Self {
        Self::new(&path.display().to_string(), problem, hint)
    }

    pub(crate) fn because(mut self, source: io::Error) -> Self {
        self.source = Some(source);
        self
    }

    /// The system's error behind it, where there was one.
    pub fn io_error(&self) -> Option<&io::Error> {
        self.source.as_ref()
    }
}

/// Rounds a size down to whole blocks, and says so when that leaves bytes out.
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
