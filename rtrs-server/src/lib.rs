//! Map of the server: command line and commands (`cmd`), settings (`settings`), what they come to
//! (`plan`), what exports are made of (`backend`), the process (`daemon`), and what a command and a
//! running server say to each other (`control_protocol`).
//!
//! The way of a request: `daemon/driver` reaps its immediate, `engine/io` finds its path,
//! `engine/io/pipeline` runs it (`engine/io/request` names the states), `engine/io/devices` has the
//! devices, `path/io` answers. Beside it, on shard 0: `engine/control`.
#![forbid(unsafe_code)]

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
mod fuzz;
pub mod metrics;
pub mod path;
pub mod plan;
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
