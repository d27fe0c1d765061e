//! Fixed pools of equal buffers in one region. A pool never grows or allocates after its creation.

use std::io;
use std::sync::Arc;

use super::region::{MemSlice, Region};

/// Equal buffers cut from one region, handed out and taken back by index.
#[derive(Debug)]
pub struct Pool {
    region: Arc<Region>,
    buffer_len: usize,
    free: Vec<u32>,
    taken: Vec<bool>,
}

impl Pool {
    /// Creates a pool of `count` buffers of `buffer_len` bytes each.
    ///
    /// # Errors
    /// Returns the system's error if the memory cannot be allocated.
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

    /// Returns the region that contains all buffers, for registration.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Takes a buffer. Returns None if all are in use.
    pub fn take(&mut self) -> Option<u32> {
        let index = self.free.pop()?;
        self.taken[index as usize] = true;
        Some(index)
    }

    /// Returns a buffer to the pool. Panics if it was not taken, which is a bug of the caller.
    pub fn give(&mut self, index: u32) {
        assert!(std::mem::take(&mut self.taken[index as usize]), "buffer {index} returned twice");
        self.free.push(index);
    }

    /// Returns the memory of a buffer.
    pub fn slice(&self, index: u32) -> MemSlice {
        self.region
            .slice(index as usize * self.buffer_len, self.buffer_len)
            .unwrap_or_else(|| panic!("buffer {index} outside its pool"))
    }

    /// Returns the number of free buffers.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Returns the total number of buffers.
    pub fn capacity(&self) -> usize {
        self.taken.len()
    }

    /// Returns the size of a buffer in bytes.
    pub fn buffer_len(&self) -> usize {
        self.buffer_len
    }
}
