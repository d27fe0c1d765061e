//! What the client can be told: the keys of its configuration file.
//!
//! Owns [`Settings`], one flat list of keys with the names of the flags of `rtrs-client attach`,
//! and `bench`, a map with the names of the flags only `rtrs-client bench` has. A key left out is
//! `None`; [`Settings::over`] lays flags over a file and a file over [`Settings::defaults`]. A list
//! given as flags replaces the file's, and so do `socket`, `listen` and `device`, and `access` and
//! `read-only`, which exclude each other.
//!
//! Reading a file never panics and is bounded; an error names file, line and what would do. What
//! the values mean together is judged in `plan.rs`.

mod values;

pub use values::{
    Access, AutoNumber, BenchMode, Device, Failover, NbdAddress, NoPath, Policy, RunTime,
};

use std::path::{Path, PathBuf};

use clap::Args;
use rtrs_core::config::{
    AutoSwitch, ByteSize, Portal, Shards, Switch, deserialize_list, settings_from_file,
    settings_from_yaml,
};
use rtrs_core::identity::Identity;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Every setting of the client; `None` where nothing was said. The flags of the same names in
/// `cli.rs` say what each means.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Settings {
    /// Ways to the server.
    #[serde(deserialize_with = "deserialize_list")]
    pub path: Option<Vec<Portal>>,
    /// Unix socket to serve NBD on.
    pub socket: Option<PathBuf>,
    /// TCP address to serve NBD on.
    pub listen: Option<NbdAddress>,
    /// Block device of the kernel.
    pub device: Option<Device>,
    /// Seconds before the kernel gives up waiting for a request.
    pub device_timeout_s: Option<u64>,
    /// Seconds the kernel keeps requests when the session's process has died.
    pub device_dead_timeout_s: Option<u64>,
    /// Take over the device that a process which died left connected.
    pub takeover: Option<bool>,
    /// Take over within a second or two, with one socket and shard.
    pub quick_takeover: Option<bool>,
    /// Stay in the foreground.
    pub foreground: Option<bool>,
    /// The same as `access: ro`.
    pub read_only: Option<bool>,
    /// How the export is opened.
    pub access: Option<Access>,
    /// How a path is picked for a request.
    pub policy: Option<Policy>,
    /// The session's name at the server.
    pub session_name: Option<String>,
    /// The server and export it has to be.
    pub identity: Option<Identity>,
    /// Threads that carry IO.
    pub shards: Option<Shards>,
    /// Bind shards to CPUs.
    pub pin: Option<AutoSwitch>,
    /// Ask for the CRC of MPA frames.
    pub crc: Option<Switch>,
    /// A key of its own for each read: `auto` (over tcp://), `on`, `off`.
    pub invalidate_reads: Option<AutoSwitch>,
    /// Silence before a heartbeat, in milliseconds.
    pub heartbeat_ms: Option<AutoNumber>,
    /// Periods a heartbeat may stay unanswered.
    pub heartbeat_missed_max: Option<AutoNumber>,
    /// Time for a connection with its handshake, in milliseconds.
    pub connect_timeout_ms: Option<u64>,
    /// First wait before a reconnect, in milliseconds.
    pub reconnect_min_ms: Option<u64>,
    /// Longest wait before a reconnect, in milliseconds.
    pub reconnect_max_ms: Option<u64>,
    /// Time for one request, in milliseconds.
    pub io_timeout_ms: Option<u64>,
    /// What happens to IO while no path is connected.
    pub no_path: Option<NoPath>,
    /// When requests of a dead path are sent again to a kernel's server.
    pub failover: Option<Failover>,
    /// Most requests in flight.
    pub queue_depth_limit: Option<u32>,
    /// Bound of the adaptive poll in microseconds.
    pub poll_us: Option<u32>,
    /// NBD buffers per shard.
    pub buffer_size: Option<ByteSize>,
    /// Where control sockets live.
    pub run_dir: Option<PathBuf>,
    /// Log filter.
    pub log: Option<String>,
    /// What `rtrs-client bench` does.
    pub bench: Option<BenchSettings>,
}

/// The settings only `bench` has, as flags and as keys under `bench:`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct BenchSettings {
    /// What to do: read, write, randread, randwrite or randrw [default: randread]
    ///
    /// Sequential or random reads or writes, or random reads and writes mixed as --rwmixread
    /// says. Writes destroy what is on the export.
    #[arg(long, value_name = "MODE", value_enum)]
    pub rw: Option<BenchMode>,

    /// Bytes per request, a multiple of 512 up to 32M [default: 4k]
    ///
    /// Requests larger than the server takes at once are split by the session.
    #[arg(long, value_name = "SIZE")]
    pub bs: Option<ByteSize>,

    /// Requests each job keeps in flight, 1 to 65535 [default: 32]
    ///
    /// All jobs together have at most the server's queue depth in flight; the rest wait.
    #[arg(long, value_name = "N")]
    pub iodepth: Option<u32>,

    /// Jobs, each on a shard of its own: a number, or auto for one per CPU [default: 1]
    ///
    /// This is the number of shards of the session, and of connections on each path.
    #[arg(long, value_name = "N|auto")]
    pub numjobs: Option<Shards>,

    /// How long to run, in seconds if no unit is written, 1s to 24h [default: 10]
    ///
    /// Write 500ms, 10s, 1m or 1h for other units.
    #[arg(long, value_name = "TIME")]
    pub runtime: Option<RunTime>,

    /// Use only the first SIZE bytes of the export [default: all]
    ///
    /// At least one request must fit.
    #[arg(long, value_name = "SIZE")]
    pub size: Option<ByteSize>,

    /// Percentage of reads in randrw, 0 to 100 [default: 50]
    ///
    /// The other modes do not look at it.
    #[arg(long, value_name = "PERCENT")]
    pub rwmixread: Option<u32>,
}

