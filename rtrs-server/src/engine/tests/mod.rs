//! Tests of sessions with a scripted client, over the simulated fabric.
//!
//! `fixture.rs` the server under test · `peer.rs` the client · `handshake.rs` · `admission.rs`
//! admission control · `io.rs` requests and their answers · `chains.rs` exact work requests ·
//! `extents.rs` extents that shards know · `violations.rs` protocol violations · `discover.rs`
//! lists of exports · `opens.rs` opens under a search path · `ends.rs` replays, dead paths,
//! silence, shutdown · `overlap.rs` orphaned writes; `partial.rs` writes to parts of blocks ·
//! `syncs.rs` reports of failed syncs; `losses.rs` the same in every order, on the disk of
//! `lossy_disk.rs` · `idle.rs` heartbeats on idle paths · `memory.rs` memory of chunks ·
//! `limits.rs` rate limits · `turns.rs` clients' requests to the control shard · `times.rs` request
//! times · `admin.rs` the operator's commands; `exports.rs` exports that are added and removed
//! while clients use them · `access.rs` access lists; `authenticate.rs` authentication of clients;
//! `reloads.rs` access while a configuration is applied · `unproved.rs` restrictions of
//! unauthenticated clients; `intruders.rs` their attacks on others; `crowd.rs` large numbers of
//! unauthenticated clients · `device.rs` the fabric.

mod access;
mod admin;
mod admission;
mod authenticate;
mod chains;
mod chunk_pool;
mod crowd;
mod device;
mod discover;
mod ends;
mod exports;
mod extents;
mod fixture;
mod gateways;
mod handshake;
mod idle;
mod intruders;
mod io;
mod limits;
mod log_lines;
mod losses;
mod lossy_disk;
mod memory;
mod opens;
mod overlap;
mod partial;
mod peer;
mod registration;
mod reloads;
mod resize;
mod syncs;
mod times;
mod turns;
mod unproved;
mod violations;
