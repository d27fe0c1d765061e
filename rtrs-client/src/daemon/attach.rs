//! The attach daemon: the process of an attached session, from its sockets to its end.
//!
//! The session opens, then its front: NBD clients may connect, or the kernel has its device. Then
//! the process waits for a signal, a detach or a failure, and takes everything down in the opposite
//! order, each step with a time limit. Runs on the process's main thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant, SystemTime};

use nbd_bridge::kernel::{BUSY_BYTES, KernelDevice};
use nbd_bridge::{Bound, BridgeConfig, Endpoint};
use parking_lot::Mutex;
use rtrs_core::identity::Identity as Pinned;
use rtrs_core::local::ControlSocket;
use rtrs_core::logging::log_to_stderr;
use rtrs_core::rt::become_daemon;
use rtrs_core::settings::{Output, write_text};

use super::config::session_config;
use super::control_socket::{self, Detach, serve};
use super::device;
use super::driver::Event;
use super::events::{Wake, forward_detaches, forward_events, wait_ready};
use super::fabrics::FabricRegistry;
use super::launch::{self, Running};
use super::metrics::Scraped;
use super::report::{self, Identity};
use super::saved::Saved;
use super::signals::serve_signals;
use crate::control_protocol::Detached;
use crate::engine::SessionConfig;
use crate::error::{Error, ErrorKind, system};
use crate::frontend::{MakeFrontEnds, kernel_nbd, nbd};
use crate::plan::{AttachPlan, Front};
use crate::session_log::DAEMON_LOG;
use crate::settings::{SlowIo, give_socket};

/// How a daemon in the background begins its only line, before [`Attached`] as JSON or before why
/// it failed.
///
/// [`Attached`]: crate::control_protocol::Attached
pub(crate) const READY: &str = "ready ";
pub(crate) const FAILED: &str = "failed ";
/// Time for requests in flight when a signal ends the session.
const SIGNAL_GRACE: Duration = Duration::from_secs(10);

/// Runs a session until it is detached or a signal ends it.
pub(crate) fn run(plan: &AttachPlan) -> Result<(), Error> {
    attach(plan).inspect_err(report_failure)
}

/// Tells the command that started this process in the background why it ends. The log says it too,
/// if its disk has room.
fn report_failure(error: &Error) {
    if std::env::var_os(DAEMON_LOG).is_some() {
        let why = error.chain().to_string().replace('\n', " ");
        if let Err(error) = write_text(&format!("{FAILED}{why}\n")) {
            tracing::debug!("the attach command is gone: {error}");
        }
    }
}

