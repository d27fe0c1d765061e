//! The control socket of a running server.
//!
//! Owns [`ServerControl`]. A thread serves the requests one at a time and sends messages to the
//! control shard, which no backend can delay. A drain has its own thread, because it flushes the
//! exports first; the server's main thread sends the drain's reply after all other threads have
//! ended. If neither `--name` nor `--run-dir` is set, a server that cannot create its control
//! socket runs without one.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use parking_lot::Mutex;
use rtrs_core::local::{ControlSocket, SocketRenewal, check_socket_path, reply};
use rtrs_core::settings::Auto;
use rtrs_core::time::Duration;
use serde::Serialize;

use crate::control_protocol::{Drained, Ended, Request, Status, WITHIN_MS_MAX};
use crate::daemon::control_shard::ControlShard;
use crate::daemon::exports::{LAST_COPY_HINT, wait_saved};
use crate::daemon::metrics::ServerMetrics;
use crate::daemon::privileges;
use crate::daemon::reload::{Accepts, Changes};
use crate::daemon::status;
use crate::daemon::tunables::Tunables;
use crate::engine::message::{AdminReply, AdminRequest};
use crate::error::{Error, ErrorKind};
use crate::export::ExportTable;
use crate::save_lock::{LockFile, SaveLock};
use crate::settings::Settings;
use crate::stats::millis;

/// Minimum time for a flush at the end of a drain, even if the drain's time has expired.
const FLUSH_MIN: Duration = Duration::from_secs(1);

/// Hint for a refused drain.
const FORCE_HINT: &str = "; if data is already lost, flush at a client (sync), which reports the \
                          loss, and drain again; or use --force: the next server reports the loss \
                          to clients";

/// A drain in progress, and the connection of its requester.
struct Draining {
    stream: UnixStream,
    until: Instant,
    answer: mpsc::Receiver<AdminReply>,
    /// First flush, if it failed or was late. It may be the one that reports a loss.
    first_flush: Option<FirstFlush>,
}

/// Parts of a server that its control socket reports on and changes.
pub(crate) struct Served {
    pub(crate) exports: Arc<ExportTable>,
    pub(crate) changes: Arc<Changes>,
    pub(crate) control: ControlShard,
    pub(crate) metrics: Arc<ServerMetrics>,
    /// Address at which the metrics are served.
    pub(crate) metrics_at: Option<String>,
    /// Portals that use a socket passed by the service manager.
    pub(crate) activated: Vec<String>,
}

/// State shared by the threads of the control socket.
struct Shared {
    name: String,
    portals: Vec<String>,
    activated: Vec<String>,
    exports: Arc<ExportTable>,
    changes: Arc<Changes>,
    control: ControlShard,
    metrics: Arc<ServerMetrics>,
    metrics_at: Option<String>,
    tunables: Tunables,
    started: Instant,
    /// Whether a drain is in progress.
    busy: AtomicBool,
    draining: Mutex<Option<Draining>>,
}

/// A running server's control socket.
pub(crate) struct ServerControl {
    shared: Arc<Shared>,
    socket: ControlSocket,
    lock_file: LockFile,
}

/// Default name of a server: the address of its first portal.
fn name_of(portals: &[String]) -> Option<String> {
    let (_, address) = portals.first()?.split_once("://")?;
    let everywhere = ["[::]:", "0.0.0.0:"].iter().find_map(|any| address.strip_prefix(any));
    Some(everywhere.unwrap_or(address).to_owned())
}

impl ServerControl {
    /// Opens the control socket of a server that listens on these portals. Returns None if it
    /// cannot be created and no setting requires it.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`] or another kind, if a setting requires the socket.
    pub(crate) fn open(
        set: &Settings,
        portals: &[String],
        served: Served,
    ) -> Result<Option<Self>, Error> {
        let is_set = set.name != Auto::Auto || set.run_dir.is_some();
        match Self::bind(set, portals, served) {
            Ok(control) => Ok(Some(control)),
            Err(error) if is_set => Err(error),
            Err(error) => {
                let error = error.chain();
                tracing::warn!("no control socket, so no `session list` and no `drain`: {error}");
                Ok(None)
            }
        }
    }

