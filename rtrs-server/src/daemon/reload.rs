//! `reload`: rereads the configuration and applies it to the exports.
//!
//! Defines [`Reload`]. Nothing changes if the configuration, a certificate or a key is invalid,
//! except for a server certificate that is already in use and has since expired. Restrictions are
//! applied first, and wait for nothing: no disk, no export and no other change delays the
//! disconnection of clients that lose access. Then the exports are changed. A new export that
//! cannot be opened counts as failed, as it does at startup; if `on-missing` would make startup
//! refuse it, no export changes, and the error lists what was applied before. Permissions are
//! applied last, to exports that match the configuration: a list is never applied to an export that
//! another configuration defined under the same name. An open export is neither removed nor
//! changed, only reported. Exports added by a command stay, unless the configuration names them.

mod apply;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rtrs_core::settings::{print, printable};
use rtrs_core::tls::{TlsEndpoint, TlsServerConfig};

use self::apply::{Wanted, apply, preview};
use crate::access_list::{ListChange, rules};
use crate::audit::{AuditEvent, AuditKind, AuditResult, AuditSink};
use crate::control_protocol::{Kept, Origin, Reloaded, UnlistedChange};
use crate::daemon::exports::Exports;
use crate::daemon::exports::commands::ExportCommands;
use crate::daemon::readings::{Reading, Readings};
use crate::daemon::warnings::{warn, warnings};
use crate::error::Error;
use crate::plan::{Plan, check_below, read_tls, unusable};
use crate::save_lock::SaveLock;
use crate::settings::{ExportSpec, Settings, exports_dir};

/// Rereads the flags and the configuration file, if there is one.
pub type Reread = Box<dyn Fn() -> Result<Plan, Error> + Send + Sync>;

/// Warning for a reload whose exports another reload has already superseded.
const SUPERSEDED: &str = "another reload read the configuration later and has already applied it; \
                          the exports match that configuration";

/// Settings that a reload applies.
pub(super) const APPLIED: [&str; 4] = ["access", "export", "exports-dir", "insecure-open"];

/// Losses that a reload accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accepts {
    NoLoss,
    /// Access lists that cost clients their access.
    LostAccess,
    /// In addition, the content of deleted files.
    AllLosses,
}

/// Result of reading: settings, certificates or keys, and differences.
type Read = (Settings, Option<TlsServerConfig>, Reloaded);

/// Certificates or keys, and the problem with the certificate in use, if any.
type ReadTls = (TlsServerConfig, Option<String>);

/// A configuration whose restrictions have been applied, but not its exports and permissions.
pub(crate) struct ReadConfig<'a> {
    set: Settings,
    /// Configuration number of its access lists.
    lists: u64,
    accepts: Accepts,
    reading: Reading<'a>,
}

/// State with which a reload compares the configuration.
pub(super) struct Reload {
    reread: Reread,
    running: Settings,
    audit: AuditSink,
    /// Present if the server has certificates or keys.
    tls: Option<Arc<TlsEndpoint>>,
    /// Held while reading and applying access, so that the last configuration read is the last one
    /// applied.
    reading: Mutex<()>,
    /// Order of the readings, for the exports and for commands that save.
    readings: Readings,
    /// Exports in the configuration as last applied, by name.
    applied: Mutex<BTreeMap<String, ExportSpec>>,
    /// Shared with the commands that save exports; absent without a control socket.
    save_lock: OnceLock<SaveLock>,
}

impl Reload {
    pub(super) fn new(
        running: &Settings,
        reread: Reread,
        audit: AuditSink,
        tls: Option<Arc<TlsEndpoint>>,
    ) -> Self {
        let applied = running.export.iter().map(|spec| (spec.name().to_owned(), spec.clone()));
        Self {
            reread,
            running: running.clone(),
            audit,
            tls,
            reading: Mutex::default(),
            readings: Readings::default(),
            applied: Mutex::new(applied.collect()),
            save_lock: OnceLock::new(),
        }
    }

    /// Sets the lock that the commands of the control socket use.
    pub(super) fn set_save_lock(&self, lock: SaveLock) {
        // There is only one control socket.
        drop(self.save_lock.set(lock));
    }

