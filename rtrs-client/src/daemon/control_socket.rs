//! The control socket of an attached session.
//!
//! It runs on a thread of its own (`rtrs_core::local`), off the IO path, and asks the shards by
//! message. A change of a path or of the policy is validated and begun immediately; the command
//! then looks at `status` until it is done, so that the control socket serves others meanwhile.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use rtrs_core::local::{ControlSocket, reply};
use rtrs_core::settings::Portal;
use rtrs_core::time::Duration;

use super::config::{random_uuid, tuning};
use super::fabrics::{FabricRegistry, path_target};
use super::launch::ShardHandle;
use super::metrics;
use super::report::{self, Identity};
use crate::control_protocol::{Changed, Detached, Leave, Request, SettingValues};
use crate::engine::{Change, Leaving};
use crate::plan::{AttachPlan, path_name};

/// A detach, and the command that waits for the session's end.
#[derive(Debug)]
pub(crate) struct Detach {
    pub(crate) within: Duration,
    stream: UnixStream,
}

impl Detach {
    /// Replies that the session has ended, and what there is to say about it. Its name must be free
    /// before.
    pub(crate) fn reply(self, detached: &Detached) {
        reply(&self.stream, Ok(detached));
    }
}

/// What the requests are about.
pub(crate) struct Session {
    pub(crate) identity: Identity,
    pub(crate) shards: ShardHandle,
    pub(crate) registry: Arc<FabricRegistry>,
    /// With the settings as they are now.
    pub(crate) plan: Mutex<AttachPlan>,
    /// Gets every detach.
    pub(crate) detaches: mpsc::Sender<Detach>,
}

/// Serves requests until the socket is dropped.
pub(crate) fn serve(control: &ControlSocket, session: Session) -> io::Result<()> {
    control.serve(move |request, stream| session.handle(&request, stream))
}

impl Session {
    fn handle(&self, request: &Request, stream: UnixStream) {
        let leaving = |leave: &Leave| Leaving {
            path: path_name(&leave.path),
            within: Duration::from_millis(leave.within_ms),
            force: leave.force,
        };
        let change = match request {
            Request::Status => {
                let status = report::status(&self.identity, &self.shards.reports());
                return reply(&stream, Ok(status));
            }
            Request::Stats { times } => {
                let stats = report::stats(&self.identity, &self.shards.reports(), *times);
                return reply(&stream, Ok(stats));
            }
            Request::Metrics => {
                let samples = metrics::samples(&self.identity, &self.shards.reports());
                return reply(&stream, Ok(samples));
            }
            // Also while another one runs: this one may allow less time.
            Request::Detach { within_ms } => return self.detach(stream, *within_ms),
            Request::PathAdd { path } => self.addition(path),
            Request::PathRemove(leave) => Ok(Change::Remove(leaving(leave))),
            Request::PathDisconnect(leave) => Ok(Change::Disconnect(leaving(leave))),
            Request::PathReconnect(leave) => Ok(Change::Reconnect(leaving(leave))),
            Request::Get => {
                let mut settings = self.plan.lock().values();
                report::set_paths(&mut settings, &self.shards.reports());
                return reply(&stream, Ok(SettingValues { settings }));
            }
            Request::Set { settings } => return reply(&stream, self.set(settings)),
            Request::Policy { policy } => {
                let settings = BTreeMap::from([("policy".to_owned(), policy.to_string())]);
                return reply(&stream, self.set(&settings));
            }
        };
        let changed = change.and_then(|change| self.shards.change(change));
        reply(&stream, changed.map(|()| Changed { changed: true }));
    }

    /// Changes settings, all or none.
    fn set(&self, settings: &BTreeMap<String, String>) -> Result<Changed, String> {
        // Held until the change has begun, so that of two callers the later one's values stay.
        let mut plan = self.plan.lock();
        let changed = plan.changed(settings).map_err(|error| error.chain().to_string())?;
        self.shards.change(Change::Tune(Box::new(tuning(&changed.session))))?;
        *plan = changed;
        for (name, value) in settings {
            tracing::info!("{name} set to {value}");
        }
        Ok(Changed { changed: true })
    }

    /// Passes the detach on; `status` still replies until the session has ended.
    fn detach(&self, stream: UnixStream, within_ms: u64) {
        let within = Duration::from_millis(within_ms);
        if let Err(mpsc::SendError(detach)) = self.detaches.send(Detach { within, stream }) {
            reply::<()>(&detach.stream, Err("the session is ending".into()));
        }
    }

    fn addition(&self, path: &str) -> Result<Change, String> {
        let portal: Portal = path.parse().map_err(|e| format!("path {path:?}: {e}"))?;
        portal.check_connect().map_err(|e| e.to_string())?;
        self.registry.open(portal.scheme())?;
        let provider = self.shards.provide(portal.scheme())?;
        let plan = self.plan.lock();
        let heartbeat = plan.session.own_heartbeat(portal.scheme());
        let invalidate_reads = plan.session.settings.invalidate_reads;
        drop(plan);
        let target = path_target(&portal, provider, invalidate_reads, heartbeat)
            .map_err(|e| e.chain().to_string())?;
        let uuid = random_uuid().map_err(|e| format!("no random numbers: {e}"))?;
        Ok(Change::Add { target, uuid })
    }
}
