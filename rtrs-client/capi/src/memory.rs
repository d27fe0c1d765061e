//! Request memory, which the program owns.
//!
//! A request uses the memory in place. The engine may need the memory briefly after the request has
//! ended, for example for a send on a path that has failed: [`Hold`] tracks when the last use ends.

use std::any::Any;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rtrs::{Buffer, Memory};
use rtrs_core::mem::{OwnedBytes, Region};

use crate::entry::Failure;

/// Memory owned by the program, for one request or call.
#[derive(Debug)]
pub(crate) struct Span {
    base: NonNull<u8>,
    len: usize,
}

impl Span {
    /// Checks the address and length of a block of memory.
    ///
    /// # Safety
    /// The program must follow the rules in the header: the memory stays mapped until the program
    /// has received the completion, and nothing but the request changes it.
    pub(crate) unsafe fn new(base: *mut u8, len: usize) -> Result<Self, Failure> {
        let Some(base) = NonNull::new(base) else {
            return Err(Failure::invalid("the address of the buffer is NULL"));
        };
        if isize::try_from(len).is_err() || base.as_ptr().addr().checked_add(len).is_none() {
            return Err(Failure::invalid(format!("a buffer cannot have {len} bytes")));
        }
        Ok(Self { base, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn addresses(&self) -> Range<usize> {
        let start = self.base.as_ptr().addr();
        // `new` has checked the sum.
        start..start + self.len
    }

    /// Wraps the memory for registration. `owner` is dropped after the last use.
    pub(crate) fn memory(self, owner: impl Any + Send + Sync) -> Memory {
        // SAFETY: by the rules in the header, the memory stays mapped until its registration has
        // ended or the volume has been freed. By then, the last request that used it has ended, and
        // any other holder of the region, such as a cache of regions, neither reads nor writes the
        // memory.
        unsafe { Region::foreign(self.base, self.len, owner) }.into()
    }

    /// Wraps the memory in a buffer, in place.
    pub(crate) fn buffer(self, hold: &Arc<Hold>) -> Buffer {
        let owner = Piece::new(hold);
        // SAFETY: by the rules of `new`, the memory is mapped until the completion, which is
        // returned only after the hold has ended, that is, once `owner` has been dropped. Nothing
        // here borrows the buffer as a slice.
        unsafe { OwnedBytes::foreign(self.base, self.len, owner) }.into()
    }

    /// Returns the bytes, for a call that copies them.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: by the rules of `new`, the bytes are mapped and do not change during the call.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// Returns the bytes, for a call that fills them.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: by the rules of `new`, the bytes are mapped and only this call uses them.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

/// The engine's use of a request's memory.
#[derive(Debug)]
pub(crate) struct Hold {
    /// Pieces of memory that are in use.
    pieces: AtomicUsize,
    /// Whether the request has completed, so that only its memory can still be in use.
    is_awaited: AtomicBool,
    /// Eventfd of the queue.
    event: Arc<OwnedFd>,
}

impl Hold {
    pub(crate) fn new(event: &Arc<OwnedFd>) -> Self {
        Self {
            pieces: AtomicUsize::new(0),
            is_awaited: AtomicBool::new(false),
            event: Arc::clone(event),
        }
    }

    /// Begins the next request. The memory of the previous request must no longer be in use.
    pub(crate) fn begin(&self) {
        self.is_awaited.store(false, Ordering::SeqCst);
    }

    /// Whether no piece is in use.
    pub(crate) fn has_ended(&self) -> bool {
        self.pieces.load(Ordering::SeqCst) == 0
    }

    /// Arranges for the eventfd to become readable when the last use ends. Returns false if the
    /// last use has already ended.
    pub(crate) fn await_end(&self) -> bool {
        self.is_awaited.store(true, Ordering::SeqCst);
        !self.has_ended()
    }
}

/// Makes the eventfd readable.
pub(crate) fn signal(event: &OwnedFd) {
    // A full counter is readable already.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Owner of one piece of memory, dropped after the last use of the piece.
#[derive(Debug)]
pub(crate) struct Piece(Arc<Hold>);

impl Piece {
    pub(crate) fn new(hold: &Arc<Hold>) -> Self {
        hold.pieces.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(hold))
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let hold = &*self.0;
        let is_last = hold.pieces.fetch_sub(1, Ordering::SeqCst) == 1;
        if is_last && hold.is_awaited.load(Ordering::SeqCst) {
            signal(&hold.event);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn the_last_piece_ends_the_hold() {
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let hold = Arc::new(Hold::new(&event));
        let is_readable = || rustix::io::read(&*event, &mut [0u8; 8]).is_ok();
        let mut memory = [1, 2, 3, 4];
        let base = memory.as_mut_ptr();
        // SAFETY: the memory outlives the spans, and is used only through them.
        let span = |at: usize| unsafe { Span::new(base.add(at), 2) }.unwrap();
        let (first, second) = (span(0).buffer(&hold), span(2).buffer(&hold));
        drop(first);
        assert!(!hold.has_ended() && hold.await_end() && !is_readable());
        drop(second);
        assert!(hold.has_ended() && !hold.await_end() && is_readable());
        hold.begin();
        drop(span(0).buffer(&hold));
        assert!(hold.has_ended() && !is_readable(), "nothing waits");
    }

    #[test]
    fn memory_at_impossible_addresses_is_refused() {
        let new = |base: usize, len: usize| {
            // SAFETY: the memory is not used.
            let span = unsafe { Span::new(std::ptr::without_provenance_mut(base), len) };
            span.map(|span| span.len()).map_err(|failure| failure.errno)
        };
        assert_eq!(new(4096, 512), Ok(512));
        assert_eq!(new(0, 512), Err(libc::EINVAL));
        assert_eq!(new(4096, usize::MAX), Err(libc::EINVAL));
        assert_eq!(new(usize::MAX - 100, 512), Err(libc::EINVAL));
    }
}
