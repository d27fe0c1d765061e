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
mod target;

#[cfg(any(test, feature = "test-util"))]
pub mod conformance;

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
use target::whole_blocks;
pub use target::{BackendError, Direct, INFLIGHT_MAX, SIZE_MAX, Target, TargetSpec};

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

#[cfg(test)]
mod tests;
