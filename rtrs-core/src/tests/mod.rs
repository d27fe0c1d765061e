//! What tests of several crates share: a client played by hand, a log kept in memory, certificates,
//! a client that only shakes hands, and a Ceph cluster.
//!
//! Built with the feature `test-util` only.

mod ceph;
pub mod certificates;
mod client;
pub mod handshake;
mod kept;

pub use ceph::Ceph;
pub use client::{Answer, Data, PathOptions, PlayedClient, io_header, read_message};
pub use kept::Kept;
