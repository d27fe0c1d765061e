//! The route to an address, as reported by the kernel over netlink (`RTM_GETROUTE`, `RTM_GETLINK`).
//! The answer is available when `send` returns, so nothing here waits.

use std::io;
use std::net::{self, IpAddr};

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::link::{LinkAttribute, LinkMessage, State};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

/// Buffer size: large enough for an interface with all its attributes.
const ANSWER_MAX: usize = 64 * 1024;
/// Maximum number of messages: an answer, its acknowledgment, and a margin.
const ANSWERS_MAX: usize = 8;

/// Route to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    /// Source address of packets.
    pub(super) source: Option<IpAddr>,
    /// Next hop; None if the peer is on the link.
    pub(super) gateway: Option<IpAddr>,
    /// Outgoing interface.
    pub(super) interface: String,
    /// Whether the interface is up and has a carrier.
    pub(super) up: bool,
    /// Maximum packet size of the route or the interface.
    pub(super) mtu: u32,
}

struct RouteSocket {
    socket: Socket,
    sequence: u32,
}

impl RouteSocket {
    fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_non_blocking(true)?;
        Ok(Self { socket, sequence: 0 })
    }

    fn request(&mut self, request: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        self.sequence += 1;
        let mut message = NetlinkMessage::from(request);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK;
        message.header.sequence_number = self.sequence;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        for _ in 0..ANSWERS_MAX {
            let mut bytes = Vec::with_capacity(ANSWER_MAX);
            self.socket.recv(&mut bytes, 0)?;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
                let length = (message.header.length as usize).next_multiple_of(4);
                rest = rest.get(length.max(4)..).unwrap_or_default();
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => return Ok(inner),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io());
                    }
                    _ => {}
                }
            }
        }
        Err(odd("no answer"))
    }
}

fn odd(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("unexpected answer from the kernel: {what}"))
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some((*v4).into()),
        RouteAddress::Inet6(v6) => Some((*v6).into()),
        _ => None,
    }
}

/// Returns the route to `remote`, from `local` if given. The port is ignored.
///
/// # Errors
/// Fails with the kernel's error, such as ENETUNREACH if there is no route.
pub(super) fn route(local: Option<IpAddr>, remote: net::SocketAddr) -> io::Result<Route> {
    let to = remote.ip();
    let mut kernel = RouteSocket::new()?;
    let mut request = RouteMessage::default();
    let bits = if remote.is_ipv4() { 32 } else { 128 };
    request.header.address_family =
        if remote.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    request.header.destination_prefix_length = bits;
    request.attributes.push(RouteAttribute::Destination(to.into()));
    if let net::SocketAddr::V6(v6) = remote
        && v6.scope_id() != 0
    {
        request.attributes.push(RouteAttribute::Oif(v6.scope_id()));
    }
    if let Some(local) = local {
        request.header.source_prefix_length = bits;
        request.attributes.push(RouteAttribute::Source(local.into()));
    }
    let answer = kernel.request(RouteNetlinkMessage::GetRoute(request))?;
    let RouteNetlinkMessage::NewRoute(found) = answer else { return Err(odd("no route")) };
    let (mut index, mut source, mut gateway, mut route_mtu) = (None, local, None, None);
    for attribute in &found.attributes {
        match attribute {
            RouteAttribute::Oif(oif) => index = Some(*oif),
            RouteAttribute::PrefSource(address) => source = source.or_else(|| ip(address)),
            RouteAttribute::Gateway(address) => gateway = ip(address),
            RouteAttribute::Metrics(metrics) => {
                route_mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) if *mtu > 0 => Some(*mtu),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    let index = index.ok_or_else(|| odd("no interface"))?;
    let mut request = LinkMessage::default();
    request.header.index = index;
    let answer = kernel.request(RouteNetlinkMessage::GetLink(request))?;
    let RouteNetlinkMessage::NewLink(link) = answer else { return Err(odd("no interface")) };
    let (mut interface, mut mtu, mut up) = (format!("interface {index}"), 0, true);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.clone_from(name),
            LinkAttribute::Mtu(bytes) => mtu = *bytes,
            LinkAttribute::OperState(state) => {
                // The state of lo is always unknown.
                up = matches!(state, State::Up | State::Unknown);
            }
            _ => {}
        }
    }
    Ok(Route { source, gateway, interface, up, mtu: route_mtu.unwrap_or(mtu).min(mtu) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOPBACK: net::SocketAddr =
        net::SocketAddr::new(IpAddr::V4(net::Ipv4Addr::LOCALHOST), 1234);

    #[test]
    fn the_route_to_this_host_is_the_loopback() {
        let found = route(None, LOOPBACK).unwrap();
        assert_eq!(found.interface, "lo");
        assert_eq!(found.source, Some([127, 0, 0, 1].into()));
        assert!(found.gateway.is_none() && found.up && found.mtu >= 1500, "{found:?}");
        let from = route(Some([127, 0, 0, 9].into()), LOOPBACK).unwrap();
        assert_eq!(from.source, Some([127, 0, 0, 9].into()));
    }

    #[test]
    fn an_unroutable_address_has_no_route() {
        // The source address is reserved for documentation, so no host has it.
        let error = route(Some([203, 0, 113, 77].into()), LOOPBACK).unwrap_err();
        assert!(error.raw_os_error().is_some(), "{error}");
    }
}
