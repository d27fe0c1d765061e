//! Commands to the shards from the thread that serves the socket.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc;

use rtrs_core::time::Duration;

use crate::dirty_log::RingLog;
use crate::memory::GuestMemory;
use crate::vring::RingSetup;

/// Command to the shard of a ring.
#[derive(Debug)]
pub(crate) struct Command {
    /// Number of the ring.
    pub(crate) ring: u16,
    pub(crate) action: Action,
}

/// Change of a ring.
#[derive(Debug)]
pub(crate) enum Action {
    /// Start the ring.
    Start(Box<RingStart>),
    /// Read kicks here.
    Kick(OwnedFd),
    /// Call the driver here, or not at all.
    Call(Option<OwnedFd>),
    /// Report faults here, or not at all.
    Fault(Option<OwnedFd>),
    /// Take requests, or pause.
    Enable(bool),
    /// Use this memory of the guest.
    Memory(Arc<GuestMemory>),
    /// Mark written pages in this log, or in none, and then drop the reply.
    Log { log: Option<RingLog>, reply: mpsc::Sender<()> },
    /// Stop once the requests in flight have ended, or at the latest after this time.
    Stop { within: Duration, reply: mpsc::Sender<Stopped> },
}

/// Ring to be started.
#[derive(Debug)]
pub(crate) struct RingStart {
    pub(crate) setup: RingSetup,
    pub(crate) kick: OwnedFd,
    pub(crate) call: Option<OwnedFd>,
    pub(crate) fault: Option<OwnedFd>,
    pub(crate) is_enabled: bool,
}

/// State in which a ring has stopped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopped {
    /// Index of the next available request.
    pub(crate) next: u16,
}
