//! The engine of one shard of the server: its part of every session, and on shard 0 the control.
//!
//! Events of the shard's providers and messages of other shards go in; work requests go to the
//! providers, messages come out of [`ServerEngine::take_message`]. It does no IO of its own and
//! reads no clock, so the driver runs it on a reactor and the simulator in virtual time alike.
//! Messages that a shard sends to itself never come out: they are handled within the same call.

pub mod control;
pub mod ctx;
pub mod device_table;
pub mod epoch;
pub mod finder;
pub mod io;
pub mod ledger;
pub mod message;
pub mod reply_to;
pub mod session;

use std::sync::Arc;

use rtrs_core::block::Core;
use rtrs_core::fabric::{CloseReason, ConnectFailure, FabricEvent};
use rtrs_core::ids::{CoreIndex, ProviderIndex, QpNum};
use rtrs_core::proto::ping::{PingServer, PingServerStats};
use rtrs_core::time::{Instant, earliest};

use self::control::Control;
use self::ctx::{Ctx, Fabrics};
use self::io::Shard;
use self::message::{AdminRequest, ControlMessage, Message, Outbox};
use self::session::SessionParams;
use crate::export::ExportTable;
use crate::stats::SessionSnapshot;

/// One shard of a server.
#[derive(Debug)]
pub struct ServerEngine {
    core: CoreIndex,
    control: Option<Control>,
    /// On shard 0, where the listener is; pings never leave it.
    pings: Option<PingServer>,
    shard: Shard,
    out: Outbox,
    away: Outbox,
}

impl ServerEngine {
    /// A shard without sessions. All shards of a server get equal parameters and the same table.
    pub fn new(params: SessionParams, core: Core, exports: &Arc<ExportTable>) -> Self {
        let index = core.index;
        let control = (index.0 == 0).then(|| Control::new(params, Arc::clone(exports)));
        Self {
            core: index,
            control,
            pings: (index.0 == 0).then(|| PingServer::new(params.pings)),
            shard: Shard::new(params, core, Arc::clone(exports)),
            out: Outbox::default(),
            away: Outbox::default(),
        }
    }

    /// Takes an event of a provider.
    pub fn handle_event(
        &mut self,
        now: Instant,
        provider: ProviderIndex,
        event: FabricEvent,
        fabrics: &mut Fabrics,
    ) {
        let Some(event) = self.give_to_pings(now, provider, event, fabrics) else { return };
        let ctx = &mut Ctx { now, fabrics, out: &mut self.out };
        match event {
            FabricEvent::Request(request) => {
                // Only shard 0 listens.
                if let Some(control) = &mut self.control {
                    control.handle_request(provider, request, ctx);
                }
            }
            FabricEvent::Completion(wc) => self.shard.handle_completion(provider, &wc, ctx),
            FabricEvent::Closed { qp, reason } => {
                self.shard.handle_closed(provider, qp, reason, ctx);
            }
            // The receives are posted since the accept; there is nothing to wait for.
            FabricEvent::Established { .. } => {}
            // A server connects to nobody: one it accepted did not come about.
            FabricEvent::ConnectFailed { qp, failure } => {
                let reason = match failure {
                    ConnectFailure::Failed(reason) => reason,
                    ConnectFailure::Rejected(_) => CloseReason::Peer,
                };
                self.shard.handle_closed(provider, qp, reason, ctx);
            }
        }
        self.deliver(now, fabrics);
    }

    /// Takes what is a ping's; gives back what is not.
    fn give_to_pings(
        &mut self,
        now: Instant,
        provider: ProviderIndex,
        event: FabricEvent,
        fabrics: &mut Fabrics,
    ) -> Option<FabricEvent> {
        let Some(pings) = &mut self.pings else { return Some(event) };
        let provider = provider.index();
        let owned = |qp: &QpNum| pings.owns(provider, *qp);
        let theirs = match &event {
            FabricEvent::Request(request) => pings.claims(request.private_data.as_bytes()),
            FabricEvent::Completion(wc) => owned(&wc.qp),
            FabricEvent::Established { qp, .. }
            | FabricEvent::ConnectFailed { qp, .. }
            | FabricEvent::Closed { qp, .. } => owned(qp),
        };
        if !theirs {
            return Some(event);
        }
        let fabric = fabrics[provider].as_mut();
        match event {
            FabricEvent::Request(request) => pings.handle_request(now, provider, request, fabric),
            event => pings.handle_event(now, provider, &event, fabric),
        }
        None
    }

