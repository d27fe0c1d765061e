//! The client's own value types: access, policy, failover, handling of IO without a path, bench
//! mode, NBD address and device.
//!
//! Each parses from text, prints as text that parses back to it, and reads the same from a file.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Duration;

use nbd_bridge::TlsMode;
use nbd_bridge::kernel::DeviceChoice;
use rtrs_core::settings::{
    HOUR, MILLISECOND, Time, ValueError, choices, parse_address, text_values, write_address,
};

/// The port registered for NBD.
const NBD_PORT: u16 = 10809;

choices! {
    /// Access mode of an export (kernel rnbd-proto.h, `enum rnbd_access_mode`).
    pub enum Access as "access" {
        /// Read and write, or read only where the export is read-only.
        Auto = "auto",
        /// Read only; any number of sessions.
        Ro = "ro",
        /// Read and write; one session.
        Rw = "rw",
        /// Read and write alongside one other writer, while a virtual machine migrates.
        Migration = "migration",
    }
}

choices! {
    /// Path selection policy.
    #[derive(Default)]
    pub enum Policy as "policy" {
        /// Connected paths in turn.
        RoundRobin = "round-robin",
        /// Path with the fewest requests of this shard in flight; in turn on a tie.
        #[default]
        MinInflight = "min-inflight",
        /// Path with the fastest heartbeats; the first on a tie.
        MinLatency = "min-latency",
    }
}

choices! {
    /// When requests of a dead path are resent to a server without FENCE (a kernel's).
    #[derive(Default)]
    pub enum Failover as "failover" {
        /// Once this end of the path is closed, like the kernel client. A write that the server
        /// holds up may then land after newer ones.
        #[default]
        Fast = "fast",
        /// Once the path has reconnected, which a server admits only after the old connections and
        /// all their IO have ended.
        Strict = "strict",
    }
}

choices! {
    /// Handling of a request that exceeds the IO timeout on a path that is alive.
    #[derive(Default)]
    pub enum SlowIo as "slow-io" {
        /// Wait for the answer.
        #[default]
        Wait = "wait",
        /// Fail the request; its resources stay reserved until the server answers.
        Fail = "fail",
    }
}

choices! {
    /// Use of TLS by NBD clients over TCP.
    #[derive(Default)]
    pub enum NbdTls as "nbd-tls" {
        /// Not available.
        #[default]
        Off = "off",
        /// Optional.
        On = "on",
        /// Mandatory.
        Require = "require",
    }
}

impl NbdTls {
    /// Mode for the front end; None without TLS.
    #[must_use]
    pub const fn mode(self) -> Option<TlsMode> {
        match self {
            Self::Off => None,
            Self::On => Some(TlsMode::On),
            Self::Require => Some(TlsMode::Require),
        }
    }
}

choices! {
    /// IO pattern of `bench`.
    pub enum BenchMode as "rw" {
        /// Sequential reads.
        Read = "read",
        /// Sequential writes.
        Write = "write",
        /// Random reads.
        RandRead = "randread",
        /// Random writes.
        RandWrite = "randwrite",
        /// Random reads and writes.
        RandRw = "randrw",
    }
}

impl BenchMode {
    /// Whether the mode overwrites data on the export.
    #[must_use]
    pub const fn writes(self) -> bool {
        matches!(self, Self::Write | Self::RandWrite | Self::RandRw)
    }
}

/// Handling of IO while no path is connected: `queue`, `queue-for=60s` or `fail`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPath {
    /// IO waits.
    Queue,
    /// IO waits for at most this time without a connected path, 100 ms to 24 h. Afterwards all IO
    /// fails until a path returns.
    QueueFor(Duration),
    /// IO fails immediately.
    Fail,
}

impl FromStr for NoPath {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let problem = |problem: String| {
            let remedy = "use queue, queue-for=1m or fail";
            ValueError::new("no-path", text, problem, remedy)
        };
        let Some(time) = text.strip_prefix("queue-for") else {
            return match text {
                "queue" => Ok(Self::Queue),
                "fail" => Ok(Self::Fail),
                _ => Err(problem("is not valid".to_owned())),
            };
        };
        let time = time
            .strip_prefix(['=', ':', ' '])
            .ok_or_else(|| problem("has no time".to_owned()))?
            .trim_start();
        let time: Time<{ 100 * MILLISECOND }, { 24 * HOUR }> = time.parse()?;
        Ok(Self::QueueFor(time.get()))
    }
}

impl fmt::Display for NoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queue => f.write_str("queue"),
            Self::QueueFor(time) => write!(f, "queue-for={}", Time::<0>::new(*time)),
            Self::Fail => f.write_str("fail"),
        }
    }
}

/// Number of paths that an attach needs: at least 1, or `all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequirePaths {
    /// At least this number.
    Count(NonZeroUsize),
    /// All paths of the session.
    All,
}

impl RequirePaths {
    /// Returns the number of connected paths required in a session with `paths` paths.
    #[must_use]
    pub const fn of(self, paths: usize) -> usize {
        match self {
            Self::Count(count) => count.get(),
            Self::All => paths,
        }
    }
}

