//! Parts shared by the state machines of both ends: legal transitions as data, heartbeats, backoff,
//! quotas of half-open peers, and both ends of the ping.

mod backoff;
mod heartbeat;
pub mod ping;
pub mod quota;
mod transition;

pub use backoff::Backoff;
pub use heartbeat::{Heartbeat, HeartbeatAction};
pub use transition::{Moves, allowed, step, table};
