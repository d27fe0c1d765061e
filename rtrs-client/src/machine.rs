//! One core of the client as a machine: its shard of the session, and on core 0 the home's part.
//!
//! Events of the core's providers and messages of other cores go in; work requests go to the
//! providers, messages come out of [`ClientCore::take_message`]. It does no IO of its own and reads
//! no clock; a simulator runs it in virtual time. A turn is: messages, events,
//! [`ClientCore::poll`], whoever uses the device, [`ClientCore::pump`], the providers' flush,
//! messages out. Messages a core writes to itself never come out: they are handled within the call.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::fabric::{Fabric, FabricEvent};
use rtrs_core::identity::Identity;
use rtrs_core::ids::{CoreIndex, QpNum};
use rtrs_core::time::{Instant, earliest};

use crate::path::state::PathState;
use crate::session::SessionDevice;
use crate::session::control::SessionControl;
use crate::session::device::SessionFailure;
use crate::session::replay::OldestIo;
use crate::session::shard::{ConnectionEnd, ShardSession};
use crate::session::status::PathStatus;
use crate::session::{Change, Policy, SessionConfig, ToHome, ToShard};
use crate::stats::ShardStats;

/// A message to another core, to be kept in order between each two cores.
#[derive(Debug)]
pub struct ClientMessage(Content);

#[derive(Debug)]
enum Content {
    Shard(ToShard),
    Home(ToHome),
}

/// Where a path stands, as the home core knows it.
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
    /// Times it was connected again.
    pub reconnects: u64,
    /// Why it ended last.
    pub last_error: Option<String>,
}

/// What one core of a session knows and did.
#[derive(Debug)]
pub(crate) struct EngineReport {
    pub(crate) core: CoreIndex,
    pub(crate) stats: ShardStats,
    pub(crate) inflight: usize,
    /// The requests of these, by path.
    pub(crate) path_inflight: Vec<u32>,
    /// By path, left out because it is slow.
    pub(crate) path_slow: Vec<bool>,
    /// The IO that is here for the longest time.
    pub(crate) oldest: Option<OldestIo>,
    /// Only from core 0, as are the next four.
    pub(crate) paths: Option<Vec<PathStatus>>,
    /// Names by place, those of removed paths included.
    pub(crate) names: Vec<String>,
    pub(crate) policy: Option<Policy>,
    pub(crate) open: bool,
    /// What the session is pinned to.
    pub(crate) identity: Option<Identity>,
}

/// One core of a session.
pub struct ClientCore {
    core: CoreIndex,
    session: Rc<RefCell<ShardSession>>,
    control: Option<SessionControl>,
    to_home: Vec<ToHome>,
    away: VecDeque<(CoreIndex, ClientMessage)>,
    opened: bool,
}

impl ClientCore {
    /// A core of a session that begins now. All cores get the same configuration and the same
    /// identities, one for each path.
    pub fn new(
        now: Instant,
        core: CoreIndex,
        config: &Arc<SessionConfig>,
        uuids: &[[u8; 16]],
    ) -> Self {
        let session = Rc::new(RefCell::new(ShardSession::new(core, Arc::clone(config))));
        let control = (core.0 == 0).then(|| SessionControl::new(now, Arc::clone(config), uuids));
        Self { core, session, control, to_home: Vec::new(), away: VecDeque::new(), opened: false }
    }

