//! Exports of the configuration that could not be opened, with the reasons and the times of the
//! next attempts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::open_error::{Holder, OpenError};
use crate::export::{ExportTable, Lookup};
use crate::settings::ExportSpec;
use crate::stats::{ExportIo, ExportSnapshot, ExportState};

/// Time until the first retry; doubled after each failure.
const DELAY_MIN: Duration = Duration::from_secs(1);
/// Maximum time between attempts.
const DELAY_MAX: Duration = Duration::from_secs(30);
/// Maximum time between checks of whether another program still holds an image.
const HELD_DELAY_MAX: Duration = Duration::from_secs(60);
/// Time after which an image that its holder has released must still be free.
const STILL_FREE: Duration = Duration::from_secs(10);
/// Time after which an attempt that is still running is reported.
pub(super) const ATTEMPT_MAX: Duration = Duration::from_secs(10);

/// Failure reason of an export whose target hangs.
pub(super) const HANGS: &str = "opening its target takes longer than 10 s; its file system or \
                                server does not respond";

/// An export that could not be opened.
#[derive(Clone, Debug)]
struct Failed {
    spec: ExportSpec,
    /// Whether the configuration defines the export; false if a command added it.
    configured: bool,
    why: OpenError,
    /// Time between the last and the next attempt.
    delay: Duration,
    /// Time of the next attempt.
    next: Instant,
}

impl Failed {
    fn new(spec: ExportSpec, why: OpenError, now: Instant) -> Self {
        Self { spec, configured: true, why, delay: DELAY_MIN, next: now + DELAY_MIN }
    }

    /// Records another failure. Returns whether the reason is new.
    fn again(&mut self, why: OpenError, now: Instant) -> bool {
        self.delay = match why.holder {
            Holder::None => (self.delay * 2).min(DELAY_MAX),
            Holder::Holds => (self.delay * 2).min(HELD_DELAY_MAX),
            // If the image is held again, checks are as frequent as for a new holder.
            Holder::HasLetGo => DELAY_MIN,
        };
        let wait = if why.holder == Holder::HasLetGo { STILL_FREE } else { self.delay };
        self.next = now + wait;
        let is_new = self.why.why != why.why;
        self.why = why;
        is_new
    }

    fn snapshot(&self) -> ExportSnapshot {
        let backing = self.spec.target.to_string();
        ExportSnapshot {
            read_only: self.spec.ro,
            ..snapshot(self.spec.name(), backing, self.why.why.clone())
        }
    }
}

fn snapshot(name: &str, backing: String, why: String) -> ExportSnapshot {
    ExportSnapshot {
        name: name.to_owned(),
        backing,
        size: 0,
        block_size: 0,
        read_only: false,
        id: None,
        state: ExportState::Failed,
        found: false,
        open_by: Vec::new(),
        device_errors: 0,
        io: ExportIo::default(),
        epoch: 0,
        access: Vec::new(),
        access_limit: None,
        limits: None,
        reason: Some(why),
        unread: false,
    }
}

/// Dangling link in `exports-dir`, whose exports are therefore unknown.
#[derive(Debug)]
struct Unread {
    link: PathBuf,
    why: String,
}

/// Failed exports by name. Their names are also in the export table.
#[derive(Debug)]
pub(super) struct FailedExports {
    table: Arc<ExportTable>,
    all: Mutex<BTreeMap<String, Failed>>,
    /// Files that could not be read, by their names without `.yaml`.
    unread: Mutex<BTreeMap<String, Unread>>,
}

impl FailedExports {
    pub(super) fn new(table: &Arc<ExportTable>) -> Self {
        Self { table: Arc::clone(table), all: Mutex::default(), unread: Mutex::default() }
    }

