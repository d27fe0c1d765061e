//! Layers over any backend, similar to nbdkit's filters: each changes one thing and passes the rest
//! through. They stack in any order; [`super::open_target`] builds the usual stack.
//!
//! `filter.rs` contains the common implementation.

mod delay;
mod error;
mod filter;
mod pause;
mod readonly;

pub use delay::delay;
pub use error::{ErrorPlan, errors};
pub use filter::Layer;
pub use pause::{PauseHandle, pause};
pub use readonly::read_only;
