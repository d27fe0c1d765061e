//! The requests and replies of an attached session's control socket: one line of JSON each way
//! (docs/OPERATING.md). A refused request gets `{"error": WHY}` (`rtrs_core::local`).

use std::collections::BTreeMap;

use nbd_bridge::BridgeStats;
use rtrs_core::choices;
use rtrs_core::fabric::FabricCounters;
use rtrs_core::identity::Identity;
use rtrs_core::metrics::Bucket;
use serde::{Deserialize, Serialize};

use crate::parts::Part;
use crate::path::state::PathState;
use crate::settings::{Access, Failover, NoPath, Policy, SlowIo};
use crate::stats::OpCount;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "command")]
pub(crate) enum Request {
    /// Describe the session: [`Status`].
    Status,
    /// Its counters: [`Stats`].
    Stats {
        /// Also the histograms of times.
        #[serde(default)]
        times: bool,
    },
    /// All metrics: [`Samples`](rtrs_core::metrics::Samples).
    Metrics,
    /// Detach the volume whose socket this is, and end the session with its last one:
    /// [`Detached`], when that is done.
    Detach {
        /// Time for requests in flight, in milliseconds.
        within_ms: u64,
    },
    /// Attach another volume in the same session: [`Attached`], when it serves.
    VolumeAdd {
        /// The name of its export.
        name: String,
        /// What it has of its own, by name, as the configuration file has them.
        settings: BTreeMap<String, String>,
    },
    /// Add a path: [`Changed`].
    PathAdd {
        /// As `attach --path` takes it.
        path: String,
    },
    /// Remove a path for good: [`Changed`].
    PathRemove(Leave),
    /// Disconnect a path until it is to reconnect: [`Changed`].
    PathDisconnect(Leave),
    /// Connect a path again: [`Changed`].
    PathReconnect(Leave),
    /// Have another gateway serve the volume: [`Changed`], when that has begun.
    PathSwitch,
    /// Its settings: [`SettingValues`].
    Get,
    /// Change settings, all or none: [`Changed`].
    Set {
        /// By name, as the configuration file has them.
        settings: BTreeMap<String, String>,
    },
    /// Change the path selection policy: [`Changed`].
    Policy {
        /// As `attach --policy` takes it.
        policy: Policy,
    },
}

/// A path that is to be closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Leave {
    /// Its name, as listings show it.
    pub(crate) path: String,
    /// Time for its requests in flight, in milliseconds; then they go to other paths.
    #[serde(default = "within_ms_default")]
    pub(crate) within_ms: u64,
    /// Also if it is the last one.
    #[serde(default)]
    pub(crate) force: bool,
}

fn within_ms_default() -> u64 {
    5000
}

/// A change has begun; [`Status`] shows the rest.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Changed {
    /// True.
    pub(crate) changed: bool,
}

/// The settings of a session.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SettingValues {
    /// In order of their names.
    pub(crate) settings: Vec<SettingValue>,
}

/// A setting.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SettingValue {
    /// Its key in the configuration file.
    pub(crate) name: String,
    /// As the configuration file holds it; null if it is unset.
    pub(crate) value: serde_json::Value,
    /// True if `set` changes it.
    pub(crate) changeable: bool,
}

/// A volume is detached.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Detached {
    /// True.
    pub(crate) detached: bool,
    /// IO requests that had not ended when their time was over.
    #[serde(default)]
    pub(crate) abandoned: usize,
    /// What is left to say, for example that the device is still in use.
    pub(crate) warning: Option<String>,
}

