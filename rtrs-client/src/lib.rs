//! Map of the client: what was typed (`cli`), what can be said (`config`), what will run (`plan`),
//! and running it (`run`).
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
mod error;
pub mod plan;
mod run;

pub use cli::LowArgs;
pub use error::{Chain, Error, ErrorKind};
pub use plan::{AttachPlan, BenchPlan, Front, Plan, RunDir, SessionPlan};
pub use run::run;
