//! Changes the exports to match a configuration, or previews the changes.

use std::collections::BTreeMap;

use crate::access_list::ListChange;
use crate::control_protocol::{Kept, Reloaded};
use crate::daemon::exports::change::{Applied, Begun};
use crate::daemon::exports::{
    Entry, Exports, Followed, LAST_COPY_HINT, OpenError, RELEASE_MAX, check_all, recovery,
};
use crate::daemon::warnings::warn;
use crate::settings::{ExportSpec, OnMissing, Target};
use crate::stats::{Access, TRIES_AGAIN};

/// Changes between the current and the wanted exports.
struct Difference {
    added: Vec<ExportSpec>,
    removed: Vec<String>,
    changed: Vec<(Entry, ExportSpec)>,
    /// Unchanged exports; a command may have added them.
    same: Vec<String>,
    /// Targets of the exports that are to be removed or changed.
    leaving: Vec<Target>,
    /// Wanted exports that have failed so far.
    failed: Vec<ExportSpec>,
    /// Failed exports that are no longer wanted.
    unwanted: Vec<String>,
}

impl Difference {
    /// Compares the exports. Call before any change, because changes may make exports fail.
    fn new(exports: &Exports, wanted: Vec<ExportSpec>) -> Self {
        exports.targets.examine_all();
        let unwanted = recovery::unwanted(exports, &wanted);
        let (failed, wanted) = recovery::partition(exports, wanted);
        let mut have = exports.entries();
        let (mut added, mut changed, mut same) = (Vec::new(), Vec::new(), Vec::new());
        for spec in wanted {
            match have.remove(spec.name()) {
                None => added.push(spec),
                Some(entry) if entry.spec == spec => same.push(spec.name().to_owned()),
                Some(entry) => changed.push((entry, spec)),
            }
        }
        have.retain(|_, entry| entry.configured);
        let leaving = have.values().chain(changed.iter().map(|(entry, _)| entry));
        let leaving = leaving.map(|entry| entry.spec.target.clone()).collect();
        let removed = have.into_keys().collect();
        Self { added, removed, changed, same, leaving, failed, unwanted }
    }
}

/// Exports of a configuration.
pub(super) struct Wanted {
    pub(super) exports: Vec<ExportSpec>,
    /// Whether the last copies of deleted files may be closed.
    pub(super) force: bool,
    /// Action for new exports that cannot be opened.
    pub(super) on_missing: OnMissing,
}

/// New exports that cannot be opened, with the reasons.
struct Missing {
    on_missing: OnMissing,
    exports: Vec<(ExportSpec, OpenError)>,
}

impl Missing {
    /// Adds an export, or refuses the reload.
    fn add(&mut self, spec: ExportSpec, why: OpenError) -> Result<(), String> {
        if self.on_missing == OnMissing::Refuse {
            return Err(why.why);
        }
        self.exports.push((spec, why));
        Ok(())
    }

    /// Splits exports by the results of their checks or opens.
    fn sort<T>(
        &mut self,
        specs: Vec<ExportSpec>,
        results: impl IntoIterator<Item = Result<T, OpenError>>,
    ) -> Result<Vec<(ExportSpec, T)>, String> {
        let mut good = Vec::new();
        for (spec, result) in specs.into_iter().zip(results) {
            match result {
                Ok(result) => good.push((spec, result)),
                Err(why) => self.add(spec, why)?,
            }
        }
        Ok(good)
    }
}

/// Changes the exports to match the wanted ones. On error, they remain unchanged.
pub(super) fn apply(exports: &Exports, wanted: Wanted, done: &mut Reloaded) -> Result<(), String> {
    let Wanted { exports: wanted, force, on_missing } = wanted;
    let Difference { added, removed, changed, same, leaving, failed, unwanted } =
        Difference::new(exports, wanted);
    // A later reload may apply its access lists before they are published.
    let _lists: Vec<_> =
        added.iter().map(|spec| exports.entries.unpublished(spec.name(), true)).collect();
    let mut missing = Missing { on_missing, exports: Vec::new() };
    let Checked { added, changed } = checked(added, changed, &mut missing, done)?;
    // A target that a removed export locks can be opened only after its removal.
    let is_later = |spec: &ExportSpec| leaving.contains(&spec.target);
    let (later, now) = added.into_iter().partition::<Vec<_>, _>(is_later);
    let opened = exports.open_all(&now);
    let opened = missing.sort(now, opened)?;
    recovery::remove(exports, unwanted, done);
    for (spec, export) in opened {
        note_added(done, spec.name(), exports.publish(&spec, &export, true));
    }
    for (spec, why) in missing.exports {
        note_missing(exports, spec, why, done);
    }
    remove(exports, removed, force, done);
    change(exports, changed, force, done);
    for (spec, opened) in later.iter().zip(exports.open_all(&later)) {
        match opened.and_then(|export| Ok(exports.publish(spec, &export, true)?)) {
            Ok(()) => done.added.push(spec.name().to_owned()),
            // The export that used the target is already gone.
            Err(why) => note_missing(exports, spec.clone(), why, done),
        }
    }
    recovery::try_now(exports, failed, done);
    same.iter().for_each(|name| exports.entries.note_configured(name));
    let followed = exports.follow_all(&same, force);
    same.into_iter().zip(followed).for_each(|(name, followed)| note_same(done, name, followed));
    Ok(())
}

