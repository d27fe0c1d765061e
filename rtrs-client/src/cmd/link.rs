//! A provider on a ring, for commands that test a link: runs pings, or one connect.
//!
//! The calling thread is the shard. Nothing outlives the call, and every run ends: pings and
//! connects have their own time limits.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use rtrs_core::fabric::iwarp::{IwarpFabric, IwarpOptions, IwarpShared};
use rtrs_core::fabric::rdma::{Rdma, RdmaOptions};
use rtrs_core::fabric::{
    ConnectFailure, ConnectParams, Fabric, FabricEvent, PdUse, PrivateData, QpLimits,
};
use rtrs_core::proto::ping::{PingClient, PingEvent};
use rtrs_core::rt::{Clock, Inbox, Mailbox, PollPolicy, Ring, Shard, run};
use rtrs_core::settings::{Host, Portal, Scheme};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::tls::TlsEndpoint;

use crate::engine::Prover;
use crate::error::{Error, ErrorKind, system};
use crate::tls::TlsSources;

const RING_ENTRIES: u32 = 256;
/// Polls between events, since sleeping would distort the measured latencies.
const POLL: PollPolicy = PollPolicy { budget_max: Duration::from_micros(200) };
/// Maximum number of RDMA reads in flight, at either end.
const READS_MAX: u8 = 16;

/// Options for a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkOptions {
    /// Request checksums.
    pub(crate) crc: bool,
    /// Use only what every iWARP peer supports.
    pub(crate) plain: bool,
    /// Time limit for connects.
    pub(crate) timeout: Duration,
}

/// A provider and its ring. The fabric is dropped before the ring.
pub(crate) struct Link {
    fabric: Box<dyn Fabric>,
    ring: Rc<Ring>,
    /// Present over RDMA, with certificates or keys.
    prover: Option<Prover>,
}

/// Observer of a run.
pub(crate) trait Watch {
    /// Handles an event of the ping with this number.
    fn event(&mut self, now: Instant, at: usize, event: PingEvent);
    /// Called periodically with the state of all pings if [`Self::tick_every`] returns an interval.
    fn tick(&mut self, now: Instant, clients: &[PingClient]);
    /// Interval of the ticks, if any.
    fn tick_every(&self) -> Option<Duration>;
}

impl Link {
    /// Opens a provider for the portal's scheme.
    pub(crate) fn open(
        portal: &Portal,
        tls: &TlsSources,
        options: LinkOptions,
    ) -> Result<Self, Error> {
        let LinkOptions { crc, plain, timeout } = options;
        let mut tls = tls.clone();
        if let (Some(_), None, Host::Name(name)) = (&tls.dir, &tls.hostname, portal.host()) {
            tls.hostname = Some(name.clone());
        }
        let is_rdma = portal.scheme() == Scheme::Rdma;
        let prover = if is_rdma { tls.prover()? } else { None };
        let ring = Ring::new(RING_ENTRIES).map_err(system("cannot set up io_uring"))?;
        let options = IwarpOptions { crc, plain, startup_timeout: timeout, ..Default::default() };
        let fabric: Box<dyn Fabric> = match portal.scheme() {
            Scheme::Tcp => Box::new(IwarpFabric::new(&ring, IwarpShared::new(), options)),
            Scheme::Tls => {
                let endpoint = TlsEndpoint::client(tls.load()?);
                let endpoint = endpoint.map_err(system("cannot start a thread"))?;
                let fabric = IwarpFabric::with_tls(&ring, IwarpShared::new(), options, endpoint);
                Box::new(fabric.map_err(system("cannot create a mailbox"))?)
            }
            Scheme::Rdma => {
                let failed = |e| Error::with_source(ErrorKind::Path, "cannot use rdma://", e);
                let rdma = Rdma::open().map_err(failed)?;
                let options = RdmaOptions {
                    startup_timeout: timeout,
                    half_open_max: 1,
                    reads_max: READS_MAX,
                    path_timeout: None,
                };
                rdma.fabric(&ring, options)
                    .map_err(|e| Error::with_source(ErrorKind::System, "cannot set up RDMA", e))?
            }
        };
        Ok(Self { fabric, ring, prover })
    }

    /// Prover of the client's identity, if both ends authenticate.
    pub(crate) fn prover(&self) -> Option<&Prover> {
        self.prover.as_ref()
    }

    /// Provider and its ring.
    pub(crate) fn parts(&mut self) -> (&mut dyn Fabric, &Rc<Ring>) {
        (self.fabric.as_mut(), &self.ring)
    }

    /// Runs pings to completion. After a message in `stop`, or once `limit` has passed, no more
    /// rounds begin; a second message stops everything.
    pub(crate) fn ping(
        &mut self,
        clients: &mut [PingClient],
        watch: &mut dyn Watch,
        stop: Mailbox<()>,
        limit: Option<Duration>,
    ) -> io::Result<()> {
        let now = Clock.now();
        for client in clients.iter_mut() {
            client.start(now, self.fabric.as_mut());
        }
        let next_tick = watch.tick_every().map(|every| now + every);
        let inbox = stop.arm(&self.ring)?;
        let (fabric, stops, is_done) = (self.fabric.as_mut(), 0, false);
        let until = limit.map(|limit| now + limit);
        let mut pings = Pings { fabric, clients, watch, inbox, next_tick, until, stops, is_done };
        run(&self.ring, POLL, &mut pings).map(drop)
    }

