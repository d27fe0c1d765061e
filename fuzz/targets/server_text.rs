//! Fuzz target: no text from users or files causes a panic. The body is `rtrs_server::fuzz_text`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rtrs_server::fuzz_text(data));