choices! {
    /// Where a session is.
    pub(crate) enum SessionState as "session state" {
        /// The export was not open yet.
        Connecting = "connecting" | "attaching",
        /// IO flows, over all paths.
        Open = "open",
        /// IO flows, and a path is not connected.
        Degraded = "degraded",
        /// No path is connected.
        NoPath = "no-path" | "waiting-for-path",
        /// The server answers, and the session cannot go on.
        Failed = "failed",
        /// The server's operator has ended it.
        Evicted = "evicted",
        /// No path is connected, and one leads to another server or export.
        IdentityMismatch = "identity-mismatch",
        /// It is being ended.
        Detaching = "detaching",
        /// Its process is gone, without an end in order.
        Dead = "dead",
        /// It does not reply, or its control shard gives no report.
        Unresponsive = "unresponsive" | "not-answering",
    }
}

impl SessionState {
    /// True if the session was open and no path is connected.
    fn is_without_path(self) -> bool {
        matches!(self, Self::NoPath | Self::Failed | Self::IdentityMismatch)
    }

    /// What to do for a session that serves no IO; none for the other states.
    pub(crate) fn remedy(self) -> Option<&'static str> {
        match self {
            Self::Connecting | Self::Open | Self::Degraded | Self::Detaching => None,
            Self::NoPath => Some("check its paths with doctor"),
            Self::Failed | Self::Evicted => Some("detach it, and attach it again"),
            Self::IdentityMismatch => Some(
                "check the addresses of its paths; if the volume was moved, detach it, and attach \
                 it again",
            ),
            Self::Dead => Some("attach it again, or clean up with detach"),
            Self::Unresponsive => Some("if it stays so, end its process with kill -9, then detach"),
        }
    }
}

/// A volume and its session.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Status {
    /// The export's name, which is its name on this host.
    pub(crate) name: String,
    /// The session's name at the server.
    pub(crate) session: String,
    /// Its number at the server.
    pub(crate) session_id: String,
    /// The volumes of the session, the one first that is attached for the longest time.
    #[serde(default)]
    pub(crate) volumes: Vec<String>,
    /// The name whose log has the session's messages.
    #[serde(default)]
    pub(crate) log: String,
    /// Where it is.
    pub(crate) state: SessionState,
    /// Why, for a state that its paths do not explain.
    #[serde(default)]
    pub(crate) reason: Option<String>,
    /// Without a path: how much longer IO waits, in milliseconds; none if it waits without limit.
    #[serde(default)]
    pub(crate) no_path_left_ms: Option<u64>,
    /// IO fails.
    #[serde(default)]
    pub(crate) io_fails: bool,
    /// Access mode that was asked for.
    pub(crate) access: Access,
    /// How it selects paths.
    pub(crate) policy: Option<Policy>,
    /// NBD URI that clients open, if there is one.
    pub(crate) uri: Option<String>,
    /// The block device, once it is connected.
    pub(crate) device: Option<String>,
    /// Its process.
    pub(crate) pid: u32,
    /// Its IO threads.
    pub(crate) shards: u16,
    /// Bytes of the export, once it was open.
    pub(crate) size: Option<u64>,
    /// Its logical block size.
    pub(crate) block_size: Option<u32>,
    /// No writes.
    pub(crate) read_only: Option<bool>,
    /// IO requests that have no answer yet.
    pub(crate) inflight: usize,
    /// What IO does while no path is connected.
    pub(crate) no_path: NoPath,
    /// When the requests of a dead path are sent again.
    pub(crate) failover: Failover,
    /// What happens to a request that takes too long over a path that works.
    #[serde(default)]
    pub(crate) slow_io: SlowIo,
    /// Server and export that it is bound to.
    pub(crate) identity: Option<Identity>,
    /// The IO that has waited the longest.
    pub(crate) oldest_io: Option<OldestIo>,
    /// Requests that the server does not answer although their path works.
    #[serde(default)]
    pub(crate) slow_requests: SlowRequests,
    /// NBD connections.
    pub(crate) nbd_connections: u64,
    /// Its paths; none from a session that is not answering.
    pub(crate) paths: Option<Vec<PathInfo>>,
}

impl Status {
    /// Where it is served: its device or its URI.
    pub(crate) fn served_at(&self) -> &str {
        self.device.as_deref().or(self.uri.as_deref()).unwrap_or("-")
    }

