//! Interface between a front end and the shard that runs it.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use rtrs_core::front_end::FrontEndStats;
use rtrs_core::ids::CoreIndex;
use rtrs_core::mem::Region;
use rtrs_core::rt::Ring;
use rtrs_core::time::Instant;

use super::client::FrontEndClient;
use super::pools::FrontEndPools;
use crate::engine::SessionDevice;

/// Problem that prevents use of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Complaint {
    /// Mistake of a client, and the remedy.
    Client(&'static str),
    /// A client waits for exclusive access to the device.
    Held,
}

/// A device's user on one shard.
pub(crate) trait FrontEnd {
    /// Gives the front end its open device. Called once.
    ///
    /// # Errors
    /// Returns the reason why the device cannot be used; the session then ends.
    fn open(&mut self, now: Instant, place: &Place<'_>, device: SessionDevice) -> io::Result<()>;

    /// Lets the front end accept clients. Called once the volume has been attached.
    fn serve(&mut self, _ring: &Rc<Ring>) {}

    /// Gives the front end a socket.
    fn take_socket(&mut self, now: Instant, socket: FrontSocket);

    /// Registers or unregisters memory of the device's user ([`MemoryChange`]).
    fn change_memory(&mut self, change: MemoryChange) {
        change.reply(Err(io::ErrorKind::Unsupported.into()));
    }

    /// Does all pending work. Returns true if anything happened.
    fn turn(&mut self, now: Instant) -> bool;

    /// Whether there is input that no event of the ring reports.
    fn has_input(&self) -> bool {
        false
    }

    /// Prepares for sleep: makes input that the ring does not report cause a ring event, which ends
    /// the sleep. Returns false if there is input already.
    fn prepare_sleep(&mut self) -> bool {
        true
    }

    /// Takes the next request for the driver; called after each turn until there are none.
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
    fn stats(&self) -> FrontEndStats {
        FrontEndStats::default()
    }

    /// Whether clients may reconnect to the next process: they are connected, or their connection
    /// ended without a disconnect request.
    fn may_clients_return(&self) -> bool {
        false
    }

    /// Problem that prevents use of the device.
    fn complaint(&self) -> Option<Complaint> {
        None
    }

    /// Clients whose connections a detach would cut.
    fn clients(&self) -> Vec<FrontEndClient> {
        Vec::new()
    }
}

/// Change to the memory that a front end's user has registered.
pub(crate) struct MemoryChange {
    pub(crate) region: Arc<Region>,
    pub(crate) kind: MemoryChangeKind,
    reply: mpsc::Sender<io::Result<()>>,
}

/// Kind of a [`MemoryChange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryChangeKind {
    /// After the reply, IO in this memory uses it in place.
    Register,
    /// After the reply, no IO uses the registered memory: IO in flight ends first.
    Unregister,
}

impl MemoryChange {
    pub(crate) fn new(
        region: &Arc<Region>,
        kind: MemoryChangeKind,
        reply: mpsc::Sender<io::Result<()>>,
    ) -> Self {
        Self { region: Arc::clone(region), kind, reply }
    }

    pub(crate) fn reply(self, result: io::Result<()>) {
        // The requester may have stopped waiting.
        drop(self.reply.send(result));
    }
}

/// Context in which a front end runs.
pub(crate) struct Place<'a> {
    /// Shard of the front end.
    pub(crate) shard: CoreIndex,
    /// Ring of the shard.
    pub(crate) ring: &'a Rc<Ring>,
    /// Memory that the shard's front ends share.
    pub(crate) pools: &'a FrontEndPools,
    /// Export name.
    pub(crate) export: &'a str,
}

/// Socket for the front end of a shard.
pub(crate) enum FrontSocket {
    /// Socket of an NBD client.
    Client(OwnedFd),
    /// Other end of a socket to which the kernel sends this shard's requests. The sender is used
    /// when the socket is served, and dropped if it cannot be.
    Kernel(OwnedFd, mpsc::Sender<()>),
}

/// Request from a front end to the driver.
pub(crate) enum FrontRequest {
    /// Hand this client to another shard.
    Client(CoreIndex, OwnedFd),
    /// Notify the process that the kernel has closed its socket.
    KernelGone,
}

/// Creates a shard's front end, on that shard's thread.
pub(crate) type MakeFrontEnd = Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>;

/// Creates a [`MakeFrontEnd`] for each shard, in order.
pub(crate) type MakeFrontEnds = Box<dyn FnOnce(&Shards) -> Vec<MakeFrontEnd>>;

/// Front ends of a volume whose socket or address has been acquired but is not served yet.
pub(crate) struct PreparedFrontEnds {
    /// Creates the front end of each shard.
    pub(crate) make: MakeFrontEnds,
    /// URI for clients, if they connect by URI.
    pub(crate) uri: Option<String>,
}

/// Shards of a session.
pub(crate) struct Shards {
    /// Number of shards.
    pub(crate) count: u16,
    /// Makes a shard run its front end soon.
    pub(crate) wake: Arc<dyn Fn(usize) + Send + Sync>,
}

impl Shards {
    /// Creates one value per shard from the shard's index.
    pub(super) fn each(&self, make: impl FnMut(u16) -> MakeFrontEnd) -> Vec<MakeFrontEnd> {
        (0..self.count).map(make).collect()
    }
}
