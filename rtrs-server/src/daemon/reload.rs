//! `reload`: reads the configuration again and makes of the exports what it says now.
//!
//! Owns [`Reload`]. Nothing changes if the configuration, a certificate or a key is wrong; but for
//! a certificate of the server that is in use already, and has expired meanwhile. Who may do what
//! is applied first, and waits for nothing: no disk, no export and no other change delays the end
//! of those who may no longer. Then the exports follow, unless one that is new cannot be opened;
//! the error says what was applied before. An export that is open is neither removed nor changed,
//! only reported. Exports that a command has added stay, unless the configuration names them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::settings::{print, printable};
use rtrs_core::tls::{TlsEndpoint, TlsServerConfig};

use crate::audit::{AuditEvent, AuditKind, AuditResult, AuditSink};
use crate::control_protocol::{Kept, Reloaded};
use crate::daemon::exports::{Entry, Exports, RELEASE_MAX, check};
use crate::daemon::warnings::{warn, warnings};
use crate::error::Error;
use crate::plan::{Plan, check_below, read_tls, unusable};
use crate::settings::{ExportSpec, Settings, Target};
use crate::stats::Access;

/// Reads flags and configuration file again.
pub type Reread = Box<dyn Fn() -> Result<Plan, Error> + Send + Sync>;

/// Settings that a reload applies.
const APPLIED: [&str; 4] = ["access", "export", "exports-dir", "insecure-open"];

/// Settings whose exports are to be applied yet, the exports before, and those of them whose access
/// list is another one now.
type Left = (Settings, BTreeMap<String, Entry>, Vec<String>);

/// What was read: settings, certificates or keys, and what is different.
type Read = (Option<Settings>, Option<TlsServerConfig>, Reloaded);

/// Certificates or keys, and what is wrong with the certificate that is in use.
type ReadTls = (TlsServerConfig, Option<String>);

/// What a reload compares with.
pub(super) struct Reload {
    /// None when the server has no configuration file.
    reread: Option<Reread>,
    running: Settings,
    audit: AuditSink,
    /// With certificates or keys.
    tls: Option<Arc<TlsEndpoint>>,
    /// Taken while something is read and who may do what is applied, so that the last to be read is
    /// the last to be applied.
    reading: Mutex<()>,
}

impl Reload {
    pub(super) fn new(
        running: &Settings,
        reread: Option<Reread>,
        audit: AuditSink,
        tls: Option<Arc<TlsEndpoint>>,
    ) -> Self {
        Self { reread, running: running.clone(), audit, tls, reading: Mutex::default() }
    }

    /// Reads certificates, keys and the list of clients again; None without them. A certificate
    /// that is bad is refused, unless it is the one in use.
    fn read_tls(&self) -> Result<Option<ReadTls>, String> {
        let Some(endpoint) = &self.tls else { return Ok(None) };
        let read = read_tls(&self.running).and_then(|config| {
            let Some(config) = config else { return Ok(None) };
            let wrong = endpoint.check_renewed(&config).map_err(unusable)?;
            Ok(Some((config, wrong)))
        });
        read.map_err(|error| format!("nothing changed: {}", error.chain()))
    }

    /// Reads the configuration and applies what differs.
    pub(super) fn run(&self, exports: &Exports) -> Result<Reloaded, String> {
        let done = self.apply(exports);
        let result = if done.is_ok() { AuditResult::Ok } else { AuditResult::Refused };
        let reason = done.as_ref().err().cloned();
        let reason = reason.or_else(|| done.as_ref().ok().and_then(summary));
        self.audit.record(|| AuditEvent { reason, ..AuditEvent::new(AuditKind::Reload, result) });
        done
    }

