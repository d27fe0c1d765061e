//! Portals, the addresses of listeners and paths: `tcp://10.0.0.1@10.0.0.2:1234`.
//!
//! A [`Portal`] has a scheme, an optional source address, a destination host and a port. IPv6
//! addresses are written in brackets. The destination may be a host name, which
//! [`Portal::resolve`] converts to addresses later, so that parsing never waits.
//! [`Portal::check_listen`] and [`Portal::check_connect`] check the restrictions of listeners and
//! paths. The kernel's notation for paths is accepted too (`portal/rnbd.rs`).

mod rnbd;

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use super::error::ValueError;

/// Default port, the one that RTRS uses in the kernel (rnbd-proto.h, `RTRS_PORT`).
pub const PORT_DEFAULT: u16 = 1234;

/// Longest host name in characters (RFC 1035 section 3.1, without the root's dot).
const HOST_NAME_MAX: usize = 253;

crate::choices! {
    /// Fabric that carries the path.
    pub enum Scheme as "scheme" {
        /// iWARP in user space over plain TCP.
        Tcp = "tcp",
        /// iWARP in user space over TLS 1.3.
        Tls = "tls",
        /// An RDMA device through libibverbs.
        Rdma = "rdma",
    }
}

/// Destination of a portal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    /// An address.
    Ip(IpAddr),
    /// A host name, or an IPv6 address with a zone (`fe80::1%eth0`): resolved when needed.
    Name(String),
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => write_ip(f, *ip),
            Self::Name(name) if name.contains(':') => write!(f, "[{name}]"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Local address to connect from, with the interface if it is link-local: `fe80::1%eth0`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SourceAddress {
    ip: IpAddr,
    zone: Option<String>,
}

impl SourceAddress {
    /// Returns the address.
    #[must_use]
    pub const fn ip(&self) -> IpAddr {
        self.ip
    }
}

impl FromStr for SourceAddress {
    type Err = ValueError;

    /// Parses an IPv4 or IPv6 address, with or without brackets.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let is_bare_v6 = text.contains(':') && !text.starts_with('[');
        let bracketed = if is_bare_v6 { format!("[{text}]") } else { text.to_owned() };
        let parsed = parse_source(&bracketed);
        let hint = "write an address, as in 10.0.0.1 or fe80::1%eth0";
        let (ip, zone) =
            parsed.map_err(|problem| ValueError::new("source", text, problem, hint))?;
        Ok(Self { ip, zone })
    }
}

impl fmt::Display for SourceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ip)?;
        self.zone.as_ref().map_or(Ok(()), |zone| write!(f, "%{zone}"))
    }
}

/// Scheme, optional source address, destination and port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Portal {
    scheme: Scheme,
    source: Option<IpAddr>,
    /// Zone (interface) of the source, the same as the zone of the host.
    source_zone: Option<String>,
    host: Host,
    port: u16,
}

/// Error for a portal whose host has no usable address.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The system's resolver failed.
    #[error("cannot resolve host {host:?} of {portal}; check the name, or write an address")]
    Lookup {
        /// Host name.
        host: String,
        /// Portal of the host.
        portal: String,
        /// The resolver's error.
        #[source]
        source: io::Error,
    },
    /// The host has addresses, but none of the source address's family.
    #[error("host {host:?} of {portal} has no {family} address, which the source address requires")]
    Family {
        /// Host name.
        host: String,
        /// Portal of the host.
        portal: String,
        /// `IPv4` or `IPv6`.
        family: &'static str,
    },
}

impl Portal {
    /// Creates a portal to an address, without a source.
    #[must_use]
    pub const fn new(scheme: Scheme, address: SocketAddr) -> Self {
        Self {
            scheme,
            source: None,
            source_zone: None,
            host: Host::Ip(address.ip()),
            port: address.port(),
        }
    }

    /// Replaces the port.
    #[must_use]
    pub fn with_port(self, port: u16) -> Self {
        Self { port, ..self }
    }

    /// Returns the scheme.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Returns the local address to connect from, if given.
    #[must_use]
    pub const fn source(&self) -> Option<IpAddr> {
        self.source
    }

