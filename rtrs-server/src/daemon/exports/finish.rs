//! Second half of changes that close exports: each export is reopened as soon as its old target is
//! released, so an export whose target hangs delays no others.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use rtrs_core::time::Duration;

use super::attempts::Opened;
use super::change::{Applied, Closed, Reservation};
use super::in_time::in_time;
use super::opener::not_closed;
use super::{Entry, Exports, RELEASE_MAX, recovery};
use crate::daemon::access::FormerAccess;
use crate::settings::ExportSpec;
use crate::stats::TRIES_AGAIN;

/// Maximum number of exports that are opened at the same time.
const AT_ONCE: usize = 64;

/// A change's settings, and its result or the reason why it failed.
pub(in crate::daemon) type Finished = (ExportSpec, Result<Applied, String>);

/// A closed export that is being reopened.
struct Change {
    entry: Entry,
    spec: ExportSpec,
    applied: Applied,
    former: Option<FormerAccess>,
    _reserved: Reservation,
}

/// Number of exports whose release is awaited. A change may need a target that another change
/// releases.
#[derive(Debug)]
struct Releases {
    left: Mutex<usize>,
    ended: Condvar,
}

impl Releases {
    fn note_end(&self) {
        *self.left.lock() -= 1;
        self.ended.notify_all();
    }

    fn have_ended(&self) -> bool {
        *self.left.lock() == 0
    }

    fn wait(&self) {
        let mut left = self.left.lock();
        while *left > 0 {
            self.ended.wait(&mut left);
        }
    }
}

impl Exports {
    /// Opens closed exports with their changed settings or, if that fails, with their old settings.
    /// The server keeps retrying exports that fail with both settings. Returns the settings and the
    /// result of each change.
    pub(in crate::daemon) fn finish_changes(&self, all: Vec<Closed>) -> Vec<Finished> {
        self.finish_within(all, RELEASE_MAX)
    }

    /// Finishes changes like [`Self::finish_changes`]. Waits up to `release_max` for each release.
    pub(super) fn finish_within(&self, all: Vec<Closed>, release_max: Duration) -> Vec<Finished> {
        let (ready, queue) = mpsc::channel();
        let finisher = Finisher {
            exports: self,
            releases: Releases { left: Mutex::new(all.len()), ended: Condvar::new() },
            queue: Mutex::new(queue),
            results: Mutex::default(),
        };
        thread::scope(|scope| {
            for _ in 0..all.len().min(AT_ONCE) {
                let named = thread::Builder::new().name("export-change".into());
                // If no thread can be started, this thread finishes the changes after the releases.
                let _ = named.spawn_scoped(scope, || finisher.run());
            }
            finisher.release(all, release_max, &ready);
            drop(ready);
            finisher.run();
        });
        let mut results = finisher.results.into_inner();
        results.sort_by_key(|(at, _)| *at);
        results.into_iter().map(|(_, finished)| finished).collect()
    }
}

/// Finishes changes on several threads.
struct Finisher<'a> {
    exports: &'a Exports,
    releases: Releases,
    /// Changes whose exports have been released, with their numbers.
    queue: Mutex<Receiver<(usize, Change)>>,
    results: Mutex<Vec<(usize, Finished)>>,
}

impl Finisher<'_> {
    /// Releases closed exports, and passes each change on when its export is released, or after
    /// `within`.
    fn release(&self, all: Vec<Closed>, within: Duration, ready: &Sender<(usize, Change)>) {
        let until = Instant::now() + within;
        let (mut exports, mut waiting) = (Vec::new(), Vec::new());
        for Closed { entry, spec, export, applied, former, reserved } in all {
            let late = not_closed(&export);
            exports.push(export);
            let _reserved = reserved;
            waiting.push(Some((Change { entry, spec, applied, former, _reserved }, late)));
        }
        let pass_on = |at: usize, mut change: Change, released: Result<(), String>| {
            change.applied.warnings.extend(released.err());
            self.releases.note_end();
            // The receiver lives as long as this sender.
            let _ = ready.send((at, change));
        };
        let begun = self.exports.opener.begin_release(exports);
        let failed = begun.as_ref().err().cloned();
        if let Ok(released) = begun {
            let left = || until.saturating_duration_since(Instant::now());
            while let Ok((at, flushed)) = released.recv_timeout(left()) {
                if let Some((change, _)) = waiting[at].take() {
                    pass_on(at, change, flushed);
                }
            }
        }
        for (at, change) in waiting.into_iter().enumerate() {
            if let Some((change, late)) = change {
                pass_on(at, change, Err(failed.clone().unwrap_or(late)));
            }
        }
    }

    /// Finishes changes until the queue ends.
    fn run(&self) {
        let next = || self.queue.lock().recv();
        while let Ok((at, change)) = next() {
            let finished = self.finish(change);
            self.results.lock().push((at, finished));
        }
    }

    /// Opens a closed export with its changed settings or, if that fails, with its old settings.
    fn finish(&self, mut change: Change) -> Finished {
        let opened = self.open_changed(&change);
        let published = opened.and_then(|export| {
            Ok(self.exports.publish(&change.spec, &export, change.entry.configured)?)
        });
        let failed = published.err().map(|error| self.reopen_unchanged(&mut change, &error.why));
        let Applied { warnings, .. } = &change.applied;
        let failed = failed.map(|why| [&warnings[..], &[why]].concat().join("; "));
        (change.spec, failed.map_or(Ok(change.applied), Err))
    }

    /// Opens the target of the changed settings, which another change may have to release first.
    fn open_changed(&self, change: &Change) -> Opened {
        let may_be_of_another =
            change.spec.target != change.entry.spec.target && !self.releases.have_ended();
        let opened = self.open_target(&change.spec);
        if opened.is_ok() || !may_be_of_another {
            return opened;
        }
        self.releases.wait();
        self.open_target(&change.spec)
    }

    fn open_target(&self, spec: &ExportSpec) -> Opened {
        let (opener, spec) = (self.exports.opener.clone(), spec.clone());
        in_time(move || opener.open_shared(&spec))
    }

    /// Reopens an export with its old settings after its change has failed. Returns the reason for
    /// the failed change, and what happened to the export.
    fn reopen_unchanged(&self, change: &mut Change, why: &str) -> String {
        let Entry { spec, configured, .. } = &change.entry;
        let opened = self.open_target(spec);
        if let Some(former) = change.former.take() {
            let taken_back = self.exports.access.take_back(&change.spec, former, *configured);
            change.applied.warnings.extend(taken_back.err());
        }
        match opened.and_then(|export| Ok(self.exports.publish(spec, &export, *configured)?)) {
            Ok(()) => format!("{why}; the export keeps its old options"),
            Err(again) => {
                let text = format!(
                    "{why}; opening it with its old options failed too, and {TRIES_AGAIN}: {again}"
                );
                recovery::note_failed(self.exports, spec.clone(), *configured, again);
                text
            }
        }
    }
}
