//! Context of one event, for all parts of the engine.

use rtrs_core::fabric::Fabric;
use rtrs_core::time::Instant;

use super::message::Outbox;

/// Providers of a shard, in the order in which paths refer to them.
pub(crate) type Fabrics = [Box<dyn Fabric>];

/// Time, providers and outgoing messages of one event.
pub(crate) struct Ctx<'a> {
    /// Time of the event.
    pub(crate) now: Instant,
    /// Providers of the shard.
    pub(crate) fabrics: &'a mut Fabrics,
    /// Outgoing messages.
    pub(crate) out: &'a mut Outbox,
}
