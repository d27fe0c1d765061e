//! Gateways: servers that share a device, one of which serves it at a time.
//!
//! Each such server is a *gateway*. The store behind them has a lock: the gateway that holds it is
//! *active*, the others are *standby* and run no IO. A session that has the export open for writing
//! asks a standby to take over; the standby acquires the lock, by force if its owner does not
//! release it, and from then on the store refuses everything that the previous owner still sends. A
//! takeover therefore fences all requests that were sent to other gateways. Each acquisition of the
//! lock starts a new *term*: of two gateways that claim to be active, the one with the higher term
//! is active.

use std::fmt;
use std::io;

use crate::ids::SessionId;
use crate::time::Duration;

/// State of a gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The gateway serves the export.
    pub active: bool,
    /// Number of times that the lock has been acquired, as far as this gateway knows.
    pub term: u64,
}

/// State change of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatewayEvent {
    /// The gateway has become active.
    Active,
    /// The gateway is no longer active: requests already sent to it will not be answered.
    Standby,
}

/// Callback for state changes; must not block.
pub type GatewayNotify = Box<dyn Fn(GatewayEvent) + Send + Sync>;

/// A takeover cannot begin now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatewayBusy;

/// One of several servers that share a source. Only [`Gateway::release`] blocks.
pub trait Gateway: fmt::Debug + Send + Sync {
    /// Returns the state of the gateway.
    fn standing(&self) -> Standing;

    /// Begins a takeover for a session that has the export open for writing. The result is reported
    /// as an event. Does nothing if the gateway is active.
    ///
    /// # Errors
    /// A takeover is in progress, or the gateway has just released the lock.
    fn take_over(&self, session: SessionId) -> Result<(), GatewayBusy>;

    /// Records that a session has the export open for writing here while the gateway is active, so
    /// that another gateway may take over for it by force.
    fn opened_by(&self, session: SessionId);

    /// Begins to release the lock once running IO has ended.
    fn begin_release(&self);

    /// Releases the lock, waiting up to `within`.
    ///
    /// # Errors
    /// The lock was not released in time, or the store refused to release it.
    fn release(&self, within: Duration) -> io::Result<()>;

    /// Sets the callback for subsequent state changes.
    fn on_change(&self, notify: GatewayNotify);
}
