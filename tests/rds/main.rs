//! RDS: the simulator of its nodes, and its programs, with programs that nobody here wrote.
#![forbid(unsafe_code)]

mod peers;
mod preload;
mod programs;
mod sim;
mod stand;
mod usage;
