//! Further attempts to open failed exports.
//!
//! A start serves what can be opened. A thread has the other exports opened, each on a thread of
//! its own ([`super::attempts`]), until the last of them is served or removed. Meanwhile opens of
//! these names are refused with ENOENT, as a kernel server refuses a missing device: attached
//! clients wait, and `rtrs-client attach --retry-for` tries again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Exports;
use super::attempts::Opened;
use super::failed::{ATTEMPT_MAX, HANGS};
use super::open_error::OpenError;
use crate::audit::{AuditEvent, AuditKind, AuditResult};
use crate::control_protocol::{Kept, Reloaded};
use crate::export::Export;
use crate::plan::{check_below, check_export};
use crate::settings::ExportSpec;

/// Time that the retry thread waits for the lock for changes of exports; then it tries again.
const TURN_MAX: Duration = Duration::from_secs(1);

/// Starts to open the target of a failed export, after the checks of a start. Returns false if an
/// attempt with the same settings exists.
fn begin_attempt(exports: &Exports, spec: &ExportSpec) -> Result<bool, String> {
    let (opener, search_path) = (Arc::clone(&exports.opener), exports.set.search_path.clone());
    exports.attempts.begin(spec, move |spec| {
        let checked = check_export(spec).and_then(|()| check_below(spec, &search_path));
        let opened = checked.and_then(|()| opener.open(spec));
        opened.map(Arc::new).map_err(|error| OpenError::new(&error))
    })
}

/// Opens the target of a failed export whose attempt has begun. `is_new` is whether it has just
/// begun: an older one may have failed for a reason that is gone.
fn open(exports: &Exports, spec: &ExportSpec, is_new: bool, until: Instant) -> Opened {
    let take = || exports.attempts.take(spec, until).unwrap_or_else(|| Err(HANGS.into()));
    let opened = take();
    if opened.is_ok() || is_new || exports.attempts.is_running(spec) {
        return opened;
    }
    begin_attempt(exports, spec)?;
    take()
}

/// Opens and exports the target of a failed export with these settings, or records them with the
/// reason of the failure. The caller holds the lock for changes of exports.
pub(super) fn open_now(exports: &Exports, spec: &ExportSpec) -> Result<(), OpenError> {
    let until = Instant::now() + ATTEMPT_MAX;
    let begun = begin_attempt(exports, spec).map_err(OpenError::from);
    let opened = begun.and_then(|is_new| open(exports, spec, is_new, until));
    opened.and_then(|export| serve(exports, spec, &export)).inspect_err(|why| {
        exports.failed.put(spec.clone(), why.clone());
    })
}

/// Exports an opened target. The caller holds the lock for changes of exports.
fn serve(exports: &Exports, spec: &ExportSpec, export: &Arc<Export>) -> Result<(), OpenError> {
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
pub(in crate::daemon) fn begin(exports: &Exports, failures: Vec<(ExportSpec, OpenError)>) {
    for (spec, why) in failures {
        tracing::error!(
            export = spec.name(),
            "export failed; {} (with --strict it would not start): {why}",
            why.next_attempt()
        );
        record(exports, &spec, AuditResult::Refused, Some(why.why.clone()));
        let is_running = exports.attempts.is_running(&spec);
        exports.failed.put(spec.clone(), why);
        if is_running {
            exports.failed.started(&spec);
        }
    }
}

/// Adds an export that a change has closed and that could not be opened again.
pub(in crate::daemon) fn note_failed(exports: &Exports, spec: ExportSpec, why: OpenError) {
    tracing::error!(export = spec.name(), "export failed; {}: {why}", why.next_attempt());
    record(exports, &spec, AuditResult::Refused, Some(why.why.clone()));
    exports.failed.put(spec, why);
}

/// Starts to open the failed exports whose next attempt is due, and exports those that are open.
/// Returns the time until the next attempt, or `None` if no failed export is left.
pub(in crate::daemon) fn try_due(exports: &Exports) -> Option<Duration> {
    for spec in exports.failed.due(Instant::now()) {
        if exports.attempts.is_running(&spec) {
            failed_again(exports, &spec, HANGS.into());
            continue;
        }
        exports.failed.started(&spec);
        if let Err(why) = begin_attempt(exports, &spec) {
            failed_again(exports, &spec, why.into());
        }
    }
    for spec in exports.attempts.ended() {
        settle(exports, &spec);
    }
    exports.failed.wait(Instant::now())
}

/// Exports the opened target of an attempt that has ended, or records its failure.
fn settle(exports: &Exports, spec: &ExportSpec) {
    // Without the lock, the result stays for the next attempt.
    let Some(_turn) = exports.changing.try_lock_for(TURN_MAX) else { return };
    // A command or reload may have taken the result meanwhile.
    let Some(opened) = exports.attempts.take(spec, Instant::now()) else { return };
    // One may also have removed or changed the export.
    if !exports.failed.has(spec) {
        return;
    }
    if let Err(why) = opened.and_then(|export| serve(exports, spec, &export)) {
        failed_again(exports, spec, why);
    }
}

fn failed_again(exports: &Exports, spec: &ExportSpec, why: OpenError) {
    let (text, next) = (why.why.clone(), why.next_attempt());
    if exports.failed.failed_again(spec, why) {
        tracing::warn!(export = spec.name(), "export cannot be opened yet: {text}; {next}");
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
        exports.attempts.abandon(&name);
        exports.forget_access(&name);
        done.removed.push(name);
    }
    // All attempts begin before the first is awaited: several targets may hang.
    let until = Instant::now() + ATTEMPT_MAX;
    let begun: Vec<_> = wanted.iter().map(|spec| begin_attempt(exports, spec)).collect();
    for (spec, begun) in wanted.into_iter().zip(begun) {
        let name = spec.name().to_owned();
        let begun = begun.map_err(OpenError::from);
        let opened = begun.and_then(|is_new| open(exports, &spec, is_new, until));
        match opened.and_then(|export| serve(exports, &spec, &export)) {
            Ok(()) => done.added.push(name),
            Err(why) => {
                exports.failed.put(spec, why.clone());
                done.failed.push(Kept { name, why: why.why });
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
        let try_again = || {
            begin_attempt(&exports, &spec).unwrap();
            exports.attempts.wait(Duration::from_secs(30));
            settle(&exports, &spec);
        };
        try_again();
        let why = exports.failed.snapshots().remove(0).reason.unwrap();
        assert!(why.contains("does not exist") && !why.contains("truncate"), "{why}");
        assert!(table.is_failed(b"vol0") && table.find(b"vol0").is_none());
        assert_eq!(
            exports.save().exports,
            std::slice::from_ref(&spec),
            "it is not lost from the configuration"
        );
        std::fs::File::create(&path).unwrap().set_len(4096).unwrap();
        try_again();
        assert!(!table.is_failed(b"vol0") && table.find(b"vol0").is_some());
        assert!(exports.entry("vol0").is_some_and(|entry| entry.configured));
        assert_eq!(try_due(&exports), None, "the thread ends");
        drop(exports);
        table.clear();
        let _ = std::fs::remove_dir_all(&dir);
    }
}
