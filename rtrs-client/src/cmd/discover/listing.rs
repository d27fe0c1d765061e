//! Requests the list of one server's exports, or only its proof of identity, by starting a session
//! with one connection, without OPEN.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use rtrs_core::fabric::{Fabric, FabricError, FabricEvent, PrivateData};
use rtrs_core::identity::ServerId;
use rtrs_core::ids::{ConnIndex, PathId, PathUuid, SessionId};
use rtrs_core::rt::{Clock, Inbox, PollPolicy, Shard, run};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{
    ClientExtensions, ConnReq, Discover, Discovered, Extensions, Name, Page, errno_name,
};

use super::proving::Proving;
use crate::cmd::link::Link;
use crate::daemon::config::random_uuid;
use crate::engine::{AuthError, PathEnd};
use crate::path::fault::ConnectionFault;
use crate::path::handshake::{Endpoints, Proof, ServiceConnection, ServiceEvent, conn_response};
use crate::plan::default_session_name;

/// Polling policy: no polling, because no latency is measured.
const POLL: PollPolicy = PollPolicy { budget_max: Duration::ZERO };
/// Time limit for closing the connection.
const CLOSE_MAX: Duration = Duration::from_millis(500);
/// Maximum number of exports of a server.
const EXPORTS_MAX: usize = 1 << 16;

/// Reason why a server did not list its exports, or did not prove its identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AskError {
    /// The connection failed or ended.
    #[error("{0}")]
    Path(#[from] PathEnd),
    /// The connection was closed without an error.
    #[error("the connection ended")]
    Ended,
    /// The step was not completed in time.
    #[error("no answer in time (cannot {0})")]
    Timeout(Step),
    /// The server refused to list its exports, with this errno.
    #[error("the server refused: {}", errno_name(*.0))]
    Refused(u16),
    /// A kernel server does not list its exports.
    #[error("a kernel server cannot list its exports; see its sysfs")]
    KernelServer,
    /// The server does not list its exports.
    #[error("discovery is off on the server (discovery: off), or its rtrs-server is too old")]
    DiscoveryOff,
    /// The server's exports are not in order, so the list might be endless.
    #[error("bad DISCOVER_RSP: the names are not in order")]
    NotInOrder,
    /// The server has too many exports.
    #[error("bad DISCOVER_RSP: there are too many exports")]
    TooManyExports,
    /// The local system failed, for this reason.
    #[error("{0}")]
    System(String),
}

impl AskError {
    /// Errno with which the server refused the client, if it did.
    pub(crate) fn errno(&self) -> Option<u16> {
        let Self::Path(end) = self else { return None };
        end.errno()
    }
}

impl From<ConnectionFault> for AskError {
    fn from(fault: ConnectionFault) -> Self {
        Self::Path(fault.into())
    }
}

impl From<AuthError> for AskError {
    fn from(error: AuthError) -> Self {
        Self::Path(error.into())
    }
}

impl From<FabricError> for AskError {
    fn from(error: FabricError) -> Self {
        Self::Path(error.into())
    }
}

/// Step in querying a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Connect,
    Start,
    Authenticate,
    List,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "connect",
            Self::Start => "start the session",
            Self::Authenticate => "authenticate",
            Self::List => "list its exports",
        })
    }
}

/// Exports of a server.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) server: Option<ServerId>,
    /// Exports in the order of their names.
    pub(super) exports: Vec<Discovered>,
}

