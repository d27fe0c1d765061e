//! Parts that the machines of both ends share: legal moves as data, heartbeats, backoff.

mod backoff;
mod heartbeat;
mod transition;

pub use backoff::Backoff;
pub use heartbeat::{Heartbeat, HeartbeatAction};
pub use transition::{Moves, allowed, step, table};
