//! The exports of a running server, and their changes.
//!
//! Owns [`Exports`]. Changes run on threads of the control socket, of a signal or of the daemon, never
//! on a shard, because opening, flushing and closing a file may block; each has the turn of its
//! export, or of all of them (`turns.rs`). The control shard
//! tracks which sessions have an export open (`engine/control/exports.rs`). A removed export is
//! released when its last request has ended on every shard: a thread then flushes and closes it,
//! which frees its lock, and records a failed flush for the next opener of the same file.

mod access;
mod attempts;
mod change;
mod commands;
mod entry;
mod failed;
mod in_time;
mod last_copy;
mod open_error;
pub(super) mod recovery;
mod replaced;
pub(super) mod startup;
mod turns;

use std::collections::BTreeMap;
use std::path::{self, Path};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use parking_lot::Mutex;
use rtrs_core::block::TargetName;
use rtrs_core::identity::ExportId;
use rtrs_core::time::Duration;
use rtrs_core::tls::TlsEndpoint;

use self::access::ExportAccess;
use self::attempts::{Attempts, Opened};
pub(super) use self::change::Begun;
pub(super) use self::commands::ExportCommands;
pub(super) use self::entry::Entry;
use self::failed::FailedExports;
use self::in_time::{all_in_time, in_time};
pub(super) use self::last_copy::LAST_COPY_HINT;
pub(super) use self::open_error::OpenError;
use self::turns::{Turn, Turns};
use crate::audit::AuditSink;
use crate::backend::{BackendError, OpenedTarget, open_target_at};
use crate::control_protocol::{ExportList, SavedExports};
use crate::daemon::control_shard::ControlShard;
use crate::daemon::identity::Sources;
use crate::engine::epoch::SyncEpoch;
use crate::engine::message::{AdminReply, AdminRequest, ControlMessage, Message};
use crate::engine::saved_writers::SavedWriters;
use crate::error::{Error, ErrorKind, failed};
use crate::export::{Export, ExportIndex, ExportTable};
use crate::plan::{check_export, validate_export};
use crate::settings::{ExportSpec, Id, Migration, Settings, Target};
use crate::state::StateDir;
use crate::stats::{ExportSnapshot, ExportState, ExportUser, TRIES_AGAIN};

/// Maximum time to save an epoch when an export is flushed for the last time.
const SAVE_MAX: Duration = Duration::from_secs(2);
/// Interval of checks whether the last request of a removed export has ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum time to close an unused export.
pub(super) const RELEASE_MAX: Duration = Duration::from_secs(30);
/// Maximum time that a change waits for another one: longer than a target may take to open.
const TURN_MAX: Duration = Duration::from_secs(15);

/// Opens exports.
pub(super) struct Opener {
    pub(super) sources: Sources,
    pub(super) state: Arc<StateDir>,
    /// Last epochs of released exports, by their ID.
    past: Mutex<BTreeMap<ExportId, u64>>,
    /// Attempts to open failed exports, and those that a start has not waited for.
    attempts: Arc<Attempts>,
}

impl Opener {
    pub(super) fn new(sources: Sources, state: Arc<StateDir>) -> Self {
        Self { sources, state, past: Mutex::default(), attempts: Arc::default() }
    }