    /// Connected paths, and all.
    pub(crate) fn path_counts(&self) -> (usize, usize) {
        let paths = self.paths();
        (paths.iter().filter(|path| path.is_connected()).count(), paths.len())
    }

    /// What its state means for IO, and why it is in it; none where the state says all.
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

    /// All of its paths.
    pub(crate) fn paths(&self) -> &[PathInfo] {
        self.paths.as_deref().unwrap_or_default()
    }
}

choices! {
    /// What an IO waits for.
    pub(crate) enum WaitsFor as "wait" {
        /// The answer on a path.
        Answer = "answer",
        /// The fence of a dead path.
        Fence = "fence",
        /// A connected path.
        Path = "path",
        /// A free permit.
        Permit = "permit",
    }
}

/// An IO that waits.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OldestIo {
    /// Milliseconds since its arrival.
    pub(crate) age_ms: u64,
    /// What for.
    pub(crate) waits_for: WaitsFor,
    /// The path that this is about.
    pub(crate) path: Option<String>,
}

/// Requests that were not answered within `io-timeout` over a path that works.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct SlowRequests {
    /// Now.
    pub(crate) now: usize,
    /// Milliseconds since the oldest of now was sent.
    pub(crate) oldest_ms: Option<u64>,
    /// Since attach.
    pub(crate) total: u64,
}

/// A path.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PathInfo {
    /// Its name, as the user wrote it.
    pub(crate) path: String,
    /// `tcp` or `rdma`.
    pub(crate) transport: String,
    /// The server's address of this attempt, or of the last.
    pub(crate) address: String,
    /// Where it is.
    pub(crate) state: PathState,
    /// What it is being closed for, if it is: `remove`, `disconnect` or `reconnect`.
    pub(crate) leaving: Option<String>,
    /// Its connections, the service connection included.
    pub(crate) connections: u16,
    /// Times it was connected again.
    pub(crate) reconnects: u64,
    /// Attempts that failed, and ends of a connected path.
    pub(crate) ends: u64,
    /// Last heartbeat round trip in microseconds, if known.
    pub(crate) heartbeat_us: Option<u64>,
    /// The longest silence that counts as alive; none while it is not connected.
    pub(crate) silence_max_ms: Option<u64>,
    /// Heartbeats of this end.
    pub(crate) heartbeats: Heartbeats,
    /// Impossible states that have ended it: bugs of this client.
    pub(crate) internal_errors: u64,
    /// Why it ended last.
    pub(crate) last_error: Option<String>,
    /// Why it does not serve this volume although it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) refused: Option<String>,
    /// Left out because it is far slower than others.
    pub(crate) slow: bool,
}

impl PathInfo {
    /// True if it is connected, whatever it carries.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self.state, PathState::Connected | PathState::Standby)
    }

    /// True if it carries IO of the volume, or is ready to.
    pub(crate) fn is_connected(&self) -> bool {
        self.is_up() && self.refused.is_none()
    }

    /// Why it carries no IO, or ended last.
    pub(crate) fn why(&self) -> Option<&str> {
        self.refused.as_deref().or(self.last_error.as_deref())
    }

    /// True if it is left out of use because it is slow.
    pub(crate) fn is_avoided(&self) -> bool {
        self.slow && self.leaving.is_none() && self.is_connected()
    }

    /// Where it is, and what is about to happen to it.
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

/// Heartbeats of a path.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Heartbeats {
    /// Sent.
    pub(crate) sent: u64,
    /// Periods after one without anything from the server.
    pub(crate) missed: u64,
}

/// What a session is attached as.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Attached {
    /// The export's name.
    pub(crate) export: String,
    /// The block device, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<String>,
    /// The NBD URI otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uri: Option<String>,
    /// Its size in bytes.
    pub(crate) size: Option<u64>,
    /// Its logical block size.
    pub(crate) block_size: Option<u32>,
    /// No writes.
    pub(crate) read_only: Option<bool>,
    /// Server and export that it is bound to.
    pub(crate) identity: Option<Identity>,
    /// The session's process.
    pub(crate) pid: u32,
    /// Its paths.
    pub(crate) paths: Option<Vec<PathInfo>>,
}

