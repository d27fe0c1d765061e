//! Network changes on this host, as reported by the kernel: a link regained its carrier, an address
//! or a route was added, or a link failed.
//!
//! A thread sleeps on a netlink socket (`NETLINK_ROUTE`) and reports to the session
//! ([`NetworkChange`]); `engine/control/network.rs` and `link_down.rs` decide what a change means
//! for paths. However many changes there are, the thread reports them at most once per `PAUSE`:
//! links that are up, additions, and failed links with their addresses. It starts and ends with the
//! session (`launch`).

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::hash::Hash;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage,
};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::route::{RouteFlags, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

/// `RTMGRP_LINK`, `_IPV4_IFADDR`, `_IPV4_ROUTE`, `_IPV6_IFADDR` and `_IPV6_ROUTE` of
/// `linux/rtnetlink.h`.
const GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x100 | 0x400;
/// `RTM_NEWLINK`, `RTM_NEWADDR` and `RTM_NEWROUTE`.
const NEWS: [u16; 3] = [16, 20, 24];
/// `MSG_DONTWAIT`, the same on every architecture.
const DONT_WAIT: i32 = 0x40;
/// Buffer size; a link with all its attributes fits.
const DATAGRAM_MAX: usize = 64 * 1024;
/// Maximum number of datagrams taken in a row.
const DATAGRAMS_MAX: usize = 1024;
/// Maximum number of links or addresses remembered; beyond that, all are forgotten and count as
/// new.
const KNOWN_MAX: usize = 4096;
/// Minimum time between two reports.
const PAUSE: Duration = Duration::from_millis(100);
/// Time limit for stopping the thread.
const END_TIME_MAX: Duration = Duration::from_secs(1);

/// Improvement in the network.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Change {
    Link(String),
    Address(IpAddr),
    Route,
    /// Changes were missed, or are of an unknown kind.
    Unclear,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link(name) => write!(f, "link {name} is up"),
            Self::Address(address) => write!(f, "address {address} was added"),
            Self::Route => f.write_str("a route was added"),
            Self::Unclear => f.write_str("the network changed"),
        }
    }
}

/// Report from the thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NetworkChange {
    /// Something is up or new, described for the log.
    Up(String),
    /// One or more links have failed.
    Down {
        /// Description for the log.
        what: String,
        /// Addresses of the failed links that no other link has.
        addresses: Vec<IpAddr>,
    },
}

/// Running thread; stops when dropped.
#[derive(Debug)]
pub(crate) struct LinkWatcher {
    socket: Arc<Socket>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl LinkWatcher {
    /// Starts reporting changes.
    ///
    /// # Errors
    /// Fails with the system's error if this kernel lacks netlink or denies it to this process.
    pub(crate) fn start(notify: impl Fn(NetworkChange) + Send + 'static) -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, GROUPS))?;
        let socket = Arc::new(socket);
        let stop = Arc::new(AtomicBool::new(false));
        let listener = Listener {
            socket: Arc::clone(&socket),
            stop: Arc::clone(&stop),
            known: Known::default(),
            bytes: Vec::with_capacity(DATAGRAM_MAX),
        };
        let name = "rtrs-network".to_owned();
        let thread = std::thread::Builder::new().name(name).spawn(move || listener.run(notify))?;
        Ok(Self { socket, stop, thread: Some(thread) })
    }
}

impl Drop for LinkWatcher {
    /// Ends the thread. The kernel's answer to an empty message wakes it.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Err(error) = wake(&self.socket) {
            tracing::debug!("cannot wake the thread that listens to the network: {error}");
        }
        let deadline = Instant::now() + END_TIME_MAX;
        if let Some(thread) = self.thread.take() {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !thread.is_finished() {
                tracing::warn!("the thread that listens to the network does not end");
            } else if thread.join().is_err() {
                tracing::error!("the thread that listens to the network panicked");
            }
        }
    }
}

fn wake(socket: &Socket) -> io::Result<()> {
    send(socket, NLM_F_ACK, NetlinkPayload::Noop)
}

