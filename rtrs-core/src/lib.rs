//! Shared foundation of both ends of an RTRS session: memory, runtime, fabric, wire format and
//! block devices.
//!
//! Memory, runtime, settings, logs and metrics come from `rtrs-base`, which this crate re-exports.
//!
//! Besides `rtrs-base`, `rds-preload` and one file of `vhost-bridge`, this is the only crate of the
//! workspace with `unsafe`. Here it is limited to memory shared with a device
//! (`fabric/verbs/sys/cm.rs`, `fabric/verbs/sys/cq.rs`, `fabric/verbs/sys/device.rs`,
//! `fabric/verbs/sys/qp.rs`, `fabric/verbs/sys/queue.rs`) and to wrappers of a library loaded at
//! run time (`rbd.rs`, `rbd/lock.rs`); `tests/tidy/main.rs` has the list.

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
pub mod losses;
pub mod orphans;
pub mod proto;
pub mod ranges;
#[allow(unsafe_code)]
pub mod rbd;
pub mod shares;
pub mod status;
pub mod sync_order;
#[cfg(any(test, feature = "test-util"))]
pub mod tests;
pub mod tls;
pub mod top;
pub mod wire;

#[cfg(any(test, feature = "test-util"))]
pub use rtrs_base::skip;
pub use rtrs_base::{
    choices, local, log_limit, logging, mem, metrics, mutant, mutated, paths, prng, rt, settings,
    sync, text_values, time,
};
