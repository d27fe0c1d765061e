//! The part of a plan that `attach` and `bench` share: the session.
//!
//! Owns [`SessionPlan`], its judgement and its look at the system (host names, RDMA).

use std::fs;
use std::ops::RangeInclusive;
use std::time::Duration;

use rtrs_core::config::{AutoSwitch, Portal, Scheme, Shards, Switch, check_log_filter};
use rtrs_core::fabric::rdma::{NoRdma, Rdma};
use rtrs_core::identity::Identity;
use rtrs_core::limits::TCP_CONNS_PER_PATH_MAX;
use tracing_subscriber::EnvFilter;

use super::{in_range, unsaid, usage};
use crate::config::{Access, AutoNumber, Failover, NoPath, Policy, Settings};
use crate::error::{Error, ErrorKind};
use crate::session::{PATHS_MAX, Rhythm};

/// Longest name on the wire in bytes: 255 with the NUL (kernel rtrs-pri.h, `NAME_MAX`).
const NAME_BYTES_MAX: usize = 254;
/// Most shards with a path over TCP: connections of one, less the service connection.
const TCP_SHARDS_MAX: u16 = TCP_CONNS_PER_PATH_MAX - 1;

/// A session, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionPlan {
    /// The export to open, 1 to 254 bytes without NUL.
    pub export_name: String,
    /// The session's name at the server, 1 to 254 bytes without slash, dot and NUL.
    pub session_name: String,
    /// Ways to the server, none named twice. The check before a start refuses an empty list.
    pub paths: Vec<Portal>,
    /// How the export is opened.
    pub access: Access,
    /// How a path is picked.
    pub policy: Policy,
    /// The server and export it has to be, if that was said.
    pub identity: Option<Identity>,
    /// Threads that carry IO, and connections on each path besides the service connection.
    pub shards: Shards,
    /// Whether shards are bound to CPUs.
    pub pin: AutoSwitch,
    /// Ask for the MPA CRC.
    pub crc: bool,
    /// A key of its own for each read.
    pub invalidate_reads: AutoSwitch,
    /// Heartbeat period in milliseconds, unless it is left to us.
    pub heartbeat_ms: Option<u64>,
    /// Periods a heartbeat may stay unanswered, unless it is left to us.
    pub heartbeat_missed_max: Option<u32>,
    /// Time for a connection with its handshake, in milliseconds.
    pub connect_timeout_ms: u64,
    /// First wait before a reconnect, in milliseconds.
    pub reconnect_min_ms: u64,
    /// Longest wait before a reconnect, in milliseconds; not less than the first.
    pub reconnect_max_ms: u64,
    /// Time for one request, in milliseconds.
    pub io_timeout_ms: u64,
    /// What happens to IO while no path is connected.
    pub no_path: NoPath,
    /// When requests of a dead path are sent again to a kernel's server.
    pub failover: Failover,
    /// Most requests in flight, besides the server's queue depth.
    pub queue_depth_limit: u16,
    /// Bound of the adaptive poll in microseconds; 0 never polls.
    pub poll_us: u32,
    /// Log filter that is known to parse.
    pub log: String,
}

