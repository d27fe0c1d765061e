//! Further attempts to open failed exports.
//!
//! A start serves what can be opened. A thread tries to open the other exports until the last of
//! them is served or removed; opening may block, so it never runs on a shard. Meanwhile opens of
//! these names are refused with ENOENT, as a missing device is by a kernel server: attached clients
//! wait, and `rtrs-client attach --retry-for` tries again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Exports;
use crate::audit::{AuditEvent, AuditKind, AuditResult};
use crate::control_protocol::{Kept, Reloaded};
use crate::export::Export;
use crate::plan::{check_below, check_export};
use crate::settings::ExportSpec;

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
        match check_export(spec).and_then(|()| check_below(spec, &exports.set.search_path)) {
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
    use crate::export::ExportTable;
    use crate::settings::Settings;
    use crate::state::StateDir;

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
