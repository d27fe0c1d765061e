//! Sessions against a client played by hand, over the simulated fabric.
//!
//! `fixture.rs` the server under test · `peer.rs` the client · `handshake.rs` · `admission.rs` who
//! is let in when too many ask · `io.rs` requests and their answers · `chains.rs` what exactly is
//! posted · `violations.rs` what a peer must not do · `discover.rs` lists of exports · `opens.rs`
//! what is found below a search path · `ends.rs` replays, death, silence, shutdown · `overlap.rs`
//! who waits for what a closed path has left at the disk; `partial.rs` writes of parts of blocks ·
//! `syncs.rs` who hears of a sync that
//! failed; `losses.rs` the same in every order, on the disk of `lossy_disk.rs` ·
//! `idle.rs` heartbeats of idle paths · `memory.rs` what chunks take · `turns.rs` what
//! clients ask of the control shard · `times.rs` where time goes · `admin.rs` the operator's
//! commands; `exports.rs` exports that come and go while clients have them · `access.rs` access
//! lists; `authenticate.rs` clients that prove who they are; `reloads.rs` who may open what while a
//! configuration is applied · `unproved.rs` what those cannot do that have not; `intruders.rs` what
//! they take from others; `crowd.rs` what many of them take · `device.rs` the fabric.

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
mod fixture;
mod gateways;
mod handshake;
mod idle;
mod intruders;
mod io;
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
