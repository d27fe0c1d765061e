//! The machines of a node: time, bytes and calls of users go in; bytes, orders for sockets and
//! events for users come out. No IO, no clock.
//!
//! [`Node`] wires the parts: `ports` has the sockets of users and what waits for them, `peer` the
//! state kept over connections for one other node, `outbox` the messages that it has not
//! acknowledged, `link` one TCP connection, `backoff` the times between attempts to connect.
//! A daemon and the simulator run the same machines.

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
