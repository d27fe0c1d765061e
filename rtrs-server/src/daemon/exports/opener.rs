//! Opens targets for exports, and closes them.

use std::collections::BTreeMap;
use std::path::{self, Path};
use std::sync::{Arc, Weak, mpsc};
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;
use rtrs_core::identity::ExportId;
use rtrs_core::time::Duration;

use super::attempts::{Attempts, Opened};
use super::in_time::all_in_time;
use super::open_error::OpenError;
use crate::backend::{BackendError, OpenedTarget, open_target_at};
use crate::daemon::identity::Sources;
use crate::engine::epoch::SyncEpoch;
use crate::engine::io::throttle::Throttle;
use crate::engine::saved_writers::SavedWriters;
use crate::error::{Error, ErrorKind, failed};
use crate::export::Export;
use crate::settings::{ExportSpec, Id, Migration, Target};
use crate::state::StateDir;

/// Maximum time to close an unused export.
pub(in crate::daemon) const RELEASE_MAX: Duration = Duration::from_secs(30);
/// Maximum time to save an epoch when an export is flushed for the last time.
const SAVE_MAX: Duration = Duration::from_secs(2);
/// Interval between checks of whether the last request of a removed export has ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// Maximum number of exports that are flushed and closed at the same time for one request.
const CLOSED_AT_ONCE: usize = 64;

/// Number of a closed export, and the result of its last flush.
type Released = (usize, Result<(), String>);

/// A closed export whose requests are still running in the backend.
struct Closing {
    backing: String,
    export: Weak<Export>,
}

/// Opens and closes the targets of exports.
pub(in crate::daemon) struct Opener {
    pub(super) sources: Sources,
    state: Arc<StateDir>,
    /// Last epochs of released exports, by their ID.
    past: Mutex<BTreeMap<ExportId, u64>>,
    /// Closed exports whose requests are still running.
    closing: Mutex<Vec<Closing>>,
    /// Attempts to open failed exports, and attempts that startup did not wait for.
    pub(super) attempts: Arc<Attempts>,
}

impl Opener {
    pub(in crate::daemon) fn new(sources: Sources, state: Arc<StateDir>) -> Self {
        let (past, closing, attempts) = (Mutex::default(), Mutex::default(), Arc::default());
        Self { sources, state, past, closing, attempts }
    }

    /// Warns if the state directory does not answer.
    pub(in crate::daemon) fn warn_of_slow_save(&self) {
        self.state.warn_of_slow_save();
    }

    /// Opens the target of an export.
    ///
    /// # Errors
    /// [`ErrorKind::Export`] for the target, [`ErrorKind::InUse`] for its epoch.
    pub(super) fn open(&self, spec: &ExportSpec) -> Result<Export, Error> {
        let name = spec.name();
        self.check_closed(spec)?;
        let opened = open_target_at(spec, None);
        let OpenedTarget { source, file } = opened.map_err(|error| refused(spec, error))?;
        let known = source.identity().filter(|_| spec.id.is_none());
        let set = spec.id.as_ref().map(Id::get);
        let id = known.or_else(|| self.sources.export(name, set, &spec.target));
        let geometry = source.geometry();
        tracing::info!(
            export = name,
            from = %spec.target,
            size = geometry.size,
            block_size = geometry.logical_block,
            read_only = geometry.read_only,
            export_id = id.map_or_else(|| "-".to_owned(), |id| id.to_string()),
            "exported"
        );
        let key = self.epoch_key(spec);
        let (mut epoch, writers) = match key {
            Some(key) => {
                let kept = self.state.epoch_and_writers(&key, spec.ro);
                let (epoch, writers) =
                    kept.map_err(failed(ErrorKind::InUse, cannot_export(spec)))?;
                let epoch = match spec.target {
                    Target::Nbd(_) if !spec.ro => self.state.tie_to_process(&key, epoch),
                    _ => epoch,
                };
                (epoch, writers)
            }
            None => (StateDir::unknown(), SavedWriters::default()),
        };
        // The same ID with another epoch number, which a client may know from before a failure.
        let past = id.and_then(|id| self.past.lock().get(&id).copied());
        if past.is_some_and(|past| past != epoch.number()) {
            epoch = StateDir::unknown();
        }
        Ok(Export {
            backing: spec.target.to_string(),
            file,
            read_only: spec.ro,
            deny_migration: spec.migration == Migration::Deny,
            throttle: Throttle::new(spec.rate_limits()),
            id,
            epoch,
            writers,
            ..Export::new(name, source)
        })
    }

