//! Client end of RTRS: a session with a server as a block device, served over NBD.
//!
//! The crate consists of: command line and commands (`cmd`), settings (`settings`), the plans made
//! from them (`plan`), the file that lists all volumes of a host (`volumes`), the process of a
//! session (`daemon`), volumes within another program (`embed`) and copies of them (`copy`), the
//! protocol between a command and a session's process (`control_protocol`), the front ends that use
//! the device (`frontend`), and the engine (`engine`) of a session over its paths (`path`). The
//! engine itself does no IO, so it also runs in the simulator.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

pub mod cmd;
mod control_protocol;
mod copy;
mod daemon;
pub mod embed;
pub mod engine;
mod error;
mod frontend;
#[cfg(any(test, feature = "test-util"))]
#[allow(clippy::too_many_lines, reason = "programs of a fuzz target have many actions")]
mod fuzz;
pub mod metrics;
mod parts;
mod path;
pub mod plan;
mod session_log;
pub mod settings;
mod stats;
mod tls;
mod volumes;

pub use cmd::{LowArgs, without_aliases};
pub use engine::{
    Change, ChangeError, DeviceIndex, Failover, HeartbeatSettings, Leaving, NoPath, PATH_RUN,
    PathTarget, Policy, SessionConfig, SessionDevice, SessionFailure, SlowIo, Tuning, Unresolved,
    VOLUMES_MAX, VolumeConfig, VolumeStatus,
};
pub use error::{Error, ErrorKind};
#[cfg(any(test, feature = "test-util"))]
pub use fuzz::fuzz_paths;
pub use plan::{AttachPlan, BenchPlan, Front, SessionPlan};
pub use stats::{DeviceStats, OpCount, PathCount, ShardStats};
