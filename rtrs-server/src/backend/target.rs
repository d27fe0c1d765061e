//! What an export is to be made of, and why it cannot be.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use rtrs_core::time::Duration;

/// IOs a backend takes per core before it gives them back.
pub const INFLIGHT_MAX: usize = 1024;
/// Largest export of memory or nothing, in bytes: the kernel counts bytes in a signed word.
pub const SIZE_MAX: u64 = i64::MAX.unsigned_abs();

/// What is behind an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A regular file or a block device.
    Path(PathBuf),
    /// Memory of this many bytes, gone with the process.
    Memory(u64),
    /// Nothing, of this many bytes: reads give zeroes, writes vanish.
    Null(u64),
}

/// Whether a path is used past the page cache (O_DIRECT).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// For block devices yes, where they allow it; for regular files no, so that any size and
    /// alignment works and reads find the page cache.
    #[default]
    Auto,
    /// Yes, or an error.
    On,
    /// No.
    Off,
}

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

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Memory(size) => write!(f, "mem:{size}"),
            Self::Null(size) => write!(f, "null:{size}"),
        }
    }
}
