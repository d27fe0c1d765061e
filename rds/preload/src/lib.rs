//! `librds_preload.so`: runs programs that use AF_RDS on hosts whose kernel lacks RDS.
//!
//! With LD_PRELOAD, the functions of `hooks` replace those of the C library. A socket of family
//! AF_RDS becomes a unix socket connected to a node (`rds node`); calls on other descriptors are
//! passed through unchanged. Programs that are statically linked or that make system calls directly
//! are not covered.
//!
//! `hooks` contains the functions that the program calls, `calls` their meaning for RDS sockets,
//! `table` the list of RDS socket descriptors, `completions` the completions of zero-copy sends,
//! `controls` reads and writes control messages, `memory` reads and writes through the program's
//! pointers, and `real` calls the C library's functions. Unsafe code is confined to `hooks`,
//! `descriptors`, `controls`, `memory` and `real`.

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

mod calls;
mod completions;
#[allow(unsafe_code)]
mod controls;
#[allow(unsafe_code)]
mod descriptors;
#[allow(unsafe_code)]
mod hooks;
#[allow(unsafe_code)]
mod memory;
mod options;
#[allow(unsafe_code)]
mod real;
mod table;
