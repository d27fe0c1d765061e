//! Invariants that hold throughout a run, and checks for leftovers at its end.

use std::net::IpAddr;

use rtrs_client::engine::ClientEngine;
use rtrs_core::fabric::sim::Fault;
use rtrs_core::time::Instant;
use rtrs_server::engine::control::DRAINING_MAX;

use super::super::Failure;
use super::super::faults::Act;
use super::super::host::{client_ip, server_ip};
use super::super::options::Options;
use super::super::workload::Workload;
use super::Cluster;
use super::second::Second;

/// Maximum number of bytes that a path registers on the server in addition to its chunks.
const PATH_EXTRA_MAX: usize = 256 << 10;
/// Maximum number of bytes that a connection registers on the client in addition to the IO buffers.
const CORE_EXTRA_MAX: usize = 64 << 10;

/// Number of bytes of zeroes that a core of the client registers.
const ZEROES_MAX: usize = 1 << 20;

impl Cluster {
    /// Returns why the session gave up, if it did.
    pub(in super::super) fn gave_up(&self) -> Option<String> {
        self.client.first()?.core.failure().map(ToString::to_string)
    }

    /// Returns the links between client and server, by path.
    pub(in super::super) fn links(&self) -> Vec<(IpAddr, IpAddr)> {
        (0..self.options.paths).map(|path| (client_ip(path), server_ip(path))).collect()
    }

    /// Takes a link down permanently, for a planted bug.
    pub(in super::super) fn kill_link(&mut self) -> Result<(), Failure> {
        let (a, b) = self.links()[0];
        self.act(Act::World(Fault::LinkDown(a, b)))
    }

    /// Returns the number of slow epoch saves, and of saves that were cut short when the server
    /// ended.
    pub(in super::super) fn saves(&self) -> (u64, u64) {
        let stats = self.kept.stats();
        (stats.late, stats.cut)
    }

    /// Returns the number of writes by the second session.
    pub(in super::super) fn guest_writes(&self) -> u64 {
        self.guest.as_ref().and_then(|guest| guest.work()).map_or(0, |work| work.stats.writes)
    }

    /// Settles all oracles. Requires that nothing is in flight anywhere.
    pub(in super::super) fn settle_all(&mut self) {
        self.oracle.settle();
        if let Some(oracle) = self.guest.as_mut().and_then(|guest| guest.oracle_mut()) {
            oracle.settle();
        }
        if let Some(second) = &mut self.second {
            second.oracle.settle();
        }
    }

    /// Returns the number of requests so far on each core, by path.
    pub(in super::super) fn path_requests(&self) -> Vec<Vec<u64>> {
        self.client.iter().map(|host| host.core.path_requests()).collect()
    }

    /// Returns when the last core that is pinning memory becomes free again.
    pub(in super::super) fn pinned_until(&self) -> Instant {
        self.pinned_until
    }

    /// Returns the number of requests that have waited on the server for their first copy.
    pub(in super::super) fn replays(&self) -> u64 {
        let sessions =
            self.server.first().map(|host| host.core.snapshot(self.now())).unwrap_or_default();
        sessions.iter().flat_map(|session| &session.paths).map(|path| path.io.replays).sum()
    }

    /// Returns the number of requests that are waiting on the server for a closed path's IO.
    pub(in super::super) fn blocked(&self) -> u64 {
        let sessions =
            self.server.first().map(|host| host.core.snapshot(self.now())).unwrap_or_default();
        sessions.iter().map(|session| session.io.blocked).sum()
    }

    /// Returns the numbers of sessions, connections, requests and block IOs that the server still
    /// holds.
    pub(in super::super) fn left_at_server(&self) -> (usize, usize, u64, usize) {
        let sessions = self.server.first().map_or(0, |host| host.core.snapshot(self.now()).len());
        let shards = || self.server.iter().map(|host| host.core.shard());
        let connections = shards().map(|shard| shard.connections()).sum();
        let second = self.second.as_ref().map_or(0, Second::block_inflight);
        let block = self.disk.inflight() + self.exports.inflight() + second;
        (sessions, connections, shards().map(|s| s.inflight()).sum(), block)
    }

