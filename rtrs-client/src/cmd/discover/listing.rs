//! Requests the exports of one server, or only its proof of identity: the start of a session with
//! one connection, without OPEN.

use std::net::{IpAddr, SocketAddr};

use rtrs_core::fabric::{Fabric, FabricEvent, PrivateData};
use rtrs_core::identity::ServerId;
use rtrs_core::ids::{ConnIndex, PathUuid, SessionId};
use rtrs_core::rt::{Clock, Inbox, PollPolicy, Shard, run};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{
    ClientExtensions, ConnReq, Discover, Discovered, Extensions, Name, Page, errno_name,
};

use super::proving::Proving;
use crate::cmd::link::Link;
use crate::daemon::config::random_uuid;
use crate::engine::describe_refusal;
use crate::path::handshake::{
    Endpoints, Proof, ServiceConnection, ServiceEvent, conn_response, describe_failure,
    describe_info_refusal,
};
use crate::plan::default_session_name;

/// No latency is measured.
const POLL: PollPolicy = PollPolicy { budget_max: Duration::ZERO };
/// Time for the end of the connection.
const CLOSE_MAX: Duration = Duration::from_millis(500);
/// Maximum number of exports of a server.
const EXPORTS_MAX: usize = 1 << 16;

/// Exports of a server.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) server: Option<ServerId>,
    /// Exports in the order of their names.
    pub(super) exports: Vec<Discovered>,
}

impl Listing {
    /// Adds a page. Returns the next request, None after the last page.
    ///
    /// # Errors
    /// Fails if the server violates the protocol, so that there might be no end.
    fn add(&mut self, page: Page) -> Result<Option<Discover>, &'static str> {
        for export in page.exports {
            let last = self.exports.last().map(|last| bare(&last.name));
            if last.is_some_and(|last| last >= bare(&export.name)) {
                return Err("bad DISCOVER_RSP: the names are not in order");
            }
            if self.exports.len() >= EXPORTS_MAX {
                return Err("bad DISCOVER_RSP: there are too many exports");
            }
            self.exports.push(export);
        }
        Ok(self.exports.last().filter(|_| page.more).map(|last| Discover { after: last.name }))
    }
}

/// Name without leading slashes, which servers ignore in comparisons.
fn bare(name: &Name) -> &[u8] {
    let bytes = name.as_bytes();
    let slashes = bytes.iter().take_while(|&&byte| byte == b'/').count();
    &bytes[slashes..]
}

/// Lists the exports. Ends within `timeout` plus the time of a close.
pub(super) fn list(
    link: &mut Link,
    local: Option<IpAddr>,
    remote: SocketAddr,
    timeout: Duration,
) -> Result<Listing, String> {
    ask(link, local, remote, Purpose::List, timeout)
}

/// Authenticates both ends, where the link has certificates or keys for that. Ends within `timeout`
/// plus the time of a close.
pub(crate) fn prove(
    link: &mut Link,
    local: Option<IpAddr>,
    remote: SocketAddr,
    timeout: Duration,
) -> Result<(), String> {
    if link.prover().is_none() {
        return Ok(());
    }
    ask(link, local, remote, Purpose::Prove, timeout).map(drop)
}

/// Purpose of a connection to a server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// List the exports.
    List,
    /// Authenticate both ends, and no more.
    Prove,
}

fn ask(
    link: &mut Link,
    local: Option<IpAddr>,
    remote: SocketAddr,
    purpose: Purpose,
    timeout: Duration,
) -> Result<Listing, String> {
    let prover = link.prover().cloned();
    let uuid = || random_uuid().map_err(|error| format!("no random numbers: {error}"));
    let (path, id) = (uuid()?, uuid()?);
    let number = u32::from_le_bytes([id[0], id[1], id[2], id[3]]);
    let request = ConnReq {
        cid: ConnIndex(0),
        cid_num: 1,
        recon_cnt: 1,
        path_uuid: PathUuid(path),
        session_id: SessionId(id),
        first_conn: true,
        ext: ClientExtensions {
            smaller_depth: true,
            authenticates: prover.is_some(),
            ..ClientExtensions::default()
        }
        .encode(),
    };
    let (fabric, ring) = link.parts();
    let now = Clock.now();
    let data = PrivateData::new(&request.encode());
    let endpoints = Endpoints { local, remote, peer_name: None };
    let conn = ServiceConnection::connect(now, endpoints, data, timeout, fabric);
    let mut asking = Asking {
        conn: conn.map_err(|error| error.to_string())?,
        fabric,
        name: default_session_name(&format!("discover-{number:08x}")),
        listing: Listing::default(),
        lists: purpose == Purpose::List,
        proving: Proving {
            prover,
            session: request.session_id,
            path: request.path_uuid,
            server: remote.ip(),
            challenge: None,
        },
        outcome: None,
        late: now + timeout,
        over: false,
        step: "connect",
    };
    run(ring, POLL, &mut asking).map_err(|error| error.to_string())?;
    let Asking { listing, outcome, .. } = asking;
    outcome.unwrap_or_else(|| Err("the connection ended".to_owned())).map(|()| listing)
}

/// State of the requesting shard.
struct Asking<'a> {
    fabric: &'a mut dyn Fabric,
    conn: ServiceConnection,
    /// Session name.
    name: String,
    listing: Listing,
    /// Whether to list the exports.
    lists: bool,
    proving: Proving,
    /// None until it is known.
    outcome: Option<Result<(), String>>,
    /// Time to give up; then, time to stop waiting for the end of the connection.
    late: Instant,
    over: bool,
    /// Description of the awaited step.
    step: &'static str,
}

