//! Memory accessed by sockets, disks and peers: regions and their slices, scattered buffers, fixed
//! pools, and memory shared between processes.

mod counters;
mod crc;
mod delivery_ring;
mod iovecs;
mod long_bodies;
mod mapping;
mod message_ring;
mod owned;
mod pool;
mod region;
mod ring_area;
mod ring_words;
mod scatter;
mod shared;
mod token_words;
mod truncation;
mod usage;

pub use counters::SharedCounters;
pub use crc::crc32c_append;
pub use delivery_ring::{
    Delivery, DeliveryReader, DeliveryWriter, Overwritten, Taken, WaitsAlone, is_older_token,
};
pub use iovecs::IoVecs;
pub use message_ring::{
    Front, Malformed, OtherEnds, OwnEnds, RingReader, RingSizes, RingWriter, WakeToken, Written,
    create_ring, open_ring,
};
pub use owned::{OwnedBytes, SharedBytes};
pub use pool::Pool;
#[cfg(any(test, feature = "test-util"))]
pub use region::skip_ids_to;
pub use region::{MemSlice, Region};
pub use scatter::{PIECES_MAX, ScatterError};
pub use shared::SharedMemory;
pub use truncation::{RegionShare, TruncationAlarm, survive_truncations};
pub(crate) use usage::unit_of;
pub use usage::{Counting, MemoryMeter};
