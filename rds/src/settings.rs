//! Every setting of `rds node`, declared once, with its flag, YAML key, default and help.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;

use rtrs_base::rt::random_number;
use rtrs_base::settings::{
    ByteSize, Field, Int, LogFilter, LogFormat, MILLISECOND, MINUTE, MetricsAddress, SECOND,
    Setting, SocketMode, Switch, Time, ValueError, Visitor, text_values,
};
use rtrs_base::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::node::NodeOptions;
use crate::proto::{Config, MESSAGE_COST, Tunable, Tuning};
use crate::wire::PAYLOAD_MAX;

/// Settings that can change while a node runs.
pub(crate) const CHANGEABLE: &[&str] = &[
    "log",
    "max-unacked-bytes",
    "max-unacked-packets",
    "reconnect-max",
    "reconnect-min",
    "tcp-rcvbuf",
    "tcp-sndbuf",
];

/// Address of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeAddress(pub IpAddr);

impl FromStr for NodeAddress {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse = |problem| {
            let hint = "use an IPv4 or IPv6 address of this host, as in 10.0.0.1";
            ValueError::new("address", text, problem, hint)
        };
        let address: IpAddr = text.parse().map_err(|_| refuse("is not an address"))?;
        let address = address.to_canonical();
        match Self::problem(address) {
            Some(problem) => Err(refuse(problem)),
            None => Ok(Self(address)),
        }
    }
}

impl NodeAddress {
    /// Returns the reason why no node can have this address, if there is one.
    pub(crate) fn problem(address: IpAddr) -> Option<&'static str> {
        let is_broadcast = address == IpAddr::V4(Ipv4Addr::BROADCAST);
        if address.is_unspecified() || address.is_multicast() || is_broadcast {
            return Some("is not the address of one node");
        }
        let is_link_local = matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
        is_link_local.then_some("is a link-local address, which is not supported")
    }
}

impl fmt::Display for NodeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

text_values! {
    NodeAddress, "ADDRESS", "an address such as 10.0.0.1";
}