    /// Takes a message.
    pub fn handle_message(&mut self, now: Instant, message: Message, fabrics: &mut Fabrics) {
        self.take(now, message, fabrics);
        self.deliver(now, fabrics);
    }

    /// Polls devices and timers. To be called once a turn, after the events. True when anything
    /// happened.
    pub fn poll(&mut self, now: Instant, fabrics: &mut Fabrics) -> bool {
        let ctx = &mut Ctx { now, fabrics, out: &mut self.out };
        let mut busy = self.shard.poll(ctx);
        if let Some(control) = &mut self.control {
            busy |= control.poll(ctx);
        }
        if let Some(pings) = &mut self.pings {
            busy |= pings.poll(now, fabrics);
        }
        self.deliver(now, fabrics);
        busy
    }

    /// When to be polled even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let control = self.control.as_ref().and_then(Control::deadline);
        let pings = self.pings.as_ref().and_then(PingServer::deadline);
        earliest(earliest(self.shard.deadline(), control), pings)
    }

    /// The next message to another shard.
    pub fn take_message(&mut self) -> Option<(CoreIndex, Message)> {
        self.away.take()
    }

    /// Begins the server's end; on shard 0 only, elsewhere nothing happens.
    pub fn shutdown(&mut self, now: Instant, fabrics: &mut Fabrics) {
        if self.control.is_some() {
            self.handle_message(now, Message::Control(ControlMessage::Shutdown), fabrics);
        }
    }

    /// True once a stop was asked for; shard 0 knows.
    pub fn is_stopping(&self) -> bool {
        self.control.as_ref().is_some_and(Control::is_stopping)
    }

    /// True when this shard has nothing left to do and may end.
    pub fn is_done(&self) -> bool {
        self.shard.is_done()
    }

    /// Sessions and paths; empty on shards other than 0.
    pub fn snapshot(&self, now: Instant) -> Vec<SessionSnapshot> {
        self.control.as_ref().map(|control| control.snapshot(now)).unwrap_or_default()
    }

    /// What the pings did; None on shards other than 0.
    pub fn pings(&self) -> Option<PingServerStats> {
        self.pings.as_ref().map(PingServer::stats)
    }

    /// The shard's shard, to look at.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// Panics when the engine's tables do not agree with each other.
    pub fn check(&self) {
        self.shard.check();
        self.control.iter().for_each(Control::check);
    }

    fn take(&mut self, now: Instant, message: Message, fabrics: &mut Fabrics) {
        let ctx = &mut Ctx { now, fabrics, out: &mut self.out };
        match message {
            // Devices are polled in each turn.
            Message::Wake => {}
            Message::Shard(message) => self.shard.handle_message(message, ctx),
            Message::Control(message) => {
                let stops = match &message {
                    ControlMessage::Shutdown => true,
                    ControlMessage::Admin { request, .. } => {
                        matches!(request, AdminRequest::Drain { .. })
                    }
                    _ => false,
                };
                if let Some(pings) = self.pings.as_mut().filter(|_| stops) {
                    pings.stop(now, ctx.fabrics);
                }
                if let Some(control) = &mut self.control {
                    control.handle_message(message, ctx);
                }
            }
        }
    }

    /// Handles messages to this shard, lays those to others aside.
    fn deliver(&mut self, now: Instant, fabrics: &mut Fabrics) {
        while let Some((to, message)) = self.out.take() {
            if to == self.core {
                self.take(now, message, fabrics);
                continue;
            }
            self.away.pass_on(to, message);
        }
    }
}

#[cfg(test)]
mod tests;