impl SessionPlan {
    /// Judges the session's settings, which lie over the defaults already. `access_default` holds
    /// when none was said.
    pub(super) fn new(
        export_name: &str,
        settings: Settings,
        access_default: Access,
    ) -> Result<Self, Error> {
        check_name("export name", export_name)?;
        let Settings {
            path: Some(paths),
            read_only,
            access,
            policy: Some(policy),
            session_name,
            identity,
            shards: Some(shards),
            pin: Some(pin),
            crc: Some(crc),
            invalidate_reads: Some(invalidate_reads),
            heartbeat_ms: Some(heartbeat_ms),
            heartbeat_missed_max: Some(heartbeat_missed_max),
            connect_timeout_ms: Some(connect_timeout_ms),
            reconnect_min_ms: Some(reconnect_min_ms),
            reconnect_max_ms: Some(reconnect_max_ms),
            io_timeout_ms: Some(io_timeout_ms),
            no_path: Some(no_path),
            failover: Some(failover),
            queue_depth_limit: Some(queue_depth_limit),
            poll_us: Some(poll_us),
            log: Some(log),
            ..
        } = settings
        else {
            return Err(unsaid());
        };
        let access = match (read_only, access) {
            (Some(true), Some(Access::Rw | Access::Migration)) => {
                return Err(usage("read-only contradicts access rw or migration; drop one"));
            }
            (Some(true), _) => Access::Ro,
            (_, Some(access)) => access,
            (_, None) => access_default,
        };
        let session_name = match session_name {
            Some(name) => check_session_name(name)?,
            None => default_session_name(export_name),
        };
        check_paths(&paths)?;
        let plan = Self {
            export_name: export_name.to_owned(),
            session_name,
            paths,
            access,
            policy,
            identity,
            shards,
            pin,
            crc: crc.is_on(),
            invalidate_reads,
            heartbeat_ms: auto_in_range("heartbeat-ms", heartbeat_ms, 10..=600_000)?,
            heartbeat_missed_max: auto_in_range(
                "heartbeat-missed-max",
                heartbeat_missed_max,
                1..=1000,
            )?,
            connect_timeout_ms: in_range("connect-timeout-ms", connect_timeout_ms, 10..=600_000)?,
            reconnect_min_ms: in_range("reconnect-min-ms", reconnect_min_ms, 1..=600_000)?,
            reconnect_max_ms: in_range("reconnect-max-ms", reconnect_max_ms, 1..=600_000)?,
            io_timeout_ms: in_range("io-timeout-ms", io_timeout_ms, 10..=3_600_000)?,
            no_path,
            failover,
            queue_depth_limit: in_range(
                "queue-depth-limit",
                u64::from(queue_depth_limit),
                1..=65535,
            )?,
            poll_us: in_range("poll-us", u64::from(poll_us), 0..=10_000)?,
            log,
        };
        if plan.reconnect_min_ms > plan.reconnect_max_ms {
            return Err(usage(format!(
                "reconnect-min-ms {} is more than reconnect-max-ms {}; lower it, or raise that",
                plan.reconnect_min_ms, plan.reconnect_max_ms
            )));
        }
        check_log_filter(&plan.log)
            .map_err(|e| Error::with_source(ErrorKind::Usage, "cannot log", e))?;
        if plan.over_tcp() && matches!(plan.shards, Shards::Count(n) if n.get() > TCP_SHARDS_MAX) {
            let shards = plan.shards;
            return Err(usage(format!(
                "{shards} shards are too many for a path over TCP; use at most {TCP_SHARDS_MAX}"
            )));
        }
        if let Err(error) = EnvFilter::try_new(&plan.log) {
            let text = format!("log filter {:?} is not understood; use info or debug", plan.log);
            return Err(Error::with_source(ErrorKind::Usage, text, error));
        }
        Ok(plan)
    }

    /// Heartbeats at a kernel's server, as slow as is safe with any.
    pub(crate) fn heartbeat(&self) -> Rhythm {
        let missed_max = self.heartbeat_missed_max.unwrap_or(5);
        Rhythm {
            interval: Duration::from_millis(self.heartbeat_ms.unwrap_or(500)),
            missed_max,
            witnessed_max: missed_max,
        }
    }

    /// Heartbeats at a server of ours: over TCP a silent path is noticed within 400 ms. An RDMA
    /// device may take half a second to repeat a lost packet, and that is to be waited for: 700 ms
    /// where the server answers on another path, and else 900 ms, since 600 ms were too few in the
    /// lab, where a starved server was taken for a dead path.
    pub(crate) fn own_heartbeat(&self, scheme: Scheme) -> Rhythm {
        if self.heartbeat_ms.is_some() {
            return self.heartbeat();
        }
        let (missed_max, witnessed_max) = match scheme {
            Scheme::Tcp => (3, 3),
            Scheme::Rdma => (8, 6),
        };
        Rhythm {
            interval: Duration::from_millis(100),
            missed_max: self.heartbeat_missed_max.unwrap_or(missed_max),
            witnessed_max: self.heartbeat_missed_max.unwrap_or(witnessed_max),
        }
    }

    /// How long the transport repeats what is not acknowledged before it ends a connection by
    /// itself: later than the heartbeats would, so that these have the word, but not for ever.
    pub(crate) fn transport_timeout(&self) -> Duration {
        let silence = self.heartbeat().silence_max();
        (silence * 4 / 3).clamp(Duration::from_secs(1), Duration::from_secs(4))
    }

    fn over_tcp(&self) -> bool {
        self.paths.iter().any(|path| path.scheme() == Scheme::Tcp)
    }

    /// The number of shards to run, at least one and as many as every path can carry.
    pub(crate) fn cores(&self) -> u16 {
        let count = u16::try_from(self.shards.count()).unwrap_or(u16::MAX);
        if self.over_tcp() { count.min(TCP_SHARDS_MAX) } else { count }
    }

