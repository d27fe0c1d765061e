//! NBD bridge of a shard, as the front ends with NBD use it.

use std::io;
use std::sync::Arc;

use nbd_bridge::{Bridge, BridgeConfig, BridgeStats, Group, Peer, Seat};

use super::client::FrontEndClient;
use super::front_end::{Place, Shards};
use super::stats::FrontEndStats;
use crate::engine::SessionDevice;
use crate::plan::AttachPlan;
use crate::settings::{Access, SlowIo};

/// Returns the limits of a bridge that serves this plan's volume.
pub(super) fn config_of(plan: &AttachPlan) -> BridgeConfig {
    let buffer_bytes = usize::try_from(plan.settings.buffer_size.bytes()).unwrap_or(usize::MAX);
    let fails = plan.slow_io() == SlowIo::Fail;
    let deferred_max = fails.then(|| plan.session.settings.io_timeout.get());
    let shared_writes = plan.session.access == Access::Migration;
    BridgeConfig { buffer_bytes, deferred_max, shared_writes, ..BridgeConfig::default() }
}

/// Creates a group in which the bridges of these shards see each other's orphaned writes.
pub(super) fn group(shards: &Shards) -> Arc<Group> {
    let wake = Arc::clone(&shards.wake);
    Group::new(usize::from(shards.count), move |shard| wake(shard))
}

/// Creates the bridge of a shard.
pub(super) fn bridge(
    place: &Place<'_>,
    device: SessionDevice,
    config: BridgeConfig,
    group: &Arc<Group>,
) -> io::Result<Bridge> {
    let seat = Seat { group: Arc::clone(group), shard: place.shard.index() };
    Bridge::seated(place.ring, &place.pools.nbd, Box::new(device), place.export, config, seat)
}

/// Converts the other end of a client's socket.
pub(super) fn client_of(peer: Peer) -> FrontEndClient {
    match peer {
        Peer::Process(pid) => FrontEndClient::Process(pid),
        Peer::Address(address) => FrontEndClient::Address(address),
        Peer::TlsRelay => FrontEndClient::Tls,
        Peer::Unknown => FrontEndClient::Unknown,
    }
}

/// Converts the counters of a bridge.
pub(super) fn stats_of(stats: BridgeStats) -> FrontEndStats {
    // Without `..`, so that a counter added to the bridge is not forgotten here.
    let BridgeStats {
        connections,
        negotiated,
        completed,
        failed,
        bytes_received,
        bytes_sent,
        bytes_moved,
        orphaned,
        deferred,
        fragments,
        given_up,
    } = stats;
    FrontEndStats {
        connections,
        negotiated,
        completed,
        failed,
        bytes_received,
        bytes_sent,
        bytes_moved,
        orphaned,
        deferred,
        fragments,
        given_up,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counters that differ from each other.
    fn distinct() -> BridgeStats {
        BridgeStats {
            connections: 1,
            negotiated: 2,
            completed: 3,
            failed: 4,
            bytes_received: 5,
            bytes_sent: 6,
            bytes_moved: 7,
            orphaned: 8,
            deferred: 9,
            fragments: 10,
            given_up: 11,
        }
    }

    #[test]
    fn stats_have_the_names_and_order_of_the_bridge() {
        let (theirs, ours) = (distinct(), stats_of(distinct()));
        let text = serde_json::to_string(&ours).unwrap();
        assert_eq!(text, serde_json::to_string(&theirs).unwrap());
        assert_eq!(serde_json::from_str::<FrontEndStats>(&text).unwrap(), ours);
        // Other versions may have fewer counters.
        assert_eq!(serde_json::from_str::<FrontEndStats>("{}").unwrap(), FrontEndStats::default());
    }

    #[test]
    fn stats_of_shards_add_up_as_those_of_bridges() {
        let (mut theirs, mut ours) = (distinct(), stats_of(distinct()));
        theirs.add(&distinct());
        ours.add(&stats_of(distinct()));
        assert_eq!(ours, stats_of(theirs));
    }

    #[test]
    fn clients_have_the_description_and_order_of_peers() {
        let address = |text: &str| Peer::Address(text.parse().unwrap());
        let peers = [
            Peer::Process(std::process::id()),
            Peer::Process(u32::MAX),
            address("10.0.0.7:1"),
            address("[::1]:1"),
            Peer::TlsRelay,
            Peer::Unknown,
        ];
        let clients = peers.map(client_of);
        assert_eq!(clients.map(|client| client.describe()), peers.map(|peer| peer.describe()));
        assert!(peers.is_sorted() && clients.is_sorted(), "clients are listed in order");
    }
}