    /// Opens the target of an export.
    ///
    /// # Errors
    /// [`ErrorKind::Export`] for the target, [`ErrorKind::InUse`] for its epoch.
    pub(super) fn open(&self, spec: &ExportSpec) -> Result<Export, Error> {
        let name = spec.name();
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
            id,
            epoch,
            writers,
            ..Export::new(name, source)
        })
    }

    /// Opens the target of an export that threads share.
    fn open_shared(&self, spec: &ExportSpec) -> Opened {
        self.open(spec).map(Arc::new).map_err(|error| OpenError::new(&error))
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
            // Memory ends with the export, and so do its losses: the next one has another epoch.
            Target::Memory(_) | Target::Null(_) => None,
        }
    }

    /// Flushes an export that is about to be closed and has no users. The error is for the
    /// operator.
    fn close(&self, export: &Export) -> Result<(), String> {
        let flushed = export.source.settle().map_err(|error| {
            // The export is closed anyway; the log reports an epoch that is not saved.
            let _ = wait_saved(&export.epoch, export.epoch.raise());
            let name = &export.name;
            tracing::error!(export = &**name, %error, "cannot flush a removed export");
            format!("export {name:?} was removed but could not be flushed: {error}")
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

/// Returns the error of an export whose target cannot be opened.
fn refused(spec: &ExportSpec, error: BackendError) -> Error {
    failed(ErrorKind::Export, cannot_export(spec))(error)
}

/// Key of the epoch of a file or block device in the state directory.
pub(super) fn epoch_key(target: ExportId) -> String {
    format!("id={target}")
}

/// A failed attempt to reopen an export.
#[derive(Debug)]
struct NotReopened {
    at: Instant,
    why: String,
}

/// Result of examining an export's target.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Followed {
    /// The path leads to the exported target.
    Same,
    /// The path led to another file or device, which is now exported.
    Reopened,
    /// The path leads elsewhere, but the export keeps its target for this reason.
    Kept(String),
    /// The export keeps a file that was deleted before another one took its path, for this reason.
    /// Only a forced reload closes it.
    Orphan(String),
}

/// Exports of a running server.
pub(crate) struct Exports {
    table: Arc<ExportTable>,
    opener: Arc<Opener>,
    control: ControlShard,
    entries: Mutex<BTreeMap<String, Entry>>,
    turns: Turns,
    /// Exports whose path leads to a target that cannot be exported.
    not_reopened: Mutex<BTreeMap<String, NotReopened>>,
    failed: FailedExports,
    attempts: Arc<Attempts>,
    pub(super) access: ExportAccess,
    audit: AuditSink,
    /// Settings at the start.
    set: Settings,
}

impl Exports {
    /// Creates the state of a starting server with these exports.
    pub(super) fn new(
        table: Arc<ExportTable>,
        opener: Arc<Opener>,
        control: ControlShard,
        keys: Option<Arc<TlsEndpoint>>,
        set: &Settings,
        audit: AuditSink,
    ) -> Self {
        let failed = FailedExports::new(&table);
        let exports = Self {
            access: ExportAccess::new(set, &table, &control, keys),
            table,
            failed,
            attempts: Arc::clone(&opener.attempts),
            opener,
            control,
            entries: Mutex::default(),
            turns: Turns::default(),
            not_reopened: Mutex::default(),
            audit,
            set: set.clone(),
        };
        for (at, export) in exports.table.all() {
            notify_moves(&export, at, &exports.control);
        }
        let specs = if set.ping_only { &[][..] } else { &set.export };
        for spec in specs {
            let export = exports.table.find(spec.name().as_bytes());
            let export = export.and_then(|at| exports.table.get(at));
            if let Some(export) = export.filter(|export| export.name == spec.name()) {
                exports.note(spec, &export, true);
            }
        }
        exports
    }

    /// Attempts to open failed exports.
    pub(super) fn attempts(&self) -> Arc<Attempts> {
        Arc::clone(&self.attempts)
    }

    /// Waits for the turn to change all exports.
    pub(super) fn begin_all(&self) -> Result<Turn<'_>, String> {
        self.check_changeable()?;
        let turn = self.turns.of_all(TURN_MAX);
        turn.ok_or_else(|| "another change of the exports is still running; try again".to_owned())
    }

    /// Waits for the turn to change an export.
    pub(super) fn begin(&self, name: &str) -> Result<Turn<'_>, String> {
        self.check_changeable()?;
        let turn = self.turns.of(name, TURN_MAX);
        turn.ok_or_else(|| {
            format!(
                "another change of export {name:?}, or of all exports, is still running; try again"
            )
        })
    }

    fn check_changeable(&self) -> Result<(), String> {
        if self.set.ping_only {
            return Err("the server only answers pings (ping-only)".to_owned());
        }
        Ok(())
    }

    /// All named exports, by name.
    pub(super) fn entries(&self) -> BTreeMap<String, Entry> {
        let mut entries = self.entries.lock();
        // Entries of exports whose removal ended after its command had timed out.
        entries.retain(|_, entry| entry.export.strong_count() > 0);
        let mut entries = entries.clone();
        let access = self.access.lists();
        entries.iter_mut().for_each(|(name, entry)| entry.spec.access = access.of(name));
        entries
    }

    pub(super) fn entry(&self, name: &str) -> Option<Entry> {
        let entry = self.entries.lock().get(name).cloned();
        let mut entry = entry.filter(|entry| entry.export.strong_count() > 0)?;
        entry.spec.access = self.access.of(name);
        Some(entry)
    }

    fn note(&self, spec: &ExportSpec, export: &Arc<Export>, configured: bool) {
        let (spec_of, opened_ro) = (spec.clone(), export.read_only);
        let export = Arc::downgrade(export);
        let entry = Entry { spec: spec_of, export, opened_ro, resized: false, configured };
        self.entries.lock().insert(spec.name().to_owned(), entry);
    }

    /// Records that an export is in the configuration.
    pub(super) fn note_configured(&self, name: &str) {
        if let Some(entry) = self.entries.lock().get_mut(name) {
            entry.configured = true;
        }
    }

    /// Records a changed size, which is part of the target of memory.
    pub(super) fn note_size(&self, name: &str, size: u64) {
        if let Some(entry) = self.entries.lock().get_mut(name)
            && let Target::Memory(of) | Target::Null(of) = &mut entry.spec.target
        {
            *of = size;
            entry.resized = true;
        }
    }

    /// Lists all exports.
    pub(crate) fn list(&self) -> Result<ExportList, String> {
        self.examine_targets();
        self.list_now()
    }

    /// Lists all exports without examining their targets.
    fn list_now(&self) -> Result<ExportList, String> {
        let access = self.access.of_server();
        let policy = self.table.access();
        let open_to_everyone = policy.is_open_to_everyone();
        let open_to_named = policy.is_open_to_named();
        self.control.ask(AdminRequest::Exports, |answer| match answer {
            AdminReply::Exports(mut exports) => {
                let entries = self.entries.lock();
                // An export that is being removed may have the same name as a newer one.
                let is_named = |export: &&mut ExportSnapshot| {
                    !export.found && export.state != ExportState::Removing
                };
                let lists = self.access.lists();
                for export in exports.iter_mut().filter(is_named) {
                    export.access = lists.of(&export.name);
                    export.access_limit = lists.limit_of(&export.name);
                    if let Some(Entry { spec, .. }) = entries.get(&export.name) {
                        export.backing = spec.target.to_string();
                    }
                }
                for mut failed in self.failed.snapshots() {
                    failed.access = lists.of(&failed.name);
                    failed.access_limit = lists.limit_of(&failed.name);
                    exports.push(failed);
                }
                exports.sort_by(|a, b| a.name.cmp(&b.name));
                Some(ExportList {
                    exports,
                    access: access.clone(),
                    open_to_everyone,
                    open_to_named,
                })
            }
            _ => None,
        })
    }

    /// Settings of all named exports.
    pub(crate) fn save(&self) -> SavedExports {
        let mut all = self.failed.specs();
        all.extend(self.entries().into_iter().map(|(name, entry)| (name, entry.spec)));
        SavedExports { exports: all.into_values().collect() }
    }

    /// Opens an export without exporting it.
    pub(super) fn open(&self, spec: &ExportSpec) -> Opened {
        self.check_name(spec.name())?;
        let (opener, spec) = (Arc::clone(&self.opener), spec.clone());
        in_time(move || opener.open_shared(&spec))
    }

    /// Opens exports at the same time without exporting them. Refuses names that are taken.
    pub(super) fn open_all(&self, specs: &[ExportSpec]) -> Vec<Opened> {
        let opened = self.open_targets(specs).into_iter().zip(specs);
        let check = |(opened, spec): (Opened, &ExportSpec)| {
            self.check_name(spec.name())?;
            opened
        };
        opened.map(check).collect()
    }

    /// Opens targets at the same time.
    fn open_targets(&self, specs: &[ExportSpec]) -> Vec<Opened> {
        let opener = Arc::clone(&self.opener);
        all_in_time(specs, move |spec: ExportSpec| opener.open_shared(&spec))
    }

    /// Refuses a name that is taken.
    fn check_name(&self, name: &str) -> Result<(), String> {
        let bytes = name.as_bytes();
        if self.table.find(bytes).is_some() || self.table.is_failed(bytes) {
            return Err(format!("cannot export {name:?}: there is an export of this name already"));
        }
        Ok(())
    }

    /// Publishes an opened export.
    pub(super) fn publish(
        &self,
        spec: &ExportSpec,
        export: &Arc<Export>,
        configured: bool,
    ) -> Result<(), String> {
        let added = self.table.add(export);
        let at = added.map_err(|error| format!("cannot export {:?}: {error}", spec.name()))?;
        notify_moves(export, at, &self.control);
        self.note(spec, export, configured);
        Ok(())
    }

    /// Removes an export from the table, so that it can no longer be opened. Returns the export,
    /// and the sessions that had it open. The error includes whether it is open.
    pub(super) fn unpublish(
        &self,
        name: &str,
        force: bool,
    ) -> Result<(Arc<Export>, Vec<String>), (String, bool)> {
        let Some(export) = self.entry(name).and_then(|entry| entry.export.upgrade()) else {
            return Err((self.unknown(name), false));
        };
        let request = AdminRequest::ExportRemove { name: name.to_owned(), force };
        let ended = self.control.ask(request, |answer| match answer {
            AdminReply::ExportRemoved { ended } => Some(ended),
            _ => None,
        });
        let ended = ended.map_err(|why| (why, self.is_open(name).unwrap_or(false)))?;
        self.entries.lock().remove(name);
        Ok((export, ended))
    }

    /// Explains why there is no export of this name to change.
    fn unknown(&self, name: &str) -> String {
        let exports = self.list_now().map(|list| list.exports).unwrap_or_default();
        match exports.into_iter().find(|export| export.name == name) {
            Some(export) if export.found => format!(
                "{name:?} is not an export of the configuration: a client opened it below \
                 search-path ({}); it disappears when the last session closes it; detach it there, \
                 or end the session with `session evict`; to keep it from being opened again, \
                 move it out of search-path",
                export.backing
            ),
            Some(ExportSnapshot { reason: Some(why), .. }) => {
                format!("export {name:?} is not served: {why}; {TRIES_AGAIN}")
            }
            Some(export) if export.state == ExportState::Removing => format!(
                "export {name:?} is being removed already; its file stays locked until the \
                 requests that run at the backend finish"
            ),
            _ => format!("there is no export {name:?}; `export list` shows all"),
        }
    }

    /// Finds an export by its name.
    pub(super) fn find(&self, name: &str) -> Result<(ExportIndex, Arc<Export>), String> {
        let at = self.table.find(name.as_bytes());
        let found = at.and_then(|at| Some((at, self.table.get(at)?)));
        found.ok_or_else(|| self.unknown(name))
    }

    pub(super) fn control(&self) -> &ControlShard {
        &self.control
    }

    /// Sessions that have an export open. `name` must be spelled exactly as configured.
    fn users(&self, name: &str) -> Result<Vec<ExportUser>, String> {
        let exports = self.list_now()?.exports.into_iter();
        let named = exports.filter(|export| {
            export.name == name && !export.found && export.state != ExportState::Removing
        });
        Ok(named.flat_map(|export| export.open_by).collect())
    }

    /// Whether a session has an export open. `name` must be spelled exactly as configured.
    pub(super) fn is_open(&self, name: &str) -> Result<bool, String> {
        Ok(!self.users(name)?.is_empty())
    }

    /// Flushes and closes exports when the last of their requests has ended, and waits up to
    /// `within` for that. Work that takes longer continues in the background.
    pub(super) fn release(
        &self,
        exports: Vec<Arc<Export>>,
        within: Duration,
    ) -> Result<(), String> {
        let results = self.release_each(exports, within).into_iter();
        let wrong: Vec<_> = results.filter_map(Result::err).collect();
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
    }

    /// Releases exports like [`Self::release`]. Returns the results in the order of the exports.
    fn release_each(&self, exports: Vec<Arc<Export>>, within: Duration) -> Vec<Result<(), String>> {
        let until = Instant::now() + within;
        let late = |export: &Arc<Export>| {
            let name = &export.name;
            Err(format!(
                "export {name:?} is removed, but the backend still runs requests of it; its file \
                 stays locked until these finish"
            ))
        };
        let mut results: Vec<_> = exports.iter().map(late).collect();
        let (done, released) = mpsc::channel();
        let opener = Arc::clone(&self.opener);
        let exports = exports.into_iter().enumerate().collect();
        let thread = std::thread::Builder::new().name("release".into());
        if let Err(error) = thread.spawn(move || release(exports, &opener, &done)) {
            let why = Err(format!("cannot start a thread: {error}"));
            return vec![why; results.len()];
        }
        // Ends with the thread, which drops the sender.
        while let Ok((at, flushed)) =
            released.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            results[at] = flushed;
        }
        results
    }
}

