//! Fuzz target: an NBD client's handshake bytes cause no panic, however they are split. The body is
//! in nbd-bridge.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| nbd_bridge::fuzz::fuzz_handshake(data));
