//! The process of a session: starts the threads that carry the IO of a plan, and stops them.
//!
//! - `attach`: the daemon behind `rtrs-client attach`; `attached`: its session until it ends;
//! - `config`: the engine's configuration; `fabrics`: its fabrics;
//! - `launch`: start of the threads; `driver`: one shard's engine on its ring, with its
//!   `providers`, its `fronts` and their `endings`; `shutdown`: the end of all shards;
//! - `notices`: notifications from shard 0 to the process; `events` and `signals`: input to the
//!   process;
//! - `volume`: a volume of the session with its socket and files; `volume_add`: volumes added
//!   later; `roster`: the list of volumes and their settings;
//! - `device`: the kernel block device;
//! - `control_socket`: serves commands, from the data in `report`; `waiting`: commands that wait
//!   for the process; `metrics`: serves scrapes from the same data;
//! - `open_files`: the limit on open descriptors;
//! - `required_paths`: waits during an attach for required paths and first results of others;
//! - `link_watcher`: network changes on the host; `resolver`: addresses of unreached paths;
//!   `saved`: state that the process leaves for a takeover.

pub(crate) mod attach;
mod attached;
pub(crate) mod config;
pub(crate) mod control_socket;
pub(crate) mod device;
pub(crate) mod driver;
mod endings;
pub(crate) mod events;
pub(crate) mod fabrics;
mod fronts;
pub(crate) mod launch;
mod link_watcher;
mod metrics;
pub(crate) mod notices;
mod open_files;
mod providers;
mod report;
mod required_paths;
mod resolver;
mod roster;
pub(crate) mod saved;
mod shutdown;
pub(crate) mod signals;
mod volume;
mod volume_add;
pub(crate) mod waiting;
