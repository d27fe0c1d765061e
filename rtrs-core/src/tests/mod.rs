//! What tests of several crates share: a client played by hand, a log kept in memory, certificates,
//! and a client that only shakes hands.
//!
//! Built with the feature `test-util` only.

pub mod certificates;
mod client;
pub mod handshake;
mod kept;

pub use client::{Answer, Data, PathOptions, PlayedClient, io_header, read_message};
pub use kept::Kept;
