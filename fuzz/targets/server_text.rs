//! Fuzz target: what users and files write never breaks the server. The body is in rtrs-server.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rtrs_server::fuzz_text(data));
