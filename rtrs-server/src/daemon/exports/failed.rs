//! Exports of the configuration that could not be opened.
//!
//! A start serves what can be opened. A thread tries to open the other exports until the last of
//! them is served or removed; opening may block, so it never runs on a shard. Meanwhile opens of
//! these names are refused with ENOENT, as a missing device is by a kernel server: attached clients
//! wait, and `rtrs-client attach --retry-for` tries again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Exports;
use crate::audit::{AuditEvent, AuditKind, AuditResult};
use crate::control_protocol::{Kept, Reloaded};
use crate::export::{Export, ExportTable};
use crate::plan::{check_below, check_export};
use crate::settings::ExportSpec;
use crate::stats::{ExportIo, ExportSnapshot, ExportState};

/// Time until the first further attempt; doubled after each failure.
const DELAY_MIN: Duration = Duration::from_secs(1);
/// Maximum time between attempts.
const DELAY_MAX: Duration = Duration::from_secs(30);

/// An export that could not be opened.
#[derive(Clone, Debug)]
struct Failed {
    spec: ExportSpec,
    why: String,
    /// Time between the last attempt and the next one.
    delay: Duration,
    /// Time of the next attempt.
    next: Instant,
}

impl Failed {
    fn new(spec: ExportSpec, why: String, now: Instant) -> Self {
        Self { spec, why, delay: DELAY_MIN, next: now + DELAY_MIN }
    }

    /// Records another failure. Returns whether the reason is a new one.
    fn again(&mut self, why: String, now: Instant) -> bool {
        self.delay = (self.delay * 2).min(DELAY_MAX);
        self.next = now + self.delay;
        let is_new = self.why != why;
        self.why = why;
        is_new
    }

    fn snapshot(&self) -> ExportSnapshot {
        ExportSnapshot {
            name: self.spec.name().to_owned(),
            backing: self.spec.target.to_string(),
            size: 0,
            block_size: 0,
            read_only: self.spec.ro,
            id: None,
            state: ExportState::Failed,
            found: false,
            open_by: Vec::new(),
            device_errors: 0,
            io: ExportIo::default(),
            epoch: 0,
            access: Vec::new(),
            access_limit: None,
            reason: Some(self.why.clone()),
        }
    }
}

/// Failed exports by name. The export table knows their names.
#[derive(Debug)]
pub(super) struct FailedExports {
    table: Arc<ExportTable>,
    all: Mutex<BTreeMap<String, Failed>>,
}

impl FailedExports {
    pub(super) fn new(table: &Arc<ExportTable>) -> Self {
        Self { table: Arc::clone(table), all: Mutex::default() }
    }

    /// Adds a failed export, or replaces its settings.
    fn put(&self, spec: ExportSpec, why: String) {
        self.table.set_failed(spec.name(), true);
        let failed = Failed::new(spec, why, Instant::now());
        self.all.lock().insert(failed.spec.name().to_owned(), failed);
    }

    /// Removes a failed export. Returns false if there is none of this name.
    pub(super) fn remove(&self, name: &str) -> bool {
        let removed = self.all.lock().remove(name).is_some();
        if removed {
            self.table.set_failed(name, false);
        }
        removed
    }

    /// Settings of all failed exports, by name.
    pub(super) fn specs(&self) -> BTreeMap<String, ExportSpec> {
        let all = self.all.lock();
        all.iter().map(|(name, failed)| (name.clone(), failed.spec.clone())).collect()
    }

    /// Descriptions for `export list`.
    pub(super) fn snapshots(&self) -> Vec<ExportSnapshot> {
        self.all.lock().values().map(Failed::snapshot).collect()
    }

    /// Whether an export with exactly these settings has failed.
    fn has(&self, spec: &ExportSpec) -> bool {
        self.all.lock().get(spec.name()).is_some_and(|failed| failed.spec == *spec)
    }

    /// Exports whose next attempt is due.
    fn due(&self, now: Instant) -> Vec<ExportSpec> {
        let all = self.all.lock();
        let due = all.values().filter(|failed| failed.next <= now);
        due.map(|failed| failed.spec.clone()).collect()
    }

    /// Time until the next attempt; `None` without failed exports.
    fn wait(&self, now: Instant) -> Option<Duration> {
        let all = self.all.lock();
        all.values().map(|failed| failed.next.saturating_duration_since(now)).min()
    }

