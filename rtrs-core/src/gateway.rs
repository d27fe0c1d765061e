//! What several servers share, and one of them serves at a time.
//!
//! Each such server is a *gateway*. The store behind them has a lock: who has it is *active*, the
//! others are *standby* and run no IO. A session that has the export open for writing asks a
//! standby to take over; that one gets the lock, by force where its owner does not give it up, and
//! from then on the store refuses what the former owner still sends. So an active gateway is
//! itself the fence of all that was sent to others. Each time the lock is taken counts as a *term*:
//! of two gateways that call themselves active, the one with the higher term is.

use std::fmt;
use std::io;

use crate::ids::SessionId;
use crate::time::Duration;

/// How a gateway stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// It serves the export.
    pub active: bool,
    /// How often the lock has been taken, as far as it knows.
    pub term: u64,
}

/// What has changed at a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatewayEvent {
    /// It is active.
    Active,
    /// It was active, and is not any more: what sessions have sent to it is not answered.
    Standby,
}

/// Called with what has changed; does not block.
pub type GatewayNotify = Box<dyn Fn(GatewayEvent) + Send + Sync>;

/// A take-over cannot begin now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatewayBusy;

/// One of several servers of a source. Nothing here blocks but [`Gateway::release`].
pub trait Gateway: fmt::Debug + Send + Sync {
    /// How it stands.
    fn standing(&self) -> Standing;

    /// Begins to take over for a session that has the export open for writing. What comes of it is
    /// notified. Nothing happens if it is active.
    ///
    /// # Errors
    /// A take-over is under way, or it has just given the lock up.
    fn take_over(&self, session: SessionId) -> Result<(), GatewayBusy>;

    /// A session has the export open for writing here, while it is active: another gateway may take
    /// over for it by force.
    fn opened_by(&self, session: SessionId);

    /// Begins to give the lock up, when running IO has ended.
    fn begin_release(&self);

    /// The same, and waits for that, at most so long.
    ///
    /// # Errors
    /// It is not done in time, or the store refused it.
    fn release(&self, within: Duration) -> io::Result<()>;

    /// Has this called when something has changed, from now on.
    fn on_change(&self, notify: GatewayNotify);
}
