//! Bounce buffers for IO whose memory O_DIRECT rejects.

use std::io;

use rtrs_core::block::Io;
use rtrs_core::mem::{MemSlice, Pool};
use rtrs_core::rt::blkdev::DirectAlign;

const BOUNCE_COUNT: u32 = 16;
const BOUNCE: usize = 128 << 10;

/// Bounce buffers of a queue.
pub(super) struct Bounce {
    /// None without O_DIRECT.
    pool: Option<Pool>,
    /// Alignment of memory in bytes.
    align: usize,
}

impl Bounce {
    pub(super) fn new(align: Option<DirectAlign>) -> io::Result<Self> {
        let pool = match align {
            Some(_) => Some(Pool::new(BOUNCE_COUNT, BOUNCE)?),
            None => None,
        };
        Ok(Self { pool, align: align.map_or(1, |align| align.memory as usize) })
    }

    /// Whether direct IO cannot use the memory of a transfer.
    pub(super) fn is_needed(&self, io: &Io) -> bool {
        io.buf.as_ref().is_some_and(|buf| !buf.offset().is_multiple_of(self.align))
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        self.pool.as_mut().and_then(Pool::take)
    }

    pub(super) fn give(&mut self, index: u32) {
        if let Some(pool) = &mut self.pool {
            pool.give(index);
        }
    }

    /// Returns the first `len` bytes of a taken buffer, or the whole buffer if it is shorter.
    pub(super) fn part(&self, index: u32, len: usize) -> MemSlice {
        let pool = self.pool.as_ref().expect("a taken buffer has its pool");
        pool.slice(index).slice(0, len.min(BOUNCE)).expect("within a bounce buffer")
    }
}
