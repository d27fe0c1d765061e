//! Any bytes into every decoder of RTRS and RNBD; the body is `rtrs_core::wire::fuzz`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtrs_core::wire::fuzz(data));
