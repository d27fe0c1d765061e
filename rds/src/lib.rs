//! RDS over TCP in user space: reliable, ordered datagrams between (address, port) pairs, byte for
//! byte as the kernel's rds_tcp speaks them.
//!
//! The map: `wire` has the messages, `proto` the machines of a node without IO, `node` runs them
//! on a ring, `channel` is what a node and its users say to each other, `socket` the users' side.
#![forbid(unsafe_code)]

pub mod channel;
mod cmd;
mod error;
#[cfg(any(test, feature = "test-util"))]
mod fuzz;
pub mod node;
pub mod proto;
pub mod settings;
pub mod socket;
mod stress;
pub mod wire;

pub use cmd::LowArgs;
pub use error::{Error, ErrorKind};

#[cfg(any(test, feature = "test-util"))]
pub use fuzz::fuzz_stream;
