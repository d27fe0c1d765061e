//! Both ends of the ping, as state machines over any provider: [`PingClient`], one queue pair of a
//! tool that pings, and [`PingServer`], all pings of a server.
//!
//! Inputs are events of the provider and the time; outputs are work requests to the
//! [`Fabric`](crate::fabric::Fabric). The machines use no sockets or clocks. Each connection has
//! its own protection domain, which contains only its buffers, so neither end can access other
//! memory of the peer's process. Any misbehavior or silence of the peer ends in an error within a
//! limited time. The buffers of both ends are in `messages.rs`, the encoding in `wire/ping.rs`.

mod client;
mod conn;
mod event;
mod messages;
mod server;
mod tally;
#[cfg(test)]
mod tests;

pub use client::{PingClient, PingClientConfig};
pub use event::{PingEvent, PingFailure};
pub use server::{PingServer, PingServerConfig, PingServerStats};
