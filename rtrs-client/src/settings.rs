//! Every client setting, declared once: its flag, YAML key, default and help.
//!
//! Owns [`SessionSettings`], which `attach` and `bench` share, [`AttachSettings`],
//! [`BenchSettings`], which are under the key `bench`, [`PlaceSettings`], which all commands share,
//! and [`Settings`], the whole file. A value that is invalid on its own is rejected when it is
//! read; `plan.rs` validates combinations.

mod socket;
mod values;

pub use socket::SocketOwner;
pub(crate) use socket::give_socket;
pub use values::{
    Access, BenchMode, Device, Failover, NbdAddress, NbdTls, NoPath, Policy, RequirePaths, SlowIo,
};

use std::path::PathBuf;

use rtrs_core::identity::Identity;
use rtrs_core::settings::{
    Auto, AutoSwitch, ByteSize, HOUR, Int, LogFilter, LogFormat, MILLISECOND, MINUTE,
    MetricsAddress, Portal, SECOND, Shards, SocketMode, Switch, Time, Visitor, settings_from_yaml,
};
use rtrs_core::tls::PublicKey;

use crate::error::Error;

rtrs_core::settings! {
    /// Session settings of both `attach` and `bench`.
    pub struct SessionSettings {
        /// Path to the server, for example tcp://10.0.0.1@10.0.0.2:1234; repeatable
        ///
        /// A path is SCHEME://[SOURCE@]HOST[:PORT]. SCHEME is tcp, tls or rdma; one session can mix
        /// tcp and rdma. tls is TCP with TLS 1.3 and needs tls-dir, or key-file and server-key.
        /// SOURCE is the local address to connect from. IPv6 addresses go in brackets. The default
        /// port is 1234. The rnbd form, ip:SOURCE@ip:HOST, means rdma://. At least one path is
        /// needed. --policy distributes requests over all paths.
        path: Vec<Portal> = "",
        /// Directory with ca-cert.pem, client-cert.pem and client-key.pem, for tls:// and rdma://
        ///
        /// The names are those of qemu and nbdkit. The server's certificate must be signed by the
        /// CA and be for the host in the path. ca-crl.pem, if it exists, revokes certificates. The
        /// key must be readable only by its owner. Not with key-file.
        tls_dir: Option<PathBuf> = "",
        /// Name that the server's certificate must have
        ///
        /// Needs tls-dir.
        tls_hostname: Option<String> = "the host in the path",
        /// File with the private key of this client, for tls:// and rdma://
        ///
        /// `rtrs-client key generate` creates one. The file must be readable only by its owner.
        /// Needs server-key. Not with tls-dir.
        key_file: Option<PathBuf> = "",
        /// Public key of the server, ed25519:BASE64, for tls:// and rdma://; repeatable
        ///
        /// `rtrs-server key show` prints it. The server must have one of these keys; list the old
        /// and the new one while the server's key is being replaced. Needs key-file.
        server_key: Vec<PublicKey> = "",
        /// Open the export read-only, like --access ro
        ///
        /// Both the client and the server refuse writes.
        read_only: bool = "false",
        /// Access mode of the export
        ///
        /// auto is rw, or ro if the export is read-only. A server allows one session to open an
        /// export rw, any number to open it ro, and a second writer only with migration.
        access: Option<Access> = "auto; for bench: as rw requires",
        /// How to select a request's path
        ///
        /// round-robin uses the paths in turn. min-inflight selects the path with the fewest
        /// requests in flight. min-latency selects the path with the shortest heartbeat round trip.
        policy: Policy = "min-inflight",
        /// Name of the session at the server
        ///
        /// 1 to 254 bytes, without slashes, dots or NULs. The default replaces these characters in
        /// HOST and NAME.
        session_name: Option<String> = "HOST-NAME",
        /// Required identity of server and export, SERVER/EXPORT
        ///
        /// Use the value that `attach --output json` and `status` print. A path that leads to
        /// another server or export stays down.
        identity: Option<Identity> = "as reported by the first path",
        /// Bind each shard to a CPU
        ///
        /// auto: pin when there are at least 8 CPUs and one per shard.
        pin: AutoSwitch = "auto",
        /// Request CRC32C on TCP connections
        ///
        /// This is the CRC of MPA frames (RFC 5044). It is used if either end requests it. tls://
        /// does not use it, because TLS protects all data.
        crc: Switch = "on",
        /// Use a fresh memory key for each read
        ///
        /// With on, the server cannot write to the memory of this process after it has answered the
        /// read. This costs nothing over TCP; over RDMA it costs two more work requests and a wait
        /// per read. auto is on for tcp:// and tls://, and off for rdma://. With off, the server
        /// can access the IO buffers of this session, and nothing else, until the path ends.
        invalidate_reads: AutoSwitch = "auto",
        /// Idle time before a heartbeat is sent
        ///
        /// A path fails if nothing arrives for heartbeat-missed-max further periods. auto is 100ms
        /// with rtrs-server and 500ms with a kernel server.
        heartbeat: Auto<Time<{ 10 * MILLISECOND }, { 10 * MINUTE }>> = "auto" was "heartbeat-ms",
        /// Heartbeat periods without an answer before the path fails
        ///
        /// The client closes the path when more periods than this pass without an answer, and
        /// reconnects it. auto is 5. If --heartbeat is auto too, auto is 3 over tcp:// and tls://,
        /// and 8 over rdma:// with rtrs-server.
        heartbeat_missed_max: Auto<Int<u32, 1, 1000>> = "auto",
        /// Longest time between heartbeats of an idle session
        ///
        /// If there is no request for a second, the time between the heartbeats of each path
        /// doubles, from heartbeat up to this value, so a dead path may be noticed that much later.
        /// The first request sends a heartbeat at once. The setting applies only to rtrs-server, up
        /// to the value that the server allows. A value not above heartbeat disables it.
        heartbeat_idle_max: Time<{ 10 * MILLISECOND }, { 10 * MINUTE }> = "30s",
        /// Time limit for connecting a path
        ///
        /// The limit applies to the start of each connection. The InfoExchange step gets twice this
        /// time.
        connect_timeout: Time<{ 10 * MILLISECOND }, { 10 * MINUTE }> = "5s"
            was "connect-timeout-ms",
        /// Delay before the first reconnect of a path
        ///
        /// The delay doubles with each failure up to --reconnect-max, with jitter.
        reconnect_min: Time<MILLISECOND, { 10 * MINUTE }> = "100ms" was "reconnect-min-ms",
        /// Longest delay between reconnects of a path
        ///
        /// Reconnects continue until the session is detached. A link that comes up ends the delay.
        reconnect_max: Time<MILLISECOND, { 10 * MINUTE }> = "3s" was "reconnect-max-ms",
        /// Time limit for the answer to a request
        ///
        /// After this time, the client closes a dead path and sends the request over another path.
        /// A path that still answers other requests or probes stays connected: the server's disk is
        /// slow. In that case bench waits, and attach follows slow-io.
        io_timeout: Time<{ 10 * MILLISECOND }, HOUR> = "30s" was "io-timeout-ms",
        /// How to handle IO while no path is connected: queue, queue-for=TIME or fail
        ///
        /// queue: hold IO until a path returns. queue-for=TIME: hold it for at most TIME, then
        /// fail. fail: fail at once. TIME is 100ms to 24h and begins when the last path is lost;
        /// once it has passed, all IO fails until a path returns.
        no_path: NoPath = "queue-for=1m",
        /// When to resend the requests of a dead path to a kernel server
        ///
        /// fast resends immediately over another path, as the kernel client does: a write that the
        /// server held up can land after newer ones. strict resends once the path has reconnected,
        /// which proves that the server no longer runs requests of the old connections. rtrs-server
        /// needs neither, because it fences the dead path.
        failover: Failover = "fast",
        /// Maximum number of requests in flight
        ///
        /// The queue depth of the server applies too; the smaller value is used.
        queue_depth_limit: Int<u16, 1, 65535> = "65535",
        /// Longest time a busy shard polls before it sleeps
        ///
        /// The time adapts to the load, up to this limit. 0 disables polling. An idle shard always
        /// sleeps.
        poll: Time<0, { 10 * MILLISECOND }> = "200us" was "poll-us",
        /// Log level: error, warn, info, debug, trace, or a filter by module
        ///
        /// An example of a filter is info,rtrs_client::engine=debug. The log goes to stderr.
        log: LogFilter = "info",
        /// Format of the log
        ///
        /// json is one object per line. journald is text with the priority at the start of each
        /// line, where systemd reads it, and without the time or level.
        log_format: LogFormat = "text",
    }
}

