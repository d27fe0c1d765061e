//! Tests of the session's engines on the simulated fabric, against a scripted server.
//!
//! `fixture.rs` drives the shards of one session as `driver.rs` does. `server.rs` is the peer: it
//! checks every byte that it receives against docs/PROTOCOL.md, and can be made to misbehave. The
//! invariants of every shard (`Shard::check`) are checked after each event.

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
mod promotion;
mod proofs;
mod resize;
mod scattered;
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
