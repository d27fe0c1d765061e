//! `librds_preload.so`: lets a program that uses AF_RDS run on a host whose kernel has no RDS.
//!
//! With LD_PRELOAD the functions of `hooks` stand in front of those of the C library. A socket of
//! family AF_RDS becomes a unix socket to a node (`rds node`); everything that passes through other
//! descriptors is handed on untouched. Programs that are linked statically, or make system calls by
//! themselves, are not reached.
//!
//! `hooks` has what the program calls, `calls` what a call means for an RDS socket, `table` knows
//! which descriptors are such sockets, `memory` is where pointers of the program are read and
//! written, `real` has the functions that stand behind ours. Unsafe code stands in `hooks`,
//! `memory` and `real`, and nowhere else.

#![deny(unsafe_code)]

mod calls;
#[allow(unsafe_code)]
mod hooks;
#[allow(unsafe_code)]
mod memory;
mod options;
#[allow(unsafe_code)]
mod real;
mod table;
