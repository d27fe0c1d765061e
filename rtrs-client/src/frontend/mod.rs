//! Front ends: the users of a session's devices, behind one trait.
//!
//! Each device of the session has one front end on each shard. The front end is created on its
//! shard's thread before the device is open, and receives the device once. The driver runs the
//! front end's turns without knowing its kind. A new kind needs a file here, with a type that
//! implements [`FrontEnd`] and a function that returns [`PreparedFrontEnds`]; an arm in
//! [`prepare`]; and settings with a variant of [`Front`].
//!
//! - `nbd`: NBD clients on a unix or TCP socket.
//! - `kernel_nbd`: the kernel's `/dev/nbdX`.
//! - `vhost_user`: a virtual machine, on a unix socket.
//! - `bench`: a workload, without NBD.
//! - `queue`: queues for the program that embeds the session, without NBD.
//!
//! `front_end` contains the trait, `client` and `rtrs_core::front_end` its reports, `pools` a
//! shard's memory, and `bridge` the code shared by NBD front ends.

pub(crate) mod bench;
mod bridge;
mod client;
mod front_end;
mod kernel_nbd;
mod nbd;
mod pools;
pub(crate) mod queue;
mod vhost_user;

pub(crate) use client::FrontEndClient;
pub(crate) use front_end::{
    Complaint, FrontEnd, FrontRequest, FrontSocket, MakeFrontEnd, MakeFrontEnds, MemoryChange,
    MemoryChangeKind, Place, PreparedFrontEnds, Shards,
};
pub(crate) use pools::FrontEndPools;

use rtrs_core::local::PassedSocket;

use crate::error::Error;
use crate::plan::{AttachPlan, Front};

/// Acquires the socket, if any, on which the plan's volume is served, and prepares its front ends.
/// Uses the socket passed by the service manager, if there is one.
///
/// # Errors
/// Fails if the socket is in use, or a file for it cannot be used.
pub(crate) fn prepare(
    plan: &AttachPlan,
    passed: &[PassedSocket],
) -> Result<PreparedFrontEnds, Error> {
    let passed = plan.front.passed(passed);
    match &plan.front {
        Front::Socket(path) => nbd::at_socket(plan, path, passed),
        Front::Tcp(address) => nbd::at_address(plan, *address, passed),
        Front::Device(_) => Ok(kernel_nbd::prepare(plan)),
        Front::VhostUser(path) => vhost_user::prepare(plan, path),
    }
}
