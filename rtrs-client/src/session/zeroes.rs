//! Zeroes that the session writes itself, where the server cannot be trusted to.
//!
//! A kernel server before Linux 6.8 takes a write zeroes for a read, one from 6.12 to 6.18 loses
//! its length, does nothing and reports success, and nothing on the wire tells these from good
//! ones. So a write zeroes becomes a write of memory that holds zeroes, unless the server is one
//! of this project and has said that it keeps lengths. A core has one such piece of memory.

use std::sync::Arc;

use rtrs_core::block::{Geometry, Io, IoOp};
use rtrs_core::mem::Region;

/// Bytes of zeroes a core has, and the most that one IO writes of them.
pub(crate) const ZEROES_LEN: u32 = 1 << 20;

/// A core's zeroes; the memory is there once a device needs it.
#[derive(Debug, Default)]
pub(super) struct Zeroes {
    region: Option<Arc<Region>>,
}

impl Zeroes {
    /// The memory, when the device needs it and it was not there yet: paths have to know it.
    ///
    /// # Errors
    /// The system has no memory.
    pub(super) fn prepare(&mut self, geometry: &Geometry) -> std::io::Result<Option<Arc<Region>>> {
        if self.region.is_some() || geometry.fast_zero || geometry.read_only {
            return Ok(None);
        }
        let region = Region::new(ZEROES_LEN as usize)?;
        self.region = Some(Arc::clone(&region));
        Ok(Some(region))
    }

    /// What is submitted in place of an IO: a write, where the device writes no zeroes.
    pub(super) fn translate(&self, geometry: &Geometry, io: Io) -> Io {
        let translates = io.op == IoOp::WriteZeroes && !geometry.fast_zero && !io.flags.fast_only;
        let Some(region) = self.region.as_ref().filter(|_| translates) else { return io };
        match region.slice(0, io.len as usize) {
            Some(zeroes) => Io { op: IoOp::Write, buf: Some(zeroes), ..io },
            // Longer than what was announced: judged as it is.
            None => io,
        }
    }
}
