//! A null device, for measuring everything else: reads return zeroes, and writes are discarded.
//!
//! IOs complete within `submit`; `poll` has nothing to do. There is no cache to flush, and no
//! durability to violate.

use std::sync::Arc;

use rtrs_core::block::{
    BlockDevice, BlockSource, Core, Geometry, Io, IoOp, Lost, SharedErrors, SharedSize,
};
use rtrs_core::extents;
use rtrs_core::status::IoStatus;

use super::immediate::{Content, Immediate};

/// A device of zeroes.
#[derive(Debug)]
pub struct NullSource {
    geometry: Geometry,
    size: Arc<SharedSize>,
}

impl NullSource {
    /// Creates a null device of `size` bytes in blocks of `block` bytes. The size must be a
    /// multiple of the block size.
    pub fn new(size: u64, block: u32) -> Self {
        assert!(size.is_multiple_of(u64::from(block)), "the size must be in whole blocks");
        Self {
            geometry: super::memory::geometry(size, block),
            size: Arc::new(SharedSize::new(size)),
        }
    }
}

impl BlockSource for NullSource {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size.get(), ..self.geometry.clone() }
    }

    fn resize(&self, size: u64, _lost: &Lost<'_>) -> std::io::Result<()> {
        self.size.set(size);
        Ok(())
    }

    fn shared_errors(&self) -> SharedErrors {
        SharedErrors::None
    }

    fn open(&self, _core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        Ok(Box::new(Immediate::new(self.geometry(), Nothing(Arc::clone(&self.size)))))
    }
}

#[derive(Debug)]
struct Nothing(Arc<SharedSize>);

impl Content for Nothing {
    fn size(&self) -> u64 {
        self.0.get()
    }

    fn run(&self, io: &Io) -> IoStatus {
        match (io.op, &io.buf) {
            (IoOp::Read, Some(buf)) => buf.fill(0),
            (IoOp::Extents, Some(room)) => {
                extents::all_data(room, self.0.get() - io.offset);
            }
            _ => {}
        }
        IoStatus::Ok
    }
}