    fn bind(set: &Settings, portals: &[String], served: Served) -> Result<Self, Error> {
        let run_dir = privileges::run_dir(set)?;
        run_dir.make()?;
        let name =
            set.name.as_ref().get().map(|name| name.get().to_owned()).or_else(|| name_of(portals));
        let name = name.unwrap_or_else(|| std::process::id().to_string());
        let path = run_dir.server_socket(&name);
        check_socket_path("control socket", &path)?;
        let failed = |error| {
            let what = format!("cannot listen on the control socket {}", path.display());
            not_created(ErrorKind::InUse, what, error)
        };
        let socket = ControlSocket::bind(&path).map_err(failed)?;
        let Served { exports, changes, control, metrics, metrics_at, activated } = served;
        let (lock, lock_file) = SaveLock::create(&path).map_err(|error| {
            let what = format!("cannot create the lock next to {}", path.display());
            not_created(ErrorKind::System, what, error)
        })?;
        changes.reload.set_save_lock(lock);
        let shared = Arc::new(Shared {
            name,
            portals: portals.to_vec(),
            activated,
            exports,
            changes,
            control,
            metrics,
            metrics_at,
            tunables: Tunables::new(set),
            started: Instant::now(),
            busy: AtomicBool::new(false),
            draining: Mutex::new(None),
        });
        let serving = Arc::clone(&shared);
        socket.serve(move |request, stream| serving.handle(request, stream)).map_err(failed)?;
        tracing::info!(name = %shared.name, "control socket at {}", path.display());
        Ok(Self { shared, socket, lock_file })
    }

    /// Handle that recreates the socket's path.
    pub(crate) fn renewal(&self) -> SocketRenewal {
        self.socket.renewal()
    }

    /// Finishes a drain after the server's threads have ended: flushes written data, removes the
    /// control socket, and replies.
    ///
    /// # Errors
    /// [`ErrorKind::System`] for a drain that could not answer or flush everything.
    pub(crate) fn close(self) -> Result<(), Error> {
        let Self { shared, socket, lock_file } = self;
        drop(lock_file);
        let drain = shared.draining.lock().take();
        let Some(Draining { stream, until, answer, first_flush }) = drain else { return Ok(()) };
        let left = until.saturating_duration_since(Instant::now()).max(FLUSH_MIN);
        let mut wrong = Vec::new();
        // No answer means that a signal ended the server first.
        let begun = match answer.try_recv() {
            Ok(AdminReply::Drained { unfinished }) => {
                if unfinished > 0 {
                    wrong.push(format!("{unfinished} requests did not finish in time"));
                }
                true
            }
            _ => false,
        };
        if begun && let Err(error) = last_flush(first_flush, &shared.exports, left) {
            wrong.push(error.to_string());
        }
        drop((socket, shared));
        let wrong = wrong.join("; ");
        reply(
            &stream,
            match (begun, &*wrong) {
                (true, "") => Ok(Drained { drained: true }),
                (true, wrong) => Err(format!("the server has ended, but {wrong}")),
                (false, _) => Err("not drained: the server ended first, for another reason".into()),
            },
        );
        // Closed by the exit of the process, which the command waits for.
        std::mem::forget(stream);
        if wrong.is_empty() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::System, format!("drained, but {wrong}")))
    }
}

/// Error for a file that could not be created in the run directory.
fn not_created(kind: ErrorKind, what: String, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            let hint = "free space and inodes in its file system, or use another --run-dir";
            Error::new(ErrorKind::System, format!("{what}: {error}; {hint}"))
        }
        _ => Error::with_source(kind, what, error),
    }
}

