//! Messages between the shards of a session.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use rtrs_core::fabric::{CloseReason, ConnectFailure, PrivateData, ProtectionDomain, RemoteMem};
use rtrs_core::ids::{ConnIndex, CoreIndex, PathId};

use super::cache_epoch::CacheWatch;
use super::device_set::DeviceIndex;
use super::device_table::OpenDevice;
use super::session::{Granted, PathShared, PathTarget, SessionConfig};

/// Volume that a path serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) device: DeviceIndex,
    /// The server's number for the device, on this path.
    pub(crate) device_id: u32,
    /// Cache epoch in which the path opened the volume; 0 if the server does not report one.
    pub(crate) cache_id: u64,
}

/// Message from the control shard to a shard.
#[derive(Clone, Debug)]
pub(crate) enum ShardMessage {
    /// Limits granted by the server; sent before the first `Connect` above connection 0 completes.
    Granted(Granted),
    /// Start this shard's connection of a path.
    Connect(Box<Connect>),
    /// Use a path whose handshake is complete, with its volumes, and its chunks in permit order.
    PathUp { path: PathId, epoch: u32, chunks: Arc<[RemoteMem]>, served: Arc<[Served]> },
    /// Use a connected path for this volume too.
    Serves { path: PathId, epoch: u32, served: Served },
    /// Stop using a connected path for this volume.
    Leaves { path: PathId, epoch: u32, device: DeviceIndex },
    /// End this shard's connection of the path, immediately or in order.
    Disconnect { path: PathId, epoch: u32, in_order: bool },
    /// Track writes and flushes with this watch, because the server reports losses.
    Cache(DeviceIndex, Arc<CacheWatch>),
    /// Check the flushes that are waiting for other shards' syncs.
    Wake,
    /// Let IO flow to this device.
    Open(DeviceIndex, Arc<OpenDevice>),
    /// Hold IO of this device, which is no longer open on the server.
    Closed(DeviceIndex),
    /// Send requests in flight on this path again: what its connections sent up to that epoch can
    /// no longer start on the server.
    Fenced { path: PathId, epoch: u32 },
    /// Fail waiting and new IO of this device until a path that serves it is up.
    GiveUp(DeviceIndex),
    /// Add the volume of this export, at an index that is new or free again.
    AddDevice(DeviceIndex, Arc<str>),
    /// Close a device: fail its queued IO, and report when the rest has ended.
    CloseDevice(DeviceIndex),
    /// Add a path, in a new slot or in that of a removed path.
    AddPath { path: PathId, target: Box<PathTarget> },
    /// Give this path no more requests, and report when none is in flight.
    Retire { path: PathId, epoch: u32 },
    /// Use this configuration from now on.
    Config(Arc<SessionConfig>),
}

/// Parameters for a shard's connection of a path.
#[derive(Clone, Debug)]
pub(crate) struct Connect {
    pub(crate) path: PathId,
    pub(crate) epoch: u32,
    pub(crate) cid: ConnIndex,
    /// Server address that connection 0 used.
    pub(crate) remote: SocketAddr,
    pub(crate) pd: Arc<dyn ProtectionDomain>,
    pub(crate) private_data: PrivateData,
    pub(crate) shared: Arc<PathShared>,
    /// Whether answers carry the server's times.
    pub(crate) timed: bool,
}

/// Message from a shard to the control shard, about one of its connections.
#[derive(Clone, Debug)]
pub(crate) enum ControlMessage {
    /// A connection was accepted.
    Up { path: PathId, epoch: u32, cid: ConnIndex },
    /// A connection was refused or could not be established.
    Failed { path: PathId, epoch: u32, cid: ConnIndex, failure: ConnectFailure },
    /// A connection ended; all its requests have been accounted for.
    Closed { path: PathId, epoch: u32, cid: ConnIndex, reason: CloseReason },
    /// A leaving path no longer has requests in flight on this shard.
    Retired { path: PathId, epoch: u32, shard: CoreIndex },
    /// A request was sent while the session was idle.
    InUse,
    /// The server reports that the export of this device was removed.
    Removed(DeviceIndex),
    /// The user of a device claims it on this shard, or no longer does.
    Claim { device: DeviceIndex, is_made: bool },
    /// A closing device has no IO left on this shard.
    Settled { device: DeviceIndex, shard: CoreIndex },
    /// A path reached an impossible state; the shard has ended its connection.
    InternalError { path: PathId },
}

/// Message to another shard. The order of messages between two shards must be kept.
#[derive(Debug)]
pub struct ClientMessage(pub(super) Message);

#[derive(Debug)]
pub(crate) enum Message {
    Shard(ShardMessage),
    Control(ControlMessage),
}

/// Outgoing messages, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    messages: VecDeque<(CoreIndex, Message)>,
}

impl Outbox {
    /// Queues a message for a shard.
    pub(super) fn shard(&mut self, shard: CoreIndex, message: ShardMessage) {
        self.messages.push_back((shard, Message::Shard(message)));
    }

    /// Queues a message for each of this number of shards, the control shard last.
    pub(super) fn all_shards(&mut self, shards: u16, message: &ShardMessage) {
        for shard in (1..shards).chain([0]) {
            self.shard(CoreIndex(shard), message.clone());
        }
    }

    /// Queues a message for the control shard.
    pub(super) fn control(&mut self, message: ControlMessage) {
        self.messages.push_back((CoreIndex(0), Message::Control(message)));
    }

    /// Queues a message taken from another outbox.
    pub(super) fn pass_on(&mut self, shard: CoreIndex, message: Message) {
        self.messages.push_back((shard, message));
    }

    pub(super) fn take(&mut self) -> Option<(CoreIndex, Message)> {
        self.messages.pop_front()
    }
}

/// End of a connection of this shard.
#[derive(Debug)]
pub(crate) enum ConnectionEnd {
    /// The connection was never established.
    Failed(ConnectFailure),
    /// The connection was established and ended.
    Closed(CloseReason),
}
