//! A fixed pool of equal buffers in one region. It never grows and never allocates after start.

use std::io;
use std::sync::Arc;

use super::{MemSlice, Region};

/// Equal buffers cut from one region, handed out and taken back by index.
#[derive(Debug)]
pub struct Pool {
    region: Arc<Region>,
    buffer_len: usize,
    free: Vec<u32>,
    taken: Vec<bool>,
}

impl Pool {
    /// A pool of `count` buffers of `buffer_len` bytes each.
    ///
    /// # Errors
    /// The system's error when the memory is refused.
    pub fn new(count: u32, buffer_len: usize) -> io::Result<Self> {
        let bytes = (count as usize)
            .checked_mul(buffer_len)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "pool too large"))?;
        Ok(Self {
            region: Region::new(bytes)?,
            buffer_len,
            free: (0..count).rev().collect(),
            taken: vec![false; count as usize],
        })
    }

    /// The region behind all buffers, for registration.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Takes a buffer, or None when all are in use.
    pub fn take(&mut self) -> Option<u32> {
        let index = self.free.pop()?;
        self.taken[index as usize] = true;
        Some(index)
    }

    /// Gives a buffer back. Panics when it was not taken: that is our own fault.
    pub fn give(&mut self, index: u32) {
        assert!(std::mem::take(&mut self.taken[index as usize]), "buffer {index} given back twice");
        self.free.push(index);
    }

    /// The memory of a buffer.
    pub fn slice(&self, index: u32) -> MemSlice {
        self.region
            .slice(index as usize * self.buffer_len, self.buffer_len)
            .unwrap_or_else(|| panic!("buffer {index} outside its pool"))
    }

    /// Buffers not in use.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// All buffers, in use or not.
    pub fn capacity(&self) -> usize {
        self.taken.len()
    }

    /// Bytes in one buffer.
    pub fn buffer_len(&self) -> usize {
        self.buffer_len
    }
}