/// Removes exports that the configuration no longer names. Open exports stay and, unless forced, so
/// do the last copies of deleted files.
fn remove(exports: &Exports, names: Vec<String>, force: bool, done: &mut Reloaded) {
    let mut released = Vec::new();
    for name in names {
        let last_copy = exports.entry(&name).and_then(|entry| entry.last_copy());
        if let Some(why) = last_copy.filter(|_| !force) {
            done.kept.push(Kept { name, why: why + LAST_COPY_HINT });
            continue;
        }
        match exports.unpublish(&name, false) {
            Ok((export, _)) => {
                exports.access.forget(&name);
                released.push(export);
                done.removed.push(name);
            }
            Err((why, _)) => done.kept.push(Kept { name, why }),
        }
    }
    if let Err(why) = exports.opener.release(released, RELEASE_MAX) {
        done.failed.push(Kept { name: String::new(), why });
    }
}

/// Applies changed settings.
fn change(exports: &Exports, changed: Vec<(Entry, ExportSpec)>, force: bool, done: &mut Reloaded) {
    let mut closed = Vec::new();
    for (entry, mut spec) in changed {
        // Already applied, possibly by a later reload.
        spec.access.clone_from(&entry.spec.access);
        match exports.begin_change(&entry, &spec, force) {
            Ok(Begun::Closed(one)) => closed.push(*one),
            Ok(Begun::Unchanged | Begun::Changed(_)) => note_changed(exports, &spec, Ok(()), done),
            Err(why) => note_changed(exports, &spec, Err(why), done),
        }
    }
    for (spec, result) in exports.finish_changes(closed) {
        let result = result.map(|Applied { warnings, .. }| {
            warn(warnings.clone());
            done.warnings.extend(warnings);
        });
        note_changed(exports, &spec, result, done);
    }
}

/// Reports what [`apply`] would do. Targets are checked, but not opened.
pub(super) fn preview(
    exports: &Exports,
    wanted: Wanted,
    done: &mut Reloaded,
) -> Result<(), String> {
    let Wanted { exports: wanted, on_missing, .. } = wanted;
    let Difference { added, removed, changed, same, leaving, failed, unwanted } =
        Difference::new(exports, wanted);
    let mut missing = Missing { on_missing, exports: Vec::new() };
    let Checked { added, changed } = checked(added, changed, &mut missing, done)?;
    let is_later = |spec: &ExportSpec| leaving.contains(&spec.target);
    let (later, now) = added.into_iter().partition::<Vec<_>, _>(is_later);
    let free = recovery::look_at_all(&now);
    let added = missing.sort(now, free)?.into_iter().map(|(spec, ())| spec).chain(later);
    done.added = added.map(|spec| spec.name().to_owned()).collect();
    let missing = missing.exports.into_iter();
    done.failed.extend(missing.map(|(spec, why)| failed_to_add(&spec, &why)));
    let open: BTreeMap<String, bool> = exports
        .list()?
        .exports
        .into_iter()
        .filter(|export| !export.open_by.is_empty())
        .map(|export| {
            let writes = export.open_by.iter().any(|user| user.access != Access::Ro);
            (export.name, writes)
        })
        .collect();
    for name in removed {
        let last_copy = exports.entry(&name).and_then(|entry| entry.last_copy());
        match (open.get(&name), last_copy) {
            (Some(_), _) => done.kept.push(Kept { name, why: "it is open".to_owned() }),
            (None, Some(why)) => done.kept.push(Kept { name, why: why + LAST_COPY_HINT }),
            (None, None) => done.removed.push(name),
        }
    }
    for (entry, spec) in changed {
        let name = spec.name().to_owned();
        let last_copy = entry.last_copy().filter(|_| !entry.stays_open(&spec));
        let last_copy = last_copy.map(|why| why + LAST_COPY_HINT);
        match entry.obstacle(&spec, open.get(&name).copied()).or(last_copy) {
            Some(why) => done.kept.push(Kept { name, why }),
            None => done.changed.push(name),
        }
    }
    done.removed.extend(unwanted);
    recovery::preview(exports, &failed, done);
    for name in same {
        let entry = exports.entry(&name);
        let followed = entry.map_or(Followed::Same, |entry| exports.standing(&entry));
        match followed {
            Followed::Same => done.unchanged += 1,
            Followed::Reopened => done.changed.push(name),
            Followed::Kept(why) | Followed::Orphan(why) => done.kept.push(Kept { name, why }),
            Followed::Failed(why) => done.failed.push(Kept { name, why }),
        }
    }
    Ok(())
}

