//! What goes over the wire, with real daemons: wrong bytes, peers played by hand, captures.
//!
//! `abuse.rs` wrong flags, files and NBD clients · `peers.rs` hostile RTRS peers · `invalidate.rs`
//! keys that are used again · `ping.rs` the commands `ping` and `doctor` · `capture.rs` tshark
//! reads a session · `capture_rtrs.rs` captured sessions with the kernel. One file alone:
//! `cargo test -p rtrs-tests --test protocol peers::`.
#![forbid(unsafe_code)]

mod abuse;
mod capture;
mod capture_rtrs;
mod dissector;
mod invalidate;
mod peers;
mod ping;
