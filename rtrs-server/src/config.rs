//! What the server can be told: every setting, once, for flags and for the configuration file.
//!
//! Owns [`Settings`], whose fields are both the flags of `rtrs-server` and the keys of its YAML
//! file, under the same names. A field left out is `None`; [`Settings::over`] lays flags over a
//! file and a file over [`Settings::defaults`]. A list given as flags replaces the file's list.
//!
//! Reading a file never panics and is bounded; an error names file, line and what would do. What
//! the values mean together is judged in `plan.rs`.

#![allow(rustdoc::broken_intra_doc_links, reason = "flag help is plain text with brackets")]

mod export;
mod listen;
mod search;

pub use export::{BlockSize, ErrorRate, ExportSpec, NAME_BYTES_MAX, Target, check_id};
pub use listen::ListenSpec;
pub use search::SearchSpec;

use std::path::{Path, PathBuf};

use clap::Args;
use rtrs_core::config::{
    AutoSwitch, ByteSize, Shards, Switch, deserialize_list, settings_from_file, settings_from_yaml,
};
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Every setting of the server; `None` where nothing was said.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Settings {
    /// Export a file, a disk or memory: [NAME=]TARGET[,OPTION...]; repeatable
    ///
    /// TARGET is the path of a file or block device, mem:SIZE for memory, or null:SIZE for a
    /// device that forgets writes and reads as zeroes. NAME is what clients open; it is the file
    /// name (or "mem" or "null") if left out. OPTION is one of: ro; direct=auto|on|off (open past
    /// the page cache); block-size=auto|512|4096; delay=TIME (each request waits, as in 10ms);
    /// error-rate=FRACTION (so many requests fail, as in 0.001); id=ID (clients know the disk or
    /// file by this text instead of what the system knows of it). A backslash takes the meaning
    /// from the next character: write \, for a comma and \= for an equals sign in a name or path.
    /// In a configuration file each export may also be a map with the keys name, target, ro,
    /// direct, block-size, delay, error-rate and id, where nothing is escaped.
    #[arg(long, value_name = "SPEC")]
    #[serde(deserialize_with = "deserialize_list")]
    pub export: Option<Vec<ExportSpec>>,

    /// Directory in which clients may open what is not exported by name, or off [default: off]
    ///
    /// A client's name is a path below it, to a regular file or a block device; symbolic links may
    /// not lead out of it. If it ends with %SESSNAME%, as in /srv/%SESSNAME%, each session has the
    /// directory of its name. Anybody who can connect may open what is there.
    #[arg(long, value_name = "DIR|off")]
    pub search_path: Option<SearchSpec>,

    /// Listen on this portal, as in tcp://127.0.0.1:1234, or auto; repeatable [default: auto]
    ///
    /// A portal is SCHEME://HOST[:PORT] with the scheme tcp or rdma, IPv6 addresses in brackets
    /// and 1234 as default port; port 0 lets the system choose. tcp://[::] takes IPv6 and IPv4
    /// connections, tcp://0.0.0.0 only IPv4. rdma:// needs an InfiniBand or RoCE device, in
    /// software if need be. auto is tcp://[::]:1234, and rdma://[::]:1234 besides where the host
    /// has such a device; 0.0.0.0 where IPv6 is switched off.
    #[arg(long, value_name = "PORTAL")]
    #[serde(deserialize_with = "deserialize_list")]
    pub listen: Option<Vec<ListenSpec>>,

    /// Requests in flight per session, 1 to 65535 [default: 512]
    ///
    /// Each path of a session holds queue-depth chunks of chunk-size bytes. Depth and chunk size
    /// share 28 bits: ceil(log2(queue-depth)) + log2(chunk-size) must not exceed 28.
    #[arg(long, value_name = "N")]
    pub queue_depth: Option<u32>,

    /// Bytes of one request's buffer, a power of two from 8k to 16M [default: 256k]
    ///
    /// The largest request is this less 4096 bytes; clients split larger ones.
    #[arg(long, value_name = "SIZE")]
    pub chunk_size: Option<ByteSize>,

    /// Threads that carry IO: a number, or auto for one per allowed CPU [default: auto]
    ///
    /// Each shard has its own io_uring and its own connections.
    #[arg(long, value_name = "N|auto")]
    pub shards: Option<Shards>,

    /// Bind each shard to a CPU: auto, on or off [default: auto]
    ///
    /// auto binds them if there are no more shards than allowed CPUs.
    #[arg(long, value_name = "auto|on|off")]
    pub pin: Option<AutoSwitch>,

    /// Give each request a fresh memory key: on or off [default: on]
    ///
    /// With on, a peer's key to a chunk dies with its request, so a late write cannot land in a
    /// chunk that moved on. Off saves a little time per request. RDMA devices need memory windows
    /// for on; those without refuse sessions until it is off.
    #[arg(long, value_name = "on|off")]
    pub always_invalidate: Option<Switch>,

    /// Ask for CRC32C on TCP connections: on or off [default: on]
    ///
    /// This is the CRC of MPA frames (RFC 5044); it is used if either end asks for it.
    #[arg(long, value_name = "on|off")]
    pub crc: Option<Switch>,

    /// Milliseconds of silence before a heartbeat is sent, 10 to 600000 [default: 500]
    ///
    /// A path is given up after heartbeat-missed-max further periods without a word.
    #[arg(long, value_name = "MS")]
    pub heartbeat_ms: Option<u64>,

    /// Periods a heartbeat may stay unanswered, 1 to 1000 [default: 5]
    ///
    /// When more than this many are missed, the path is closed.
    #[arg(long, value_name = "N")]
    pub heartbeat_missed_max: Option<u32>,

    /// Milliseconds a connecting peer has for its handshake, 10 to 600000 [default: 5000]
    ///
    /// Connections and half-open paths that take longer are closed.
    #[arg(long, value_name = "MS")]
    pub handshake_timeout_ms: Option<u64>,

    /// Connections that may be in their handshake at once, 1 to 65536 [default: 1024]
    ///
    /// Further ones are closed at once, and established sessions are not disturbed.
    #[arg(long, value_name = "N")]
    pub half_open_max: Option<u32>,

    /// Sessions at once, 1 to 65536 [default: 128]
    ///
    /// Each path of a session takes queue-depth times chunk-size bytes of memory.
    #[arg(long, value_name = "N")]
    pub sessions_max: Option<u32>,

    /// Milliseconds running requests have to finish on SIGTERM, 0 to 600000 [default: 5000]
    ///
    /// What still runs then is abandoned.
    #[arg(long, value_name = "MS")]
    pub shutdown_grace_ms: Option<u64>,

    /// Most microseconds a busy shard polls before it sleeps, 0 to 10000 [default: 50]
    ///
    /// The time adapts to the load up to this bound; 0 never polls. An idle shard sleeps.
    #[arg(long, value_name = "US")]
    pub poll_us: Option<u32>,

    /// Answer pings only, and no sessions; exports are not opened
    ///
    /// For rtrs-client ping and doctor, and with --rping for rping -c. None need be named.
    #[arg(long, num_args = 0, default_missing_value = "true")]
    pub ping_only: Option<bool>,

    /// Answer no pings
    ///
    /// Without it pings (rtrs-client ping) are answered on every portal, at most 64 at once.
    #[arg(long, num_args = 0, default_missing_value = "true")]
    pub no_ping: Option<bool>,

    /// Answer rping -c as well, which connects without a word
    ///
    /// With --ping-only, listen: auto then means rping's port 7174. Data may have up to 1 MiB.
    #[arg(long, num_args = 0, default_missing_value = "true")]
    pub rping: Option<bool>,

    /// Name of this server for `session` and `drain`, or auto [default: auto]
    ///
    /// auto is the address it listens on first, as in 127.0.0.1:1234; the port alone if that is on
    /// every address. Two servers with one run directory need two names.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// What clients know this server by, 1 to 255 bytes, or auto [default: auto]
    ///
    /// auto is the host's /etc/machine-id, hashed. A session goes on only at the server that it
    /// began with: keep the id when a server moves to another host with its disks, and give two
    /// hosts with one machine id, or two servers on one host, one each.
    #[arg(long, value_name = "ID")]
    pub server_id: Option<String>,

    /// Keep the control socket here [default: /run/rtrs, or $XDG_RUNTIME_DIR/rtrs without root]
    ///
    /// Without root and XDG_RUNTIME_DIR it is /tmp/rtrs-UID. If neither this nor a name is said, a
    /// server that cannot have a control socket warns and serves without.
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,

    /// Keep here what outlives the server [default: /var/lib/rtrs; see below without root]
    ///
    /// One number for each export of which a flush has failed. $STATE_DIRECTORY comes first;
    /// without
    /// root it is $XDG_STATE_HOME/rtrs, or ~/.local/state/rtrs. If it cannot be written, the server
    /// warns, and clients take each of its starts for a loss of what they had not flushed.
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// What is logged: error, warn, info, debug, trace, or a filter by module [default: info]
    ///
    /// A filter is a list such as info,rtrs_server::session=debug.
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}