rtrs_base::settings! {
    /// The settings of `rds node`.
    pub struct Settings {
        /// Address of this host for which to run a node; repeatable
        ///
        /// Each address is a node of its own, with its own connections and sockets. At least one is
        /// needed.
        address: Vec<NodeAddress> = "",
        /// Directory of the sockets at which nodes listen for users
        ///
        /// A node listens at ADDRESS.sock there. librds_preload.so and the commands of rds look for
        /// nodes in /run/rds, or in RDS_DIR. The directory is created if it does not exist.
        socket_dir: Option<PathBuf> = "$RDS_DIR, or /run/rds",
        /// Permissions of the sockets in socket-dir, in octal
        ///
        /// Anyone with write permission to the socket can use the node. 600 is the user of the node
        /// and root, 666 is everyone.
        socket_mode: SocketMode = "600",
        /// TCP port at which nodes listen for their peers
        ///
        /// All nodes of a network use 16385. Use another port on hosts whose kernel has rds_tcp
        /// loaded, which occupies 16385 in every network namespace, and redirect 16385 to it.
        listen_port: Int<u16, 1, 65535> = "16385",
        /// TCP port at which peers listen
        ///
        /// See listen-port.
        peer_port: Int<u16, 1, 65535> = "16385",
        /// Unacknowledged payload at which a socket must stop sending
        ///
        /// 128 to buffer-max. Also the longest message that a socket sends, if it is less than
        /// 1 MiB. A socket can ask for another size (SO_SNDBUF, which is doubled, as for kernel
        /// sockets).
        sndbuf: ByteSize = "104k",
        /// Unread payload of a socket above which peers must stop sending
        ///
        /// 128 to buffer-max, and at most port-memory. A socket can ask for another size
        /// (SO_RCVBUF, which is doubled).
        rcvbuf: ByteSize = "104k",
        /// Largest buffer size that a socket may request, for either direction
        ///
        /// At least sndbuf and rcvbuf, at most 1G.
        buffer_max: ByteSize = "64M",
        /// Limit on unread bytes of one socket, regardless of congestion
        ///
        /// From 1048704, a message of 1 MiB and its cost, to peer-memory. Messages beyond the limit
        /// are dropped and counted (recv_drop_no_memory). Peers that obey congestion do not reach
        /// this.
        port_memory: ByteSize = "64M",
        /// Limit on unread bytes from one peer
        ///
        /// From port-memory to memory-max. Messages beyond the limit are dropped and counted.
        peer_memory: ByteSize = "128M",
        /// Limit on the bytes of messages in a node, in each direction
        ///
        /// At least peer-memory. Counts received messages until they are read, and sent messages
        /// until they are acknowledged. Messages that peers send beyond the limit are dropped and
        /// counted. Local senders wait. The sockets of one user ID can use three quarters of the
        /// memory that the sockets of other users leave free.
        memory_max: ByteSize = "256M",
        /// Maximum number of sockets of a node
        sockets_max: Int<u32, 1, 65535> = "4096",
        /// Maximum number of peers of a node
        ///
        /// A new peer replaces the oldest peer that has never sent a valid message, or that is
        /// disconnected with nothing queued. Without such a peer, sending to further peers fails
        /// with ENOMEM.
        peers_max: Int<u32, 1, 65535> = "1024",
        /// Connections to each peer
        ///
        /// Each socket sends over one of the connections, so a broken connection delays only some
        /// sockets. The smaller number of the two nodes applies. Other peers, such as kernels, get
        /// one connection.
        paths: Int<u32, 1, 8> = "1",
        /// Longest wait before the second attempt to connect to a peer
        ///
        /// The first attempt is immediate. Waits are random, and their upper limit doubles with
        /// each attempt, up to reconnect-max. `rds node set` changes both settings while a node
        /// runs.
        reconnect_min: Time<MILLISECOND, { 10 * MINUTE }> = "1ms",
        /// Longest wait between two attempts to connect to a peer
        reconnect_max: Time<MILLISECOND, { 10 * MINUTE }> = "1s",
        /// Unacknowledged messages at which a node checks for acknowledgments after each write
        ///
        /// Below this limit and max-unacked-bytes, and while no program waits, a node checks every
        /// 10 to 100 ms which data a peer has acknowledged. Can change while a node runs.
        max_unacked_packets: Int<u32, 1, 1000000> = "8",
        /// Unacknowledged bytes at which a node checks for acknowledgments after each write
        ///
        /// See max-unacked-packets. Can change while a node runs.
        max_unacked_bytes: ByteSize = "64k",
        /// Send buffer of each TCP connection (SO_SNDBUF); 0 lets the system choose
        ///
        /// At most 1G, and net.core.wmem_max; the system doubles the value. Can change while a node
        /// runs, for all connections; 0 then applies to new ones.
        tcp_sndbuf: ByteSize = "0",
        /// Receive buffer of each TCP connection (SO_RCVBUF); 0 lets the system choose
        ///
        /// See tcp-sndbuf; the limit is net.core.rmem_max.
        tcp_rcvbuf: ByteSize = "0",
        /// Time limit for an attempt to connect
        connect_timeout: Time<{ 10 * MILLISECOND }, { 10 * MINUTE }> = "10s",
        /// Time that a peer may leave data unacknowledged before its connection ends
        ///
        /// On an idle connection, a silent peer is detected after 30 s, as in the kernel.
        dead_after: Time<SECOND, { 60 * MINUTE }> = "30s",
        /// Answer pings of other nodes
        ///
        /// Probes, with which kernels query the number of connections, are always answered.
        ping: Switch = "on",
        /// Longest time that a busy node polls before it sleeps
        ///
        /// The time adapts to the load, up to this limit. 0 disables polling. An idle node always
        /// sleeps.
        poll: Time<0, { 10 * MILLISECOND }> = "200us",
        /// Answer GET /metrics here, for Prometheus: ADDR:PORT or unix:/PATH
        ///
        /// With port 0, the system chooses a port, which is written to the log. Anyone who can
        /// connect can read the metrics, so use an address on a trusted network.
        metrics: Option<MetricsAddress> = "",
        /// Log level: error, warn, info, debug, trace, or a filter by module
        ///
        /// The log goes to stderr.
        log: LogFilter = "info",
        /// Format of the log
        ///
        /// json is one object per line. journald is text with the priority at the start of each
        /// line.
        log_format: LogFormat = "text",
    }
}