    /// Takes an event of the provider at that index.
    pub fn handle_event(
        &mut self,
        now: Instant,
        provider: usize,
        event: FabricEvent,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        match event {
            FabricEvent::Completion(wc) => {
                let fabric = fabrics[provider].as_mut();
                let ours = self.session.borrow_mut().handle_completion(now, provider, &wc, fabric);
                if !ours && let Some(control) = self.control.as_mut() {
                    control.handle_completion(now, provider, &wc, fabrics);
                }
            }
            FabricEvent::Established { qp, private_data } => {
                let data = private_data.as_bytes();
                let fabric = fabrics[provider].as_mut();
                let ours = self.session.borrow_mut().handle_established(
                    now,
                    provider,
                    qp,
                    data,
                    fabric,
                    &mut self.to_home,
                );
                if !ours && let Some(control) = self.control.as_mut() {
                    control.handle_established(now, provider, qp, data, fabrics);
                }
            }
            FabricEvent::ConnectFailed { qp, failure } => {
                self.end(now, provider, qp, ConnectionEnd::Failed(failure), fabrics);
            }
            FabricEvent::Closed { qp, reason } => {
                self.end(now, provider, qp, ConnectionEnd::Closed(reason), fabrics);
            }
            // A client does not listen: nobody can ask.
            FabricEvent::Request(_) => {}
        }
        self.deliver(now, fabrics);
    }

    fn end(
        &mut self,
        now: Instant,
        provider: usize,
        qp: QpNum,
        end: ConnectionEnd,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        if let Some(control) = self.control.as_mut()
            && control.handle_closed(now, provider, qp, &end, fabrics)
        {
            return;
        }
        self.session.borrow_mut().handle_closed(now, provider, qp, end, &mut self.to_home);
    }

    /// Takes a message.
    pub fn handle_message(
        &mut self,
        now: Instant,
        message: ClientMessage,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        match message.0 {
            Content::Shard(message) => self.on_shard_message(now, message, fabrics),
            Content::Home(message) => {
                if let Some(control) = self.control.as_mut() {
                    control.handle_message(now, message, fabrics);
                }
            }
        }
        self.deliver(now, fabrics);
    }

    fn on_shard_message(
        &mut self,
        now: Instant,
        message: ToShard,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        self.opened |= matches!(message, ToShard::Open(_));
        self.session.borrow_mut().handle_message(now, message, fabrics, &mut self.to_home);
    }

    /// Moves timers on. To be called once a turn, after the events. True when anything happened.
    pub fn poll(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) -> bool {
        let mut busy = false;
        if let Some(control) = self.control.as_mut() {
            busy |= control.poll(now, fabrics);
        }
        self.deliver(now, fabrics);
        busy
    }

    /// Issues what was submitted. To be called once a turn, after the device's user. True when
    /// anything was issued or finished.
    pub fn pump(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) -> bool {
        let busy = self.session.borrow_mut().pump(now, fabrics, &mut self.to_home);
        self.deliver(now, fabrics);
        busy || self.session.borrow().has_completions()
    }

    /// The next message to another core.
    pub fn take_message(&mut self) -> Option<(CoreIndex, ClientMessage)> {
        self.away.pop_front()
    }

    /// Handles messages to this core, lays messages to others aside.
    fn deliver(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) {
        loop {
            let mut again = false;
            for message in std::mem::take(&mut self.to_home) {
                again = true;
                match self.control.as_mut() {
                    Some(control) => control.handle_message(now, message, fabrics),
                    None => {
                        self.away.push_back((CoreIndex(0), ClientMessage(Content::Home(message))))
                    }
                }
            }
            let outbox = self.control.as_mut().map(SessionControl::take_outbox).unwrap_or_default();
            for (to, message) in outbox {
                again = true;
                if to == self.core {
                    self.on_shard_message(now, message, fabrics);
                } else {
                    self.away.push_back((to, ClientMessage(Content::Shard(message))));
                }
            }
            if !again {
                return;
            }
        }
    }

    /// This core's queue of the session's device, once the server has opened it.
    pub fn device(&self) -> Option<SessionDevice> {
        self.opened.then(|| SessionDevice::new(Rc::clone(&self.session)))
    }

    /// On core 0: in which life of the server's cache this session may leave writes that were not
    /// flushed, should it end now; for [`SessionConfig::inherited_life`] of the next.
    pub fn kept_life(&self) -> Option<u64> {
        self.control.as_ref().and_then(SessionControl::kept_life)
    }

