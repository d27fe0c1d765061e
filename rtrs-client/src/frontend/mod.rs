//! Front ends: the users of a session's devices, behind one trait.
//!
//! Each device of the session has one front end on each shard. It is made on its shard's thread
//! before the device is open, and gets the device once. The driver turns it and does not know its
//! kind. A new kind needs a file here with a type that implements [`FrontEnd`] and a function that
//! returns a [`MakeFrontEnds`]; a variant of `plan::Front` with its settings; and the arm of
//! `prepare` in `daemon/attach.rs` that maps one to the other.
//!
//! - `nbd`: NBD clients at a unix or TCP socket.
//! - `kernel_nbd`: the kernel's `/dev/nbdX`.
//! - `bench`: a workload, without NBD.

pub(crate) mod bench;
pub(crate) mod kernel_nbd;
pub(crate) mod nbd;

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use nbd_bridge::{Bridge, BridgeConfig, BridgeStats, BufferPools, Group, Peer, Seat};
use rtrs_core::ids::CoreIndex;
use rtrs_core::rt::Ring;
use rtrs_core::time::Instant;

use crate::engine::SessionDevice;

/// User of the device on one shard.
pub(crate) trait FrontEnd {
    /// Gives the front end its open device. Called once.
    ///
    /// # Errors
    /// Returns the reason why the device cannot be used; the session then ends.
    fn open(&mut self, now: Instant, place: &Place<'_>, device: SessionDevice) -> io::Result<()>;

    /// Gives the front end a socket.
    fn take_socket(&mut self, now: Instant, socket: FrontSocket);

    /// Does all pending work. Returns whether anything happened.
    fn turn(&mut self, now: Instant) -> bool;

    /// Takes the next request to the driver; called after each turn until there is none.
    fn next_request(&mut self) -> Option<FrontRequest>;

    /// Time at which `turn` must be called even if nothing happens.
    fn deadline(&self) -> Option<Instant>;

    /// Stops starting new IO; IO in flight finishes.
    fn stop(&mut self);

    /// Ends the remaining IO, answered or not.
    fn abort(&mut self);

    /// Whether nothing is left after a stop. Also true before the device is open.
    fn is_idle(&self) -> bool;

    /// Counters for `stats`.
    fn stats(&self) -> BridgeStats {
        BridgeStats::default()
    }

    /// Clients whose connections a detach would cut.
    fn clients(&self) -> Vec<Peer> {
        Vec::new()
    }
}

/// Environment of a front end.
pub(crate) struct Place<'a> {
    /// Shard of the front end.
    pub(crate) shard: CoreIndex,
    /// Ring of the shard.
    pub(crate) ring: &'a Rc<Ring>,
    /// Memory of the shard's bridges.
    pub(crate) pools: &'a BufferPools,
    /// Export name.
    pub(crate) export: &'a str,
}

/// Socket for the front end of a shard.
pub(crate) enum FrontSocket {
    /// Socket of an NBD client.
    Client(OwnedFd),
    /// Other end of a socket to which the kernel sends this shard's requests. The sender is used
    /// when the socket is served, and dropped when it cannot be.
    Kernel(OwnedFd, mpsc::Sender<()>),
}

/// Request of a front end to the driver.
pub(crate) enum FrontRequest {
    /// Hand this client to another shard.
    Client(CoreIndex, OwnedFd),
    /// Notify the process that the kernel has closed its socket.
    KernelGone,
}

/// Makes a shard's front end, on that shard's thread.
pub(crate) type MakeFrontEnd = Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>;

/// Makes a [`MakeFrontEnd`] for each shard, in order.
pub(crate) type MakeFrontEnds = Box<dyn FnOnce(&Shards) -> Vec<MakeFrontEnd>>;

/// Shards of a session.
pub(crate) struct Shards {
    /// Number of shards.
    pub(crate) count: u16,
    /// Makes a shard turn its front end soon.
    pub(crate) wake: Arc<dyn Fn(usize) + Send + Sync>,
}

impl Shards {
    /// Makes one value for each shard from its index.
    fn each(&self, make: impl FnMut(u16) -> MakeFrontEnd) -> Vec<MakeFrontEnd> {
        (0..self.count).map(make).collect()
    }

    /// Creates a group in which the bridges of these shards see each other's orphaned writes.
    fn group(&self) -> Arc<Group> {
        let wake = Arc::clone(&self.wake);
        Group::new(usize::from(self.count), move |shard| wake(shard))
    }
}

/// Creates the bridge of a shard.
fn bridge(
    place: &Place<'_>,
    device: SessionDevice,
    config: BridgeConfig,
    group: &Arc<Group>,
) -> io::Result<Bridge> {
    let seat = Seat { group: Arc::clone(group), shard: place.shard.index() };
    Bridge::seated(place.ring, place.pools, Box::new(device), place.export, config, seat)
}
