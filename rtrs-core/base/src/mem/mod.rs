//! Memory accessed by sockets, disks and peers: page-aligned regions and their slices, fixed pools,
//! and memory shared between processes.

mod crc;
mod pool;
mod region;
mod shared;
mod usage;

pub use crc::crc32c_append;
pub use pool::Pool;
#[cfg(any(test, feature = "test-util"))]
pub use region::skip_ids_to;
pub use region::{IoVecs, MemSlice, Region};
pub use shared::SharedMemory;
pub(crate) use usage::unit_of;
pub use usage::{Counting, MemoryMeter};
