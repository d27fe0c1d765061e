//! Requests and replies of an attached session's control socket: one line of JSON in each direction
//! (docs/reference/control-socket.md). A refused request is answered with `{"error": WHY}`
//! (`rtrs_core::local`).

use std::collections::BTreeMap;

use rtrs_core::choices;
use rtrs_core::fabric::FabricCounters;
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::identity::Identity;
use rtrs_core::metrics::Bucket;
use serde::{Deserialize, Serialize};

use crate::parts::Part;
use crate::path::state::PathState;
use crate::settings::{Access, Failover, NoPath, Policy, SlowIo};
use crate::stats::OpCount;

/// URI prefix of a volume that is served to a virtual machine.
pub(crate) const VHOST_USER: &str = "vhost-user-blk:";

/// Request to a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "command")]
pub(crate) enum Request {
    /// Describe the session; reply: [`Status`].
    Status,
    /// Report counters; reply: [`Stats`].
    Stats {
        /// Whether to include the histograms of times.
        #[serde(default)]
        times: bool,
    },
    /// Report all metrics; reply: [`Samples`](rtrs_core::metrics::Samples).
    Metrics,
    /// Detach this socket's volume, and end the session with its last one. Reply, once that is
    /// done: [`Detached`].
    Detach {
        /// Time allowed for requests in flight, in milliseconds.
        within_ms: u64,
        /// Whether to cut NBD clients' connections, as older commands, which omit this, expect.
        #[serde(default = "force_default")]
        force: bool,
    },
    /// Attach another volume in the same session. Reply, once it is served: [`Attached`].
    VolumeAdd {
        /// Name of the volume on this host, and of its export unless the settings specify another.
        name: String,
        /// The volume's own settings by name, as in the configuration file.
        settings: BTreeMap<String, String>,
    },
    /// Add a path; reply: [`Changed`].
    PathAdd {
        /// Path in the form of `attach --path`.
        path: String,
        /// Paths that the new one may duplicate, because they will be removed.
        #[serde(default)]
        replaces: Vec<String>,
    },
    /// Remove a path permanently; reply: [`Changed`].
    PathRemove(Leave),
    /// Disconnect a path until a reconnect is requested; reply: [`Changed`].
    PathDisconnect(Leave),
    /// Reconnect a path; reply: [`Changed`].
    PathReconnect(Leave),
    /// Switch the volume to another gateway; reply: [`Changed`].
    PathSwitch,
    /// Report the settings; reply: [`SettingValues`](rtrs_core::settings::SettingValues).
    Get,
    /// Change all of these settings, or none; reply: [`Changed`].
    Set {
        /// New values by name, as in the configuration file.
        settings: BTreeMap<String, String>,
    },
    /// Change the path selection policy; reply: [`Changed`].
    Policy {
        /// Policy in the form of `attach --policy`.
        policy: Policy,
    },
}

/// Request to close a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Leave {
    /// Name of the path, as in listings.
    pub(crate) path: String,
    /// Time allowed for requests in flight, in milliseconds; after that they move to other paths.
    #[serde(default = "within_ms_default")]
    pub(crate) within_ms: u64,
    /// Whether to close the path even if it is the last one.
    #[serde(default)]
    pub(crate) force: bool,
}

fn force_default() -> bool {
    true
}

fn within_ms_default() -> u64 {
    5000
}

/// Reply to a change that has begun; [`Status`] shows its progress.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Changed {
    /// Always true.
    pub(crate) changed: bool,
}

/// Reply to a detach.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Detached {
    /// Always true.
    pub(crate) detached: bool,
    /// Number of IO requests that did not finish in time.
    #[serde(default)]
    pub(crate) abandoned: usize,
    /// Warning, for example that the device is still in use.
    pub(crate) warning: Option<String>,
}

choices! {
    /// State of a session.
    pub(crate) enum SessionState as "session state" {
        /// The export was not open yet.
        Connecting = "connecting" | "attaching",
        /// IO flows over all paths.
        Open = "open",
        /// IO flows, but a path is not connected.
        Degraded = "degraded",
        /// No path is connected.
        NoPath = "no-path" | "waiting-for-path",
        /// The server answers, but the session cannot continue.
        Failed = "failed",
        /// The server's operator evicted the session.
        Evicted = "evicted",
        /// No path is connected, and a path leads to a different server or export.
        IdentityMismatch = "identity-mismatch",
        /// The session is being detached.
        Detaching = "detaching",
        /// The session's process died.
        Dead = "dead",
        /// The session does not reply, or its control shard gives no report.
        Unresponsive = "unresponsive" | "not-answering",
    }
}