impl BenchSettings {
    /// The built-in defaults; `size` stays unsaid, which is the whole export.
    #[must_use]
    pub fn defaults() -> Self {
        Self {
            rw: Some(BenchMode::RandRead),
            bs: Some(ByteSize::new(4096)),
            iodepth: Some(32),
            numjobs: "1".parse().ok(),
            runtime: Some(RunTime::from_secs(10)),
            size: None,
            rwmixread: Some(50),
        }
    }

    /// These settings, and `under`'s where these say nothing.
    #[must_use]
    pub fn over(self, under: &Self) -> Self {
        Self {
            rw: self.rw.or(under.rw),
            bs: self.bs.or(under.bs),
            iodepth: self.iodepth.or(under.iodepth),
            numjobs: self.numjobs.or(under.numjobs),
            runtime: self.runtime.or(under.runtime),
            size: self.size.or(under.size),
            rwmixread: self.rwmixread.or(under.rwmixread),
        }
    }
}

impl Settings {
    /// The built-in defaults. Unsaid stay what has no default (`socket`, `listen`, `device`), what
    /// follows from another (`device-timeout-s`), from the command (`access` and `read-only`,
    /// `session-name`) and what follows from the user who runs it (`run-dir`).
    #[must_use]
    pub fn defaults() -> Self {
        Self {
            path: Some(Vec::new()),
            socket: None,
            listen: None,
            device: None,
            device_timeout_s: None,
            device_dead_timeout_s: None,
            takeover: Some(false),
            quick_takeover: Some(false),
            foreground: Some(false),
            read_only: None,
            access: None,
            policy: Some(Policy::MinInflight),
            session_name: None,
            identity: None,
            shards: Some(Shards::Auto),
            pin: Some(AutoSwitch::Auto),
            crc: Some(Switch::On),
            invalidate_reads: Some(AutoSwitch::Auto),
            heartbeat_ms: Some(AutoNumber::Auto),
            heartbeat_missed_max: Some(AutoNumber::Auto),
            connect_timeout_ms: Some(5000),
            reconnect_min_ms: Some(100),
            reconnect_max_ms: Some(3_000),
            io_timeout_ms: Some(30_000),
            no_path: Some(NoPath::QueueFor(RunTime::from_secs(60))),
            failover: Some(Failover::Fast),
            queue_depth_limit: Some(65_535),
            poll_us: Some(50),
            buffer_size: Some(ByteSize::new(64 << 20)),
            run_dir: None,
            log: Some("info".to_owned()),
            bench: Some(BenchSettings::defaults()),
        }
    }

    /// These settings, and `under`'s where these say nothing.
    #[must_use]
    pub fn over(self, under: Self) -> Self {
        let front = self.socket.is_some() || self.listen.is_some() || self.device.is_some();
        let access = self.access.is_some() || self.read_only.is_some();
        Self {
            path: self.path.or(under.path),
            socket: if front { self.socket } else { under.socket },
            listen: if front { self.listen } else { under.listen },
            device: if front { self.device } else { under.device },
            device_timeout_s: self.device_timeout_s.or(under.device_timeout_s),
            device_dead_timeout_s: self.device_dead_timeout_s.or(under.device_dead_timeout_s),
            takeover: self.takeover.or(under.takeover),
            quick_takeover: self.quick_takeover.or(under.quick_takeover),
            foreground: self.foreground.or(under.foreground),
            read_only: if access { self.read_only } else { under.read_only },
            access: if access { self.access } else { under.access },
            policy: self.policy.or(under.policy),
            session_name: self.session_name.or(under.session_name),
            identity: self.identity.or(under.identity),
            shards: self.shards.or(under.shards),
            pin: self.pin.or(under.pin),
            crc: self.crc.or(under.crc),
            invalidate_reads: self.invalidate_reads.or(under.invalidate_reads),
            heartbeat_ms: self.heartbeat_ms.or(under.heartbeat_ms),
            heartbeat_missed_max: self.heartbeat_missed_max.or(under.heartbeat_missed_max),
            connect_timeout_ms: self.connect_timeout_ms.or(under.connect_timeout_ms),
            reconnect_min_ms: self.reconnect_min_ms.or(under.reconnect_min_ms),
            reconnect_max_ms: self.reconnect_max_ms.or(under.reconnect_max_ms),
            io_timeout_ms: self.io_timeout_ms.or(under.io_timeout_ms),
            no_path: self.no_path.or(under.no_path),
            failover: self.failover.or(under.failover),
            queue_depth_limit: self.queue_depth_limit.or(under.queue_depth_limit),
            poll_us: self.poll_us.or(under.poll_us),
            buffer_size: self.buffer_size.or(under.buffer_size),
            run_dir: self.run_dir.or(under.run_dir),
            log: self.log.or(under.log),
            bench: match (self.bench, under.bench) {
                (Some(bench), Some(under)) => Some(bench.over(&under)),
                (bench, under) => bench.or(under),
            },
        }
    }

    /// Reads a configuration file of at most 1 MiB.
    ///
    /// # Errors
    /// [`ErrorKind::ConfigFile`] if it cannot be read, [`ErrorKind::Config`] for its contents.
    ///
    /// [`ErrorKind::ConfigFile`]: crate::ErrorKind::ConfigFile
    /// [`ErrorKind::Config`]: crate::ErrorKind::Config
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        settings_from_file(path)
    }

    /// Reads the text of a configuration file called `name` in errors. An empty text says nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), with name, line and remedy.
    pub fn from_yaml(text: &str, name: &str) -> Result<Self, Error> {
        settings_from_yaml(text, name)
    }
}

#[cfg(test)]
mod tests;
