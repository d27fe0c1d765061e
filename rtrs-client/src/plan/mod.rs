//! The validated settings of the commands that have a session of their own, with every default
//! filled in.
//!
//! `new` validates what the settings mean together; apart from user, host name and environment it
//! does not look at the system. `check` then looks at what the plan needs (addresses, socket paths)
//! before anything is connected or started. Every error names the setting and its value, and says
//! what to write instead.

mod attach;
mod bench;
mod change;
mod device_name;
mod session;
mod volumes;

pub use attach::{AttachPlan, Front};
pub use bench::BenchPlan;
pub(crate) use device_name::{cannot_attach, device_failed, export_of, is_backend_of};
pub use session::SessionPlan;
pub(crate) use session::{check_name, check_path, default_session_name, path_name};
pub(crate) use volumes::{OF_ADDED, of_session, said};

#[cfg(test)]
mod tests;