impl SessionState {
    /// Whether the session has been open but now has no connected path.
    fn is_without_path(self) -> bool {
        matches!(self, Self::NoPath | Self::Failed | Self::IdentityMismatch)
    }

    /// Remedy for a session that serves no IO and has no IO waiting; None for other states.
    pub(crate) fn remedy(self) -> Option<&'static str> {
        match self {
            Self::Connecting | Self::Open | Self::Degraded | Self::Detaching => None,
            Self::NoPath => Some("check its paths with doctor"),
            Self::Failed | Self::Evicted => Some("detach it, and attach it again"),
            Self::IdentityMismatch => Some(
                "check the addresses of its paths; if the volume was moved, detach it, and attach \
                 it again",
            ),
            Self::Dead => Some("attach it again, or detach it if it is no longer needed"),
            Self::Unresponsive => Some(
                "if its process is stopped, let it continue with kill -CONT; if it hangs, end it \
                 with kill -9, which loses the waiting IO, and attach again",
            ),
        }
    }
}

/// Status of a volume and its session.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Name of the volume on this host.
    pub(crate) name: String,
    /// Name of the export on the server.
    pub(crate) export: String,
    /// Session name on the server.
    pub(crate) session: String,
    /// Session ID on the server.
    pub(crate) session_id: String,
    /// Volumes of the session, starting with the one attached first.
    #[serde(default)]
    pub(crate) volumes: Vec<String>,
    /// Name of the volume whose log contains the session's messages.
    #[serde(default)]
    pub(crate) log: String,
    /// State of the session.
    pub(crate) state: SessionState,
    /// Reason for the state, if the paths do not explain it.
    #[serde(default)]
    pub(crate) reason: Option<String>,
    /// Remaining time until IO fails for lack of a path, in milliseconds; None if IO waits
    /// indefinitely.
    #[serde(default)]
    pub(crate) no_path_left_ms: Option<u64>,
    /// Whether IO fails.
    #[serde(default)]
    pub(crate) io_fails: bool,
    /// Requested access mode.
    pub(crate) access: Access,
    /// Path selection policy.
    pub(crate) policy: Option<Policy>,
    /// NBD URI for clients, if there is one.
    pub(crate) uri: Option<String>,
    /// Block device, once it is connected.
    pub(crate) device: Option<String>,
    /// Process ID of the session.
    pub(crate) pid: u32,
    /// Version of the process; None from versions that do not report it.
    #[serde(default)]
    pub(crate) version: Option<String>,
    /// Number of IO threads.
    pub(crate) shards: u16,
    /// Size of the export in bytes, once it has been opened.
    pub(crate) size: Option<u64>,
    /// Logical block size.
    pub(crate) block_size: Option<u32>,
    /// Whether the volume is read-only.
    pub(crate) read_only: Option<bool>,
    /// Whether the volume is read-only because the server refused to open it for writing.
    #[serde(default)]
    pub(crate) read_only_fallback: bool,
    /// Number of unanswered IO requests.
    pub(crate) inflight: usize,
    /// Treatment of IO while no path is connected.
    pub(crate) no_path: NoPath,
    /// Condition for repeating the requests of a dead path.
    pub(crate) failover: Failover,
    /// Treatment of a request that takes too long on a working path.
    #[serde(default)]
    pub(crate) slow_io: SlowIo,
    /// Server and export to which the volume is bound.
    pub(crate) identity: Option<Identity>,
    /// Whether the export's contents are lost when its server exits.
    #[serde(default)]
    pub(crate) memory: bool,
    /// Oldest waiting IO.
    pub(crate) oldest_io: Option<OldestIo>,
    /// Requests that the server does not answer although their path works.
    #[serde(default)]
    pub(crate) slow_requests: SlowRequests,
    /// IOs that failed since attach.
    #[serde(default)]
    pub(crate) io_errors: IoErrors,
    /// Files that the next process will lack because they could not be written, with the reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) unsaved: Vec<String>,
    /// Number of NBD connections, including the kernel's and those in their handshake.
    pub(crate) nbd_connections: u64,
    /// Number of connections of NBD clients or a virtual machine that a detach would cut.
    #[serde(default)]
    pub(crate) nbd_clients: u64,
    /// Mistake that keeps a client from using the volume, and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) complaint: Option<String>,
    /// Paths of the session; None if it does not answer.
    pub(crate) paths: Option<Vec<PathInfo>>,
}

