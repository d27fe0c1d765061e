//! Fuzz target: nothing that a program writes to its ring breaks its RDS node. The body is in the
//! crate rds.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rds::fuzz_ring(data));
