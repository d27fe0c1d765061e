//! Every setting of the client, declared once: flag, key of the YAML file, default, help.
//!
//! Owns [`SessionSettings`], which `attach` and `bench` share, [`AttachSettings`],
//! [`BenchSettings`], which stand below the key `bench`, and [`Settings`], the whole file. A value
//! that is wrong by itself is refused where it is read; what the values mean together is judged in
//! `plan.rs`.

mod values;

pub use values::{Access, BenchMode, Device, Failover, NbdAddress, NoPath, Policy};

use std::path::PathBuf;

use rtrs_core::identity::Identity;
use rtrs_core::settings::{
    Auto, AutoSwitch, ByteSize, HOUR, Int, LogFilter, MILLISECOND, MINUTE, Portal, SECOND, Shards,
    Switch, Time, Visitor, settings_from_yaml,
};

use crate::error::Error;

rtrs_core::settings! {
    /// The settings of a session, whoever uses it.
    pub struct SessionSettings {
        /// Reach the server this way, as in tcp://10.0.0.1@10.0.0.2:1234; repeatable
        ///
        /// A portal is SCHEME://[SOURCE@]HOST[:PORT] with the scheme tcp or rdma, an optional local
        /// address to connect from, IPv6 addresses in brackets and 1234 as default port. rnbd's
        /// ip:SOURCE@ip:HOST means rdma://. At least one is needed; schemes may be mixed. Requests
        /// are shared out over all paths by --policy.
        path: Vec<Portal> = "",
        /// Open the export read-only, the same as --access ro
        ///
        /// Writes are refused here and at the server.
        read_only: bool = "false",
        /// How to open the export
        ///
        /// auto is rw, or ro where the export is read-only. A server lets one session at a time
        /// open an export rw, any number ro, and a second writer only for migration.
        access: Option<Access> = "auto; bench: what its mode needs",
        /// How to pick a path for a request
        ///
        /// round-robin takes them in turn; min-inflight the one with the fewest requests in flight;
        /// min-latency the one whose last heartbeat was answered soonest.
        policy: Policy = "min-inflight",
        /// Name of the session at the server
        ///
        /// 1 to 254 bytes without slash, dot and NUL; in the default, other characters stand for
        /// these.
        session_name: Option<String> = "HOST-NAME",
        /// The server and export that it has to be, SERVER/EXPORT
        ///
        /// As `attach --output json` and `status` print it. A path that leads to another stays
        /// down.
        identity: Option<Identity> = "what opens first",
        /// Bind each shard to a CPU
        ///
        /// auto binds on 8 CPUs or more, if there are no more shards than allowed CPUs.
        pin: AutoSwitch = "auto",
        /// Ask for CRC32C on TCP connections
        ///
        /// This is the CRC of MPA frames (RFC 5044); it is used if either end asks for it.
        crc: Switch = "on",
        /// Give the server a key of its own for each read
        ///
        /// With it a server cannot write to this process's memory after it has answered. It costs
        /// nothing over TCP, and two more work requests and a wait per read over RDMA; auto means
        /// over tcp:// only. Without it the server reaches the IO buffers of this session, and
        /// nothing else, as long as the path lives.
        invalidate_reads: AutoSwitch = "auto",
        /// Silence before a heartbeat is sent
        ///
        /// A path is given up after heartbeat-missed-max further periods without a word. auto is
        /// 100ms at a server of this project and 500ms at a kernel's.
        heartbeat: Auto<Time<{ 10 * MILLISECOND }, { 10 * MINUTE }>> = "auto" was "heartbeat-ms",
        /// Periods a heartbeat may stay unanswered
        ///
        /// When more than this many are missed, the path is closed and connected again. auto is 5;
        /// and where --heartbeat is auto too, at a server of this project, 3 over tcp:// and 8 over
        /// rdma://.
        heartbeat_missed_max: Auto<Int<u32, 1, 1000>> = "auto",
        /// Time a path has to connect
        ///
        /// That is each connection's start; the introduction has twice that.
        connect_timeout: Time<{ 10 * MILLISECOND }, { 10 * MINUTE }> = "5s"
            was "connect-timeout-ms",
        /// Wait before the first reconnect of a path
        ///
        /// The wait doubles with each failure up to --reconnect-max, with jitter.
        reconnect_min: Time<MILLISECOND, { 10 * MINUTE }> = "100ms" was "reconnect-min-ms",
        /// Longest wait between reconnects of a path
        ///
        /// Reconnects go on until the session is detached. A link that comes up ends the wait.
        reconnect_max: Time<MILLISECOND, { 10 * MINUTE }> = "3s" was "reconnect-max-ms",
        /// Time a path has to answer a request
        ///
        /// Then the path is closed, and the request goes to another.
        io_timeout: Time<{ 10 * MILLISECOND }, HOUR> = "30s" was "io-timeout-ms",
        /// IO while no path is connected, queue, queue-for=TIME or fail
        ///
        /// `queue` blocks until a path returns. `queue-for=TIME` blocks until there has been no
        /// path for TIME, 100ms to 24h, and then fails, as does what comes until a path is back.
        /// `fail` fails immediately.
        no_path: NoPath = "queue-for=60s",
        /// When a kernel's server gets requests of a dead path again
        ///
        /// fast sends them at once on another path, as the kernel's client does: a write that the
        /// server held up may then land after newer ones. strict sends them when the path has been
        /// connected again, which proves that nothing of the old one is left. Our own server needs
        /// neither: it fences the dead path off.
        failover: Failover = "fast",
        /// Most requests in flight
        ///
        /// The server's queue depth holds too, and the smaller of the two counts.
        queue_depth_limit: Int<u16, 1, 65535> = "65535",
        /// Longest time a busy shard polls before it sleeps
        ///
        /// The time adapts to the load up to this bound; 0 never polls. An idle shard sleeps.
        poll: Time<0, { 10 * MILLISECOND }> = "50us" was "poll-us",
        /// What is logged, error, warn, info, debug, trace, or a filter by module
        ///
        /// A filter is a list such as info,rtrs_client::session=debug. It goes to stderr.
        log: LogFilter = "info",
    }
}

