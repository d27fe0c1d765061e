//! The client's own value types: access, policy, bench mode, NBD address, device, run time, and
//! numbers that may be left to the program.
//!
//! Each parses from text, prints a text that parses back, and reads the same from a file.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use clap::ValueEnum;
use nbd_bridge::kernel::DeviceChoice;
use rtrs_core::config::{Millis, TimeUnit, ValueError, deserialize_text};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The port registered for NBD.
const NBD_PORT: u16 = 10809;

/// How an export is opened (kernel rnbd-proto.h, `enum rnbd_access_mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Read and write, or read only where the export is read-only.
    Auto,
    /// Read only; any number of sessions.
    Ro,
    /// Read and write; one session.
    Rw,
    /// Read and write besides one other writer, while a virtual machine moves.
    Migration,
}

/// How a session picks the path of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Each connected path in turn.
    RoundRobin,
    /// The path with the fewest requests in flight.
    MinInflight,
    /// The path whose last heartbeat was answered soonest.
    MinLatency,
}

/// When requests of a dead path are sent again at a server that cannot fence it off, which is
/// every kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Failover {
    /// At once, as the kernel's client does: a write that the server held up may land late.
    Fast,
    /// When the path has been connected again, which proves that nothing of the old one is left.
    Strict,
}

/// What happens to IO while no path is connected: `queue`, `queue-for=60s` or `fail`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NoPath {
    /// It waits for ever.
    Queue,
    /// It waits until no path has been connected for so long, 100 ms to 24 h.
    QueueFor(RunTime),
    /// It ends with an error at once.
    Fail,
}

impl FromStr for NoPath {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let problem = |problem: String| {
            let remedy = "use queue, queue-for=60s or fail";
            ValueError::new("no-path", text, problem, remedy)
        };
        let Some(time) = text.strip_prefix("queue-for") else {
            return match text {
                "queue" => Ok(Self::Queue),
                "fail" => Ok(Self::Fail),
                _ => Err(problem("is no such policy".to_owned())),
            };
        };
        let time = time
            .strip_prefix(['=', ':', ' '])
            .ok_or_else(|| problem("names no time".to_owned()))?
            .trim_start();
        let time: RunTime = time.parse()?;
        if !(100..=86_400_000).contains(&time.millis()) {
            return Err(problem(format!("waits for {time}, which is not 100ms to 24h")));
        }
        Ok(Self::QueueFor(time))
    }
}

impl fmt::Display for NoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queue => f.write_str("queue"),
            Self::QueueFor(time) => write!(f, "queue-for={time}"),
            Self::Fail => f.write_str("fail"),
        }
    }
}

impl Serialize for NoPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for NoPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "queue, queue-for=60s or fail")
    }
}

/// A number, or `auto`: the program decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AutoNumber {
    /// The program decides.
    Auto,
    /// This one.
    Is(u64),
}

impl AutoNumber {
    /// The number, unless the program decides.
    #[must_use]
    pub const fn number(self) -> Option<u64> {
        match self {
            Self::Auto => None,
            Self::Is(number) => Some(number),
        }
    }
}

impl From<Option<u64>> for AutoNumber {
    fn from(number: Option<u64>) -> Self {
        number.map_or(Self::Auto, Self::Is)
    }
}

impl FromStr for AutoNumber {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|_| digits).map(Self::Is).ok_or_else(|| {
            ValueError::new("number", text, "is neither auto nor a number", "use auto or digits")
        })
    }
}

impl fmt::Display for AutoNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Is(number) => write!(f, "{number}"),
        }
    }
}

impl Serialize for AutoNumber {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Is(number) => serializer.serialize_u64(*number),
        }
    }
}

impl<'de> Deserialize<'de> for AutoNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "auto or a number")
    }
}

/// What `bench` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lower")]
pub enum BenchMode {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Random reads.
    RandRead,
    /// Random writes.
    RandWrite,
    /// Random reads and writes.
    RandRw,
}

impl BenchMode {
    /// Whether the mode changes what is on the export.
    #[must_use]
    pub const fn writes(self) -> bool {
        matches!(self, Self::Write | Self::RandWrite | Self::RandRw)
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
        text.parse::<SocketAddr>()
            .or_else(|_| bare.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, NBD_PORT)))
            .map(Self)
            .map_err(|_| {
                ValueError::new(
                    "address",
                    text,
                    "is no numeric address",
                    "use ADDR:PORT, as in 127.0.0.1:10809 or [::1]:10809",
                )
            })
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for NbdAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for NbdAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "an address such as 127.0.0.1:10809")
    }
}

/// A block device of the kernel: `/dev/nbd0`, `nbd0`, or `auto` for a free one.
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
                "is no NBD device",
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

impl Serialize for Device {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Device {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a device such as /dev/nbd0, or auto")
    }
}

/// How long a bench runs; a number without a unit is in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RunTime(Millis);

