//! Front ends: the users of a session's devices, behind one trait.
//!
//! Each device of the session has one front end on each shard. It is made on its shard's thread
//! before the device is open, and gets the device once. The driver turns it and does not know its
//! kind. A new kind needs a file here with a type that implements [`FrontEnd`] and a function that
//! returns a [`MakeFrontEnds`]; a variant of `plan::Front` with its settings; and the arm of
//! `front` in `daemon/volume.rs` that maps one to the other.
//!
//! - `nbd`: NBD clients at a unix or TCP socket.
//! - `kernel_nbd`: the kernel's `/dev/nbdX`.
//! - `bench`: a workload, without NBD.
//!
//! `front_end` has the trait, `client` and `stats` its reports, and `pools` the memory of a shard.
//! `bridge` has what the front ends with NBD share.

pub(crate) mod bench;
mod bridge;
mod client;
mod front_end;
pub(crate) mod kernel_nbd;
pub(crate) mod nbd;
mod pools;
pub(crate) mod stats;

pub(crate) use client::FrontEndClient;
pub(crate) use front_end::{
    FrontEnd, FrontRequest, FrontSocket, MakeFrontEnd, MakeFrontEnds, Place, Shards,
};
pub(crate) use pools::FrontEndPools;
pub(crate) use stats::FrontEndStats;
