//! Calls that run a request and wait for its completion.

use crate::buffer::Buffer;
use crate::error::{Error, ErrorKind};
use crate::queue::{Queue, outcome};
use crate::request::{Extent, Request};

/// Blocking calls. Each request in a call is limited to the time set with [`Queue::set_wait_max`].
/// Completions of submitted requests that arrive in the meantime are left for [`Queue::poll`].
impl Queue {
    /// Fills `bytes` from the volume. Offset and length must be multiples of the logical block
    /// size. More than [`Queue::io_max`] bytes are read in several requests, one after another.
    ///
    /// ```no_run
    /// # fn example(queue: &mut rtrs::Queue) -> Result<(), rtrs::Error> {
    /// let mut label = [0; 512];
    /// queue.pread(0, &mut label)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Io`] with the error of the failed request; `bytes` may be partly filled.
    /// [`ErrorKind::TimedOut`], [`ErrorKind::Closed`], [`ErrorKind::Forked`].
    pub fn pread(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let mut at = offset;
        for part in bytes.chunks_mut(self.io_max() as usize) {
            let completion = self.run(Request::read(at, Buffer::zeroed(part.len())))?;
            outcome("read", completion.result)?;
            // A read has one buffer.
            let buffer = completion.into_buffer().unwrap_or_else(|| Buffer::zeroed(part.len()));
            part.copy_from_slice(&buffer);
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Writes `bytes` to the volume. Offset and length must be multiples of the logical block size.
    /// More than [`Queue::io_max`] bytes are written in several requests, one after another. The
    /// data is durable after a [`flush`](Self::flush).
    ///
    /// ```no_run
    /// # fn example(queue: &mut rtrs::Queue) -> Result<(), rtrs::Error> {
    /// queue.pwrite(4096, &[7; 8192])?;
    /// queue.flush()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Io`] with the error of the failed request; part of the data may have been
    /// written. [`ErrorKind::TimedOut`], [`ErrorKind::Closed`], [`ErrorKind::Forked`].
    pub fn pwrite(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let mut at = offset;
        for part in bytes.chunks(self.io_max() as usize) {
            let completion = self.run(Request::write(at, part.to_vec().into()))?;
            outcome("write", completion.result)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Makes all previously completed writes durable, whichever of the volume's queues ran them.
    ///
    /// # Errors
    /// [`ErrorKind::Io`], which may also mean that the server has lost acknowledged writes.
    /// [`ErrorKind::TimedOut`], [`ErrorKind::Closed`], [`ErrorKind::Forked`].
    pub fn flush(&mut self) -> Result<(), Error> {
        outcome("flush", self.run(Request::flush())?.result)
    }

    /// Returns the extents of a range, in order from its start: at least the first one. The list
    /// may end before the range does.
    ///
    /// ```no_run
    /// # fn example(queue: &mut rtrs::Queue, size: u64) -> Result<(), rtrs::Error> {
    /// let (mut at, mut data) = (0, 0);
    /// while at < size {
    ///     for extent in queue.extents(at, (size - at).min(1 << 30))? {
    ///         at += extent.len;
    ///         data += if extent.hole { 0 } else { extent.len };
    ///     }
    /// }
    /// println!("{data} of {size} bytes hold data");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Io`]; errno 95 (EOPNOTSUPP) if the server cannot list extents.
    /// [`ErrorKind::TimedOut`], [`ErrorKind::Closed`], [`ErrorKind::Forked`].
    pub fn extents(&mut self, offset: u64, len: u64) -> Result<Vec<Extent>, Error> {
        let completion = self.run(Request::extents(offset, len))?;
        outcome("list the extents", completion.result)?;
        match completion.extents() {
            [] => Err(Error::new(ErrorKind::Invalid, "the server listed no extents")),
            extents => Ok(extents.to_vec()),
        }
    }
}
