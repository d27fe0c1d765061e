//! What tests of several crates share: a client played by hand, a log kept in memory, certificates.
//!
//! Built with the feature `test-util` only.

pub mod certificates;
mod client;
mod kept;

pub use client::{Answer, Data, PathOptions, PlayedClient, io_header, read_message};
pub use kept::Kept;