fn attach(plan: &AttachPlan) -> Result<(), Error> {
    let settings = &plan.session.settings;
    let _log = log_to_stderr(&settings.log, settings.log_format)
        .map_err(system("cannot start the log's thread"))?;
    plan.run_dir.make()?;
    let control_path = plan.run_dir.control_socket(&plan.session.export_name);
    let control = ControlSocket::bind(&control_path).map_err(|e| {
        let what = format!("cannot listen on the control socket {}", control_path.display());
        Error::with_source(ErrorKind::InUse, what, e)
    })?;
    let scraped = plan.settings.metrics.as_ref().map(Scraped::bind).transpose()?;
    // First of all, as the time in which requests come again begins with it.
    let mut reached = match &plan.front {
        Front::Device(options) => device::reach(options, &plan.session.export_name)?,
        _ => None,
    };
    let patience = plan.takeover_patience();
    let Prepared { fronts, uri, saved } = prepare(plan)?;
    let config = SessionConfig {
        open_patience: patience,
        identity: pinned(plan, saved.as_ref())?,
        inherited_epoch: saved.as_ref().filter(|_| plan.takes_over()).and_then(Saved::epoch),
        resent_for: plan.resent_for(),
        slow_io: plan.slow_io(),
        ..session_config(&plan.session)?
    };
    let identity = Identity {
        name: plan.session.export_name.clone(),
        session: config.name.clone(),
        session_id: config.id.to_string(),
        access: plan.session.access,
        no_path: plan.session.settings.no_path,
        failover: plan.session.settings.failover,
        slow_io: plan.slow_io(),
        uri,
        device: Arc::new(OnceLock::new()),
        pid: std::process::id(),
        shards: config.shards,
        ending: Arc::default(),
        started: SystemTime::now(),
    };
    for warning in plan.session.warnings() {
        tracing::warn!("{warning}");
    }
    let registry = Arc::new(FabricRegistry::new(&plan.session)?);
    let running = launch::start(&plan.session.settings, config, fronts, &registry)?;
    let (wakes, inbox) = mpsc::channel();
    let shards = running.shards();
    let _forwarding = serve_signals(wakes.clone(), shards.clone(), identity.clone())?;
    let running = forward_events(running, wakes.clone(), saved.clone());
    let session = control_socket::Session {
        identity: identity.clone(),
        shards: shards.clone(),
        registry,
        plan: Mutex::new(plan.clone()),
        detaches: forward_detaches(wakes.clone()),
    };
    // From here on `list` shows the session and `detach` ends it, also while it opens.
    serve(&control, session).map_err(system("cannot serve the control socket"))?;
    let _metrics = scraped.map(|scraped| scraped.serve(&identity, &shards)).transpose()?;
    let what = format!("attach {}", plan.session.export_name);
    let mut detach = None;
    let attached = wait_ready(&inbox, &shards, &what, patience, &mut detach).and_then(|geometry| {
        let Front::Device(options) = &plan.front else { return Ok(None) };
        let (reached, name) = (reached.take(), &plan.session.export_name);
        let connected = device::connect(reached, options, name, &geometry, &shards);
        connected.inspect_err(|_| shards.shut_down(Duration::ZERO)).map(Some)
    });
    let device = match attached {
        Ok(device) => device,
        Err(error) => {
            let detached = Detached { detached: true, abandoned: 0, warning: None };
            end(running, control, detach.into_iter().collect(), &inbox, &detached);
            return Err(error);
        }
    };
    let device = device.inspect(|device| {
        identity.device.get_or_init(|| device.path().display().to_string());
    });
    // Not earlier: until now Ctrl-C in the terminal of the attach means this process too.
    let background = std::env::var_os(DAEMON_LOG).is_some();
    if background {
        become_daemon().map_err(system("cannot leave the terminal"))?;
    }
    let status = report::status(&identity, &shards.reports());
    let served_at = status.served_at().to_owned();
    let attached = serde_json::to_value(report::attached(status));
    let attached = attached.map_err(|error| system("cannot print")(error.into()))?;
    let written = write_text(&match (background, plan.output) {
        // For the command, which prints it.
        (true, _) => format!("{READY}{attached}\n"),
        (false, Output::Json) => format!("{attached:#}\n"),
        (false, Output::Text) => format!("{READY}{served_at}\n"),
    });
    let ending = identity.ending;
    let mut session = AttachedSession { shards, ending, device, saved, over: None, warning: None };
    if let Err(error) = written
        && background
    {
        tracing::warn!("the attach command is gone: {error}");
        session.stop(Duration::ZERO);
    }
    session.wait_end(&inbox, running, control)
}

/// The identity that the session must find, if it is known before it begins.
fn pinned(plan: &AttachPlan, saved: Option<&Saved>) -> Result<Option<Pinned>, Error> {
    let said = plan.session.settings.identity;
    let Some(saved) = saved.filter(|_| plan.takes_over()) else {
        return Ok(said.filter(|_| !plan.accept_new_identity));
    };
    let left = match saved.identity() {
        _ if plan.accept_new_identity => return Ok(None),
        Ok(left) => left,
        Err(error) => {
            let text = "cannot read which export the dead process used; set --identity ID or \
                        --accept-new-identity";
            return match said {
                Some(said) => Ok(Some(said)),
                None => Err(Error::with_source(ErrorKind::System, text, error)),
            };
        }
    };
    joined(left, said)
}

/// What a process left and what the settings say, if they do not contradict each other: an export
/// with an ID for one boot has another one after the next boot, and either may say less.
fn joined(left: Option<Pinned>, said: Option<Pinned>) -> Result<Option<Pinned>, Error> {
    match (left, said) {
        (Some(left), Some(said)) if left.contradicts(&said) => {
            let text = format!(
                "cannot take over: the dead process used {left}, and identity says {said}; correct \
                 it, or set --accept-new-identity if the volume was moved"
            );
            Err(Error::new(ErrorKind::Usage, text))
        }
        (Some(left), Some(said)) => Ok(Some(left.or(said))),
        (left, said) => Ok(left.or(said)),
    }
}

/// A front end before the session starts.
struct Prepared {
    fronts: MakeFrontEnds,
    /// Where NBD clients connect.
    uri: Option<String>,
    /// What is saved for a takeover, should the process die.
    saved: Option<Saved>,
}

