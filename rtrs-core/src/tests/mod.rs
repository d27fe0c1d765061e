//! What tests of several crates share: a client played by hand.
//!
//! Built with the feature `test-util` only.

mod client;

pub use client::{Answer, Data, PathOptions, PlayedClient, io_header, read_message};
