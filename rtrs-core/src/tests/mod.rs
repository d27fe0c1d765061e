//! Fixtures shared by the tests of several crates: a scripted client, a log kept in memory,
//! certificates, a client that only performs TLS handshakes, and a Ceph cluster.
//!
//! Built only with the feature `test-util`.

mod ceph;
pub mod certificates;
mod client;
pub mod handshake;

pub use ceph::Ceph;
pub use client::{Answer, Data, PathOptions, PlayedClient, io_header, read_message};
pub use rtrs_base::kept::Kept;
