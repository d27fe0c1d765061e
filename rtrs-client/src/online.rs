//! `path` and `policy`: an attached session is changed while it runs.
//!
//! The session's process judges a change and begins it at once ([`Online`], on the thread of its
//! control socket); who asked for it then looks at `status` until it is done, so that the control
//! socket serves others meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rtrs_core::config::Portal;
use serde_json::Value;

use crate::cli::Output;
use crate::config::Policy;
use crate::error::{Error, ErrorKind};
use crate::launch::{Cores, random_uuid};
use crate::plan::{PathPlan, PathStep, RunDir, SessionPlan, path_name};
use crate::provide::{Providers, path_target};
use crate::report::{self, Ask, Leave};
use crate::run::{self, ask_session, plain, show};
use crate::session::{Change, Leaving};

/// How long closing a path's connections takes at most, beyond the time of its requests.
const CLOSE_MAX: Duration = Duration::from_secs(15);
/// How long a path has to connect before we say that it has not.
const CONNECT_MAX: Duration = Duration::from_secs(30);
/// How often we look.
const LOOK: Duration = Duration::from_millis(50);

/// What changes of a session need beside its cores.
#[derive(Debug)]
pub(crate) struct Online {
    providers: Arc<Providers>,
    plan: SessionPlan,
}

impl Online {
    pub(crate) fn new(plan: &SessionPlan, providers: Arc<Providers>) -> Self {
        Self { providers, plan: plan.clone() }
    }

    /// Begins what was asked for. The error says why it cannot be done.
    pub(crate) fn change(&self, cores: &Cores, ask: Ask) -> Result<(), String> {
        let change = match ask {
            Ask::PathAdd { path } => self.addition(cores, &path)?,
            Ask::PathRemove(leave) => Change::Remove(leaving(&leave)),
            Ask::PathDisconnect(leave) => Change::Disconnect(leaving(&leave)),
            Ask::PathReconnect(leave) => Change::Reconnect(leaving(&leave)),
            Ask::Policy { policy } => Change::Policy(run::policy(policy)),
            Ask::Status | Ask::Stats | Ask::Detach { .. } => {
                return Err("that changes neither paths nor policy".into());
            }
        };
        cores.change(change)
    }

    fn addition(&self, cores: &Cores, path: &str) -> Result<Change, String> {
        let portal: Portal = path.parse().map_err(|e| format!("path {path:?}: {e}"))?;
        portal.check_connect().map_err(|e| e.to_string())?;
        self.providers.open(portal.scheme())?;
        let place = cores.provide(portal.scheme())?;
        let heartbeat = self.plan.own_heartbeat(portal.scheme());
        let target = path_target(&portal, place, self.plan.invalidate_reads, heartbeat)
            .map_err(|e| e.chain().to_string())?;
        let uuid = random_uuid().map_err(|e| format!("no random numbers: {e}"))?;
        Ok(Change::Add { target, uuid })
    }
}

fn leaving(leave: &Leave) -> Leaving {
    Leaving {
        path: path_name(&leave.path),
        within: Duration::from_millis(leave.within_ms),
        force: leave.force,
    }
}

/// `policy`.
pub(crate) fn policy(
    run_dir: &RunDir,
    name: &str,
    policy: Policy,
    output: Output,
) -> Result<(), Error> {
    let _ = ask_session(run_dir, name, &Ask::Policy { policy })?;
    let policy = plain(&policy);
    let value = serde_json::json!({ "name": name, "policy": policy });
    show(&value, output, |_| format!("{name}: policy {policy}\n"))
}

/// `path`.
pub(crate) fn path(plan: &PathPlan) -> Result<(), Error> {
    let PathPlan { name, step, run_dir, output } = plan;
    let ask = |leave: &crate::plan::Leave| Leave {
        path: leave.path.clone(),
        within_ms: leave.within_ms,
        force: leave.force,
    };
    let before = ask_session(run_dir, name, &Ask::Status)?;
    let (question, path, bound) = match step {
        PathStep::List => return show(&before["paths"], *output, report::paths_text),
        PathStep::Add(portal) => {
            let path = portal.to_string();
            (Ask::PathAdd { path: path.clone() }, path, CONNECT_MAX)
        }
        PathStep::Remove(leave) => {
            (Ask::PathRemove(ask(leave)), leave.path.clone(), closed_in(leave))
        }
        PathStep::Disconnect(leave) => {
            (Ask::PathDisconnect(ask(leave)), leave.path.clone(), closed_in(leave))
        }
        PathStep::Reconnect(leave) => {
            let bound = closed_in(leave) + CONNECT_MAX;
            (Ask::PathReconnect(ask(leave)), leave.path.clone(), bound)
        }
    };
    let _ = ask_session(run_dir, name, &question)?;
    let watch = Watch { step, path: &path, before: find(&before, &path) };
    let deadline = Instant::now() + bound;
    loop {
        let status = ask_session(run_dir, name, &Ask::Status)?;
        if let Some(outcome) = watch.seen(&status) {
            let value = serde_json::json!({ "name": name, "path": path, "state": outcome.state,
                "last_error": outcome.error });
            return show(&value, *output, |_| outcome.text(name, &path));
        }
        if Instant::now() >= deadline {
            let text = format!(
                "{name}: the change of {path} is not done after {} s; it goes on, see path list",
                bound.as_secs()
            );
            return Err(Error::new(ErrorKind::Path, text));
        }
        std::thread::sleep(LOOK);
    }
}

fn closed_in(leave: &crate::plan::Leave) -> Duration {
    Duration::from_millis(leave.within_ms) + CLOSE_MAX
}

