//! Parts that the machines of both ends share: legal moves as data, heartbeats, backoff; and both
//! ends of the ping.

mod backoff;
mod heartbeat;
pub mod ping;
mod transition;

pub use backoff::Backoff;
pub use heartbeat::{Heartbeat, HeartbeatAction};
pub use transition::{Moves, allowed, step, table};
