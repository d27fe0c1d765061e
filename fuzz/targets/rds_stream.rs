//! Fuzz target: no bytes from a peer break an RDS node. The body is in the crate rds.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rds::fuzz_stream(data));