/// Prepares the front end of the plan.
///
/// # Errors
/// A socket or address that is in use.
fn prepare(plan: &AttachPlan) -> Result<Prepared, Error> {
    let export = &plan.session.export_name;
    let buffer_bytes = usize::try_from(plan.settings.buffer_size.bytes()).unwrap_or(usize::MAX);
    let fails = plan.slow_io() == SlowIo::Fail;
    let deferred_max = fails.then(|| plan.session.settings.io_timeout.get());
    let bridge = BridgeConfig { buffer_bytes, deferred_max, ..BridgeConfig::default() };
    let listen = |endpoint: Endpoint| {
        let bound = Bound::new(&endpoint).map_err(|e| {
            let what = format!("cannot serve NBD on {endpoint}");
            Error::with_source(ErrorKind::InUse, what, e)
        })?;
        if let Endpoint::Unix(path) = &endpoint {
            let set = &plan.settings;
            give_socket(path, set.socket_owner.as_ref(), set.socket_mode).map_err(|e| {
                let what = format!("cannot set owner and mode of the socket {}", path.display());
                Error::with_source(ErrorKind::System, what, e)
            })?;
        }
        let clients = bridge.connections_max * usize::from(plan.session.shards());
        let bound = match plan.nbd_tls(clients)? {
            Some(relays) => bound.offering(relays),
            None => bound,
        };
        let uri = Some(bound.uri(export));
        Ok(Prepared { fronts: nbd::at(bound, bridge), uri, saved: None })
    };
    match &plan.front {
        Front::Socket(path) => listen(Endpoint::Unix(path.clone())),
        Front::Tcp(address) => listen(Endpoint::Tcp(*address)),
        Front::Device(_) => {
            device::become_dependable();
            let fronts = kernel_nbd::device(BridgeConfig {
                // The kernel has one connection on each shard, and later perhaps a second in its
                // place.
                connections_max: 2,
                touched_bytes: BUSY_BYTES,
                ..bridge
            });
            let saved = Some(Saved::new(&plan.run_dir, export)?);
            Ok(Prepared { fronts, uri: None, saved })
        }
    }
}

/// A session that is attached.
struct AttachedSession {
    shards: launch::ShardHandle,
    /// Set when the session is to end, for `status`.
    ending: Arc<AtomicBool>,
    /// The kernel's device, until the session is to end.
    device: Option<KernelDevice>,
    /// What is saved for a takeover, should the process die.
    saved: Option<Saved>,
    /// When the session must have ended, once it is to end.
    over: Option<Instant>,
    /// A warning about the end of the device.
    warning: Option<String>,
}

impl AttachedSession {
    /// Ends the session, or ends it sooner than before. The device goes first,
    /// as long as its IO can be served.
    fn stop(&mut self, within: Duration) {
        self.ending.store(true, Ordering::Relaxed);
        let begin = Instant::now();
        self.warning =
            device::disconnect(self.device.take(), within).or_else(|| self.warning.take());
        let left = within.saturating_sub(begin.elapsed());
        self.shards.shut_down(left);
        let over = Instant::now() + left + Duration::from_secs(15);
        self.over = Some(self.over.map_or(over, |before| before.min(over)));
    }

    /// Waits for a signal or a detach, then for the session's end.
    fn wait_end(
        mut self,
        inbox: &mpsc::Receiver<Wake>,
        running: Running,
        control: ControlSocket,
    ) -> Result<(), Error> {
        let mut waiting = Vec::new();
        let (mut failed, mut abandoned) = (None, 0);
        let mut kernel_gone = 0;
        // The latest of several sizes is enough, and nothing waits for it.
        let mut resized = None;
        loop {
            let left = self.over.map_or(Duration::from_secs(3600), |at| {
                at.saturating_duration_since(Instant::now())
            });
            let left = if resized.is_some() { Duration::ZERO } else { left };
            match inbox.recv_timeout(left) {
                Ok(Wake::Signal) => {
                    tracing::info!("signal: finishing requests in flight");
                    self.stop(SIGNAL_GRACE);
                }
                Ok(Wake::Detach(detach)) => {
                    self.stop(detach.within);
                    waiting.push(detach);
                }
                Ok(Wake::Session(Event::ShardFailed(shard, error))) => {
                    failed = Some(format!("shard {shard} ended: {error}"));
                    break;
                }
                Ok(Wake::Session(Event::KernelGone(shard))) if self.over.is_none() => {
                    kernel_gone += 1;
                    tracing::warn!("shard {shard}: the kernel has closed its connection");
                    if kernel_gone == self.shards.count() {
                        failed = Some(device::KERNEL_GONE.to_owned());
                        self.stop(Duration::ZERO);
                    }
                }
                Ok(Wake::Session(Event::Resized(size))) if self.over.is_none() => {
                    resized = Some(size);
                }
                Ok(Wake::Session(Event::Done { abandoned: count })) => {
                    abandoned = count;
                    break;
                }
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Timeout) if resized.is_some() => {
                    if let Some(size) = resized.take() {
                        device::resize(self.device.as_ref(), size, &self.shards);
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) if self.over.is_none() => {}
                Err(_) => break,
            }
        }
        if self.device.is_some() {
            self.stop(Duration::ZERO);
        }
        // A device that could not be taken from its users may still be taken over.
        if let Some(saved) = self.saved.filter(|_| self.warning.is_none()) {
            saved.forget();
        }
        if abandoned > 0 {
            tracing::warn!(abandoned, "IO requests did not end in time");
        }
        let detached = Detached { detached: true, abandoned, warning: self.warning };
        end(running, control, waiting, inbox, &detached);
        match failed {
            Some(text) => Err(Error::new(ErrorKind::System, text)),
            None => Ok(()),
        }
    }
}

