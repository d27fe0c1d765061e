//! Opens the exports when the server starts.
//!
//! All targets are opened at the same time, each on its own thread: a target that does not respond,
//! for example a file on an NFS server that is down, does not delay the others. Once an export can
//! be served, startup waits for the others only while they make progress. An attempt that startup
//! no longer waits for continues, and the retry thread exports the target once it is open
//! ([`super::recovery`]). If startup must wait for every attempt, startup fails after a longer time
//! without progress.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Opener;
use super::attempts::{Attempts, Opened};
use super::open_error::OpenError;
use crate::error::{Error, ErrorKind};
use crate::export::Export;
use crate::plan::check_export;
use crate::plan::partial::{Partial, starts_without_exports};
use crate::settings::{ExportSpec, OnMissing, Settings, Target};

/// Maximum number of targets that are being opened at the same time, not counting targets that make
/// no progress.
const AT_ONCE: usize = 32;
/// Time without progress after which further targets are opened, and interval between checks.
const STALLED: Duration = Duration::from_secs(1);
/// Time without progress after which startup continues with the exports that are open.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time without progress after which startup fails if it must wait for every attempt. The longest
/// `connect-timeout` of the NBD and RBD targets is added.
const HANG_MAX: Duration = Duration::from_secs(30);
/// Reason reported for an export whose target startup no longer waits for.
const OPENING: &str = "its target has not responded yet; the server serves the other exports and \
                       keeps waiting";

/// Exports of a starting server.
pub(in crate::daemon) struct Started {
    /// Opened exports, in the order of the settings.
    pub(in crate::daemon) exports: Vec<Export>,
    /// Exports that are not open, with the reasons.
    pub(in crate::daemon) failures: Vec<(ExportSpec, OpenError)>,
}

/// Treatment of targets that make no progress at startup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) enum Stalled {
    /// Startup stops waiting for these targets once the server can serve an export.
    Left,
    /// Startup fails.
    Refused,
}

impl Stalled {
    /// Whether startup stops waiting after making no progress for `idle`. `serves` says whether the
    /// server can start with the exports opened so far.
    fn is_enough(self, specs: &[ExportSpec], serves: bool, idle: Duration) -> bool {
        match self {
            Self::Left => serves && idle >= PATIENCE,
            Self::Refused => idle >= hang_max(specs),
        }
    }

    /// Returns the exports that startup no longer waits for. Fails if startup must wait for all
    /// exports.
    fn leave(self, left: Vec<&ExportSpec>) -> Result<Vec<(ExportSpec, OpenError)>, Error> {
        if self == Self::Left || left.is_empty() {
            return Ok(left.into_iter().map(|spec| (spec.clone(), OPENING.into())).collect());
        }
        let names: Vec<_> = left.iter().map(|spec| format!("{:?}", spec.name())).collect();
        let text = format!(
            "cannot export {}: the target does not respond; repair its file system or server, or \
             remove the export",
            names.join(", ")
        );
        Err(Error::new(ErrorKind::Export, text))
    }
}

/// Time without progress after which startup fails.
fn hang_max(specs: &[ExportSpec]) -> Duration {
    let remote = specs.iter().filter(|spec| matches!(spec.target, Target::Nbd(_) | Target::Rbd(_)));
    HANG_MAX + remote.map(|spec| spec.connect_timeout.get()).max().unwrap_or_default()
}

/// Opens the configured exports.
///
/// # Errors
/// The errors of [`Partial::enough`], and [`ErrorKind::Export`] for refused targets.
pub(in crate::daemon) fn open_all(
    set: &Settings,
    opener: &Arc<Opener>,
    stalled: Stalled,
) -> Result<Started, Error> {
    let stalled = if set.on_missing == OnMissing::Refuse { Stalled::Refused } else { stalled };
    let starts = starts_without_exports(set);
    let specs = if set.ping_only { &[][..] } else { &set.export };
    let open = |spec: &ExportSpec| {
        let of_thread = Arc::clone(opener);
        opener.attempts.begin(spec, move |spec| {
            let opened = check_export(spec).and_then(|()| of_thread.open(spec));
            opened.map(Arc::new).map_err(|error| OpenError::new(&error))
        })
    };
    let mut results = run_all(&opener.attempts, specs, open, |ended, idle| {
        let starts = starts || ended.values().any(Result::is_ok);
        stalled.is_enough(specs, starts, idle)
    });
    let (mut partial, mut left) = (Partial { opened: Vec::new(), failed: Vec::new() }, Vec::new());
    let mut holders = BTreeMap::new();
    for spec in specs {
        let refuse = |text: String| (spec.clone(), Error::new(ErrorKind::Export, text));
        match results.remove(spec.name()) {
            // The attempt has ended, so this is the only reference.
            Some(Ok(export)) => match Arc::into_inner(export) {
                Some(export) => partial.opened.push(export),
                None => partial.failed.push(refuse("the last attempt is still running".to_owned())),
            },
            Some(Err(why)) => {
                holders.insert(spec.name(), why.holder);
                partial.failed.push(refuse(why.why));
            }
            None => left.push(spec),
        }
    }
    let left = stalled.leave(left)?;
    let Partial { opened, failed } = partial.enough(set)?;
    let failed = failed.into_iter().map(|(spec, error)| {
        let holder = holders.get(spec.name()).copied().unwrap_or_default();
        (spec, OpenError { why: error.chain().to_string(), holder })
    });
    Ok(Started { exports: opened, failures: failed.chain(left).collect() })
}

/// Runs attempts until all have ended, or `is_enough` accepts the results so far, given the time
/// without progress. Returns the results by name, except those of attempts that are still running.
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
    fn hanging_targets_delay_no_others() {
        let attempts = Arc::<Attempts>::default();
        let specs = specs(3 * AT_ONCE);
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(parking_lot::Mutex::new(held));
        // More targets hang than may be opened at once.
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
    fn a_hanging_target_is_left_behind_or_refused_after_a_timeout() {
        let specs: Vec<ExportSpec> = ["a=/hangs", "b=nbd://host/b,connect-timeout=1m"]
            .map(|text| text.parse().unwrap())
            .into();
        let minutes = |number: u64| Duration::from_secs(60 * number);
        let left = |serves, idle| Stalled::Left.is_enough(&specs, serves, idle);
        assert!(left(true, PATIENCE) && !left(true, PATIENCE / 2) && !left(false, minutes(60)));
        let refused = |idle| Stalled::Refused.is_enough(&specs, true, idle);
        let why = "the NBD server must have a minute to connect";
        assert!(refused(minutes(2)) && !refused(minutes(1)), "{why}");
        let failures = Stalled::Left.leave(vec![&specs[0]]).unwrap();
        assert_eq!(failures, [(specs[0].clone(), OPENING.into())]);
        let error = Stalled::Refused.leave(specs.iter().collect()).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot export \"a\", \"b\": the target does not respond"),
            "{error}"
        );
        assert_eq!(Stalled::Refused.leave(Vec::new()).unwrap(), []);
    }

    #[test]
    fn all_attempts_are_awaited_until_there_is_enough() {
        let attempts = Arc::<Attempts>::default();
        let specs = specs(2);
        let begin = |spec: &ExportSpec| attempts.begin(spec, |_| Err("ended".into()));
        let results = run_all(&attempts, &specs, begin, |_, _| false);
        assert_eq!(results.len(), 2);
        assert_eq!(attempts.running(), 0);
    }
}
