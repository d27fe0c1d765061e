//! Tests of the wire protocol with real daemons: invalid bytes, hand-driven peers, captures.
//!
//! `abuse.rs` wrong flags, files and NBD clients · `peers.rs` hostile RTRS peers · `invalidate.rs`
//! reuse of keys · `ping.rs` the commands `ping` and `doctor` · `capture.rs` tshark reads a session
//! · `capture_rtrs.rs` captured sessions with the kernel. One file alone:
//! `cargo test -p rtrs-tests --test protocol peers::`.
#![forbid(unsafe_code)]

mod abuse;
mod capture;
mod capture_rtrs;
mod dissector;
mod invalidate;
mod peers;
mod ping;