impl Status {
    /// Device or URI at which the volume is served.
    pub(crate) fn served_at(&self) -> &str {
        self.device.as_deref().or(self.uri.as_deref()).unwrap_or("-")
    }

    /// Whether the volume is served to a virtual machine instead of NBD clients.
    pub(crate) fn is_for_machine(&self) -> bool {
        self.uri.as_ref().is_some_and(|uri| uri.starts_with(VHOST_USER))
    }

    /// Number of connected paths and of all paths.
    pub(crate) fn path_counts(&self) -> (usize, usize) {
        let paths = self.paths();
        (paths.iter().filter(|path| path.is_connected()).count(), paths.len())
    }

    /// Effect of the state on IO, and its reason; None if the state needs no explanation.
    pub(crate) fn state_detail(&self) -> Option<String> {
        let io = match (self.state, self.no_path_left_ms) {
            (SessionState::Degraded, _) => {
                let (up, all) = self.path_counts();
                Some(format!("{up}/{all} paths"))
            }
            _ if self.io_fails => Some("IO fails".to_owned()),
            (state, _) if !state.is_without_path() => None,
            (_, Some(left)) => Some(format!("IO waits, at most {} s more", left / 1000)),
            (_, None) => Some("IO waits".to_owned()),
        };
        let parts: Vec<String> = io.into_iter().chain(self.reason.clone()).collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// Remedy that loses no waiting IO, for a session that serves no IO; None for other sessions.
    pub(crate) fn remedy(&self) -> Option<&'static str> {
        let is_refused = match self.state {
            SessionState::Failed => true,
            // The reason is a refusal by the server.
            SessionState::NoPath => self.reason.is_some(),
            _ => false,
        };
        match self.state {
            _ if is_refused && !self.io_fails => Some(
                "do not detach it, because the waiting IO would fail; the session resumes once the \
                 cause above is fixed on the server",
            ),
            SessionState::IdentityMismatch if !self.io_fails => Some(
                "check the addresses of its paths; if the volume was moved, give the new server \
                 the IDs of the old one; do not detach, because the waiting IO would fail",
            ),
            state => state.remedy(),
        }
    }

    /// Reason why only a new session can serve IO again; None if this session may do so.
    pub(crate) fn needs_new_session(&self) -> Option<&'static str> {
        match self.state {
            SessionState::Evicted => Some("the server evicted the session"),
            SessionState::Failed if self.io_fails => Some("the session has failed; see `status`"),
            _ => None,
        }
    }

    /// State in which no IO is served, its reason and its remedy; None for other states.
    pub(crate) fn no_service(&self) -> Option<String> {
        let remedy = self.remedy()?;
        let detail = self.state_detail().map(|detail| format!(": {detail}"));
        Some(format!("{}{}; {remedy}", self.state, detail.unwrap_or_default()))
    }

    /// All paths of the session.
    pub(crate) fn paths(&self) -> &[PathInfo] {
        self.paths.as_deref().unwrap_or_default()
    }
}

choices! {
    /// Event that an IO waits for.
    pub(crate) enum WaitsFor as "wait" {
        /// Answer on a path.
        Answer = "answer",
        /// Fence of a dead path.
        Fence = "fence",
        /// Connected path.
        Path = "path",
        /// Free permit.
        Permit = "permit",
        /// End of overlapping flushes.
        Flushes = "flushes",
    }
}

/// Waiting IO.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OldestIo {
    /// Time since the IO arrived, in milliseconds.
    pub(crate) age_ms: u64,
    /// Event that the IO waits for.
    pub(crate) waits_for: WaitsFor,
    /// Path involved in the wait.
    pub(crate) path: Option<String>,
}

/// Requests that were not answered within `io-timeout` on a working path.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct SlowRequests {
    /// Current number of such requests.
    pub(crate) now: usize,
    /// Time since the oldest of these requests was sent, in milliseconds.
    pub(crate) oldest_ms: Option<u64>,
    /// Total number since attach.
    pub(crate) total: u64,
}

