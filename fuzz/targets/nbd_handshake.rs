//! Fuzz target: an NBD client's handshake bytes, however split, cause no panic. The body is in
//! nbd-bridge.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| nbd_bridge::fuzz::fuzz_handshake(data));
