//! Zeroes that the session itself writes if the server cannot be trusted to write them.
//!
//! A kernel server before Linux 6.8 treats a write zeroes as a read. One from 6.12 to 6.18 loses
//! the length, does nothing and reports success, and nothing on the wire distinguishes these
//! servers from correct ones. So a write zeroes becomes a write of zeroed memory, unless the server
//! is `rtrs-server` and has announced that it keeps lengths. Each shard has one buffer of zeroes.

use std::sync::Arc;

use rtrs_core::block::{Io, IoOp};
use rtrs_core::mem::Region;

use crate::engine::device_table::{OpenDevice, ZEROES_LEN};

/// Whether the device's current server lacks support for an IO (write zeroes, partial write or hole
/// query) that was submitted when the device had another server.
pub(super) fn unsupported(io: &Io, device: &OpenDevice) -> bool {
    let lacks_fast = io.flags.fast_only && !device.geometry.fast_zero;
    match io.op {
        IoOp::Write => io.flags.partial && !device.geometry.partial_writes,
        IoOp::WriteZeroes => !device.writes_zeroes || lacks_fast,
        IoOp::Extents => !device.geometry.extents,
        _ => false,
    }
}

/// Zeroed memory of a shard, allocated once a device needs it.
#[derive(Debug, Default)]
pub(super) struct Zeroes {
    region: Option<Arc<Region>>,
}

impl Zeroes {
    /// Allocates the memory if the device needs it and it does not exist yet. Paths must register
    /// it.
    ///
    /// # Errors
    /// Fails if the system is out of memory.
    pub(super) fn prepare(&mut self, device: &OpenDevice) -> std::io::Result<Option<Arc<Region>>> {
        if self.region.is_some() || device.writes_zeroes || device.geometry.read_only {
            return Ok(None);
        }
        let region = Region::new(ZEROES_LEN as usize)?;
        self.region = Some(Arc::clone(&region));
        Ok(Some(region))
    }

    /// Turns a write zeroes into a write of zeroed memory if the server is not trusted with it.
    pub(super) fn translate(&self, device: &OpenDevice, io: Io) -> Io {
        let translates = io.op == IoOp::WriteZeroes && !device.writes_zeroes && !io.flags.fast_only;
        let Some(region) = self.region.as_ref().filter(|_| translates) else { return io };
        match region.slice(0, io.len as usize) {
            Some(zeroes) => Io { op: IoOp::Write, buf: Some(zeroes), ..io },
            // Longer than announced: left for the geometry check to reject.
            None => io,
        }
    }
}