/// IOs that failed since attach, except for operations that the server does not offer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct IoErrors {
    /// Number of failed IOs.
    pub(crate) count: u64,
    /// Number of failed flushes that succeeded on the server but reported lost writes.
    #[serde(default)]
    pub(crate) lost_writes: u64,
    /// Last failed IO that was not such a flush.
    pub(crate) last: Option<IoError>,
}

/// Failed IO.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct IoError {
    /// Name of the errno, such as `ENOSPC`.
    pub(crate) errno: String,
    /// Operation, as in [`Stats::ops`].
    pub(crate) op: String,
    /// Offset of the first byte; 0 for a flush.
    pub(crate) offset: u64,
    /// Length in bytes; 0 for a flush.
    pub(crate) bytes: u32,
    /// Path whose answer or failure made the IO fail, if any.
    pub(crate) path: Option<String>,
    /// Time since the failure in milliseconds.
    pub(crate) age_ms: u64,
}

/// Path of a session.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PathInfo {
    /// Name, as entered by the user.
    pub(crate) path: String,
    /// Transport: `tcp` or `rdma`.
    pub(crate) transport: String,
    /// Server address of the current or last attempt.
    pub(crate) address: String,
    /// State of the path.
    pub(crate) state: PathState,
    /// Reason why the path is being closed: `remove`, `disconnect` or `reconnect`.
    pub(crate) leaving: Option<String>,
    /// Number of connections, including the service connection.
    #[serde(default)]
    pub(crate) connections: u16,
    /// Number of reconnects.
    pub(crate) reconnects: u64,
    /// Number of failed attempts and lost connections.
    #[serde(default)]
    pub(crate) ends: u64,
    /// Last heartbeat round trip in microseconds, if known.
    pub(crate) heartbeat_us: Option<u64>,
    /// Longest silence after which the path still counts as alive; None while it is not connected.
    pub(crate) silence_max_ms: Option<u64>,
    /// Heartbeats sent by this end.
    pub(crate) heartbeats: Heartbeats,
    /// Number of impossible states that ended the path; each is a bug in this client.
    #[serde(default)]
    pub(crate) internal_errors: u64,
    /// Last error that ended the path or an attempt, even if the path has reconnected since.
    pub(crate) last_error: Option<String>,
    /// Time since the last error in milliseconds.
    #[serde(default)]
    pub(crate) last_error_age_ms: Option<u64>,
    /// Number of such errors since the path was added.
    #[serde(default)]
    pub(crate) errors: u64,
    /// Reason why the connected path does not serve this volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) refused: Option<String>,
    /// Whether that reason, or else the reason why the path last ended, is a different server or
    /// export.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) mismatch: bool,
    /// Whether the path is excluded because it is far slower than others.
    pub(crate) slow: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl PathInfo {
    /// Whether the path is connected, whatever it serves.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self.state, PathState::Connected | PathState::Standby)
    }

    /// Whether the path carries the volume's IO, or is ready to.
    pub(crate) fn is_connected(&self) -> bool {
        self.is_up() && self.refused.is_none()
    }

    /// Reason why the path does not carry the volume's IO; None if it does or may.
    pub(crate) fn why(&self) -> Option<&str> {
        self.refused.as_deref().or_else(|| self.last_error.as_deref().filter(|_| !self.is_up()))
    }

    /// Describes a path that is not connected, with the reason.
    pub(crate) fn not_connected(&self) -> String {
        match self.why() {
            Some(why) => format!("path {} is not connected: {why}", self.path),
            None => format!("path {} is not connected: no answer yet", self.path),
        }
    }

    /// Whether the path is excluded because it is slow.
    pub(crate) fn is_avoided(&self) -> bool {
        self.slow && self.leaving.is_none() && self.is_connected()
    }

    /// State of the path, and its pending change.
    pub(crate) fn state_text(&self) -> String {
        match self.leaving.as_deref() {
            Some("reconnect") => "reconnecting".to_owned(),
            Some(_) => "leaving".to_owned(),
            None if self.is_avoided() => "slow".to_owned(),
            None if self.refused.is_some() => "refused".to_owned(),
            None => self.state.to_string(),
        }
    }
}

/// Heartbeat counters of a path.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Heartbeats {
    /// Heartbeats sent.
    pub(crate) sent: u64,
    /// Periods after a heartbeat in which nothing was received from the server.
    pub(crate) missed: u64,
}

