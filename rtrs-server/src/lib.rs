//! The server's modules: command line and commands (`cmd`), settings (`settings`), validated
//! settings (`plan`), backends of exports (`backend`), the process (`daemon`), and the protocol
//! between a command and a running server (`control_protocol`).
//!
//! Route of a request: `daemon/driver` reaps its immediate, `engine/io` finds its path,
//! `engine/io/pipeline` runs it (`engine/io/request` defines the states), `engine/io/devices` holds
//! the devices, `path/io` answers. The control path is in `engine/control`, on shard 0.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod access_list;
pub mod audit;
pub mod backend;
pub mod cmd;
mod control_protocol;
mod daemon;
pub mod engine;
mod error;
pub mod export;
#[cfg(any(test, feature = "test-util"))]
#[allow(clippy::too_many_lines, reason = "programs of a fuzz target have many actions")]
mod fuzz;
pub mod metrics;
pub mod path;
pub mod plan;
pub mod rate_limits;
mod save_lock;
mod segments;
pub mod settings;
mod state;
pub mod stats;

pub use cmd::LowArgs;
pub use daemon::{Reread, ServerShard, serve, serve_over};
pub use engine::ServerEngine;
pub use engine::session::{ServerInstance, SessionParams};
pub use error::{Error, ErrorKind};
pub use export::{Export, ExportIndex, ExportTable};
#[cfg(any(test, feature = "test-util"))]
pub use fuzz::{fuzz_paths, fuzz_text};
pub use plan::{Listen, Plan};
pub use rate_limits::RateLimits;
