//! Changes a path and waits until the change is complete.
//!
//! The session begins the change immediately; the command polls the session's status.

use std::time::Instant;

use rtrs_core::time::Duration;
use serde_json::json;

use crate::cmd::session::Session;
use crate::control_protocol::{Changed, PathInfo, Request, Status};
use crate::error::{Error, ErrorKind};
use crate::path::state::PathState;

/// Maximum time for closing a path's connections, beyond the time allowed for its requests.
const CLOSE_MAX: Duration = Duration::from_secs(15);
/// Maximum time for a path to connect before the command gives up.
const CONNECT_MAX: Duration = Duration::from_secs(30);
/// Maximum number of failed attempts during a reconnect: the server refuses the new path until it
/// has released the old one.
const REFUSALS_MAX: u64 = 3;
/// Interval between reads of the status.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Goal of the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    Added,
    Removed,
    Disconnected,
    Reconnected,
}

/// Change to a path.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) goal: Goal,
    /// Name of the path, as in listings.
    pub(crate) path: String,
    pub(crate) request: Request,
    /// Time allowed for the path's requests in flight to finish.
    pub(crate) within_ms: u64,
}

impl Step {
    fn time_max(&self) -> Duration {
        let closed = Duration::from_millis(self.within_ms) + CLOSE_MAX;
        match self.goal {
            Goal::Added => CONNECT_MAX,
            Goal::Removed | Goal::Disconnected => closed,
            Goal::Reconnected => closed + CONNECT_MAX,
        }
    }
}

pub(super) fn run(session: &Session, step: &Step) -> Result<(), Error> {
    let outcome = carry_out(session, step)?;
    let (name, path, Outcome { state, error }) = (&session.name, &step.path, &outcome);
    let value = json!({ "name": name, "path": path, "state": state, "last_error": error });
    session.output.print(&value, |_| outcome.text(name, path))
}

/// Makes the change, and waits until it is complete.
pub(crate) fn carry_out(session: &Session, step: &Step) -> Result<Outcome, Error> {
    let (name, path) = (&session.name, &step.path);
    let before = session.status()?;
    let _: Changed = session.request(&step.request)?;
    let watch = Watch { goal: step.goal, path, before: find(&before, path) };
    let deadline = Instant::now() + step.time_max();
    loop {
        if let Some(outcome) = watch.seen(&session.status()?) {
            if let Some(error) = outcome.error.as_ref().filter(|_| step.goal == Goal::Reconnected) {
                let text = match outcome.state {
                    "removed" => format!("{name}: {error}"),
                    _ => format!(
                        "{name}: cannot connect path {path}: {error}; the client keeps trying"
                    ),
                };
                return Err(Error::new(ErrorKind::Path, text));
            }
            return Ok(outcome);
        }
        if Instant::now() >= deadline {
            let text = format!(
                "{name}: changing {path} takes longer than {} s; it continues, see path list",
                step.time_max().as_secs()
            );
            return Err(Error::new(ErrorKind::Path, text));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn find<'a>(status: &'a Status, path: &str) -> Option<&'a PathInfo> {
    status.paths().iter().find(|one| one.path == path)
}

/// Observer that detects the end of a change.
struct Watch<'a> {
    goal: Goal,
    path: &'a str,
    before: Option<&'a PathInfo>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    state: &'static str,
    /// Reason why an added path is not connected yet.
    pub(crate) error: Option<String>,
}

impl Outcome {
    fn text(&self, name: &str, path: &str) -> String {
        let Self { state, error } = self;
        match error {
            Some(error) if *state == "removed" => format!("{name}: {error}\n"),
            Some(error) => format!("{name}: path {path} is not connected yet: {error}\n"),
            None => format!("{name}: path {path} {state}\n"),
        }
    }
}

