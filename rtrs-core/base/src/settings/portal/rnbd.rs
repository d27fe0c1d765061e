//! Paths in the notation of the kernel's rnbd: `ip:10.0.0.1@ip:10.0.0.2`.
//!
//! The text after `path=` in the kernel's map_device, and after add_path, is accepted wherever a
//! portal is. It means `rdma://` on the default port, because rnbd specifies the port separately
//! (`dest_port=`). `@` or a comma separates source and destination; IPv6 addresses have no brackets
//! (kernel rtrs.c, rtrs_addr_to_sockaddr). InfiniBand GIDs are not IP addresses, which our
//! connections need, so they are refused with a hint.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Host, PORT_DEFAULT, Portal, Problem, Scheme, check_family, check_zone, is_name};
use crate::settings::error::ValueError;

/// Parses an rnbd path; `None` if the text is not one.
pub(super) fn parse(text: &str) -> Option<Result<Portal, ValueError>> {
    if !has_prefix(text, "ip:") && !has_prefix(text, "gid:") {
        return None;
    }
    let parts = text.split_once(',').or_else(|| text.split_once('@'));
    let (source, target) = match parts {
        Some((source, target)) => (Some(source), target),
        None => (None, text),
    };
    Some(
        portal(source, target)
            .map_err(|(problem, hint)| ValueError::new("portal", text, problem, hint)),
    )
}

const FORM: &str = "write ip:10.0.0.1@ip:10.0.0.2, or rdma://10.0.0.1@10.0.0.2:1234 for a port";

fn portal(source: Option<&str>, target: &str) -> Result<Portal, Problem> {
    let source = match source.map(address).transpose()? {
        Some((ip, _)) if ip.is_unspecified() => {
            return Err(("has the unspecified address as source".into(), FORM.into()));
        }
        Some((ip, zone)) => (Some(ip), zone),
        None => (None, None),
    };
    let (source, source_zone) = source;
    let (ip, zone) = address(target)?;
    if let Some(source) = source {
        check_family(source, ip)?;
    }
    let host = zone.map_or(Host::Ip(ip), |zone| Host::Name(format!("{ip}%{zone}")));
    check_zone(source_zone, &host)?;
    let source_zone = source_zone.map(str::to_owned);
    Ok(Portal { scheme: Scheme::Rdma, source, source_zone, host, port: PORT_DEFAULT })
}

/// An address with its prefix, and the zone of an IPv6 address.
fn address(text: &str) -> Result<(IpAddr, Option<&str>), Problem> {
    if has_prefix(text, "gid:") {
        let hint = "write the address of the device's network interface, as in ip:10.0.0.2; on \
                      InfiniBand, that of IPoIB";
        let problem = "names an InfiniBand GID, which is not supported".into();
        return Err((problem, hint.into()));
    }
    let Some(bare) = has_prefix(text, "ip:").then(|| &text[3..]) else {
        return Err((format!("has {text:?} without ip: in front"), FORM.into()));
    };
    let wrong = || (format!("has {bare:?}, which is not an IP address"), FORM.into());
    let (bare, zone) = match bare.split_once('%') {
        Some((bare, zone)) if is_name(zone) => (bare, Some(zone)),
        Some(_) => return Err(wrong()),
        None => (bare, None),
    };
    match (bare.parse::<Ipv4Addr>(), bare.parse::<Ipv6Addr>()) {
        (Ok(ip), _) if zone.is_none() => Ok((ip.into(), None)),
        (_, Ok(ip)) => Ok((ip.into(), zone)),
        _ => Err(wrong()),
    }
}

/// Whether the text begins with a prefix, in upper or lower case as in the kernel.
fn has_prefix(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnbd_forms_are_parsed() {
        for (text, same) in [
            ("ip:10.0.0.1@ip:10.0.0.2", "rdma://10.0.0.1@10.0.0.2:1234"),
            ("ip:10.0.0.1,ip:10.0.0.2", "rdma://10.0.0.1@10.0.0.2:1234"),
            ("ip:10.0.0.2", "rdma://10.0.0.2"),
            ("IP:10.0.0.2", "rdma://10.0.0.2"),
            ("ip:fd00::2", "rdma://[fd00::2]"),
            ("ip:fd00::1@ip:fd00::2", "rdma://[fd00::1]@[fd00::2]"),
            ("ip:fd00::1,ip:fd00::2", "rdma://[fd00::1]@[fd00::2]"),
            ("ip:fe80::2%eth0", "rdma://[fe80::2%eth0]"),
        ] {
            assert_eq!(text.parse::<Portal>().unwrap(), same.parse().unwrap(), "{text}");
        }
    }

    #[test]
    fn errors_suggest_the_correct_form() {
        for (text, part) in [
            ("gid:fe80::1", "names an InfiniBand GID, which is not supported; write the address"),
            ("ip:10.0.0.1@gid:fe80::1", "names an InfiniBand GID"),
            ("ip:", "which is not an IP address; write ip:10.0.0.1@ip:10.0.0.2, or rdma://"),
            ("ip:host", "has \"host\", which is not an IP address"),
            ("ip:10.0.0.2:1235", "has \"10.0.0.2:1235\", which is not an IP address; write"),
            ("ip:[fd00::1]", "which is not an IP address"),
            ("ip:10.0.0.1%eth0", "which is not an IP address"),
            ("ip:fe80::1%", "which is not an IP address"),
            ("ip:10.0.0.1@10.0.0.2", "has \"10.0.0.2\" without ip: in front"),
            ("ip:10.0.0.1@", "has \"\" without ip: in front"),
            ("ip:fe80::1%eth0@ip:fe80::2", "has the zone \"eth0\" in its source but not in"),
            ("ip:0.0.0.0@ip:10.0.0.2", "has the unspecified address as source"),
            (
                "ip:10.0.0.1@ip:fd00::2",
                "has an IPv4 source and an IPv6 destination; use addresses of one family",
            ),
            ("ip:10.0.0.1,ip:10.0.0.2,ip:10.0.0.3", "which is not an IP address"),
        ] {
            let error = text.parse::<Portal>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("portal {text:?} ")), "{error}");
            assert!(error.contains(part), "{error} lacks {part}");
        }
    }

    #[test]
    fn other_texts_are_ignored() {
        for text in ["", "ip", "rdma://10.0.0.2", "ip6:::1", "\u{e9}p:1", "tcp://ip:1"] {
            assert!(parse(text).is_none(), "{text}");
        }
    }
}
