//! The engine of one server shard: its part of every session, and on shard 0 the control engine.
//!
//! The engine processes events of the shard's providers and messages from other shards. It sends
//! work requests to the providers, and messages through [`ServerEngine::take_message`]. It does no
//! IO of its own and reads no clock, so that the driver can run it on a reactor and the simulator
//! in virtual time. Messages that a shard sends to itself are handled within the same call.

pub mod authenticator;
pub mod control;
pub mod ctx;
pub mod device_table;
pub mod epoch;
pub mod epoch_file;
pub mod finder;
pub mod io;
pub mod ledger;
pub mod message;
mod partial;
pub mod reply_to;
pub mod saved_writers;
pub mod session;
pub(crate) mod sync_failures;

use std::sync::Arc;

use rtrs_core::block::Core;
use rtrs_core::fabric::{CloseReason, ConnRequest, ConnectFailure, FabricEvent};
use rtrs_core::ids::{CoreIndex, ProviderIndex};
use rtrs_core::proto::ping::{PingServer, PingServerStats};
use rtrs_core::time::{Instant, earliest};

use self::authenticator::Authenticator;
use self::control::Control;
use self::ctx::{Ctx, Fabrics};
use self::io::Shard;
use self::message::{AdminRequest, ControlMessage, Message, Outbox, PingOrder};
use self::session::SessionParams;
use crate::audit::AuditSink;
use crate::export::ExportTable;
use crate::stats::{SessionSnapshot, ShardReport};

/// Maximum number of ping requests accepted per turn.
const PINGS_PER_TURN: usize = 16;

/// One shard of a server.
#[derive(Debug)]
pub struct ServerEngine {
    core: CoreIndex,
    control: Option<Control>,
    /// Present on the last shard, so that pings delay the control shard only if there is no other
    /// shard.
    pings: Option<PingServer>,
    /// Used on shard 0, which has the listener: each ping in transit to the last shard holds a
    /// clone.
    handed_over: Arc<()>,
    /// Number of ping requests in this turn.
    handed_over_now: usize,
    params: SessionParams,
    shard: Shard,
    out: Outbox,
    away: Outbox,
}

impl ServerEngine {
    /// Creates a shard without sessions. All shards of a server must be given equal parameters and
    /// the same table.
    pub fn new(params: SessionParams, core: Core, exports: &Arc<ExportTable>) -> Self {
        let index = core.index;
        let control = (index.0 == 0).then(|| Control::new(params, Arc::clone(exports)));
        Self {
            core: index,
            control,
            pings: (index == ping_shard(&params)).then(|| PingServer::new(params.pings)),
            handed_over: Arc::default(),
            handed_over_now: 0,
            params,
            shard: Shard::new(params, core, Arc::clone(exports)),
            out: Outbox::default(),
            away: Outbox::default(),
        }
    }

    /// Sets the sink for audit events of clients. Has an effect only on shard 0.
    pub fn set_audit(&mut self, audit: AuditSink) {
        if let Some(control) = &mut self.control {
            control.set_audit(audit);
        }
    }

    /// Requires clients that can authenticate to do so. Has an effect only on shard 0.
    pub fn set_authenticator(&mut self, authenticator: Arc<dyn Authenticator>) {
        if let Some(control) = &mut self.control {
            control.set_authenticator(authenticator);
        }
    }

