//! Number of a path, used by all parts of the server to refer to it.

use std::fmt;

/// Number of a path in this process: at least 1, below 2^48 (`engine/io/permits.rs`), never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathKey(pub u64);

impl fmt::Display for PathKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
