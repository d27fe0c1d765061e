//! Shared foundation of both ends of an RTRS session: memory, runtime, fabric, wire format and
//! block devices.
//!
//! This is the only crate of the workspace with `unsafe` besides `rds-preload`. Unsafe code is
//! limited to memory shared with the kernel or a peer (`mem/region.rs`, `rt/ring.rs`), with other
//! processes (`mem/shared.rs`) or with a device (`fabric/verbs/sys/cm.rs`,
//! `fabric/verbs/sys/cq.rs`, `fabric/verbs/sys/device.rs`, `fabric/verbs/sys/qp.rs`,
//! `fabric/verbs/sys/queue.rs`), and to wrappers of single system calls (`rt/mailbox.rs`,
//! `rt/affinity.rs`, `rt/clock.rs`, `rt/process.rs`, `rt/blkdev.rs`, `rt/socket.rs`) and of a
//! library that is loaded (`rbd.rs`, `rbd/lock.rs`); `tests/tidy/main.rs` has the list.

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

pub mod block;
pub mod extents;
pub mod fabric;
pub mod front_end;
pub mod gateway;
pub mod identity;
pub mod ids;
pub mod limits;
pub mod local;
pub mod log_limit;
pub mod logging;
pub mod losses;
#[allow(unsafe_code)]
pub mod mem;
pub mod metrics;
pub mod mutant;
pub mod orphans;
pub mod prng;
pub mod proto;
pub mod ranges;
#[allow(unsafe_code)]
pub mod rbd;
#[allow(unsafe_code)]
pub mod rt;
pub mod settings;
pub mod shares;
#[cfg(any(test, feature = "test-util"))]
pub mod skip;
pub mod status;
pub mod sync;
pub mod sync_order;
#[cfg(any(test, feature = "test-util"))]
pub mod tests;
pub mod time;
pub mod tls;
pub mod top;
pub mod wire;