    /// Refuses a target without a lock while requests of an earlier export of the target are still
    /// running: these must not take effect after later requests.
    fn check_closed(&self, spec: &ExportSpec) -> Result<(), Error> {
        if !matches!(spec.target, Target::Nbd(_) | Target::Rbd(_)) {
            return Ok(());
        }
        let (mut closing, target) = (self.closing.lock(), spec.target.to_string());
        closing.retain(|closing| closing.export.strong_count() > 0);
        if closing.iter().all(|closing| closing.backing != target) {
            return Ok(());
        }
        let why = "requests of an earlier export of the same target are still running at the \
                   backend";
        Err(Error::new(ErrorKind::Export, format!("{}: {why}", cannot_export(spec))))
    }

    /// Opens the target of an export that threads share.
    pub(super) fn open_shared(&self, spec: &ExportSpec) -> Opened {
        self.open(spec).map(Arc::new).map_err(|error| OpenError::new(&error))
    }

    /// Opens targets concurrently.
    pub(super) fn open_all(self: &Arc<Self>, specs: &[ExportSpec]) -> Vec<Opened> {
        let opener = Arc::clone(self);
        all_in_time(specs, move |spec: ExportSpec| opener.open_shared(&spec))
    }

    /// Key of an export's epoch in the state directory; `None` if the epoch is not saved. The same
    /// file or disk has the same key under every name and path.
    fn epoch_key(&self, spec: &ExportSpec) -> Option<String> {
        let by_name = |target: &Path| format!("{}={}", spec.name(), target.display());
        match &spec.target {
            Target::Path(path) => Some(match self.sources.target(path) {
                Some(id) => epoch_key(id),
                // Two servers may have been started in different directories.
                None => by_name(&path::absolute(path).unwrap_or_else(|_| path.clone())),
            }),
            // Gateways share no epoch, and have no cache that would need one.
            Target::Rbd(_) if spec.gateway => None,
            Target::Rbd(_) | Target::Nbd(_) => Some(by_name(Path::new(&spec.target.to_string()))),
            // Memory is freed with its export: the next export starts with another epoch.
            Target::Memory(_) | Target::Null(_) => None,
        }
    }

    /// Flushes and closes exports when the last of their requests has ended, and waits up to
    /// `within` for that. Work that takes longer continues in the background.
    pub(in crate::daemon) fn release(
        self: &Arc<Self>,
        exports: Vec<Arc<Export>>,
        within: Duration,
    ) -> Result<(), String> {
        let results = self.release_each(exports, within).into_iter();
        let wrong: Vec<_> = results.filter_map(Result::err).collect();
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
    }

    /// Releases exports like [`Self::release`]. Returns the results in the order of the exports.
    fn release_each(
        self: &Arc<Self>,
        exports: Vec<Arc<Export>>,
        within: Duration,
    ) -> Vec<Result<(), String>> {
        let until = Instant::now() + within;
        let late = |export: &Arc<Export>| Err(not_closed(export));
        let mut results: Vec<_> = exports.iter().map(late).collect();
        let released = match self.begin_release(exports) {
            Ok(released) => released,
            Err(why) => return vec![Err(why); results.len()],
        };
        // Ends with the last thread, which drops its sender.
        while let Ok((at, flushed)) =
            released.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            results[at] = flushed;
        }
        results
    }

    /// Begins to flush and close exports, each when the last of its requests has ended. Each result
    /// includes the number of its export.
    ///
    /// # Errors
    /// If no thread can be started; the exports are closed without a flush.
    pub(super) fn begin_release(
        self: &Arc<Self>,
        exports: Vec<Arc<Export>>,
    ) -> Result<mpsc::Receiver<Released>, String> {
        let closing = |export: &Arc<Export>| {
            let backing = export.backing.clone();
            Closing { backing, export: Arc::downgrade(export) }
        };
        let mut all = self.closing.lock();
        all.retain(|closing| closing.export.strong_count() > 0);
        all.extend(exports.iter().map(closing));
        drop(all);
        let (done, released) = mpsc::channel();
        let opener = Arc::clone(self);
        let exports = exports.into_iter().enumerate().collect();
        let thread = thread::Builder::new().name("release".into());
        let started = thread.spawn(move || release(exports, &opener, &done));
        started.map(|_| released).map_err(|error| {
            tracing::error!("cannot start a thread to flush exports that are closed: {error}");
            format!("closed without a flush: cannot start a thread: {error}")
        })
    }

    /// Flushes an export that is about to be closed and has no users. The error text is shown to
    /// the operator.
    fn close(&self, export: &Export) -> Result<(), String> {
        let flushed = export.source.settle().map_err(|error| {
            // The export is closed anyway; the log reports an epoch that was not saved.
            let _ = wait_saved(&export.epoch, export.epoch.raise());
            let name = &export.name;
            tracing::error!(export = &**name, %error, "cannot flush a closed export");
            format!("export {name:?} could not be flushed when it was closed: {error}")
        });
        if flushed.is_ok() {
            wait_saved(&export.epoch, export.epoch.rises());
            export.epoch.note_clean_stop();
        }
        if let Some(id) = export.id {
            self.past.lock().insert(id, export.epoch.number());
        }
        flushed
    }
}

