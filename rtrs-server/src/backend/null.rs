//! Nothing as a device: reads give zeroes, writes vanish. For measuring everything else.
//!
//! IOs complete within `submit`; `poll` has nothing to do. There is no cache to flush, so
//! nothing is ever less durable than promised, which is not at all.

use rtrs_core::block::{
    BlockDevice, BlockSource, Completion, Core, Geometry, Io, IoOp, SharedErrors,
};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

use super::done::Done;

/// A device of zeroes.
#[derive(Debug)]
pub struct NullSource {
    geometry: Geometry,
}

impl NullSource {
    /// `size` bytes of nothing in blocks of `block` bytes. The size is a multiple of the block.
    pub fn new(size: u64, block: u32) -> Self {
        assert!(size.is_multiple_of(u64::from(block)), "a size in whole blocks");
        Self { geometry: super::memory::geometry(size, block) }
    }
}

impl BlockSource for NullSource {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn shared_errors(&self) -> SharedErrors {
        SharedErrors::None
    }

    fn open(&self, _core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        Ok(Box::new(NullDevice { geometry: self.geometry.clone(), done: Done::new() }))
    }
}

#[derive(Debug)]
struct NullDevice {
    geometry: Geometry,
    done: Done,
}

impl BlockDevice for NullDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.done.is_full() {
            return Err(io);
        }
        let status = self.geometry.check(&io);
        if let (IoStatus::Ok, IoOp::Read, Some(buf)) = (status, io.op, &io.buf) {
            buf.fill(0);
        }
        self.done.push(io.tag, status);
        Ok(())
    }

    fn poll(&mut self, _now: Instant) -> bool {
        false
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop()
    }

    fn inflight(&self) -> usize {
        self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        (!self.done.is_empty()).then_some(Instant::ZERO)
    }
}