impl Watch<'_> {
    /// Returns the outcome of the change, if the status shows it. A session that is too busy to
    /// list its paths shows nothing.
    fn seen(&self, status: &Status) -> Option<Outcome> {
        status.paths.as_ref().and_then(|_| self.outcome(find(status, self.path)))
    }

    /// Returns the outcome of the change, if `now` shows it.
    fn outcome(&self, now: Option<&PathInfo>) -> Option<Outcome> {
        let ended = |state, error| Some(Outcome { state, error });
        let Some(now) = now else {
            return match self.goal {
                Goal::Removed => ended("removed", None),
                _ => ended("removed", Some(format!("path {} was removed meanwhile", self.path))),
            };
        };
        let was_up = self.before.is_some_and(PathInfo::is_up);
        match self.goal {
            Goal::Removed => None,
            Goal::Disconnected if now.state == PathState::Disconnected => {
                ended("disconnected", None)
            }
            Goal::Disconnected => None,
            Goal::Added | Goal::Reconnected => {
                let ends = self.before.map_or(0, |before| before.ends);
                let reconnects = self.before.map_or(0, |before| before.reconnects);
                let anew = !was_up || now.reconnects > reconnects;
                if now.is_up() && now.leaving.is_none() && anew {
                    return ended("connected", None);
                }
                let failures = now.ends.saturating_sub(ends + u64::from(was_up));
                let borne = if self.goal == Goal::Reconnected { REFUSALS_MAX } else { 0 };
                let error = now.last_error.clone().filter(|_| failures > borne);
                error.and_then(|error| ended("waiting", Some(error)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::tests::{path, status};

    #[test]
    fn an_added_path_is_awaited_until_it_is_up_or_failed() {
        let watch = Watch { goal: Goal::Added, path: "p", before: None };
        assert_eq!(watch.outcome(Some(&path("connecting", 0, 0))), None);
        assert_eq!(watch.outcome(Some(&path("connected", 0, 0))).unwrap().state, "connected");
        let failed = watch.outcome(Some(&path("waiting", 0, 1))).unwrap();
        assert_eq!(failed.text("v", "p"), "v: path p is not connected yet: why\n");
    }

    #[test]
    fn a_reconnect_ends_when_the_path_is_up_again() {
        let goal = Goal::Reconnected;
        let before = path("connected", 3, 3);
        let watch = Watch { goal, path: "p", before: Some(&before) };
        let removed = watch.outcome(None).unwrap();
        assert_eq!(removed.text("v", "p"), "v: path p was removed meanwhile\n");
        assert_eq!(watch.outcome(Some(&before)), None, "still the old connection");
        assert_eq!(watch.outcome(Some(&path("connecting", 3, 4))), None);
        assert_eq!(watch.outcome(Some(&path("connected", 4, 4))).unwrap().error, None);
        let leaving = PathInfo { leaving: Some("remove".into()), ..path("connected", 4, 4) };
        assert_eq!(watch.outcome(Some(&leaving)), None);
        assert_eq!(watch.outcome(Some(&path("waiting", 3, 7))), None, "it may be refused");
        assert!(watch.outcome(Some(&path("waiting", 3, 8))).unwrap().error.is_some());
        let before = path("waiting", 3, 9);
        let watch = Watch { goal, path: "p", before: Some(&before) };
        assert_eq!(watch.outcome(Some(&before)), None);
        assert!(watch.outcome(Some(&path("waiting", 3, 13))).unwrap().error.is_some());
        assert_eq!(watch.outcome(Some(&path("connected", 4, 9))).unwrap().error, None);
    }

    #[test]
    fn a_session_that_lists_no_paths_has_removed_none() {
        let watch = Watch { goal: Goal::Removed, path: "p", before: None };
        assert_eq!(watch.seen(&status()), None);
        let empty = Status { paths: Some(Vec::new()), ..status() };
        assert_eq!(watch.seen(&empty).unwrap().state, "removed");
    }

    #[test]
    fn a_path_is_eventually_removed_or_disconnected() {
        let before = path("connected", 0, 0);
        let watch = Watch { goal: Goal::Removed, path: "p", before: Some(&before) };
        assert_eq!(watch.outcome(Some(&before)), None);
        assert_eq!(watch.outcome(None).unwrap().state, "removed");
        let watch = Watch { goal: Goal::Disconnected, path: "p", before: Some(&before) };
        assert_eq!(watch.outcome(Some(&path("closing", 0, 0))), None);
        let done = watch.outcome(Some(&path("disconnected", 0, 1))).unwrap();
        assert_eq!((done.state, done.error), ("disconnected", None));
    }
}
