//! NBD bridge of a shard, as used by the front ends with NBD.

use std::io;
use std::sync::Arc;

use nbd_bridge::{Bridge, BridgeConfig, Group, Peer, Seat};

use super::client::FrontEndClient;
use super::front_end::{Place, Shards};
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

/// Converts the peer of a client's socket.
pub(super) fn client_of(peer: Peer) -> FrontEndClient {
    match peer {
        Peer::Process(pid) => FrontEndClient::Process(pid),
        Peer::Address(address) => FrontEndClient::Address(address),
        Peer::TlsRelay => FrontEndClient::Tls,
        Peer::Unknown => FrontEndClient::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
