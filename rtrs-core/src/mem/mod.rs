//! Memory that sockets, disks and peers reach: page-aligned regions, slices of them, fixed pools.

mod pool;
mod region;

pub use pool::Pool;
pub use region::{IoVecs, MemSlice, Region};
