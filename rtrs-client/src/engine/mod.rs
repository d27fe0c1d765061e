//! The engine of one shard of the client: its part of a session, and on shard 0 the control.
//!
//! Events of the shard's providers and messages of other shards go in; work requests go to the
//! providers, messages come out of [`ClientEngine::take_message`]. It does no IO of its own and
//! reads no clock, so the driver runs it on a reactor and the simulator in virtual time alike. A
//! turn is: messages, events, [`ClientEngine::poll`], whoever uses the device,
//! [`ClientEngine::pump`], the providers' flush, messages out. Messages that a shard sends to
//! itself never come out: they are handled within the same call.

mod cache_epoch;
pub(crate) mod control;
pub(crate) mod ctx;
pub(crate) mod device_set;
pub(crate) mod device_table;
pub(crate) mod io;
pub(crate) mod message;
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

use self::control::SessionControl;
pub use self::control::failure::SessionFailure;
pub(crate) use self::control::identity::ANOTHER;
pub(crate) use self::control::no_path::NoPathWait;
pub use self::control::path_admin::{Change, Leaving};
pub(crate) use self::control::status::{PathStatus, VolumeStatus};
use self::ctx::{Ctx, Fabrics};
pub use self::device_set::DeviceIndex;
use self::io::Shard;
pub use self::io::block_device::SessionDevice;
pub(crate) use self::io::devices::{DeviceReport, Reported};
pub(crate) use self::io::retry::Waits;
pub use self::message::ClientMessage;
use self::message::{ConnectionEnd, Message, Outbox};
pub(crate) use self::prover::{NO_KEYS, NO_PROOF, describe_impostor, describe_refusal};
pub use self::prover::{Nonces, Prover};
pub(crate) use self::session::PATHS_MAX;
pub use self::session::{
    Failover, HeartbeatSettings, NoPath, PathTarget, Policy, SessionConfig, SlowIo, Tuning,
    VOLUMES_MAX, VolumeConfig,
};
use crate::path::state::PathState;
use crate::stats::ShardStats;

/// Where a path stands, as the control shard knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathView {
    /// Its name.
    pub name: String,
    /// It carries IO.
    pub connected: bool,
    /// It is being taken out of use by hand.
    pub leaving: bool,
    /// The state's name, as in listings.
    pub state: String,
    /// Volumes that it serves.
    pub volumes: usize,
    /// Times it was connected again.
    pub reconnects: u64,
    /// Why it ended last.
    pub last_error: Option<String>,
}

/// A volume of a session, as the control shard knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeView {
    /// Its device on each shard.
    pub device: DeviceIndex,
    /// The name of its export.
    pub export: String,
    /// False once its user does not have it any more, until nothing of it is left.
    pub used: bool,
    /// It is open at the server.
    pub open: bool,
    /// It cannot go on.
    pub failed: bool,
    /// Why it cannot go on, or what was in the way when it was last tried.
    pub obstacle: Option<String>,
    /// Paths that do not serve it, and why.
    pub refusals: Vec<(String, String)>,
}

/// What one shard of a session knows and did.
#[derive(Debug)]
pub(crate) struct EngineReport {
    pub(crate) shard: CoreIndex,
    /// Over the paths.
    pub(crate) stats: ShardStats,
    /// By volume.
    pub(crate) devices: Vec<DeviceReport>,
    pub(crate) inflight: usize,
    /// The requests of these, by path.
    pub(crate) path_inflight: Vec<u32>,
    /// By path, left out because it is slow.
    pub(crate) path_slow: Vec<bool>,
    /// The shape of each device that was open once.
    pub(crate) geometries: Vec<(DeviceIndex, Geometry)>,
    /// Only from the control shard, as are the next four.
    pub(crate) paths: Option<Vec<PathStatus>>,
    /// Names by place, those of removed paths included.
    pub(crate) names: Vec<String>,
    pub(crate) policy: Option<Policy>,
    pub(crate) no_path_policy: Option<NoPath>,
    pub(crate) volumes: Vec<VolumeStatus>,
}

impl EngineReport {
    /// What the shard knows of a device.
    pub(crate) fn device(&self, device: DeviceIndex) -> Option<&DeviceReport> {
        self.devices.iter().find(|report| report.device == device)
    }

    /// What the control shard knows of a volume.
    pub(crate) fn volume(&self, device: DeviceIndex) -> Option<&VolumeStatus> {
        self.volumes.iter().find(|volume| volume.device == device)
    }

    /// The shape of a device that was open once.
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
    /// A shard of a session that begins now. All shards get the same configuration and the same
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

