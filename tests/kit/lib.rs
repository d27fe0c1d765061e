//! Support for the integration tests: everything a test needs to stand real daemons up on the
//! loopback, drive them with real programs and take them down again.
//!
//! Promises: every wait has a bound and a panic that says what did not happen; whatever a test
//! starts is ended by process id when its handle is dropped, also when the test panics; every test
//! works in a directory of its own. A missing tool is a skip that says so aloud ([`requires`]).
//!
//! Called by the test binaries of this crate only. [`Stand`] is the usual way in: one server, one
//! attached session, one NBD front.
#![forbid(unsafe_code)]

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

pub use cable::{Cable, Netns};
pub use client::{Client, ClientBuilder, Front};
pub use exposition::{Exposition, Family, Sample, scrape, scrape_tcp};
pub use image::{equal_prefix, ext4_image, fill_pattern, pattern_file, sparse_file};
pub use nbd_raw::{Innocent, RawNbd, Reply, consts, go_data, option_head, request_head};
pub use peer::{Answer, Data, Peer, PeerOptions, read_message};
pub use proc::{Finished, Proc, bin, cpu_time, peak_memory, resident_memory, run};
pub use raw_mpa::RawMpa;
pub use requires::{free_port, is_root, quick, requires, skip};
pub use scratch::Scratch;
pub use server::{Server, ServerBuilder};
pub use stand::{Stand, Stream, nbd_client};
pub use transport::Transport;

use std::time::{Duration, Instant};

/// How long a command that only talks to daemons may take.
pub const COMMAND_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a program that moves data may take.
pub const COPY_TIME_MAX: Duration = Duration::from_secs(180);
/// How long a daemon has from SIGTERM to its exit: the bound the daemons promise, and some air.
pub const STOP_TIME_MAX: Duration = Duration::from_secs(20);

/// Polls `check` until it gives a value, at most `limit`; panics with `what` after that.
///
/// # Panics
/// When the limit is over.
pub fn wait_for<T>(what: &str, limit: Duration, mut check: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(start.elapsed() < limit, "waited {limit:?} in vain for: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