fn cannot_export(spec: &ExportSpec) -> String {
    format!("cannot export {:?}", spec.name())
}

/// Returns the error for an export whose target cannot be opened.
pub(super) fn refused(spec: &ExportSpec, error: BackendError) -> Error {
    failed(ErrorKind::Export, cannot_export(spec))(error)
}

/// Key of the epoch of a file or block device in the state directory.
pub(in crate::daemon) fn epoch_key(target: ExportId) -> String {
    format!("id={target}")
}

/// Waits until a failure is saved for the next server. Called before the failure is reported.
/// Returns false and logs an error if that takes too long.
pub(in crate::daemon) fn wait_saved(epoch: &SyncEpoch, rises: u32) -> bool {
    let until = Instant::now() + SAVE_MAX;
    while !epoch.is_saved(rises) {
        if Instant::now() >= until {
            tracing::error!("recording a failed flush in state-dir takes too long");
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Describes a closed export whose last request or flush has not ended.
pub(super) fn not_closed(export: &Export) -> String {
    let name = &export.name;
    format!(
        "export {name:?} is not closed yet: the backend still runs its requests, and its file \
         stays locked until these finish"
    )
}

/// Closes each export once no other references exist, on a separate thread because a flush may
/// hang. Reports the results with the numbers of the exports, and logs exports that are late.
fn release(
    mut exports: Vec<(usize, Arc<Export>)>,
    opener: &Arc<Opener>,
    done: &mpsc::Sender<Released>,
) {
    let (since, mut is_reported) = (Instant::now(), false);
    let mut left: Vec<_> =
        exports.iter().map(|(_, export)| (not_closed(export), Arc::downgrade(export))).collect();
    loop {
        let room = CLOSED_AT_ONCE.saturating_sub(left.len() - exports.len());
        let (mut free, used) = exports
            .into_iter()
            .partition::<Vec<_>, _>(|(_, export)| Arc::strong_count(export) == 1);
        exports = free.split_off(free.len().min(room));
        exports.extend(used);
        for (at, export) in free {
            close_apart(at, export, opener, done);
        }
        left.retain(|(_, export)| export.strong_count() > 0);
        if left.is_empty() {
            if is_reported {
                tracing::info!("the exports that were still closing are now closed");
            }
            return;
        }
        if !is_reported && since.elapsed() >= RELEASE_MAX {
            is_reported = true;
            left.iter().for_each(|(late, _)| tracing::warn!("{late}"));
        }
        thread::sleep(CHECK_INTERVAL);
    }
}

/// Closes an export that has no other references, on its own thread if one can be started.
fn close_apart(
    at: usize,
    export: Arc<Export>,
    opener: &Arc<Opener>,
    done: &mpsc::Sender<Released>,
) {
    let export = Arc::new(Mutex::new(Some((at, export))));
    let (of_thread, opener_of, done_of) = (Arc::clone(&export), Arc::clone(opener), done.clone());
    let named = thread::Builder::new().name("export-close".into());
    if named.spawn(move || close_one(&opener_of, &of_thread, &done_of)).is_err() {
        close_one(opener, &export, done);
    }
}

/// Closes an export, unless it is already closed.
fn close_one(
    opener: &Opener,
    export: &Mutex<Option<(usize, Arc<Export>)>>,
    done: &mpsc::Sender<Released>,
) {
    let Some((at, export)) = export.lock().take() else { return };
    let flushed = opener.close(&export);
    drop(export);
    // The requester may have timed out.
    let _ = done.send((at, flushed));
}
