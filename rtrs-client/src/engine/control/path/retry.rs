//! Reaction of a path to network changes of this host: an immediate attempt.

use std::net::IpAddr;

use rtrs_core::time::Instant;

use super::Path;
use crate::engine::ctx::Ctx;
use crate::path::state::PathState;

impl Path {
    /// Handles a network change that may help the path.
    pub(in crate::engine::control) fn network_changed(&mut self, what: &str, ctx: &Ctx<'_>) {
        let tries =
            !matches!(self.state, PathState::Connected | PathState::Disconnected | PathState::Gone);
        if tries && !self.is_rdma(ctx) {
            self.network.changed(ctx.now, what);
        }
    }

    pub(in crate::engine::control) fn is_rdma(&self, ctx: &Ctx<'_>) -> bool {
        ctx.fabrics[self.target.provider.index()].capabilities().scheme == "rdma"
    }

    /// Whether the path's configured source address is among these.
    pub(in crate::engine::control) fn comes_from(&self, addresses: &[IpAddr]) -> bool {
        self.target.local.is_some_and(|local| addresses.contains(&local))
    }

    /// Whether the path has a configured source address that is not among these.
    pub(in crate::engine::control) fn comes_from_elsewhere(&self, addresses: &[IpAddr]) -> bool {
        self.target.local.is_some_and(|local| !addresses.contains(&local))
    }

    /// Acts on a network change that is due, if any. Returns Some(true) if the current attempt has
    /// to end so that a new one can start, which happens only once the device `was_open`.
    pub(in crate::engine::control) fn poll_network(
        &mut self,
        now: Instant,
        was_open: bool,
    ) -> Option<bool> {
        let what = self.network.take_due(now)?;
        let name = &self.target.name;
        match self.state {
            PathState::Connected | PathState::Disconnected | PathState::Gone => {
                return Some(false);
            }
            PathState::Waiting if now < self.until => {
                tracing::info!(path = %name, "{what}: trying at once");
                self.until = now;
            }
            PathState::Closing => self.network.skip_wait(),
            PathState::Connecting | PathState::InfoExchange if was_open => {
                let (epoch, started) = (self.connections.epoch(), self.connections.started());
                if self.network.gives_up(now, epoch, started, &what) {
                    tracing::info!(path = %name, "{what}: restarting the attempt");
                    self.reconnect.forget_failures();
                    return Some(true);
                }
            }
            _ => {}
        }
        self.reconnect.forget_failures();
        Some(false)
    }
}