fn find<'a>(status: &'a Value, path: &str) -> Option<&'a Value> {
    status["paths"].as_array()?.iter().find(|one| one["path"] == path)
}

/// Waits for the end of a change.
struct Watch<'a> {
    step: &'a PathStep,
    path: &'a str,
    before: Option<&'a Value>,
}

/// The end of a change.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    state: String,
    error: Option<String>,
}

impl Outcome {
    fn text(&self, name: &str, path: &str) -> String {
        let Self { state, error } = self;
        match error {
            Some(error) if state == "removed" => format!("{name}: {error}\n"),
            Some(error) => format!("{name}: path {path} is not connected yet: {error}\n"),
            None => format!("{name}: path {path} {state}\n"),
        }
    }
}

impl Watch<'_> {
    /// The end of the change, if that answer shows it. That of a session which is too busy to tell
    /// its paths shows nothing.
    fn seen(&self, status: &Value) -> Option<Outcome> {
        status["paths"].as_array().and_then(|_| self.outcome(find(status, self.path)))
    }

    /// The end of the change, if `now` shows it.
    fn outcome(&self, now: Option<&Value>) -> Option<Outcome> {
        let ended = |state: &str, error| Some(Outcome { state: state.to_owned(), error });
        let Some(now) = now else {
            return match self.step {
                PathStep::Remove(_) => ended("removed", None),
                _ => ended("removed", Some(format!("path {} was removed meanwhile", self.path))),
            };
        };
        let number = |path: &Value, key: &str| path[key].as_u64().unwrap_or(0);
        let was_up = self.before.is_some_and(|before| before["state"] == "connected");
        match self.step {
            PathStep::Remove(_) | PathStep::List => None,
            PathStep::Disconnect(_) if now["state"] == "disconnected" => {
                ended("disconnected", None)
            }
            PathStep::Disconnect(_) => None,
            PathStep::Add(_) | PathStep::Reconnect(_) => {
                let ends = self.before.map_or(0, |before| number(before, "ends"));
                let reconnects = self.before.map_or(0, |before| number(before, "reconnects"));
                let anew = !was_up || number(now, "reconnects") > reconnects;
                if now["state"] == "connected" && now["leaving"].is_null() && anew {
                    return ended("connected", None);
                }
                let failures = number(now, "ends").saturating_sub(ends + u64::from(was_up));
                let error = now["last_error"].as_str().filter(|_| failures > 0);
                error.and_then(|error| ended("waiting", Some(error.to_owned())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn path(state: &str, reconnects: u64, ends: u64) -> Value {
        json!({ "path": "p", "state": state, "reconnects": reconnects, "ends": ends,
            "leaving": null, "last_error": if ends > 0 { Some("why") } else { None } })
    }

    fn leave() -> crate::plan::Leave {
        crate::plan::Leave { path: "p".into(), within_ms: 1, force: false }
    }

    #[test]
    fn an_added_path_is_waited_for_until_it_is_up_or_has_failed() {
        let step = PathStep::Add("tcp://h".parse().unwrap());
        let watch = Watch { step: &step, path: "p", before: None };
        assert_eq!(watch.outcome(Some(&path("connecting", 0, 0))), None);
        assert_eq!(watch.outcome(Some(&path("connected", 0, 0))).unwrap().state, "connected");
        let failed = watch.outcome(Some(&path("waiting", 0, 1))).unwrap();
        assert_eq!(failed.text("v", "p"), "v: path p is not connected yet: why\n");
    }

    #[test]
    fn a_reconnect_is_done_when_the_path_is_up_anew() {
        let step = PathStep::Reconnect(leave());
        let before = path("connected", 3, 3);
        let watch = Watch { step: &step, path: "p", before: Some(&before) };
        let removed = watch.outcome(None).unwrap();
        assert_eq!(removed.text("v", "p"), "v: path p was removed meanwhile\n");
        assert_eq!(watch.outcome(Some(&before)), None, "still the old connection");
        assert_eq!(watch.outcome(Some(&path("connecting", 3, 4))), None);
        assert_eq!(watch.outcome(Some(&path("connected", 4, 4))).unwrap().error, None);
        assert!(watch.outcome(Some(&path("waiting", 3, 5))).unwrap().error.is_some());
        let before = path("waiting", 3, 9);
        let watch = Watch { step: &step, path: "p", before: Some(&before) };
        assert_eq!(watch.outcome(Some(&before)), None);
        assert!(watch.outcome(Some(&path("waiting", 3, 10))).unwrap().error.is_some());
        assert_eq!(watch.outcome(Some(&path("connected", 4, 9))).unwrap().error, None);
    }

    #[test]
    fn a_session_that_tells_no_paths_has_not_removed_one() {
        let step = PathStep::Remove(leave());
        let watch = Watch { step: &step, path: "p", before: None };
        assert_eq!(watch.seen(&json!({ "state": "not-answering", "paths": null })), None);
        assert_eq!(watch.seen(&json!({ "paths": [] })).unwrap().state, "removed");
    }

    #[test]
    fn a_path_that_leaves_is_gone_or_disconnected_in_the_end() {
        let before = path("connected", 0, 0);
        let step = PathStep::Remove(leave());
        let watch = Watch { step: &step, path: "p", before: Some(&before) };
        assert_eq!(watch.outcome(Some(&before)), None);
        assert_eq!(watch.outcome(None).unwrap().state, "removed");
        let step = PathStep::Disconnect(leave());
        let watch = Watch { step: &step, path: "p", before: Some(&before) };
        assert_eq!(watch.outcome(Some(&path("closing", 0, 0))), None);
        let done = watch.outcome(Some(&path("disconnected", 0, 1))).unwrap();
        assert_eq!((done.state.as_str(), done.error), ("disconnected", None));
    }
}
