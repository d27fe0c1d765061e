//! Every setting of the server, declared once: flag, key of the YAML file, default, help.
//!
//! Owns [`Settings`]. A value that is wrong by itself is refused where it is read; what the values
//! mean together is judged in `plan.rs`.

#![allow(rustdoc::broken_intra_doc_links, reason = "flag help is plain text with brackets")]

mod export;
mod search;

pub use export::{BlockSize, ErrorRate, ExportSpec, Id, NAME_BYTES_MAX, Target};
pub use search::SearchSpec;

use std::path::PathBuf;

use rtrs_core::settings::{
    Auto, AutoSwitch, ByteSize, Int, LogFilter, MILLISECOND, MINUTE, Portal, Shards, Switch, Time,
    settings_from_yaml,
};

use crate::error::Error;

rtrs_core::settings! {
    /// What the server can be told.
    pub struct Settings {
        /// Export a file, a disk or memory, [NAME=]TARGET[,OPTION...]; repeatable
        ///
        /// TARGET is the path of a file or block device, mem:SIZE for memory, or null:SIZE for a
        /// device that forgets writes and reads as zeroes. NAME is what clients open; it is the
        /// file name (or "mem" or "null") if left out. OPTION is one of: ro;
        /// direct=auto|on|off (open past the page cache); block-size=auto|512|4096; delay=TIME
        /// (each request waits, as in 10ms); error-rate=FRACTION (so many requests fail, as in
        /// 0.001); id=ID (clients know the disk or file by this text instead of what the system
        /// knows of it). A backslash takes the meaning from the next character: write \, for a
        /// comma and \= for an equals sign in a name or path. In a configuration file each export
        /// may also be a map with the keys name, target, ro, direct, block-size, delay,
        /// error-rate and id, where nothing is escaped.
        export: Vec<ExportSpec> = "",
        /// Directory in which clients may open what is not exported by name, or off
        ///
        /// A client's name is a path below it, to a regular file or a block device; symbolic links
        /// may not lead out of it. If it ends with %SESSNAME%, as in /srv/%SESSNAME%, each session
        /// has the directory of its name. Anybody who can connect may open what is there.
        search_path: SearchSpec = "off",
        /// Listen on this portal, as in tcp://127.0.0.1:1234, or auto; repeatable
        ///
        /// A portal is SCHEME://HOST[:PORT] with the scheme tcp or rdma, IPv6 addresses in brackets
        /// and 1234 as default port; port 0 lets the system choose. tcp://[::] takes IPv6 and IPv4
        /// connections, tcp://0.0.0.0 only IPv4. rdma:// needs an InfiniBand or RoCE device, in
        /// software if need be. auto is tcp://[::]:1234, and rdma://[::]:1234 besides where the
        /// host has such a device; 0.0.0.0 where IPv6 is switched off.
        listen: Vec<Auto<Portal>> = "auto",
        /// Requests in flight per session
        ///
        /// Each path of a session holds queue-depth chunks of chunk-size bytes. Depth and chunk
        /// size share 28 bits: ceil(log2(queue-depth)) + log2(chunk-size) must not exceed 28.
        queue_depth: Int<u16, 1, 65535> = "512",
        /// Size of one request's buffer, a power of two from 8k to 16M
        ///
        /// The largest request is this less 4096 bytes; clients split larger ones.
        chunk_size: ByteSize = "256k",
        /// Threads that carry IO
        ///
        /// auto is one per allowed CPU. Each shard has its own io_uring and its own connections.
        shards: Shards = "auto",
        /// Bind each shard to a CPU
        ///
        /// auto binds on 8 CPUs or more, if there are no more shards than allowed CPUs.
        pin: AutoSwitch = "auto",
        /// Give each request a fresh memory key
        ///
        /// With on, a peer's key to a chunk dies with its request, so a late write cannot land in a
        /// chunk that moved on. Off saves a little time per request. RDMA devices need memory
        /// windows for on; those without refuse sessions until it is off.
        always_invalidate: Switch = "on",
        /// Ask for CRC32C on TCP connections
        ///
        /// This is the CRC of MPA frames (RFC 5044); it is used if either end asks for it.
        crc: Switch = "on",
        /// Silence before a heartbeat is sent
        ///
        /// A path is given up after heartbeat-missed-max further periods without a word, by default
        /// after about 3 s.
        heartbeat: Time<{ 10 * MILLISECOND }, { 10 * MINUTE }> = "500ms" was "heartbeat-ms",
        /// Periods a heartbeat may stay unanswered
        ///
        /// When more than this many are missed, the path is closed.
        heartbeat_missed_max: Int<u32, 1, 1000> = "5",
        /// Time a connecting peer has for its handshake
        ///
        /// Connections and half-open paths that take longer are closed.
        handshake_timeout: Time<{ 10 * MILLISECOND }, { 10 * MINUTE }> = "5s"
            was "handshake-timeout-ms",
        /// Connections that may be in their handshake at once
        ///
        /// Further ones are closed at once, and established sessions are not disturbed.
        half_open_max: Int<u32, 1, 65536> = "1024",
        /// Sessions at once
        ///
        /// Each path of a session takes queue-depth times chunk-size bytes of memory.
        sessions_max: Int<u32, 1, 65536> = "128",
        /// Time running requests have to finish on SIGTERM
        ///
        /// What still runs then is abandoned.
        shutdown_grace: Time<0, { 10 * MINUTE }> = "5s" was "shutdown-grace-ms",
        /// Longest time a busy shard polls before it sleeps
        ///
        /// The time adapts to the load up to this bound; 0 never polls. An idle shard sleeps.
        poll: Time<0, { 10 * MILLISECOND }> = "50us" was "poll-us",
        /// Answer pings only, and no sessions; exports are not opened
        ///
        /// For rtrs-client ping and doctor, and with --rping for rping -c. None need be named.
        ping_only: bool = "false",
        /// Answer no pings
        ///
        /// Without it pings (rtrs-client ping) are answered on every portal, at most 64 at once.
        no_ping: bool = "false",
        /// Answer rping -c as well, which connects without a word
        ///
        /// With --ping-only, listen: auto then means rping's port 7174. Data may have up to 1 MiB.
        rping: bool = "false",
        /// Name of this server for `session` and `drain`, or auto
        ///
        /// auto is the address it listens on first, as in 127.0.0.1:1234; the port alone if that is
        /// on every address. Two servers with one run directory need two names.
        name: Auto<Id> = "auto",
        /// What clients know this server by, 1 to 255 bytes, or auto
        ///
        /// auto is the host's /etc/machine-id, hashed. A session goes on only at the server that it
        /// began with: keep the id when a server moves to another host with its disks, and give two
        /// hosts with one machine id, or two servers on one host, one each.
        server_id: Auto<Id> = "auto",
        /// Keep the control socket here
        ///
        /// Without root and XDG_RUNTIME_DIR it is /tmp/rtrs-UID. If neither this nor a name is
        /// said, a server that cannot have a control socket warns and serves without.
        run_dir: Option<PathBuf> = "/run/rtrs, or $XDG_RUNTIME_DIR/rtrs without root",
        /// Keep here what outlives the server
        ///
        /// One number for each export of which a flush has failed. $STATE_DIRECTORY comes first;
        /// without root it is $XDG_STATE_HOME/rtrs, or ~/.local/state/rtrs. If it cannot be
        /// written, the server warns, and clients take each of its starts for a loss of what they
        /// had not flushed.
        state_dir: Option<PathBuf> = "/var/lib/rtrs; see below without root",
        /// What is logged, error, warn, info, debug, trace, or a filter by module
        ///
        /// A filter is a list such as info,rtrs_server::session=debug. It goes to stderr.
        log: LogFilter = "info",
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
