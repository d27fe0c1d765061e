//! Fuzz target: clients that follow no rules never break the server. The body is in rtrs-server.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rtrs_server::fuzz_paths(data));
