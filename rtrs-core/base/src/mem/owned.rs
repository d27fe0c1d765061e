//! Bytes that can be borrowed like a vector and turned into a region for an IO.
//!
//! A region lends no references, because other holders may change its bytes. [`OwnedBytes`] is the
//! only handle to its region, so it can lend them. [`OwnedBytes::share`] turns it into handles for
//! an IO, and [`OwnedBytes::reclaim`] turns the last of them back into an [`OwnedBytes`]. Memory
//! that is not a vector, such as that of a C program, is wrapped by [`OwnedBytes::foreign`].

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use super::region::Region;

/// Bytes of a vector or of foreign memory, with a single holder.
pub struct OwnedBytes {
    /// Made by [`OwnedBytes::from`] or [`OwnedBytes::foreign`]; this is its only handle.
    region: Arc<Region>,
}

impl OwnedBytes {
    /// Wraps memory that belongs to `owner`, which is dropped after the last IO that uses the
    /// memory.
    ///
    /// # Safety
    /// The `len` bytes at `base` are mapped until `owner` is dropped: for reading, and for writing
    /// if an IO writes to them. No Rust reference to them is used until then, except through the
    /// result; while the result is borrowed as a slice, nothing else changes the bytes.
    #[must_use]
    pub unsafe fn foreign(base: NonNull<u8>, len: usize, owner: impl Any + Send + Sync) -> Self {
        // SAFETY: required of the caller.
        let region = unsafe { Region::foreign(base, len, owner) };
        Self { region }
    }

    /// Returns the number of bytes, without creating a reference to them.
    #[must_use]
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }

    /// Turns the bytes into a region for an IO.
    #[must_use]
    pub fn share(self) -> SharedBytes {
        SharedBytes(self.region)
    }

    /// Takes the bytes back after an IO. If an operation still uses them, such as a send on a path
    /// that has failed, the result is a copy, and the operation keeps the original.
    #[must_use]
    pub fn reclaim(SharedBytes(mut region): SharedBytes) -> Self {
        if Arc::get_mut(&mut region).is_some() {
            return Self { region };
        }
        region.whole().to_vec().into()
    }
}

/// Region of an [`OwnedBytes`] during an IO.
#[derive(Clone, Debug)]
pub struct SharedBytes(Arc<Region>);

impl SharedBytes {
    /// Returns the region.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.0
    }
}

impl From<Vec<u8>> for OwnedBytes {
    fn from(mut bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        let base = NonNull::new(bytes.as_mut_ptr()).unwrap_or_else(NonNull::dangling);
        // SAFETY: the bytes do not move with the vector and stay allocated until the region drops
        // it; nothing else uses it.
        let region = unsafe { Region::foreign(base, len, bytes) };
        Self { region }
    }
}

impl Deref for OwnedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the vector, or the caller of `foreign`, has initialized these bytes. This is the
        // only handle to the region, so no operation or slice uses it, and changes need `&mut
        // self`.
        unsafe { slice::from_raw_parts(self.region.address(0), self.region.len()) }
    }
}

impl DerefMut for OwnedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.region.address(0), self.region.len()) }
    }
}

impl fmt::Debug for OwnedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedBytes").field("len", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_in_place_if_nothing_else_holds_them() {
        let mut bytes = OwnedBytes::from(vec![7; 100]);
        bytes[3] = 1;
        let at = bytes.as_ptr();
        let shared = bytes.share();
        shared.region().copy_in(4, &[2, 3]);
        let bytes = OwnedBytes::reclaim(shared);
        assert_eq!((bytes.as_ptr(), &bytes[2..7]), (at, &[7, 1, 2, 3, 7][..]));
    }

    #[test]
    fn an_operation_that_still_uses_the_bytes_keeps_the_original() {
        let shared = OwnedBytes::from(vec![7; 100]).share();
        let late = shared.region().slice(10, 5).unwrap();
        let mut bytes = OwnedBytes::reclaim(shared);
        late.fill(9);
        assert_eq!(&bytes[..], [7; 100]);
        bytes.fill(1);
        assert_eq!(late.to_vec(), [9; 5]);
        let also = OwnedBytes::from(vec![7; 100]).share();
        let other = also.clone();
        assert_ne!(OwnedBytes::reclaim(also).as_ptr(), OwnedBytes::reclaim(other).as_ptr());
    }

    #[test]
    fn the_owner_of_foreign_bytes_is_dropped_after_the_last_io() {
        let mut memory = vec![7; 100];
        let base = NonNull::new(memory.as_mut_ptr()).unwrap();
        let owner = Arc::new(memory);
        // SAFETY: the owner keeps the bytes, which are used only through the result.
        let bytes = unsafe { OwnedBytes::foreign(base, 100, Arc::clone(&owner)) };
        assert_eq!((bytes.len(), bytes.is_empty()), (100, false));
        let shared = bytes.share();
        let late = shared.region().slice(10, 5).unwrap();
        let copy = OwnedBytes::reclaim(shared);
        assert_ne!(copy.as_ptr(), base.as_ptr().cast_const());
        assert_eq!(Arc::strong_count(&owner), 2, "an operation still uses the bytes");
        drop(late);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn empty_bytes_are_accepted() {
        let bytes = OwnedBytes::from(Vec::new());
        assert!(OwnedBytes::reclaim(bytes.share()).is_empty());
    }
}
