//! A library that serves any block device over NBD, and connects to NBD servers.
//!
//! Map of the crate, in the order in which a request passes through it:
//! - `listener`: the socket that clients connect to; connections are distributed over shards.
//! - `starttls`: TLS for the clients on a TCP port, on threads in front of everything else.
//! - `conn`: one connection on one shard; `shared` with `buffers` and `requests` holds what the
//!   connections of a shard share, `buffer_pool` what the bridges of a shard share.
//! - `proto`: the NBD protocol as state machines without IO; bytes in, bytes and decisions out.
//! - `bridge`: a shard's connections, requests and device; `config` holds its limits.
//! - `group`: state shared by the shards of a device: orphaned writes of closed connections, and
//!   the order of changes to parts of blocks, which `cut` finds in a request.
//! - `kernel`: the same shards behind a kernel block device, /dev/nbdX.
//! - `dial`, with `proto/client`: the other side, a connection to an NBD server.
//! - `send_buffer`: send buffer sizes of unix sockets; `notices`: log lines that clients trigger.
//! - `export`, `status`: a device and its errors in NBD terms.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod bridge;
mod buffer_pool;
mod buffers;
mod config;
mod conn;
mod cut;
mod dial;
mod export;
mod group;
pub mod kernel;
mod listener;
mod notices;
mod peer;
mod proto;
mod requests;
mod send_buffer;
mod shared;
mod starttls;
mod status;

pub use bridge::Bridge;
pub use buffer_pool::BufferPools;
pub use config::BridgeConfig;
pub use dial::{DialError, ServerAddress, dial, flush};
pub use export::export_info;
pub use group::{Group, Seat};
pub use listener::{Bound, Endpoint, Listener};
pub use peer::Peer;
pub use proto::{
    AfterRefusal, BadExport, ExportInfo, Exports, Handshake, Negotiated, Op, Outcome,
    ProtocolError, Refusal, Request, Rules, Terms, Validated, client, reply, wire,
};
pub use starttls::{RELAYS_MAX, Relays, TlsMode};

/// Bodies of the fuzz targets; not part of the API.
#[cfg(any(test, feature = "test-util"))]
#[doc(hidden)]
pub mod fuzz {
    pub use crate::proto::fuzz::{fuzz_handshake, fuzz_transmission};
}
