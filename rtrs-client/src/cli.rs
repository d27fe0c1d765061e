//! What was typed: the command line of `rtrs-client`.
//!
//! Owns [`LowArgs`], which clap fills; wrong flags end the process with code 2 before anything
//! else happens. What the flags mean, together with a configuration file, is `plan.rs`. Flags that
//! are settings have the names of the file's keys (`config.rs`).

#![allow(rustdoc::broken_intra_doc_links, reason = "flag help is plain text with brackets")]

mod link;
mod online;

pub use link::{DoctorArgs, LinkTarget, Mode, PingArgs};
pub use online::{PathAddArgs, PathArgs, PathCommand, PathLeaveArgs, PolicyArgs};

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rtrs_core::config::{AutoSwitch, ByteSize, Millis, Portal, Shards, Switch};
use rtrs_core::identity::Identity;

use crate::config::{
    Access, AutoNumber, BenchSettings, Device, Failover, NbdAddress, NoPath, Policy, Settings,
};
use crate::error::Error;

/// Attach network block devices over RTRS and serve them as NBD
///
/// Exit codes: 0 ended well, 1 failed, 2 wrong usage or wrong contents of the configuration file.
#[derive(Debug, Parser)]
#[command(name = "rtrs-client", version, max_term_width = 100)]
pub struct LowArgs {
    /// Print for people (text) or for programs (json)
    ///
    /// Applies to attach, list, status, stats, path, policy, detach, bench, ping, doctor and
    /// --print-config, which prints YAML as text.
    #[arg(short, long, global = true, value_name = "FORMAT", default_value = "text")]
    pub output: Output,

    /// Keep control sockets here [default: /run/rtrs, or $XDG_RUNTIME_DIR/rtrs without root]
    ///
    /// Without root and XDG_RUNTIME_DIR it is /tmp/rtrs-UID. list, status, stats and detach find
    /// sessions only in the directory they were attached with.
    #[arg(long, global = true, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Format of what is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Attach an export as a block device or as NBD; returns when it can be opened
    ///
    /// Every flag that is a setting is also a key of the configuration file, under the same name;
    /// flags win over the file, and a repeatable flag replaces the file's list.
    Attach(Box<AttachArgs>),
    /// List what is attached
    ///
    /// One line per session found in the run directory.
    List,
    /// Show one session: its paths, their states, its NBD connections
    ///
    /// NAME is the name it was attached with.
    Status(NameArgs),
    /// Show one session's counters and latencies
    ///
    /// NAME is the name it was attached with.
    Stats(NameArgs),
    /// Detach: finish running requests, close the session, end its process
    ///
    /// NAME is the name it was attached with.
    Detach(DetachArgs),
    /// List, add, remove, disconnect or reconnect the paths of a session while it runs
    ///
    /// No IO fails by any of them.
    Path(PathArgs),
    /// Pick paths in another way from now on
    ///
    /// NAME is the name it was attached with.
    Policy(PolicyArgs),
    /// Measure a session without NBD
    ///
    /// Opens the export, runs requests for a time, and prints rates and latencies. The session's
    /// settings are read from the configuration file too, and bench's own under the key bench.
    Bench(Box<BenchArgs>),
    /// See whether a link does RDMA, in the words of rping and krping
    ///
    /// Asks a rtrs-server, or with --rping an rping -s. In each round the server reads this end's
    /// data and writes it back, and it is compared. Ends with a table; exit code 1 on loss.
    Ping(Box<PingArgs>),
    /// Look at a path step by step and say what to change
    ///
    /// From the host's name over route, device and port to a ping and the first message of a
    /// session, which is not opened. Exit code 1 when a step fails.
    Doctor(DoctorArgs),
    /// Open a device and close it again
    ///
    /// For this program itself, which must not wait for a device that it serves.
    #[command(hide = true)]
    OpenDevice(OpenDeviceArgs),
}

/// The session a command is about.
#[derive(Debug, Args)]
pub struct NameArgs {
    /// The name the session was attached with.
    #[arg(value_name = "NAME")]
    pub name: String,
}

