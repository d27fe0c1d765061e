//! Map of the server: what was typed (`cli`), what can be said (`config`), what will run (`plan`),
//! what exports are made of (`backend`), and running it (`serve`).
#![forbid(unsafe_code)]

pub mod backend;
pub mod cli;
pub mod config;
mod error;
pub mod plan;
mod serve;

pub use cli::LowArgs;
pub use error::{Chain, Error, ErrorKind};
pub use plan::{ExportPlan, Plan};
pub use serve::serve;