    /// Records a failed attempt, unless the export was removed or changed meanwhile. Returns
    /// whether the reason is a new one.
    fn failed_again(&self, spec: &ExportSpec, why: String) -> bool {
        let mut all = self.all.lock();
        let failed = all.get_mut(spec.name()).filter(|failed| failed.spec == *spec);
        failed.is_some_and(|failed| failed.again(why, Instant::now()))
    }
}

/// Opens the target of a failed export, after the checks of a start.
fn open(exports: &Exports, spec: &ExportSpec) -> Result<Arc<Export>, String> {
    let checked = check_export(spec).and_then(|()| check_below(spec, &exports.set.search_path));
    let opened = checked.and_then(|()| exports.opener.open(spec));
    opened.map(Arc::new).map_err(|error| error.chain().to_string())
}

/// Exports an opened target. The caller holds the lock for changes of exports.
fn serve(exports: &Exports, spec: &ExportSpec, export: &Arc<Export>) -> Result<(), String> {
    exports.publish(spec, export, true)?;
    exports.failed.remove(spec.name());
    tracing::info!(export = spec.name(), "failed export opened; it is served now");
    record(exports, spec, AuditResult::Ok, None);
    Ok(())
}

fn record(exports: &Exports, spec: &ExportSpec, result: AuditResult, reason: Option<String>) {
    let export = Some(spec.name().to_owned());
    let event = AuditEvent::new(AuditKind::ExportOpen, result);
    exports.audit.record(|| AuditEvent { export, reason, ..event });
}

/// Adds the exports that a start could not open.
pub(in crate::daemon) fn begin(exports: &Exports, failures: Vec<(ExportSpec, String)>) {
    for (spec, why) in failures {
        tracing::error!(
            export = spec.name(),
            "export failed; the server tries again (with --strict it would not start): {why}"
        );
        record(exports, &spec, AuditResult::Refused, Some(why.clone()));
        exports.failed.put(spec, why);
    }
}

/// Tries to open the failed exports whose next attempt is due. Returns the time until the next
/// attempt, or `None` if no failed export is left.
pub(in crate::daemon) fn try_due(exports: &Exports) -> Option<Duration> {
    for spec in exports.failed.due(Instant::now()) {
        try_again(exports, &spec);
    }
    exports.failed.wait(Instant::now())
}

fn try_again(exports: &Exports, spec: &ExportSpec) {
    // Opened before the lock is taken, because a target may block for long.
    let served = open(exports, spec).and_then(|export| {
        let _turn = exports.begin()?;
        // A command or reload may have removed or changed the export meanwhile.
        if exports.failed.has(spec) { serve(exports, spec, &export) } else { Ok(()) }
    });
    if let Err(why) = served {
        let text = why.clone();
        if exports.failed.failed_again(spec, why) {
            tracing::warn!(export = spec.name(), "export cannot be opened yet: {text}");
        }
    }
}

/// Adapts the failed exports to a configuration: `wanted` are those that it still names, which are
/// tried at once. The caller holds the lock for changes of exports.
pub(in crate::daemon) fn reconfigure(
    exports: &Exports,
    wanted: Vec<ExportSpec>,
    done: &mut Reloaded,
) {
    for name in unwanted(exports, &wanted) {
        exports.failed.remove(&name);
        exports.forget_access(&name);
        done.removed.push(name);
    }
    for spec in wanted {
        let name = spec.name().to_owned();
        match open(exports, &spec).and_then(|export| serve(exports, &spec, &export)) {
            Ok(()) => done.added.push(name),
            Err(why) => {
                exports.failed.put(spec, why.clone());
                done.failed.push(Kept { name, why });
            }
        }
    }
}

/// Reports what [`reconfigure`] would do. Targets are checked, but not opened.
pub(in crate::daemon) fn preview(exports: &Exports, wanted: &[ExportSpec], done: &mut Reloaded) {
    done.removed.extend(unwanted(exports, wanted));
    for spec in wanted {
        let name = spec.name().to_owned();
        match check_export(spec) {
            Ok(()) => done.added.push(name),
            Err(error) => done.failed.push(Kept { name, why: error.chain().to_string() }),
        }
    }
}

/// Failed exports that a configuration does not name.
fn unwanted(exports: &Exports, wanted: &[ExportSpec]) -> Vec<String> {
    let mut left = exports.failed.specs();
    wanted.iter().for_each(|spec| drop(left.remove(spec.name())));
    left.into_keys().collect()
}