/// `detach`.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// The name the session was attached with.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Give running requests this long, in ms if no unit is written [default: 5s]
    ///
    /// What still runs then ends with an error. 0 waits for nothing.
    #[arg(long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub within: Millis,

    /// Detach also when the session's device is mounted, open or otherwise in use
    ///
    /// The IO of its users then fails, and what they have not written yet is lost.
    #[arg(long)]
    pub force: bool,
}

/// `open-device`.
#[derive(Debug, Args)]
pub struct OpenDeviceArgs {
    /// The device.
    #[arg(value_name = "PATH")]
    pub path: PathBuf,

    /// Fail if somebody has claimed it
    ///
    /// Mounts, swap and devices on top of it do.
    #[arg(long)]
    pub exclusive: bool,
}

/// Where settings come from, and what to do with them.
#[derive(Debug, Args)]
pub struct SourceArgs {
    /// Read settings from this YAML file
    ///
    /// configs/client.yaml in the source tree lists every key with its default.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Check flags, file, addresses and socket paths, then stop
    ///
    /// Host names are resolved; nothing is connected or changed.
    #[arg(long)]
    pub check: bool,

    /// Print all settings with their defaults, then stop
    ///
    /// What is printed is a complete configuration file.
    #[arg(long)]
    pub print_config: bool,
}

/// The settings of a session, whoever uses it.
#[derive(Debug, Clone, Default, Args)]
pub struct SessionArgs {
    /// Reach the server this way, as in tcp://10.0.0.1@10.0.0.2:1234; repeatable
    ///
    /// A portal is SCHEME://[SOURCE@]HOST[:PORT] with the scheme tcp or rdma, an optional local
    /// address to connect from, IPv6 addresses in brackets and 1234 as default port. rnbd's
    /// ip:SOURCE@ip:HOST means rdma://. Requests are shared out over all paths by --policy.
    #[arg(long, value_name = "PORTAL")]
    pub path: Option<Vec<Portal>>,

    /// Open the export read-only, the same as --access ro
    ///
    /// Writes are refused here and at the server.
    #[arg(long)]
    pub read_only: bool,

    /// Open the export auto, ro, rw or for migration [default: auto; bench: what its mode needs]
    ///
    /// auto is rw, or ro where the export is read-only. A server lets one session at a time open
    /// an export rw, any number ro, and a second writer only for migration.
    #[arg(long, value_name = "MODE", value_enum)]
    pub access: Option<Access>,

    /// Pick paths by round-robin, min-inflight or min-latency [default: min-inflight]
    ///
    /// In turn; the one with the fewest requests in flight; the one whose last heartbeat was
    /// answered soonest.
    #[arg(long, value_name = "POLICY", value_enum)]
    pub policy: Option<Policy>,

    /// Name of the session at the server [default: HOST-NAME]
    ///
    /// 1 to 254 bytes without slash, dot and NUL; in the default, other characters stand for these.
    #[arg(long, value_name = "NAME")]
    pub session_name: Option<String>,

    /// The server and export that it has to be, SERVER/EXPORT [default: what opens first]
    ///
    /// As `attach --output json` and `status` print it. A path that leads to another stays down.
    #[arg(long, value_name = "ID")]
    pub identity: Option<Identity>,

    /// Bind each shard to a CPU: auto, on or off [default: auto]
    ///
    /// auto binds them if there are no more shards than allowed CPUs.
    #[arg(long, value_name = "auto|on|off")]
    pub pin: Option<AutoSwitch>,

    /// Ask for CRC32C on TCP connections: on or off [default: on]
    ///
    /// This is the CRC of MPA frames (RFC 5044); it is used if either end asks for it.
    #[arg(long, value_name = "on|off")]
    pub crc: Option<Switch>,

    /// Give the server a key of its own for each read: auto, on or off [default: auto]
    ///
    /// With it a server cannot write to this process's memory after it has answered. It costs
    /// nothing over TCP, and two more work requests per read over RDMA; auto means over tcp://
    /// only.
    #[arg(long, value_name = "auto|on|off")]
    pub invalidate_reads: Option<AutoSwitch>,

    /// Milliseconds of silence before a heartbeat is sent, 10 to 600000, or auto [default: auto]
    ///
    /// A path is given up after heartbeat-missed-max further periods without a word. auto is 100 at
    /// a server of this project and 500 at a kernel's.
    #[arg(long, value_name = "MS|auto")]
    pub heartbeat_ms: Option<AutoNumber>,