/// Exports in a configuration whose targets were checked.
struct Checked {
    added: Vec<ExportSpec>,
    changed: Vec<(Entry, ExportSpec)>,
}

/// Checks the targets of new and changed exports. If a target cannot be exported, a new export is
/// added to `missing`; a changed one is recorded as failed and keeps its old options.
fn checked(
    added: Vec<ExportSpec>,
    changed: Vec<(Entry, ExportSpec)>,
    missing: &mut Missing,
    done: &mut Reloaded,
) -> Result<Checked, String> {
    let specs: Vec<ExportSpec> =
        added.iter().chain(changed.iter().map(|(_, spec)| spec)).cloned().collect();
    let mut results = check_all(&specs).into_iter();
    let of_added = results.by_ref().take(added.len()).collect::<Vec<_>>();
    let of_added = of_added.into_iter().map(|result| result.map_err(OpenError::from));
    let added = missing.sort(added, of_added)?.into_iter().map(|(spec, ())| spec).collect();
    let mut usable = Vec::new();
    for ((entry, spec), result) in changed.into_iter().zip(results) {
        // An open export keeps its file, and access can change whatever happens to the file.
        match result {
            Err(why) if !entry.stays_open(&spec) => {
                let why = format!("{why}; the export keeps its old options");
                done.failed.push(Kept { name: spec.name().to_owned(), why });
            }
            _ => usable.push((entry, spec)),
        }
    }
    Ok(Checked { added, changed: usable })
}

/// Records a new export that cannot be opened, so that the server retries it.
fn note_missing(exports: &Exports, spec: ExportSpec, why: OpenError, done: &mut Reloaded) {
    done.failed.push(failed_to_add(&spec, &why));
    recovery::note_failed(exports, spec, true, why);
}

fn failed_to_add(spec: &ExportSpec, why: &OpenError) -> Kept {
    Kept { name: spec.name().to_owned(), why: format!("{why}; {TRIES_AGAIN}") }
}

/// Records the result for an export whose settings are unchanged.
fn note_same(done: &mut Reloaded, name: String, followed: Followed) {
    let changed = |change: &ListChange| change.export.as_deref() == Some(&*name);
    match followed {
        Followed::Kept(why) | Followed::Orphan(why) => done.kept.push(Kept { name, why }),
        Followed::Failed(why) => done.failed.push(Kept { name, why }),
        Followed::Same if !done.access_changed.iter().any(changed) => done.unchanged += 1,
        Followed::Same | Followed::Reopened => done.changed.push(name),
    }
}

/// Records the result for an export whose settings have changed.
fn note_changed(
    exports: &Exports,
    spec: &ExportSpec,
    changed: Result<(), String>,
    done: &mut Reloaded,
) {
    let name = spec.name().to_owned();
    match changed {
        Ok(()) => {
            exports.entries.note_configured(&name);
            done.changed.push(name);
        }
        Err(why) if exports.entry(&name).is_some_and(|entry| entry.spec != *spec) => {
            done.kept.push(Kept { name, why });
        }
        Err(why) => done.failed.push(Kept { name, why }),
    }
}

fn note_added(done: &mut Reloaded, name: &str, added: Result<(), String>) {
    let name = name.to_owned();
    match added {
        Ok(()) => done.added.push(name),
        Err(why) => done.failed.push(Kept { name, why }),
    }
}
