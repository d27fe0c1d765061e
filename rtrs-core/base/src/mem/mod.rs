//! Memory accessed by sockets, disks and peers: regions and their slices, scattered buffers, fixed
//! pools, and memory shared between processes.

mod counters;
mod crc;
mod iovecs;
mod mapping;
mod message_ring;
mod owned;
mod pool;
mod region;
mod ring_words;
mod scatter;
mod shared;
mod truncation;
mod usage;

pub use counters::SharedCounters;
pub use crc::crc32c_append;
pub use iovecs::IoVecs;
pub use message_ring::{
    Front, Malformed, RingReader, RingWriter, WakeToken, Written, create_ring, open_ring,
};
pub use owned::{OwnedBytes, SharedBytes};
pub use pool::Pool;
#[cfg(any(test, feature = "test-util"))]
pub use region::skip_ids_to;
pub use region::{MemSlice, Region};
pub use scatter::{PIECES_MAX, ScatterError};
pub use shared::SharedMemory;
pub use truncation::{TruncationAlarm, survive_truncations};
pub(crate) use usage::unit_of;
pub use usage::{Counting, MemoryMeter};
