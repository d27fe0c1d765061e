//! The server's settings, each declared once with its flag, YAML key, default and help.
//!
//! Owns [`Settings`]. A value that is invalid on its own is refused where it is read; `plan.rs`
//! validates combinations of values.

#![allow(rustdoc::broken_intra_doc_links, reason = "flag help is plain text with brackets")]

mod audit;
mod export;
pub(crate) mod exports_dir;
mod missing;
mod nbd;
mod rates;
mod rbd;
mod search;
mod user;

pub use crate::access_list::AccessRule;
pub use audit::AuditLog;
pub use export::{BlockSize, ErrorRate, ExportSpec, Id, Migration, NAME_BYTES_MAX, Target};
pub use missing::OnMissing;
pub use nbd::NbdUrl;
pub use rates::{ByteRate, RequestRate};
pub use rbd::RbdName;
pub use search::SearchSpec;
pub use user::UserSpec;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rtrs_core::settings::{
    Auto, AutoSwitch, ByteSize, Int, LogFilter, LogFormat, MILLISECOND, MINUTE, MetricsAddress,
    Portal, Shards, Switch, Time, settings_from_yaml,
};

use crate::error::{Error, ErrorKind};

rtrs_core::settings! {
    /// The settings of the server.
    pub struct Settings {
        /// Export a file, disk, Ceph image, NBD export or memory as [NAME=]TARGET[,OPTION...];
        /// repeatable
        ///
        /// TARGET is the path of a file or block device, rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT] for
        /// an image of a Ceph cluster, nbd://HOST[:PORT]/NAME or nbd+unix:///NAME?socket=PATH for
        /// an export of an NBD server, mem:SIZE for memory, or null:SIZE for a device that discards
        /// writes and reads as zeroes. NAME is the name that clients open (default: the name of the
        /// file, image or NBD export, "mem" or "null"). OPTION is one of: ro; direct=auto|on|off
        /// (bypass the page cache); block-size=auto|512|4096; no-lock (export for writing even if
        /// the file system does not support locks, and without locking the image); gateway (share
        /// the image with gateways on other servers); conf=PATH (Ceph configuration file);
        /// user=USER (Ceph user); connect-timeout=TIME (time limit for connecting to the cluster or
        /// NBD server, default 15s); migration=allow|deny (deny: a second client may not write);
        /// delay=TIME (delay each request, for example 10ms); error-rate=FRACTION (fail this
        /// fraction of requests, for example 0.001); iops=N, iops-read=N, iops-write=N (limit on
        /// requests per second); bandwidth=SIZE, bandwidth-read=SIZE, bandwidth-write=SIZE (limit
        /// on bytes per second, for example 10M); burst=TIME (how much unused allowance an idle
        /// export accumulates, as time at these limits); id=ID (identify the export to clients by
        /// this text); access=WHO:ro|rw (clients that may open it, as in the access setting;
        /// repeatable). Escape a comma or an equals sign in a name or path with a backslash: \, and
        /// \=. In a configuration file, an export can also be a map with the keys name, target, ro,
        /// direct, block-size, no-lock, gateway, conf, user, connect-timeout, migration, delay,
        /// error-rate, iops, iops-read, iops-write, bandwidth, bandwidth-read, bandwidth-write,
        /// burst, id and access; nothing is escaped there.
        export: Vec<ExportSpec> = "",
        /// Directory of files with exports
        ///
        /// Every file NAME.yaml there holds an export or a list of exports, in the same form as the
        /// export key. Hidden files are ignored. These exports are added to those of the flags and
        /// the configuration file. `reload` rereads the files.
        exports_dir: Option<PathBuf> = "exports.d next to the configuration file, if it exists",
        /// Handling of exports that cannot be opened
        ///
        /// With refuse, the server does not start, and a reload with a new export that cannot be
        /// opened changes no export. With wait, it serves the other exports: `export list` shows
        /// the rest as failed, with the reason, and the server tries again after 1 s, and then at
        /// intervals that double up to 30 s. It opens an image that another program holds as soon
        /// as the image has been free for 10 s. auto is wait, except that a server without a
        /// configuration file does not start if it would serve nothing. --strict means refuse.
        /// `--check` refuses each export that cannot be opened.
        on_missing: OnMissing = "auto",
        /// Directory in which clients may open any file or block device, or off
        ///
        /// A client opens a regular file or block device by its path relative to this directory.
        /// Symbolic links must not lead outside it. If the path ends with %SESSNAME%, for example
        /// /srv/%SESSNAME%, each session uses the directory with its own name. Anyone who can
        /// connect can open anything there.
        search_path: SearchSpec = "off",
        /// Admit only these clients: WHO:ro or WHO:rw; repeatable
        ///
        /// WHO is the name of an authenticated client, kernel or kernel@NETWORK (clients without a
        /// name, such as kernel clients), or anyone or anyone@NETWORK (clients with and without a
        /// name). NETWORK is an address or a network such as 10.0.0.0/24. A list allows what any of
        /// its rules allows. If an export has its own access list, only that list applies to it. If
        /// there is any access list, everything that is not listed is denied. With tls-dir or
        /// key-file and no list, authenticated clients have full access, and other clients have
        /// none. `reload` rereads the lists.
        access: Vec<AccessRule> = "",
        /// Do not warn that everyone who reaches the server can use all exports
        ///
        /// Without any access list, certificate or key, the server logs a warning when it starts.
        insecure_open: bool = "false",
        /// Listen on this portal, for example tcp://127.0.0.1:1234, or auto; repeatable
        ///
        /// A portal is SCHEME://HOST[:PORT]. SCHEME is tcp, tls or rdma. IPv6 addresses go in
        /// brackets. The default port is 1234; with port 0, the system chooses a port. tcp://[::]
        /// accepts IPv6 and IPv4 connections, tcp://0.0.0.0 only IPv4. rdma:// needs an InfiniBand
        /// or RoCE device (soft RoCE works). tls:// is TCP with TLS 1.3 and needs tls-dir, or
        /// key-file and clients-file; a client without TLS is refused there. auto is
        /// tcp://[::]:1234, plus rdma://[::]:1234 if the host has an RDMA device. With tls-dir or
        /// key-file, auto is tls://[::]:1234 alone. If IPv6 is disabled, auto uses 0.0.0.0. A TCP
        /// socket that systemd passes is used for the entry with its address; auto uses all of
        /// them.
        listen: Vec<Auto<Portal>> = "auto",
        /// Directory with ca-cert.pem, server-cert.pem and server-key.pem, for tls:// and rdma://
        ///
        /// The names are those used by qemu and nbdkit. A client needs a certificate signed by the
        /// CA. ca-crl.pem, if it exists, revokes certificates. The key must be readable only by its
        /// owner. `reload` and SIGHUP reread the files. Not with key-file.
        tls_dir: Option<PathBuf> = "",
        /// File with the private key of this server, for tls:// and rdma://
        ///
        /// `rtrs-server key generate` creates the file. The file must be readable only by its
        /// owner. Needs clients-file. `reload` and SIGHUP reread both files. Not with tls-dir.
        key_file: Option<PathBuf> = "",
        /// File with the public keys of the clients, for tls:// and rdma://
        ///
        /// Each line is NAME ed25519:BASE64. `rtrs-client key show` prints the key of a client. #
        /// starts a comment. Needs key-file.
        clients_file: Option<PathBuf> = "",
        /// Requests in flight per session
        ///
        /// Each path of a session holds queue-depth chunks of chunk-size bytes. Depth and chunk
        /// size share 28 bits: ceil(log2(queue-depth)) + log2(chunk-size) must not exceed 28.
        queue_depth: Int<u16, 1, 65535> = "512",
        /// Size of the buffer for one request, a power of two from 8k to 16M
        ///
        /// The largest request is 4096 bytes smaller. Clients split larger ones.
        chunk_size: ByteSize = "256k",
        /// IO threads
        ///
        /// auto is one per allowed CPU. Each shard has its own io_uring and its own connections.
        shards: Shards = "auto",
        /// Bind each shard to a CPU
        ///
        /// auto pins if there are at least 8 CPUs and one per shard.
        pin: AutoSwitch = "auto",
        /// Use a fresh memory key for each request
        ///
        /// With on, a client's key to a chunk expires with its request, so a late write cannot land
        /// in a reused chunk. off saves a little time per request. Over RDMA, on needs memory
        /// windows: the server does not start with a portal on a device that has none. auto is on
        /// over TCP and on devices with memory windows, and off, with a warning at startup, on
        /// other devices.
        always_invalidate: AutoSwitch = "auto",
        /// Request CRC32C on TCP connections
        ///
        /// This is the CRC of MPA frames (RFC 5044). It is used if either end requests it. tls://
        /// does not use it, because TLS protects all data.
        crc: Switch = "on",
        /// Idle time before a heartbeat is sent
        ///
        /// A path fails if nothing arrives for heartbeat-missed-max further periods; with the
        /// defaults, after about 3 s.
        heartbeat: Time<{ 10 * MILLISECOND }, { 10 * MINUTE }> = "500ms" was "heartbeat-ms",
        /// Heartbeat periods without an answer before the path fails
        ///
        /// The server closes the path when more periods than this pass without an answer.
        heartbeat_missed_max: Int<u32, 1, 1000> = "5",
        /// Longest time between heartbeats that clients may use for an idle session
        ///
        /// rtrs-client sends fewer heartbeats while it has no requests. The server notices that an
        /// idle client is dead after this time plus the usual detection time. If another client
        /// requests the idle client's export or session name, the server sends the idle client a
        /// heartbeat at once. A value no greater than heartbeat turns this off.
        heartbeat_idle_max: Time<{ 10 * MILLISECOND }, { 10 * MINUTE }> = "30s",
        /// Time limit for the handshake of a connection
        ///
        /// The server closes connections and half-open paths that take longer.
        handshake_timeout: Time<{ 10 * MILLISECOND }, { 10 * MINUTE }> = "5s"
            was "handshake-timeout-ms",
        /// Time limit for a session to open an export
        ///
        /// The time runs from the session's first connection, and again from each attempt to open
        /// an export.
        open_timeout: Time<{ 10 * MILLISECOND }, { 10 * MINUTE }> = "60s",
        /// Maximum number of connections without an open export
        ///
        /// Counts connections in their handshake and those of sessions that have opened no export.
        /// Sessions that have opened one do not count, nor do their reconnects. At the limit, a new
        /// connection makes the server end the oldest session without an open export from the
        /// address (IPv6: /64) with the most such sessions. TCP connections that have sent no
        /// request yet are counted separately, with the same limit. auto is 8 times sessions-max,
        /// at least 1024 and at most 65536, because all sessions connect at once after a restart of
        /// the server.
        half_open_max: Auto<Int<u32, 1, 65536>> = "auto",
        /// Maximum number of sessions
        ///
        /// Sessions that have opened no export make room for new ones. The memory of sessions is
        /// limited by memory-max.
        sessions_max: Int<u32, 1, 65536> = "128",
        /// Memory for chunks; if it runs short, new sessions get a smaller queue depth
        ///
        /// auto is a quarter of the host's memory, but at least the chunks of two paths. A path
        /// needs queue-depth times (chunk-size + 4k) bytes. Over TCP a chunk counts from the first
        /// write to it; over RDMA all chunks of a path count, because they are pinned. A new
        /// session whose chunks do not fit gets a smaller queue depth. A client that does not
        /// support a smaller queue depth, such as the kernel's, is refused with ENOMEM. A session
        /// can add paths as long as all of its chunks fit, and can always reconnect its former
        /// paths.
        memory_max: Auto<ByteSize> = "auto",
        /// Time for running requests to finish after SIGTERM
        ///
        /// Requests that are still running after that are abandoned.
        shutdown_grace: Time<0, { 10 * MINUTE }> = "5s" was "shutdown-grace-ms",
        /// Longest time a busy shard polls before it sleeps
        ///
        /// The time adapts to the load, up to this limit. 0 disables polling. An idle shard always
        /// sleeps.
        poll: Time<0, { 10 * MILLISECOND }> = "200us" was "poll-us",
        /// List the named exports to clients that ask (rtrs-client discover)
        ///
        /// With off, a client must know the name of an export. Exports under search-path are never
        /// listed.
        discovery: Switch = "on",
        /// Answer only pings; open no exports and accept no sessions
        ///
        /// Use it as the peer of rtrs-client ping and doctor, and with --rping as the peer of rping
        /// -c. No export is needed.
        ping_only: bool = "false",
        /// Do not answer pings
        ///
        /// By default, every portal answers pings (rtrs-client ping), at most 64 at once.
        no_ping: bool = "false",
        /// Also answer standard rping clients
        ///
        /// These clients send no private data. With --ping-only, listen: auto then means port 7174,
        /// the port of rping. The data size is at most 1 MiB.
        rping: bool = "false",
        /// Name of this server for `session` and `drain`, or auto
        ///
        /// auto is the first address that the server listens on, for example 127.0.0.1:1234, or
        /// only the port if the server listens on all addresses. Two servers that share a run
        /// directory need different names.
        name: Auto<Id> = "auto",
        /// Identify this server to clients by this text, 1 to 255 bytes, or auto
        ///
        /// auto is a hash of the host's /etc/machine-id. A session can continue only on the server
        /// where it began. Keep the ID when a server moves to another host with its disks. Set
        /// different IDs for two servers on one host and for two hosts with the same machine ID.
        server_id: Auto<Id> = "auto",
        /// Directory for the control socket
        ///
        /// The default without root and without XDG_RUNTIME_DIR is /tmp/rtrs-UID. If neither
        /// run-dir nor name is set, a server that cannot create its control socket logs a warning
        /// and continues without one. If user is set, the default is /run/rtrs-server.
        run_dir: Option<PathBuf> = "/run/rtrs, or $XDG_RUNTIME_DIR/rtrs without root",
        /// Directory for persistent state
        ///
        /// The directory holds small files for each writable export. $STATE_DIRECTORY takes
        /// precedence. The default without root is $XDG_STATE_HOME/rtrs, or ~/.local/state/rtrs. If
        /// the server cannot write there, it logs a warning; clients then treat each server start
        /// as a loss of data that they had not flushed.
        state_dir: Option<PathBuf> = "/var/lib/rtrs, or ~/.local/state/rtrs without root",
        /// Drop root privileges and run as this user, NAME or NAME:GROUP
        ///
        /// Start the server as root. It reads its configuration, opens its exports and listens as
        /// root, and then permanently becomes this user, with the user's groups and without
        /// capabilities. From then on it opens files as this user: for `export add`, `reload` and
        /// search-path. It creates run-dir and state-dir for the user; if they exist, they must
        /// belong to the user.
        user: Option<UserSpec> = "",
        /// Answer GET /metrics here, for Prometheus: ADDR:PORT or unix:/PATH
        ///
        /// With port 0, the system chooses a port, which is written to the log. Anyone who can
        /// connect can read the metrics, so use an address on a trusted network. `rtrs-server
        /// metrics` prints the same.
        metrics: Option<MetricsAddress> = "",
        /// Log level: error, warn, info, debug, trace, or a filter by module
        ///
        /// An example of a filter is info,rtrs_server::engine=debug. The log goes to stderr.
        log: LogFilter = "info",
        /// Record connections, opens and refusals of clients in this file or in journald
        ///
        /// Each line is a JSON object with time, identity, address, export, mode and result.
        /// Without this setting, nothing is recorded.
        audit_log: Option<AuditLog> = "",
        /// Size at which the audit log is rotated
        ///
        /// As many lines as fit within this size are kept in FILE.1. A client cannot displace the
        /// lines of other clients.
        audit_log_max: ByteSize = "64M",
        /// Format of the log
        ///
        /// json is one object per line. journald is text with the priority at the start of each
        /// line, where systemd reads it, and without the time or level.
        log_format: LogFormat = "text",
    }
}

