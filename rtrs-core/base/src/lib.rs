//! Foundation of every program of the workspace: time, memory, runtime, settings, logs, metrics and
//! local sockets. `rtrs-core` adds what RTRS needs and re-exports all of this; `rds` needs only
//! this crate.
//!
//! Unsafe code is limited to memory shared with the kernel or a peer (`mem/region.rs`, its tests in
//! `mem/region/tests.rs`, `mem/iovecs.rs`, `rt/ring.rs`) or with other processes
//! (`mem/mapping.rs`), to such memory with a single handle (`mem/owned.rs`), to the signal for such
//! memory that another process took away (`mem/truncation.rs`, `mem/truncation/zeroes.rs`), and to
//! wrappers of single system calls (`rt/mailbox.rs`, `rt/affinity.rs`, `rt/clock.rs`,
//! `rt/process.rs`, `rt/blkdev.rs`, `rt/socket.rs`); `tests/tidy/main.rs` has the list.

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

#[cfg(any(test, feature = "test-util"))]
pub mod kept;
pub mod local;
pub mod log_limit;
pub mod logging;
#[allow(unsafe_code)]
pub mod mem;
pub mod metrics;
pub mod mutant;
pub mod paths;
pub mod prng;
#[allow(unsafe_code)]
pub mod rt;
pub mod settings;
#[cfg(any(test, feature = "test-util"))]
pub mod skip;
pub mod sync;
pub mod time;
