//! Wrappers over any backend, as nbdkit's filters are: each changes one thing and passes the
//! rest through. They stack in any order; [`super::open_target`] builds the usual stack.

mod delay;
mod error;
mod pause;
mod readonly;

pub use delay::DelaySource;
pub use error::{ErrorPlan, ErrorSource};
pub use pause::{PauseHandle, PauseSource};
pub use readonly::ReadOnlySource;
