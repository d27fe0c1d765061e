//! Messages between the control shard and the shards that carry IO.
//!
//! The control shard is shard 0; a message to oneself is delivered within the same turn. Messages
//! from one shard to another keep their order, which the life of a path relies on: what is accepted
//! on a shard is closed there later.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use rtrs_core::fabric::{ConnRequest, PeerIdentity, PrivateData};
use rtrs_core::gateway::GatewayEvent;
use rtrs_core::ids::{ConnIndex, CoreIndex, PermitId, ProviderIndex, SessionId};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{Challenge, Fence, Move, Name, OpenRsp, OpenRspTail, errno};

use crate::access_list::AccessPolicy;
use crate::engine::authenticator::ProofDone;
use crate::engine::device_table::DeviceId;
use crate::engine::finder::{OpenMode, Search};
pub use crate::engine::reply_to::ReplyTo;
use crate::export::{Export, ExportIndex};
use crate::path::{PathEnd, PathKey, PathShared};
use crate::stats::{ExportSnapshot, MemorySnapshot, Revoked, SessionSnapshot, ShardReport};

impl ReplyTo {
    /// Answers. Nothing happens if the path is gone meanwhile.
    pub fn answer(self, answer: ControlAnswer, out: &mut Outbox) {
        let Self { path, core, permit } = self;
        out.shard(core, ShardMessage::Answer { path, permit, answer });
    }
}

/// What a client asks of the control shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlRequest {
    /// OPEN.
    Open {
        /// The export's name.
        name: Box<Name>,
        /// How.
        mode: OpenMode,
    },
    /// CLOSE.
    Close {
        /// Which.
        device: DeviceId,
    },
    /// FENCE.
    Fence(Fence),
    /// MOVE.
    Move(Move),
    /// DISCOVER.
    Discover {
        /// What comes after this name.
        after: Box<Name>,
        /// Room for the answer.
        room: u32,
    },
    /// CHALLENGE.
    Challenge {
        /// What the client sent.
        challenge: Challenge,
        /// Room for the answer.
        room: u32,
    },
    /// AUTH.
    Auth {
        /// Of the message.
        version: u16,
        /// The client's proof.
        proof: Box<[u8]>,
    },
}

/// The number of a close that waits, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloseNumber(pub u64);

/// An export that a session has closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// Which close.
    pub close: CloseNumber,
    /// The session.
    pub session: SessionId,
    /// The export.
    pub export: ExportIndex,
}

/// The answer to a [`ControlRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlAnswer {
    /// Done; there are no data.
    Done,
    /// Done; this is the response's data, in its long form.
    Opened([u8; OpenRspTail::LONG_LEN]),
    /// Done; this is a page of exports, no longer than its room.
    Page(Box<[u8]>),
    /// Done; this is the answer to a CHALLENGE, no longer than its room.
    Challenged(Box<[u8]>),
    /// Refused with this errno.
    Refused(u16),
    /// Refused with EACCES; this says why, for a client with room for the long response.
    NotAllowed([u8; OpenRspTail::LONG_LEN]),
}

impl ControlAnswer {
    /// The errno, 0 for success, and the data for a client that has so much room.
    pub fn parts(&self, room: usize) -> (u16, &[u8]) {
        match self {
            Self::Done => (0, &[]),
            Self::Refused(errno) => (*errno, &[]),
            // A client without room for the long form knows the short one only, and no reasons.
            Self::Opened(bytes) if room >= bytes.len() => (0, bytes),
            Self::Opened(bytes) => (0, &bytes[..OpenRsp::LEN]),
            Self::NotAllowed(why) if room >= why.len() => (errno::EACCES, why),
            Self::NotAllowed(_) => (errno::EACCES, &[]),
            Self::Page(bytes) | Self::Challenged(bytes) => (0, bytes),
        }
    }
}

/// A connection for a shard to accept.
#[derive(Debug)]
pub struct AcceptOrder {
    /// Its path.
    pub path: Arc<PathShared>,
    /// Which connection.
    pub cid: ConnIndex,
    /// The peer's request.
    pub request: ConnRequest,
    /// What to answer.
    pub response: PrivateData,
}

/// The request of a ping, for the shard of the pings.
#[derive(Debug)]
pub struct PingOrder {
    /// The provider it came over.
    pub provider: ProviderIndex,
    /// The peer's request.
    pub request: ConnRequest,
    /// A clone of what the sender counts the orders by that are on their way.
    pub place: Arc<()>,
}

