//! What both ends of an RTRS session agree on: memory, runtime, fabric, wire and block devices.
//!
//! The only crate of the workspace with `unsafe` and with system calls; unsafe code stands in
//! `mem/region.rs` and `rt/ring.rs` (and the few files they name), nowhere else.

#![deny(unsafe_code)]

pub mod block;
pub mod config;
pub mod fabric;
pub mod ids;
pub mod limits;
#[allow(unsafe_code)]
pub mod mem;
#[allow(unsafe_code)]
pub mod rt;
pub mod status;
pub mod time;
pub mod wire;
