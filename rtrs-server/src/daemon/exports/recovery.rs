//! Further attempts to open failed exports.
//!
//! The server starts with what can be opened. A thread retries the other exports, each on a thread
//! of its own ([`super::attempts`]), until the last failed export is served or removed. In the
//! meantime, opens of these names are refused with ENOENT, as a kernel server refuses a missing
//! device: attached clients wait, and `rtrs-client attach --retry-for` tries again.
//!
//! An image that another program holds is only checked until it has been free for some time: a
//! virtual machine that restarts briefly releases its image, and the server must not take it at
//! that moment. Commands and reloads open it immediately.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Exports;
use super::attempts::Opened;
use super::failed::{ATTEMPT_MAX, HANGS};
use super::in_time::all_in_time;
use super::open_error::{Holder, OpenError};
use super::opener::refused;
use crate::audit::{AuditEvent, AuditKind, AuditResult};
use crate::backend::FileSource;
use crate::control_protocol::{Kept, Reloaded};
use crate::export::Export;
use crate::plan::{check_below, check_export};
use crate::settings::{ExportSpec, Target};
use crate::stats::TRIES_AGAIN;

/// Maximum time that the retry thread waits for an export's turn before it tries again.
const TURN_MAX: Duration = Duration::from_secs(1);

/// Begins to open the target of a failed export, after the same checks as at startup. Returns false
/// if an attempt with the same settings exists.
fn begin_attempt(exports: &Exports, spec: &ExportSpec) -> Result<bool, String> {
    let open = open_checked(exports);
    exports.attempts.begin(spec, open)
}

/// Begins to open the target of an export that has failed for this reason. An image that another
/// program has held is only checked, unless the last check found that it had been released.
fn begin_careful_attempt(
    exports: &Exports,
    spec: &ExportSpec,
    why: OpenError,
) -> Result<bool, String> {
    if why.holder == Holder::None {
        return begin_attempt(exports, spec);
    }
    let open = open_checked(exports);
    exports.attempts.begin(spec, move |spec| match look_at(spec) {
        Image::Held(why) => Err(why),
        Image::Free if why.holder == Holder::Holds => Err(OpenError::let_go(why.why)),
        Image::Free | Image::Unknown => open(spec),
    })
}

/// Returns the function that opens a target after the same checks as at startup.
fn open_checked(exports: &Exports) -> impl FnOnce(&ExportSpec) -> Opened + Send + 'static {
    let (opener, search_path) = (Arc::clone(&exports.opener), exports.set.search_path.clone());
    move |spec| {
        let checked = check_export(spec).and_then(|()| check_below(spec, &search_path));
        let opened = checked.and_then(|()| opener.open(spec));
        opened.map(Arc::new).map_err(|error| OpenError::new(&error))
    }
}

/// State of an image according to its locks.
enum Image {
    Held(OpenError),
    Free,
    /// The state cannot be determined; an attempt to open the image reports the reason.
    Unknown,
}

/// Checks whether another program holds an image, without opening it for the export.
fn look_at(spec: &ExportSpec) -> Image {
    let Target::Path(path) = &spec.target else { return Image::Unknown };
    match FileSource::image_holder(path, spec.ro) {
        Ok(Some(error)) => Image::Held(OpenError::new(&refused(spec, error))),
        Ok(None) => Image::Free,
        Err(_) => Image::Unknown,
    }
}

/// Opens the target of a failed export whose attempt has begun. `is_new` says whether the attempt
/// has just begun: an older attempt may have failed for a reason that no longer applies.
fn open(exports: &Exports, spec: &ExportSpec, is_new: bool, until: Instant) -> Opened {
    let take = || exports.attempts.take(spec, until).unwrap_or_else(|| Err(HANGS.into()));
    let opened = take();
    if opened.is_ok() || is_new || exports.attempts.is_running(spec) {
        return opened;
    }
    begin_attempt(exports, spec)?;
    take()
}

/// Opens and exports the target of a failed export with these settings, or records the settings
/// with the reason for the failure. The caller must hold the export's turn.
pub(super) fn open_now(exports: &Exports, spec: &ExportSpec) -> Result<(), OpenError> {
    let until = Instant::now() + ATTEMPT_MAX;
    let begun = begin_attempt(exports, spec).map_err(OpenError::from);
    let opened = begun.and_then(|is_new| open(exports, spec, is_new, until));
    opened.and_then(|export| serve(exports, spec, &export)).inspect_err(|why| {
        exports.failed.put(spec.clone(), why.clone());
    })
}

