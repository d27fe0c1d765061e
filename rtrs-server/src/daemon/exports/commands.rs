//! Commands that change exports. `export resize` is in `sizes.rs`.

use std::sync::Arc;

use rtrs_core::time::Duration;

use super::change::Applied;
use super::in_time::in_time;
use super::{Entry, Exports, LAST_COPY_HINT, check, recovery};
use crate::audit::{AuditEvent, AuditKind, AuditResult, AuditSink};
use crate::control_protocol::{Changed, ExportDrained, Losses, Removed};
use crate::daemon::warnings::rule_warnings;
use crate::export::Export;
use crate::plan::{check_below, validate_export};
use crate::settings::{ExportSpec, SearchSpec, Settings};
use crate::stats::{ExportUser, Revoked, TRIES_AGAIN};

/// Time for clients to learn over their paths that an export has been removed, before paths that
/// lose access because of the removal are closed.
const REMOVAL_NOTICE: Duration = Duration::from_millis(300);

/// An export to be changed.
enum Found {
    Served(Entry),
    /// An export that could not be opened, with its settings.
    Failed(ExportSpec),
}

impl Found {
    fn spec(&self) -> &ExportSpec {
        match self {
            Self::Served(entry) => &entry.spec,
            Self::Failed(spec) => spec,
        }
    }
}

/// The commands that change exports. Each is recorded in the audit log.
pub(in crate::daemon) struct ExportCommands {
    pub(in crate::daemon) exports: Arc<Exports>,
    audit: AuditSink,
    /// Settings at startup.
    set: Settings,
}

impl ExportCommands {
    pub(in crate::daemon) fn new(exports: &Arc<Exports>) -> Self {
        let (audit, set) = (exports.audit.clone(), exports.set.clone());
        Self { exports: Arc::clone(exports), audit, set }
    }

    /// Adds an export.
    pub(crate) fn add(&self, spec: ExportSpec, force: bool) -> Result<Changed, String> {
        let (name, lost) = (spec.name().to_owned(), |added: &Changed| added.lost());
        self.recorded(AuditKind::ExportAdd, &name, self.add_now(spec, force), lost)
    }

    fn add_now(&self, mut spec: ExportSpec, force: bool) -> Result<Changed, String> {
        // Before the lock, because the target may hang.
        self.check(&mut spec)?;
        let export =
            self.exports.open(&spec).map_err(|why| match self.exports.holder_of(&spec.target) {
                Some(holder) => format!("{why}; export {holder:?} has it open"),
                None => why.why,
            })?;
        self.add_opened(&spec, &export, force)
    }

    /// Publishes an export that is open.
    pub(super) fn add_opened(
        &self,
        spec: &ExportSpec,
        export: &Arc<Export>,
        force: bool,
    ) -> Result<Changed, String> {
        let _turn = self.exports.turns.begin(spec.name())?;
        // Another command may have added the name in the meantime; that export's list must stay.
        self.exports.check_name(spec.name())?;
        let checking_losses = self.exports.access.begin_check();
        let closed = self.exports.access.check_losses(spec, force)?;
        // Set the list before any client can open the export.
        self.exports.access.change(|access| drop(access.set(spec)));
        let published = self.exports.publish(spec, export, false);
        published
            .inspect_err(|_| self.exports.access.change(|access| access.forget(spec.name())))?;
        // Dropped only now: a reload would forget a list without an export.
        drop(checking_losses);
        let losses = Losses { closed, revoked: self.exports.access.check()? };
        Ok(self.changed(spec, Some(losses)))
    }

    /// Changes options of an export.
    pub(crate) fn set(
        &self,
        name: &str,
        options: &[String],
        force: bool,
    ) -> Result<Changed, String> {
        let why = |set: &Changed| {
            let parts = std::iter::once(options.join(" ")).chain(set.lost());
            Some(parts.collect::<Vec<_>>().join("; "))
        };
        self.recorded(AuditKind::ExportSet, name, self.set_now(name, options, force), why)
    }

    /// Checks the settings and the target of an export from a command, before anything is opened.
    fn check(&self, spec: &mut ExportSpec) -> Result<(), String> {
        let (wanted, search_path) = (spec.clone(), self.set.search_path.clone());
        *spec = in_time(move || {
            let mut spec = wanted;
            check(&mut spec)?;
            check_settings(&mut spec, &search_path).map(|()| spec)
        })?;
        Ok(())
    }

    /// Checks the settings of an export from a command.
    fn check_settings(&self, spec: &mut ExportSpec) -> Result<(), String> {
        check_settings(spec, &self.set.search_path)
    }

