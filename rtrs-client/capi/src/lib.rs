//! `librtrs.so.0`: the crate `rtrs` for C programs, declared in `include/rtrs.h`.
//!
//! `abi` contains the exported functions. Each runs within `entry`, which stores the message of a
//! failure and catches panics; after a panic, all calls on the volume fail. Handles point to a
//! `volume` or `queue`; `log` passes log messages to the program. Unsafe code is confined to `abi`,
//! to `pointer`, which checks and reads the program's pointers, and to `memory`, which holds the
//! memory of requests.
//!
//! # Rules of the ABI
//! - Functions may be added but never changed; a new version gets a new name, such as `_v2`.
//! - A structure that may grow is passed with its size. Other structures have reserved fields.
//! - `abi/0.h` is the header of the first release of this soname. A test compiles a program against
//!   it, and compares its functions with the symbols of the library.
//! - A change that breaks these rules needs the next soname (`build.rs`) and its own frozen header.

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

#[allow(unsafe_code)]
mod abi;
mod entry;
mod layout;
mod log;
#[allow(unsafe_code)]
mod memory;
mod options;
#[allow(unsafe_code)]
mod pointer;
mod queue;
mod registry;
mod volume;
