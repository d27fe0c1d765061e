//! Why messages are waiting, and since when: congested ports, and peers that acknowledge nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use rtrs_base::log_limit::LogLimit;
use rtrs_base::time::{Duration, Instant};

use crate::proto::{ConnectionInfo, ConnectionState, Node, TcpInfo};
use crate::wire::CongestionMap;

/// Interval between checks of messages' progress, while any are waiting.
const CHECK: Duration = Duration::from_secs(1);
/// Time without progress, or with congestion, after which the condition is logged.
const REPORT_AFTER: Duration = Duration::from_secs(10);

/// Acknowledged part of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Acked {
    /// TCP port of the connection on this node.
    port: u16,
    bytes: u64,
}

/// Messages on a path, none of which is being acknowledged.
#[derive(Clone, Copy, Debug)]
struct Stuck {
    since: Instant,
    /// State at the last check; `None` if no connection was up.
    acked: Option<Acked>,
}

/// Paths of a peer that have been stuck for a long time.
#[derive(Clone, Copy, Debug)]
struct Late {
    since: Instant,
    /// Total cost of the messages on these paths.
    queued: usize,
    /// Whether the connections of all these paths are up.
    is_up: bool,
}

/// A congested port.
#[derive(Clone, Copy, Debug)]
struct Congested {
    since: Instant,
    is_logged: bool,
}

/// Congested ports and stuck peers of a node.
#[derive(Debug, Default)]
pub(super) struct Blocked {
    ports: BTreeMap<(IpAddr, u16), Congested>,
    /// Paths with messages, by peer and number.
    paths: BTreeMap<(IpAddr, usize), Stuck>,
    /// Stuck peers that have been logged.
    logged: BTreeSet<IpAddr>,
    check_at: Option<Instant>,
    log: LogLimit,
}

impl Blocked {
    /// Handles a changed congestion map of a peer, or of the node itself.
    pub(super) fn congestion_changed(
        &mut self,
        now: Instant,
        peer: IpAddr,
        map: Option<&CongestionMap>,
    ) {
        let is_congested = |port| map.is_some_and(|map| map.get(port));
        let range = (peer, 0)..=(peer, u16::MAX);
        let cleared = self.ports.range(range).filter(|((_, port), _)| !is_congested(*port));
        for key in cleared.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.ports.remove(&key);
        }
        for port in map.into_iter().flat_map(CongestionMap::ports) {
            let new = Congested { since: now, is_logged: false };
            self.ports.entry((peer, port)).or_insert(new);
        }
    }

    /// Returns how long a port has been congested.
    pub(super) fn congested(&self, now: Instant, peer: IpAddr, port: u16) -> Option<Duration> {
        self.ports.get(&(peer, port)).map(|congested| now.since(congested.since))
    }

    /// Returns how long a peer has acknowledged nothing although messages are waiting for it: the
    /// longest time over its paths.
    pub(super) fn stuck(&self, now: Instant, peer: IpAddr) -> Option<Duration> {
        // With progress at each check, the time is at most one interval.
        let paths = self.paths.range((peer, 0)..=(peer, usize::MAX));
        let span = now.since(paths.map(|(_, stuck)| stuck.since).min()?);
        Some(span).filter(|span| *span >= 2 * CHECK)
    }

    /// Checks the progress of messages periodically, while there are messages or congested ports.
    pub(super) fn turn(&mut self, now: Instant, node: &Node) {
        let is_any = node.memory().1 > 0 || !self.ports.is_empty() || !self.paths.is_empty();
        match self.check_at {
            None if is_any => self.check_at = Some(now + CHECK),
            Some(at) if at <= now => {
                self.check(now, node);
                self.check_at = is_any.then(|| now + CHECK);
            }
            _ => {}
        }
    }

    /// Returns the time of the next check.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.check_at
    }

    fn check(&mut self, now: Instant, node: &Node) {
        self.check_paths(now, node.peers().connections(), node.peers().tcp_sockets());
        for ((address, port), congested) in &mut self.ports {
            if is_reported(now, congested.since, &mut congested.is_logged)
                && let Some(left_out) = self.log.admit(now)
            {
                let seconds = now.since(congested.since).as_secs();
                tracing::warn!(%address, port, seconds, left_out, "port stays congested");
            }
        }
    }

    /// Checks the progress of each path. The log has one line per peer, not one per path.
    fn check_paths(
        &mut self,
        now: Instant,
        connections: impl Iterator<Item = ConnectionInfo>,
        sockets: impl Iterator<Item = TcpInfo>,
    ) {
        let acked = |tcp: &TcpInfo| Acked { port: tcp.own_port, bytes: tcp.acked };
        let links: BTreeMap<(IpAddr, usize), Acked> =
            sockets.map(|tcp| ((tcp.peer, tcp.path), acked(&tcp))).collect();
        let former = std::mem::take(&mut self.paths);
        let mut all: BTreeMap<IpAddr, Late> = BTreeMap::new();
        for info in connections.filter(|info| info.queued > 0) {
            let key = (info.peer, info.path);
            let acked = links.get(&key).copied();
            let known = former.get(&key).filter(|stuck| !has_progress(stuck.acked, acked));
            let since = known.map_or(now, |stuck| stuck.since);
            self.paths.insert(key, Stuck { since, acked });
            if now.since(since) >= REPORT_AFTER {
                let new = Late { since, queued: 0, is_up: true };
                let late = all.entry(info.peer).or_insert(new);
                late.since = late.since.min(since);
                late.queued += info.queued;
                late.is_up &= info.state == ConnectionState::Up;
            }
        }
        self.logged.retain(|peer| all.contains_key(peer));
        for (peer, late) in all {
            if self.logged.insert(peer)
                && let Some(left_out) = self.log.admit(now)
            {
                let seconds = now.since(late.since).as_secs();
                tracing::warn!(
                    %peer, seconds, queued = late.queued, up = late.is_up, left_out,
                    "peer acknowledges no messages"
                );
            }
        }
    }
}

