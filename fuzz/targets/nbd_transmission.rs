//! Fuzz target: requests follow the rules of their export or are refused. The body is in
//! nbd-bridge.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| nbd_bridge::fuzz::fuzz_transmission(data));
