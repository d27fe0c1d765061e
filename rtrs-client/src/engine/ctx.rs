//! What every part of the engine works with during one event.

use rtrs_core::fabric::Fabric;
use rtrs_core::time::Instant;

use super::message::Outbox;

/// The providers of a shard, in the order in which paths name them.
pub(crate) type Fabrics = [Box<dyn Fabric>];

/// The time, the providers and the outgoing messages of one event.
pub(crate) struct Ctx<'a> {
    /// When the event happens.
    pub(crate) now: Instant,
    /// The shard's providers.
    pub(crate) fabrics: &'a mut Fabrics,
    /// Messages to the control shard.
    pub(crate) out: &'a mut Outbox,
}