    /// Whether the configuration has changes to an export that have not been applied. An entry that
    /// matches the running export counts as applied: a command has saved it.
    fn is_edited(&self, configured: &ExportSpec, running: Option<&ExportSpec>) -> bool {
        let mut applied = self.applied.lock();
        if running == Some(configured) {
            applied.insert(configured.name().to_owned(), configured.clone());
        }
        applied.get(configured.name()) != Some(configured)
    }

    /// Rereads the certificates, keys and list of clients; returns None if there are none. An
    /// invalid certificate is refused, unless it is the one in use.
    fn read_tls(&self) -> Result<Option<ReadTls>, String> {
        let Some(endpoint) = &self.tls else { return Ok(None) };
        let read = read_tls(&self.running).and_then(|config| {
            let Some(config) = config else { return Ok(None) };
            let wrong = endpoint.check_renewed(&config).map_err(unusable)?;
            Ok(Some((config, wrong)))
        });
        read.map_err(|error| error.chain().to_string())
    }

    /// Reads the configuration and applies the differences.
    pub(super) fn run(&self, exports: &Exports, accepts: Accepts) -> Result<Reloaded, String> {
        let mut done = Reloaded::default();
        let failed = self.apply(exports, accepts, &mut done).err();
        let failed = failed.map(|why| refused(&why, &done)).inspect(|why| {
            tracing::warn!("reload: {why}");
        });
        self.audit.record(|| {
            let result = result(failed.is_some(), &done);
            let access_changed = done.access_changed.clone();
            let reason = failed.clone().or_else(|| summary(&done));
            AuditEvent { reason, access_changed, ..AuditEvent::new(AuditKind::Reload, result) }
        });
        failed.map_or(Ok(done), Err)
    }

    /// Applies the differences, and records what was applied, even if an error follows.
    fn apply(
        &self,
        exports: &Exports,
        accepts: Accepts,
        done: &mut Reloaded,
    ) -> Result<(), String> {
        let _saving = self.save_lock.get().and_then(SaveLock::share);
        let read = self.read_and_restrict(exports, accepts, done)?;
        self.apply_exports(exports, read, done)
    }

    /// Applies the exports and permissions of a configuration, unless a later one has been applied.
    pub(super) fn apply_exports(
        &self,
        exports: &Exports,
        read: ReadConfig<'_>,
        done: &mut Reloaded,
    ) -> Result<(), String> {
        let ReadConfig { set, lists, accepts, reading } = read;
        // Collected after the access changes, because reading files and users must not delay the
        // disconnection of any client.
        done.warnings.extend(warnings(&set));
        warn(done.certificate.iter().chain(&done.warnings).cloned().collect());
        if set.ping_only {
            return Ok(());
        }
        self.check_below(&set)?;
        let turn = exports.turns.begin_all()?;
        if !reading.may_apply() {
            tracing::warn!("{SUPERSEDED}");
            done.warnings.push(SUPERSEDED.to_owned());
            return Ok(());
        }
        // This reload has read all files.
        exports.note_dangling(&[]);
        exports.access.renew(lists, &set.export);
        let wanted = Wanted {
            exports: set.export.clone(),
            force: accepts == Accepts::AllLosses,
            on_missing: self.running.on_missing,
        };
        let applied = apply(exports, wanted, done);
        exports.grant_access(lists, &set.export);
        drop(turn);
        applied?;
        self.note_applied(&set.export, done);
        tracing::info!(
            added = done.added.len(),
            removed = done.removed.len(),
            changed = done.changed.len(),
            kept = done.kept.len(),
            failed = done.failed.len(),
            "configuration reloaded"
        );
        for Kept { name, why } in done.kept.iter().chain(&done.failed) {
            tracing::warn!(export = &**name, "does not match the configuration: {why}");
        }
        if !done.restart.is_empty() {
            tracing::warn!("these settings need a restart: {}", done.restart.join(", "));
        }
        Ok(())
    }

    /// Records the exports that now match the configuration.
    fn note_applied(&self, configured: &[ExportSpec], done: &Reloaded) {
        let mut applied = self.applied.lock();
        applied.retain(|name, _| configured.iter().any(|spec| spec.name() == name));
        let left: Vec<&str> =
            done.kept.iter().chain(&done.failed).map(|Kept { name, .. }| &**name).collect();
        for spec in configured.iter().filter(|spec| !left.contains(&spec.name())) {
            applied.insert(spec.name().to_owned(), spec.clone());
        }
    }

