//! State machines of a node: inputs are time, bytes and calls from users; outputs are bytes,
//! instructions for sockets and events for users. No IO, no clock.
//!
//! [`Node`] connects two parts: [`Ports`] holds the sockets of users and their queues, [`Peers`]
//! the other nodes and the connections to them. `peer` is the state kept about another node across
//! connections, `outbox` the messages that the peer has not acknowledged, `link` one TCP
//! connection, `backoff` the delays between attempts to connect, `shares` the users' shares of
//! limits, `tuning` the settings that can change at any time. A daemon and the simulator run the
//! same state machines.

mod amount;
mod backoff;
mod config;
mod event;
mod info;
mod link;
mod links;
mod node;
mod outbox;
mod peer;
mod peer_log;
mod peers;
mod ports;
mod shares;
mod stats;
#[cfg(test)]
mod tests;
mod timers;
mod tuning;

pub use config::{Config, MESSAGE_COST, PATHS_MAX};
pub use event::{BindError, Event, LinkId, Order, Outgoing, SendError, SocketId, TcpEvent};
pub use info::{ConnectionInfo, ConnectionState, MessageInfo, QueueKind, SocketInfo, TcpInfo};
pub use node::{AckProgress, Node};
pub(crate) use peer_log::PeerLog;
pub use peers::Peers;
pub use ports::{BufferUse, Pending, Ports, Received};
pub use shares::UserId;
pub(crate) use shares::{Shares, Use};
pub use stats::{Refused, Stats};
pub use tuning::{Tunable, Tuning};