impl Settings {
    /// Parses the text of a configuration file, called `name` in errors. Empty text sets nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Config`], with name, line and remedy.
    pub fn from_yaml(text: &str, name: &str) -> Result<Self, Error> {
        settings_from_yaml(text, name)
    }

    /// Maximum number of connections without an open export.
    pub(crate) fn half_open_max(&self) -> u32 {
        let auto = (self.sessions_max.get() * 8).clamp(1024, 65536);
        self.half_open_max.get().map_or(auto, Int::get)
    }

    /// Adds the exports from the files in `exports-dir`, or in `exports.d` next to the
    /// configuration file, and records which directory was used. Returns the dangling links.
    ///
    /// # Errors
    /// `ErrorKind::ConfigFile` and `ErrorKind::Config`, with name, line and remedy.
    pub(crate) fn add_exports_of_dir(
        &mut self,
        config: Option<&Path>,
    ) -> Result<Vec<PathBuf>, Error> {
        let beside = || {
            config?.parent().map(|dir| dir.join(exports_dir::DEFAULT)).filter(|dir| dir.is_dir())
        };
        self.exports_dir = self.exports_dir.take().or_else(beside);
        let mut dangling = Vec::new();
        let Some(dir) = &self.exports_dir else { return Ok(dangling) };
        let mut names: BTreeMap<String, PathBuf> = BTreeMap::new();
        if let Some(config) = config {
            // An export without a usable name is refused later.
            let named = self.export.iter().filter_map(|spec| spec.resolved_name().ok());
            names.extend(named.map(|name| (name, config.to_owned())));
        }
        for file in exports_dir::files(dir)? {
            if exports_dir::leads_nowhere(&file) {
                dangling.push(file);
                continue;
            }
            for spec in exports_dir::read(&file)? {
                let name = spec.resolved_name().ok();
                if let Some(first) = name.as_ref().and_then(|name| names.get(name)) {
                    let name = name.unwrap_or_default();
                    let (first, file) = (first.display(), file.display());
                    let text = format!(
                        "two exports have the name {name:?}: in {first} and in {file}; remove or \
                         rename one"
                    );
                    return Err(Error::new(ErrorKind::Config, text));
                }
                names.extend(name.map(|name| (name, file.clone())));
                self.export.push(spec);
            }
        }
        Ok(dangling)
    }
}

#[cfg(test)]
mod tests;