impl Shared {
    fn handle(self: &Arc<Self>, request: Request, stream: UnixStream) {
        match request {
            Request::Status { load } => reply(&stream, self.status(load)),
            Request::Get => reply(&stream, Ok(self.tunables.values())),
            Request::Set { settings } => reply(&stream, self.tunables.change(&settings)),
            Request::Metrics => reply(&stream, self.metrics.samples()),
            Request::SessionList => reply(&stream, self.control.sessions()),

            Request::SessionDisconnect { session, path } => {
                reply(&stream, self.end_paths(AdminRequest::Disconnect { session, path }));
            }
            Request::SessionEvict { session } => {
                reply(&stream, self.end_paths(AdminRequest::Evict { session }));
            }
            Request::Drain { within_ms, .. }
            | Request::ExportRemove { within_ms, .. }
            | Request::ExportDrain { within_ms, .. }
                if within_ms > WITHIN_MS_MAX =>
            {
                refuse(
                    &stream,
                    format!("within_ms {within_ms} is out of range; use 0 to {WITHIN_MS_MAX}"),
                );
            }
            Request::ExportList => reply(&stream, self.changes.exports.list()),
            Request::ExportAdd { export, force } => {
                self.change(stream, move |changes| changes.commands.add(*export, force));
            }
            Request::ExportRemove { name, dry_run: true, .. } => {
                self.change(stream, move |changes| changes.commands.preview_remove(&name));
            }
            Request::ExportRemove { name, force, within_ms, .. } => {
                let within = Duration::from_millis(within_ms);
                self.change(stream, move |changes| changes.commands.remove(&name, force, within));
            }
            Request::ExportDrain { name, within_ms } => {
                let within = Duration::from_millis(within_ms);
                self.change(stream, move |changes| changes.commands.drain(&name, within));
            }
            Request::ExportResize { name, size, force } => {
                self.change(stream, move |changes| changes.commands.resize(&name, size, force));
            }
            Request::ExportSet { name, options, dry_run: true, .. } => {
                self.change(stream, move |changes| changes.commands.preview_set(&name, &options));
            }
            Request::ExportSet { name, options, force, .. } => {
                self.change(stream, move |changes| changes.commands.set(&name, &options, force));
            }
            Request::Reload { force } => {
                let accepts = if force { Accepts::AllLosses } else { Accepts::NoLoss };
                self.change(stream, move |changes| changes.reload(accepts));
            }
            Request::ReloadPreview => self.change(stream, |changes| changes.preview()),
            Request::ExportOrigin { name } => {
                self.change(stream, move |changes| changes.origin(&name));
            }
            Request::ExportSave => reply(&stream, Ok(self.changes.exports.save())),
            Request::Drain { within_ms, force } => {
                self.begin_drain(stream, Duration::from_millis(within_ms), force);
            }
        }
    }

    fn status(&self, with_load: bool) -> Result<Status, String> {
        let load = with_load.then(|| {
            let exports = self.changes.exports.list()?;
            let Self { portals, activated, .. } = self;
            let addresses = status::Addresses { portals, activated };
            Ok::<_, String>(status::load(&addresses, &exports, &self.control.sessions()?))
        });
        Ok(Status {
            name: self.name.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            build: env!("RTRS_VERSION").to_owned(),
            uptime_ms: millis(self.started.elapsed()),
            portals: self.portals.clone(),
            draining: self.busy.load(Ordering::SeqCst),
            metrics: self.metrics_at.clone(),
            load: load.transpose()?,
        })
    }

    fn end_paths(&self, request: AdminRequest) -> Result<Ended, String> {
        self.control.ask(request, |answer| match answer {
            AdminReply::Ended { session, paths } => Some(Ended { session, paths }),
            _ => None,
        })
    }

    /// Makes a change on its own thread, because a file may be slow, and replies.
    fn change<T: Serialize>(
        &self,
        stream: UnixStream,
        make: impl FnOnce(&Changes) -> Result<T, String> + Send + 'static,
    ) {
        if self.busy.load(Ordering::SeqCst) {
            return refuse(&stream, "the server is draining");
        }
        let Ok(other) = stream.try_clone() else { return };
        let changes = Arc::clone(&self.changes);
        let thread = std::thread::Builder::new().name("rtrs-change".into());
        if let Err(error) = thread.spawn(move || reply(&stream, make(&changes))) {
            refuse(&other, format!("cannot start a thread: {error}"));
        }
    }

    fn begin_drain(self: &Arc<Self>, stream: UnixStream, within: Duration, force: bool) {
        let Ok(other) = stream.try_clone() else { return };
        if self.busy.swap(true, Ordering::SeqCst) {
            return refuse(&other, "a drain is already running");
        }
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("rtrs-drain".into());
        if let Err(error) = thread.spawn(move || shared.drain(stream, within, force)) {
            self.busy.store(false, Ordering::SeqCst);
            refuse(&other, format!("cannot start a thread: {error}"));
        }
    }