    /// Sets the source address.
    ///
    /// # Errors
    /// [`ValueError`] if its family or interface differs from the destination's.
    pub fn with_source(self, source: &SourceAddress) -> Result<Self, ValueError> {
        let SourceAddress { ip, zone } = source;
        let problem = match &self.host {
            Host::Ip(to) => check_family(*ip, *to),
            Host::Name(_) => Ok(()),
        };
        let problem = problem.and_then(|()| check_zone(zone.as_deref(), &self.host));
        problem.map_err(|(problem, hint)| {
            ValueError::new("portal", &self.to_string(), problem, hint)
        })?;
        Ok(Self { source: Some(*ip), source_zone: zone.clone(), ..self })
    }

    /// Returns the destination.
    #[must_use]
    pub const fn host(&self) -> &Host {
        &self.host
    }

    /// Returns the port; 0 only for a listener.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Checks that a listener can use the portal: it has no source address.
    ///
    /// # Errors
    /// [`ValueError`] naming the portal.
    pub fn check_listen(&self) -> Result<(), ValueError> {
        if self.source.is_some() {
            return Err(self.refuse(
                "has a source address, which a listener cannot use",
                format!("write {}://{}:{}", self.scheme, self.host, self.port),
            ));
        }
        Ok(())
    }

    /// Checks that a path can connect to the portal: port and address are specified.
    ///
    /// # Errors
    /// [`ValueError`] naming the portal.
    pub fn check_connect(&self) -> Result<(), ValueError> {
        if self.port == 0 {
            return Err(self.refuse(
                "has port 0, which only a listener may use",
                "write the server's port, or omit it for 1234",
            ));
        }
        if matches!(self.host, Host::Ip(ip) if ip.is_unspecified()) {
            return Err(self.refuse(
                "has the unspecified address as destination",
                "write the server's own address or name",
            ));
        }
        Ok(())
    }

    /// Returns the addresses of the host (at least one) in the resolver's order, limited to the
    /// source's family if there is a source. Blocks in the system's resolver if the host is a name,
    /// so it must not be called on the data path.
    ///
    /// # Errors
    /// [`ResolveError`], naming the host and the portal.
    pub fn resolve(&self) -> Result<Vec<SocketAddr>, ResolveError> {
        let name = match &self.host {
            Host::Ip(ip) => return Ok(vec![SocketAddr::new(*ip, self.port)]),
            Host::Name(name) => name,
        };
        let failed =
            |source| ResolveError::Lookup { host: name.clone(), portal: self.to_string(), source };
        let mut found: Vec<SocketAddr> =
            (name.as_str(), self.port).to_socket_addrs().map_err(failed)?.collect();
        if found.is_empty() {
            return Err(failed(io::Error::new(io::ErrorKind::NotFound, "no address found")));
        }
        if let Some(source) = self.source {
            found.retain(|address| address.is_ipv4() == source.is_ipv4());
            if found.is_empty() {
                return Err(ResolveError::Family {
                    host: name.clone(),
                    portal: self.to_string(),
                    family: family(source),
                });
            }
        }
        Ok(found)
    }

    fn refuse(&self, problem: &'static str, hint: impl Into<Cow<'static, str>>) -> ValueError {
        ValueError::new("portal", &self.to_string(), problem, hint)
    }
}

const fn family(ip: IpAddr) -> &'static str {
    if ip.is_ipv4() { "IPv4" } else { "IPv6" }
}

impl FromStr for Portal {
    type Err = ValueError;

    /// Parses `SCHEME://[SOURCE@]HOST[:PORT]`; the port defaults to [`PORT_DEFAULT`]. Also parses
    /// the kernel's `ip:SOURCE@ip:HOST` for `rdma://`.
    ///
    /// # Errors
    /// [`ValueError`] naming the part that is wrong.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        if let Some(of_rnbd) = rnbd::parse(text) {
            return of_rnbd;
        }
        parse(text).map_err(|(problem, hint)| ValueError::new("portal", text, problem, hint))
    }
}

