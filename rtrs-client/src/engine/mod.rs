//! Engine of one client shard: its part of a session and, on shard 0, the control of the session.
//!
//! Events from the shard's providers and messages from other shards go in; work requests go to the
//! providers, and messages come out of [`ClientEngine::take_message`]. The engine does no IO and
//! reads no clock itself, so it also runs under the simulator, in virtual time. In each turn, the
//! driver delivers messages and events, calls [`ClientEngine::poll`], runs the device's user, calls
//! [`ClientEngine::pump`], flushes the providers and sends messages. Messages that a shard sends to
//! itself never come out: they are handled within the same call.

mod cache_epoch;
pub(crate) mod control;
pub(crate) mod ctx;
pub(crate) mod device_set;
pub(crate) mod device_table;
pub(crate) mod io;
pub(crate) mod message;
pub(crate) mod path_end;
pub(crate) mod prover;
pub(crate) mod session;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::fmt;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::block::Geometry;
use rtrs_core::fabric::FabricEvent;
use rtrs_core::identity::Identity;
use rtrs_core::ids::{CoreIndex, ProviderIndex};
use rtrs_core::time::{Instant, earliest};

pub use self::cache_epoch::Outstanding;
use self::control::SessionControl;
pub use self::control::change::{Change, ChangeError, Leaving};
pub use self::control::failure::SessionFailure;
pub(crate) use self::control::no_path::NoPathWait;
pub(crate) use self::control::status::PathProgress;
pub use self::control::status::{PathStatus, VolumeStatus};
use self::control::view::SessionView;
use self::ctx::{Ctx, Fabrics};
pub use self::device_set::DeviceIndex;
use self::io::Shard;
pub use self::io::block_device::SessionDevice;
pub(crate) use self::io::devices::{DeviceReport, Reported};
pub(crate) use self::io::failed_ios::Failures;
pub(crate) use self::io::retry::Waits;
pub use self::message::ClientMessage;
use self::message::{ConnectionEnd, Message, Outbox};
pub(crate) use self::path_end::PathEnd;
pub(crate) use self::prover::AuthError;
pub use self::prover::{Nonces, Prover};
pub use self::session::{
    Failover, HeartbeatSettings, NoPath, PATH_RUN, PathTarget, Policy, SessionConfig, SlowIo,
    Tuning, Unresolved, VOLUMES_MAX, VolumeConfig,
};
pub(crate) use self::session::{PATHS_MAX, Resolved};
use crate::stats::ShardStats;

/// State and counters of one shard of a session.
#[derive(Debug)]
pub(crate) struct EngineReport {
    pub(crate) shard: CoreIndex,
    /// Counters by path.
    pub(crate) stats: ShardStats,
    /// Reports by volume.
    pub(crate) devices: Vec<DeviceReport>,
    pub(crate) inflight: usize,
    /// Requests in flight by path.
    pub(crate) path_inflight: Vec<u32>,
    /// For each path, whether it is excluded because it is slow.
    pub(crate) path_slow: Vec<bool>,
    /// Geometry of each device that has ever been open.
    pub(crate) geometries: Vec<(DeviceIndex, Geometry)>,
    /// Paths; only from the control shard, like the next four fields.
    pub(crate) paths: Option<Vec<PathStatus>>,
    /// Path names by slot, including those of removed paths.
    pub(crate) names: Vec<String>,
    pub(crate) policy: Option<Policy>,
    pub(crate) no_path_policy: Option<NoPath>,
    pub(crate) volumes: Vec<VolumeStatus>,
}

impl EngineReport {
    /// The shard's report on a device.
    pub(crate) fn device(&self, device: DeviceIndex) -> Option<&DeviceReport> {
        self.devices.iter().find(|report| report.device == device)
    }

    /// The control shard's status of a volume.
    pub(crate) fn volume(&self, device: DeviceIndex) -> Option<&VolumeStatus> {
        self.volumes.iter().find(|volume| volume.device == device)
    }

    /// Geometry of a device that has ever been open.
    pub(crate) fn geometry(&self, device: DeviceIndex) -> Option<&Geometry> {
        self.geometries.iter().find(|(of, _)| *of == device).map(|(_, geometry)| geometry)
    }
}

