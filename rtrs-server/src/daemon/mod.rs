//! The server's process: from a plan to threads that serve.
//!
//! `serve` starts and ends everything; `portals` makes the providers and listens, `driver` runs the
//! engine of one shard on its ring. `search` finds exports below the search path, `identity` says
//! which disk or file an export is, `control_socket` serves the commands, which reach the control
//! shard through `control_shard`, `exports` changes what is exported while the server runs,
//! `access` and `reload` make it what the configuration says, `sizes` notices exports that grow,
//! `targets` has exports opened again whose path leads to another file,
//! `audit` writes the audit log, `expiry` reminds of a certificate that expires, `authenticate` has
//! threads check the proofs of clients, `metrics` collects what scrapes get, `open_files` compares
//! the limit of descriptors with the settings, `privileges` goes on as another user.

mod access;
mod audit;
mod authenticate;
mod check;
mod control_shard;
mod control_socket;
mod driver;
mod expiry;
mod exports;
mod identity;
mod memory_max;
mod metrics;
mod open_files;
mod portals;
mod privileges;
mod reload;
#[cfg(test)]
pub(crate) mod rig;
mod search;
mod serve;
mod sizes;
mod targets;
mod warnings;

pub(crate) use check::{Running, check_start};
pub use driver::ServerShard;
pub use reload::Reread;
pub use serve::{serve, serve_over};
pub(crate) use warnings::warnings;
