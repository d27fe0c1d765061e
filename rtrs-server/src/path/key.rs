//! The number of a path, by which every part of the server names it.

use std::fmt;

/// A path's number in this process, from 1, never used again. Below 2^48 (`engine/io/permits.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathKey(pub u64);

impl fmt::Display for PathKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