/// One shard of a session.
pub struct ClientEngine {
    index: CoreIndex,
    shard: Rc<RefCell<Shard>>,
    control: Option<SessionControl>,
    out: Outbox,
    away: Outbox,
}

impl ClientEngine {
    /// Creates a shard of a new session. All shards are given the same configuration and the same
    /// identities, one for each path.
    pub fn new(
        now: Instant,
        index: CoreIndex,
        config: &Arc<SessionConfig>,
        uuids: &[[u8; 16]],
    ) -> Self {
        let shard = Rc::new(RefCell::new(Shard::new(index, config)));
        let control = (index.0 == 0).then(|| SessionControl::new(now, Arc::clone(config), uuids));
        Self { index, shard, control, out: Outbox::default(), away: Outbox::default() }
    }

    /// Handles an event from the provider at this index.
    pub fn handle_event(
        &mut self,
        now: Instant,
        provider: ProviderIndex,
        event: FabricEvent,
        fabrics: &mut Fabrics,
    ) {
        if !self.give(now, provider, event, fabrics) {
            self.shard.borrow().unclaimed_event();
        }
        self.deliver(now, fabrics);
    }

    /// Passes an event to the owner of its connection. Returns false if there is no owner.
    fn give(
        &mut self,
        now: Instant,
        provider: ProviderIndex,
        event: FabricEvent,
        fabrics: &mut Fabrics,
    ) -> bool {
        let shard = &mut *self.shard.borrow_mut();
        let ctx = &mut Ctx { now, fabrics, out: &mut self.out };
        let control = self.control.as_mut();
        match event {
            FabricEvent::Completion(wc) => {
                shard.handle_completion(provider, &wc, ctx)
                    || control.is_some_and(|c| c.handle_completion(provider, &wc, ctx))
            }
            FabricEvent::Established { qp, private_data } => {
                let data = private_data.as_bytes();
                shard.handle_established(provider, qp, data, ctx)
                    || control
                        .is_some_and(|control| control.handle_established(provider, qp, data, ctx))
            }
            FabricEvent::ConnectFailed { qp, failure } => {
                let end = ConnectionEnd::Failed(failure);
                control.is_some_and(|c| c.handle_closed(provider, qp, &end, ctx))
                    || shard.handle_closed(provider, qp, end, ctx)
            }
            FabricEvent::Closed { qp, reason } => {
                let end = ConnectionEnd::Closed(reason);
                control.is_some_and(|c| c.handle_closed(provider, qp, &end, ctx))
                    || shard.handle_closed(provider, qp, end, ctx)
            }
            // A client does not listen, so no peer can send a request.
            FabricEvent::Request(_) => true,
        }
    }

    /// Handles a message.
    pub fn handle_message(&mut self, now: Instant, message: ClientMessage, fabrics: &mut Fabrics) {
        self.take(now, message.0, fabrics);
        self.deliver(now, fabrics);
    }

    fn take(&mut self, now: Instant, message: Message, fabrics: &mut Fabrics) {
        let ctx = &mut Ctx { now, fabrics, out: &mut self.out };
        match (message, self.control.as_mut()) {
            (Message::Shard(message), _) => self.shard.borrow_mut().handle_message(message, ctx),
            (Message::Control(message), Some(control)) => control.handle_message(message, ctx),
            (Message::Control(_), None) => self.shard.borrow().unclaimed_event(),
        }
    }

    /// Runs a function on the control shard and handles its messages. Returns None on other shards.
    fn control<T>(
        &mut self,
        now: Instant,
        fabrics: &mut Fabrics,
        what: impl FnOnce(&mut SessionControl, &mut Ctx<'_>) -> T,
    ) -> Option<T> {
        let ctx = &mut Ctx { now, fabrics, out: &mut self.out };
        let done = self.control.as_mut().map(|control| what(control, ctx));
        self.deliver(now, fabrics);
        done
    }

    /// Advances timers. Must be called once a turn, after the events. Returns whether anything
    /// happened.
    pub fn poll(&mut self, now: Instant, fabrics: &mut Fabrics) -> bool {
        self.control(now, fabrics, |control, ctx| control.poll(ctx)) == Some(true)
    }

    /// Issues submitted IO. Must be called once a turn, after the device's user. Returns whether
    /// anything was issued or finished.
    pub fn pump(&mut self, now: Instant, fabrics: &mut Fabrics) -> bool {
        let busy = self.shard.borrow_mut().pump(&mut Ctx { now, fabrics, out: &mut self.out });
        self.deliver(now, fabrics);
        busy || self.shard.borrow().ios().devices().has_completions()
    }

    /// Takes the next message for another shard.
    pub fn take_message(&mut self) -> Option<(CoreIndex, ClientMessage)> {
        self.away.take().map(|(to, message)| (to, ClientMessage(message)))
    }

    /// Handles messages for this shard, and queues those for others.
    fn deliver(&mut self, now: Instant, fabrics: &mut Fabrics) {
        while let Some((to, message)) = self.out.take() {
            if to == self.index {
                self.take(now, message, fabrics);
            } else {
                self.away.pass_on(to, message);
            }
        }
    }

    /// State of the session; on the control shard only.
    fn view(&self) -> Option<SessionView<'_>> {
        self.control.as_ref().map(SessionControl::view)
    }