rtrs_core::settings! {
    /// The settings that only `attach` has.
    pub struct AttachSettings {
        /// Serve NBD on this unix socket
        ///
        /// At most 107 bytes. One of device, socket and listen is needed.
        socket: Option<PathBuf> = "",
        /// Serve NBD on this TCP address, as in 127.0.0.1:10809
        ///
        /// A numeric address; the port is 10809 if left out, and 0 lets the system choose. Who can
        /// connect can read and write. One of device, socket and listen is needed.
        listen: Option<NbdAddress> = "",
        /// Make it a block device of this system, /dev/nbdX, or auto for a free one
        ///
        /// Needs root and the module nbd. One of device, socket and listen is needed.
        device: Option<Device> = "",
        /// Time before the kernel gives up waiting for a request
        ///
        /// A safety net for a session that hangs: twice io-timeout, the time of no-path and 30s
        /// more if left out; 24h with no-path queue. It has to be a second more than the first two
        /// at least. The kernel then closes a connection and sends its requests again through
        /// another shard's. Not with quick-takeover.
        device_timeout: Option<Time<SECOND, { 24 * HOUR }>> = "longer than any may take"
            was "device-timeout-s",
        /// Time the kernel keeps requests of a dead process
        ///
        /// That is, when the session's process has died. They wait for a process that takes the
        /// device over, then they fail.
        device_dead_timeout: Option<Time<0, { 24 * HOUR }>> = "0s; with takeover 60s"
            was "device-dead-timeout-s",
        /// Take the device over that a process of this session left connected when it died
        ///
        /// Its users see a pause and no error, if device-dead-timeout has not run out. Without such
        /// a device one is connected as usual, so a service may always say it. Needs device, and
        /// access that excludes other writers.
        takeover: bool = "false",
        /// Take over so that the pause is about two seconds at most; implies takeover
        ///
        /// The device then has one socket of the kernel and one shard, so one thread carries all of
        /// its IO, and the kernel has no bound for a request: device-timeout is refused.
        quick_takeover: bool = "false",
        /// Stay in the foreground until SIGTERM or detach
        ///
        /// Without it, the command returns once an NBD client can connect.
        foreground: bool = "false",
        /// Threads that carry IO
        ///
        /// auto is one per allowed CPU. Each shard has its own io_uring and its own connection on
        /// each path. bench has numjobs instead; quick-takeover has one.
        shards: Shards = "auto",
        /// NBD buffers per shard, 58M to 4G in steps of 4k
        ///
        /// That is a request of 32 MiB beside two buffers for each of 48 connections. Memory is
        /// used only as far as requests need it; requests wait when all is in use.
        buffer_size: ByteSize = "64M",
    }
}

rtrs_core::settings! {
    /// What the file says for all commands.
    pub struct PlaceSettings {
        /// Keep control sockets here
        ///
        /// Without root and XDG_RUNTIME_DIR it is /tmp/rtrs-UID. list, status, stats and detach
        /// find sessions only in the directory they were attached with.
        run_dir: Option<PathBuf> = "/run/rtrs, or $XDG_RUNTIME_DIR/rtrs without root",
    }
}

rtrs_core::settings! {
    /// The settings that only `bench` has.
    pub struct BenchSettings {
        /// What to do
        ///
        /// Sequential or random reads or writes, or random reads and writes mixed as rwmixread
        /// says. Writes destroy what is on the export.
        rw: BenchMode = "randread",
        /// Size of a request, a multiple of 512 up to 32M
        ///
        /// Requests larger than the server takes at once are split by the session.
        bs: ByteSize = "4k",
        /// Requests each job keeps in flight
        ///
        /// All jobs together have at most the server's queue depth in flight; the rest wait.
        iodepth: Int<u16, 1, 65535> = "32",
        /// Jobs, each on a shard of its own
        ///
        /// auto is one per CPU. This is the number of shards of the session, and of connections on
        /// each path.
        numjobs: Shards = "1",
        /// How long to run
        ///
        /// Requests in flight at the end are waited for.
        runtime: Time<SECOND, { 24 * HOUR }> = "10s",
        /// Use only the first SIZE bytes of the export
        ///
        /// At least one request must fit.
        size: Option<ByteSize> = "all",
        /// Percentage of reads in randrw
        ///
        /// The other modes do not look at it.
        rwmixread: Int<u8, 0, 100> = "50",
    }
}

/// Everything the configuration file can say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// For `attach` and `bench`.
    pub session: SessionSettings,
    /// For `attach`.
    pub attach: AttachSettings,
    /// For all commands.
    pub place: PlaceSettings,
    /// For `bench`.
    pub bench: BenchSettings,
}

impl rtrs_core::settings::Settings for Settings {
    fn visit(&mut self, visitor: &mut impl Visitor) {
        self.session.visit(visitor);
        self.attach.visit(visitor);
        self.place.visit(visitor);
        visitor.section("bench", &mut self.bench);
    }
}

impl Settings {
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