impl Settings {
    /// Converts the settings into the options of a node with this address.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for settings that conflict.
    pub fn options(&self, address: IpAddr) -> Result<NodeOptions, Error> {
        self.check_sizes_and_times()?;
        let tuning = Tuning::default();
        for (tunable, value) in self.tunables() {
            tuning.set(tunable, value);
        }
        let config = Config {
            tuning,
            sndbuf: bytes(self.sndbuf),
            rcvbuf: bytes(self.rcvbuf),
            buffer_max: bytes(self.buffer_max),
            port_memory: bytes(self.port_memory),
            peer_memory: bytes(self.peer_memory),
            memory: bytes(self.memory_max),
            sockets_max: self.sockets_max.get() as usize,
            peers_max: self.peers_max.get() as usize,
            paths: self.paths.get() as usize,
            connect_timeout: self.connect_timeout.get(),
            ping: self.ping.is_on(),
            seed: random_number(),
            ..NodeOptions::new(address).config
        };
        Ok(NodeOptions {
            config,
            listen_port: self.listen_port.get(),
            peer_port: self.peer_port.get(),
            dead_after: self.dead_after.get(),
            poll: self.poll.get(),
        })
    }

    /// Returns the values of the settings that can change while a node runs.
    pub(crate) fn tunables(&self) -> [(Tunable, u64); 6] {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        [
            (Tunable::ReconnectMin, nanos(self.reconnect_min.get())),
            (Tunable::ReconnectMax, nanos(self.reconnect_max.get())),
            (Tunable::MaxUnackedPackets, self.max_unacked_packets.get().into()),
            (Tunable::MaxUnackedBytes, self.max_unacked_bytes.bytes()),
            (Tunable::TcpSndbuf, self.tcp_sndbuf.bytes()),
            (Tunable::TcpRcvbuf, self.tcp_rcvbuf.bytes()),
        ]
    }

    /// Returns the settings with these changes (values by name) applied.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for a setting that cannot change, an invalid value, or settings that
    /// conflict.
    pub(crate) fn changed(&self, changes: &BTreeMap<String, String>) -> Result<Self, Error> {
        struct Change<'a>(&'a BTreeMap<String, String>, Result<(), String>);
        impl Visitor for Change<'_> {
            fn setting<F: Field>(&mut self, setting: &Setting, value: &mut F) {
                let Some(text) = self.0.get(&setting.name) else { return };
                match F::parse(text) {
                    Ok(new) => *value = new,
                    Err(error) => self.1 = Err(format!("{}: {error}", setting.name)),
                }
            }

            fn section<S: rtrs_base::settings::Settings>(&mut self, _: &'static str, _: &mut S) {}
        }
        let usage = |text| Error::new(ErrorKind::Usage, text);
        if let Some(name) = changes.keys().find(|name| !CHANGEABLE.contains(&name.as_str())) {
            let text =
                format!("{name} cannot change while a node runs; {} can", CHANGEABLE.join(", "));
            return Err(usage(text));
        }
        let mut settings = self.clone();
        let mut change = Change(changes, Ok(()));
        rtrs_base::settings::Settings::visit(&mut settings, &mut change);
        change.1.map_err(usage)?;
        settings.check_sizes_and_times()?;
        Ok(settings)
    }

    /// Checks that sizes and times are consistent.
    fn check_sizes_and_times(&self) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::new(ErrorKind::Usage, text));
        for (name, size) in [("sndbuf", self.sndbuf), ("rcvbuf", self.rcvbuf)] {
            if bytes(size) < MESSAGE_COST || size > self.buffer_max {
                return refuse(format!(
                    "{name} {size} is out of range; use {MESSAGE_COST} to {} (buffer-max)",
                    self.buffer_max
                ));
            }
        }
        for (name, size) in [("tcp-sndbuf", self.tcp_sndbuf), ("tcp-rcvbuf", self.tcp_rcvbuf)] {
            if bytes(size) > 1 << 30 {
                return refuse(format!("{name} {size} is out of range; use up to 1G"));
            }
        }
        // Users keep the used size of a buffer in 32 bits.
        if bytes(self.buffer_max) > 1 << 30 {
            let size = self.buffer_max;
            return refuse(format!("buffer-max {size} is out of range; use up to 1G"));
        }
        // With less, a message of this length would never arrive.
        let least = MESSAGE_COST + PAYLOAD_MAX;
        for (name, size) in [
            ("port-memory", self.port_memory),
            ("peer-memory", self.peer_memory),
            ("memory-max", self.memory_max),
        ] {
            if bytes(size) < least {
                return refuse(format!(
                    "{name} {size} is out of range; use {least} or more, to hold a message of 1 MiB"
                ));
            }
        }
        let limits = [
            ("port-memory", self.port_memory, "peer-memory", self.peer_memory),
            ("peer-memory", self.peer_memory, "memory-max", self.memory_max),
            ("rcvbuf", self.rcvbuf, "port-memory", self.port_memory),
        ];
        for (small, one, large, other) in limits {
            if one > other {
                return refuse(format!(
                    "{small} {one} is more than {large} {other}; lower {small} or raise {large}"
                ));
            }
        }
        if self.reconnect_min > Time::new(self.reconnect_max.get()) {
            return refuse(format!(
                "reconnect-min {} is more than reconnect-max {}; lower reconnect-min or raise \
                 reconnect-max",
                self.reconnect_min, self.reconnect_max
            ));
        }
        Ok(())
    }
}

