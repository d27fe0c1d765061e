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
//! pair that is its own peer · `outcome.rs` results of calls.

mod cm;
mod cq;
mod device;
mod outcome;
mod own_loop;
mod qp;
mod queue;

pub(super) use cm::{CmEvent, CmEventKind, CmId, ConnParam, EventChannel, IdKey};
pub(super) use cq::{CompChannel, Cq, Wc};
pub(super) use device::{AsyncEvent, Context, Mr, Mw, Pd};
pub(super) use qp::{Ending, Qp};
pub(super) use queue::Posted;
#[cfg(test)]
pub(super) use queue::WrTag;