    /// Periods a heartbeat may stay unanswered, 1 to 1000, or auto [default: auto]
    ///
    /// When more than this many are missed, the path is closed and connected again. auto is 5; and
    /// where --heartbeat-ms is auto too, at a server of this project, 3 over tcp:// and 8 over
    /// rdma://.
    #[arg(long, value_name = "N|auto")]
    pub heartbeat_missed_max: Option<AutoNumber>,

    /// Milliseconds a path has to connect, 10 to 600000 [default: 5000]
    ///
    /// That is each connection with its handshake.
    #[arg(long, value_name = "MS")]
    pub connect_timeout_ms: Option<u64>,

    /// Milliseconds before the first reconnect of a path, 1 to 600000 [default: 100]
    ///
    /// The wait doubles with each failure up to --reconnect-max-ms.
    #[arg(long, value_name = "MS")]
    pub reconnect_min_ms: Option<u64>,

    /// Most milliseconds between reconnects of a path, 1 to 600000 [default: 3000]
    ///
    /// Reconnects go on until the session is detached.
    #[arg(long, value_name = "MS")]
    pub reconnect_max_ms: Option<u64>,

    /// Milliseconds a path has to answer a request, 10 to 3600000 [default: 30000]
    ///
    /// Then the path is closed, and the request goes to another.
    #[arg(long, value_name = "MS")]
    pub io_timeout_ms: Option<u64>,

    /// IO while no path is connected: queue, queue-for=TIME or fail [default: queue-for=60s]
    ///
    /// It waits; or it waits until there has been no path for TIME, 100ms to 24h, and then ends
    /// with an error, as does what comes until a path is back; or it ends with an error at once.
    #[arg(long, value_name = "POLICY")]
    pub no_path: Option<NoPath>,

    /// When a kernel's server gets requests of a dead path again: fast or strict [default: fast]
    ///
    /// Fast, on another path at once, as the kernel's client does: a write that the server held up
    /// may then land after newer ones. Strict, when the path has been connected again, which
    /// proves that nothing of the old one is left. Our own server needs neither: it fences the
    /// dead path off.
    #[arg(long, value_name = "WHEN", value_enum)]
    pub failover: Option<Failover>,

    /// Most requests in flight, 1 to 65535 [default: 65535]
    ///
    /// The server's queue depth holds too, and the smaller of the two counts.
    #[arg(long, value_name = "N")]
    pub queue_depth_limit: Option<u32>,

    /// Most microseconds a busy shard polls before it sleeps, 0 to 10000 [default: 50]
    ///
    /// The time adapts to the load up to this bound; 0 never polls. An idle shard sleeps.
    #[arg(long, value_name = "US")]
    pub poll_us: Option<u32>,

    /// What is logged: error, warn, info, debug, trace, or a filter by module [default: info]
    ///
    /// A filter is a list such as info,rtrs_client::session=debug.
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}