    /// Rereads everything and applies the restrictions.
    pub(super) fn read_and_restrict(
        &self,
        exports: &Exports,
        accepts: Accepts,
        done: &mut Reloaded,
    ) -> Result<ReadConfig<'_>, String> {
        let _turn = self.reading.lock();
        let reading = self.readings.begin();
        let (set, renewed, mut read) = self.read()?;
        let checking_losses = exports.access.begin_check();
        if accepts == Accepts::NoLoss {
            let access = exports.preview_lists(&set, &mut read);
            exports.access.losses(&access)?.refusal().map_or(Ok(()), Err)?;
        }
        *done = read;
        // Applied before the keys, which may assign a name to a different client.
        let lists = exports.narrow_access(&set, &checking_losses, done);
        drop(checking_losses);
        if let (Some(endpoint), Some(config)) = (&self.tls, renewed) {
            done.warnings = endpoint.older_lists(&config);
            exports.access.replace_keys(endpoint, config);
            match &*done.keys_changed.join(", ") {
                "" => tracing::info!("certificates or keys reloaded; none changed"),
                changed => tracing::info!(changed, "certificates or keys reloaded"),
            }
        }
        for change in &done.access_changed {
            let (before, after) = (rules(&change.before), rules(&change.after));
            tracing::info!(%before, %after, "changed: {}", printable(&change.list()));
        }
        if let Some(UnlistedChange { before, after }) = &done.unlisted_changed {
            tracing::warn!(before, after, "access to exports without their own list has changed");
        }
        done.losses.revoked = exports.access.check()?;
        Ok(ReadConfig { set, lists, accepts, reading })
    }

    /// Reports what a reload would do. Targets are checked, but not opened.
    fn preview(&self, exports: &Exports) -> Result<Reloaded, String> {
        let read = self.read().map_err(|why| refused(&why, &Reloaded::default()))?;
        let (set, renewed, mut done) = read;
        self.check_below(&set).map_err(|why| refused(&why, &Reloaded::default()))?;
        let access = exports.preview_lists(&set, &mut done);
        done.needs_force = exports.access.losses(&access)?.refusal().is_some();
        done.losses.revoked = exports.access.preview(&access, renewed.as_ref())?;
        if let (Some(endpoint), Some(config)) = (&self.tls, &renewed) {
            done.warnings = endpoint.older_lists(config);
        }
        done.warnings.extend(warnings(&set));
        if !set.ping_only {
            let turn = exports.turns.begin_preview();
            let on_missing = self.running.on_missing;
            let wanted = Wanted { exports: set.export, force: false, on_missing };
            let looked = turn.and_then(|_turn| preview(exports, wanted, &mut done));
            looked.map_err(|why| would_be_refused(&why, &done))?;
        }
        Ok(done)
    }

    /// Checks that exports under the search path have no list. The search path is the running
    /// server's, since only a restart changes it. May wait for a file system.
    fn check_below(&self, set: &Settings) -> Result<(), String> {
        let check = |spec: &ExportSpec| check_below(spec, &self.running.search_path);
        let checked = set.export.iter().try_for_each(check);
        checked.map_err(|error| error.chain().to_string())
    }

    /// Reads all files, and records the differences and the settings that need a restart.
    fn read(&self) -> Result<Read, String> {
        let (renewed, wrong) = self.read_tls()?.unzip();
        let plan = (self.reread)().map_err(|error| error.chain().to_string())?;
        let mut set = plan.settings;
        let mut done = Reloaded {
            restart: differences(&self.running, &set),
            certificate: wrong.flatten(),
            ..Reloaded::default()
        };
        set.ping_only = self.running.ping_only;
        if let (Some(endpoint), Some(config)) = (&self.tls, &renewed) {
            done.keys_changed = endpoint.changes_to(config);
        }
        Ok((set, renewed, done))
    }
}

/// Changes to the server's exports.
pub(super) struct Changes {
    pub(super) exports: Arc<Exports>,
    pub(super) commands: ExportCommands,
    pub(super) reload: Reload,
}