/// Splits exports of a configuration into those that have failed so far and the others.
pub(in crate::daemon) fn partition(
    exports: &Exports,
    wanted: Vec<ExportSpec>,
) -> (Vec<ExportSpec>, Vec<ExportSpec>) {
    let failed = exports.failed.specs();
    wanted.into_iter().partition(|spec| failed.contains_key(spec.name()))
}

#[cfg(test)]
mod tests {
    use super::super::Opener;
    use super::*;
    use crate::audit::AuditSink;
    use crate::daemon::control_shard::ControlShard;
    use crate::daemon::identity::Sources;
    use crate::settings::Settings;
    use crate::state::StateDir;

    fn failed(table: &Arc<ExportTable>) -> (FailedExports, ExportSpec) {
        let spec: ExportSpec = "vol0=/none".parse().unwrap();
        let all = FailedExports::new(table);
        all.put(spec.clone(), "missing".into());
        (all, spec)
    }

    #[test]
    fn attempts_become_rarer_up_to_a_bound() {
        let (spec, mut now) = ("v=/none".parse().unwrap(), Instant::now());
        let mut failed = Failed::new(spec, "missing".into(), now);
        let mut waits = Vec::new();
        for _ in 0..7 {
            waits.push((failed.next - now).as_secs());
            now = failed.next;
            assert!(!failed.again("missing".into(), now));
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
        assert!(failed.again("locked".into(), now), "another reason is logged");
    }

    #[test]
    fn the_table_knows_failed_names_until_they_are_served_or_removed() {
        let table = ExportTable::new(Vec::new());
        let (all, spec) = failed(&table);
        assert!(table.is_failed(b"vol0") && table.is_failed(b"//vol0"));
        assert!(!table.is_failed(b"vol1"));
        let listed = all.snapshots();
        assert_eq!((listed.len(), listed[0].state), (1, ExportState::Failed));
        assert_eq!(listed[0].reason.as_deref(), Some("missing"));
        assert!(all.has(&spec) && all.remove("vol0") && !all.remove("vol0"));
        assert!(!table.is_failed(b"vol0") && all.wait(Instant::now()).is_none());
    }

    #[test]
    fn changed_settings_are_not_served_by_an_old_attempt() {
        let (all, old) = failed(&ExportTable::new(Vec::new()));
        let new: ExportSpec = "vol0=/none,ro".parse().unwrap();
        all.put(new.clone(), "missing".into());
        assert!(!all.has(&old) && all.has(&new));
        assert!(!all.failed_again(&old, "other".into()));
        assert_eq!(all.snapshots()[0].reason.as_deref(), Some("missing"));
        assert!(all.due(Instant::now()).is_empty());
        assert_eq!(all.due(Instant::now() + DELAY_MIN), [new]);
    }

    #[test]
    fn a_file_is_served_once_it_appears() {
        let dir = std::env::temp_dir().join(format!("rtrs-failed-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("late.img");
        let spec: ExportSpec = format!("vol0={}", path.display()).parse().unwrap();
        let (control, _inbox) = rtrs_core::rt::mailbox().unwrap();
        let state = Arc::new(StateDir::open(Some(&dir), None));
        let opener = Arc::new(Opener::new(Sources::system(), state));
        let (table, set) = (ExportTable::new(Vec::new()), Settings::default());
        let (control, audit) = (ControlShard(control), AuditSink::default());
        let exports = Exports::new(Arc::clone(&table), opener, control, None, &set, audit);
        begin(&exports, vec![(spec.clone(), "first reason".into())]);
        try_again(&exports, &spec);
        let why = exports.failed.snapshots().remove(0).reason.unwrap();
        assert!(why.contains("does not exist") && !why.contains("truncate"), "{why}");
        assert!(table.is_failed(b"vol0") && table.find(b"vol0").is_none());
        assert_eq!(
            exports.save().exports,
            std::slice::from_ref(&spec),
            "it is not lost from the configuration"
        );
        std::fs::File::create(&path).unwrap().set_len(4096).unwrap();
        try_again(&exports, &spec);
        assert!(!table.is_failed(b"vol0") && table.find(b"vol0").is_some());
        assert!(exports.entry("vol0").is_some_and(|entry| entry.configured));
        assert_eq!(try_due(&exports), None, "the thread ends");
        drop(exports);
        table.clear();
        let _ = std::fs::remove_dir_all(&dir);
    }
}