/// Waits until a failure is saved for the next server, before it is reported. Returns false and
/// logs an error if that takes too long.
pub(super) fn wait_saved(epoch: &SyncEpoch, rises: u32) -> bool {
    let until = Instant::now() + SAVE_MAX;
    while !epoch.is_saved(rises) {
        if Instant::now() >= until {
            tracing::error!("state-dir takes too long: a failed flush is not recorded there yet");
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Extracts an answer without content.
#[allow(clippy::needless_pass_by_value, reason = "made for `ask`")]
fn done(answer: AdminReply) -> Option<()> {
    matches!(answer, AdminReply::Done).then_some(())
}

/// Notifies the control shard when an export moves between servers.
fn notify_moves(export: &Export, at: ExportIndex, control: &ControlShard) {
    let Some(gateway) = export.source.gateway() else { return };
    let control = control.clone();
    gateway.on_change(Box::new(move |event| {
        control.0.send(Message::Control(ControlMessage::Gateway(at, event)));
    }));
}

/// Checks the settings of an export from a command or the configuration, before anything is opened.
pub(super) fn check(spec: &mut ExportSpec) -> Result<(), String> {
    let checked = validate_export(spec).and_then(|()| check_export(spec));
    checked.map_err(|error| error.chain().to_string())
}

/// Checks the settings of exports at the same time, as [`check`] does.
pub(super) fn check_all(specs: &[ExportSpec]) -> Vec<Result<(), String>> {
    all_in_time(specs, |mut spec: ExportSpec| check(&mut spec))
}

/// Closes exports, each when no other references exist, and reports the results with the numbers of
/// the exports.
fn release(
    mut exports: Vec<(usize, Arc<Export>)>,
    opener: &Opener,
    done: &mpsc::Sender<(usize, Result<(), String>)>,
) {
    loop {
        let (free, used) = exports
            .into_iter()
            .partition::<Vec<_>, _>(|(_, export)| Arc::strong_count(export) == 1);
        for (at, export) in free {
            let flushed = opener.close(&export);
            drop(export);
            // The requester may have timed out.
            let _ = done.send((at, flushed));
        }
        if used.is_empty() {
            return;
        }
        exports = used;
        std::thread::sleep(CHECK_INTERVAL);
    }
}

#[cfg(test)]
mod tests;