    fn apply(&self, exports: &Exports) -> Result<Reloaded, String> {
        let (left, mut done) = self.apply_access(exports)?;
        // They look at files and users, for which nobody who is to be ended has to wait.
        let mut all: Vec<String> = done.certificate.iter().cloned().collect();
        all.extend(warnings(left.as_ref().map_or(&self.running, |(set, ..)| set)));
        warn(all);
        let Some((set, before, lists)) = left else {
            return Ok(Reloaded { unchanged: exports.entries().len(), ..done });
        };
        let turn = exports.begin();
        let applied = turn.and_then(|_turn| apply(exports, (set.export, &before), &mut done));
        applied.map_err(|why| refused(&why, &done, &lists))?;
        tracing::info!(
            added = done.added.len(),
            removed = done.removed.len(),
            changed = done.changed.len(),
            kept = done.kept.len(),
            failed = done.failed.len(),
            "configuration read again"
        );
        for Kept { name, why } in done.kept.iter().chain(&done.failed) {
            tracing::warn!(%name, "not as the configuration says: {why}");
        }
        if !done.restart.is_empty() {
            tracing::warn!("these settings need a restart: {}", done.restart.join(", "));
        }
        Ok(done)
    }

    /// Reads all again, and applies who may do what. Returns what was done, and what is left to do:
    /// nothing for a server that has only certificates or keys to read again.
    fn apply_access(&self, exports: &Exports) -> Result<(Option<Left>, Reloaded), String> {
        let _reading = self.reading.lock();
        let (wanted, renewed, mut done) = self.read(exports)?;
        let before = exports.entries();
        if let (Some(endpoint), Some(config)) = (&self.tls, renewed) {
            warn(endpoint.older_lists(&config));
            exports.replace_keys(endpoint, config);
            let changed = done.keys_changed.join(", ");
            tracing::info!(changed, "certificates or keys read again");
        }
        if let Some(set) = &wanted {
            exports.configure_access(set);
        }
        let lists = changed_lists(&before, &exports.entries());
        done.revoked = exports.check_access().map_err(|why| refused(&why, &done, &lists))?;
        Ok((wanted.map(|set| (set, before, lists)), done))
    }

    /// Says what that would do. Targets are looked at, and not opened.
    fn preview(&self, exports: &Exports) -> Result<Reloaded, String> {
        let (wanted, renewed, mut done) = self.read(exports)?;
        done.revoked = exports.preview_access(wanted.as_ref(), renewed.as_ref())?;
        let Some(set) = wanted else {
            return Ok(Reloaded { unchanged: exports.entries().len(), ..done });
        };
        let lists = lists_to_change(&exports.entries(), &set.export);
        let turn = exports.begin();
        let looked = turn.and_then(|_turn| preview(exports, set.export, &mut done));
        looked.map_err(|why| would_be_refused(&why, &done, &lists))?;
        Ok(done)
    }

    /// Reads all that is to be read, and notes what is different: the settings, unless there are
    /// only certificates or keys to read; and these, if there are any.
    fn read(&self, exports: &Exports) -> Result<Read, String> {
        let (renewed, wrong) = self.read_tls()?.unzip();
        let (wanted, mut done) = match (&self.reread, &renewed) {
            (None, Some(_)) => (None, Reloaded::default()),
            _ => self.wanted(exports).map(|(set, done)| (Some(set), done))?,
        };
        if let (Some(endpoint), Some(config)) = (&self.tls, &renewed) {
            done.keys_changed = endpoint.changes_to(config);
            done.certificate = wrong.flatten();
        }
        Ok((wanted, renewed, done))
    }

    /// What the configuration says now, with what needs a restart.
    fn wanted(&self, exports: &Exports) -> Result<(Settings, Reloaded), String> {
        let Some(reread) = &self.reread else {
            return Err("the server has no configuration file to read again; start it with \
                        --config, or use `export add` and `export remove`"
                .to_owned());
        };
        let plan = reread().map_err(|error| format!("nothing changed: {}", error.chain()))?;
        // Of the running server, since only a restart changes it.
        let check = |spec: &ExportSpec| check_below(spec, &self.running.search_path);
        let checked = plan.settings.export.iter().try_for_each(check);
        checked.map_err(|error| format!("nothing changed: {}", error.chain()))?;
        let restart = differences(&self.running, &plan.settings);
        let access_changed = plan.settings.access != exports.access();
        Ok((plan.settings, Reloaded { restart, access_changed, ..Reloaded::default() }))
    }
}

/// Changes of what the server exports.
pub(super) struct Changes {
    pub(super) exports: Exports,
    pub(super) reload: Reload,
}

impl Changes {
    /// Reads the configuration again.
    pub(super) fn reload(&self) -> Result<Reloaded, String> {
        self.reload.run(&self.exports)
    }

