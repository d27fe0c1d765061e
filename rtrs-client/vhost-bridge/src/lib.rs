//! A library that serves any block device to a virtual machine by vhost-user-blk: the guest's
//! memory is shared, and requests and answers pass through rings in it.
//!
//! Map of the crate:
//! - `service`: the socket, and the thread that reads the messages of the virtual machine monitor;
//!   `monitor` handles them, with `config` for features and the configuration space. `exchange`
//!   waits for a complete message, and `channel` carries messages to the monitor.
//! - `lines`: log lines, and which of them share a rate limit.
//! - `command`: commands from that thread to the shards. A ring belongs to one shard; `shared`
//!   holds the state that the thread and the shards share.
//! - `queues`: a shard's rings: takes requests from them and answers them. `bells` has their event
//!   descriptors.
//! - `vring`: one ring, with `chain` for the memory of a request, `request` for its content, and
//!   `inflight` for the record that outlives the process. `fault` has the protocol violations by a
//!   driver.
//! - `dirty_log`: the pages that a live migration has to copy again; `log_call` has a message about
//!   the log.
//! - `ios`: requests in flight and the IOs that they consist of; `pieces`: their memory.
//!   `loss_reports` has the losses of acknowledged writes that the guest knows of.
//! - `driver`: a monitor and driver for tests; `stepped` runs them without threads for simulations,
//!   in which processes die at `accesses`. `fuzz` has the bodies of fuzz targets.
//! - `memory`: memory of the guest, the only module with `unsafe` (`memory.rs`).

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

#[cfg(any(test, feature = "test-util"))]
mod accesses;
mod bells;
mod chain;
mod channel;
mod command;
mod config;
mod dirty_log;
#[cfg(any(test, feature = "test-util"))]
pub mod driver;
mod exchange;
mod fault;
#[cfg(any(test, feature = "test-util"))]
mod fuzz;
mod inflight;
mod ios;
mod lines;
mod log_call;
mod loss_reports;
mod memory;
mod monitor;
mod pieces;
mod queues;
mod request;
mod service;
mod shared;
#[cfg(any(test, feature = "test-util"))]
pub mod stepped;
mod vring;

#[cfg(any(test, feature = "test-util"))]
pub use fuzz::{fuzz_messages, fuzz_ring};
pub use queues::Queues;
pub use service::{Bound, GuestOptions, Seat};

#[cfg(test)]
mod tests;
