//! Fuzz target: a server that follows no rules never breaks the client. The body is in rtrs-client.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rtrs_client::fuzz_paths(data));
