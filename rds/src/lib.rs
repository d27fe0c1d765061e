//! RDS over TCP in user space: reliable, ordered datagrams between (address, port) pairs, wire
//! compatible with the kernel's rds_tcp.
//!
//! Map of the crate: `wire` contains the message formats; `proto` contains the state machines of a
//! node, without IO; `node` runs them on a ring; `channel` is the interface between a node and its
//! users; `socket` is the users' side of it.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

pub mod channel;
mod cmd;
mod error;
#[cfg(any(test, feature = "test-util"))]
mod fuzz;
#[cfg(any(test, feature = "test-util"))]
mod fuzz_ring;
pub mod metrics;
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
#[cfg(any(test, feature = "test-util"))]
pub use fuzz_ring::fuzz_ring;
