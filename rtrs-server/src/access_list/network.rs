//! Networks in access rules: addresses and, for link-local ones, optionally the interface through
//! which the client must connect.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};

use ipnet::IpNet;

/// Problem with a text, and a hint.
type Problem = (String, String);

/// Addresses to which a rule applies.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Network {
    net: IpNet,
    zone: Option<Zone>,
}

/// Interface of a link-local network.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Zone {
    name: String,
    /// Index of the interface when the rule was read; None if no interface had this name. A
    /// recreated interface has a different index.
    index: Option<u32>,
}

impl Network {
    /// Parses an address or a network.
    pub(super) fn parse(text: &str) -> Result<Self, Problem> {
        let Some((address, rest)) = text.split_once('%') else {
            return Ok(Self { net: network(text)?, zone: None });
        };
        let (name, len) = match rest.split_once('/') {
            Some((name, len)) => (name, format!("/{len}")),
            None => (rest, String::new()),
        };
        let net = network(&format!("{address}{len}"))?;
        let is_link_local = matches!(net, IpNet::V6(net) if net.addr().is_unicast_link_local());
        if !is_link_local || net.prefix_len() < 10 {
            let problem = ", which has an interface but is not link-local".to_owned();
            let hint =
                format!("write {address}{len}; only addresses in fe80::/10 have an interface");
            return Err((problem, hint));
        }
        if name.is_empty() || name.contains(char::is_whitespace) {
            let problem = format!(", whose interface is {name:?}");
            return Err((problem, "write its name, as in fe80::%eth0/64".to_owned()));
        }
        Ok(Self { net, zone: Some(Zone { name: name.to_owned(), index: index(name) }) })
    }

    /// Whether a client with this address belongs to the network. `scope` is the index of the
    /// interface of a link-local address.
    pub(super) fn contains(&self, address: IpAddr, scope: u32) -> bool {
        let is_at = |zone: &Zone| zone.index == Some(scope);
        self.net.contains(&address.to_canonical()) && self.zone.as_ref().is_none_or(is_at)
    }

    /// Name of the network's interface, if no interface had this name when the rule was read.
    pub(super) fn missing_interface(&self) -> Option<&str> {
        let zone = self.zone.as_ref().filter(|zone| zone.index.is_none())?;
        Some(&zone.name)
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(zone) = &self.zone else { return self.net.fmt(f) };
        write!(f, "{}%{}/{}", self.net.addr(), zone.name, self.net.prefix_len())
    }
}

/// Returns the index of an interface.
fn index(name: &str) -> Option<u32> {
    // The system's address parser looks up interfaces.
    let address = format!("{}%{name}", Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));
    let mut found = (address.as_str(), 0).to_socket_addrs().ok()?;
    found.find_map(|address| match address {
        SocketAddr::V6(address) => Some(address.scope_id()).filter(|index| *index != 0),
        SocketAddr::V4(_) => None,
    })
}

/// Parses an address or a network without an interface.
fn network(text: &str) -> Result<IpNet, Problem> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(IpNet::from(address.to_canonical()));
    }
    let hint = "write an address or a network, as in 10.0.0.0/24 or fd00::/8".to_owned();
    let net = text.parse::<IpNet>().map_err(|_| (String::new(), hint))?;
    let whole = net.trunc();
    if whole.addr() != net.addr() {
        let problem = format!(", whose address has bits set beyond /{}", net.prefix_len());
        return Err((problem, format!("write {whole}, or {} for that address alone", net.addr())));
    }
    // IPv4 clients are compared as IPv4, even if they connected to an IPv6 socket.
    let mapped = match net {
        IpNet::V6(v6) => v6.addr().to_ipv4_mapped().zip(v6.prefix_len().checked_sub(96)),
        IpNet::V4(_) => None,
    };
    let mapped = mapped.and_then(|(address, len)| IpNet::new(address.into(), len).ok());
    Ok(mapped.unwrap_or(net))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_local_network_can_be_limited_to_an_interface() {
        let lo = index("lo").expect("every network namespace has lo");
        for (text, printed) in [
            ("fe80::%lo/64", "fe80::%lo/64"),
            ("fe80::1%lo", "fe80::1%lo/128"),
            ("fe80::/64", "fe80::/64"),
        ] {
            let net = Network::parse(text).unwrap();
            assert_eq!((net.to_string(), net.missing_interface()), (printed.to_owned(), None));
        }
        let at = |text: &str, scope| {
            Network::parse(text).unwrap().contains("fe80::1".parse().unwrap(), scope)
        };
        assert!(at("fe80::%lo/64", lo) && at("fe80::1%lo", lo) && at("fe80::/64", lo + 1));
        assert!(!at("fe80::%lo/64", lo + 1) && !at("fe80::%lo/64", 0) && !at("fe80::2%lo", lo));
        let missing = Network::parse("fe80::%none9/64").unwrap();
        assert_eq!(missing.missing_interface(), Some("none9"));
        assert!(!missing.contains("fe80::1".parse().unwrap(), 0));
    }

    #[test]
    fn an_interface_needs_a_link_local_network() {
        for (text, problem) in [
            ("fd00::%lo/64", "is not link-local"),
            ("fe80::%lo/9", "is not link-local"),
            ("::%lo/0", "is not link-local"),
            ("10.0.0.1%lo", "is not link-local"),
            ("fe80::%/64", "interface is \"\""),
        ] {
            let (found, _) = Network::parse(text).unwrap_err();
            assert!(found.contains(problem), "{text}: {found}");
        }
    }
}
