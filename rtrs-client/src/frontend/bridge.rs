//! NBD bridge of a shard, as the front ends with NBD use it.

use std::io;
use std::sync::Arc;

use nbd_bridge::{Bridge, BridgeConfig, Group, Seat};

use super::front_end::{Place, Shards};
use crate::engine::SessionDevice;

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
    Bridge::seated(place.ring, place.pools, Box::new(device), place.export, config, seat)
}
