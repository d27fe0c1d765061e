//! Safe wrappers for libibverbs and librdmacm, based on ownership.
//!
//! This module contains the only unsafe code of the provider. A handle destroys its object when it
//! is dropped, and holds everything that must outlive it: a queue pair its domain and queue, a
//! window its registration, a registration its domain and memory, a domain its device. Memory
//! referenced by a posted request is owned by the queue pair until the request has completed or the
//! queue pair is destroyed.
//!
//! `cm.rs` the connection manager · `device.rs` devices, domains, registrations, windows · `cq.rs`
//! completion queues · `qp.rs` queue pairs · `queue.rs` their posted work · `own_loop.rs` a queue
//! pair that is its own peer.

mod cm;
mod cq;
mod device;
mod own_loop;
mod qp;
mod queue;

use std::io;

pub(super) use cm::{CmEvent, CmEventKind, CmId, ConnParam, EventChannel, IdKey};
pub(super) use cq::{CompChannel, Cq, Wc};
pub(super) use device::{AsyncEvent, Context, Mr, Mw, Pd, memory_lock_limit};
pub(super) use qp::{Ending, Qp};
pub(super) use queue::Posted;
#[cfg(test)]
pub(super) use queue::WrTag;

/// Converts the result of a call that returns 0, an errno, or -1 with errno set.
fn outcome(code: libc::c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        errno if errno > 0 => Err(io::Error::from_raw_os_error(errno)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Converts the result of a call that takes an event. Returns false if there is none.
fn taken(code: libc::c_int) -> io::Result<bool> {
    if code == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR) => Ok(false),
        _ => Err(error),
    }
}