impl Changes {
    pub(super) fn new(exports: Exports, reload: Reload) -> Self {
        let exports = Arc::new(exports);
        let commands = ExportCommands::new(&exports);
        Self { exports, commands, reload }
    }

    /// Reloads the configuration.
    pub(super) fn reload(&self, accepts: Accepts) -> Result<Reloaded, String> {
        self.reload.run(&self.exports, accepts)
    }

    /// Reports what a reload would do.
    pub(super) fn preview(&self) -> Result<Reloaded, String> {
        self.reload.preview(&self.exports)
    }

    /// Reads the configuration to find where it defines an export, and compares the definition with
    /// the running export.
    pub(super) fn origin(&self, name: &str) -> Result<Origin, String> {
        let text = |error: Error| error.chain().to_string();
        // Taken before the files are read: a reload that begins later reads what the command
        // writes, or changes the number.
        let (configuration, reloading) = self.reload.readings.state();
        let plan = (self.reload.reread)().map_err(text)?;
        let Settings { exports_dir, export: configured, access, .. } = plan.settings;
        let file = exports_dir.as_deref().map(|dir| exports_dir::file_of(dir, name));
        let file = file.transpose().map_err(text)?.flatten();
        let defined = configured.iter().find(|spec| spec.name() == name);
        let running = self.exports.save().exports.into_iter().find(|spec| spec.name() == name);
        let has_other_list = !access.is_empty()
            || configured.iter().any(|spec| spec.name() != name && !spec.access.is_empty());
        Ok(Origin {
            elsewhere: defined.is_some() && file.is_none(),
            edited: defined.is_some_and(|spec| self.reload.is_edited(spec, running.as_ref())),
            access: running.map(|spec| spec.access).unwrap_or_default(),
            opens_without_list: !has_other_list && self.exports.access.is_closed_to_unlisted(),
            configuration,
            reloading,
            exports_dir,
            config: plan.config,
        })
    }
}

/// Result of a reload, for the audit log.
fn result(failed: bool, done: &Reloaded) -> AuditResult {
    let left = !done.kept.is_empty() || !done.failed.is_empty();
    match (failed, access_text(done, "lost").is_some()) {
        (true, false) => AuditResult::Refused,
        (true, true) => AuditResult::Partly,
        (false, _) if left => AuditResult::Partly,
        (false, _) => AuditResult::Ok,
    }
}

/// Summary of a reload for the audit log: changes, losses of sessions, and exports that do not
/// match the configuration. None if there is nothing to report.
fn summary(done: &Reloaded) -> Option<String> {
    let left = done.kept.iter().map(|one| ("kept", one));
    let left = left.chain(done.failed.iter().map(|one| ("failed", one)));
    let left = left.map(|(what, Kept { name, why })| format!("{what} {name}: {why}"));
    let parts: Vec<String> = access_text(done, "lost").into_iter().chain(left).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Describes changes to keys and access lists, and what clients lost, with sessions that `lost`
/// paths. None if there are none.
fn access_text(done: &Reloaded, lost: &str) -> Option<String> {
    let lists = done.access_changed.iter().map(ListChange::list);
    let mut parts: Vec<String> = done.keys_changed.iter().cloned().chain(lists).collect();
    parts.extend(done.losses.texts(lost));
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Error for a reload that changes no export, including what had been applied.
fn refused(why: &str, done: &Reloaded) -> String {
    match access_text(done, "lost") {
        None => format!("nothing changed: {why}"),
        Some(all) => format!("no export changed: {why}; but this was applied: {}", printable(&all)),
    }
}

/// Error for a preview, including what would be applied.
fn would_be_refused(why: &str, done: &Reloaded) -> String {
    match access_text(done, "would lose") {
        None => format!("nothing would change: {why}"),
        Some(all) => {
            format!("no export would change: {why}; but this would apply: {}", printable(&all))
        }
    }
}

/// Settings that differ and take effect only after a restart.
fn differences(running: &Settings, wanted: &Settings) -> Vec<String> {
    let (before, after) = (print(running), print(wanted));
    let differs = before.iter().filter(|(name, value)| after.get(name) != Some(value));
    let names = differs.filter_map(|(name, _)| name.as_str());
    names.filter(|name| !APPLIED.contains(name)).map(str::to_owned).collect()
}