    /// Returns an export, and its settings with the options changed.
    fn with_options(&self, name: &str, options: &[String]) -> Result<(Found, ExportSpec), String> {
        let found = match (self.exports.entry(name), self.exports.failed.spec(name)) {
            (Some(entry), _) => Found::Served(entry),
            (None, Some(spec)) => Found::Failed(spec),
            (None, None) => return Err(self.exports.unknown(name)),
        };
        let mut spec = found.spec().with_options(options).map_err(|error| error.to_string())?;
        match &found {
            // Access can be revoked while the target hangs.
            Found::Served(entry) if entry.stays_open(&spec) && !entry.spec.access.is_empty() => {
                validate_export(&mut spec).map_err(|error| error.chain().to_string())?;
            }
            Found::Served(_) => self.check(&mut spec)?,
            // The change may be what makes the target usable.
            Found::Failed(_) => self.check_settings(&mut spec)?,
        }
        Ok((found, spec))
    }

    /// Reports what [`Self::set`] would do. The target is checked, but not opened.
    pub(crate) fn preview_set(&self, name: &str, options: &[String]) -> Result<Changed, String> {
        let _turn = self.exports.turns.begin(name)?;
        let (found, spec) = self.with_options(name, options)?;
        let before = found.spec();
        if let Found::Served(entry) = &found {
            let users = self.exports.users(name)?;
            let writes = || users.iter().any(|user| user.access.may_write());
            let open = (!users.is_empty()).then(writes);
            if let Some(why) = entry.obstacle(&spec, open).filter(|_| entry.spec != spec) {
                return Err(format!("export {name:?} would not change: {why}"));
            }
        }
        let losses = self.losses_by(before, &spec)?;
        let last_copy = match &found {
            Found::Served(entry) if !entry.stays_open(&spec) => {
                self.exports.targets.last_copy(name)
            }
            _ => None,
        };
        let needs_force = losses.refusal().is_some() || last_copy.is_some();
        let mut changed = self.changed(&spec, (*before != spec).then_some(losses));
        changed.warnings.extend(last_copy);
        Ok(Changed { needs_force, ..changed })
    }

    /// Access that clients would lose through an export's changed list.
    fn losses_by(&self, before: &ExportSpec, spec: &ExportSpec) -> Result<Losses, String> {
        if before.access == spec.access {
            return Ok(Losses::default());
        }
        let mut access = self.exports.access.lists();
        access.set(spec);
        self.exports.access.losses(&access)
    }

    /// Removes an export, and waits up to `within` for its release.
    pub(crate) fn remove(
        &self,
        name: &str,
        force: bool,
        within: Duration,
    ) -> Result<Removed, String> {
        let ended = |removed: &Removed| {
            let ended = removed.ended.join(", ");
            let ended = (!ended.is_empty()).then(|| format!("it was in use by {ended}"));
            let all: Vec<String> = ended.into_iter().chain(removed.not_closed.clone()).collect();
            (!all.is_empty()).then(|| all.join("; "))
        };
        let removed = self.remove_now(name, force, within);
        self.recorded(AuditKind::ExportRemove, name, removed, ended)
    }

    fn remove_now(&self, name: &str, force: bool, within: Duration) -> Result<Removed, String> {
        let turn = self.exports.turns.begin(name)?;
        if self.exports.failed.remove(name) {
            self.exports.attempts.abandon(name);
            self.exports.access.forget(name);
            return Ok(removed(name, Vec::new(), self.exports.access.check()?));
        }
        if let Some(why) = self.exports.targets.last_copy(name).filter(|_| !force) {
            return Err(format!("{why}{LAST_COPY_HINT}"));
        }
        let users = self.exports.users(name)?;
        let hint = "; detach it at the client, or use --force";
        let (export, ended) = self
            .exports
            .unpublish(name, force)
            .map_err(|(why, open)| why + if open { hint } else { "" })?;
        // The export's list may have been the only list that named a client.
        self.exports.access.change(|access| access.forget(name));
        // The release may take a long time, and must not delay other changes.
        drop(turn);
        if !ended.is_empty() {
            std::thread::sleep(REMOVAL_NOTICE);
        }
        let revoked = self.exports.access.check();
        let not_closed = self.exports.opener.release(vec![export], within).err();
        Ok(Removed { ended, not_closed, ..removed(name, users, revoked?) })
    }

    /// Reports what [`Self::remove`] would do.
    pub(crate) fn preview_remove(&self, name: &str) -> Result<Removed, String> {
        let _turn = self.exports.turns.begin(name)?;
        let is_failed = self.exports.failed.spec(name).is_some();
        if self.exports.entry(name).is_none() && !is_failed {
            return Err(self.exports.unknown(name));
        }
        let users = self.exports.users(name)?;
        let mut access = self.exports.access.lists();
        access.forget(name);
        let mut revoked = self.exports.access.preview(&access, None)?;
        let removed = removed(name, users, Vec::new());
        // These sessions lose the export first and may then no longer need the access.
        revoked.retain(|one| !removed.ended.contains(&one.session));
        let lost = self.exports.targets.last_copy(name);
        let needs_force = !removed.ended.is_empty() || lost.is_some();
        Ok(Removed { needs_force, revoked, lost, ..removed })
    }