/// From the control shard to a shard.
#[derive(Debug)]
pub enum ShardMessage {
    /// Accept a connection of a path.
    Accept(Box<AcceptOrder>),
    /// Bind the windows of the new chunk pool and send INFO_RSP on connection 0. To the shard of
    /// connection 0.
    Serve {
        /// Which path.
        path: PathKey,
    },
    /// Send HB_MSG on connection 0. To the shard of connection 0.
    Heartbeat {
        /// Which path.
        path: PathKey,
    },
    /// Send CHANGED for a device on connection 0. To the shard of connection 0.
    Changed {
        /// Which path.
        path: PathKey,
        /// Which device of its session.
        device: DeviceId,
    },
    /// Take no new requests, answer those that run, then report (`Finished`).
    Finish {
        /// Which path.
        path: PathKey,
    },
    /// End all connections, at once if `abrupt`. Requests that run are not answered.
    Close {
        /// Which path.
        path: PathKey,
        /// Without sending what is still queued.
        abrupt: bool,
    },
    /// The answer to an open or close.
    Answer {
        /// Which path it came over.
        path: PathKey,
        /// The permit of the request.
        permit: PermitId,
        /// How it went.
        answer: ControlAnswer,
    },
    /// A session closed an export: report when nothing of it runs there any more (`Retired`).
    Retire(Closed),
    /// Nobody has the export open any more.
    CloseDevice {
        /// Which.
        export: ExportIndex,
    },
    /// Requests may wait here for what happened on another shard: a sync that is back, a turn.
    Wake,
    /// The server stops: end.
    Exit,
}

/// What a shard reports of the end of a path, in that order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EndReport {
    /// A path that finishes has nothing in flight on this shard any more.
    Finished,
    /// Nothing of the path begins on this shard any more. Its connections are being closed.
    Stopped,
    /// Nothing of the path is left on this shard.
    Drained,
}

/// From a shard to the control shard.
#[derive(Debug)]
pub enum ControlMessage {
    /// INFO_REQ or what came in its place.
    Info {
        /// Which path.
        path: PathKey,
        /// Bytes received, cut at the length of INFO_REQ.
        bytes: Box<[u8]>,
    },
    /// INFO_RSP was posted: the path serves.
    Serving {
        /// Which path.
        path: PathKey,
    },
    /// An open or close.
    Request {
        /// Where the answer goes.
        reply_to: ReplyTo,
        /// What is asked.
        request: ControlRequest,
    },
    /// A finder is done: the export, or the errno of the open.
    Found(Box<(Search, Result<Arc<Export>, u16>)>),
    /// A signature was made or checked for a path.
    Proof(Box<ProofDone>),
    /// Nothing of a session that closed an export runs there on this shard any more.
    Retired {
        /// Which close.
        close: CloseNumber,
    },
    /// HB_MSG came, which announces the next one.
    Announced {
        /// Which path.
        path: PathKey,
        /// When.
        at: Instant,
        /// After this time at the latest.
        next: Duration,
    },
    /// HB_ACK came.
    HeartbeatAck {
        /// Which path.
        path: PathKey,
        /// When.
        at: Instant,
    },
    /// The path cannot go on.
    Broken {
        /// Which path.
        path: PathKey,
        /// Why.
        end: PathEnd,
    },
    /// How far the end of a path is on a shard.
    Ending {
        /// Which path.
        path: PathKey,
        /// The shard.
        core: CoreIndex,
        /// How far.
        report: EndReport,
    },
    /// The size of an export has changed.
    Resized(ExportIndex),
    /// An export that moves between servers is active here now, or is not any more.
    Gateway(ExportIndex, GatewayEvent),
    /// A signal asks the server to stop.
    Shutdown,
    /// The operator asks.
    Admin {
        /// What.
        request: AdminRequest,
        /// Where the answer goes.
        reply: AdminReplyTo,
    },
}

