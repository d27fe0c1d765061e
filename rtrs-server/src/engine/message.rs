//! Messages between the control shard and the shards that carry IO.
//!
//! The control shard is shard 0; a message to the same shard is delivered within the same turn.
//! Messages from one shard to another arrive in order. The lifecycle of a path relies on this: a
//! shard must receive the message to accept a connection before the message to close it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use rtrs_core::fabric::{ConnRequest, PeerIdentity, PrivateData};
use rtrs_core::gateway::GatewayEvent;
use rtrs_core::ids::{ConnIndex, CoreIndex, PermitId, ProviderIndex, SessionId};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{Challenge, Fence, Move, Name, OpenRsp, OpenRspTail};

use crate::access_list::AccessPolicy;
use crate::engine::authenticator::ProofDone;
use crate::engine::device_table::DeviceId;
use crate::engine::finder::{OpenMode, Search};
pub use crate::engine::reply_to::ReplyTo;
use crate::export::{Export, ExportIndex};
use crate::path::{PathEnd, PathKey, PathShared};
use crate::rate_limits::RateLimits;
use crate::stats::{ExportSnapshot, MemorySnapshot, Revoked, SessionSnapshot, ShardReport};

impl ReplyTo {
    /// Sends an answer. The answer is dropped if the path no longer exists.
    pub fn answer(self, answer: ControlAnswer, out: &mut Outbox) {
        let Self { path, core, permit } = self;
        out.shard(core, ShardMessage::Answer { path, permit, answer });
    }
}

/// A client's request to the control shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlRequest {
    /// OPEN.
    Open {
        /// Name of the export.
        name: Box<Name>,
        /// Mode in which to open it.
        mode: OpenMode,
    },
    /// CLOSE.
    Close {
        /// Device to close.
        device: DeviceId,
    },
    /// FENCE.
    Fence(Fence),
    /// MOVE.
    Move(Move),
    /// DISCOVER.
    Discover {
        /// Name after which the page begins.
        after: Box<Name>,
        /// Space for the answer, in bytes.
        room: u32,
    },
    /// CHALLENGE.
    Challenge {
        /// Challenge from the client.
        challenge: Challenge,
        /// Space for the answer, in bytes.
        room: u32,
    },
    /// AUTH.
    Auth {
        /// Version of the message.
        version: u16,
        /// Proof from the client.
        proof: Box<[u8]>,
    },
}

/// Number of a pending close, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloseNumber(pub u64);

/// A pending close of an export by a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// Number of the close.
    pub close: CloseNumber,
    /// Session that closed the export.
    pub session: SessionId,
    /// Export that was closed.
    pub export: ExportIndex,
}

/// Answer to a [`ControlRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlAnswer {
    /// Success without data.
    Done,
    /// Success, with the response data in its long form.
    Opened([u8; OpenRspTail::LONG_LEN]),
    /// Success, with a page of exports that fits the requested space.
    Page(Box<[u8]>),
    /// Success, with the answer to a CHALLENGE that fits the requested space.
    Challenged(Box<[u8]>),
    /// Refusal with this errno.
    Refused(u16),
    /// Refusal with this errno and the reason, for a client with room for the long response.
    RefusedWith(u16, [u8; OpenRspTail::LONG_LEN]),
}

impl ControlAnswer {
    /// Returns the errno, 0 on success, and the data for a client that has room for `room` bytes.
    pub fn parts(&self, room: usize) -> (u16, &[u8]) {
        match self {
            Self::Done => (0, &[]),
            Self::Refused(errno) => (*errno, &[]),
            // A client without room for the long form knows only the short one, and no reasons.
            Self::Opened(bytes) if room >= bytes.len() => (0, bytes),
            Self::Opened(bytes) => (0, &bytes[..OpenRsp::LEN]),
            Self::RefusedWith(errno, why) if room >= why.len() => (*errno, why),
            Self::RefusedWith(errno, _) => (*errno, &[]),
            Self::Page(bytes) | Self::Challenged(bytes) => (0, bytes),
        }
    }
}

/// A connection for a shard to accept.
#[derive(Debug)]
pub struct AcceptOrder {
    /// Path of the connection.
    pub path: Arc<PathShared>,
    /// Index of the connection.
    pub cid: ConnIndex,
    /// Connection request from the peer.
    pub request: ConnRequest,
    /// Private data to accept with.
    pub response: PrivateData,
}

/// Connection request of a ping, for the shard that serves pings.
#[derive(Debug)]
pub struct PingOrder {
    /// Provider that the request arrived over.
    pub provider: ProviderIndex,
    /// Connection request from the peer.
    pub request: ConnRequest,
    /// Held while the order is in transit; the sender counts the clones.
    pub place: Arc<()>,
}

