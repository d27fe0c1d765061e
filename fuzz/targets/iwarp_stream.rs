//! Fuzz target: no bytes from a peer break the stream engine. The body is in rtrs-core.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rtrs_core::fabric::iwarp::fuzz_stream(data));