/// Problem with a portal, and a hint.
type Problem = (String, Cow<'static, str>);

fn parse(text: &str) -> Result<Portal, Problem> {
    let Some((scheme, rest)) = text.split_once("://") else {
        let (scheme, rest) = intended(text);
        let hint = format!("write {scheme}://{}", rest.trim_start_matches('/'));
        return Err(("has no scheme".into(), hint.into()));
    };
    let Ok(scheme) = scheme.parse::<Scheme>() else {
        let problem = format!("has the unknown scheme {scheme:?}");
        return Err((problem, "use tcp://, tls:// or rdma://".into()));
    };
    let ((source, source_zone), target) = match rest.split_once('@') {
        None => ((None, None), rest),
        Some((source, target)) => {
            let (ip, zone) = parse_source(source).map_err(with(SOURCE_HINT))?;
            ((Some(ip), zone), target)
        }
    };
    let (host, port) = split_port(target).map_err(|problem| {
        (problem, format!("write {scheme}://HOST:PORT, with IPv6 in brackets").into())
    })?;
    let host = parse_host(host).map_err(with("write a host name, an IPv4 address or [IPv6]"))?;
    let digits = port.is_none_or(|port| port.bytes().all(|b| b.is_ascii_digit()));
    let port = match port.map_or(Ok(PORT_DEFAULT), str::parse) {
        Ok(number) if digits => number,
        _ => {
            let problem = format!("has the port {:?}", port.unwrap_or_default());
            return Err((problem, "use a port from 0 to 65535, or omit it for 1234".into()));
        }
    };
    if let (Some(source), Host::Ip(ip)) = (source, &host) {
        check_family(source, *ip)?;
    }
    check_zone(source_zone.as_deref(), &host)?;
    Ok(Portal { scheme, source, source_zone, host, port })
}

/// Returns the scheme and the rest of a text without `://`: `tcp:HOST` is `tcp` and `HOST`, and so
/// are `tcp:/HOST` and `tcp/HOST`.
fn intended(text: &str) -> (Scheme, &str) {
    let parts = text.split_once([':', '/']);
    let meant = parts.and_then(|(word, rest)| {
        let scheme = word.to_ascii_lowercase().parse().ok()?;
        Some((scheme, rest))
    });
    meant.unwrap_or((Scheme::Tcp, text))
}

const SOURCE_HINT: &str =
    "write the source as an address, as in tcp://10.0.0.1@10.0.0.2, with IPv6 in brackets";

fn with(hint: &'static str) -> impl Fn(String) -> Problem {
    move |problem| (problem, hint.into())
}

/// Refuses a source whose family differs from the destination's.
fn check_family(source: IpAddr, to: IpAddr) -> Result<(), Problem> {
    if source.is_ipv4() == to.is_ipv4() {
        return Ok(());
    }
    let problem = format!("has an {} source and an {} destination", family(source), family(to));
    Err((problem, "use addresses of one family".into()))
}

/// Refuses a source zone that differs from the destination's: both must be on the same link.
fn check_zone(source_zone: Option<&str>, host: &Host) -> Result<(), Problem> {
    let Some(zone) = source_zone else { return Ok(()) };
    let of_host = match host {
        Host::Ip(_) => None,
        Host::Name(name) if !name.contains(':') => return Ok(()),
        Host::Name(name) => name.split_once('%').map(|(_, zone)| zone),
    };
    if of_host == Some(zone) {
        return Ok(());
    }
    let problem = format!("has the zone {zone:?} in its source but not in its destination");
    Err((problem, format!("write it in both, as in [fe80::1%{zone}]@[fe80::2%{zone}]").into()))
}

/// Splits `HOST[:PORT]`; a host in brackets keeps them.
fn split_port(target: &str) -> Result<(&str, Option<&str>), String> {
    if target.starts_with('[') {
        let Some(close) = target.find(']') else { return Err("has no closing bracket".into()) };
        let (host, rest) = target.split_at(close + 1);
        return match rest.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if rest.is_empty() => Ok((host, None)),
            None => Err(format!("has {rest:?} after the bracket")),
        };
    }
    match target.split_once(':') {
        Some((_, port)) if port.contains(':') => {
            Err("has several colons, like an IPv6 address without brackets".into())
        }
        Some((host, port)) => Ok((host, Some(port))),
        None => Ok((target, None)),
    }
}

fn parse_source(source: &str) -> Result<(IpAddr, Option<String>), String> {
    let address = match source.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inner) => {
            let (address, zone) = parse_zone(inner)?;
            let zone = zone.map(str::to_owned);
            address.parse::<Ipv6Addr>().ok().map(|ip| (IpAddr::V6(ip), zone))
        }
        None => source.parse::<Ipv4Addr>().ok().map(|ip| (IpAddr::V4(ip), None)),
    };
    match address {
        Some((ip, _)) if ip.is_unspecified() => Err("has the unspecified address as source".into()),
        Some(address) => Ok(address),
        None => Err(format!("has the source {source:?}, which is not an address")),
    }
}