rtrs_core::settings! {
    /// Settings that only `attach` has.
    pub struct AttachSettings {
        /// Name of the export at the server, if it differs from the volume's
        ///
        /// `attach EXPORT --as NAME` is the same as `attach NAME --export EXPORT`. Exports with the
        /// same name at two servers need different names on this host.
        export: Option<String> = "name of the volume",
        /// Serve NBD on this unix socket
        ///
        /// At most 107 bytes. Set one of device, socket, listen and vhost-user, or none if systemd
        /// passes a socket. {name} in the path is replaced by the name of the volume.
        socket: Option<PathBuf> = "",
        /// Serve a virtual machine by vhost-user-blk on this unix socket
        ///
        /// At most 107 bytes. {name} in the path is replaced by the name of the volume. The memory
        /// of the virtual machine must be shared. One virtual machine at a time can connect. Not
        /// with slow-io fail. Set one of device, socket, listen and vhost-user.
        vhost_user: Option<PathBuf> = "",
        /// Number of queues that the virtual machine may use
        ///
        /// The guest is offered this number of queues. Queue n belongs to shard n modulo shards. By
        /// default the guest is offered one queue per shard, and may use up to 64. Needs
        /// vhost-user.
        queues: Option<Int<u16, 1, 64>> = "shards; up to 64",
        /// Permissions of the unix socket, in octal, for example 660
        ///
        /// Anyone with write permission to the socket can connect. With a umask of 022, only the
        /// owner has it. Needs socket or vhost-user.
        socket_mode: Option<SocketMode> = "777 without the umask",
        /// Owner of the unix socket: USER, USER:GROUP or :GROUP
        ///
        /// Names from /etc/passwd and /etc/group, or numbers. Needs socket or vhost-user.
        socket_owner: Option<SocketOwner> = "user and group of the process",
        /// Serve NBD on this TCP address, for example 127.0.0.1:10809
        ///
        /// A numeric address. The default port is 10809; with port 0 the system chooses one. Anyone
        /// who can connect can read and write, unless nbd-tls is require. An address that other
        /// hosts can reach needs nbd-tls require, or insecure-open. Set one of device, socket,
        /// listen and vhost-user.
        listen: Option<NbdAddress> = "",
        /// Serve NBD without nbd-tls require on an address that other hosts can reach
        ///
        /// Everyone who can connect can then read and write the volume, in clear text, whatever the
        /// session's own paths and the server's access lists demand.
        insecure_open: bool = "false",
        /// TLS for the NBD clients of listen
        ///
        /// require refuses clients without TLS, and clients without a certificate of the CA in
        /// nbd-tls-dir. on lets clients choose, so anyone who can connect can read and write. With
        /// both, the printed URI begins with nbds://. At most 128 clients at a time. Needs listen
        /// and nbd-tls-dir.
        nbd_tls: NbdTls = "off",
        /// Directory with ca-cert.pem, server-cert.pem and server-key.pem, for nbd-tls
        ///
        /// The names are those of qemu and nbdkit. A client needs a certificate of the CA.
        /// ca-crl.pem, if it exists, revokes certificates. The key must be readable only by its
        /// owner. Changed files apply to new connections. Needs nbd-tls.
        nbd_tls_dir: Option<PathBuf> = "",
        /// Create a block device on this host: /dev/nbdX, or auto for a free one
        ///
        /// Needs root and the nbd kernel module. Set one of device, socket, listen and vhost-user.
        device: Option<Device> = "",
        /// Time until the kernel gives up on a request
        ///
        /// A safety net for a session that hangs. The kernel closes a connection and resends its
        /// requests over the connection of another shard. The default is 24h with slow-io wait and
        /// with no-path queue, because a request can then take arbitrarily long. Otherwise it is
        /// twice io-timeout, plus the time of no-path, plus 30s. The minimum is twice io-timeout,
        /// plus the time of no-path, plus 1s. Not with quick-takeover.
        device_timeout: Option<Time<SECOND, { 24 * HOUR }>> = "from slow-io and no-path"
            was "device-timeout-s",
        /// Time the kernel holds the requests of a dead process
        ///
        /// The requests wait for a process that takes the device over. After this time they fail.
        device_dead_timeout: Option<Time<0, { 24 * HOUR }>> = "0s; 60s with takeover"
            was "device-dead-timeout-s",
        /// Take over the device that a dead process of this session left connected
        ///
        /// Users of the device see a pause but no error, unless device-dead-timeout has expired. If
        /// there is no such device, a new one is connected, so a service can always set this. Needs
        /// device, and an access mode that excludes other writers.
        takeover: bool = "false",
        /// Limit the pause of a takeover to about two seconds; implies takeover
        ///
        /// The device has one kernel socket and one shard, so one thread handles all of its IO. The
        /// kernel has no timeout for a request, so device-timeout is refused.
        quick_takeover: bool = "false",
        /// Stay in the foreground until SIGTERM or detach
        ///
        /// Otherwise the command returns when an NBD client can connect.
        foreground: bool = "false",
        /// Number of paths that must be connected for the attach, or all
        ///
        /// attach waits up to 10s, or the time of --retry-for if that is longer. If fewer paths are
        /// connected then, it fails, names the missing paths, and leaves nothing behind. The
        /// setting has no effect after the attach.
        require_paths: RequirePaths = "1",
        /// IO threads
        ///
        /// auto is one per allowed CPU. Each shard has its own io_uring and its own connection on
        /// each path. bench uses numjobs instead; quick-takeover always has one shard.
        shards: Shards = "auto",
        /// Handling of IO slower than io-timeout
        ///
        /// Applies to working paths. `wait` waits for the answer. `fail` returns EIO after
        /// io-timeout. The request can still take effect later. Until the server answers it, or
        /// its path is closed and fenced, it keeps its buffer and its share of the queue depth, and
        /// overlapping requests wait for it, at most io-timeout. The default with takeover is fail,
        /// because the pause of a takeover is as long as device-timeout. With quick-takeover it is
        /// wait.
        slow_io: Option<SlowIo> = "wait; fail with takeover",
        /// NBD buffers per shard, 58M to 4G in steps of 4k
        ///
        /// Volumes of a session that have the same buffer-size share them. The minimum is enough
        /// for one request of 32 MiB and two buffers for each of 48 connections. Memory is used
        /// only as requests need it. When the buffers are exhausted, requests wait.
        buffer_size: ByteSize = "64M",
        /// Answer GET /metrics here, for Prometheus: ADDR:PORT or unix:/PATH
        ///
        /// With port 0, the system chooses a port, which is written to the log. Each session is a
        /// process and needs its own address; `rtrs-client exporter` serves the metrics of all
        /// sessions at one address. Anyone who can connect can read the metrics, so use an address
        /// on a trusted network. `rtrs-client metrics` prints the metrics of all sessions.
        metrics: Option<MetricsAddress> = "",
    }
}

