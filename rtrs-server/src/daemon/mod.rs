//! The server process: runs a plan on threads.
//!
//! `serve` starts and ends everything; `shards` runs the shards' threads; `portals` creates the
//! providers and listeners; `driver` runs the engine of one shard on its ring; `search` finds
//! exports under the search path; `identity` determines the IDs of disks and files;
//! `control_socket` serves the commands, which reach the control shard through `control_shard`;
//! `exports` changes the exports while the server runs, and `access` and `reload` adapt them to the
//! configuration, in the order of `readings`; `status` summarizes the server; `tunables` changes
//! settings while it runs; `sizes` detects exports that grow; `targets` reopens exports whose path
//! leads to another file; `audit` writes the audit log; `expiry` warns about a certificate that is
//! about to expire; `authenticate` checks the proofs of clients on threads; `metrics` collects the
//! data for scrapes; `open_files` compares the limit on descriptors with the settings; `privileges`
//! changes to another user.

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
mod readings;
mod reload;
mod retry;
#[cfg(test)]
pub(crate) mod rig;
mod search;
mod serve;
mod shards;
mod sizes;
mod status;
mod stuck_threads;
mod targets;
mod tunables;
mod warnings;

pub(crate) use check::{Checked, Running, check_start};
pub use driver::ServerShard;
pub use reload::Reread;
pub use serve::{serve, serve_over};
pub(crate) use tunables::LOG;
pub(crate) use warnings::warnings;
