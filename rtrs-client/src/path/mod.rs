//! A session's path: one pair of addresses.
//!
//! `state.rs` and `handshake.rs` are the control shard's view (states, the steps of connecting);
//! `refusal.rs` decodes a server's refusal of a connection; `fault.rs` holds the reasons why a
//! connection cannot continue; `shard.rs` is one shard's connection of the path; `io.rs` turns an
//! IO into a work request and an immediate into an answer.

pub(crate) mod fault;
pub(crate) mod handshake;
pub(crate) mod io;
pub(crate) mod refusal;
pub(crate) mod shard;
pub(crate) mod state;
