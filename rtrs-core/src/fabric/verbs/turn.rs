//! What a turn takes in: descriptors that became readable, events of the connection manager,
//! reports of devices, completions, timers.

use super::conn::{Reads, Stage, Step};
use super::device::{DeviceReport, Report};
use super::sys::{AsyncEvent, CmEvent, CmEventKind, CmId};
use super::{CM_EVENTS_MAX, HalfOpen, VerbsFabric, VerbsRequest, token};
use crate::fabric::{CloseReason, ConnRequest, ConnectFailure, FabricEvent};
use crate::ids::QpNum;

impl VerbsFabric {
    fn on_cm_event(&mut self, mut event: CmEvent) {
        if let Some(id) = event.request.take() {
            self.on_request(id, &event);
            return;
        }
        let Some(&name) = self.by_id.get(&event.id) else {
            if !matches!(event.kind, CmEventKind::AddrChange | CmEventKind::Other) {
                self.goodbyes.done(event.id);
            }
            if event.kind == CmEventKind::DeviceRemoval {
                self.listeners.retain(|id| id.key() != event.id);
            }
            return;
        };
        let (now, options) = (self.now, self.options.clone());
        let Some(conn) = self.conn(name) else { return };
        if conn.leaving.is_some() {
            // The answer to our goodbye, or the peer's own.
            conn.told |= !matches!(event.kind, CmEventKind::AddrChange | CmEventKind::Other);
            return;
        }
        match conn.on_event(now, &event, &options) {
            Step::On => self.settle(name),
            Step::Up(private_data) => {
                self.settle(name);
                self.push(FabricEvent::Established { qp: name, private_data });
            }
            Step::Over(end) => self.finish(name, end),
        }
    }

    fn on_request(&mut self, id: CmId, event: &CmEvent) {
        let Some(place) = HalfOpen::take(&self.shared.half_open, self.options.half_open_max) else {
            tracing::warn!("too many RDMA connection requests wait for their answer");
            return;
        };
        let (Some(peer), Some(local)) = (id.peer_address(), id.local_address()) else { return };
        let reads = Reads { responder: event.responder_reads, initiator: event.initiator_reads };
        self.push(FabricEvent::Request(ConnRequest {
            private_data: event.private_data,
            peer,
            local,
            inner: Box::new(VerbsRequest { id, reads, _place: place }),
        }));
    }

    /// What a device reported, as far as it concerns this core.
    fn on_report(&mut self, report: DeviceReport) {
        let Some(device) = self.devices.iter().find(|d| d.context().key() == report.context) else {
            return;
        };
        let device = device.context().name().to_owned();
        for conn in self.conns.iter_mut().flatten() {
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
                    let device = &mut self.devices[at];
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
                    let device = &mut self.devices[at];
                    device.reports.fired();
                    self.shared.spread(device.context());
                    device.reports.arm(&self.port);
                }
            }
        }
        any
    }

    fn poll_cm(&mut self) {
        for _ in 0..CM_EVENTS_MAX {
            match self.channel.next() {
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
        let mut any = false;
        for at in 0..self.devices.len() {
            match self.devices[at].take(&mut self.completions) {
                Ok(false) => {}
                Ok(true) => {
                    any = true;
                    self.counters.receives += 1;
                }
                Err(error) => {
                    let context = self.devices[at].context().key();
                    tracing::error!(%error, "a completion queue failed");
                    self.on_report(DeviceReport { context, what: AsyncEvent::CqFailed });
                }
            }
        }
        if any {
            self.dispatch();
        }
        any
    }

    pub(super) fn poll_timers(&mut self) -> bool {
        let mut any = false;
        while let Some((at, raw)) = self.timers.first().copied() {
            if at > self.now {
                break;
            }
            any = true;
            self.timers.pop_first();
            let name = QpNum(raw);
            let Some(conn) = self.conn(name) else { continue };
            conn.armed = None;
            let reason = match conn.stage {
                Stage::Draining => CloseReason::Local,
                _ => CloseReason::TimedOut,
            };
            self.finish(name, ConnectFailure::Failed(reason));
        }
        self.goodbyes.poll(self.now, self.options.close_timeout);
        any
    }

    pub(super) fn poll_inbox(&mut self) -> bool {
        let mut any = false;
        while let Some(report) = self.inbox.take_or_watch() {
            any = true;
            match report {
                Report::Device(report) => self.on_report(report),
                Report::Gone(gone) => self.bury(gone),
                Report::Made(made) => self.made.push_back(*made),
            }
        }
        any
    }
}