    /// Takes an event of the provider at that index.
    pub fn handle_event(
        &mut self,
        now: Instant,
        provider: ProviderIndex,
        event: FabricEvent,
        fabrics: &mut Fabrics,
    ) {
        if !self.give(now, provider, event, fabrics) {
            self.shard.borrow_mut().event_of_nobody();
        }
        self.deliver(now, fabrics);
    }

    /// Gives an event to whose connection it is. False when it is of none.
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
            // A client does not listen: nobody can ask.
            FabricEvent::Request(_) => true,
        }
    }

    /// Takes a message.
    pub fn handle_message(&mut self, now: Instant, message: ClientMessage, fabrics: &mut Fabrics) {
        self.take(now, message.0, fabrics);
        self.deliver(now, fabrics);
    }

    fn take(&mut self, now: Instant, message: Message, fabrics: &mut Fabrics) {
        let ctx = &mut Ctx { now, fabrics, out: &mut self.out };
        match (message, self.control.as_mut()) {
            (Message::Shard(message), _) => self.shard.borrow_mut().handle_message(message, ctx),
            (Message::Control(message), Some(control)) => control.handle_message(message, ctx),
            (Message::Control(_), None) => self.shard.borrow_mut().event_of_nobody(),
        }
    }

    /// Has the control shard do something, and handles what follows. None on other shards.
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

    /// Moves timers on. To be called once a turn, after the events. True when anything happened.
    pub fn poll(&mut self, now: Instant, fabrics: &mut Fabrics) -> bool {
        self.control(now, fabrics, |control, ctx| control.poll(ctx)) == Some(true)
    }

    /// Issues what was submitted. To be called once a turn, after the device's user. True when
    /// anything was issued or finished.
    pub fn pump(&mut self, now: Instant, fabrics: &mut Fabrics) -> bool {
        let busy = self.shard.borrow_mut().pump(&mut Ctx { now, fabrics, out: &mut self.out });
        self.deliver(now, fabrics);
        busy || self.shard.borrow().devices().has_completions()
    }

    /// The next message to another shard.
    pub fn take_message(&mut self) -> Option<(CoreIndex, ClientMessage)> {
        self.away.take().map(|(to, message)| (to, ClientMessage(message)))
    }

    /// Handles messages to this shard, lays those to others aside.
    fn deliver(&mut self, now: Instant, fabrics: &mut Fabrics) {
        while let Some((to, message)) = self.out.take() {
            if to == self.index {
                self.take(now, message, fabrics);
            } else {
                self.away.pass_on(to, message);
            }
        }
    }

    /// This shard's queue of a device, once the server has opened it.
    pub fn device(&self, device: DeviceIndex) -> Option<SessionDevice> {
        let is_known = self.shard.borrow().devices().is_known(device);
        is_known.then(|| SessionDevice::new(&self.shard, device))
    }

    /// On the control shard: in which epoch of the server's cache this session may leave writes of
    /// a volume that were not flushed, should it end now; for [`VolumeConfig::inherited_epoch`] of
    /// the next.
    pub fn saved_epoch(&self, device: DeviceIndex) -> Option<u64> {
        self.control.as_ref()?.saved_epoch(device)
    }

    /// On the control shard: which server's export a volume is pinned to, if either is known;
    /// for [`VolumeConfig::identity`] of the next.
    pub fn pinned_identity(&self, device: DeviceIndex) -> Option<Identity> {
        self.control.as_ref()?.pinned_identity(device)
    }

    /// The volumes, those included that are being closed; on the control shard only.
    pub fn volumes(&self, now: Instant) -> Vec<VolumeView> {
        let volumes = self.control.as_ref().map(|control| control.volumes(now));
        let view = |volume: VolumeStatus| {
            let VolumeStatus { device, export, used, open, failed, obstacle, refusals, .. } =
                volume;
            let obstacle = obstacle.map(|obstacle| obstacle.to_string());
            VolumeView { device, export, used, open, failed, obstacle, refusals }
        };
        volumes.into_iter().flatten().map(view).collect()
    }

    /// When to be polled even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let control = self.control.as_ref().and_then(SessionControl::deadline);
        earliest(self.shard.borrow().deadline(), control)
    }

    /// Something in the host's network is up or new, which may help paths that are down.
    pub(crate) fn on_network_change(&mut self, now: Instant, what: &str, fabrics: &mut Fabrics) {
        self.control(now, fabrics, |control, ctx| control.on_network_change(what, ctx));
    }

    /// A link of this host went down; see [`SessionControl::on_link_down`].
    pub(crate) fn on_link_down(
        &mut self,
        now: Instant,
        (what, addresses): (&str, &[IpAddr]),
        fabrics: &mut Fabrics,
    ) {
        self.control(now, fabrics, |control, ctx| control.on_link_down(what, addresses, ctx));
    }

    /// Changes paths, volumes or settings of the running session; on the control shard only.
    ///
    /// # Errors
    /// Why it cannot be made.
    pub fn change(
        &mut self,
        now: Instant,
        change: Change,
        fabrics: &mut Fabrics,
    ) -> Result<(), String> {
        let done = self.control(now, fabrics, |control, ctx| control.change(change, ctx));
        done.unwrap_or_else(|| Err("only the control shard changes a session".into()))
    }

    /// Begins the session's end; on the control shard only, elsewhere nothing happens.
    pub fn detach(&mut self, now: Instant, fabrics: &mut Fabrics) {
        self.control(now, fabrics, SessionControl::detach);
    }

    /// True when a detach has ended everything; the control shard knows.
    pub fn is_done(&self) -> bool {
        self.control.as_ref().is_some_and(SessionControl::is_done)
    }

    /// True while a device is open at the server; the control shard knows.
    pub fn is_open(&self, device: DeviceIndex) -> bool {
        self.control.as_ref().is_some_and(|control| control.is_open(device))
    }

    /// Why the session cannot go on; the control shard knows.
    pub fn failure(&self) -> Option<&SessionFailure> {
        self.control.as_ref().and_then(SessionControl::failure)
    }

    /// True while the session has a volume of this export, or is closing it; the control shard
    /// knows.
    pub(crate) fn has_volume(&self, export: &str) -> bool {
        self.control.as_ref().is_some_and(|control| control.has_volume(export))
    }

    /// Why a volume cannot go on; the control shard knows.
    pub(crate) fn volume_failure(&self, device: DeviceIndex) -> Option<&SessionFailure> {
        self.control.as_ref()?.volume_failure(device)
    }

    /// IOs of a device that have not ended, on this shard.
    pub(crate) fn device_inflight(&self, device: DeviceIndex) -> usize {
        self.shard.borrow().device_inflight(device)
    }

    /// A device's size, as this shard has it; None until it was open once.
    pub fn size(&self, device: DeviceIndex) -> Option<u64> {
        let shard = self.shard.borrow();
        let devices = shard.devices();
        devices.is_known(device).then(|| devices.info(device).geometry.size)
    }

    /// What this shard knows and did, for listings; of devices, those that are asked for.
    pub(crate) fn report(&self, now: Instant, reported: Reported) -> EngineReport {
        let shard = self.shard.borrow();
        let control = self.control.as_ref();
        let devices = shard.devices();
        let known = devices.all().filter(|device| devices.is_known(*device));
        let geometries = known.map(|device| (device, devices.info(device).geometry.clone()));
        EngineReport {
            shard: self.index,
            stats: shard.stats().clone(),
            devices: shard.device_reports(now, reported),
            inflight: shard.inflight(),
            path_inflight: shard.path_inflight(),
            path_slow: shard.path_slow(),
            geometries: geometries.collect(),
            paths: control.map(SessionControl::status),
            names: control.map(SessionControl::path_names).unwrap_or_default(),
            policy: control.map(|control| control.config().policy),
            no_path_policy: control.map(|control| control.config().no_path),
            volumes: control.map(|control| control.volumes(now)).unwrap_or_default(),
        }
    }

    /// The settings that may change, as they are; None on other shards than the control shard.
    pub fn tuning(&self) -> Option<Tuning> {
        self.control.as_ref().map(|control| control.config().tuning())
    }

    /// The session's paths; empty on other shards than the control shard.
    pub fn paths(&self) -> Vec<PathView> {
        let status = self.control.as_ref().map(SessionControl::status).unwrap_or_default();
        status
            .into_iter()
            .map(|path| PathView {
                name: path.path,
                leaving: path.leaving.is_some(),
                connected: matches!(path.state, PathState::Connected | PathState::Standby),
                state: path.state.to_string(),
                volumes: path.volumes,
                reconnects: path.reconnects,
                last_error: path.last_error,
            })
            .collect()
    }

    /// IOs taken and not yet finished, on this shard.
    pub fn inflight(&self) -> usize {
        self.shard.borrow().inflight()
    }

    /// Requests of this shard so far, by path.
    pub fn path_requests(&self) -> Vec<u64> {
        self.shard.borrow().stats().paths.iter().map(|path| path.requests).collect()
    }

    /// Permits that requests of this shard hold.
    pub fn permits_held(&self) -> usize {
        self.shard.borrow().permits_held()
    }

    /// Panics when the machine's tables do not agree with each other.
    pub fn check(&self) {
        self.shard.borrow().check();
    }
}

impl fmt::Debug for ClientEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientEngine").field("shard", &self.index).finish_non_exhaustive()
    }
}
