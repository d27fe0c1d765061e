//! The exports of a running server, and their changes.
//!
//! Owns [`Exports`]. Changes run on threads of the control socket, of the signal handler or of the
//! daemon, never on a shard, because opening, flushing and closing a file may block; each holds the
//! lock of its export, or of all of them (`turns.rs`). The control shard tracks which sessions have
//! an export open (`engine/control/exports.rs`). A removed export is released when its last request
//! has ended on every shard: a thread then flushes and closes it, which frees its lock, and records
//! a failed flush for the next opener of the same file.

mod access;
mod attempts;
pub(super) mod change;
pub(super) mod commands;
mod entry;
mod examine;
mod failed;
mod finish;
mod in_time;
mod last_copy;
mod not_reopened;
mod open_error;
mod opener;
pub(super) mod recovery;
mod reloaded_access;
mod replaced;
pub(super) mod startup;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use rtrs_core::tls::TlsEndpoint;

use self::access::ExportAccess;
use self::attempts::{Attempts, Opened};
pub(super) use self::entry::{Entries, Entry};
use self::examine::TargetExaminer;
use self::failed::FailedExports;
use self::in_time::{all_in_time, in_time};
pub(super) use self::last_copy::LAST_COPY_HINT;
use self::not_reopened::NotReopened;
pub(super) use self::open_error::OpenError;
pub(super) use self::opener::{Opener, RELEASE_MAX, epoch_key, wait_saved};
use self::turns::Turns;
use crate::audit::{AuditEvent, AuditKind, AuditResult, AuditSink};
use crate::control_protocol::{ExportList, SavedExports};
use crate::daemon::control_shard::ControlShard;
use crate::engine::message::{AdminReply, AdminRequest, ControlMessage, Message};
use crate::export::{Export, ExportIndex, ExportTable, Lookup};
use crate::plan::{check_export, validate_export};
use crate::settings::{ExportSpec, Settings, exports_dir};
use crate::stats::{ExportSnapshot, ExportState, ExportUser};

/// Result of examining an export's target.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Followed {
    /// The path leads to the exported target.
    Same,
    /// The path led to another file or device, which is now exported.
    Reopened,
    /// The path leads elsewhere, but the export keeps its target for this reason.
    Kept(String),
    /// The export keeps a file that was deleted before another file took its path, for this reason.
    /// Only a forced reload closes it.
    Orphan(String),
    /// Neither target could be exported, for this reason. The export has failed.
    Failed(String),
}

/// Exports of a running server.
pub(crate) struct Exports {
    table: Arc<ExportTable>,
    pub(super) opener: Arc<Opener>,
    control: ControlShard,
    pub(super) entries: Entries,
    pub(super) turns: Turns,
    /// Exports whose path leads to a target that cannot be exported.
    not_reopened: NotReopened,
    pub(super) targets: TargetExaminer,
    failed: FailedExports,
    attempts: Arc<Attempts>,
    pub(super) access: ExportAccess,
    audit: AuditSink,
    /// Settings at startup.
    set: Settings,
}

