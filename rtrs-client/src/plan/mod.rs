//! Validated settings of the commands that have their own session, including all defaults.
//!
//! `new` validates the settings in combination. It does not inspect the system, apart from user,
//! host name and environment. `check` then inspects the resources that the plan needs (addresses,
//! socket paths) before any connection or start. Every error names the setting and its value, and
//! suggests a correction.

mod attach;
mod bench;
mod change;
mod device_name;
mod embed;
mod hosts;
mod passed;
mod session;
mod uri;
mod volumes;

pub use attach::{AttachPlan, Front};
pub use bench::BenchPlan;
pub(crate) use device_name::{cannot_attach, device_failed, volume_of};
pub use embed::{EMBED_DEPTH_MAX, EmbedOptions, EmbedPlan};
pub(crate) use hosts::{resolve, resolve_all};
pub use session::SessionPlan;
pub(crate) use session::{check_name, check_path, default_session_name, path_name};
pub use uri::VolumeUri;
pub(crate) use volumes::{LaterVolume, OF_ADDED, VolumeName, non_default, of_session, repeated};

#[cfg(test)]
mod tests;