/// Exports an opened target. The caller must hold the export's turn.
fn serve(exports: &Exports, spec: &ExportSpec, export: &Arc<Export>) -> Result<(), OpenError> {
    // A reload that adopts access lists finds the export among the served or the failed exports.
    let checking_losses = exports.access.begin_check();
    exports.publish(spec, export, exports.failed.is_configured(spec.name()))?;
    exports.failed.remove(spec.name());
    drop(checking_losses);
    tracing::info!(export = spec.name(), "failed export opened; the server now serves the export");
    record(exports, spec, AuditResult::Ok, None);
    Ok(())
}

fn record(exports: &Exports, spec: &ExportSpec, result: AuditResult, reason: Option<String>) {
    let export = Some(spec.name().to_owned());
    let event = AuditEvent::new(AuditKind::ExportOpen, result);
    exports.audit.record(|| AuditEvent { export, reason, ..event });
}

/// Adds the exports that could not be opened at startup.
pub(in crate::daemon) fn begin(exports: &Exports, failures: Vec<(ExportSpec, OpenError)>) {
    for (spec, why) in failures {
        tracing::error!(
            export = spec.name(),
            "export failed; {TRIES_AGAIN} (with --strict it would not start): {why}"
        );
        record(exports, &spec, AuditResult::Refused, Some(why.why.clone()));
        let is_running = exports.attempts.is_running(&spec);
        exports.failed.put(spec.clone(), why);
        if is_running {
            exports.failed.started(&spec);
        }
    }
}

/// Adds an export that a change has closed and that could not be reopened. `configured` is false if
/// a command had added the export.
pub(in crate::daemon) fn note_failed(
    exports: &Exports,
    spec: ExportSpec,
    configured: bool,
    why: OpenError,
) {
    tracing::error!(export = spec.name(), "export failed; {TRIES_AGAIN}: {why}");
    record(exports, &spec, AuditResult::Refused, Some(why.why.clone()));
    exports.failed.put_as(configured, spec, why);
    exports.attempts.wake();
}

/// Begins to open the failed exports whose next attempt is due, and exports the targets that have
/// been opened. Returns the time until the next attempt, or `None` if no failed export is left.
pub(in crate::daemon) fn try_due(exports: &Exports) -> Option<Duration> {
    for (spec, why) in exports.failed.due(Instant::now()) {
        if exports.attempts.is_running(&spec) {
            failed_again(exports, &spec, HANGS.into());
            continue;
        }
        // A command or reload that holds the turn may be awaiting an attempt with other settings.
        let turn = exports.turns.of(spec.name(), Duration::ZERO);
        if turn.is_none() || !exports.failed.has(&spec) {
            exports.failed.postpone(&spec);
            continue;
        }
        exports.failed.started(&spec);
        let holder = why.holder;
        if let Err(why) = begin_careful_attempt(exports, &spec, why) {
            failed_again(exports, &spec, OpenError { why, holder });
        }
    }
    for spec in exports.attempts.ended() {
        settle(exports, &spec);
    }
    exports.failed.wait(Instant::now())
}

/// Exports the opened target of an attempt that has ended, or records its failure.
fn settle(exports: &Exports, spec: &ExportSpec) {
    // Without the turn, the result is kept for a later call.
    let Some(_turn) = exports.turns.of(spec.name(), TURN_MAX) else { return };
    // A command or reload may have taken the result in the meantime.
    let Some(opened) = exports.attempts.take(spec, Instant::now()) else { return };
    // The export may also have been removed or changed.
    if !exports.failed.has(spec) {
        return;
    }
    if let Err(why) = opened.and_then(|export| serve(exports, spec, &export)) {
        failed_again(exports, spec, why);
    }
}

fn failed_again(exports: &Exports, spec: &ExportSpec, why: OpenError) {
    let text = why.why.clone();
    if exports.failed.failed_again(spec, why) {
        tracing::warn!(export = spec.name(), "export cannot be opened yet: {text}; {TRIES_AGAIN}");
    }
}

/// Removes failed exports. The caller must hold the turn of all exports.
pub(in crate::daemon) fn remove(exports: &Exports, names: Vec<String>, done: &mut Reloaded) {
    for name in names {
        exports.failed.remove(&name);
        exports.attempts.abandon(&name);
        exports.access.forget(&name);
        done.removed.push(name);
    }
}

