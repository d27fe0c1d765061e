//! Fuzz target: a client's side of a handshake, however split, is survived. The body is in
//! nbd-bridge.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| nbd_bridge::fuzz::fuzz_handshake(data));