    /// Adds a failed export for a file in `exports-dir` that could not be read, under the name of
    /// the file, unless there is an export with that name.
    pub(super) fn put_unread(&self, name: &str, link: &Path, why: &str) {
        if self.table.lookup(name.as_bytes()) == Lookup::Unknown {
            self.table.set_failed(name, true);
            let unread = Unread { link: link.to_owned(), why: why.to_owned() };
            self.unread.lock().insert(name.to_owned(), unread);
        }
    }

    /// Forgets files that could not be read before, because all can be read now.
    pub(super) fn forget_unread(&self) {
        for name in std::mem::take(&mut *self.unread.lock()).into_keys() {
            self.table.set_failed(&name, false);
        }
    }

    /// Adds a failed export of the configuration, or replaces the settings of a failed export.
    pub(super) fn put(&self, spec: ExportSpec, why: OpenError) {
        let configured = self.is_configured(spec.name());
        self.put_as(configured, spec, why);
    }

    /// Adds a failed export. `configured` is false if a command has added it: reloads then leave it
    /// alone.
    pub(super) fn put_as(&self, configured: bool, spec: ExportSpec, why: OpenError) {
        self.table.set_failed(spec.name(), true);
        let failed = Failed { configured, ..Failed::new(spec, why, Instant::now()) };
        self.all.lock().insert(failed.spec.name().to_owned(), failed);
    }

    /// Returns false for a failed export that a command added, otherwise true.
    pub(super) fn is_configured(&self, name: &str) -> bool {
        self.all.lock().get(name).is_none_or(|failed| failed.configured)
    }

    /// Records that the configuration defines an export.
    pub(super) fn set_configured(&self, name: &str) {
        if let Some(failed) = self.all.lock().get_mut(name) {
            failed.configured = true;
        }
    }

    /// Names of all failed exports, and whether the configuration defines them.
    pub(super) fn names(&self) -> BTreeMap<String, bool> {
        let all = self.all.lock();
        all.iter().map(|(name, failed)| (name.clone(), failed.configured)).collect()
    }

    /// Settings of the failed exports of the configuration, or of the failed exports that commands
    /// added.
    pub(super) fn specs_as(&self, configured: bool) -> BTreeMap<String, ExportSpec> {
        let all = self.all.lock();
        let wanted = all.iter().filter(|(_, failed)| failed.configured == configured);
        wanted.map(|(name, failed)| (name.clone(), failed.spec.clone())).collect()
    }