/// Waits for the threads, frees the name, and only then replies to the detaches.
fn end(
    running: Running,
    control: ControlSocket,
    detaches: Vec<Detach>,
    inbox: &mpsc::Receiver<Wake>,
    detached: &Detached,
) {
    running.join();
    drop(control);
    let late = inbox.try_iter().filter_map(|wake| match wake {
        Wake::Detach(detach) => Some(detach),
        _ => None,
    });
    for detach in detaches.into_iter().chain(late) {
        detach.reply(detached);
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::identity::{ExportId, ServerId};
    use rtrs_core::local::RunDir;

    use super::*;
    use crate::settings::Settings;

    const LEFT: &str = "00112233445566778899aabbccddeeff/00000000000000000000000000000001";
    const SAID: &str = "00112233445566778899aabbccddeeff/00000000000000000000000000000002";

    fn plan(front: &str, identity: Option<&str>, accept_new_identity: bool) -> AttachPlan {
        let identity = identity.map(|id| format!("\nidentity: {id}")).unwrap_or_default();
        let settings = Settings::from_yaml(&format!("{front}{identity}"), "s.yaml").unwrap();
        let plan = AttachPlan::new("v", settings, Output::Text).unwrap();
        AttachPlan { accept_new_identity, ..plan }
    }

    #[test]
    fn what_a_process_left_and_what_is_said_have_to_agree() {
        let server = Some(ServerId::of_name("s"));
        let weak = |boot| Some(ExportId::weak(boot, "file", &[]));
        let of = |server, export| Some(Pinned { server, export });
        let stable = Some(ExportId::of_name("e"));
        for (left, said, both) in [
            (None, None, None),
            (None, of(server, stable), of(server, stable)),
            (of(server, stable), of(server, None), of(server, stable)),
            (of(server, None), of(None, stable), of(server, stable)),
            (of(server, weak(2)), of(server, weak(1)), of(server, weak(2))),
        ] {
            assert_eq!(joined(left, said).ok(), Some(both), "{left:?} {said:?}");
        }
        let other = Some(ServerId::of_name("t"));
        assert!(joined(of(server, stable), of(other, stable)).is_err());
        assert!(joined(of(server, stable), of(server, weak(1))).is_err());
    }

    #[test]
    fn what_a_session_is_pinned_to_before_it_begins() {
        let name = format!("rtrs-pinned-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let saved = Saved::new(&dir, "v").unwrap();
        let (left, said): (Pinned, Pinned) = (LEFT.parse().unwrap(), SAID.parse().unwrap());
        let device = |identity, accept| plan("device: auto\ntakeover: true", identity, accept);
        let pin = |plan: &AttachPlan| pinned(plan, Some(&saved)).map_err(|e| e.to_string());

        // The process that died had pinned nothing.
        assert_eq!(pin(&device(None, false)), Ok(None));
        assert_eq!(pin(&device(Some(SAID), false)), Ok(Some(said)));
        saved.save_identity(left);
        assert_eq!(pin(&device(None, false)), Ok(Some(left)));
        assert_eq!(pin(&device(Some(LEFT), false)), Ok(Some(left)));
        let error = pin(&device(Some(SAID), false)).unwrap_err();
        assert!(error.contains(LEFT) && error.contains(SAID), "{error}");
        assert!(error.contains("set --accept-new-identity if the volume was moved"), "{error}");
        for identity in [None, Some(LEFT), Some(SAID)] {
            assert_eq!(pin(&device(identity, true)), Ok(None), "a deliberate move");
        }

        // Nobody takes over: what was left is another session's.
        for front in ["device: auto", "socket: /s"] {
            assert_eq!(pin(&plan(front, None, false)), Ok(None), "{front}");
            assert_eq!(pin(&plan(front, Some(SAID), false)), Ok(Some(said)), "{front}");
            assert_eq!(pin(&plan(front, Some(SAID), true)), Ok(None), "{front}");
        }

        // What is left and cannot be read is not taken for nothing.
        std::fs::write(dir.control_socket("v").with_extension("identity"), "x").unwrap();
        let error = pin(&device(None, false)).unwrap_err();
        assert!(error.contains("cannot read which export the dead process used"), "{error}");
        assert_eq!(pin(&device(Some(SAID), false)), Ok(Some(said)));
        assert_eq!(pin(&device(None, true)), Ok(None));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }
}
