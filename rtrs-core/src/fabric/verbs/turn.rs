//! Inputs of a turn: readable descriptors, connection manager events, device events, completions,
//! timers.

use std::sync::Arc;

use super::conn::{Reads, Stage, Step, VerbsConn};
use super::device::{DeviceReport, Report};
use super::devices::token;
use super::info::port_is_down;
use super::listener::try_again;
use super::sys::{AsyncEvent, CmEvent, CmEventKind, CmId};
use super::{CM_EVENTS_MAX, HalfOpen, VerbsFabric, VerbsRequest};
use crate::fabric::{CloseReason, ConnRequest, ConnectFailure, FabricEvent, PeerIdentity};
use crate::ids::QpNum;

impl VerbsFabric {
    fn on_cm_event(&mut self, mut event: CmEvent) {
        if let Some(id) = event.request.take() {
            self.on_request(id, &event);
            return;
        }
        let Some(&name) = self.by_id.get(&event.id) else {
            if !matches!(event.kind, CmEventKind::AddrChange | CmEventKind::Other) {
                self.shared.dreqs.done(event.id);
            }
            if matches!(event.kind, CmEventKind::DeviceRemoval | CmEventKind::AddrChange) {
                self.listeners.lost(self.now, |id| id.key() == event.id);
            }
            return;
        };
        let options = self.options.clone();
        let Some(conn) = self.conns.get_mut(name) else { return };
        if conn.end.is_some() {
            // The event is the answer to the local DREQ, or the peer's own DREQ.
            conn.peer_knows |= !matches!(event.kind, CmEventKind::AddrChange | CmEventKind::Other);
            return;
        }
        let step = conn.on_event(&event, &options);
        self.take_step(name, step);
    }

    fn take_step(&mut self, name: QpNum, step: Step) {
        match step {
            Step::On => self.settle(name),
            Step::Look => self.look_at_port(name),
            Step::Up(private_data) => {
                self.settle(name);
                self.push(FabricEvent::Established {
                    qp: name,
                    private_data: Box::new(private_data),
                });
            }
            Step::Over(end) => self.begin_end(name, end),
        }
    }

    /// Checks the port on another thread, since the check calls the driver.
    fn look_at_port(&mut self, qp: QpNum) {
        let Some(conn) = self.conns.get(qp) else { return };
        let (device, port) = (conn.qp.pd().context().name().to_owned(), conn.id.port_number());
        let sender = self.reports.sender();
        self.shared.calls.take(move || {
            sender.send(Report::Port { qp, down: port_is_down(&device, port) });
        });
    }

    fn on_port(&mut self, name: QpNum, down: bool) {
        let looking = |conn: &&mut VerbsConn| conn.end.is_none() && conn.stage == Stage::Looking;
        let Some(conn) = self.conns.get_mut(name).filter(looking) else { return };
        let step = conn.on_port(self.now, down, &self.options);
        self.take_step(name, step);
    }

    fn on_request(&mut self, id: CmId, event: &CmEvent) {
        let Some(place) = HalfOpen::take(&self.shared.half_open, self.options.half_open_max) else {
            tracing::warn!("too many pending RDMA connection requests");
            return;
        };
        let (Some(peer), Some(local)) = (id.peer_address(), id.local_address()) else { return };
        let known = self.shared.keeps(&id);
        let reads = Reads { responder: event.responder_reads, initiator: event.initiator_reads };
        let private_data = event.private_data;
        let request = move |id| ConnRequest {
            private_data,
            peer,
            local,
            identity: PeerIdentity::default(),
            inner: Box::new(VerbsRequest { id, reads, _place: place }),
        };
        if known {
            self.push(FabricEvent::Request(Box::new(request(id))));
            return;
        }
        // This is the first request over this device, whose windows are tested now, on another
        // thread.
        let (shared, sender) = (Arc::clone(&self.shared), self.reports.sender());
        self.shared.calls.take(move || match shared.keep(&id, local) {
            Ok(()) => sender.send(Report::Request(Box::new(request(id)))),
            Err(error) => {
                tracing::warn!(%error, "connection request over an unusable device");
            }
        });
    }