    /// Says what a reload would do.
    pub(super) fn preview(&self) -> Result<Reloaded, String> {
        self.reload.preview(&self.exports)
    }
}

/// What the audit log says of a reload: who lost what. None if nobody did.
fn summary(done: &Reloaded) -> Option<String> {
    access_text(done, &[], "lost")
}

/// What is different of keys and access lists, and who `lost` paths by it. None if nothing is.
fn access_text(done: &Reloaded, lists: &[String], lost: &str) -> Option<String> {
    let changes = done.keys_changed.iter().cloned();
    let changes = changes.chain(done.access_changed.then(|| "access list of the server".into()));
    let lists = lists.iter().map(|name| format!("access list of export {name}"));
    let mut parts: Vec<String> = changes.chain(lists).collect();
    if !done.revoked.is_empty() {
        let sessions = done.revoked.iter().map(|one| one.session.as_str()).collect::<Vec<_>>();
        parts.push(format!("sessions that {lost} paths: {}", sessions.join(", ")));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// The error of a reload that changes no export: with what it has done before that.
fn refused(why: &str, done: &Reloaded, lists: &[String]) -> String {
    match access_text(done, lists, "lost") {
        None => format!("nothing changed: {why}"),
        Some(all) => format!("no export changed: {why}; but this was applied: {}", printable(&all)),
    }
}

/// The same for what only looks.
fn would_be_refused(why: &str, done: &Reloaded, lists: &[String]) -> String {
    match access_text(done, lists, "would lose") {
        None => format!("nothing would change: {why}"),
        Some(all) => {
            format!("no export would change: {why}; but this would apply: {}", printable(&all))
        }
    }
}

/// The exports whose access lists are others now.
fn changed_lists(before: &BTreeMap<String, Entry>, now: &BTreeMap<String, Entry>) -> Vec<String> {
    let changed = |(name, entry): &(&String, &Entry)| {
        now.get(*name).is_some_and(|now| now.spec.access != entry.spec.access)
    };
    before.iter().filter(changed).map(|(name, _)| name.clone()).collect()
}

/// The exports whose access lists a configuration changes. One that left it has none.
fn lists_to_change(have: &BTreeMap<String, Entry>, wanted: &[ExportSpec]) -> Vec<String> {
    let changes = |(name, entry): &(&String, &Entry)| match wanted
        .iter()
        .find(|spec| spec.name() == name.as_str())
    {
        Some(spec) => spec.access != entry.spec.access,
        None => entry.configured && !entry.spec.access.is_empty(),
    };
    have.iter().filter(changes).map(|(name, _)| name.clone()).collect()
}

/// The settings that differ and that only a restart applies.
fn differences(running: &Settings, wanted: &Settings) -> Vec<String> {
    let (before, after) = (print(running), print(wanted));
    let differs = before.iter().filter(|(name, value)| after.get(name) != Some(value));
    let names = differs.filter_map(|(name, _)| name.as_str());
    names.filter(|name| !APPLIED.contains(name)).map(str::to_owned).collect()
}

/// What is to be done with the exports that there are.
struct Difference {
    added: Vec<ExportSpec>,
    removed: Vec<String>,
    changed: Vec<(Entry, ExportSpec)>,
    /// As they are; a command may have added them.
    same: Vec<String>,
}

impl Difference {
    fn new(wanted: Vec<ExportSpec>, mut have: BTreeMap<String, Entry>) -> Self {
        let mut all =
            Self { added: Vec::new(), removed: Vec::new(), changed: Vec::new(), same: Vec::new() };
        for spec in wanted {
            match have.remove(spec.name()) {
                None => all.added.push(spec),
                Some(entry) if entry.spec == spec => all.same.push(spec.name().to_owned()),
                Some(entry) => all.changed.push((entry, spec)),
            }
        }
        let gone = have.into_iter().filter(|(_, entry)| entry.configured);
        all.removed = gone.map(|(name, _)| name).collect();
        all
    }
}

/// Makes the exports what is wanted. After an error they are as they were.
fn apply(
    exports: &Exports,
    (wanted, before): (Vec<ExportSpec>, &BTreeMap<String, Entry>),
    done: &mut Reloaded,
) -> Result<(), String> {
    let have = exports.entries();
    let list = |all: &BTreeMap<String, Entry>, name: &str| Some(all.get(name)?.spec.access.clone());
    let mut leaving = BTreeSet::new();
    let Difference { added, removed, changed, same } = Difference::new(wanted, have.clone());
    let leaves = removed.iter().filter_map(|name| have.get(name).map(|entry| &entry.spec));
    for spec in leaves.chain(changed.iter().map(|(entry, _)| &entry.spec)) {
        if let Target::Path(path) = &spec.target {
            leaving.insert(path.clone());
        }
    }
    for spec in added.iter().chain(changed.iter().map(|(_, spec)| spec)) {
        check(&mut spec.clone())?;
    }
    // What is locked by an export that leaves can be opened only after that.
    let is_later =
        |spec: &ExportSpec| matches!(&spec.target, Target::Path(path) if leaving.contains(path));
    let (later, now): (Vec<_>, Vec<_>) = added.into_iter().partition(is_later);
    let opened = now.iter().map(|spec| exports.open(spec)).collect::<Result<Vec<_>, _>>()?;
    for (spec, export) in now.iter().zip(opened) {
        note_added(done, spec.name(), exports.publish(spec, &export, true));
    }
    let mut released = Vec::new();
    for name in removed {
        match exports.unpublish(&name, false) {
            Ok((export, _)) => {
                released.push(export);
                done.removed.push(name);
            }
            Err((why, _)) => done.kept.push(Kept { name, why }),
        }
    }
    if let Err(why) = exports.release(released, RELEASE_MAX) {
        done.failed.push(Kept { name: String::new(), why });
    }
    for (entry, mut spec) in changed {
        // Applied already, and perhaps by a later reload.
        spec.access.clone_from(&entry.spec.access);
        let name = spec.name();
        match exports.change(&entry, &spec) {
            Ok(_) => {
                exports.note_configured(name);
                done.changed.push(name.to_owned());
            }
            Err(why) if exports.entry(name).is_some_and(|entry| entry.spec != spec) => {
                done.kept.push(Kept { name: name.to_owned(), why });
            }
            Err(why) => done.failed.push(Kept { name: name.to_owned(), why }),
        }
    }
    for spec in later {
        note_added(done, spec.name(), exports.open_new(&spec, true));
    }
    for name in same {
        exports.note_configured(&name);
        match list(before, &name) == list(&have, &name) {
            true => done.unchanged += 1,
            false => done.changed.push(name),
        }
    }
    Ok(())
}

fn preview(exports: &Exports, wanted: Vec<ExportSpec>, done: &mut Reloaded) -> Result<(), String> {
    let Difference { added, removed, changed, same } = Difference::new(wanted, exports.entries());
    for spec in added.iter().chain(changed.iter().map(|(_, spec)| spec)) {
        check(&mut spec.clone())?;
    }
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
    let kept =
        |name: &str, how: &str| Kept { name: name.to_owned(), why: format!("it is open{how}") };
    for name in removed {
        match open.get(&name) {
            Some(_) => done.kept.push(kept(&name, "")),
            None => done.removed.push(name),
        }
    }
    for (entry, spec) in changed {
        let name = spec.name();
        let freezes = spec.ro && !entry.spec.ro;
        match (entry.stays_open(&spec), open.get(name)) {
            (true, Some(true)) if freezes => done.kept.push(kept(name, " for writing")),
            (false, Some(_)) => done.kept.push(kept(name, "")),
            (false, None) => match entry.keeps_memory(&spec) {
                Ok(()) => done.changed.push(name.to_owned()),
                Err(why) => done.kept.push(Kept { name: name.to_owned(), why }),
            },
            _ => done.changed.push(name.to_owned()),
        }
    }
    done.added = added.iter().map(|spec| spec.name().to_owned()).collect();
    done.unchanged = same.len();
    Ok(())
}

fn note_added(done: &mut Reloaded, name: &str, added: Result<(), String>) {
    let name = name.to_owned();
    match added {
        Ok(()) => done.added.push(name),
        Err(why) => done.failed.push(Kept { name, why }),
    }
}