/// A message from the control shard to a shard.
#[derive(Debug)]
pub enum ShardMessage {
    /// Accept a connection of a path.
    Accept(Box<AcceptOrder>),
    /// Bind the windows of the new chunk pool and send INFO_RSP on connection 0. Sent to the shard
    /// of connection 0.
    Serve {
        /// Number of the path.
        path: PathKey,
    },
    /// Refuse INFO_REQ on connection 0. Sent to the shard of connection 0.
    RefuseInfo {
        /// Number of the path.
        path: PathKey,
        /// Positive errno for the client.
        errno: u16,
    },
    /// Send HB_MSG on connection 0. Sent to the shard of connection 0.
    Heartbeat {
        /// Number of the path.
        path: PathKey,
    },
    /// Send CHANGED for a device on connection 0. Sent to the shard of connection 0.
    Changed {
        /// Number of the path.
        path: PathKey,
        /// Device of the path's session.
        device: DeviceId,
    },
    /// Accept no new requests, answer those in progress, then report `Finished`.
    Finish {
        /// Number of the path.
        path: PathKey,
    },
    /// Close all connections, at once if `abrupt`. Requests in progress are not answered.
    Close {
        /// Number of the path.
        path: PathKey,
        /// Whether to discard what is still queued for sending.
        abrupt: bool,
    },
    /// The answer to an open or close.
    Answer {
        /// Path that the request arrived over.
        path: PathKey,
        /// Permit of the request.
        permit: PermitId,
        /// Answer to the request.
        answer: ControlAnswer,
    },
    /// A session closed an export: report `Retired` once its last request there has ended.
    Retire(Closed),
    /// Close the device of an export that no session has open anymore.
    CloseDevice {
        /// Index of the export.
        export: ExportIndex,
    },
    /// Apply changed rate limits of an export.
    Limits {
        /// Index of the export.
        export: ExportIndex,
    },
    /// Wake requests that may be waiting for an event on another shard, such as a completed sync or
    /// their turn.
    Wake,
    /// Exit, because the server is stopping.
    Exit,
}

/// Stages of a path's shutdown on a shard, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EndReport {
    /// A finishing path no longer has anything in flight on this shard.
    Finished,
    /// No new work for the path begins on this shard. Its connections are being closed.
    Stopped,
    /// Nothing of the path remains on this shard.
    Drained,
}

/// A message from a shard to the control shard.
#[derive(Debug)]
pub enum ControlMessage {
    /// INFO_REQ, or a message received instead of it.
    Info {
        /// Number of the path.
        path: PathKey,
        /// Received bytes, truncated to the length of INFO_REQ.
        bytes: Box<[u8]>,
    },
    /// INFO_RSP was posted, so the path serves requests.
    Serving {
        /// Number of the path.
        path: PathKey,
    },
    /// An open or close.
    Request {
        /// Destination of the answer.
        reply_to: ReplyTo,
        /// The client's request.
        request: ControlRequest,
    },
    /// Result of a finder: the export, or the errno to answer the open with.
    Found(Box<(Search, Result<Arc<Export>, u16>)>),
    /// A signature was created or verified for a path.
    Proof(Box<ProofDone>),
    /// No requests of a session that closed an export remain on this shard.
    Retired {
        /// Number of the close.
        close: CloseNumber,
    },
    /// HB_MSG arrived; it announces when the next one is due.
    Announced {
        /// Number of the path.
        path: PathKey,
        /// Time of arrival.
        at: Instant,
        /// Maximum time until the next heartbeat.
        next: Duration,
    },
    /// HB_ACK arrived.
    HeartbeatAck {
        /// Number of the path.
        path: PathKey,
        /// Time of arrival.
        at: Instant,
    },
    /// The path failed.
    Broken {
        /// Number of the path.
        path: PathKey,
        /// Reason for the failure.
        end: PathEnd,
    },
    /// Progress of a path's shutdown on a shard.
    Ending {
        /// Number of the path.
        path: PathKey,
        /// Reporting shard.
        core: CoreIndex,
        /// Progress on that shard.
        report: EndReport,
    },
    /// The size of an export changed.
    Resized(ExportIndex),
    /// An export that moves between servers became active here, or is no longer active.
    Gateway(ExportIndex, GatewayEvent),
    /// A signal asks the server to stop.
    Shutdown,
    /// A request from the operator.
    Admin {
        /// Request from the operator.
        request: AdminRequest,
        /// Destination of the answer.
        reply: AdminReplyTo,
    },
}

