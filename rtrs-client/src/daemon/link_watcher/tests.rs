//! Tests of which kernel messages count as changes, and of stopping the thread.

use std::net::Ipv4Addr;
use std::sync::mpsc;

use netlink_packet_route::route::{RouteAddress, RouteAttribute};

use super::*;

fn bytes_of(inner: RouteNetlinkMessage) -> Vec<u8> {
    let mut message = NetlinkMessage::from(inner);
    message.finalize();
    let mut bytes = vec![0xff; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn link(index: u32, flags: LinkFlags) -> LinkMessage {
    let mut link = LinkMessage::default();
    (link.header.index, link.header.flags) = (index, flags);
    link.attributes.push(LinkAttribute::IfName(format!("eth{index}")));
    link
}

fn new_link(index: u32, flags: LinkFlags) -> Vec<u8> {
    bytes_of(RouteNetlinkMessage::NewLink(link(index, flags)))
}

fn address(last: u8) -> AddressMessage {
    let mut message = AddressMessage::default();
    (message.header.index, message.header.family) = (2, AddressFamily::Inet);
    message.attributes.push(AddressAttribute::Address(Ipv4Addr::new(10, 9, 0, last).into()));
    message
}

fn route(kind: RouteType) -> Vec<u8> {
    let mut route = RouteMessage::default();
    (route.header.address_family, route.header.kind) = (AddressFamily::Inet, kind);
    route.header.destination_prefix_length = 24;
    let to = RouteAddress::Inet(Ipv4Addr::new(10, 9, 0, 0));
    route.attributes.push(RouteAttribute::Destination(to));
    bytes_of(RouteNetlinkMessage::NewRoute(route))
}

const UP: LinkFlags = LinkFlags::Up.union(LinkFlags::Running);

fn is_up(index: u32) -> Option<Change> {
    Some(Change::Link(format!("eth{index}")))
}

#[test]
fn a_link_is_reported_when_it_gets_a_carrier() {
    let mut known = Known::default();
    assert_eq!(known.judge(&new_link(2, LinkFlags::Up)), None, "no carrier yet");
    assert_eq!(known.judge(&new_link(2, UP)), is_up(2));
    assert_eq!(known.judge(&new_link(2, UP)), None, "an unrelated change");
    assert_eq!(known.judge(&new_link(3, UP)), is_up(3), "another one");
    assert_eq!(known.judge(&new_link(2, LinkFlags::Up)), None);
    assert_eq!(known.judge(&new_link(2, UP)), is_up(2), "again");
    let gone = bytes_of(RouteNetlinkMessage::DelLink(link(2, UP)));
    assert_eq!(known.judge(&gone), None);
    assert_eq!(known.judge(&new_link(2, UP)), is_up(2), "another one in its place");
}

fn own(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 9, 0, last).into()
}

/// Report of failed links: the text and the addresses, sorted.
fn reported(known: &mut Known) -> Option<(String, Vec<IpAddr>)> {
    match known.take_down()? {
        NetworkChange::Down { what, mut addresses } => {
            addresses.sort();
            Some((what, addresses))
        }
        up @ NetworkChange::Up(_) => panic!("{up:?}"),
    }
}

#[test]
fn a_link_that_goes_down_is_reported_with_its_addresses() {
    let new = |last| bytes_of(RouteNetlinkMessage::NewAddress(address(last)));
    let down = |addresses| Some(("link eth2 is down".to_owned(), addresses));
    let mut known = Known::default();
    assert_eq!(known.judge(&new_link(2, LinkFlags::Up)), None);
    assert_eq!(reported(&mut known), None, "it was not known to be up");
    let _ = known.judge(&[new_link(2, UP), new_link(3, UP), new(1), new(2)].concat());
    assert_eq!(known.judge(&new_link(2, LinkFlags::empty())), None);
    assert_eq!(reported(&mut known), down(vec![own(1), own(2)]));
    assert_eq!(reported(&mut known), None, "once");
    let _ = known.judge(&new_link(2, LinkFlags::Up));
    assert_eq!(reported(&mut known), None, "it was down already");
    let _ = known.judge(&new_link(2, UP));
    let _ = known.judge(&[new_link(2, LinkFlags::Up), new_link(2, UP)].concat());
    assert_eq!(reported(&mut known), None, "up again before it was reported");
    let mut of_bridge = link(2, UP);
    of_bridge.header.interface_family = AddressFamily::Bridge;
    let _ = known.judge(&bytes_of(RouteNetlinkMessage::DelLink(of_bridge)));
    assert_eq!(reported(&mut known), None, "it has left a bridge");
    let _ = known.judge(&bytes_of(RouteNetlinkMessage::DelAddress(address(1))));
    let _ = known.judge(&bytes_of(RouteNetlinkMessage::DelLink(link(2, UP))));
    assert_eq!(reported(&mut known), down(vec![own(2)]), "removed");
}

#[test]
fn links_that_go_down_together_are_reported_together() {
    let on = |index, last| {
        let mut message = address(last);
        message.header.index = index;
        bytes_of(RouteNetlinkMessage::NewAddress(message))
    };
    let up = [2, 3, 4].map(|index| new_link(index, UP)).concat();
    let down = [2, 3, 4].map(|index| new_link(index, LinkFlags::Up)).concat();
    let mut known = Known::default();
    let _ = known.judge(&[up.clone(), on(2, 1), on(3, 2)].concat());
    let _ = known.judge(&down);
    assert_eq!(
        reported(&mut known),
        Some(("links eth2, eth3 are down".into(), vec![own(1), own(2)]))
    );
    let _ = known.judge(&[up, on(4, 1)].concat());
    let _ = known.judge(&new_link(2, LinkFlags::Up));
    assert_eq!(reported(&mut known), None, "another link has its address");
}

#[test]
fn links_that_are_up_at_the_start_are_known() {
    let mut socket = Socket::new(NETLINK_ROUTE).unwrap();
    socket.bind_auto().unwrap();
    let mut listener = Listener {
        socket: Arc::new(socket),
        stop: Arc::default(),
        known: Known::default(),
        bytes: Vec::with_capacity(DATAGRAM_MAX),
    };
    listener.load_initial().unwrap();
    let Known { links_up, addresses, .. } = &listener.known;
    let home = addresses.iter().find(|(_, address)| address.is_loopback());
    let (index, _) = home.expect("the loopback's address");
    assert!(links_up.contains(index), "{links_up:?}");
}

#[test]
fn an_address_is_reported_when_it_is_usable() {
    let new = |message: AddressMessage| bytes_of(RouteNetlinkMessage::NewAddress(message));
    let news = Some(Change::Address(Ipv4Addr::new(10, 9, 0, 1).into()));
    let mut tentative = address(1);
    tentative.attributes.push(AddressAttribute::Flags(AddressFlags::Tentative));
    let mut known = Known::default();
    assert_eq!(known.judge(&new(tentative)), None);
    assert_eq!(known.judge(&new(address(1))), news);
    assert_eq!(known.judge(&new(address(1))), None, "its lifetime was renewed");
    let gone = bytes_of(RouteNetlinkMessage::DelAddress(address(1)));
    assert_eq!(known.judge(&gone), None);
    assert_eq!(known.judge(&new(address(1))), news);
    // On a point-to-point link, the peer's address comes first.
    let mut pair = address(1);
    pair.attributes.push(AddressAttribute::Local(Ipv4Addr::new(10, 9, 0, 2).into()));
    assert_eq!(known.judge(&new(pair)), Some(Change::Address(Ipv4Addr::new(10, 9, 0, 2).into())));
}

#[test]
fn a_route_is_reported_if_it_leads_to_other_hosts() {
    let mut known = Known::default();
    assert_eq!(known.judge(&route(RouteType::Unicast)), Some(Change::Route));
    for kind in [RouteType::Local, RouteType::Broadcast, RouteType::Multicast, RouteType::BlackHole]
    {
        assert_eq!(known.judge(&route(kind)), None, "{kind:?}");
    }
}

#[test]
fn one_event_per_datagram_is_reported_and_all_are_recorded() {
    let mut known = Known::default();
    let one = [new_link(1, LinkFlags::empty()), new_link(2, UP), route(RouteType::Unicast)];
    assert_eq!(known.judge(&one.concat()), is_up(2));
    let two = [new_link(2, UP), new_link(1, UP), new_link(4, UP)];
    assert_eq!(known.judge(&two.concat()), is_up(1));
    assert_eq!(known.judge(&new_link(4, UP)), None);
}

#[test]
fn the_number_of_known_links_is_bounded() {
    let mut known = Known::default();
    for index in 0..3 * KNOWN_MAX as u32 {
        assert_eq!(known.judge(&new_link(index, UP)), is_up(index));
        assert!(known.links_up.len() <= KNOWN_MAX);
    }
}

#[test]
fn malformed_messages_are_parsed_to_the_end_and_count_as_unclear() {
    let good = [new_link(2, UP), bytes_of(RouteNetlinkMessage::NewAddress(address(1)))].concat();
    for cut in 0..good.len() {
        let _ = Known::default().judge(&good[..cut]);
        for value in [0, 1, 0x7f, 0xff] {
            let mut bytes = good.clone();
            bytes[cut] = value;
            let _ = Known::default().judge(&bytes);
        }
    }
    // A link message without its header, then one of an unrequested kind.
    let mut bytes = vec![20, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 9, 9, 9];
    assert_eq!(Known::default().judge(&bytes), Some(Change::Unclear));
    bytes[4] = 17;
    assert_eq!(Known::default().judge(&bytes), None);
}

/// Waits until this number of threads of the process listen for network changes.
fn wait_for_threads(wanted: usize) {
    let count = || {
        let tasks = std::fs::read_dir("/proc/self/task").expect("our threads");
        let name = |task: io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
        };
        tasks.filter_map(name).filter(|name| name.trim() == "rtrs-network").count()
    };
    let begin = Instant::now();
    while count() != wanted {
        assert!(begin.elapsed() < Duration::from_secs(30), "{} threads, not {wanted}", count());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_thread_sleeps_until_it_is_stopped() {
    let (reports, news) = mpsc::channel();
    let watch = LinkWatcher::start(move |what| reports.send(what).unwrap()).unwrap();
    wait_for_threads(1);
    std::thread::sleep(Duration::from_millis(200));
    wait_for_threads(1);
    drop(watch);
    wait_for_threads(0);
    // The network may have changed meanwhile, but no thread is left to report more.
    let text = |change| match change {
        NetworkChange::Up(what) | NetworkChange::Down { what, .. } => what,
    };
    assert!(news.iter().map(text).all(|what| !what.is_empty()));
}