/// Splits an IPv6 address and its zone.
fn parse_zone(inner: &str) -> Result<(&str, Option<&str>), String> {
    match inner.split_once('%') {
        Some((address, zone)) if is_name(zone) => Ok((address, Some(zone))),
        Some((_, zone)) => Err(format!("has the zone {zone:?}, which is not an interface")),
        None => Ok((inner, None)),
    }
}

fn parse_host(host: &str) -> Result<Host, String> {
    if let Some(inner) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        let (address, zone) = parse_zone(inner)?;
        let Ok(ip) = address.parse::<Ipv6Addr>() else {
            return Err(format!("has {inner:?} in brackets, which is not an IPv6 address"));
        };
        return Ok(match zone {
            None => Host::Ip(ip.into()),
            Some(zone) => Host::Name(format!("{ip}%{zone}")),
        });
    }
    if host.is_empty() {
        return Err("has no host".into());
    }
    if let Ok(ip) = host.parse::<Ipv4Addr>() {
        return Ok(Host::Ip(ip.into()));
    }
    if !is_name(host) {
        return Err(format!("has the host {host:?}, which is neither a name nor an address"));
    }
    // Some resolvers interpret a name whose last label is a number as an address.
    let last = host.trim_end_matches('.').rsplit('.').next().unwrap_or(host);
    if last.is_empty() || last.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("has the host {host:?}, which is not an IPv4 address"));
    }
    Ok(Host::Name(host.to_owned()))
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= HOST_NAME_MAX
        && !text.starts_with('-')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'))
}

fn write_ip(f: &mut fmt::Formatter<'_>, ip: IpAddr) -> fmt::Result {
    match ip {
        IpAddr::V4(ip) => write!(f, "{ip}"),
        IpAddr::V6(ip) => write!(f, "[{ip}]"),
    }
}

impl fmt::Display for Portal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.scheme)?;
        match (self.source, &self.source_zone) {
            (Some(source), Some(zone)) => write!(f, "[{source}%{zone}]@")?,
            (Some(source), None) => {
                write_ip(f, source)?;
                f.write_str("@")?;
            }
            (None, _) => {}
        }
        write!(f, "{}:{}", self.host, self.port)
    }
}

