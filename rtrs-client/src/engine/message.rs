//! What the shards of a session tell each other.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use rtrs_core::fabric::{CloseReason, ConnectFailure, PrivateData, ProtectionDomain, RemoteMem};
use rtrs_core::ids::{ConnIndex, CoreIndex, PathId};

use super::cache_epoch::CacheWatch;
use super::device_set::DeviceIndex;
use super::device_table::OpenDevice;
use super::session::{Granted, PathShared, PathTarget, SessionConfig};

/// A volume as a path serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) device: DeviceIndex,
    /// The server's number for it on this path.
    pub(crate) device_id: u32,
    /// The epoch of the server's cache in which the path opened it; 0 when nobody says.
    pub(crate) cache_id: u64,
}

/// From the control shard to a shard.
#[derive(Clone, Debug)]
pub(crate) enum ShardMessage {
    /// The server's bounds, before the first `Connect` above connection 0 completes.
    Granted(Granted),
    /// Start this shard's connection of a path.
    Connect(Box<Connect>),
    /// The path's handshake is complete: its chunks, in order of permits, and what it serves.
    PathUp { path: PathId, epoch: u32, chunks: Arc<[RemoteMem]>, served: Arc<[Served]> },
    /// A path that is up serves this volume too.
    Serves { path: PathId, epoch: u32, served: Served },
    /// A path that is up does not serve this volume any more.
    Leaves { path: PathId, epoch: u32, device: DeviceIndex },
    /// End this shard's connection of the path, at once or in order.
    Disconnect { path: PathId, epoch: u32, in_order: bool },
    /// What tracks writes and flushes, with a server that reports losses.
    Cache(DeviceIndex, Arc<CacheWatch>),
    /// IO may flow to this device.
    Open(DeviceIndex, Arc<OpenDevice>),
    /// This device is not open at the server any more; its IO waits.
    Closed(DeviceIndex),
    /// Nothing that this path's connections sent up to that epoch can begin at the server any
    /// more: what was in flight on it may be sent again.
    Fenced { path: PathId, epoch: u32 },
    /// What waits for this device ends with an error, and so does what comes, until a path that
    /// serves it is up.
    GiveUp(DeviceIndex),
    /// A volume was added, at an index that is new or free again.
    AddDevice(DeviceIndex),
    /// The user of this device is gone: end what can be ended, and say when nothing is left.
    CloseDevice(DeviceIndex),
    /// A path that was added. It takes the place of one that is gone, if there was one.
    AddPath { path: PathId, target: Box<PathTarget> },
    /// Give this path no more requests, and say when it has none.
    Retire { path: PathId, epoch: u32 },
    /// The configuration from now on.
    Config(Arc<SessionConfig>),
}

/// What a shard needs to start its connection of a path.
#[derive(Clone, Debug)]
pub(crate) struct Connect {
    pub(crate) path: PathId,
    pub(crate) epoch: u32,
    pub(crate) cid: ConnIndex,
    /// The address that connection 0 came up with.
    pub(crate) remote: SocketAddr,
    pub(crate) pd: Arc<dyn ProtectionDomain>,
    pub(crate) private_data: PrivateData,
    pub(crate) shared: Arc<PathShared>,
    /// Answers carry the server's times.
    pub(crate) timed: bool,
}

/// From a shard to the control shard, about one of its connections.
#[derive(Clone, Debug)]
pub(crate) enum ControlMessage {
    /// A connection was accepted.
    Up { path: PathId, epoch: u32, cid: ConnIndex },
    /// A connection was refused or did not come about.
    Failed { path: PathId, epoch: u32, cid: ConnIndex, failure: ConnectFailure },
    /// A connection ended; all its requests have been accounted for.
    Closed { path: PathId, epoch: u32, cid: ConnIndex, reason: CloseReason },
    /// Nothing of a path that is to go is in flight here any more.
    Retired { path: PathId, epoch: u32, shard: CoreIndex },
    /// A request went out while the session was idle.
    InUse,
    /// The server says that the export of this device is removed.
    Removed(DeviceIndex),
    /// Nothing of a device that is to be closed is left here.
    Settled { device: DeviceIndex, shard: CoreIndex },
    /// A state was met on a path that cannot be; the shard has ended its connection.
    InternalError { path: PathId },
}

/// A message to another shard, to be kept in order between each two shards.
#[derive(Debug)]
pub struct ClientMessage(pub(super) Message);

#[derive(Debug)]
pub(crate) enum Message {
    Shard(ShardMessage),
    Control(ControlMessage),
}

/// Messages on their way, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    messages: VecDeque<(CoreIndex, Message)>,
}

impl Outbox {
    /// Leaves a message for a shard.
    pub(super) fn shard(&mut self, shard: CoreIndex, message: ShardMessage) {
        self.messages.push_back((shard, Message::Shard(message)));
    }

    /// Leaves a message for each of so many shards, this one last.
    pub(super) fn all_shards(&mut self, shards: u16, message: &ShardMessage) {
        for shard in (1..shards).chain([0]) {
            self.shard(CoreIndex(shard), message.clone());
        }
    }

    /// Leaves a message for the control shard.
    pub(super) fn control(&mut self, message: ControlMessage) {
        self.messages.push_back((CoreIndex(0), Message::Control(message)));
    }

    /// Leaves a message that came out of another outbox.
    pub(super) fn pass_on(&mut self, shard: CoreIndex, message: Message) {
        self.messages.push_back((shard, message));
    }

    /// The next message.
    pub(super) fn take(&mut self) -> Option<(CoreIndex, Message)> {
        self.messages.pop_front()
    }
}

/// How a connection of this shard ended.
#[derive(Debug)]
pub(crate) enum ConnectionEnd {
    /// It never came about.
    Failed(ConnectFailure),
    /// It was up and ended.
    Closed(CloseReason),
}
