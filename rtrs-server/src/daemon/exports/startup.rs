//! Exports at the start of the server.
//!
//! All targets are opened at the same time, each on its own thread: one that does not answer, for
//! example a file of an NFS server that is down, delays no other. Once an export can be served, the
//! start waits for the others only while they make progress. An attempt that is left continues, and
//! the retry thread exports its target when it is open ([`super::recovery`]).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Opener;
use super::attempts::{Attempts, Opened};
use super::open_error::OpenError;
use crate::error::{Error, ErrorKind};
use crate::export::Export;
use crate::plan::check_export;
use crate::plan::partial::Partial;
use crate::settings::{ExportSpec, OnMissing, SearchSpec, Settings};

/// Maximum number of targets that are being opened at the same time, not counting those that make
/// no progress.
const AT_ONCE: usize = 32;
/// Time without progress after which further targets are opened, and interval of looks.
const STALLED: Duration = Duration::from_secs(1);
/// Reason of an export whose target was left at the start.
const OPENING: &str = "its target does not answer yet; the server serves the other exports and \
                       keeps waiting";

/// Exports of a starting server.
pub(in crate::daemon) struct Started {
    /// Opened exports, in the order of the settings.
    pub(in crate::daemon) exports: Vec<Export>,
    /// Exports that are not open, with the reasons.
    pub(in crate::daemon) failures: Vec<(ExportSpec, OpenError)>,
}

/// Opens the exports of the settings. With a `patience`, the server starts without the exports
/// that make no progress for that time, unless the settings refuse that or no other export is open.
///
/// # Errors
/// Those of [`Partial::enough`].
pub(in crate::daemon) fn open_all(
    set: &Settings,
    opener: &Arc<Opener>,
    patience: Option<Duration>,
) -> Result<Started, Error> {
    let patience = patience.filter(|_| set.on_missing == OnMissing::Wait);
    let serves = set.search_path != SearchSpec::Off;
    let specs = if set.ping_only { &[][..] } else { &set.export };
    let open = |spec: &ExportSpec| {
        let of_thread = Arc::clone(opener);
        opener.attempts.begin(spec, move |spec| {
            let opened = check_export(spec).and_then(|()| of_thread.open(spec));
            opened.map(Arc::new).map_err(|error| OpenError::new(&error))
        })
    };
    let mut results = run_all(&opener.attempts, specs, open, |ended, idle| {
        let any = serves || ended.values().any(Result::is_ok);
        any && patience.is_some_and(|patience| idle >= patience)
    });
    let (mut partial, mut left) = (Partial { opened: Vec::new(), failed: Vec::new() }, Vec::new());
    let mut holders = BTreeMap::new();
    for spec in specs {
        let refuse = |text: String| (spec.clone(), Error::new(ErrorKind::Export, text));
        match results.remove(spec.name()) {
            // The attempt has ended, so this is the only reference.
            Some(Ok(export)) => match Arc::into_inner(export) {
                Some(export) => partial.opened.push(export),
                None => partial.failed.push(refuse("its attempt still runs".to_owned())),
            },
            Some(Err(why)) => {
                holders.insert(spec.name(), why.holder);
                partial.failed.push(refuse(why.why));
            }
            None => left.push((spec.clone(), OPENING.into())),
        }
    }
    let Partial { opened, failed } = partial.enough(set)?;
    let failed = failed.into_iter().map(|(spec, error)| {
        let holder = holders.get(spec.name()).copied().unwrap_or_default();
        (spec, OpenError { why: error.chain().to_string(), holder })
    });
    Ok(Started { exports: opened, failures: failed.chain(left).collect() })
}

/// Runs attempts until all have ended, or `is_enough` says that of the results so far and the time
/// without progress. Returns the results by name; those of attempts that still run are missing.
fn run_all(
    attempts: &Arc<Attempts>,
    specs: &[ExportSpec],
    begin: impl Fn(&ExportSpec) -> Result<bool, String>,
    is_enough: impl Fn(&BTreeMap<String, Opened>, Duration) -> bool,
) -> BTreeMap<String, Opened> {
    let (mut waiting, mut results) = (specs.iter().peekable(), BTreeMap::new());
    let (mut stalled, mut last) = (0, Instant::now());
    while results.len() < specs.len() {
        while attempts.running() < stalled + AT_ONCE
            && let Some(spec) = waiting.next()
        {
            if let Err(why) = begin(spec) {
                results.insert(spec.name().to_owned(), Err(why.into()));
            }
            last = Instant::now();
        }
        if waiting.peek().is_none() && is_enough(&results, last.elapsed()) {
            break;
        }
        if !attempts.wait(STALLED) {
            stalled = attempts.running();
            continue;
        }
        for spec in attempts.ended() {
            let taken = attempts.take(&spec, Instant::now());
            results.extend(taken.map(|opened| (spec.name().to_owned(), opened)));
        }
        last = Instant::now();
    }
    results
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn specs(count: usize) -> Vec<ExportSpec> {
        (0..count).map(|number| format!("v{number}=/t{number}").parse().unwrap()).collect()
    }

    #[test]
    fn targets_that_hang_delay_no_other() {
        let attempts = Arc::<Attempts>::default();
        let specs = specs(3 * AT_ONCE);
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(parking_lot::Mutex::new(held));
        // More hang than are opened at the same time.
        let hangs = |spec: &ExportSpec| {
            specs[..AT_ONCE + 1].iter().any(|other| other.name() == spec.name())
        };
        let begin = |spec: &ExportSpec| {
            let (hangs, held) = (hangs(spec), Arc::clone(&held));
            attempts.begin(spec, move |_| {
                if hangs {
                    held.lock().recv().unwrap_err();
                }
                Err("ended".into())
            })
        };
        let others = specs.len() - AT_ONCE - 1;
        let results = run_all(&attempts, &specs, begin, |ended, _| ended.len() == others);
        assert_eq!(results.len(), others);
        assert!(results.keys().all(|name| !hangs(&format!("{name}=/x").parse().unwrap())));
        assert_eq!(attempts.running(), AT_ONCE + 1);
        drop(release);
    }

    #[test]
    fn without_enough_all_are_waited_for() {
        let attempts = Arc::<Attempts>::default();
        let specs = specs(2);
        let begin = |spec: &ExportSpec| attempts.begin(spec, |_| Err("ended".into()));
        let results = run_all(&attempts, &specs, begin, |_, _| false);
        assert_eq!(results.len(), 2);
        assert_eq!(attempts.running(), 0);
    }
}
