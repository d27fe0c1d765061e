//! Map of the server: what was typed (`cli`), what can be said (`config`), what will run (`plan`),
//! what exports are made of (`backend`), running it (`serve`), and speaking with one that runs
//! (`admin`).
//!
//! The way of a request: `driver` reaps its immediate, `engine/io` finds its path,
//! `engine/io/pipeline` steps it (`engine/io/request` names the states), `engine/io/devices` runs
//! it, `path/io` answers. Beside it, on shard 0: `listener` and `engine/control`.
#![forbid(unsafe_code)]

mod admin;
pub mod backend;
pub mod cli;
pub mod config;
pub mod driver;
pub mod engine;
pub mod epoch;
mod error;
pub mod export;
pub mod finder;
#[cfg(any(test, feature = "test-util"))]
mod fuzz;
pub mod identity;
pub mod listener;
pub mod path;
pub mod plan;
mod portals;
mod search;
mod serve;
mod state;
pub mod stats;

pub use admin::run;
pub use cli::LowArgs;
pub use driver::ServerShard;
pub use engine::ServerEngine;
pub use engine::session::{ServerLife, SessionParams};
pub use error::{Error, ErrorKind};
pub use export::{Export, ExportIndex, ExportTable};
#[cfg(any(test, feature = "test-util"))]
pub use fuzz::fuzz_paths;
pub use plan::{ExportPlan, Listen, Plan};
pub use serve::{serve, serve_over};