impl Listing {
    /// Adds a page. Returns the next request, or None after the last page.
    ///
    /// # Errors
    /// Fails if the server violates the protocol in a way that could make the list endless.
    fn add(&mut self, page: Page) -> Result<Option<Discover>, AskError> {
        for export in page.exports {
            let last = self.exports.last().map(|last| bare(&last.name));
            if last.is_some_and(|last| last >= bare(&export.name)) {
                return Err(AskError::NotInOrder);
            }
            if self.exports.len() >= EXPORTS_MAX {
                return Err(AskError::TooManyExports);
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

/// Lists the exports. Ends within `timeout` plus the time to close the connection.
pub(super) fn list(
    link: &mut Link,
    local: Option<IpAddr>,
    remote: SocketAddr,
    timeout: Duration,
) -> Result<Listing, AskError> {
    ask(link, local, remote, Purpose::List, timeout)
}

/// Authenticates both ends, if the link has certificates or keys. Ends within `timeout` plus the
/// time to close the connection.
pub(crate) fn prove(
    link: &mut Link,
    local: Option<IpAddr>,
    remote: SocketAddr,
    timeout: Duration,
) -> Result<(), AskError> {
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
) -> Result<Listing, AskError> {
    let prover = link.prover().cloned();
    let no_random = |error| AskError::System(format!("cannot get random numbers: {error}"));
    let uuid = || random_uuid().map_err(no_random);
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
            info_refusals: true,
            authenticates: prover.is_some(),
            ..ClientExtensions::default()
        }
        .encode(),
    };
    let (fabric, ring) = link.parts();
    let now = Clock.now();
    let data = PrivateData::new(&request.encode());
    let endpoints = Endpoints { local, remote, peer_name: None, path: PathId(0) };
    let conn = ServiceConnection::connect(now, endpoints, data, timeout, fabric);
    let mut asking = Asking {
        conn: conn?,
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
        step: Step::Connect,
    };
    run(ring, POLL, &mut asking).map_err(|error| AskError::System(error.to_string()))?;
    let Asking { listing, outcome, .. } = asking;
    outcome.unwrap_or(Err(AskError::Ended)).map(|()| listing)
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
    /// None until the outcome is known.
    outcome: Option<Result<(), AskError>>,
    /// Time to give up; after that, time to stop waiting for the connection to end.
    late: Instant,
    over: bool,
    /// Awaited step.
    step: Step,
}

impl Asking<'_> {
    fn event(&mut self, now: Instant, event: FabricEvent) -> Result<(), AskError> {
        match event {
            FabricEvent::Established { private_data, .. } => {
                let (granted, extensions) = conn_response(private_data.as_bytes())?;
                if self.lists {
                    check_discovers(extensions)?;
                }
                self.proving.check(extensions)?;
                self.listing.server = extensions.identity.and_then(ServerId::from_bytes);
                self.conn.granted(granted, extensions);
                self.step = Step::Start;
                Ok(self.conn.post_info(&self.name, self.fabric)?)
            }
            FabricEvent::ConnectFailed { failure, .. } => {
                self.over = true;
                Err(PathEnd::from(&failure).into())
            }
            FabricEvent::Closed { reason, .. } => {
                self.over = true;
                let end = match self.step {
                    Step::Start => PathEnd::InfoUnanswered {
                        reason,
                        session: self.name.clone(),
                        has_extensions: self.conn.has_extensions(),
                    },
                    _ => PathEnd::Closed(reason),
                };
                Err(end.into())
            }
            FabricEvent::Completion(wc) => {
                let event = self.conn.on_completion(&wc, self.fabric)?;
                self.service(now, event)
            }
            FabricEvent::Request(_) => Ok(()),
        }
    }

    fn service(&mut self, now: Instant, event: ServiceEvent) -> Result<(), AskError> {
        let next = match event {
            ServiceEvent::HeartbeatAsked => {
                return Ok(self.conn.post_heartbeat_ack(self.fabric)?);
            }
            ServiceEvent::Info(Err(errno)) => {
                return Err(PathEnd::SessionRefused { errno, session: self.name.clone() }.into());
            }
            ServiceEvent::Info(Ok(_)) => {
                if self.proving.begin(&mut self.conn, self.fabric)? {
                    self.step = Step::Authenticate;
                    return Ok(());
                }
                self.lists.then(Discover::default)
            }
            ServiceEvent::Proof(Proof::Server(answer)) => {
                return Ok(self.proving.answer(&answer, &mut self.conn, self.fabric)?);
            }
            ServiceEvent::Proof(Proof::Accepted) => self.lists.then(Discover::default),
            ServiceEvent::Proof(Proof::Refused(errno)) => {
                let asked = self.proving.challenge.is_some();
                return Err(AuthError::Refused { errno, asked }.into());
            }
            ServiceEvent::Discovered(page) => self.listing.add(page)?,
            ServiceEvent::DiscoverRefused(errno) => {
                return Err(AskError::Refused(errno));
            }
            _ => return Ok(()),
        };
        match next {
            Some(discover) => {
                self.step = Step::List;
                Ok(self.conn.post_discover(&discover, self.fabric)?)
            }
            None => {
                self.end(now, Ok(()));
                Ok(())
            }
        }
    }

    fn end(&mut self, now: Instant, outcome: Result<(), AskError>) {
        if self.outcome.is_none() {
            self.conn.end(now, outcome.is_ok(), self.fabric);
            self.outcome = Some(outcome);
            self.late = now + CLOSE_MAX;
        }
    }
}

/// Rejects a server that does not list its exports.
fn check_discovers(extensions: Extensions) -> Result<(), AskError> {
    if extensions.discover {
        return Ok(());
    }
    Err(match extensions == Extensions::default() {
        true => AskError::KernelServer,
        false => AskError::DiscoveryOff,
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
            self.end(now, Err(AskError::Timeout(self.step)));
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
    fn pages_are_requested_until_the_last() {
        let mut listing = Listing::default();
        let next = listing.add(page(&["/a", "b"], true)).unwrap().unwrap();
        assert_eq!(next.after.as_bytes(), b"b");
        assert_eq!(listing.add(page(&["c"], false)), Ok(None));
        assert_eq!(listing.exports.len(), 3);
        assert_eq!(Listing::default().add(page(&[], false)), Ok(None), "no exports");
    }

    #[test]
    fn an_endless_list_is_refused() {
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
    fn servers_that_do_not_list_exports_are_distinguished() {
        assert_eq!(check_discovers(Extensions::default()), Err(AskError::KernelServer));
        let off = Extensions { discover: false, ..Extensions::OURS };
        assert_eq!(check_discovers(off), Err(AskError::DiscoveryOff));
        assert_eq!(check_discovers(Extensions::OURS), Ok(()));
    }
}
