//! One core of the server as a machine: its shard, and on core 0 the control.
//!
//! Events of the core's providers and letters of other cores go in; work requests go to the
//! providers, letters come out of [`ServerEngine::take_letter`]. It does no IO of its own and reads
//! no clock, so the driver runs it on a reactor and the simulator in virtual time alike. Letters
//! a core writes to itself never come out: they are handled within the same call.

pub mod control;
pub mod device_table;
pub mod io;
pub mod ledger;
pub mod message;
pub mod session;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use rtrs_core::block::Core;
use rtrs_core::fabric::{CloseReason, ConnectFailure, FabricEvent};
use rtrs_core::ids::{CoreIndex, QpNum};
use rtrs_core::proto::ping::{PingServer, PingServerStats};
use rtrs_core::time::{Instant, earliest};

use crate::engine::control::Control;
use crate::engine::io::{Fabrics, Shard};
use crate::engine::message::{AdminAsk, ControlMail, Mail, Outbox};
use crate::engine::session::SessionParams;
use crate::export::ExportTable;
use crate::stats::SessionSnapshot;

/// One core of a server.
#[derive(Debug)]
pub struct ServerEngine {
    core: CoreIndex,
    control: Option<Control>,
    /// On core 0, where the listener is; pings never leave it.
    pings: Option<PingServer>,
    shard: Shard,
    out: Outbox,
    away: Outbox,
}

impl ServerEngine {
    /// A core without sessions. All cores of a server get equal parameters and the same table.
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

    /// Takes an event of the provider at that index.
    pub fn handle_event(
        &mut self,
        now: Instant,
        provider: usize,
        event: FabricEvent,
        fabrics: &mut Fabrics,
    ) {
        let Some(event) = self.give_to_pings(now, provider, event, fabrics) else { return };
        match event {
            FabricEvent::Request(request) => {
                let index = u8::try_from(provider).unwrap_or(u8::MAX);
                let fabric = &mut *fabrics[provider];
                match &mut self.control {
                    Some(control) => {
                        control.handle_request(now, index, request, fabric, &mut self.out);
                    }
                    // Only core 0 listens.
                    None => drop(request),
                }
            }
            FabricEvent::Completion(wc) => {
                self.shard.handle_completion(now, provider, &wc, fabrics, &mut self.out);
            }
            FabricEvent::Closed { qp, reason } => {
                self.shard.handle_closed(provider, qp, reason, &mut self.out);
            }
            // The receives are posted since the accept; there is nothing to wait for.
            FabricEvent::Established { .. } => {}
            // A server connects to nobody: one it accepted did not come about.
            FabricEvent::ConnectFailed { qp, failure } => {
                let reason = match failure {
                    ConnectFailure::Failed(reason) => reason,
                    ConnectFailure::Rejected(_) => CloseReason::Peer,
                };
                self.shard.handle_closed(provider, qp, reason, &mut self.out);
            }
        }
        self.deliver(now, fabrics);
    }

    /// Takes what is a ping's; gives back what is not.
    fn give_to_pings(
        &mut self,
        now: Instant,
        provider: usize,
        event: FabricEvent,
        fabrics: &mut Fabrics,
    ) -> Option<FabricEvent> {
        let Some(pings) = &mut self.pings else { return Some(event) };
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

    /// Takes a letter.
    pub fn handle_mail(&mut self, now: Instant, mail: Mail, fabrics: &mut Fabrics) {
        self.take(now, mail, fabrics);
        self.deliver(now, fabrics);
    }

    /// Polls devices and timers. To be called once a turn, after the events. True when anything
    /// happened.
    pub fn poll(&mut self, now: Instant, fabrics: &mut Fabrics) -> bool {
        let mut busy = self.shard.poll(now, fabrics, &mut self.out);
        if let Some(control) = &mut self.control {
            for fabric in fabrics.iter_mut() {
                while let Some(made) = fabric.next_made() {
                    busy = true;
                    control.made(now, made, &mut **fabric, &mut self.out);
                }
            }
            busy |= control.poll(now, &mut self.out);
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

    /// The next letter to another core.
    pub fn take_letter(&mut self) -> Option<(CoreIndex, Mail)> {
        self.away.take()
    }

    /// Begins the server's end; on core 0 only, elsewhere nothing happens.
    pub fn shutdown(&mut self, now: Instant, fabrics: &mut Fabrics) {
        if self.control.is_some() {
            self.handle_mail(now, Mail::Control(ControlMail::Shutdown), fabrics);
        }
    }

    /// True once a stop was asked for; core 0 knows.
    pub fn is_stopping(&self) -> bool {
        self.control.as_ref().is_some_and(Control::is_stopping)
    }

    /// True when this core has nothing left to do and may end.
    pub fn is_done(&self) -> bool {
        self.shard.is_done()
    }

    /// Sessions and paths; empty on cores other than 0.
    pub fn snapshot(&self, now: Instant) -> Vec<SessionSnapshot> {
        self.control.as_ref().map(|control| control.snapshot(now)).unwrap_or_default()
    }

    /// What the pings did; None on cores other than 0.
    pub fn pings(&self) -> Option<PingServerStats> {
        self.pings.as_ref().map(PingServer::stats)
    }

    /// The core's shard, to look at.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// Panics when the machine's tables do not agree with each other.
    pub fn check(&self) {
        self.shard.check();
    }

    fn take(&mut self, now: Instant, mail: Mail, fabrics: &mut Fabrics) {
        match mail {
            Mail::Shard(mail) => self.shard.handle_mail(now, mail, fabrics, &mut self.out),
            Mail::Control(mail) => {
                let drain = matches!(mail, ControlMail::Admin { ask: AdminAsk::Drain { .. }, .. });
                if (drain || matches!(mail, ControlMail::Shutdown))
                    && let Some(pings) = &mut self.pings
                {
                    pings.stop(now, fabrics);
                }
                if let Some(control) = &mut self.control {
                    control.handle_mail(now, mail, &mut self.out);
                }
            }
        }
    }

    /// Handles letters to this core, lays letters to others aside.
    fn deliver(&mut self, now: Instant, fabrics: &mut Fabrics) {
        while let Some((to, mail)) = self.out.take() {
            if to == self.core {
                self.take(now, mail, fabrics);
                continue;
            }
            match mail {
                Mail::Shard(mail) => self.away.shard(to, mail),
                Mail::Control(mail) => self.away.control(mail),
            }
        }
    }
}