/// The operator's request to the control shard. Sessions are identified by number or name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminRequest {
    /// List the sessions.
    Sessions,
    /// End paths of a session; its client may reconnect them.
    Disconnect {
        /// Number or name of the session.
        session: String,
        /// Path to end; all paths by default.
        path: Option<u64>,
    },
    /// End a session and refuse its reconnects.
    Evict {
        /// Number or name of the session.
        session: String,
    },
    /// Shut down the server, path by path.
    Drain {
        /// Time allowed for requests in progress.
        within: Duration,
    },
    /// End the paths that the changed access lists no longer allow.
    CheckAccess,
    /// List the authenticated clients of the paths.
    Identities,
    /// End these paths, whose clients are no longer accepted.
    EndUnknown(Vec<PathKey>),
    /// Report which paths would end with these access lists and without these clients.
    WouldEnd {
        /// New access lists.
        policy: AccessPolicy,
        /// Paths of the clients that would no longer be accepted.
        unknown: Vec<PathKey>,
    },
    /// List the exports and the sessions that have them open.
    Exports,
    /// List the sessions that have these exports open.
    Holders(Vec<String>),
    /// Remove an export, so that it can no longer be opened.
    ExportRemove {
        /// Name of the export.
        name: String,
        /// Whether to close it for the sessions that have it open.
        force: bool,
    },
    /// Forbid opens of an export for writing, or permit them again.
    ExportFreeze {
        /// Name of the export.
        name: String,
        /// Whether opens for writing are forbidden.
        frozen: bool,
    },
    /// Change the rate limits of an export.
    ExportLimit {
        /// Name of the export.
        name: String,
        /// New limits.
        limits: RateLimits,
    },
}

/// Answer to an [`AdminRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminReply {
    /// List of sessions.
    Sessions {
        /// All sessions.
        sessions: Vec<SessionSnapshot>,
        /// Memory used by the chunks of all sessions.
        memory: MemorySnapshot,
        /// Portals that are not served because their device was removed.
        lost_portals: Vec<String>,
        /// Numbers of connections refused and of sessions evicted to admit others, by reason.
        refused: BTreeMap<String, u64>,
    },
    /// Paths of a session are ending.
    Ended {
        /// Number of the session.
        session: String,
        /// Numbers of the paths.
        paths: Vec<u64>,
    },
    /// The server's paths have ended, and its shards are about to end.
    Drained {
        /// Number of requests that did not complete in time.
        unfinished: u64,
    },
    /// List of exports.
    Exports(Vec<ExportSnapshot>),
    /// Sessions that have exports open, by export name; true if for writing.
    Holders(BTreeMap<String, BTreeMap<SessionId, bool>>),
    /// Sessions that lose paths.
    Revoked(Vec<Revoked>),
    /// Authenticated clients, by path.
    Identities(Vec<(PathKey, PeerIdentity)>),
    /// The export was removed, or its removal is in progress.
    ExportRemoved {
        /// Sessions that had the export open.
        ended: Vec<String>,
    },
    /// The request succeeded.
    Done,
    /// The request failed for this reason.
    Refused(String),
}

/// Destination of the answer to an [`AdminRequest`], or of a report. The requester may have stopped
/// waiting.
pub struct AdminReplyTo<T = AdminReply>(Box<dyn FnOnce(T) + Send>);

impl<T> AdminReplyTo<T> {
    /// Creates a destination that passes the answer to `take`, which must not block.
    pub fn new(take: impl FnOnce(T) + Send + 'static) -> Self {
        Self(Box::new(take))
    }

    /// Delivers the answer.
    pub fn send(self, answer: T) {
        (self.0)(answer);
    }
}

impl<T> fmt::Debug for AdminReplyTo<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminReplyTo")
    }
}

/// A message to a shard.
#[derive(Debug)]
pub enum Message {
    /// For the shard's IO engine.
    Shard(ShardMessage),
    /// For the control engine; only to shard 0.
    Control(ControlMessage),
    /// Connection request of a ping; to the last shard only.
    Ping(Box<PingOrder>),
    /// End all pings and accept no more, because the server is stopping; to the last shard only.
    StopPings,
    /// A device has completed an operation on another thread.
    Wake,
    /// Report the counters of the shard.
    Report(AdminReplyTo<ShardReport>),
}

/// Outgoing messages of a shard's engine, which the driver delivers.
#[derive(Debug, Default)]
pub struct Outbox {
    messages: std::collections::VecDeque<(CoreIndex, Message)>,
}

impl Outbox {
    /// Queues a message for a shard.
    pub fn shard(&mut self, core: CoreIndex, message: ShardMessage) {
        self.messages.push_back((core, Message::Shard(message)));
    }

    /// Queues a message for the control shard.
    pub fn control(&mut self, message: ControlMessage) {
        self.messages.push_back((CoreIndex(0), Message::Control(message)));
    }

    /// Queues a message from another outbox.
    pub fn pass_on(&mut self, core: CoreIndex, message: Message) {
        self.messages.push_back((core, message));
    }

    /// Removes the oldest message.
    pub fn take(&mut self) -> Option<(CoreIndex, Message)> {
        self.messages.pop_front()
    }

    /// Whether no message is queued.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }
}
