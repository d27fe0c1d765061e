//! Numeric addresses with a port, whose IPv6 addresses may have a zone.

use std::fmt;
use std::fs;
use std::net::{Ipv6Addr, SocketAddr, ToSocketAddrs};

/// Parses `ADDR:PORT`. A zone is the name of an interface of this machine or its index, as in
/// `[fe80::1%eth0]:9823`. Returns None if the text is not such an address.
#[must_use]
pub fn parse_address(text: &str) -> Option<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Some(address);
    }
    let (inner, port) = text.strip_prefix('[')?.rsplit_once("]:")?;
    let (ip, _) = inner.split_once('%')?;
    // Numeric, so that the system resolves only the zone.
    ip.parse::<Ipv6Addr>().ok()?;
    (inner, port.parse().ok()?).to_socket_addrs().ok()?.next()
}

/// Writes an address in the form that [`parse_address`] reads, with the zone as an interface name.
///
/// # Errors
/// Returns the formatter's error.
pub fn write_address(address: &SocketAddr, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let zone = match address {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => interface(v6.scope_id()),
        _ => None,
    };
    match zone {
        Some(zone) => write!(f, "[{}%{zone}]:{}", address.ip(), address.port()),
        None => fmt::Display::fmt(address, f),
    }
}

/// Returns the name of the interface with this index.
fn interface(index: u32) -> Option<String> {
    fs::read_dir("/sys/class/net").ok()?.flatten().find_map(|entry| {
        let known = fs::read_to_string(entry.path().join("ifindex")).ok()?;
        (known.trim().parse() == Ok(index)).then(|| entry.file_name().into_string().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Printed(SocketAddr);

    impl fmt::Display for Printed {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write_address(&self.0, f)
        }
    }

    #[test]
    fn zones_are_names_of_interfaces() {
        for text in ["127.0.0.1:1", "[::1]:2", "[fe80::1%lo]:3", "[fe80::1%4294967295]:4"] {
            assert_eq!(Printed(parse_address(text).unwrap()).to_string(), text);
        }
        assert_eq!(parse_address("[fe80::1%1]:3"), parse_address("[fe80::1%lo]:3"));
        for text in ["", "lo", "[fe80::1%none]:3", "[host%lo]:3", "[fe80::1%lo]", "fe80::1%lo:3"] {
            assert_eq!(parse_address(text), None, "{text}");
        }
    }
}
