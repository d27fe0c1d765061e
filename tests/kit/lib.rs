//! Support for the integration tests: functions that start real daemons on the loopback interface,
//! use them with real programs, and stop them.
//!
//! Every wait has a time limit and panics with a description of the missing event; every process
//! that a test starts is killed by process ID when its handle is dropped, even when the test
//! panics; every test works in its own directory. A test that lacks a required tool is skipped with
//! a message ([`requires`]).
//!
//! Used only by the test binaries of this crate. Most tests start with [`Stand`]: one server, one
//! attached session, one NBD front.
#![forbid(unsafe_code)]

mod activation;
mod cable;
mod client;
mod exposition;
mod image;
mod nbd_raw;
mod peer;
mod proc;
pub mod raw_mpa;
mod requires;
mod scratch;
mod server;
#[path = "../sim/mod.rs"]
pub mod sim;
mod stand;
mod transport;

pub use activation::Activation;
pub use cable::{Cable, Netns};
pub use client::{Client, ClientBuilder, Front};
pub use exposition::{Exposition, Family, Sample, scrape, scrape_tcp};
pub use image::{equal_prefix, ext4_image, fill_pattern, pattern_file, sparse_file};
pub use nbd_raw::{Innocent, RawNbd, Reply, consts, go_data, option_head, request_head};
pub use peer::{Answer, Data, Peer, PeerOptions, read_message};
pub use proc::{
    Finished, Proc, bin, cpu_time, peak_memory, resident_memory, run, send_signal, wait_stopped,
};
pub use raw_mpa::RawMpa;
pub use requires::{free_port, is_root, quick, requires, skip};
pub use scratch::Scratch;
pub use server::{Server, ServerBuilder};
pub use stand::{Stand, Stream, nbd_client};
pub use transport::Transport;

use std::time::{Duration, Instant};

/// Maximum time for a command that only talks to daemons.
pub const COMMAND_TIME_MAX: Duration = Duration::from_secs(120);
/// Maximum time for a program that moves data.
pub const COPY_TIME_MAX: Duration = Duration::from_secs(300);
/// Maximum time for a daemon to exit after SIGTERM: the documented limit, plus a margin for busy
/// machines.
pub const STOP_TIME_MAX: Duration = Duration::from_secs(60);

/// Polls `check` until it returns a value; panics with `what` after `limit`.
///
/// # Panics
/// Panics when the limit has passed.
pub fn wait_for<T>(what: &str, limit: Duration, mut check: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(start.elapsed() < limit, "timed out after {limit:?} waiting for: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