impl RunTime {
    /// A run of `secs` seconds.
    #[must_use]
    pub const fn from_secs(secs: u32) -> Self {
        Self(Millis::new(secs as u64 * 1000))
    }

    /// The time in milliseconds.
    #[must_use]
    pub const fn millis(self) -> u64 {
        self.0.get()
    }

    pub(crate) const fn from_millis(millis: u64) -> Self {
        Self(Millis::new(millis))
    }
}

impl FromStr for RunTime {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        Millis::parse(text, TimeUnit::Seconds).map(Self)
    }
}

impl fmt::Display for RunTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for RunTime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RunTime {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a time such as 10s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses() {
        for (text, printed) in [
            ("127.0.0.1:10809", "127.0.0.1:10809"),
            ("127.0.0.1", "127.0.0.1:10809"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("[::1]:5", "[::1]:5"),
            ("[::1]", "[::1]:10809"),
            ("::1", "[::1]:10809"),
        ] {
            assert_eq!(text.parse::<NbdAddress>().unwrap().to_string(), printed);
        }
        for text in ["", "localhost:10809", "127.0.0.1:", "127.0.0.1:65536", "tcp://127.0.0.1", "1"]
        {
            assert_eq!(
                text.parse::<NbdAddress>().unwrap_err().to_string(),
                format!(
                    "address {text:?} is no numeric address; use ADDR:PORT, as in \
                     127.0.0.1:10809 or [::1]:10809"
                )
            );
        }
    }

    #[test]
    fn devices() {
        for (text, printed) in [("auto", "auto"), ("/dev/nbd3", "/dev/nbd3"), ("nbd3", "/dev/nbd3")]
        {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), printed);
            assert_eq!(printed.parse::<Device>(), text.parse());
        }
        assert_eq!(
            "/dev/sdb".parse::<Device>().unwrap_err().to_string(),
            "device \"/dev/sdb\" is no NBD device; use auto or a whole device such as /dev/nbd0"
        );
    }

    #[test]
    fn run_times_are_in_seconds() {
        assert_eq!("10".parse(), Ok(RunTime::from_secs(10)));
        assert_eq!("1m".parse(), Ok(RunTime::from_secs(60)));
        assert_eq!("1500ms".parse::<RunTime>().map(RunTime::millis), Ok(1500));
        let error = "soon".parse::<RunTime>().unwrap_err().to_string();
        assert!(error.starts_with("time \"soon\" does not begin with a digit"), "{error}");
    }

    #[test]
    fn policies_without_a_path() {
        for (text, printed) in [
            ("queue", "queue"),
            ("fail", "fail"),
            ("queue-for=60s", "queue-for=1m"),
            ("queue-for 5", "queue-for=5s"),
            ("queue-for:1500ms", "queue-for=1500ms"),
        ] {
            let policy = text.parse::<NoPath>().unwrap();
            assert_eq!(policy.to_string(), printed);
            assert_eq!(printed.parse(), Ok(policy));
        }
        for (text, words) in [
            ("", "is no such policy"),
            ("wait", "use queue, queue-for=60s or fail"),
            ("queue-for", "names no time"),
            ("queue-for=", "time"),
            ("queue-for=25h", "not 100ms to 24h"),
            ("queue-for=1ms", "not 100ms to 24h"),
        ] {
            let error = text.parse::<NoPath>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn numbers_may_be_left_to_the_program() {
        for (text, number) in [("auto", None), ("0", Some(0)), ("250", Some(250))] {
            let parsed = text.parse::<AutoNumber>().unwrap();
            assert_eq!((parsed.number(), parsed.to_string().as_str()), (number, text));
            assert_eq!(AutoNumber::from(number), parsed);
        }
        for text in ["", "-1", "+1", "1.5", "often", "99999999999999999999"] {
            let error = text.parse::<AutoNumber>().unwrap_err().to_string();
            assert!(error.ends_with("use auto or digits"), "{error}");
        }
    }

    #[test]
    fn flags_and_keys_spell_alike() {
        fn check<T: ValueEnum + Serialize>() {
            for value in T::value_variants() {
                let flag = value.to_possible_value().unwrap();
                assert_eq!(serde_json::to_value(value).unwrap(), flag.get_name());
            }
        }
        check::<Access>();
        check::<Policy>();
        check::<Failover>();
        check::<BenchMode>();
    }

    proptest! {
        #[test]
        fn print_what_they_read(address in any::<SocketAddr>(), secs in any::<u32>()) {
            // Flow and scope have no place in the text of the library's address.
            let address = NbdAddress(SocketAddr::new(address.ip(), address.port()));
            prop_assert_eq!(address.to_string().parse(), Ok(address));
            let time = RunTime::from_secs(secs);
            prop_assert_eq!(time.to_string().parse(), Ok(time));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,20}|[0-9:.\\[\\]]{0,20}") {
            let _ = text.parse::<NbdAddress>();
            let _ = text.parse::<RunTime>();
        }
    }
}