    /// Returns this shard's queue of a device, once the server has opened it.
    pub fn device(&self, device: DeviceIndex) -> Option<SessionDevice> {
        let is_known = self.shard.borrow().ios().devices().is_known(device);
        is_known.then(|| SessionDevice::new(&self.shard, device))
    }

    /// Returns, on the control shard, the cache epoch of the server in which this session would
    /// leave unflushed writes of a volume if it ended now. The next session is given it as
    /// [`VolumeConfig::inherited_epoch`].
    pub fn saved_epoch(&self, device: DeviceIndex) -> Option<u64> {
        self.view()?.saved_epoch(device)
    }

    /// Returns, on the control shard, the acknowledged writes of a volume that await a flush or the
    /// report of their loss.
    pub fn outstanding(&self, device: DeviceIndex) -> Option<Outstanding> {
        self.view()?.outstanding(device)
    }

    /// Returns, on the control shard, the identity that a volume is pinned to, if it is known. The
    /// next session takes it as [`VolumeConfig::identity`].
    pub fn pinned_identity(&self, device: DeviceIndex) -> Option<Identity> {
        self.view()?.pinned_identity(device)
    }

    /// Returns, on the control shard, whether the content of a volume's export is lost when its
    /// server's process ends.
    pub fn is_memory(&self, device: DeviceIndex) -> bool {
        self.view().is_some_and(|view| view.is_memory(device))
    }

    /// Returns the volumes, including those being closed; on the control shard only.
    pub fn volumes(&self, now: Instant) -> Vec<VolumeStatus> {
        self.view().map(|view| view.volumes(now)).unwrap_or_default()
    }