    /// Handles a device's event as far as it affects this shard.
    fn on_report(&mut self, report: DeviceReport) {
        if report.what == AsyncEvent::DeviceRemoved {
            self.listeners.lost(self.now, |id| id.context_key() == Some(report.context));
        }
        let Some(device) = self.devices.of(report.context) else { return };
        if report.what == AsyncEvent::CqFailed {
            device.queues_failed();
        }
        let device = device.context().name().to_owned();
        for conn in self.conns.iter_mut() {
            if conn.dying || conn.qp.pd().context().key() != report.context {
                continue;
            }
            let reason = match report.what {
                AsyncEvent::QpFailed { qp_num, what } if conn.qp.has_number(qp_num) => {
                    CloseReason::Protocol(format!("{device} reports {what}"))
                }
                AsyncEvent::Port { number, up: false } if conn.id.port_number() == number => {
                    CloseReason::Lost(format!("port {number} of {device} went down"))
                }
                AsyncEvent::DeviceRemoved => {
                    CloseReason::Lost(format!("the device {device} was removed"))
                }
                AsyncEvent::DeviceFailed => {
                    CloseReason::Lost(format!("the device {device} failed"))
                }
                AsyncEvent::CqFailed => {
                    CloseReason::Lost(format!("a completion queue of {device} failed"))
                }
                _ => continue,
            };
            conn.dying = true;
            self.dying.push((conn.name, ConnectFailure::Failed(reason)));
        }
    }

    pub(super) fn poll_ring(&mut self) -> bool {
        let mut any = false;
        while let Some(done) = self.port.take() {
            any = true;
            let at = (done.token & 0xffff_ffff) as usize;
            match done.token & !0xffff_ffff {
                token::CM => {
                    self.cm.fired();
                    self.poll_cm();
                    self.cm.arm(&self.port);
                }
                token::COMPLETIONS => {
                    let Some(device) = self.devices.at(at) else { continue };
                    device.completions.fired();
                    if let Err(error) = device.on_readable() {
                        let (context, what) = (device.context().key(), AsyncEvent::DeviceFailed);
                        tracing::error!(%error, "a completion channel failed");
                        self.on_report(DeviceReport { context, what });
                    } else {
                        device.completions.arm(&self.port);
                    }
                }
                _ => {
                    let Some(device) = self.devices.at(at) else { continue };
                    device.reports.fired();
                    if self.shared.broadcast_events(device.context()) {
                        device.reports.arm(&self.port);
                    }
                }
            }
        }
        any
    }

    fn poll_cm(&mut self) {
        for _ in 0..CM_EVENTS_MAX {
            match self.cm.next() {
                Ok(Some(event)) => self.on_cm_event(event),
                Ok(None) => break,
                Err(error) => {
                    tracing::error!(%error, "the RDMA connection manager cannot be read");
                    break;
                }
            }
        }
    }

    pub(super) fn poll_completions(&mut self) -> bool {
        let polled = self.devices.poll();
        let any = polled.busy > 0;
        self.counters.receives += polled.busy;
        if let Some(context) = polled.failed {
            self.on_report(DeviceReport { context, what: AsyncEvent::CqFailed });
        }
        if any {
            self.dispatch();
        }
        any
    }

    pub(super) fn poll_timers(&mut self) -> bool {
        let mut any = false;
        while let Some(name) = self.conns.take_expired(self.now) {
            any = true;
            let Some(conn) = self.conns.get(name) else { continue };
            let reason = match conn.stage {
                Stage::Draining => CloseReason::Local,
                _ => CloseReason::TimedOut,
            };
            self.begin_end(name, ConnectFailure::Failed(reason));
        }
        for address in self.listeners.poll(self.now) {
            let (channel, shared) = (Arc::clone(self.cm.channel()), Arc::clone(&self.shared));
            let (sender, backlog) = (self.reports.sender(), self.options.backlog);
            self.shared.calls.take(move || {
                let tried = try_again(&channel, &shared, address, backlog);
                sender.send(Report::Listener(Box::new(tried)));
            });
        }
        any
    }

    pub(super) fn poll_inbox(&mut self) -> bool {
        let mut any = false;
        while let Some(report) = self.reports.next() {
            any = true;
            match report {
                Report::Device(report) => self.on_report(report),
                Report::Destroyed(gone) => self.complete_end(gone),
                Report::Made(made) => self.reports.keep_made(*made),
                Report::Port { qp, down } => self.on_port(qp, down),
                Report::Listener(tried) => self.listeners.tried(self.now, *tried),
                // Dropped, because listening has been stopped since.
                Report::Request(_) if self.listeners.is_empty() => {}
                Report::Request(request) => self.push(FabricEvent::Request(request)),
            }
        }
        any
    }
}