    /// Returns the numbers of IOs and permits that the client still holds.
    pub(in super::super) fn left_at_client(&self) -> (usize, usize) {
        let cores = || self.client.iter().map(|host| &host.core);
        (cores().map(ClientEngine::inflight).sum(), cores().map(ClientEngine::permits_held).sum())
    }

    /// Returns the numbers of bytes registered on the client and on the server.
    pub(in super::super) fn registered(&self) -> (usize, usize) {
        (self.world.registered(self.nodes[0]), self.world.registered(self.nodes[1]))
    }

    /// Checks that registered memory and the server's requests stay within bounds. The memory bound
    /// is, for the server, the chunks of all possible paths, dead ones included; for the client,
    /// each core's buffers once per path.
    pub(super) fn check_memory(&mut self) -> Result<(), Failure> {
        let (client, server) = self.registered();
        self.registered_max = self.registered_max.max(server);
        let Options { paths, queue_depth, chunk_size, .. } = self.options;
        let pool = usize::from(queue_depth) * chunk_size as usize;
        let guest = usize::from(self.guest.is_some()) * (1 + DRAINING_MAX);
        // Another server on the same host may register the same amount.
        let servers = if self.options.other_servers || self.options.extra.twin { 2 } else { 1 };
        // A client that lost power left a session behind, which lasts until its heartbeats are
        // missed. Until then, the client's new paths are set up and then refused.
        let sessions = if self.options.faults.client_restart > 0 { 2 } else { 1 };
        let server_max =
            servers * (sessions * (paths + DRAINING_MAX) + guest) * (pool + PATH_EXTRA_MAX);
        let buffers: usize = self.workloads().map(Workload::bytes).sum();
        let cores = usize::from(self.options.client_cores);
        // If the server's write zeroes is not trustworthy, each core sends zeroes from memory.
        let zeroes = if self.options.kernel.is_some() { cores * ZEROES_MAX } else { 0 };
        let client_max = (paths + 1) * (buffers + zeroes + (cores + 1) * CORE_EXTRA_MAX);
        for (who, bytes, max) in [("client", client, client_max), ("server", server, server_max)] {
            // The bounds are for one session.
            if bytes > max && !self.beside.any {
                let text = format!("the {who} has registered {bytes} bytes, over {max}");
                return Err(Failure::new("memory", text));
            }
        }
        let requests: u64 = self.server.iter().map(|host| host.core.shard().inflight()).sum();
        let requests_max = (paths + DRAINING_MAX + guest) as u64 * u64::from(queue_depth);
        if requests > requests_max && !self.beside.any {
            let text = format!("the server has {requests} requests, over {requests_max}");
            return Err(Failure::new("memory", text));
        }
        Ok(())
    }

    /// Checks that no IO has been in flight longer than its bound, if it has one.
    pub(super) fn check_time(&self) -> Result<(), Failure> {
        let Some(bound) = self.options.stall_max else { return Ok(()) };
        let now = self.now();
        let Some(work) = self.workloads().find(|work| work.age(now) > bound) else {
            return Ok(());
        };
        let oldest = work.oldest(now).unwrap_or_default();
        let text = format!(
            "one path always works, but an IO takes more than {} ms: {oldest}",
            bound.as_millis()
        );
        Err(Failure::new("live", text))
    }

    /// Checks the internal invariants of all engines.
    pub(in super::super) fn check(&mut self) -> Result<(), Failure> {
        for host in &mut self.client {
            host.core.check();
            host.work.check()?;
        }
        if let Some(second) = &mut self.second {
            second.check()?;
        }
        for host in &self.server {
            host.core.check();
        }
        self.check_memory()?;
        self.check_depth()
    }

    /// Checks that each session has half the queue depth if the server has little memory, both from
    /// its first connection and after any restart.
    fn check_depth(&self) -> Result<(), Failure> {
        let Some(control) = self.server.first().filter(|_| self.options.extra.little_memory) else {
            return Ok(());
        };
        let depth = self.options.queue_depth / 2;
        let sessions = control.core.snapshot(self.now());
        match sessions.iter().find(|session| session.queue_depth != depth) {
            None => Ok(()),
            Some(other) => {
                let text = format!("a queue depth of {} instead of {depth}", other.queue_depth);
                Err(Failure::new("depth", text))
            }
        }
    }
}