/// Tries immediately to open failed exports of a configuration. The caller must hold the turn of
/// all exports.
pub(in crate::daemon) fn try_now(exports: &Exports, wanted: Vec<ExportSpec>, done: &mut Reloaded) {
    // All attempts begin before the first is awaited: several targets may hang.
    let until = Instant::now() + ATTEMPT_MAX;
    let begun: Vec<_> = wanted.iter().map(|spec| begin_attempt(exports, spec)).collect();
    for (spec, begun) in wanted.into_iter().zip(begun) {
        let name = spec.name().to_owned();
        exports.failed.set_configured(&name);
        let begun = begun.map_err(OpenError::from);
        let opened = begun.and_then(|is_new| open(exports, &spec, is_new, until));
        match opened.and_then(|export| serve(exports, &spec, &export)) {
            Ok(()) => done.added.push(name),
            Err(why) => {
                let text = format!("{why}; {TRIES_AGAIN}");
                exports.failed.put(spec, why);
                done.failed.push(Kept { name, why: text });
            }
        }
    }
}

/// Reports what [`try_now`] would do. Targets are checked, but not opened.
pub(in crate::daemon) fn preview(exports: &Exports, wanted: &[ExportSpec], done: &mut Reloaded) {
    let free = look_at_all(wanted);
    for (spec, free) in wanted.iter().zip(free) {
        let name = spec.name().to_owned();
        let checked = check_export(spec).and_then(|()| check_below(spec, &exports.set.search_path));
        let checked = checked.map_err(|error| error.chain().to_string());
        match checked.and_then(|()| free.map_err(|error| error.why)) {
            Ok(()) => done.added.push(name),
            Err(why) => done.failed.push(Kept { name, why }),
        }
    }
}

/// Checks concurrently whether other programs hold images. The errors are the same as for opening
/// the images.
pub(in crate::daemon) fn look_at_all(specs: &[ExportSpec]) -> Vec<Result<(), OpenError>> {
    all_in_time(specs, |spec: ExportSpec| match look_at(&spec) {
        Image::Held(why) if !spec.no_lock => Err(why),
        _ => Ok(()),
    })
}

/// Failed exports that a configuration no longer contains.
pub(in crate::daemon) fn unwanted(exports: &Exports, wanted: &[ExportSpec]) -> Vec<String> {
    let mut left = exports.failed.specs_as(true);
    wanted.iter().for_each(|spec| drop(left.remove(spec.name())));
    left.into_keys().collect()
}