    /// Returns the time by which the next poll is due even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let control = self.control.as_ref().and_then(SessionControl::deadline);
        earliest(self.shard.borrow().deadline(), control)
    }

    /// Handles a network change on this host that may help paths that are down.
    pub(crate) fn on_network_change(&mut self, now: Instant, what: &str, fabrics: &mut Fabrics) {
        self.control(now, fabrics, |control, ctx| control.on_network_change(what, ctx));
    }

    /// Handles a failed link of this host; see [`SessionControl::on_link_down`].
    pub(crate) fn on_link_down(
        &mut self,
        now: Instant,
        what: &str,
        addresses: &[IpAddr],
        fabrics: &mut Fabrics,
    ) {
        self.control(now, fabrics, |control, ctx| control.on_link_down(what, addresses, ctx));
    }

    /// Name of the next path whose host should be resolved again; on the control shard only.
    pub(crate) fn take_unreached(&mut self) -> Option<String> {
        self.control.as_mut()?.hosts.take_unreached()
    }

    /// Records the addresses of a path's host, or the reason why it has none, for the next poll.
    pub(crate) fn resolved(&mut self, path: &str, found: Resolved) {
        if let Some(control) = &mut self.control {
            control.hosts.resolved(path, found);
        }
    }

    /// Changes paths, volumes or settings of the running session; on the control shard only.
    ///
    /// # Errors
    /// Returns the reason why the change cannot be made.
    pub fn change(
        &mut self,
        now: Instant,
        change: Change,
        fabrics: &mut Fabrics,
    ) -> Result<(), ChangeError> {
        let done = self.control(now, fabrics, |control, ctx| control.change(change, ctx));
        done.unwrap_or(Err(ChangeError::NotControl))
    }

    /// Starts ending the session. Has no effect except on the control shard.
    pub fn detach(&mut self, now: Instant, fabrics: &mut Fabrics) {
        self.control(now, fabrics, SessionControl::detach);
    }

    /// Returns whether a detach has finished; on the control shard only.
    pub fn is_done(&self) -> bool {
        self.view().is_some_and(SessionView::is_done)
    }

    /// Returns whether a device is open on the server; on the control shard only.
    pub fn is_open(&self, device: DeviceIndex) -> bool {
        self.view().is_some_and(|view| view.is_open(device))
    }

    /// Returns the failure of the session, if any; on the control shard only.
    pub fn failure(&self) -> Option<&SessionFailure> {
        self.control.as_ref().and_then(SessionControl::failure)
    }

    /// Returns whether the session has a volume of this export, or is closing it; on the control
    /// shard only.
    pub(crate) fn has_volume(&self, export: &str) -> bool {
        self.view().is_some_and(|view| view.has_volume(export))
    }

    /// Returns the progress of the paths on which an attach depends; on the control shard only.
    pub(crate) fn path_progress(&self) -> Option<Vec<PathProgress>> {
        self.view().map(|view| view.progress().collect())
    }

    /// Whether the progress of the paths still equals `known`. Does not allocate.
    pub(crate) fn is_path_progress(&self, known: &[PathProgress]) -> bool {
        self.view().is_none_or(|view| view.progress().eq(known.iter().copied()))
    }

    /// Returns the failure of a volume, if any; on the control shard only.
    pub(crate) fn volume_failure(&self, device: DeviceIndex) -> Option<&SessionFailure> {
        self.view()?.volume_failure(device)
    }

    /// Number of unfinished IOs of a device on this shard.
    pub(crate) fn device_inflight(&self, device: DeviceIndex) -> usize {
        self.shard.borrow().ios().device_inflight(device)
    }

    /// Returns the size of a device as known to this shard; None until the device has been open.
    pub fn size(&self, device: DeviceIndex) -> Option<u64> {
        let shard = self.shard.borrow();
        let devices = shard.ios().devices();
        devices.is_known(device).then(|| devices.info(device).geometry.size)
    }

    /// Returns the state and counters of this shard for listings, limited to the requested devices.
    pub(crate) fn report(&self, now: Instant, reported: Reported) -> EngineReport {
        let shard = self.shard.borrow();
        let view = self.view();
        let devices = shard.ios().devices();
        let known = devices.all().filter(|device| devices.is_known(*device));
        let geometries = known.map(|device| (device, devices.info(device).geometry.clone()));
        EngineReport {
            shard: self.index,
            stats: shard.paths().stats().clone(),
            devices: shard.device_reports(now, reported),
            inflight: shard.ios().inflight(),
            path_inflight: shard.paths().inflight(),
            path_slow: shard.paths().slow(),
            geometries: geometries.collect(),
            paths: view.map(SessionView::paths),
            names: view.map(SessionView::path_names).unwrap_or_default(),
            policy: view.map(|view| view.config().policy),
            no_path_policy: view.map(|view| view.config().no_path),
            volumes: view.map(|view| view.volumes(now)).unwrap_or_default(),
        }
    }

    /// Returns the settings that can change at run time; None except on the control shard.
    pub fn tuning(&self) -> Option<Tuning> {
        self.view().map(|view| view.config().tuning())
    }

    /// Returns the session's paths; empty except on the control shard.
    pub fn paths(&self) -> Vec<PathStatus> {
        self.view().map(SessionView::paths).unwrap_or_default()
    }

    /// Returns the number of unfinished IOs on this shard.
    pub fn inflight(&self) -> usize {
        self.shard.borrow().ios().inflight()
    }

    /// Returns the number of requests that this shard has sent so far, by path.
    pub fn path_requests(&self) -> Vec<u64> {
        self.shard.borrow().paths().stats().paths.iter().map(|path| path.requests).collect()
    }

    /// Returns the number of permits that requests of this shard hold.
    pub fn permits_held(&self) -> usize {
        self.shard.borrow().ios().permits_held()
    }

    /// Panics if the engine's tables are inconsistent.
    pub fn check(&self) {
        self.shard.borrow().check();
    }
}

impl fmt::Debug for ClientEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientEngine").field("shard", &self.index).finish_non_exhaustive()
    }
}