/// Whether a peer has acknowledged more bytes on the same connection.
fn has_progress(before: Option<Acked>, after: Option<Acked>) -> bool {
    let (Some(before), Some(after)) = (before, after) else { return false };
    before.port == after.port && after.bytes > before.bytes
}

/// Whether a condition that has lasted since `since` must be logged now. Returns true only once.
fn is_reported(now: Instant, since: Instant, is_logged: &mut bool) -> bool {
    now.since(since) >= REPORT_AFTER && !std::mem::replace(is_logged, true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Config, Outgoing};

    const PEER: [u8; 4] = [10, 0, 0, 9];

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn the_time_of_congestion_is_kept_for_each_port() {
        let (mut blocked, mut map) = (Blocked::default(), CongestionMap::default());
        let peer = PEER.into();
        map.set(4000, true);
        blocked.congestion_changed(at(1), peer, Some(&map));
        map.set(4001, true);
        blocked.congestion_changed(at(3), peer, Some(&map));
        let seconds = |blocked: &Blocked, port| blocked.congested(at(5), peer, port);
        assert_eq!(seconds(&blocked, 4000), Some(Duration::from_secs(4)));
        assert_eq!(seconds(&blocked, 4001), Some(Duration::from_secs(2)));
        map.set(4000, false);
        blocked.congestion_changed(at(4), peer, Some(&map));
        assert_eq!(seconds(&blocked, 4000), None);
        assert_eq!(seconds(&blocked, 4001), Some(Duration::from_secs(2)));
        blocked.congestion_changed(at(5), peer, None);
        assert_eq!(seconds(&blocked, 4001), None, "the peer is forgotten");
    }

    #[test]
    fn a_peer_that_cannot_be_reached_is_stuck() {
        let mut node = Node::new(Config::new([10, 0, 0, 1].into(), 1, 1));
        let mut blocked = Blocked::default();
        blocked.turn(at(1), &node);
        assert_eq!(blocked.deadline(), None);
        let id = node.bind(4000).unwrap();
        node.send(at(1), id, Outgoing::new(PEER.into(), 9, b"x".to_vec())).unwrap();
        for second in 1..=14 {
            blocked.turn(at(second), &node);
        }
        // Counted from the first check.
        assert_eq!(blocked.stuck(at(14), PEER.into()), Some(Duration::from_secs(12)));
        node.cancel(id, PEER.into(), 9);
        blocked.turn(at(15), &node);
        assert_eq!(blocked.stuck(at(15), PEER.into()), None);
        blocked.turn(at(16), &node);
        assert_eq!(blocked.deadline(), None);
    }

    /// Checks a peer with messages on two paths; `acked` counts the bytes acknowledged on each.
    fn check_two_paths(blocked: &mut Blocked, second: u64, acked: [u64; 2]) {
        let peer = PEER.into();
        let info = |path| ConnectionInfo {
            peer,
            path,
            next_tx: 1,
            next_rx: 1,
            state: ConnectionState::Up,
            is_sending: true,
            queued: 200,
            held: 0,
        };
        let tcp = |path: usize| TcpInfo {
            peer,
            path,
            own_port: 4000,
            peer_port: 5000,
            header_left: 0,
            payload_left: 0,
            written: 1000,
            complete: 1000,
            acked: acked[path],
        };
        let now = at(second);
        blocked.check_paths(now, (0..2).map(info), (0..2).map(tcp));
    }

    #[test]
    fn a_peer_is_stuck_for_as_long_as_its_slowest_path() {
        for stuck in 0..2 {
            let mut blocked = Blocked::default();
            let mut acked = [10; 2];
            for second in 1..=20 {
                acked[1 - stuck] += 1;
                check_two_paths(&mut blocked, second, acked);
            }
            assert_eq!(blocked.stuck(at(20), PEER.into()), Some(Duration::from_secs(19)));
            assert_eq!(blocked.logged.len(), 1);
            // Neither path is stuck anymore.
            check_two_paths(&mut blocked, 21, acked.map(|bytes| bytes + 1));
            assert_eq!(blocked.stuck(at(21), PEER.into()), None);
            assert!(blocked.logged.is_empty());
        }
    }

    #[test]
    fn a_peer_that_is_stuck_on_all_paths_is_logged_once() {
        let mut blocked = Blocked::default();
        let lines = (1..=20).filter(|second| {
            let before = blocked.logged.len();
            check_two_paths(&mut blocked, *second, [10; 2]);
            blocked.logged.len() > before
        });
        assert_eq!(lines.collect::<Vec<_>>(), [11]);
    }

    #[test]
    fn acknowledged_bytes_are_progress() {
        let acked = |port, bytes| Some(Acked { port, bytes });
        assert!(has_progress(acked(7, 10), acked(7, 11)));
        for (before, after) in [
            (None, None),
            (None, acked(7, 11)),
            (acked(7, 10), None),
            (acked(7, 10), acked(7, 10)),
            (acked(7, 10), acked(8, 11)),
        ] {
            assert!(!has_progress(before, after), "{before:?} {after:?}");
        }
    }
}
