//! Ping server: identifies ping requests and limits their number and their idle time. `conn.rs`
//! implements one connection.
//!
//! Pings need no permission, so capacity is shared by source: when it is exhausted, a new ping from
//! a source with fewer pings replaces the oldest ping of the source with the most.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::conn::{Fault, PingConn, Turn};
use super::messages::limits;
use crate::fabric::{ConnRequest, Fabric, FabricEvent, PdUse, PrivateData};
use crate::ids::QpNum;
use crate::proto::quota::Source;
use crate::time::{Duration, Instant};
use crate::wire::{PingHello, PingReply, PingStatus};

/// Limits of a server's pings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PingServerConfig {
    /// Whether pings are answered at all.
    pub enabled: bool,
    /// Whether requests without private data are treated as rping's.
    pub rping: bool,
    /// Maximum number of concurrent pings.
    pub connections_max: usize,
    /// Maximum size of data in bytes, including rping's.
    pub size_max: u32,
    /// Silence after which a ping is closed.
    pub idle: Duration,
}

impl Default for PingServerConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            rping: false,
            connections_max: 64,
            size_max: PingHello::SIZE_MAX,
            idle: Duration::from_secs(30),
        }
    }
}

impl PingServerConfig {
    /// Returns true if a request with this private data belongs to [`PingServer::handle_request`].
    #[must_use]
    pub fn claims(&self, private_data: &[u8]) -> bool {
        PingHello::is_ping(private_data)
            || (self.enabled && self.rping && private_data.iter().all(|byte| *byte == 0))
    }
}

/// Statistics of a server's pings since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PingServerStats {
    /// Number of connections accepted.
    pub accepted: u64,
    /// Number of requests refused.
    pub refused: u64,
    /// Number of ping-pong rounds answered.
    pub rounds: u64,
    /// Number of connections ended because the peer violated the protocol or timed out.
    pub faults: u64,
}

/// Pings of a server, across all its providers.
#[derive(Debug)]
pub struct PingServer {
    config: PingServerConfig,
    conns: BTreeMap<(usize, QpNum), Running>,
    stats: PingServerStats,
    stopping: bool,
}

/// Accepted ping.
#[derive(Debug)]
struct Running {
    conn: PingConn,
    peer: SocketAddr,
    /// Number of pings accepted before this one.
    number: u64,
}

impl Running {
    /// Returns when the client was last heard from; None while the ping is being taken down.
    fn idle_since(&self) -> Option<Instant> {
        self.conn.idle_since()
    }

    fn source(&self) -> Source {
        Source::of(self.peer.ip())
    }
}

impl PingServer {
    /// Creates a server without pings.
    #[must_use]
    pub fn new(config: PingServerConfig) -> Self {
        Self { config, conns: BTreeMap::new(), stats: PingServerStats::default(), stopping: false }
    }

    /// Calls [`PingServerConfig::claims`] on the configuration.
    #[must_use]
    pub fn claims(&self, private_data: &[u8]) -> bool {
        self.config.claims(private_data)
    }

    /// Refuses a request before it reaches a ping server, because too many are in transit.
    pub fn refuse_busy(now: Instant, request: ConnRequest, fabric: &mut dyn Fabric) {
        let reply = PingReply { status: PingStatus::Busy };
        fabric.reject(now, request, &PrivateData::new(&reply.encode()));
    }

    /// Returns true if the queue pair belongs to a ping.
    #[must_use]
    pub fn owns(&self, provider: usize, qp: QpNum) -> bool {
        !self.conns.is_empty() && self.conns.contains_key(&(provider, qp))
    }

