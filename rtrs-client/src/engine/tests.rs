//! The session's machines on the simulated fabric, against a server played by hand.
//!
//! `fixture.rs` drives the shards of one session as `driver.rs` does, `server.rs` is the peer: it
//! holds every byte it gets against docs/PROTOCOL.md and can be told to misbehave. The laws of
//! every shard (`Shard::check`) are held after each event.

mod bytes;
mod cache;
mod connecting;
mod devices;
mod ending;
mod exports;
mod failing;
mod failover;
mod fairness;
mod fixture;
mod gateways;
mod how;
mod identity;
mod idle;
mod io;
mod links;
mod load;
mod online;
mod proofs;
mod resize;
mod seen;
mod server;
mod silence;
mod slow;
mod spreading;
mod times;
mod users;
mod violations;
mod volumes;
mod volumes_change;
