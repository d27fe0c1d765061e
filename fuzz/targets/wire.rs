//! Fuzz target: arbitrary bytes go into every decoder of RTRS and RNBD. The body is
//! `rtrs_core::wire::fuzz`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtrs_core::wire::fuzz(data));
