//! The process of a session: from a plan to threads that carry IO, and to their end.
//!
//! `attach` is the daemon behind `rtrs-client attach`. Beside it: `config` makes the engine's
//! configuration, `fabrics` the fabrics, `launch` starts the threads, `driver` runs one shard's
//! engine on its ring, `events` and `signals` are what the process waits for, `device` the block
//! device of the kernel, `control_socket` serves the commands with what `report` knows, `metrics`
//! serves scrapes with it, `link_watcher` hears of links that come up, and `saved` is what the
//! process leaves for a takeover.

pub(crate) mod attach;
pub(crate) mod config;
pub(crate) mod control_socket;
pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod events;
pub(crate) mod fabrics;
pub(crate) mod launch;
mod link_watcher;
mod metrics;
mod report;
pub(crate) mod saved;
pub(crate) mod signals;