impl Asking<'_> {
    fn event(&mut self, now: Instant, event: FabricEvent) -> Result<(), String> {
        match event {
            FabricEvent::Established { private_data, .. } => {
                let (granted, extensions) = conn_response(private_data.as_bytes())?;
                if self.lists {
                    check_discovers(extensions)?;
                }
                self.proving.check(extensions)?;
                self.listing.server = extensions.identity.and_then(ServerId::from_bytes);
                self.conn.granted(granted, extensions);
                self.step = "start the session";
                self.conn.post_info(&self.name, self.fabric).map_err(|error| error.to_string())
            }
            FabricEvent::ConnectFailed { failure, .. } => {
                self.over = true;
                Err(describe_failure(&failure))
            }
            FabricEvent::Closed { reason, .. } => {
                self.over = true;
                Err(match self.step {
                    "start the session" => describe_info_refusal(&reason, &self.name),
                    _ => reason.to_string(),
                })
            }
            FabricEvent::Completion(wc) => {
                let event = self.conn.on_completion(&wc, self.fabric)?;
                self.service(now, event)
            }
            FabricEvent::Request(_) => Ok(()),
        }
    }

    fn service(&mut self, now: Instant, event: ServiceEvent) -> Result<(), String> {
        let next = match event {
            ServiceEvent::HeartbeatAsked => {
                let sent = self.conn.post_heartbeat_ack(self.fabric);
                return sent.map_err(|error| error.to_string());
            }
            ServiceEvent::Info { .. } => {
                if self.proving.begin(&mut self.conn, self.fabric)? {
                    self.step = "authenticate";
                    return Ok(());
                }
                self.lists.then(Discover::default)
            }
            ServiceEvent::Proof(Proof::Server(answer)) => {
                return self.proving.answer(&answer, &mut self.conn, self.fabric);
            }
            ServiceEvent::Proof(Proof::Accepted) => self.lists.then(Discover::default),
            ServiceEvent::Proof(Proof::Refused(errno)) => {
                return Err(describe_refusal(errno, self.proving.challenge.is_some()));
            }
            ServiceEvent::Discovered(page) => self.listing.add(page)?,
            ServiceEvent::DiscoverRefused(errno) => {
                return Err(format!("the server refused: {}", errno_name(errno)));
            }
            _ => return Ok(()),
        };
        match next {
            Some(discover) => {
                self.step = "list its exports";
                let posted = self.conn.post_discover(&discover, self.fabric);
                posted.map_err(|error| error.to_string())
            }
            None => {
                self.end(now, Ok(()));
                Ok(())
            }
        }
    }

    fn end(&mut self, now: Instant, outcome: Result<(), String>) {
        if self.outcome.is_none() {
            self.conn.end(now, outcome.is_ok(), self.fabric);
            self.outcome = Some(outcome);
            self.late = now + CLOSE_MAX;
        }
    }
}

/// Rejects a server that does not list its exports.
fn check_discovers(extensions: Extensions) -> Result<(), String> {
    if extensions.discover {
        return Ok(());
    }
    Err(match extensions == Extensions::default() {
        true => "it is a kernel server, which cannot list them; see its sysfs".to_owned(),
        false => "discovery is off at the server (discovery: off), or it is an rtrs-server that \
                  is too old"
            .to_owned(),
    })
}

impl Shard for Asking<'_> {
    type Message = ();

    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = self.fabric.poll(now);
        while let Some(event) = self.fabric.next_event() {
            busy = true;
            if let Err(error) = self.event(now, event) {
                self.end(now, Err(error));
            }
        }
        if now >= self.late {
            self.over |= self.outcome.is_some();
            self.end(now, Err(format!("no answer in time (cannot {})", self.step)));
        }
        self.fabric.flush(now);
        busy
    }

    fn deadline(&self) -> Option<Instant> {
        earliest(self.fabric.deadline(), Some(self.late))
    }

    fn is_done(&self) -> bool {
        self.over
    }

    fn inbox(&mut self) -> Option<&mut Inbox<()>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(names: &[&str], more: bool) -> Page {
        let export = |name: &&str| Discovered {
            name: Name::new(name.as_bytes()).unwrap(),
            sectors: 8,
            block_size: 512,
            read_only: false,
            written: false,
            id: None,
        };
        Page { exports: names.iter().map(export).collect(), more }
    }

    #[test]
    fn pages_follow_each_other_to_an_end() {
        let mut listing = Listing::default();
        let next = listing.add(page(&["/a", "b"], true)).unwrap().unwrap();
        assert_eq!(next.after.as_bytes(), b"b");
        assert_eq!(listing.add(page(&["c"], false)), Ok(None));
        assert_eq!(listing.exports.len(), 3);
        assert_eq!(Listing::default().add(page(&[], false)), Ok(None), "no exports");
    }

    #[test]
    fn a_list_without_end_is_refused() {
        for (first, second) in [("b", "b"), ("b", "a"), ("b", "/b"), ("//b", "/a")] {
            let mut listing = Listing::default();
            listing.add(page(&[first], true)).unwrap();
            assert!(listing.add(page(&[second], true)).is_err(), "{first}, then {second}");
        }
        assert!(Listing::default().add(page(&["b", "a"], false)).is_err(), "within a page");
        let mut listing = Listing::default();
        let result = (0..=EXPORTS_MAX).map(|n| listing.add(page(&[&format!("{n:06}")], true)));
        assert!(result.last().unwrap().is_err(), "too many");
    }

    #[test]
    fn who_does_not_list_says_why() {
        let refusal = |extensions| check_discovers(extensions).unwrap_err();
        assert!(refusal(Extensions::default()).contains("kernel server"));
        let off = Extensions { discover: false, ..Extensions::OURS };
        assert!(refusal(off).contains("discovery: off"));
        assert_eq!(check_discovers(Extensions::OURS), Ok(()));
    }
}