    /// Processes an event from a provider.
    pub fn handle_event(
        &mut self,
        now: Instant,
        provider: ProviderIndex,
        event: FabricEvent,
        fabrics: &mut Fabrics,
    ) {
        if self.give_to_pings(now, provider, &event, fabrics) {
            return self.deliver(now, fabrics);
        }
        let ctx = &mut Ctx { now, fabrics, out: &mut self.out };
        match event {
            FabricEvent::Request(request)
                if self.params.pings.claims(request.private_data.as_bytes()) =>
            {
                self.hand_over(provider, *request, now, fabrics);
            }
            FabricEvent::Request(request) => {
                // Only shard 0 listens.
                if let Some(control) = &mut self.control {
                    control.handle_request(provider, *request, ctx);
                }
            }
            FabricEvent::Completion(wc) => self.shard.handle_completion(provider, &wc, ctx),
            FabricEvent::Closed { qp, reason } => {
                self.shard.handle_closed(provider, qp, reason, ctx);
            }
            // Nothing to do: the receives were posted with the accept.
            FabricEvent::Established { .. } => {}
            // A server does not connect to peers, so this is an accepted connection that was not
            // established.
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

    /// Processes an event on a ping connection. Returns false for events of other connections.
    fn give_to_pings(
        &mut self,
        now: Instant,
        provider: ProviderIndex,
        event: &FabricEvent,
        fabrics: &mut Fabrics,
    ) -> bool {
        let Some(pings) = &mut self.pings else { return false };
        let qp = match event {
            FabricEvent::Request(_) => return false,
            FabricEvent::Completion(wc) => wc.qp,
            FabricEvent::Established { qp, .. }
            | FabricEvent::ConnectFailed { qp, .. }
            | FabricEvent::Closed { qp, .. } => *qp,
        };
        let provider = provider.index();
        let owns = pings.owns(provider, qp);
        if owns {
            pings.handle_event(now, provider, event, fabrics[provider].as_mut());
        }
        owns
    }

    /// Passes a ping's connection request to the shard that serves pings. The number of requests in
    /// transit is limited to the number of pings that may run.
    fn hand_over(
        &mut self,
        provider: ProviderIndex,
        request: ConnRequest,
        now: Instant,
        fabrics: &mut Fabrics,
    ) {
        self.handed_over_now += 1;
        let place = Arc::clone(&self.handed_over);
        if Arc::strong_count(&place) > self.params.pings.connections_max + 1 {
            let fabric = fabrics[provider.index()].as_mut();
            return PingServer::refuse_busy(now, request, fabric);
        }
        let ping = Message::Ping(Box::new(PingOrder { provider, request, place }));
        self.out.pass_on(ping_shard(&self.params), ping);
    }

    /// Processes a message.
    pub fn handle_message(&mut self, now: Instant, message: Message, fabrics: &mut Fabrics) {
        self.take(now, message, fabrics);
        self.deliver(now, fabrics);
    }

    /// Polls devices and timers. Must be called once per turn, after the events. Returns whether
    /// anything happened.
    pub fn poll(&mut self, now: Instant, fabrics: &mut Fabrics) -> bool {
        let ctx = &mut Ctx { now, fabrics, out: &mut self.out };
        self.handed_over_now = 0;
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

    /// Whether this shard has begun as much IO as it should before answering (256 KiB, or 16 IOs of
    /// 4 KiB), or the control shard has served a full turn of requests. The next call must then be
    /// [`poll`](Self::poll), and further events wait for the next turn.
    pub fn is_turn_full(&self) -> bool {
        self.shard.is_turn_full()
            || self.control.as_ref().is_some_and(Control::is_turn_full)
            || self.handed_over_now >= PINGS_PER_TURN
    }

    /// Time of the next poll if nothing else happens.
    pub fn deadline(&self) -> Option<Instant> {
        let control = self.control.as_ref().and_then(Control::deadline);
        let pings = self.pings.as_ref().and_then(PingServer::deadline);
        earliest(earliest(self.shard.deadline(), control), pings)
    }

    /// Takes the next message for another shard.
    pub fn take_message(&mut self) -> Option<(CoreIndex, Message)> {
        self.away.take()
    }

    /// Begins the shutdown of the server. Has an effect only on shard 0.
    pub fn shutdown(&mut self, now: Instant, fabrics: &mut Fabrics) {
        if self.control.is_some() {
            self.handle_message(now, Message::Control(ControlMessage::Shutdown), fabrics);
        }
    }

    /// Whether a shutdown has been requested; known only on shard 0.
    pub fn is_stopping(&self) -> bool {
        self.control.as_ref().is_some_and(Control::is_stopping)
    }

    /// Whether this shard has nothing left to do and may exit.
    pub fn is_done(&self) -> bool {
        self.shard.is_done()
    }

    /// Sessions and paths; empty on shards other than 0.
    pub fn snapshot(&self, now: Instant) -> Vec<SessionSnapshot> {
        self.control.as_ref().map(|control| control.snapshot(now)).unwrap_or_default()
    }

    /// Ping statistics; None on shards other than the last.
    pub fn pings(&self) -> Option<PingServerStats> {
        self.pings.as_ref().map(PingServer::stats)
    }

    /// IO engine of the shard, for inspection.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// Panics if the engine's tables are inconsistent.
    pub fn check(&self) {
        self.shard.check();
        self.control.iter().for_each(Control::check);
    }

    fn take(&mut self, now: Instant, message: Message, fabrics: &mut Fabrics) {
        let ctx = &mut Ctx { now, fabrics, out: &mut self.out };
        match message {
            // Nothing to do: devices are polled on each turn.
            Message::Wake => {}
            Message::Report(reply) => {
                let fabrics =
                    ctx.fabrics.iter().map(|one| (one.capabilities().scheme, one.counters()));
                let control = self.control.as_ref().map_or(0, Control::internal_errors);
                let internal_errors = self.shard.internal_errors() + control;
                reply.send(ShardReport { fabrics: fabrics.collect(), internal_errors });
            }
            Message::Shard(message) => self.shard.handle_message(message, ctx),
            Message::Ping(order) => {
                let PingOrder { provider, request, .. } = *order;
                let fabric = ctx.fabrics[provider.index()].as_mut();
                if let Some(pings) = &mut self.pings {
                    pings.handle_request(now, provider.index(), request, fabric);
                }
            }
            Message::StopPings => {
                if let Some(pings) = &mut self.pings {
                    pings.stop(now, ctx.fabrics);
                }
            }
            Message::Control(message) => {
                let stops = match &message {
                    ControlMessage::Shutdown => true,
                    ControlMessage::Admin { request, .. } => {
                        matches!(request, AdminRequest::Drain { .. })
                    }
                    _ => false,
                };
                if stops {
                    ctx.out.pass_on(ping_shard(&self.params), Message::StopPings);
                }
                if let Some(control) = &mut self.control {
                    control.handle_message(message, ctx);
                }
            }
        }
    }

    /// Processes messages to this shard and queues those for other shards.
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

/// Shard that serves pings.
fn ping_shard(params: &SessionParams) -> CoreIndex {
    CoreIndex(params.cores.saturating_sub(1))
}

#[cfg(test)]
mod tests;