impl FromStr for RequirePaths {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if text == "all" {
            return Ok(Self::All);
        }
        text.parse().map(Self::Count).map_err(|_| {
            let remedy = "use all, or a number from 1";
            ValueError::new("require-paths", text, "is not a number of paths", remedy)
        })
    }
}

impl fmt::Display for RequirePaths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => count.fmt(f),
            Self::All => f.write_str("all"),
        }
    }
}

/// An address to serve NBD on: `127.0.0.1:10809`, `[::1]:10809`, `127.0.0.1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NbdAddress(SocketAddr);

impl NbdAddress {
    /// Wraps an address.
    #[must_use]
    pub const fn new(address: SocketAddr) -> Self {
        Self(address)
    }

    /// The address; port 0 lets the system choose.
    #[must_use]
    pub const fn get(self) -> SocketAddr {
        self.0
    }
}

impl FromStr for NbdAddress {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        parse_address(text)
            .or_else(|| parse_address(&format!("[{bare}]:{NBD_PORT}")))
            .or_else(|| bare.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, NBD_PORT)))
            .map(Self)
            .ok_or_else(|| {
                ValueError::new(
                    "address",
                    text,
                    "is not a numeric address",
                    "use ADDR:PORT, as in 127.0.0.1:10809 or [::1]:10809",
                )
            })
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_address(&self.0, f)
    }
}

/// A kernel block device: `/dev/nbd0`, `nbd0`, or `auto` for a free one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Device(DeviceChoice);

impl Device {
    /// Wraps a choice.
    #[must_use]
    pub const fn new(choice: DeviceChoice) -> Self {
        Self(choice)
    }

    /// The choice.
    #[must_use]
    pub const fn get(self) -> DeviceChoice {
        self.0
    }
}

impl FromStr for Device {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        text.parse().map(Self).map_err(|_| {
            ValueError::new(
                "device",
                text,
                "is not an NBD device",
                "use auto or a whole device such as /dev/nbd0",
            )
        })
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

text_values! {
    NoPath, "POLICY", "queue, queue-for=1m or fail";
    RequirePaths, "N", "a number of paths, or all";
    NbdAddress, "ADDR:PORT", "an address such as 127.0.0.1:10809";
    Device, "DEVICE", "a device such as /dev/nbd0, or auto";
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_are_parsed() {
        for (text, printed) in [
            ("127.0.0.1:10809", "127.0.0.1:10809"),
            ("127.0.0.1", "127.0.0.1:10809"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("[::1]:5", "[::1]:5"),
            ("[::1]", "[::1]:10809"),
            ("::1", "[::1]:10809"),
            ("[fe80::1%lo]:5", "[fe80::1%lo]:5"),
            ("[fe80::1%lo]", "[fe80::1%lo]:10809"),
        ] {
            assert_eq!(text.parse::<NbdAddress>().unwrap().to_string(), printed);
        }
        for text in ["", "localhost:10809", "127.0.0.1:", "127.0.0.1:65536", "tcp://127.0.0.1", "1"]
        {
            assert_eq!(
                text.parse::<NbdAddress>().unwrap_err().to_string(),
                format!(
                    "address {text:?} is not a numeric address; use ADDR:PORT, as in \
                     127.0.0.1:10809 or [::1]:10809"
                )
            );
        }
    }

    #[test]
    fn devices_are_parsed() {
        for (text, printed) in [("auto", "auto"), ("/dev/nbd3", "/dev/nbd3"), ("nbd3", "/dev/nbd3")]
        {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), printed);
            assert_eq!(printed.parse::<Device>(), text.parse());
        }
        assert_eq!(
            "/dev/sdb".parse::<Device>().unwrap_err().to_string(),
            "device \"/dev/sdb\" is not an NBD device; use auto or a whole device such as /dev/nbd0"
        );
    }

    #[test]
    fn policies_without_a_path_are_parsed() {
        for (text, printed) in [
            ("queue", "queue"),
            ("fail", "fail"),
            ("queue-for=60s", "queue-for=1m"),
            ("queue-for 5s", "queue-for=5s"),
            ("queue-for:1500ms", "queue-for=1500ms"),
        ] {
            let policy = text.parse::<NoPath>().unwrap();
            assert_eq!(policy.to_string(), printed);
            assert_eq!(printed.parse(), Ok(policy));
        }
        for (text, words) in [
            ("", "is not valid"),
            ("wait", "use queue, queue-for=1m or fail"),
            ("queue-for", "has no time"),
            ("queue-for=", "time"),
            ("queue-for=60", "has no unit; write 60s or 60ms"),
            ("queue-for=25h", "use 100ms to 24h"),
            ("queue-for=1ms", "use 100ms to 24h"),
        ] {
            let error = text.parse::<NoPath>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn values_print_as_they_are_read(address in any::<SocketAddr>()) {
            // The text form of an address has no flow label and no scope.
            let address = NbdAddress(SocketAddr::new(address.ip(), address.port()));
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,20}|[0-9:.\\[\\]]{0,20}") {
            let _ = text.parse::<NbdAddress>();
            let _ = text.parse::<NoPath>();
        }
    }
}