/// A volume that could not be attached beside others.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct NotAttached {
    /// The export's name.
    pub(crate) export: String,
    /// Why.
    pub(crate) error: String,
}

/// What a session did since it began.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Stats {
    /// Its name on this host.
    pub(crate) name: String,
    /// By operation.
    pub(crate) ops: BTreeMap<String, OpCount>,
    /// Time of an IO.
    pub(crate) latency_us: Latency,
    /// The same as a histogram, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) times: Option<Vec<Bucket>>,
    /// Where the time of the requests of all paths went.
    #[serde(default)]
    pub(crate) parts_us: Vec<PartTimes>,
    /// By path.
    pub(crate) paths: Vec<PathStats>,
    /// By shard.
    pub(crate) cores: Vec<ShardStats>,
    /// Of all transports.
    pub(crate) fabric: FabricCounters,
    /// By transport.
    pub(crate) transports: BTreeMap<String, FabricCounters>,
    /// Of the NBD connections.
    pub(crate) nbd: BridgeStats,
}

/// Times in microseconds.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// How many.
    pub(crate) count: u64,
    /// Median.
    pub(crate) p50: f64,
    /// Percentile 90.
    pub(crate) p90: f64,
    /// Percentile 99.
    pub(crate) p99: f64,
    /// Percentile 99.9.
    pub(crate) p999: f64,
    /// The longest.
    pub(crate) max: f64,
}

/// Times of a part of requests, in microseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PartTimes {
    /// Which part.
    pub(crate) part: Part,
    /// How many.
    pub(crate) count: u64,
    /// Median.
    pub(crate) p50: u64,
    /// Percentile 99.
    pub(crate) p99: u64,
    /// The longest.
    pub(crate) max: u64,
    /// The same as a histogram, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) times: Option<Vec<Bucket>>,
}

/// What a path did.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PathStats {
    /// Its name.
    pub(crate) path: String,
    /// `tcp` or `rdma`.
    pub(crate) transport: String,
    /// The server's address.
    pub(crate) address: String,
    /// Where it is.
    pub(crate) state: PathState,
    /// Left out because it is far slower than others.
    pub(crate) slow: bool,
    /// Times it was connected again.
    pub(crate) reconnects: u64,
    /// Last heartbeat round trip in microseconds, if known.
    pub(crate) heartbeat_us: Option<u64>,
    /// Heartbeats of this end.
    pub(crate) heartbeats: Heartbeats,
    /// Requests that have no answer yet.
    pub(crate) inflight: u32,
    /// Time from a request to its answer.
    pub(crate) latency_us: Option<Latency>,
    /// The same as a histogram, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) times: Option<Vec<Bucket>>,
    /// Where that time went, and what went before.
    #[serde(default)]
    pub(crate) parts_us: Vec<PartTimes>,
    /// Requests that were sent.
    pub(crate) requests: u64,
    /// Requests that were answered.
    pub(crate) answers: u64,
    /// Bytes of data in answered requests.
    pub(crate) bytes: u64,
    /// Answers with an error.
    pub(crate) errors: u64,
    /// Requests that were in flight when it died.
    pub(crate) failovers: u64,
    /// Requests that waited for its fence after it died.
    #[serde(default)]
    pub(crate) fence_waits: u64,
    /// Requests that were not answered within `io-timeout` although it worked.
    #[serde(default)]
    pub(crate) slow_requests: u64,
}

/// What a shard did.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ShardStats {
    /// Its number.
    pub(crate) core: u16,
    /// IOs that have completed.
    pub(crate) ios: u64,
    /// IOs that have not.
    pub(crate) inflight: usize,
    /// Its NBD connections.
    pub(crate) nbd_connections: u64,
}
