//! What tests of several crates share: a client played by hand, and a log kept in memory.
//!
//! Built with the feature `test-util` only.

mod client;
mod kept;

pub use client::{Answer, Data, PathOptions, PlayedClient, io_header, read_message};
pub use kept::Kept;
