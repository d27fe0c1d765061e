//! The client end of RTRS: a session with a server as a block device, served over NBD.
//!
//! Map of the crate: what was typed (`cli`), what can be said (`config`), what will run (`plan`),
//! running it (`run`, `hold`, `device`, `provide`, `launch`, `network`, `control`, `online`,
//! `report`, `bench`), or looking at a link without a session (`ping`, `doctor`); the session
//! (`session`) over its paths (`path`) as machines without IO, `driver`, which binds them to a
//! core, and `machine`, by which a simulator drives them.

#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
mod control;
mod device;
mod doctor;
mod driver;
mod error;
mod frontend;
#[cfg(any(test, feature = "test-util"))]
mod fuzz;
mod hold;
mod kept;
mod launch;
pub mod machine;
mod network;
mod online;
mod path;
mod ping;
pub mod plan;
mod provide;
mod report;
mod run;
mod session;
mod stats;

pub use cli::LowArgs;
pub use error::{Error, ErrorKind};
#[cfg(any(test, feature = "test-util"))]
pub use fuzz::fuzz_paths;
pub use plan::{AttachPlan, BenchPlan, DoctorPlan, Front, PingPlan, Plan, RunDir, SessionPlan};
pub use run::run;
pub use session::SessionDevice;
pub use session::device::SessionFailure;
pub use session::{Change, Failover, Leaving, NoPath, PathTarget, Policy, Rhythm, SessionConfig};
pub use stats::{OpCount, PathCount, ShardStats};