    /// Removes a failed export. Returns false if none has this name.
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
        let mut all: Vec<_> = self.all.lock().values().map(Failed::snapshot).collect();
        let unread = self.unread.lock();
        all.extend(unread.iter().map(|(name, Unread { link, why })| {
            let backing = link.display().to_string();
            ExportSnapshot { unread: true, ..snapshot(name, backing, why.clone()) }
        }));
        all
    }

    /// Settings of a failed export.
    pub(super) fn spec(&self, name: &str) -> Option<ExportSpec> {
        self.all.lock().get(name).map(|failed| failed.spec.clone())
    }

    /// Records that an attempt has started.
    pub(super) fn started(&self, spec: &ExportSpec) {
        if let Some(failed) = self.all.lock().get_mut(spec.name()) {
            failed.next = Instant::now() + ATTEMPT_MAX;
        }
    }

    /// Briefly postpones the next attempt, because the export is being changed.
    pub(super) fn postpone(&self, spec: &ExportSpec) {
        if let Some(failed) = self.all.lock().get_mut(spec.name()) {
            failed.next = failed.next.max(Instant::now() + DELAY_MIN);
        }
    }

    /// Whether an export with exactly these settings has failed.
    pub(super) fn has(&self, spec: &ExportSpec) -> bool {
        self.all.lock().get(spec.name()).is_some_and(|failed| failed.spec == *spec)
    }

    /// Exports whose next attempt, or the report of a hanging attempt, is due, with the reasons for
    /// their failures.
    pub(super) fn due(&self, now: Instant) -> Vec<(ExportSpec, OpenError)> {
        let all = self.all.lock();
        let due = all.values().filter(|failed| failed.next <= now);
        due.map(|failed| (failed.spec.clone(), failed.why.clone())).collect()
    }

    /// Time until the next attempt; `None` if there are no failed exports.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let all = self.all.lock();
        let next = all.values().map(|failed| failed.next).min()?;
        Some(next.saturating_duration_since(now))
    }

    /// Records a failed attempt, unless the export has been removed or changed since. Returns
    /// whether the reason is new.
    pub(super) fn failed_again(&self, spec: &ExportSpec, why: OpenError) -> bool {
        let mut all = self.all.lock();
        let failed = all.get_mut(spec.name()).filter(|failed| failed.spec == *spec);
        failed.is_some_and(|failed| failed.again(why, Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(table: &Arc<ExportTable>) -> (FailedExports, ExportSpec) {
        let spec: ExportSpec = "vol0=/none".parse().unwrap();
        let all = FailedExports::new(table);
        all.put(spec.clone(), "missing".into());
        (all, spec)
    }

    #[test]
    fn retry_intervals_grow_up_to_a_bound() {
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
    fn a_held_image_is_checked_until_it_stays_free() {
        let (spec, mut now) = ("v=/none".parse().unwrap(), Instant::now());
        let held = OpenError::held("held".into());
        let mut failed = Failed::new(spec, held.clone(), now);
        let mut wait = |failed: &mut Failed, why: OpenError| {
            now = failed.next;
            assert!(!failed.again(why, now), "a known reason");
            (failed.next - now).as_secs()
        };
        let waits: Vec<_> = (0..7).map(|_| wait(&mut failed, held.clone())).collect();
        assert_eq!(waits, [2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(wait(&mut failed, OpenError::let_go("held".into())), STILL_FREE.as_secs());
        assert_eq!(wait(&mut failed, held), 2, "it was taken again");
    }

    #[test]
    fn the_table_knows_failed_names_until_they_are_served_or_removed() {
        let table = ExportTable::new(Vec::new());
        let (all, spec) = failed(&table);
        assert_eq!(
            ["vol0", "//vol0"].map(|name| table.lookup(name.as_bytes())),
            [Lookup::Failed; 2]
        );
        assert_eq!(table.lookup(b"vol1"), Lookup::Unknown);
        let listed = all.snapshots();
        assert_eq!((listed.len(), listed[0].state), (1, ExportState::Failed));
        assert_eq!(listed[0].reason.as_deref(), Some("missing"));
        // The name of a file that could not be read stays taken until all files have been read.
        all.put_unread("vol0", Path::new("/d/vol0.yaml"), "dangling");
        all.put_unread("vol1", Path::new("/d/vol1.yaml"), "dangling");
        let reason = |at: usize| all.snapshots()[at].reason.clone().unwrap();
        assert_eq!((reason(0), reason(1)), ("missing".to_owned(), "dangling".to_owned()));
        assert_eq!(table.lookup(b"vol1"), Lookup::Failed);
        all.forget_unread();
        assert_eq!((table.lookup(b"vol1"), all.snapshots().len()), (Lookup::Unknown, 1));
        assert!(all.has(&spec) && all.remove("vol0") && !all.remove("vol0"));
        assert_eq!(table.lookup(b"vol0"), Lookup::Unknown);
        assert_eq!(all.wait(Instant::now()), None);
    }

    #[test]
    fn changed_settings_are_not_served_by_an_old_attempt() {
        let (all, old) = failed(&ExportTable::new(Vec::new()));
        let new: ExportSpec = "vol0=/none,ro".parse().unwrap();
        let before = Instant::now();
        all.put(new.clone(), "missing".into());
        assert!(!all.has(&old) && all.has(&new));
        assert!(!all.failed_again(&old, "other".into()));
        assert_eq!(all.snapshots()[0].reason.as_deref(), Some("missing"));
        assert!(all.due(before).is_empty());
        assert_eq!(all.due(Instant::now() + DELAY_MIN), [(new, "missing".into())]);
    }
}
