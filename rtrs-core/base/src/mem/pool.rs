//! Fixed pools of equally sized buffers in one region. A pool never allocates once it is created.

use std::io;
use std::sync::Arc;

use super::region::{MemSlice, Region};
use super::scatter::{Scatter, ScatterError};

/// Equally sized buffers in one region, handed out and returned by index.
#[derive(Debug)]
pub struct Pool {
    region: Arc<Region>,
    /// Pieces of the buffers, if the pool is scattered.
    scatter: Option<Arc<Scatter>>,
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
        Ok(Self::of(Region::new(bytes)?, count, buffer_len))
    }

    /// Creates a pool of `count` buffers of `buffer_len` bytes each, whose bytes are in pieces of
    /// other regions, assigned by [`Self::assign`].
    ///
    /// # Errors
    /// See [`Self::new`].
    pub fn scattered(count: u32, buffer_len: usize) -> io::Result<Self> {
        let scatter = Scatter::new(count, buffer_len)?;
        let region = Region::scattered(Arc::clone(&scatter) as Arc<_>);
        Ok(Self { scatter: Some(scatter), ..Self::of(region, count, buffer_len) })
    }

    fn of(region: Arc<Region>, count: u32, buffer_len: usize) -> Self {
        let (free, taken) = ((0..count).rev().collect(), vec![false; count as usize]);
        Self { region, scatter: None, buffer_len, free, taken }
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

    /// Assigns pieces to a taken buffer of a scattered pool, and returns the bytes that they hold.
    /// The pieces' regions stay alive until the buffer has other pieces or none, and the last
    /// operation on its bytes has ended.
    ///
    /// # Errors
    /// Returns the rule that the pieces break; the buffer then has no pieces.
    pub fn assign(
        &mut self,
        index: u32,
        pieces: impl IntoIterator<Item = MemSlice>,
    ) -> Result<MemSlice, ScatterError> {
        assert!(self.taken[index as usize], "pieces assigned to the free buffer {index}");
        let scatter = self.scatter.as_ref().ok_or(ScatterError::Whole)?;
        let len = scatter.assign(index, pieces)?;
        self.slice(index).slice(0, len).ok_or(ScatterError::Length)
    }

    /// Returns a buffer to the pool, without pieces. Panics if it was not taken, which is a bug in
    /// the caller.
    pub fn give(&mut self, index: u32) {
        assert!(std::mem::take(&mut self.taken[index as usize]), "buffer {index} returned twice");
        if let Some(scatter) = &self.scatter {
            // An empty list breaks no rule.
            let _ = scatter.assign(index, []);
        }
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
