//! A running node: its state machines on a ring, with TCP connections on one side and users on the
//! other.
//!
//! `driver` drives the parts: `tcp` holds the connections to peers, `clients` the users in this and
//! other processes, and `listen` the listening sockets for both. `start` runs a node on a thread.

mod answers;
mod blocked;
mod client;
mod clients;
mod conn;
mod controls;
mod driver;
mod listen;
mod report;
mod shortage;
mod start;
mod tcp;
#[cfg(test)]
mod tests;
mod unbound;
mod untaken;

pub use conn::BuffersError;
pub(crate) use controls::controls_max;
pub use driver::{App, Command, NoApp, NodeShard};
pub use listen::UserSocket;
pub use report::{ClientReport, CongestedPort, NodeReport, PathReport, PeerReport};
pub use start::{NodeHandle, NodeOptions, OwnNode, StartError, run_with};