/// Returns the length of a buffer.
fn bytes(size: ByteSize) -> usize {
    usize::try_from(size.bytes()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_addresses_are_validated() {
        for text in ["10.0.0.1", "fd00::1"] {
            assert_eq!(text.parse::<NodeAddress>().unwrap().to_string(), text);
        }
        assert_eq!("::ffff:10.0.0.1".parse::<NodeAddress>().unwrap().to_string(), "10.0.0.1");
        for (text, part) in [
            ("host", "is not an address"),
            ("10.0.0.1:5", "is not an address"),
            ("0.0.0.0", "is not the address of one node"),
            ("255.255.255.255", "is not the address of one node"),
            ("fe80::1", "is a link-local address, which is not supported"),
            ("ff02::1", "is not the address of one node"),
        ] {
            let error = text.parse::<NodeAddress>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("address {text:?} {part}; use ")), "{error}");
        }
    }

    #[test]
    fn only_some_settings_can_change_and_changes_are_atomic() {
        let settings = Settings::default();
        let change = |pairs: &[(&str, &str)]| {
            let pair = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            settings.changed(&pairs.iter().map(pair).collect())
        };
        let changed = change(&[("reconnect-max", "5s"), ("tcp-sndbuf", "1M")]).unwrap();
        assert_eq!(changed.reconnect_max.to_string(), "5s");
        let value = |tunable| {
            changed
                .tunables()
                .into_iter()
                .find_map(|(known, value)| (known == tunable).then_some(value))
        };
        assert_eq!(value(Tunable::ReconnectMax), Some(5_000_000_000));
        assert_eq!(value(Tunable::TcpSndbuf), Some(1 << 20));
        for (pairs, text) in [
            (&[("paths", "2")][..], "paths cannot change while a node runs; log, max-unacked-"),
            (&[("tcp-rcvbuf", "4G")], "tcp-rcvbuf 4G is out of range; use up to 1G"),
            (&[("reconnect-max", "5")], "reconnect-max: time \"5\" has no unit"),
            (&[("reconnect-max", "5ms"), ("reconnect-min", "6ms")], "reconnect-min 6ms is more"),
        ] {
            let error = change(pairs).unwrap_err().to_string();
            assert!(error.starts_with(text), "{error}");
        }
    }

    #[test]
    fn defaults_are_consistent_and_conflicts_are_refused() {
        let address = [10, 0, 0, 1].into();
        let options = Settings::default().options(address).unwrap();
        assert_eq!(options.config.sndbuf, Config::new(address, 1, 1).sndbuf);
        let with = |change: &dyn Fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.options(address).unwrap_err().to_string()
        };
        let size = |text: &str| text.parse().unwrap();
        let error = with(&|s| s.sndbuf = size("65M"));
        assert_eq!(error, "sndbuf 65M is out of range; use 128 to 64M (buffer-max)");
        let error = with(&|s| s.buffer_max = size("2G"));
        assert_eq!(error, "buffer-max 2G is out of range; use up to 1G");
        let error = with(&|s| s.port_memory = size("1G"));
        let text = "port-memory 1G is more than peer-memory 128M; lower port-memory or raise \
                    peer-memory";
        assert_eq!(error, text);
        let error = with(&|s| s.memory_max = size("1M"));
        let text = "memory-max 1M is out of range; use 1048704 or more, to hold a message of 1 MiB";
        assert_eq!(error, text);
        let error = with(&|s| s.reconnect_min = "2s".parse().unwrap());
        let text = "reconnect-min 2s is more than reconnect-max 1s; lower reconnect-min or raise \
                    reconnect-max";
        assert_eq!(error, text);
    }
}
