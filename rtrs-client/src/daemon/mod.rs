//! The process of a session: from a plan to threads that carry IO, and to their end.
//!
//! `attach` is the daemon behind `rtrs-client attach`, and `attached` its session until the end.
//! Beside them: `config` makes the engine's configuration, `fabrics` the fabrics, `launch` starts
//! the threads, `driver` runs one shard's engine on its ring, with its `fronts`, and `notices` is
//! what it tells the process; `events` and `signals` are what that waits for, `volume` is a volume
//! of the session with its socket and files, `volume_add` adds one later, `roster` says who they
//! are, `device` is the block device of the kernel, `control_socket` serves the commands with what
//! `report` knows, `waiting` are those that wait for the process, `metrics` serves scrapes with it,
//! `link_watcher` hears of links that come up, and `saved` is what the process leaves for a
//! takeover.

pub(crate) mod attach;
mod attached;
pub(crate) mod config;
pub(crate) mod control_socket;
pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod events;
pub(crate) mod fabrics;
mod fronts;
pub(crate) mod launch;
mod link_watcher;
mod metrics;
pub(crate) mod notices;
mod report;
mod roster;
pub(crate) mod saved;
pub(crate) mod signals;
mod volume;
mod volume_add;
pub(crate) mod waiting;