    /// Flushes while all sessions are still served, so that little remains to be flushed while
    /// clients wait; then asks the control shard. [`ServerControl::close`] replies.
    fn drain(&self, stream: UnixStream, within: Duration, force: bool) {
        let until = Instant::now() + within;
        if let Some(why) = self.changes.exports.targets.last_copies().filter(|_| !force) {
            return self.refuse_drain(&stream, &why, LAST_COPY_HINT);
        }
        let first_flush = match self.first_flush(within / 2) {
            Ok(running) => running,
            Err(error) if force => {
                tracing::warn!("draining by force: {error}");
                Some(FirstFlush::Failed(error))
            }
            Err(error) => return self.refuse_drain(&stream, &error.to_string(), FORCE_HINT),
        };
        self.changes.commands.record_drain(None);
        give_up(&self.exports, until.saturating_duration_since(Instant::now()) / 2);
        let mut draining = self.draining.lock();
        let within = until.saturating_duration_since(Instant::now());
        // Locked until the drain is stored, because `close` reads it after the server has ended.
        let answer = self.control.send(AdminRequest::Drain { within });
        *draining = Some(Draining { stream, until, answer, first_flush });
    }

    /// Refuses a drain that has not begun.
    fn refuse_drain(&self, stream: &UnixStream, why: &str, hint: &str) {
        tracing::error!("not draining, still serving: {why}");
        self.changes.commands.record_drain(Some(why));
        self.busy.store(false, Ordering::SeqCst);
        refuse(stream, format!("not draining, still serving: {why}{hint}"));
    }

    /// Flushes all exports. Returns the flush if it takes longer than `limit`, or if a backend did
    /// not answer, which must not keep a server from being drained.
    fn first_flush(&self, limit: Duration) -> io::Result<Option<FirstFlush>> {
        let flush = Flush::begin(&self.exports)?;
        let first = match flush.wait(limit) {
            Some(Ok(())) => return Ok(None),
            Some(Err(error)) if error.kind() == io::ErrorKind::TimedOut => {
                tracing::warn!("draining anyway: {error}");
                FirstFlush::Failed(error)
            }
            Some(Err(error)) => return Err(error),
            None => {
                tracing::warn!("draining anyway: {}", flush.late(limit));
                FirstFlush::Running(flush)
            }
        };
        Ok(Some(first))
    }
}

fn refuse(stream: &UnixStream, why: impl Into<String>) {
    reply::<()>(stream, Err(why.into()));
}

/// Releases exports to other gateways if possible, so that they need not take the exports by force.
fn give_up(exports: &ExportTable, limit: Duration) {
    let until = Instant::now() + limit;
    for (_, export) in exports.all() {
        let Some(gateway) = export.source.gateway() else { continue };
        let left = until.saturating_duration_since(Instant::now());
        if let Err(error) = gateway.release(left) {
            tracing::warn!(export = &*export.name, "draining anyway: {error}");
        }
    }
}

/// Flush of all exports on its own thread, which continues when its caller stops waiting.
struct Flush {
    result: mpsc::Receiver<io::Result<()>>,
    /// Name of the export that is being flushed.
    at: Arc<Mutex<String>>,
}

impl Flush {
    /// Begins the flush. A failure on one export does not prevent the others from being flushed.
    fn begin(exports: &Arc<ExportTable>) -> io::Result<Self> {
        let (done, result) = mpsc::channel();
        let at = Arc::new(Mutex::new(String::new()));
        let (exports, now_at) = (Arc::clone(exports), Arc::clone(&at));
        std::thread::Builder::new().name("rtrs-flush".into()).spawn(move || {
            let mut flushed = Ok(());
            for (_, export) in exports.all() {
                now_at.lock().clone_from(&export.name);
                let _running = export.epoch.begin_flush();
                if let Err(error) = export.source.settle() {
                    // The error is returned; the log reports an epoch that was not saved.
                    let _ = wait_saved(&export.epoch, export.epoch.raise());
                    let text = format!("export {:?} cannot be flushed: {error}", export.name);
                    flushed = flushed.and_then(|()| Err(io::Error::new(error.kind(), text)));
                }
            }
            // The server may have ended.
            let _ = done.send(flushed);
        })?;
        Ok(Self { result, at })
    }

    /// Waits for the result. Returns None if the flush takes longer.
    fn wait(&self, limit: Duration) -> Option<io::Result<()>> {
        self.result.recv_timeout(limit).ok()
    }

    /// Error for a flush that takes longer than `limit`.
    fn late(&self, limit: Duration) -> io::Error {
        let (at, ms) = (self.at.lock(), limit.as_millis());
        let text = format!("the flush of export {:?} takes longer than {ms} ms", at.as_str());
        io::Error::new(io::ErrorKind::TimedOut, text)
    }
}

/// First flush of a drain that proceeded although the flush was late or failed.
enum FirstFlush {
    Running(Flush),
    Failed(io::Error),
}