    /// Returns the number of running pings.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.conns.len()
    }

    /// Returns the statistics.
    #[must_use]
    pub const fn stats(&self) -> PingServerStats {
        self.stats
    }

    /// Handles a ping's connection request: accepts or refuses it.
    pub fn handle_request(
        &mut self,
        now: Instant,
        provider: usize,
        request: ConnRequest,
        fabric: &mut dyn Fabric,
    ) {
        let peer = request.peer;
        let source = Source::of(peer.ip());
        let hello = match self.admit(&request) {
            Ok(hello) if self.make_room(now, provider, source, fabric) => hello,
            Ok(_) => {
                let most = self.config.connections_max;
                tracing::info!(%peer, most, "refused a ping: too many are running");
                return self.refuse(now, request, PingStatus::Busy, fabric);
            }
            Err((status, why)) => {
                tracing::info!(%peer, "refused a ping: {why}");
                return self.refuse(now, request, status, fabric);
            }
        };
        let prepared = fabric
            .alloc_pd(PdUse::Accept(&request))
            .and_then(|pd| PingConn::new(now, &pd, hello, self.config.size_max).map(|c| (pd, c)));
        let (pd, mut conn) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                tracing::warn!(%peer, %error, "refused a ping");
                return self.refuse(now, request, PingStatus::Memory, fabric);
            }
        };
        let answer = match hello {
            Some(_) => PrivateData::new(&PingReply { status: PingStatus::Good }.encode()),
            // rping expects no private data.
            None => PrivateData::EMPTY,
        };
        let depth = hello.map_or(1, |hello| hello.depth);
        let accepted = fabric.accept(now, &pd, request, limits(depth), &answer);
        match accepted {
            Ok(qp) => {
                self.stats.accepted += 1;
                tracing::debug!(%peer, ?hello, "accepted a ping");
                let opened = conn.open(fabric, qp);
                let number = self.stats.accepted;
                self.conns.insert((provider, qp), Running { conn, peer, number });
                if let Err(error) = opened {
                    self.fault(now, provider, qp, &Fault::Fabric(error), fabric);
                }
            }
            Err(error) => {
                self.stats.refused += 1;
                tracing::warn!(%peer, %error, "cannot accept a ping");
            }
        }
    }

    fn admit(&self, request: &ConnRequest) -> Result<Option<PingHello>, (PingStatus, String)> {
        if !self.config.enabled || self.stopping {
            return Err((PingStatus::Off, "pings are off".into()));
        }
        let data = request.private_data.as_bytes();
        if !PingHello::is_ping(data) {
            return Ok(None);
        }
        let hello = PingHello::decode(data).map_err(|e| (PingStatus::Unusable, e.to_string()))?;
        if hello.size > self.config.size_max {
            let text = format!("{} bytes; the maximum is {}", hello.size, self.config.size_max);
            return Err((PingStatus::Unusable, text));
        }
        Ok(Some(hello))
    }

    /// Returns true if one more ping from a source may run. Evicts another ping if necessary.
    fn make_room(
        &mut self,
        now: Instant,
        provider: usize,
        source: Source,
        fabric: &mut dyn Fabric,
    ) -> bool {
        let most = self.config.connections_max;
        let live = || self.conns.iter().filter(|(_, ping)| ping.idle_since().is_some());
        if live().count() < most {
            // Pings that are being taken down use memory too.
            return self.conns.len() < 2 * most;
        }
        let mut counts: BTreeMap<Source, usize> = BTreeMap::new();
        live().for_each(|(_, ping)| *counts.entry(ping.source()).or_default() += 1);
        let own = counts.get(&source).copied().unwrap_or(0);
        let of_most = live()
            .filter(|(key, ping)| key.0 == provider && counts[&ping.source()] > own + 1)
            .max_by_key(|(_, ping)| (counts[&ping.source()], u64::MAX - ping.number));
        let oldest = of_most.map(|((_, qp), _)| *qp);
        let Some(qp) = oldest.filter(|_| self.conns.len() < 2 * most) else { return false };
        self.fault(now, provider, qp, &Fault::GivesWay, fabric);
        true
    }

    fn refuse(
        &mut self,
        now: Instant,
        request: ConnRequest,
        status: PingStatus,
        fabric: &mut dyn Fabric,
    ) {
        self.stats.refused += 1;
        fabric.reject(now, request, &PrivateData::new(&PingReply { status }.encode()));
    }

    /// Handles an event of a queue pair that the server owns.
    pub fn handle_event(
        &mut self,
        now: Instant,
        provider: usize,
        event: &FabricEvent,
        fabric: &mut dyn Fabric,
    ) {
        let (qp, turn) = match event {
            FabricEvent::Completion(wc) => {
                let Some(ping) = self.conns.get_mut(&(provider, wc.qp)) else { return };
                (wc.qp, ping.conn.handle_completion(now, wc, fabric))
            }
            FabricEvent::Closed { qp, reason } => {
                tracing::debug!(%qp, %reason, "a ping ended");
                self.conns.remove(&(provider, *qp));
                return;
            }
            FabricEvent::ConnectFailed { qp, .. } => {
                self.conns.remove(&(provider, *qp));
                return;
            }
            FabricEvent::Established { qp, .. } => {
                if let Some(ping) = self.conns.get_mut(&(provider, *qp)) {
                    ping.conn.heard(now);
                }
                return;
            }
            FabricEvent::Request(_) => return,
        };
        match turn {
            Ok(Turn::On) => {}
            Ok(Turn::Round) => self.stats.rounds += 1,
            Err(fault) => self.fault(now, provider, qp, &fault, fabric),
        }
    }

    fn fault(
        &mut self,
        now: Instant,
        provider: usize,
        qp: QpNum,
        fault: &Fault,
        fabric: &mut dyn Fabric,
    ) {
        let Some(ping) = self.conns.get_mut(&(provider, qp)) else { return };
        if ping.conn.end() {
            self.stats.faults += 1;
            tracing::info!(peer = %ping.peer, %qp, "ended a ping: {fault}");
            fabric.abort(now, qp);
        }
    }

    /// Ends pings that have been silent for too long. Returns true if any were ended.
    pub fn poll(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) -> bool {
        if self.conns.is_empty() {
            return false;
        }
        let late: Vec<(usize, QpNum)> = self
            .conns
            .iter()
            .filter(|(_, ping)| ping.idle_since().is_some_and(|at| at + self.config.idle <= now))
            .map(|(key, _)| *key)
            .collect();
        for (provider, qp) in &late {
            if let Some(fabric) = fabrics.get_mut(*provider) {
                self.fault(now, *provider, *qp, &Fault::Silent(self.config.idle), fabric.as_mut());
            }
        }
        !late.is_empty()
    }

    /// Returns the time by which `poll` must be called even if nothing happens.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let oldest = self.conns.values().filter_map(Running::idle_since).min();
        oldest.map(|at| at + self.config.idle)
    }

    /// Ends all pings and accepts no more.
    pub fn stop(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) {
        self.stopping = true;
        for ((provider, qp), ping) in &mut self.conns {
            if let Some(fabric) = fabrics.get_mut(*provider).filter(|_| ping.conn.end()) {
                fabric.disconnect(now, *qp);
            }
        }
    }
}