/// `attach`.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// The export's name at the server, and the session's name here.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// The session.
    #[command(flatten)]
    pub session: SessionArgs,

    /// Serve NBD on this unix socket
    ///
    /// At most 107 bytes. One of --device, --socket and --listen is needed.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// Serve NBD on this TCP address, as in 127.0.0.1:10809
    ///
    /// A numeric address; the port is 10809 if left out, and 0 lets the system choose. Who can
    /// connect can read and write. One of --device, --socket and --listen is needed.
    #[arg(long, value_name = "ADDR:PORT", conflicts_with = "socket")]
    pub listen: Option<NbdAddress>,

    /// Make it a block device of this system: /dev/nbdX, or auto for a free one
    ///
    /// Needs root and the module nbd. One of --device, --socket and --listen is needed.
    #[arg(long, value_name = "DEVICE", conflicts_with_all = ["socket", "listen"])]
    pub device: Option<Device>,

    /// Seconds before the kernel gives up waiting for a request [default: longer than any may take]
    ///
    /// A safety net for a session that hangs: twice --io-timeout-ms, the time of --no-path and 30 s
    /// more if left out; a day with --no-path queue. The kernel then closes a connection and sends
    /// its requests again through another shard's.
    #[arg(long, value_name = "S")]
    pub device_timeout_s: Option<u64>,

    /// Seconds the kernel keeps requests when the session's process has died [default: 0]
    ///
    /// Then they fail. They wait for somebody who takes the device over; with --takeover the
    /// default is 60.
    #[arg(long, value_name = "S")]
    pub device_dead_timeout_s: Option<u64>,

    /// Take the device over that a process of this session left connected when it died
    ///
    /// Its users see a pause and no error, if --device-dead-timeout-s has not run out. Without such
    /// a device one is connected as usual, so a service may always say it. Needs --device, and
    /// access that excludes other writers.
    #[arg(long)]
    pub takeover: bool,

    /// Take over so that the pause is about two seconds at most; implies --takeover
    ///
    /// The device then has one socket of the kernel and one shard, so one thread carries all of its
    /// IO, and the kernel has no bound for a request: --device-timeout-s is refused.
    #[arg(long)]
    pub quick_takeover: bool,

    /// Go on with another server or export than before: the volume was moved on purpose
    ///
    /// What --identity and the file say, and what a process left that this one takes over from, is
    /// ignored; what opens first counts from now on. No key of the file, so that it is said each
    /// time.
    #[arg(long)]
    pub accept_new_identity: bool,

    /// Stay in the foreground until SIGTERM or detach
    ///
    /// Without it, the command returns once an NBD client can connect.
    #[arg(long)]
    pub foreground: bool,

    /// Threads that carry IO: a number, or auto for one per allowed CPU [default: auto]
    ///
    /// Each shard has its own io_uring and its own connection on each path.
    #[arg(long, value_name = "N|auto")]
    pub shards: Option<Shards>,

    /// Bytes of NBD buffers per shard, 58M to 4G in steps of 4k [default: 64M]
    ///
    /// Requests wait when all are in use.
    #[arg(long, value_name = "SIZE")]
    pub buffer_size: Option<ByteSize>,

    /// Where settings come from.
    #[command(flatten)]
    pub source: SourceArgs,
}

/// `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The export's name at the server.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// What to measure.
    #[command(flatten)]
    pub bench: BenchSettings,

    /// The session.
    #[command(flatten)]
    pub session: SessionArgs,

    /// Where settings come from.
    #[command(flatten)]
    pub source: SourceArgs,
}

impl SourceArgs {
    /// `flags` laid over the configuration file, if one was named.
    pub(crate) fn layer(&self, flags: Settings) -> Result<Settings, Error> {
        match &self.config {
            Some(path) => Ok(flags.over(Settings::from_file(path)?)),
            None => Ok(flags),
        }
    }
}

impl SessionArgs {
    /// The flags as settings.
    #[must_use]
    pub fn settings(&self) -> Settings {
        let args = self.clone();
        Settings {
            path: args.path,
            read_only: args.read_only.then_some(true),
            access: args.access,
            policy: args.policy,
            session_name: args.session_name,
            identity: args.identity,
            pin: args.pin,
            crc: args.crc,
            invalidate_reads: args.invalidate_reads,
            heartbeat_ms: args.heartbeat_ms,
            heartbeat_missed_max: args.heartbeat_missed_max,
            connect_timeout_ms: args.connect_timeout_ms,
            reconnect_min_ms: args.reconnect_min_ms,
            reconnect_max_ms: args.reconnect_max_ms,
            io_timeout_ms: args.io_timeout_ms,
            no_path: args.no_path,
            failover: args.failover,
            queue_depth_limit: args.queue_depth_limit,
            poll_us: args.poll_us,
            log: args.log,
            ..Settings::default()
        }
    }
}

impl AttachArgs {
    /// The flags as settings.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            socket: self.socket.clone(),
            listen: self.listen,
            device: self.device,
            device_timeout_s: self.device_timeout_s,
            device_dead_timeout_s: self.device_dead_timeout_s,
            takeover: self.takeover.then_some(true),
            quick_takeover: self.quick_takeover.then_some(true),
            foreground: self.foreground.then_some(true),
            shards: self.shards,
            buffer_size: self.buffer_size,
            ..self.session.settings()
        }
    }
}

impl BenchArgs {
    /// The flags as settings.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings { bench: Some(self.bench.clone()), ..self.session.settings() }
    }
}

#[cfg(test)]
mod tests;
