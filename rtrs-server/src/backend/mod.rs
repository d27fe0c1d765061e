//! What exports are made of: files and disks, memory, nothing, and wrappers around any of them.
//!
//! A backend is a [`BlockSource`] that every core opens for itself. What one may promise:
//! every IO is judged by its geometry before anything is touched; an IO that was taken completes
//! once; what completed is seen by reads on every core; a flush, and an IO with FUA, completes
//! when the data is as durable as the backend can make it; abilities in the geometry are real.
//! A device that is full gives the IO back; no IO allocates (memory's first write of a chunk
//! apart, as there the chunk is the storage). `conformance.rs` holds all of them to it.
//!
//! [`open_target`] turns what a user wrote into a source. Called once per export, by the plan.

mod done;
pub mod file;
pub mod layer;
pub mod memory;
pub mod null;

#[cfg(any(test, feature = "test-util"))]
pub mod conformance;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rtrs_core::block::BlockSource;
use rtrs_core::config::AutoSwitch;
use rtrs_core::time::Duration;

use crate::config;
use crate::error::{Error, ErrorKind};
use crate::plan::ExportPlan;

pub use file::FileSource;
pub use memory::MemorySource;
pub use null::NullSource;

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

impl From<&ExportPlan> for TargetSpec {
    fn from(plan: &ExportPlan) -> Self {
        Self {
            target: match &plan.target {
                config::Target::Path(path) => Target::Path(path.clone()),
                config::Target::Memory(size) => Target::Memory(size.bytes()),
                config::Target::Null(size) => Target::Null(size.bytes()),
            },
            read_only: plan.read_only,
            direct: match plan.direct {
                AutoSwitch::Auto => Direct::Auto,
                AutoSwitch::On => Direct::On,
                AutoSwitch::Off => Direct::Off,
            },
            block_size: plan.block_size.bytes(),
            delay: Duration::from_millis(plan.delay_ms),
            errors_per_million: plan.error_rate.per_million(),
        }
    }
}

impl From<BackendError> for Error {
    fn from(error: BackendError) -> Self {
        let text = format!("cannot export {error}");
        Self::new(ErrorKind::Export, text)
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

/// Opens a target and wraps it as asked.
///
/// # Errors
/// What is wrong with the target, in a sentence for people.
pub fn open_target(spec: &TargetSpec) -> Result<Arc<dyn BlockSource>, BackendError> {
    let block = spec.block_size;
    if let Some(bytes) = block
        && !(bytes.is_power_of_two() && (512..=4096).contains(&bytes))
    {
        let problem = format!("cannot have blocks of {bytes} bytes");
        let target = spec.target.to_string();
        return Err(BackendError::new(&target, problem, "use 512, 1024, 2048 or 4096"));
    }
    let mut source: Arc<dyn BlockSource> = match &spec.target {
        Target::Path(path) => Arc::new(FileSource::open(path, spec.read_only, spec.direct, block)?),
        Target::Memory(size) => {
            Arc::new(MemorySource::new(plain_size(spec, *size)?, block.unwrap_or(512)))
        }
        Target::Null(size) => {
            Arc::new(NullSource::new(plain_size(spec, *size)?, block.unwrap_or(512)))
        }
    };
    if spec.read_only && !source.geometry().read_only {
        source = Arc::new(layer::ReadOnlySource::new(source));
    }
    if spec.errors_per_million > 0 {
        let plan = layer::ErrorPlan::per_million(spec.errors_per_million);
        source = Arc::new(layer::ErrorSource::new(source, plan));
    }
    if !spec.delay.is_zero() {
        source = Arc::new(layer::DelaySource::new(source, spec.delay));
    }
    Ok(source)
}

/// The size of a target that is not a path, in whole blocks.
fn plain_size(spec: &TargetSpec, size: u64) -> Result<u64, BackendError> {
    let block = u64::from(spec.block_size.unwrap_or(512));
    let target = spec.target.to_string();
    if size < block {
        let problem = format!("is smaller than one block of {block} bytes");
        return Err(BackendError::new(&target, problem, "give it a size of one block or more"));
    }
    if size > SIZE_MAX {
        return Err(BackendError::new(&target, "is too large", "give it less than 8E"));
    }
    Ok(whole_blocks(&target, size, block))
}

/// Rounds a size down to whole blocks, and says so when that leaves bytes out.
fn whole_blocks(target: &str, size: u64, block: u64) -> u64 {
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

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Memory(size) => write!(f, "mem:{size}"),
            Self::Null(size) => write!(f, "null:{size}"),
        }
    }
}

#[cfg(test)]
mod tests;
