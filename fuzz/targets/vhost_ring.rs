//! Fuzz target: nothing that a guest writes to a ring breaks its device. The body is in the crate
//! `vhost-bridge`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| vhost_bridge::fuzz_ring(data));