impl Settings {
    /// The built-in defaults: no exports, every field said but what follows from the user who runs
    /// it (`run-dir`, `state-dir`).
    #[must_use]
    pub fn defaults() -> Self {
        Self {
            export: Some(Vec::new()),
            search_path: Some(SearchSpec::Off),
            listen: Some(vec![ListenSpec::Auto]),
            queue_depth: Some(512),
            chunk_size: Some(ByteSize::new(256 << 10)),
            shards: Some(Shards::Auto),
            pin: Some(AutoSwitch::Auto),
            always_invalidate: Some(Switch::On),
            crc: Some(Switch::On),
            heartbeat_ms: Some(500),
            heartbeat_missed_max: Some(5),
            handshake_timeout_ms: Some(5000),
            half_open_max: Some(1024),
            sessions_max: Some(128),
            shutdown_grace_ms: Some(5000),
            poll_us: Some(50),
            ping_only: Some(false),
            no_ping: Some(false),
            rping: Some(false),
            name: Some("auto".to_owned()),
            server_id: Some("auto".to_owned()),
            run_dir: None,
            state_dir: None,
            log: Some("info".to_owned()),
        }
    }

    /// These settings, and `under`'s where these say nothing.
    #[must_use]
    pub fn over(self, under: Self) -> Self {
        Self {
            export: self.export.or(under.export),
            search_path: self.search_path.or(under.search_path),
            listen: self.listen.or(under.listen),
            queue_depth: self.queue_depth.or(under.queue_depth),
            chunk_size: self.chunk_size.or(under.chunk_size),
            shards: self.shards.or(under.shards),
            pin: self.pin.or(under.pin),
            always_invalidate: self.always_invalidate.or(under.always_invalidate),
            crc: self.crc.or(under.crc),
            heartbeat_ms: self.heartbeat_ms.or(under.heartbeat_ms),
            heartbeat_missed_max: self.heartbeat_missed_max.or(under.heartbeat_missed_max),
            handshake_timeout_ms: self.handshake_timeout_ms.or(under.handshake_timeout_ms),
            half_open_max: self.half_open_max.or(under.half_open_max),
            sessions_max: self.sessions_max.or(under.sessions_max),
            shutdown_grace_ms: self.shutdown_grace_ms.or(under.shutdown_grace_ms),
            poll_us: self.poll_us.or(under.poll_us),
            ping_only: self.ping_only.or(under.ping_only),
            no_ping: self.no_ping.or(under.no_ping),
            rping: self.rping.or(under.rping),
            name: self.name.or(under.name),
            server_id: self.server_id.or(under.server_id),
            run_dir: self.run_dir.or(under.run_dir),
            state_dir: self.state_dir.or(under.state_dir),
            log: self.log.or(under.log),
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
