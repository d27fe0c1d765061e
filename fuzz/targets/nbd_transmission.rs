//! Fuzz target: requests are judged within the rules of their export. The body is in nbd-bridge.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| nbd_bridge::fuzz::fuzz_transmission(data));
