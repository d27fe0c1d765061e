//! Fuzz target: clients that keep to no rule never break the server. The body is in rtrs-server.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rtrs_server::fuzz_paths(data));