/// Reply to an attach.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Attached {
    /// Name of the volume on this host.
    pub(crate) name: String,
    /// Name of the export on the server.
    pub(crate) export: String,
    /// Block device, if the volume is served as one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<String>,
    /// NBD URI otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uri: Option<String>,
    /// Size in bytes.
    pub(crate) size: Option<u64>,
    /// Logical block size.
    pub(crate) block_size: Option<u32>,
    /// Whether the volume is read-only.
    pub(crate) read_only: Option<bool>,
    /// Whether the volume is read-only because the server refused to open it for writing.
    #[serde(default)]
    pub(crate) read_only_fallback: bool,
    /// Server and export to which the volume is bound.
    pub(crate) identity: Option<Identity>,
    /// Process ID of the session.
    pub(crate) pid: u32,
    /// Files that the next process will lack because they could not be written, with the reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) unsaved: Vec<String>,
    /// Paths of the session.
    pub(crate) paths: Option<Vec<PathInfo>>,
}

/// Volume that could not be attached while others could.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct NotAttached {
    /// Name of the volume on this host.
    pub(crate) name: String,
    /// Name of the export on the server.
    pub(crate) export: String,
    /// Reason for the failure.
    pub(crate) error: String,
}

/// Counters of a session since it began.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Stats {
    /// Name on this host.
    pub(crate) name: String,
    /// Counts by operation.
    pub(crate) ops: BTreeMap<String, OpCount>,
    /// Times of IOs.
    pub(crate) latency_us: Latency,
    /// Histogram of these times, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) times: Option<Vec<Bucket>>,
    /// Breakdown of request times, over all paths.
    #[serde(default)]
    pub(crate) parts_us: Vec<PartTimes>,
    /// Counters by path.
    pub(crate) paths: Vec<PathStats>,
    /// Counters by shard.
    pub(crate) cores: Vec<ShardStats>,
    /// Combined counters of all transports.
    pub(crate) fabric: FabricCounters,
    /// Counters by transport.
    pub(crate) transports: BTreeMap<String, FabricCounters>,
    /// Counters of the NBD connections.
    pub(crate) nbd: FrontEndStats,
}

/// Distribution of times in microseconds.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// Number of recorded times.
    pub(crate) count: u64,
    /// Median.
    pub(crate) p50: f64,
    /// 90th percentile.
    pub(crate) p90: f64,
    /// 99th percentile.
    pub(crate) p99: f64,
    /// 99.9th percentile.
    pub(crate) p999: f64,
    /// Maximum.
    pub(crate) max: f64,
}

/// Times of one part of requests, in microseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PartTimes {
    /// Part of the time.
    pub(crate) part: Part,
    /// Number of recorded times.
    pub(crate) count: u64,
    /// Median.
    pub(crate) p50: u64,
    /// 99th percentile.
    pub(crate) p99: u64,
    /// Maximum.
    pub(crate) max: u64,
    /// Histogram of these times, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) times: Option<Vec<Bucket>>,
}

/// Counters of a path.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PathStats {
    /// Status of the path, as in `path list`.
    #[serde(flatten)]
    pub(crate) status: PathInfo,
    /// Number of unanswered requests.
    pub(crate) inflight: u32,
    /// Times from requests to their answers.
    pub(crate) latency_us: Option<Latency>,
    /// Histogram of these times, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) times: Option<Vec<Bucket>>,
    /// Breakdown of the time, including the time before the request was sent.
    #[serde(default)]
    pub(crate) parts_us: Vec<PartTimes>,
    /// Number of requests sent.
    pub(crate) requests: u64,
    /// Number of requests answered.
    pub(crate) answers: u64,
    /// Bytes of data in requests that were answered without an error.
    pub(crate) bytes: u64,
    /// Number of answers with an error.
    pub(crate) errors: u64,
    /// Number of requests in flight when the path died.
    pub(crate) failovers: u64,
    /// Number of requests that waited for the path's fence after it died.
    #[serde(default)]
    pub(crate) fence_waits: u64,
    /// Number of requests not answered within `io-timeout` although the path worked.
    #[serde(default)]
    pub(crate) slow_requests: u64,
}

/// Counters of a shard.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ShardStats {
    /// Number of the shard.
    pub(crate) core: u16,
    /// Number of completed IOs.
    pub(crate) ios: u64,
    /// Number of IOs in flight.
    pub(crate) inflight: usize,
    /// Number of NBD connections.
    pub(crate) nbd_connections: u64,
}
