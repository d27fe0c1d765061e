//! What uses a session's device: one front end per shard, behind one trait.
//!
//! Each device of the session has one on each shard. A front end is made on its shard's thread
//! before the device is open, and is given the device once. The driver turns it and does not know
//! what it is. To add one: a file here with a type that
//! implements [`FrontEnd`] and a function that returns a [`MakeFrontEnds`]; a variant of
//! `plan::Front` with its settings; and the arm of `prepare` in `daemon/attach.rs` that maps one to
//! the other.
//!
//! - `nbd`: NBD clients at a unix or TCP socket.
//! - `kernel_nbd`: the kernel's `/dev/nbdX`.
//! - `bench`: a workload, without NBD between.

pub(crate) mod bench;
pub(crate) mod kernel_nbd;
pub(crate) mod nbd;

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use nbd_bridge::{Bridge, BridgeConfig, BridgeStats, BufferPools, Group, Seat};
use rtrs_core::ids::CoreIndex;
use rtrs_core::rt::Ring;
use rtrs_core::time::Instant;

use crate::engine::SessionDevice;

/// One shard's user of the device.
pub(crate) trait FrontEnd {
    /// The device is open. Called once.
    ///
    /// # Errors
    /// Why it cannot be used; the session then ends.
    fn open(&mut self, now: Instant, place: &Place<'_>, device: SessionDevice) -> io::Result<()>;

    /// Takes a socket over.
    fn take_socket(&mut self, now: Instant, socket: FrontSocket);

    /// Moves everything on that can be moved. True when anything happened.
    fn turn(&mut self, now: Instant) -> bool;

    /// What the driver has to do for it; to be asked after each turn until there is nothing.
    fn next_request(&mut self) -> Option<FrontRequest>;

    /// When `turn` wants to be called even if nothing happens.
    fn deadline(&self) -> Option<Instant>;

    /// Begins nothing new; what is in flight ends.
    fn stop(&mut self);

    /// Ends what is left, answered or not.
    fn abort(&mut self);

    /// True when nothing is left after a stop. Also true before the device is open.
    fn is_idle(&self) -> bool;

    /// Counters for `stats`.
    fn stats(&self) -> BridgeStats {
        BridgeStats::default()
    }
}

/// Where a front end works.
pub(crate) struct Place<'a> {
    /// Its shard.
    pub(crate) shard: CoreIndex,
    /// Its shard's ring.
    pub(crate) ring: &'a Rc<Ring>,
    /// Memory of its shard's bridges.
    pub(crate) pools: &'a BufferPools,
    /// The export's name.
    pub(crate) export: &'a str,
}

/// A socket for the front end of a shard.
pub(crate) enum FrontSocket {
    /// An NBD client.
    Client(OwnedFd),
    /// The other end of a socket that the kernel sends this shard's requests to. The sender is used
    /// when it is served, and dropped when it cannot be.
    Kernel(OwnedFd, mpsc::Sender<()>),
}

/// What a front end asks of the driver.
pub(crate) enum FrontRequest {
    /// Hand this client to another shard.
    Client(CoreIndex, OwnedFd),
    /// Tell the process that the kernel has closed its socket.
    KernelGone,
}

/// Makes a shard's front end, on that shard's thread.
pub(crate) type MakeFrontEnd = Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>;

/// Makes what makes the front ends of all shards, in order.
pub(crate) type MakeFrontEnds = Box<dyn FnOnce(&Shards) -> Vec<MakeFrontEnd>>;

/// The shards of a session.
pub(crate) struct Shards {
    /// How many there are.
    pub(crate) count: u16,
    /// Has a shard turn its front end soon.
    pub(crate) wake: Arc<dyn Fn(usize) + Send + Sync>,
}

impl Shards {
    /// One value for each shard, made from its index.
    fn each(&self, make: impl FnMut(u16) -> MakeFrontEnd) -> Vec<MakeFrontEnd> {
        (0..self.count).map(make).collect()
    }

    /// The bridges of these shards see each other's orphaned writes.
    fn group(&self) -> Arc<Group> {
        let wake = Arc::clone(&self.wake);
        Group::new(usize::from(self.count), move |shard| wake(shard))
    }
}

/// The bridge of a shard.
fn bridge(
    place: &Place<'_>,
    device: SessionDevice,
    config: BridgeConfig,
    group: &Arc<Group>,
) -> io::Result<Bridge> {
    let seat = Seat { group: Arc::clone(group), shard: place.shard.index() };
    Bridge::seated(place.ring, place.pools, Box::new(device), place.export, config, seat)
}
