//! Map of the server: what was typed (`cli`), what can be said (`config`), what will run (`plan`),
//! and running it (`serve`).
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
mod error;
pub mod plan;
mod serve;

pub use cli::LowArgs;
pub use error::{Chain, Error, ErrorKind};
pub use plan::{ExportPlan, Plan};
pub use serve::serve;