    /// Connects with this private data and disconnects. Returns the time taken and the answer,
    /// whether an accept or a reject.
    pub(crate) fn knock(
        &mut self,
        local: Option<IpAddr>,
        remote: SocketAddr,
        private_data: PrivateData,
        timeout: Duration,
    ) -> Result<Knock, String> {
        let now = Clock.now();
        let fabric = self.fabric.as_mut();
        let pd = fabric.alloc_pd(PdUse::Connect { local, remote }).map_err(|e| e.to_string())?;
        let limits = QpLimits { send_max: 4, recv_max: 4 };
        let params =
            ConnectParams { local, remote, private_data, limits, timeout, peer_name: None };
        let qp = fabric.connect(now, &pd, &params).map_err(|e| e.to_string())?;
        let mut knocking =
            Knocking { fabric, qp, began: now, answer: None, late: now + timeout * 2, over: false };
        run(&self.ring, POLL, &mut knocking).map_err(|e| e.to_string())?;
        knocking.answer.unwrap_or_else(|| Err(format!("no answer within {timeout:?}")))
    }
}

#[derive(Debug)]
pub(crate) struct Knock {
    /// Whether the connect was accepted; false for a reject.
    pub(crate) accepted: bool,
    pub(crate) private_data: PrivateData,
    pub(crate) after: Duration,
}

struct Pings<'a> {
    fabric: &'a mut dyn Fabric,
    clients: &'a mut [PingClient],
    watch: &'a mut dyn Watch,
    inbox: Inbox<()>,
    next_tick: Option<Instant>,
    until: Option<Instant>,
    stops: u32,
    is_done: bool,
}

impl Pings<'_> {
    fn stop(&mut self, now: Instant) {
        for client in self.clients.iter_mut() {
            client.stop(now, self.fabric);
        }
    }
}

impl Shard for Pings<'_> {
    type Message = ();

    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = self.fabric.poll(now);
        while let Some(event) = self.fabric.next_event() {
            busy = true;
            let qp = match &event {
                FabricEvent::Established { qp, .. }
                | FabricEvent::ConnectFailed { qp, .. }
                | FabricEvent::Closed { qp, .. } => *qp,
                FabricEvent::Completion(wc) => wc.qp,
                FabricEvent::Request(_) => continue,
            };
            let mut clients = self.clients.iter_mut();
            if let Some(client) = clients.find(|client| client.qp() == Some(qp)) {
                client.handle_event(now, event, self.fabric);
            }
        }
        while self.inbox.take().is_some() {
            self.stops += 1;
            self.stop(now);
        }
        if self.until.is_some_and(|at| at <= now) {
            self.until = None;
            self.stop(now);
        }
        for (at, client) in self.clients.iter_mut().enumerate() {
            busy |= client.poll(now, self.fabric);
            while let Some(event) = client.next_event() {
                busy = true;
                self.watch.event(now, at, event);
            }
        }
        if self.next_tick.is_some_and(|at| at <= now) {
            self.watch.tick(now, self.clients);
            self.next_tick = self.watch.tick_every().map(|every| now + every);
        }
        self.is_done = self.stops > 1 || self.clients.iter().all(PingClient::is_ended);
        self.fabric.flush(now);
        busy
    }

    fn deadline(&self) -> Option<Instant> {
        let clients = self.clients.iter().map(PingClient::deadline);
        let own = earliest(self.until, self.next_tick);
        clients.fold(earliest(self.fabric.deadline(), own), earliest)
    }

    fn is_done(&self) -> bool {
        self.is_done
    }

    fn inbox(&mut self) -> Option<&mut Inbox<()>> {
        Some(&mut self.inbox)
    }
}

struct Knocking<'a> {
    fabric: &'a mut dyn Fabric,
    qp: rtrs_core::ids::QpNum,
    began: Instant,
    answer: Option<Result<Knock, String>>,
    /// Time at which the run stops waiting.
    late: Instant,
    over: bool,
}

impl Shard for Knocking<'_> {
    type Message = ();

    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = self.fabric.poll(now);
        while let Some(event) = self.fabric.next_event() {
            busy = true;
            let after = now - self.began;
            match event {
                FabricEvent::Established { qp, private_data } if qp == self.qp => {
                    self.answer =
                        Some(Ok(Knock { accepted: true, private_data: *private_data, after }));
                    self.fabric.disconnect(now, qp);
                }
                FabricEvent::ConnectFailed { qp, failure } if qp == self.qp => {
                    self.over = true;
                    self.answer = Some(match failure {
                        ConnectFailure::Rejected(private_data) => {
                            Ok(Knock { accepted: false, private_data: *private_data, after })
                        }
                        ConnectFailure::Failed(reason) => Err(reason.to_string()),
                    });
                }
                FabricEvent::Closed { qp, .. } if qp == self.qp => self.over = true,
                _ => {}
            }
        }
        self.over |= now >= self.late;
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
