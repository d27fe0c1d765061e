//! Memory for requests.

use std::fmt;
use std::ops::{Deref, DerefMut};

use rtrs_core::mem::{OwnedBytes, SharedBytes};

/// Memory for a request: a fixed number of bytes, used as a slice.
///
/// A [`Request`](crate::Request) takes its buffers, and the [`Completion`](crate::Completion)
/// returns them, so no byte changes unexpectedly. If the library still needs the memory by then,
/// such as for a send on a failed path, the completion holds a copy.
///
/// ```
/// let mut buffer = rtrs::Buffer::zeroed(4096);
/// buffer[..5].copy_from_slice(b"hello");
/// let other = rtrs::Buffer::from(vec![7; 512]);
/// assert_eq!((&buffer[..6], other.len()), (&b"hello\0"[..], 512));
/// ```
pub struct Buffer(OwnedBytes);

impl Buffer {
    /// Creates a buffer of `len` zeroes.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        vec![0; len].into()
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn share(self) -> SharedBytes {
        self.0.share()
    }

    pub(crate) fn reclaim(shared: SharedBytes) -> Self {
        Self(OwnedBytes::reclaim(shared))
    }
}

impl From<Vec<u8>> for Buffer {
    /// Takes over the bytes of a vector without copying them.
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl From<OwnedBytes> for Buffer {
    /// Wraps the engine's memory type, for `librtrs`.
    fn from(bytes: OwnedBytes) -> Self {
        Self(bytes)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}