fn send(
    socket: &Socket,
    flags: u16,
    payload: NetlinkPayload<RouteNetlinkMessage>,
) -> io::Result<()> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    let mut message = NetlinkMessage::new(header, payload);
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send_to(&bytes, &SocketAddr::new(0, 0), 0).map(drop)
}

struct Listener {
    socket: Arc<Socket>,
    stop: Arc<AtomicBool>,
    known: Known,
    bytes: Vec<u8>,
}

impl Listener {
    fn run(mut self, notify: impl Fn(NetworkChange)) {
        if let Err(error) = self.load_initial() {
            tracing::debug!("cannot determine which links are up: {error}");
        }
        while !self.stop.load(Ordering::SeqCst) {
            match self.take_news() {
                Ok(news) => {
                    let down = self.known.take_down();
                    let up = news.map(|change| NetworkChange::Up(change.to_string()));
                    let mut changes = down.into_iter().chain(up).peekable();
                    if changes.peek().is_some() {
                        changes.for_each(&notify);
                        std::thread::sleep(PAUSE);
                    }
                }
                Err(error) => {
                    tracing::warn!("cannot watch the network anymore: {error}");
                    return;
                }
            }
        }
    }

    /// Loads the initial links and addresses, which are not reported.
    fn load_initial(&mut self) -> io::Result<()> {
        let links = RouteNetlinkMessage::GetLink(LinkMessage::default());
        let addresses = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        for request in [links, addresses] {
            let mut socket = Socket::new(NETLINK_ROUTE)?;
            socket.bind_auto()?;
            send(&socket, NLM_F_DUMP, NetlinkPayload::InnerMessage(request))?;
            // The kernel provides the next part when the previous one is taken.
            for _ in 0..DATAGRAMS_MAX {
                self.bytes.clear();
                match socket.recv(&mut self.bytes, DONT_WAIT) {
                    Ok(_) => drop(self.known.judge(&self.bytes)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Sleeps until there are messages and takes them all. Returns the first change.
    fn take_news(&mut self) -> io::Result<Option<Change>> {
        let mut news = None;
        for flags in std::iter::once(0).chain(std::iter::repeat_n(DONT_WAIT, DATAGRAMS_MAX)) {
            self.bytes.clear();
            let change = match self.socket.recv(&mut self.bytes, flags) {
                Ok(_) => self.known.judge(&self.bytes),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => break,
                    io::ErrorKind::Interrupted => None,
                    // There were more messages than the socket could hold.
                    _ if error.raw_os_error() == Some(ENOBUFS) => Some(Change::Unclear),
                    _ => return Err(error),
                },
            };
            news = news.or(change);
        }
        Ok(news)
    }
}

/// Errno reported by a socket that has lost messages.
const ENOBUFS: i32 = 105;

/// Known links and addresses, kept so that repeated messages are not reported.
#[derive(Debug, Default)]
struct Known {
    links_up: HashSet<u32>,
    addresses: HashSet<(u32, IpAddr)>,
    /// Links that were up and have failed, by index: the name, and the addresses that only that
    /// link had.
    downs: HashMap<u32, (String, Vec<IpAddr>)>,
}

impl Known {
    /// Takes the links with addresses that have failed since the last call. They are reported
    /// together, so that no failed link counts as a replacement for another.
    fn take_down(&mut self) -> Option<NetworkChange> {
        let downs = std::mem::take(&mut self.downs).into_values();
        let (mut names, addresses): (Vec<_>, Vec<_>) =
            downs.filter(|(_, addresses)| !addresses.is_empty()).unzip();
        names.sort();
        let addresses: Vec<_> = addresses.into_iter().flatten().collect();
        let what = match &names[..] {
            [] => return None,
            [name] => format!("link {name} is down"),
            names => format!("links {} are down", names.join(", ")),
        };
        Some(NetworkChange::Down { what, addresses })
    }

    fn link_down(&mut self, link: &LinkMessage) {
        let index = link.header.index;
        if self.links_up.remove(&index) {
            let of_link = self.addresses.iter().filter(|(at, _)| *at == index);
            // Addresses that another link also has still work.
            let is_elsewhere = |address: &IpAddr| {
                self.links_up.iter().any(|other| self.addresses.contains(&(*other, *address)))
            };
            let addresses = of_link.map(|(_, address)| *address);
            let addresses = addresses.filter(|address| !is_elsewhere(address)).collect();
            self.downs.insert(index, (link_name(link), addresses));
        }
    }

    /// Returns the first change among the messages of a datagram.
    fn judge(&mut self, mut bytes: &[u8]) -> Option<Change> {
        let mut news = None;
        while let Ok(head) = NetlinkBuffer::new_checked(bytes) {
            let kind = head.message_type();
            let length = (head.length() as usize).next_multiple_of(4);
            let change = match NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes) {
                Ok(message) => match message.payload {
                    NetlinkPayload::InnerMessage(inner) => self.judge_message(&inner),
                    _ => None,
                },
                // A kernel newer than this program may send messages that the program does not
                // understand.
                Err(_) => NEWS.contains(&kind).then_some(Change::Unclear),
            };
            news = news.or(change);
            bytes = bytes.get(length..).unwrap_or_default();
        }
        news
    }

    fn judge_message(&mut self, message: &RouteNetlinkMessage) -> Option<Change> {
        match message {
            // Messages of a bridge about its ports: a port that leaves the bridge stays up.
            RouteNetlinkMessage::NewLink(link) | RouteNetlinkMessage::DelLink(link)
                if link.header.interface_family != AddressFamily::Unspec =>
            {
                None
            }
            RouteNetlinkMessage::NewLink(link) => {
                let index = link.header.index;
                if !link.header.flags.contains(LinkFlags::Up | LinkFlags::Running) {
                    self.link_down(link);
                    return None;
                }
                self.downs.remove(&index);
                is_new(&mut self.links_up, index).then(|| Change::Link(link_name(link)))
            }
            RouteNetlinkMessage::DelLink(link) => {
                self.link_down(link);
                None
            }
            RouteNetlinkMessage::NewAddress(message) => {
                let address = address_of(message)?;
                // A tentative address is unusable until duplicate detection ends; then another
                // message follows.
                let place = (message.header.index, address);
                if is_tentative(message) {
                    self.addresses.remove(&place);
                    return None;
                }
                is_new(&mut self.addresses, place).then_some(Change::Address(address))
            }
            RouteNetlinkMessage::DelAddress(message) => {
                let address = address_of(message)?;
                self.addresses.remove(&(message.header.index, address));
                None
            }
            RouteNetlinkMessage::NewRoute(route) => leads_away(route).then_some(Change::Route),
            _ => None,
        }
    }
}

/// Adds an element. Returns whether it is new.
fn is_new<T: Hash + Eq>(known: &mut HashSet<T>, one: T) -> bool {
    if known.len() >= KNOWN_MAX && !known.contains(&one) {
        known.clear();
    }
    known.insert(one)
}

fn link_name(link: &LinkMessage) -> String {
    let name = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    });
    name.unwrap_or_else(|| link.header.index.to_string())
}

/// Returns the host's own address, which on a point-to-point link is not the first one.
fn address_of(message: &AddressMessage) -> Option<IpAddr> {
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    local.or_else(|| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    })
}

fn is_tentative(message: &AddressMessage) -> bool {
    let in_head = message.header.flags.contains(AddressHeaderFlags::Tentative);
    in_head
        || message.attributes.iter().any(|attribute| {
            matches!(attribute, AddressAttribute::Flags(flags)
                if flags.contains(AddressFlags::Tentative))
        })
}

/// Whether the route leads to other hosts, unlike routes to the host's own addresses.
fn leads_away(route: &RouteMessage) -> bool {
    route.header.kind == RouteType::Unicast && !route.header.flags.contains(RouteFlags::Cloned)
}

#[cfg(test)]
mod tests;
