//! Fuzz target: a peer's bytes never break handshakes and records. The body is in rtrs-core.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rtrs_core::tls::fuzz_tls(data));