rtrs_core::settings! {
    /// Settings that all commands share.
    pub struct PlaceSettings {
        /// Directory for control sockets
        ///
        /// The default without root and without XDG_RUNTIME_DIR is /tmp/rtrs-UID. list, status,
        /// stats and detach find only sessions that were attached with the same directory.
        run_dir: Option<PathBuf> = "/run/rtrs, or $XDG_RUNTIME_DIR/rtrs without root",
    }
}

rtrs_core::settings! {
    /// Settings that only `bench` has.
    pub struct BenchSettings {
        /// IO pattern
        ///
        /// Sequential or random reads or writes; randrw mixes random reads and writes in the ratio
        /// set by rwmixread. Writes destroy the data on the export.
        rw: BenchMode = "randread",
        /// Size of a request, a multiple of 512 up to 32M
        ///
        /// The session splits requests that are larger than the server's limit.
        bs: ByteSize = "4k",
        /// Queue depth of each job
        ///
        /// All jobs together have at most the server's queue depth in flight; the rest wait.
        iodepth: Int<u16, 1, 65535> = "32",
        /// Number of jobs, each on its own shard
        ///
        /// auto is one per CPU. This is also the number of shards of the session, and of IO
        /// connections on each path.
        numjobs: Shards = "1",
        /// How long to run
        ///
        /// The benchmark waits for the requests that are in flight at the end.
        runtime: Time<SECOND, { 24 * HOUR }> = "10s",
        /// Use only the first SIZE bytes of the export
        ///
        /// At least one request must fit.
        size: Option<ByteSize> = "all",
        /// Number of memory pieces per request
        ///
        /// With several pieces, the memory of a request is scattered, like that of a guest.
        pieces: Int<u8, 1, 128> = "1",
        /// Percentage of reads in randrw
        ///
        /// The other modes ignore it.
        rwmixread: Int<u8, 0, 100> = "50",
    }
}

impl AttachSettings {
    /// Whether no device, socket or address is set.
    pub(crate) fn is_nowhere(&self) -> bool {
        let Self { device, socket, listen, vhost_user, .. } = self;
        device.is_none() && socket.is_none() && listen.is_none() && vhost_user.is_none()
    }

    /// Unsets the device, socket or address.
    pub(crate) fn take_place(&mut self) {
        (self.device, self.socket, self.listen, self.vhost_user) = (None, None, None, None);
    }
}

/// Everything that the configuration file can set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Settings shared by `attach` and `bench`.
    pub session: SessionSettings,
    /// Settings for `attach`.
    pub attach: AttachSettings,
    /// Settings for all commands.
    pub place: PlaceSettings,
    /// Settings for `bench`.
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
    /// Parses the text of a configuration file, which errors refer to as `name`. Empty text sets
    /// nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), with the name, the line and a remedy.
    pub fn from_yaml(text: &str, name: &str) -> Result<Self, Error> {
        settings_from_yaml(text, name)
    }
}

#[cfg(test)]
mod tests;