/// What the operator asks of the control shard. A session is named by its number or its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminRequest {
    /// Which sessions there are.
    Sessions,
    /// End paths of a session; its client may connect them again.
    Disconnect {
        /// The session.
        session: String,
        /// This path only.
        path: Option<u64>,
    },
    /// End a session, and let it not come back.
    Evict {
        /// The session.
        session: String,
    },
    /// End the server, path by path.
    Drain {
        /// Time for requests that run.
        within: Duration,
    },
    /// End the paths that may no longer do what their sessions do: the access lists have changed.
    CheckAccess,
    /// Who the clients of the paths are that have proved it.
    Identities,
    /// End these paths, whose clients are not to be taken any more.
    EndUnknown(Vec<PathKey>),
    /// Which paths would end with these access lists, and if these clients were unknown.
    WouldEnd {
        /// The access lists.
        policy: AccessPolicy,
        /// The paths of the clients.
        unknown: Vec<PathKey>,
    },
    /// Which exports there are, and who has them open.
    Exports,
    /// Which sessions have the exports of these names open.
    Holders(Vec<String>),
    /// Let nobody open an export any more.
    ExportRemove {
        /// Its name.
        name: String,
        /// End it for the sessions that have it open.
        force: bool,
    },
    /// Let nobody open an export for writing, or those again who could.
    ExportFreeze {
        /// Its name.
        name: String,
        /// Nobody.
        frozen: bool,
    },
}

/// The answer to an [`AdminRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminReply {
    /// The sessions.
    Sessions {
        /// All of them.
        sessions: Vec<SessionSnapshot>,
        /// The memory of their chunks.
        memory: MemorySnapshot,
        /// Portals that are not listened on, since their device is gone.
        lost_portals: Vec<String>,
        /// Connections refused and sessions ended for others since start, by reason.
        refused: BTreeMap<String, u64>,
    },
    /// Paths of a session are ending.
    Ended {
        /// Its number.
        session: String,
        /// The paths' numbers.
        paths: Vec<u64>,
    },
    /// The server's paths are ended, and its shards about to.
    Drained {
        /// Requests that had not ended in time.
        unfinished: u64,
    },
    /// The exports.
    Exports(Vec<ExportSnapshot>),
    /// Sessions that have exports open, by name; true for writing.
    Holders(BTreeMap<String, BTreeMap<SessionId, bool>>),
    /// The sessions that lose paths.
    Revoked(Vec<Revoked>),
    /// The clients that have proved who they are, by path.
    Identities(Vec<(PathKey, PeerIdentity)>),
    /// An export is removed, or is being removed.
    ExportRemoved {
        /// The sessions that had it open.
        ended: Vec<String>,
    },
    /// It is done.
    Done,
    /// It cannot be done: why.
    Refused(String),
}

/// Where the answer to an [`AdminRequest`] goes, or a report. Nobody may wait for it any more.
pub struct AdminReplyTo<T = AdminReply>(Box<dyn FnOnce(T) + Send>);

impl<T> AdminReplyTo<T> {
    /// Answers by this call, which returns at once.
    pub fn new(take: impl FnOnce(T) + Send + 'static) -> Self {
        Self(Box::new(take))
    }

    /// Answers.
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
    /// For the shard's part of sessions.
    Shard(ShardMessage),
    /// For the control; shard 0 only.
    Control(ControlMessage),
    /// A ping; to the last shard only.
    Ping(Box<PingOrder>),
    /// The server ends: end all pings and take no more; to the last shard only.
    StopPings,
    /// Of a device that has completed something on another thread.
    Wake,
    /// Report what the shard did.
    Report(AdminReplyTo<ShardReport>),
}

/// Messages that a shard's engine leaves for the driver to carry.
#[derive(Debug, Default)]
pub struct Outbox {
    messages: std::collections::VecDeque<(CoreIndex, Message)>,
}

impl Outbox {
    /// Leaves a message for a shard's shard.
    pub fn shard(&mut self, core: CoreIndex, message: ShardMessage) {
        self.messages.push_back((core, Message::Shard(message)));
    }

    /// Leaves a message for the control shard.
    pub fn control(&mut self, message: ControlMessage) {
        self.messages.push_back((CoreIndex(0), Message::Control(message)));
    }

    /// Leaves a message that came out of another outbox.
    pub fn pass_on(&mut self, core: CoreIndex, message: Message) {
        self.messages.push_back((core, message));
    }

    /// The next message, oldest first.
    pub fn take(&mut self) -> Option<(CoreIndex, Message)> {
        self.messages.pop_front()
    }

    /// True when no message waits.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }
}