crate::text_values! {
    Portal, "PORTAL", "a portal such as tcp://127.0.0.1:1234";
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn portal(text: &str) -> Portal {
        text.parse().unwrap()
    }

    fn refusal(text: &str) -> String {
        text.parse::<Portal>().unwrap_err().to_string()
    }

    #[test]
    fn every_form_is_parsed() {
        for (text, printed) in [
            ("tcp://127.0.0.1:1234", "tcp://127.0.0.1:1234"),
            ("tcp://127.0.0.1", "tcp://127.0.0.1:1234"),
            ("tcp://10.0.0.1@10.0.0.2:99", "tcp://10.0.0.1@10.0.0.2:99"),
            ("tcp://[::]:0", "tcp://[::]:0"),
            ("tcp://[fd00:0::1]@[fd00::2]", "tcp://[fd00::1]@[fd00::2]:1234"),
            ("tcp://[fe80::1%eth0]:7", "tcp://[fe80::1%eth0]:7"),
            ("tcp://[fe80::1%va]@[fe80::2%va]:7", "tcp://[fe80::1%va]@[fe80::2%va]:7"),
            ("tls://[fe80::1%va]@store", "tls://[fe80::1%va]@store:1234"),
            ("rdma://192.168.7.1", "rdma://192.168.7.1:1234"),
            ("tcp://store-1.example.org:4321", "tcp://store-1.example.org:4321"),
            ("tcp://10.0.0.1@store:1", "tcp://10.0.0.1@store:1"),
            ("tls://store", "tls://store:1234"),
        ] {
            assert_eq!(portal(text).to_string(), printed);
            assert_eq!(portal(printed), portal(text));
        }
        let parts = portal("rdma://10.0.0.1@10.0.0.2:7");
        assert_eq!(parts.scheme(), Scheme::Rdma);
        assert_eq!(parts.source(), Some(IpAddr::from([10, 0, 0, 1])));
        assert_eq!(parts.host(), &Host::Ip(IpAddr::from([10, 0, 0, 2])));
        assert_eq!(parts.port(), 7);
    }

    #[test]
    fn a_source_is_added_to_a_portal() {
        let with = |text: &str, source: &str| {
            let source: SourceAddress = source.parse().unwrap();
            portal(text).with_source(&source).map(|portal| portal.to_string())
        };
        for (text, source, printed) in [
            ("tcp://10.0.0.2", "10.0.0.1", "tcp://10.0.0.1@10.0.0.2:1234"),
            ("tcp://10.0.0.3@10.0.0.2", "10.0.0.1", "tcp://10.0.0.1@10.0.0.2:1234"),
            ("tcp://store:7", "fd00::1", "tcp://[fd00::1]@store:7"),
            ("tcp://[fe80::2%a]", "fe80::1%a", "tcp://[fe80::1%a]@[fe80::2%a]:1234"),
            ("tcp://[fe80::2%a]", "[fe80::1%a]", "tcp://[fe80::1%a]@[fe80::2%a]:1234"),
        ] {
            assert_eq!(with(text, source).as_deref(), Ok(printed));
        }
        for (text, source, problem) in [
            ("tcp://10.0.0.2", "fd00::1", "has an IPv6 source and an IPv4 destination"),
            ("tcp://[fe80::2%a]", "fe80::1%b", "has the zone \"b\" in its source"),
        ] {
            let error = with(text, source).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
        for (text, problem) in [("x", "is not an address"), ("fe80::1%", "not an interface")] {
            let error = text.parse::<SourceAddress>().unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("fe80::1%eth0"), "{error}");
        }
    }

    #[test]
    fn errors_name_the_invalid_part() {
        for (text, part) in [
            ("", "has no scheme; write tcp://"),
            ("127.0.0.1:1234", "has no scheme; write tcp://127.0.0.1:1234"),
            ("tcp:127.0.0.1:1234", "has no scheme; write tcp://127.0.0.1:1234"),
            ("rdma:/host", "has no scheme; write rdma://host"),
            ("TLS:[fd00::2]", "has no scheme; write tls://[fd00::2]"),
            ("tcp//host", "has no scheme; write tcp://host"),
            ("tcp.example:1", "has no scheme; write tcp://tcp.example:1"),
            ("http://x", "has the unknown scheme \"http\"; use tcp://, tls:// or rdma://"),
            ("TCP://x", "has the unknown scheme \"TCP\""),
            ("tcp://", "has no host;"),
            ("tcp://:1234", "has no host;"),
            ("tcp://a b", "has the host \"a b\", which is neither a name nor an address"),
            ("tcp://host/x", "has the host \"host/x\""),
            ("tcp://300.1.1.1", "has the host \"300.1.1.1\", which is not an IPv4 address"),
            ("tcp://10.0.0", "which is not an IPv4 address"),
            ("tcp://.", "which is not an IPv4 address"),
            ("tcp://::1:1234", "has several colons, like an IPv6 address without brackets"),
            ("tcp://[::1", "has no closing bracket"),
            ("tcp://[::1]x", "has \"x\" after the bracket"),
            ("tcp://[host]", "has \"host\" in brackets, which is not an IPv6 address"),
            ("tcp://[1.2.3.4]", "which is not an IPv6 address"),
            ("tcp://[fe80::1%]", "has the zone \"\""),
            ("tcp://h:", "has the port \"\"; use a port from 0 to 65535, or omit it for 1234"),
            ("tcp://h:65536", "has the port \"65536\""),
            ("tcp://h:+1", "has the port \"+1\""),
            ("tcp://h:x", "has the port \"x\""),
            ("tcp://@h", "has the source \"\", which is not an address"),
            ("tcp://src@h", "has the source \"src\", which is not an address; write the source as"),
            ("tcp://0.0.0.0@h", "has the unspecified address as source"),
            ("tcp://[::%lo]@h", "has the unspecified address as source"),
            ("tcp://[fe80::1%]@h", "has the zone \"\", which is not an interface"),
            ("tcp://[fe80::1%a]@[fe80::2]", "has the zone \"a\" in its source but not in its"),
            ("tcp://[fe80::1%a]@[fe80::2%b]", "write it in both, as in [fe80::1%a]@[fe80::2%a]"),
            (
                "tcp://10.0.0.1@[::1]",
                "has an IPv4 source and an IPv6 destination; use addresses of one family",
            ),
            ("tcp://1.1.1.1@2.2.2.2@h", "has the host \"2.2.2.2@h\""),
        ] {
            let error = refusal(text);
            assert!(error.starts_with(&format!("portal {text:?} ")), "{error}");
            assert!(error.contains(part), "{error} lacks {part}");
        }
        let long = format!("tcp://{}", "a".repeat(254));
        assert!(refusal(&long).contains("which is neither a name"), "{}", refusal(&long));
    }

    #[test]
    fn listeners_and_paths_differ() {
        assert_eq!(portal("tcp://[::]:0").check_listen(), Ok(()));
        assert_eq!(
            portal("tcp://10.0.0.1@10.0.0.2").check_listen().unwrap_err().to_string(),
            "portal \"tcp://10.0.0.1@10.0.0.2:1234\" has a source address, which a listener cannot \
             use; write tcp://10.0.0.2:1234"
        );
        assert_eq!(portal("tcp://10.0.0.1@10.0.0.2").check_connect(), Ok(()));
        assert_eq!(
            portal("tcp://h:0").check_connect().unwrap_err().to_string(),
            "portal \"tcp://h:0\" has port 0, which only a listener may use; write the server's \
             port, or omit it for 1234"
        );
        for text in ["tcp://0.0.0.0", "tcp://[::]"] {
            let error = portal(text).check_connect().unwrap_err().to_string();
            assert!(error.contains("has the unspecified address as destination"), "{error}");
        }
    }

    #[test]
    fn resolving_yields_addresses_or_names_the_host() {
        let found = portal("tcp://[::1]:5").resolve().unwrap();
        assert_eq!(found, ["[::1]:5".parse::<SocketAddr>().unwrap()]);
        let found = portal("tcp://localhost:5").resolve().unwrap();
        assert!(found.iter().all(|a| a.ip().is_loopback() && a.port() == 5), "{found:?}");
        // RFC 6761 section 6.4: names under "invalid" never resolve.
        let error = portal("tcp://no-such-host.invalid:5").resolve().unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot resolve host \"no-such-host.invalid\" of tcp://no-such-host.invalid:5; check \
             the name, or write an address"
        );
        assert!(std::error::Error::source(&error).is_some());
    }

    #[test]
    fn a_source_address_limits_the_family() {
        let found = portal("tcp://127.0.0.2@localhost:5").resolve().unwrap();
        assert!(!found.is_empty() && found.iter().all(SocketAddr::is_ipv4), "{found:?}");
    }

    fn any_host() -> impl Strategy<Value = Host> {
        prop_oneof![
            any::<Ipv4Addr>().prop_map(|ip| Host::Ip(ip.into())),
            any::<Ipv6Addr>().prop_map(|ip| Host::Ip(ip.into())),
            "[a-z][a-z0-9_-]{0,20}(\\.[a-z][a-z0-9-]{0,9}){0,3}".prop_map(Host::Name),
            (any::<Ipv6Addr>(), "[a-z]{1,5}[0-9.]{0,3}")
                .prop_map(|(ip, zone)| Host::Name(format!("{ip}%{zone}"))),
        ]
    }

    proptest! {
        #[test]
        fn printed_values_parse_back(
            tcp in any::<bool>(),
            source in proptest::option::of(any::<IpAddr>()),
            host in any_host(),
            port in any::<u16>(),
        ) {
            let scheme = if tcp { Scheme::Tcp } else { Scheme::Rdma };
            let source = source.filter(|source| {
                !source.is_unspecified()
                    && !matches!(host, Host::Ip(ip) if ip.is_ipv4() != source.is_ipv4())
            });
            let portal = Portal { scheme, source, source_zone: None, host, port };
            prop_assert_eq!(portal.to_string().parse(), Ok(portal));
        }

        #[test]
        fn parsing_never_panics(text in "\\PC{0,30}|tcp://[\\[\\]@:%.a-f0-9]{0,30}") {
            let _ = text.parse::<Portal>();
        }
    }
}