/// Flushes all exports after their last request. If an earlier flush is still running, waits for it
/// too: a loss is reported to only one flush.
fn last_flush(
    earlier: Option<FirstFlush>,
    exports: &Arc<ExportTable>,
    limit: Duration,
) -> io::Result<()> {
    let until = Instant::now() + limit;
    let ended = |flush: Flush, limit| flush.wait(limit).unwrap_or_else(|| Err(flush.late(limit)));
    let earlier = match earlier {
        None => Ok(()),
        Some(FirstFlush::Running(flush)) => ended(flush, limit),
        Some(FirstFlush::Failed(error)) => Err(error),
    };
    let left = until.saturating_duration_since(Instant::now()).max(FLUSH_MIN.min(limit));
    let last = Flush::begin(exports).and_then(|flush| ended(flush, left));
    earlier.and(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Condvar;

    use rtrs_core::block::{BlockDevice, BlockSource, Core, Geometry};

    use crate::export::Export;

    #[test]
    fn a_server_is_named_after_its_first_portal() {
        for (portals, name) in [
            (&["tcp://127.0.0.1:1234", "rdma://10.0.0.1:1"][..], Some("127.0.0.1:1234")),
            (&["tcp://[::]:1234"], Some("1234")),
            (&["rdma://0.0.0.0:7"], Some("7")),
            (&["tcp://[::1]:9"], Some("[::1]:9")),
            (&[], None),
        ] {
            let portals: Vec<String> = portals.iter().map(|&portal| portal.to_owned()).collect();
            assert_eq!(name_of(&portals).as_deref(), name);
        }
    }

    #[test]
    fn a_full_run_directory_is_reported_with_a_remedy() {
        let refused = |error: io::ErrorKind| {
            let what = "cannot listen on the control socket /run/rtrs/a.srv".to_owned();
            not_created(ErrorKind::InUse, what, error.into())
        };
        let full = refused(io::ErrorKind::StorageFull);
        assert_eq!(full.kind(), ErrorKind::System);
        let text = full.chain().to_string();
        assert!(text.contains("a.srv: ") && text.contains("; free space and inodes"), "{text}");
        assert_eq!(refused(io::ErrorKind::AddrInUse).kind(), ErrorKind::InUse);
    }

    /// A source whose flush waits for a gate and then returns this result.
    #[derive(Debug)]
    struct Slow {
        gate: Arc<(std::sync::Mutex<bool>, Condvar)>,
        error: Option<i32>,
    }

    impl BlockSource for Slow {
        fn geometry(&self) -> Geometry {
            Geometry::plain(4096)
        }
        fn open(&self, _core: &Core) -> io::Result<Box<dyn BlockDevice>> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn settle(&self) -> io::Result<()> {
            let (open, wake) = &*self.gate;
            let mut open = open.lock().unwrap();
            while !*open {
                open = wake.wait(open).unwrap();
            }
            self.error.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
        }
    }

    #[test]
    fn a_flush_is_bounded_and_its_error_names_the_export() {
        let gate = Arc::new((std::sync::Mutex::new(false), Condvar::new()));
        let export = |name: &str, error| {
            Export::new(name, Arc::new(Slow { gate: Arc::clone(&gate), error }))
        };
        let minute = Duration::from_secs(60);
        let flush = |table: &Arc<ExportTable>, limit| last_flush(None, table, limit);
        let table = ExportTable::new(vec![export("good", None), export("bad", Some(5))]);
        let error = flush(&table, Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("the flush of export \"good\""), "{error}");
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        let error = flush(&table, minute).unwrap_err();
        assert!(error.to_string().starts_with("export \"bad\" cannot be flushed: "), "{error}");
        flush(&ExportTable::new(vec![export("good", None)]), minute).unwrap();
    }

    #[test]
    fn a_loss_found_by_a_late_flush_is_reported() {
        let gate = Arc::new((std::sync::Mutex::new(false), Condvar::new()));
        let source = Arc::new(Slow { gate: Arc::clone(&gate), error: Some(5) });
        let failing = ExportTable::new(vec![Export::new("lossy", source)]);
        let late = Flush::begin(&failing).unwrap();
        assert!(late.wait(Duration::from_millis(20)).is_none(), "it is held");
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        // The last flush of the exports no longer finds anything wrong.
        let late = Some(FirstFlush::Running(late));
        let error = last_flush(late, &ExportTable::new(vec![]), Duration::from_secs(60));
        assert!(error.unwrap_err().to_string().starts_with("export \"lossy\""));
    }
}
