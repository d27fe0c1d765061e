//! Fuzz target: no bytes make an end mistake one peer for another. The body is in rtrs-core.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rtrs_core::tls::fuzz_auth(data));
