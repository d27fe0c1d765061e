//! Context of an event: time, providers and outgoing messages.

use rtrs_core::fabric::Fabric;
use rtrs_core::time::Instant;

use super::message::Outbox;

/// Providers of a shard, in the order of their indexes.
pub type Fabrics = [Box<dyn Fabric>];

/// Time, providers and outgoing messages of one event.
#[derive(Debug)]
pub struct Ctx<'a> {
    /// Time of the event.
    pub now: Instant,
    /// Providers of the shard.
    pub fabrics: &'a mut Fabrics,
    /// Messages to other parts and other shards.
    pub out: &'a mut Outbox,
}