    fn set_now(&self, name: &str, options: &[String], force: bool) -> Result<Changed, String> {
        let _turn = self.exports.turns.begin(name)?;
        let (found, spec) = self.with_options(name, options)?;
        if let Found::Served(entry) = &found
            && !entry.stays_open(&spec)
        {
            // The file may have been deleted since it was last examined.
            self.exports.targets.examine(name);
        }
        let checking_losses = self.exports.access.begin_check();
        let closed = self.exports.access.check_losses(&spec, force)?;
        let Applied { revoked, warnings } = match found {
            Found::Served(entry) => self.exports.change(&entry, &spec, force, checking_losses)?,
            Found::Failed(before) => {
                let revoked = self.exports.access.change_list(&before, &spec)?;
                drop(checking_losses);
                let failed = recovery::open_now(&self.exports, &spec).err();
                let warning = failed
                    .map(|why| format!("export {name:?} is not served yet: {why}; {TRIES_AGAIN}"));
                let revoked = (before != spec).then_some(revoked);
                Applied { revoked, warnings: warning.into_iter().collect() }
            }
        };
        self.exports.give_up_writer_locks(name);
        let losses = revoked.map(|revoked| Losses { closed, revoked });
        let mut changed = self.changed(&spec, losses);
        changed.warnings.extend(warnings);
        Ok(changed)
    }

    /// Result of a command on an export, with the access that clients lost if the export changed.
    fn changed(&self, spec: &ExportSpec, losses: Option<Losses>) -> Changed {
        let warnings = rule_warnings(&self.set, &spec.access);
        let (export, changed) = (spec.name().to_owned(), losses.is_some());
        let losses = losses.unwrap_or_default();
        Changed { export, changed, warnings, losses, needs_force: false, saved: None }
    }

    /// Records that a command drains the server, or why it does not.
    pub(crate) fn record_drain(&self, why_not: Option<&str>) {
        let result = if why_not.is_some() { AuditResult::Refused } else { AuditResult::Ok };
        let reason = why_not.map(str::to_owned);
        self.audit.record(|| AuditEvent { reason, ..AuditEvent::new(AuditKind::Drain, result) });
    }

    /// Records a command's change to an export.
    pub(in crate::daemon) fn recorded<T>(
        &self,
        event: AuditKind,
        name: &str,
        done: Result<T, String>,
        why: impl FnOnce(&T) -> Option<String>,
    ) -> Result<T, String> {
        let (result, reason) = match &done {
            Ok(done) => (AuditResult::Ok, why(done)),
            Err(error) => (AuditResult::Refused, Some(error.clone())),
        };
        let export = Some(name.to_owned());
        self.audit.record(|| AuditEvent { export, reason, ..AuditEvent::new(event, result) });
        done
    }

    /// Makes another gateway serve an export.
    pub(crate) fn drain(&self, name: &str, within: Duration) -> Result<ExportDrained, String> {
        self.recorded(AuditKind::ExportDrain, name, self.drain_now(name, within), |_| None)
    }

    fn drain_now(&self, name: &str, within: Duration) -> Result<ExportDrained, String> {
        let (_, export) = self.exports.find(name)?;
        let Some(gateway) = export.source.gateway() else {
            return Err(format!("export {name:?} has no other gateway; see the option gateway"));
        };
        let drained = gateway.release(within);
        drained.map_err(|error| format!("cannot hand over export {name:?}: {error}"))?;
        Ok(ExportDrained { standby: export.name.clone() })
    }
}

/// Checks the settings of an export from a command.
fn check_settings(spec: &mut ExportSpec, search_path: &SearchSpec) -> Result<(), String> {
    let checked = validate_export(spec).and_then(|()| check_below(spec, search_path));
    checked.map_err(|error| error.chain().to_string())
}

/// Result of removing an export that these sessions had open.
fn removed(name: &str, users: Vec<ExportUser>, revoked: Vec<Revoked>) -> Removed {
    let name_of = |user: &ExportUser| user.name.clone().unwrap_or_else(|| user.session.clone());
    Removed {
        removed: name.to_owned(),
        ended: users.iter().map(name_of).collect(),
        users,
        revoked,
        needs_force: false,
        lost: None,
        not_closed: None,
        saved: None,
    }
}
