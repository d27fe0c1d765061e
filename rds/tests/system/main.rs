//! Tests of RDS: the simulator of its nodes, its programs, and third-party programs.
#![forbid(unsafe_code)]

mod api;
mod blocked;
mod buffers;
mod counters;
mod holders;
mod kernel_errors;
mod latency;
mod operation;
mod paths;
mod peers;
mod preload;
mod programs;
mod rings;
mod sim;
mod stand;
mod usage;
mod zerocopy;