impl Exports {
    /// Creates the state for a server that starts with these exports.
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
            targets: TargetExaminer::new(&table),
            table,
            failed,
            attempts: Arc::clone(&opener.attempts),
            opener,
            control,
            entries: Entries::default(),
            turns: Turns::new(set),
            not_reopened: NotReopened::default(),
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
                exports.entries.insert(spec, &export, true);
            }
        }
        exports
    }

    /// The attempts to open failed exports.
    pub(super) fn attempts(&self) -> Arc<Attempts> {
        Arc::clone(&self.attempts)
    }

    /// All named exports, by name, with their access lists.
    pub(super) fn entries(&self) -> BTreeMap<String, Entry> {
        let (mut entries, access) = (self.entries.all(), self.access.lists());
        entries.iter_mut().for_each(|(name, entry)| entry.spec.access = access.of(name));
        entries
    }

    /// A named export, with its access list.
    pub(super) fn entry(&self, name: &str) -> Option<Entry> {
        let mut entry = self.entries.get(name)?;
        entry.spec.access = self.access.of(name);
        Some(entry)
    }

    /// Lists all exports.
    pub(crate) fn list(&self) -> Result<ExportList, String> {
        self.targets.look_at_all();
        self.list_now()
    }

    /// Lists all exports without examining their targets.
    fn list_now(&self) -> Result<ExportList, String> {
        // An export may fail, or be opened, while the control shard answers. Checking both before
        // and after the answer finds it in one of the two lists.
        let failed_before = self.failed.snapshots();
        let access = self.access.of_server();
        let policy = self.table.access();
        let open_to_everyone = policy.is_open_to_everyone();
        let open_to_named = policy.is_open_to_named();
        self.control.ask(AdminRequest::Exports, |answer| match answer {
            AdminReply::Exports(mut exports) => {
                let entries = self.entries.all();
                let lists = self.access.lists();
                for export in exports.iter_mut().filter(|export| is_named(export)) {
                    export.access = lists.of(&export.name);
                    export.access_limit = lists.limit_of(&export.name);
                    if let Some(Entry { spec, .. }) = entries.get(&export.name) {
                        export.backing = spec.target.to_string();
                    }
                }
                let looks = [self.failed.snapshots(), failed_before];
                let failed: Vec<_> = not_served(&exports, looks).collect();
                exports.extend(failed.into_iter().map(|failed| ExportSnapshot {
                    access: lists.of(&failed.name),
                    access_limit: lists.limit_of(&failed.name),
                    ..failed
                }));
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

    /// Lists dangling links in `exports-dir` as failed exports, named after their files, and
    /// forgets those listed before.
    pub(super) fn note_dangling(&self, links: &[PathBuf]) {
        self.failed.forget_unread();
        for link in links {
            let name = link.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let why = format!(
                "{}; restore the file, then `rtrs-server reload`",
                exports_dir::describe_dangling(link)
            );
            tracing::error!(
                export = &*name,
                "export failed (with --strict the server would not start): {why}"
            );
            self.failed.put_unread(&name, link, &why);
            let event = AuditEvent::new(AuditKind::ExportOpen, AuditResult::Refused);
            self.audit.record(|| AuditEvent { export: Some(name), reason: Some(why), ..event });
        }
    }

    /// Opens an export without publishing it.
    pub(super) fn open(&self, spec: &ExportSpec) -> Opened {
        self.check_name(spec.name())?;
        let (opener, spec) = (Arc::clone(&self.opener), spec.clone());
        in_time(move || opener.open_shared(&spec))
    }

    /// Opens exports concurrently without publishing them. Refuses names that are taken.
    pub(super) fn open_all(&self, specs: &[ExportSpec]) -> Vec<Opened> {
        let opened = self.opener.open_all(specs).into_iter().zip(specs);
        let checked = opened.map(|(opened, spec)| {
            self.check_name(spec.name())?;
            opened
        });
        checked.collect()
    }

    /// Refuses a name that is taken.
    fn check_name(&self, name: &str) -> Result<(), String> {
        if self.table.lookup(name.as_bytes()) != Lookup::Unknown {
            return Err(format!(
                "cannot export {name:?}: there is already an export with this name"
            ));
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
        self.entries.insert(spec, export, configured);
        Ok(())
    }

    /// Removes an export from the table, so that it can no longer be opened. Returns the export,
    /// and the sessions that had it open. An error includes whether the export is open.
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
        self.entries.remove(name);
        Ok((export, ended))
    }

    /// Explains why there is no export with this name to change.
    fn unknown(&self, name: &str) -> String {
        let exports = self.list_now().map(|list| list.exports).unwrap_or_default();
        let found = exports.into_iter().find(|export| export.name == name);
        let reason = found.as_ref().and_then(ExportSnapshot::explained);
        match (found, reason) {
            (Some(export), _) if export.found => format!(
                "{name:?} is not a configured export: a client opened it below search-path ({}); \
                 it exists until the last session closes it; detach it at the client, or end the \
                 session with `session evict`; to prevent a new open, move the target out of \
                 search-path",
                export.backing
            ),
            (Some(_), Some(why)) => format!("export {name:?} is not served: {why}"),
            (Some(export), None) if export.state == ExportState::Removing => format!(
                "export {name:?} is already being removed; its file stays locked until the backend \
                 has finished the running requests"
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
}

/// Whether an export in the table got its name from the configuration or a command. An export that
/// is being removed may have the same name as a newer one.
fn is_named(export: &ExportSnapshot) -> bool {
    !export.found && export.state != ExportState::Removing
}

/// Returns the failed exports that are not served, from two checks, the newer one first.
fn not_served(
    served: &[ExportSnapshot],
    looks: [Vec<ExportSnapshot>; 2],
) -> impl Iterator<Item = ExportSnapshot> {
    let named = served.iter().filter(|export| is_named(export));
    let mut names: BTreeSet<_> = named.map(|export| export.name.clone()).collect();
    looks.into_iter().flatten().filter(move |failed| names.insert(failed.name.clone()))
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

/// Checks the settings of exports concurrently, as [`check`] does.
pub(super) fn check_all(specs: &[ExportSpec]) -> Vec<Result<(), String>> {
    all_in_time(specs, |mut spec: ExportSpec| check(&mut spec))
}

#[cfg(test)]
mod tests;
