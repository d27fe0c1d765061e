//! Performs the action for one session.

use std::ffi::OsString;

use rtrs_core::settings::print;
use serde_yaml::Value;

use crate::cmd::attach::{all_attached, start_daemon};
use crate::cmd::detach::end;
use crate::cmd::path::change::{Goal, Step, carry_out};
use crate::cmd::session::{Session, Within};
use crate::control_protocol::{Changed, Leave, Request};
use crate::error::{Error, ErrorKind};
use crate::settings::{AttachSettings, SessionSettings, Settings};
use crate::volumes::difference::{Action, Task, Wanted};

/// Permitted actions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    /// Detach sessions to attach them again.
    pub(super) reattach: bool,
    /// Detach sessions even if they are in use.
    pub(super) force: bool,
    /// Time for running IO of detached sessions, in milliseconds.
    pub(super) within_ms: u64,
    /// Time during which an attach is retried.
    pub(super) retry_for: Within,
}

/// Performs the action for a session and returns the result; None if there was nothing to do.
/// `wanted` is None if the file does not list the session.
///
/// # Errors
/// Returns the failure of the action.
pub(super) fn act(
    session: &Session,
    wanted: Option<&Wanted>,
    task: &Task,
    may: Allowed,
) -> Result<Option<&'static str>, Error> {
    match (task.action, wanted) {
        (Action::Attach, Some(wanted)) => {
            start(wanted, session, may.retry_for)?;
            Ok(Some("attached"))
        }
        (Action::NeedsReattach, Some(wanted)) if may.reattach => {
            // Finds problems that would keep the session from coming back.
            wanted.plan.session.check()?;
            let ended = end(session, may.within_ms, may.force)?;
            // IO that was cut off is reported when the session is back.
            start(wanted, session, may.retry_for)?;
            ended.verdict(&session.name)?;
            Ok(Some("reattached"))
        }
        (Action::NeedsReattach, _) => {
            change(session, task, may.within_ms)?;
            Ok(None)
        }
        (Action::Change, _) => {
            change(session, task, may.within_ms)?;
            Ok(Some("changed"))
        }
        (Action::Detach, _) => {
            if let Err(error) = session.status()
                && error.kind() == ErrorKind::NotAttached
            {
                return Err(dead());
            }
            end(session, may.within_ms, may.force)?.verdict(&session.name)?;
            Ok(Some("detached"))
        }
        (Action::Unclear, _) => {
            let why = task.reason.clone().unwrap_or_default();
            Err(Error::new(ErrorKind::System, format!("cannot see its settings: {why}")))
        }
        _ => Ok(None),
    }
}

/// Error for a dead session that the file does not list. Its device may be mounted, and wait for a
/// takeover.
pub(super) fn dead() -> Error {
    let text = "its process is dead; clean up with `rtrs-client detach`";
    Error::new(ErrorKind::NotAttached, text)
}

/// Makes the changes that are possible while the session runs. Paths are added before others are
/// removed, so that at least one stays.
fn change(session: &Session, task: &Task, within_ms: u64) -> Result<(), Error> {
    let settings = task.to_set();
    if !settings.is_empty() {
        let _: Changed = session.request(&Request::Set { settings })?;
    }
    for path in task.to_add() {
        let (path, goal) = (path.to_owned(), Goal::Added);
        let request = Request::PathAdd { path: path.clone() };
        carry_out(session, &Step { goal, path, request, within_ms: 0 })?;
    }
    for path in task.to_remove() {
        let (path, goal) = (path.to_owned(), Goal::Removed);
        let request = Request::PathRemove(Leave { path: path.clone(), within_ms, force: false });
        carry_out(session, &Step { goal, path, request, within_ms })?;
    }
    Ok(())
}

/// Starts the process of a session.
fn start(wanted: &Wanted, session: &Session, retry_for: Within) -> Result<(), Error> {
    let mut args: Vec<OsString> = vec!["attach".into(), "--run-dir".into()];
    args.push(session.run_dir.path().into());
    args.push(format!("--retry-for={retry_for}").into());
    args.extend(flags(&wanted.said).into_iter().map(OsString::from));
    args.extend(["--".into(), session.name.clone().into()]);
    all_attached(&start_daemon(&wanted.plan, args)?)
}

/// Flags for the settings that differ from their defaults.
fn flags(settings: &Settings) -> Vec<String> {
    let all = |session: &SessionSettings, attach: &AttachSettings| {
        let mut all = print(session);
        all.extend(print(attach));
        all
    };
    let defaults = all(&SessionSettings::default(), &AttachSettings::default());
    let mut flags = Vec::new();
    let one = |name: &str, value: &Value| match value {
        Value::Bool(true) => Some(format!("--{name}")),
        Value::String(text) => Some(format!("--{name}={text}")),
        Value::Number(number) => Some(format!("--{name}={number}")),
        _ => None,
    };
    for (name, value) in all(&settings.session, &settings.attach) {
        let Some(name) = name.as_str().filter(|name| defaults.get(*name) != Some(&value)) else {
            continue;
        };
        match &value {
            Value::Sequence(values) => flags.extend(values.iter().filter_map(|v| one(name, v))),
            value => flags.extend(one(name, value)),
        }
    }
    flags
}

#[cfg(test)]
mod tests;
