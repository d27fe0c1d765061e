//! Map of the server: what was typed (`cli`), what can be said (`config`), what will run (`plan`),
//! what exports are made of (`backend`), running it (`serve`), and speaking with one that runs
//! (`admin`).
//!
//! The walk of a request: `driver` reaps its immediate, `session/shard` finds its path,
//! `session/walk` steps it (`session/request` names the steps), `devices` runs it, `path/io`
//! answers. Beside it, on core 0: `listener` and `session/control`.
#![forbid(unsafe_code)]

mod admin;
pub mod backend;
pub mod cli;
pub mod config;
pub mod devices;
pub mod driver;
pub mod epoch;
mod error;
pub mod export;
#[cfg(any(test, feature = "test-util"))]
mod fuzz;
pub mod identity;
pub mod listener;
pub mod mail;
pub mod path;
pub mod plan;
mod portals;
mod search;
mod serve;
pub mod server;
pub mod session;
mod state;
pub mod stats;

pub use admin::run;
pub use cli::LowArgs;
pub use driver::ServerShard;
pub use error::{Error, ErrorKind};
pub use export::{Export, ExportIndex, ExportTable};
#[cfg(any(test, feature = "test-util"))]
pub use fuzz::fuzz_paths;
pub use plan::{ExportPlan, Listen, Plan};
pub use serve::{serve, serve_over};
pub use server::ServerCore;
pub use session::{ServerLife, SessionParams};
