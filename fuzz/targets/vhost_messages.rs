//! Fuzz target: no message of a virtual machine monitor, with any descriptors, causes a panic or a
//! wait. The body is in vhost-bridge.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| vhost_bridge::fuzz_messages(data));
