//! Backends of exports: files and disks, RBD images, exports of NBD servers, memory, null devices,
//! and layers over any backend.
//!
//! A backend is a [`BlockSource`], which each shard opens for itself. The contract: every IO is
//! checked against the geometry before anything is changed; an accepted IO completes once; reads on
//! every shard see completed changes; a flush, and an IO with FUA, completes when the data is as
//! durable as the backend can make it; capabilities in the geometry are real. A device whose queue
//! is full hands the IO back; no IO allocates, except that the first write to a chunk of memory
//! allocates the chunk. `conformance.rs` checks this for all backends.
//!
//! [`open_target`] turns a user's specification into a source. It is called once per export.

pub mod file;
mod immediate;
pub mod layer;
pub mod memory;
pub mod nbd;
pub mod null;
mod off_shard;
pub mod rbd;
mod single;
mod target;

#[cfg(any(test, feature = "test-util"))]
pub mod conformance;

use std::path::Path;
use std::sync::Arc;

use rtrs_core::block::BlockSource;
use rtrs_core::rbd::ImageAddress;

use crate::settings::ExportSpec;

pub(crate) use file::FileId;
pub use file::{FileOptions, FileSource};
pub use memory::MemorySource;
pub use nbd::{NbdOptions, NbdSource};
pub use null::NullSource;
pub use rbd::{GatewaySource, RbdOptions, RbdSource};
use target::whole_blocks;
pub use target::{BackendError, Direct, INFLIGHT_MAX, SIZE_MAX, Target};

/// Opens a target and adds the requested layers.
///
/// # Errors
/// A message for display that describes the problem with the target.
pub fn open_target(spec: &ExportSpec) -> Result<Arc<dyn BlockSource>, BackendError> {
    open_target_at(spec, None).map(|opened| opened.source)
}

/// An opened target.
pub(crate) struct OpenedTarget {
    pub(crate) source: Arc<dyn BlockSource>,
    /// File behind the source, if the target is a path.
    pub(crate) file: Option<FileId>,
}

/// Opens a target like [`open_target`] does, optionally at a different path; the specified path is
/// then used only as a name.
///
/// # Errors
/// Same as [`open_target`].
pub(crate) fn open_target_at(
    spec: &ExportSpec,
    at: Option<&Path>,
) -> Result<OpenedTarget, BackendError> {
    let (block, mut file) = (spec.block_size.bytes(), None);
    let mut source: Arc<dyn BlockSource> = match &spec.target {
        Target::Path(path) => {
            let (read_only, direct, no_lock) = (spec.ro, spec.direct, spec.no_lock);
            let how = FileOptions { read_only, direct, block, no_lock };
            let opened = FileSource::open_at(path, at.unwrap_or(path), how)?;
            file = opened.file_id();
            Arc::new(opened)
        }
        Target::Memory(size) => {
            Arc::new(MemorySource::new(plain_size(spec, *size)?, block.unwrap_or(512)))
        }
        Target::Null(size) => {
            Arc::new(NullSource::new(plain_size(spec, *size)?, block.unwrap_or(512)))
        }
        Target::Rbd(name) => {
            let address = ImageAddress {
                pool: name.pool.clone(),
                namespace: name.namespace.clone(),
                image: name.image.clone(),
                snapshot: name.snapshot.clone(),
                configuration: spec.conf.clone(),
                user: spec.user.clone().unwrap_or_else(|| "admin".to_owned()),
                read_only: spec.ro,
                connect_max: spec.connect_timeout.get(),
            };
            let (block, no_lock) = (block.unwrap_or(512), spec.no_lock);
            let how = RbdOptions { address, block, no_lock };
            let name = spec.target.to_string();
            match spec.gateway {
                true => Arc::new(GatewaySource::open(&name, how)?),
                false => Arc::new(RbdSource::open(&name, &how)?),
            }
        }
        Target::Nbd(url) => {
            let how = NbdOptions {
                address: url.address.clone(),
                name: url.name.clone(),
                read_only: spec.ro,
                block,
                open_max: spec.connect_timeout.get(),
            };
            Arc::new(NbdSource::open(&url.to_string(), how)?)
        }
    };
    if spec.ro && !source.geometry().read_only {
        source = Arc::new(layer::read_only(source));
    }
    let failing = spec.error_rate.per_million();
    if failing > 0 {
        let plan = layer::ErrorPlan::per_million(failing);
        source = Arc::new(layer::errors(source, plan));
    }
    let delay = spec.delay.get();
    if !delay.is_zero() {
        source = Arc::new(layer::delay(source, delay));
    }
    Ok(OpenedTarget { source, file })
}

/// Returns the size of a target that is not a path, rounded down to whole blocks.
fn plain_size(spec: &ExportSpec, size: u64) -> Result<u64, BackendError> {
    let block = u64::from(spec.block_size.bytes().unwrap_or(512));
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
