//! What every part of the engine works with during one event.

use rtrs_core::fabric::Fabric;
use rtrs_core::time::Instant;

use super::message::Outbox;

/// The providers of a shard, in the order in which paths name them.
pub type Fabrics = [Box<dyn Fabric>];

/// The time, the providers and the outgoing messages of one event.
#[derive(Debug)]
pub struct Ctx<'a> {
    /// When the event happens.
    pub now: Instant,
    /// The shard's providers.
    pub fabrics: &'a mut Fabrics,
    /// Messages to other parts and other shards.
    pub out: &'a mut Outbox,
}
