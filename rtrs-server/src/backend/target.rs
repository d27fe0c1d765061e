//! What an export is to be made of, and why it cannot be.

use std::io;
use std::path::Path;

use rtrs_core::time::Duration;

/// IOs a backend takes per core before it gives them back.
pub const INFLIGHT_MAX: usize = 1024;
/// Largest export of memory or nothing, in bytes: the kernel counts bytes in a signed word.
pub const SIZE_MAX: u64 = i64::MAX.unsigned_abs();

/// Whether a path is used past the page cache (O_DIRECT): for block devices yes, where they allow
/// it; for regular files no, so that any size and alignment works and reads find the page cache.
pub use rtrs_core::settings::AutoSwitch as Direct;

pub use crate::settings::Target;

/// What an export is asked to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetSpec {
    /// What is behind it.
    pub target: Target,
    /// Refuse everything that changes it.
    pub read_only: bool,
    /// O_DIRECT or not; paths only.
    pub direct: Direct,
    /// Logical block in bytes, 512 to 4096; None takes the target's own.
    pub block_size: Option<u32>,
    /// Time every IO waits before it runs; zero for none.
    pub delay: Duration,
    /// IOs in a million that fail with an I/O error; 0 for none.
    pub errors_per_million: u32,
}

impl TargetSpec {
    /// A target with every option at its default.
    pub const fn new(target: Target) -> Self {
        Self {
            target,
            read_only: false,
            direct: Direct::Auto,
            block_size: None,
            delay: Duration::ZERO,
            errors_per_million: 0,
        }
    }
}

/// Why a target cannot be exported: which, what is wrong, and what would do.
#[derive(Debug, thiserror::Error)]
#[error("{target} {problem}{}; {remedy}", cause(.source))]
pub struct BackendError {
    target: String,
    problem: String,
    remedy: &'static str,
    source: Option<io::Error>,
}

fn cause(source: &Option<io::Error>) -> String {
    source.as_ref().map(|error| format!(": {error}")).unwrap_or_default()
}

impl BackendError {
    pub(crate) fn new(target: &str, problem: impl Into<String>, remedy: &'static str) -> Self {
        Self { target: target.to_owned(), problem: problem.into(), remedy, source: None }
    }

    pub(crate) fn path(path: &Path, problem: impl Into<String>, remedy: &'static str) -> Self {
        Self::new(&path.display().to_string(), problem, remedy)
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