    /// On core 0: which server's export the session is pinned to, if either is known; for
    /// [`SessionConfig::identity`] of the next.
    pub fn pinned_identity(&self) -> Option<Identity> {
        self.control.as_ref().and_then(SessionControl::pinned_identity)
    }

    /// When to be polled even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let control = self.control.as_ref().and_then(SessionControl::deadline);
        earliest(self.session.borrow().deadline(), control)
    }

    /// Something in the host's network is up or new, which may help paths that are down.
    pub(crate) fn on_network_change(
        &mut self,
        now: Instant,
        what: &str,
        fabrics: &mut [Box<dyn Fabric>],
    ) {
        if let Some(control) = self.control.as_mut() {
            control.on_network_change(now, what, fabrics);
        }
        self.deliver(now, fabrics);
    }

    /// Changes paths or policy of the running session; on core 0 only.
    ///
    /// # Errors
    /// Why it cannot be made.
    pub fn change(
        &mut self,
        now: Instant,
        change: Change,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> Result<(), String> {
        let done = match self.control.as_mut() {
            Some(control) => control.change(now, change, fabrics),
            None => Err("only core 0 changes a session".into()),
        };
        self.deliver(now, fabrics);
        done
    }

    /// Begins the session's end; on core 0 only, elsewhere nothing happens.
    pub fn detach(&mut self, now: Instant, fabrics: &mut [Box<dyn Fabric>]) {
        if let Some(control) = self.control.as_mut() {
            control.detach(now, fabrics);
        }
        self.deliver(now, fabrics);
    }

    /// True when a detach has ended everything; core 0 knows.
    pub fn is_done(&self) -> bool {
        self.control.as_ref().is_some_and(SessionControl::is_done)
    }

    /// True while the device is open at the server; core 0 knows.
    pub fn is_open(&self) -> bool {
        self.control.as_ref().is_some_and(SessionControl::is_open)
    }

    /// Why the session cannot go on; core 0 knows.
    pub fn failure(&self) -> Option<&SessionFailure> {
        self.control.as_ref().and_then(SessionControl::failure)
    }

    /// What this core knows and did, for listings.
    pub(crate) fn report(&self, now: Instant) -> EngineReport {
        let session = self.session.borrow();
        let control = self.control.as_ref();
        EngineReport {
            core: self.core,
            stats: session.stats().clone(),
            inflight: session.inflight(),
            path_inflight: session.path_inflight(),
            path_slow: session.path_slow(),
            oldest: session.oldest(now),
            paths: control.map(SessionControl::status),
            names: control.map(SessionControl::path_names).unwrap_or_default(),
            policy: control.map(SessionControl::policy),
            open: self.is_open(),
            identity: self.pinned_identity(),
        }
    }

    /// The session's paths; empty on cores other than 0.
    pub fn paths(&self) -> Vec<PathView> {
        let status = self.control.as_ref().map(SessionControl::status).unwrap_or_default();
        status
            .into_iter()
            .map(|path| PathView {
                name: path.path,
                leaving: path.leaving.is_some(),
                connected: path.state == PathState::Connected,
                state: path.state.to_string(),
                reconnects: path.reconnects,
                last_error: path.last_error,
            })
            .collect()
    }

    /// IOs taken and not yet finished, on this core.
    pub fn inflight(&self) -> usize {
        self.session.borrow().inflight()
    }

    /// Requests of this shard so far, by path.
    pub fn path_requests(&self) -> Vec<u64> {
        self.session.borrow().stats().paths.iter().map(|path| path.requests).collect()
    }

    /// Permits that requests of this core hold.
    pub fn permits_held(&self) -> usize {
        self.session.borrow().permits_held()
    }

    /// Panics when the machine's tables do not agree with each other.
    pub fn check(&self) {
        self.session.borrow().check();
    }
}

impl fmt::Debug for ClientCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCore").field("core", &self.core).finish_non_exhaustive()
    }
}