    /// There is a path, each path's host has an address, and RDMA is there if a path needs it.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.paths.is_empty() {
            return Err(usage(
                "no path to the server; use --path tcp://HOST, or path: in the file",
            ));
        }
        for path in &self.paths {
            path.resolve()
                .map_err(|e| Error::with_source(ErrorKind::Path, "cannot use a path", e))?;
        }
        self.open_rdma().map(drop)
    }

    /// RDMA, if a path needs it.
    ///
    /// # Errors
    /// [`ErrorKind::Path`] with what is missing here.
    pub(crate) fn open_rdma(&self) -> Result<Option<Rdma>, Error> {
        match self.paths.iter().find(|path| path.scheme() == Scheme::Rdma) {
            None => Ok(None),
            Some(path) => Rdma::open().map(Some).map_err(|missing| {
                let text = format!("cannot use the path {path}");
                Error::with_source(ErrorKind::Path, text, missing)
            }),
        }
    }

    /// The settings that make this session again.
    pub(super) fn settings(&self) -> Settings {
        Settings {
            path: Some(self.paths.clone()),
            access: Some(self.access),
            policy: Some(self.policy),
            session_name: Some(self.session_name.clone()),
            identity: self.identity,
            shards: Some(self.shards),
            pin: Some(self.pin),
            crc: Some(Switch::from(self.crc)),
            invalidate_reads: Some(self.invalidate_reads),
            heartbeat_ms: Some(self.heartbeat_ms.into()),
            heartbeat_missed_max: Some(self.heartbeat_missed_max.map(u64::from).into()),
            connect_timeout_ms: Some(self.connect_timeout_ms),
            reconnect_min_ms: Some(self.reconnect_min_ms),
            reconnect_max_ms: Some(self.reconnect_max_ms),
            io_timeout_ms: Some(self.io_timeout_ms),
            no_path: Some(self.no_path),
            failover: Some(self.failover),
            queue_depth_limit: Some(u32::from(self.queue_depth_limit)),
            poll_us: Some(self.poll_us),
            log: Some(self.log.clone()),
            ..Settings::default()
        }
    }
}

/// The number in its range, or `None` for auto.
fn auto_in_range<T: TryFrom<u64>>(
    key: &str,
    value: AutoNumber,
    range: RangeInclusive<u64>,
) -> Result<Option<T>, Error> {
    value.number().map(|number| in_range(key, number, range)).transpose()
}

/// Refuses names the wire cannot carry.
pub(super) fn check_name(what: &str, name: &str) -> Result<(), Error> {
    let problem = match name.len() {
        0 => "is empty".to_owned(),
        len if len > NAME_BYTES_MAX => format!("is {len} bytes long"),
        _ if name.contains('\0') => "holds a NUL".to_owned(),
        _ => return Ok(()),
    };
    let shown: String = name.chars().take(40).collect();
    Err(usage(format!("{what} {shown:?} {problem}; use 1 to 254 bytes without NUL")))
}

/// Refuses session names a server drops the path for (kernel rtrs-srv.c, `process_info_req`).
fn check_session_name(name: String) -> Result<String, Error> {
    check_name("session-name", &name)?;
    if name.contains(['/', '.']) {
        return Err(usage(format!(
            "session-name {name:?} holds a slash or a dot, which servers refuse; use - or _"
        )));
    }
    Ok(name)
}

/// Host and export with other characters for the forbidden ones, cut to what the wire carries.
fn default_session_name(export_name: &str) -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "localhost",
        host => host,
    };
    let mut name = format!("{host}-{export_name}").replace(['/', '.', '\0'], "_");
    name.truncate(name.floor_char_boundary(NAME_BYTES_MAX));
    name
}

/// Refuses a path that this build, or nobody, can connect.
pub(super) fn check_path(path: &Portal) -> Result<(), Error> {
    if path.scheme() == Scheme::Rdma && !Rdma::BUILT_IN {
        return Err(usage(format!("cannot use the path {path}: {}", NoRdma::Feature)));
    }
    path.check_connect().map_err(|e| Error::with_source(ErrorKind::Usage, "cannot use a path", e))
}

fn check_paths(paths: &[Portal]) -> Result<(), Error> {
    if paths.len() > PATHS_MAX {
        let count = paths.len();
        return Err(usage(format!("{count} paths are too many; use at most {PATHS_MAX}")));
    }
    for (at, path) in paths.iter().enumerate() {
        check_path(path)?;
        if paths[..at].contains(path) {
            return Err(usage(format!("path names {path} twice; name it once")));
        }
    }
    Ok(())
}