/// Splits the exports of a configuration into failed exports and all others.
pub(in crate::daemon) fn partition(
    exports: &Exports,
    wanted: Vec<ExportSpec>,
) -> (Vec<ExportSpec>, Vec<ExportSpec>) {
    let failed = exports.failed.specs();
    wanted.into_iter().partition(|spec| failed.contains_key(spec.name()))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::PathBuf;

    use rtrs_core::rt::blkdev::lock_byte;

    use super::super::Opener;
    use super::*;
    use crate::audit::AuditSink;
    use crate::daemon::control_shard::ControlShard;
    use crate::daemon::identity::Sources;
    use crate::export::{ExportTable, Lookup};
    use crate::settings::Settings;
    use crate::state::StateDir;

    const LONG: Duration = Duration::from_secs(60);

    /// A server whose only export `vol0` could not be opened.
    struct Rig {
        dir: PathBuf,
        path: PathBuf,
        spec: ExportSpec,
        table: Arc<ExportTable>,
        exports: Exports,
    }

    impl Rig {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("rtrs-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            let path = dir.join("vol.img");
            let spec: ExportSpec = format!("vol0={}", path.display()).parse().unwrap();
            let (control, _inbox) = rtrs_core::rt::mailbox().unwrap();
            let state = Arc::new(StateDir::open(Some(&dir), None));
            let opener = Arc::new(Opener::new(Sources::system(), state));
            let (table, set) = (ExportTable::new(Vec::new()), Settings::default());
            let (control, audit) = (ControlShard(control), AuditSink::default());
            let exports = Exports::new(Arc::clone(&table), opener, control, None, &set, audit);
            begin(&exports, vec![(spec.clone(), "first reason".into())]);
            Self { dir, path, spec, table, exports }
        }

        /// Makes the next attempt, although it is not due yet.
        fn try_again(&self) {
            let (_, why) = self.exports.failed.due(Instant::now() + 4 * LONG).remove(0);
            begin_careful_attempt(&self.exports, &self.spec, why).unwrap();
            self.exports.attempts.wait(LONG);
            settle(&self.exports, &self.spec);
        }

        fn reason(&self) -> String {
            self.exports.failed.snapshots().remove(0).reason.unwrap()
        }

        fn is_served(&self) -> bool {
            self.table.find(b"vol0").is_some()
        }
    }

    impl Drop for Rig {
        fn drop(&mut self) {
            self.table.clear();
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }

    #[test]
    fn a_failed_export_that_a_command_added_outlives_reloads() {
        let rig = Rig::new("failed-added");
        assert_eq!(unwanted(&rig.exports, &[]), ["vol0"]);
        note_failed(&rig.exports, rig.spec.clone(), false, "closed".into());
        assert!(unwanted(&rig.exports, &[]).is_empty());
        std::fs::write(&rig.path, [0; 4096]).unwrap();
        rig.try_again();
        assert!(rig.is_served());
        let entry = rig.exports.entry("vol0").unwrap();
        assert!(!entry.configured, "the next reload would remove it");
    }

    #[test]
    fn a_file_is_served_once_it_appears() {
        let rig = Rig::new("failed");
        rig.try_again();
        let why = rig.reason();
        assert!(why.contains("does not exist") && !why.contains("truncate"), "{why}");
        assert_eq!(rig.table.lookup(b"vol0"), Lookup::Failed);
        assert_eq!(
            rig.exports.save().exports,
            std::slice::from_ref(&rig.spec),
            "it is not lost from the configuration"
        );
        File::create(&rig.path).unwrap().set_len(4096).unwrap();
        rig.try_again();
        assert!(rig.is_served());
        assert!(rig.exports.entry("vol0").is_some_and(|entry| entry.configured));
        assert_eq!(try_due(&rig.exports), None, "the thread ends");
    }

    #[test]
    fn a_held_image_is_opened_after_two_checks_that_find_it_free() {
        let rig = Rig::new("held");
        File::create(&rig.path).unwrap().set_len(4096).unwrap();
        let hold = || {
            let file = File::open(&rig.path).unwrap();
            // A lock on this byte denies writes to others.
            lock_byte(&file, 201).unwrap();
            file
        };
        let holder = hold();
        rig.try_again();
        let why = rig.reason();
        assert!(why.contains("likely a virtual machine"), "{why}");
        rig.try_again();
        assert_eq!(rig.reason(), why);
        let unlocked = ExportSpec { no_lock: true, ..rig.spec.clone() };
        let free = look_at_all(&[rig.spec.clone(), unlocked]);
        assert_eq!(free.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, true]);
        // A program started by another test may briefly hold a copy of the descriptor.
        let let_go = |holder: File| {
            drop(holder);
            let end = Instant::now() + LONG;
            while look_at_all(std::slice::from_ref(&rig.spec))[0].is_err() {
                assert!(Instant::now() < end, "still locked");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let_go(holder);
        rig.try_again();
        // A virtual machine that is restarted locks its image again.
        let holder = hold();
        rig.try_again();
        let_go(holder);
        rig.try_again();
        assert!(!rig.is_served());
        assert_eq!(rig.reason(), why);
        rig.try_again();
        assert!(rig.is_served());
    }

    /// Without this rule, the command would report that the target hangs, and the opened target
    /// would be closed.
    #[test]
    fn a_due_attempt_does_not_replace_a_commands_attempt() {
        let rig = Rig::new("failed-command");
        let _turn = rig.exports.turns.of("vol0", Duration::ZERO).unwrap();
        let changed = ExportSpec { ro: true, ..rig.spec.clone() };
        let (release, held) = std::sync::mpsc::channel::<()>();
        let opened = move |_: &ExportSpec| {
            // Ends when the sender is dropped.
            let _ = held.recv();
            Err("ended".into())
        };
        rig.exports.attempts.begin(&changed, opened).unwrap();
        while rig.exports.failed.due(Instant::now()).is_empty() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let wait = try_due(&rig.exports);
        assert!(rig.exports.attempts.is_running(&changed));
        assert!(wait.is_some_and(|wait| !wait.is_zero()), "the thread would not rest");
        drop(release);
    }
}
