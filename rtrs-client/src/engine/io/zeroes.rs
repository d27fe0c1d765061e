//! Zeroes that the session writes itself, where the server cannot be trusted to.
//!
//! A kernel server before Linux 6.8 takes a write zeroes for a read, one from 6.12 to 6.18 loses
//! its length, does nothing and reports success, and nothing on the wire tells these from good
//! ones. So a write zeroes becomes a write of memory that holds zeroes, unless the server is one
//! of this project and has said that it keeps lengths. A shard has one such piece of memory.

use std::sync::Arc;

use rtrs_core::block::{Io, IoOp};
use rtrs_core::mem::Region;

use crate::engine::device_table::{OpenDevice, ZEROES_LEN};

/// True when the server that the device is at now cannot do a write zeroes or a partial write, or
/// say what is a hole, and this was submitted when another one had its place.
pub(super) fn unsupported(io: &Io, device: &OpenDevice) -> bool {
    let lacks_fast = io.flags.fast_only && !device.geometry.fast_zero;
    match io.op {
        IoOp::Write => io.flags.partial && !device.geometry.partial_writes,
        IoOp::WriteZeroes => !device.writes_zeroes || lacks_fast,
        IoOp::Extents => !device.geometry.extents,
        _ => false,
    }
}

/// A shard's zeroes; the memory is there once a device needs it.
#[derive(Debug, Default)]
pub(super) struct Zeroes {
    region: Option<Arc<Region>>,
}

impl Zeroes {
    /// The memory, when the device needs it and it was not there yet: paths have to know it.
    ///
    /// # Errors
    /// The system has no memory.
    pub(super) fn prepare(&mut self, device: &OpenDevice) -> std::io::Result<Option<Arc<Region>>> {
        if self.region.is_some() || device.writes_zeroes || device.geometry.read_only {
            return Ok(None);
        }
        let region = Region::new(ZEROES_LEN as usize)?;
        self.region = Some(Arc::clone(&region));
        Ok(Some(region))
    }

    /// What is submitted in place of an IO: a write, where the device writes no zeroes.
    pub(super) fn translate(&self, device: &OpenDevice, io: Io) -> Io {
        let translates = io.op == IoOp::WriteZeroes && !device.writes_zeroes && !io.flags.fast_only;
        let Some(region) = self.region.as_ref().filter(|_| translates) else { return io };
        match region.slice(0, io.len as usize) {
            Some(zeroes) => Io { op: IoOp::Write, buf: Some(zeroes), ..io },
            // Longer than what was announced: judged as it is.
            None => io,
        }
    }
}
