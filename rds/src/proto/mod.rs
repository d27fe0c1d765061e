//! State machines of a node: inputs are time, bytes and calls of users; outputs are bytes, orders
//! for sockets and events for users. No IO, no clock.
//!
//! [`Node`] connects the parts: `ports` has the sockets of users and their queues, `peer` the state
//! kept about another node across connections, `outbox` the messages that the peer has not
//! acknowledged, `link` one TCP connection, `backoff` the delays between attempts to connect. A
//! daemon and the simulator run the same state machines.

mod backoff;
mod config;
mod event;
mod info;
mod link;
mod node;
mod outbox;
mod peer;
mod ports;
mod stats;
#[cfg(test)]
mod tests;

pub use config::{Config, MESSAGE_COST};
pub use event::{BindError, Event, LinkId, Order, SendError, SocketId};
pub use info::{ConnectionInfo, MessageInfo, QueueKind, SocketInfo};
pub use node::Node;
pub use ports::Received;
pub use stats::Stats;
