//! Performs the action for one session.

use std::time::{Duration, Instant};

use super::start::start;
use crate::cmd::attach::{Outcome, all_attached};
use crate::cmd::detach::end;
use crate::cmd::path::change::{Goal, Step, carry_out};
use crate::cmd::session::{Session, Within};
use crate::control_protocol::{Attached, Changed, Leave, Request, SessionState, Status};
use crate::error::{Error, ErrorKind};
use crate::plan::OF_ADDED;
use crate::volumes::difference::{Action, Task, Wanted};

/// Interval between attempts to attach a volume to a running session.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Permitted actions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    /// Detach sessions in order to reattach them.
    pub(super) reattach: bool,
    /// Detach sessions even if they are in use.
    pub(super) force: bool,
    /// Time allowed for IO in flight of detached sessions, in milliseconds.
    pub(super) within_ms: u64,
    /// Time for which an attach is retried.
    pub(super) retry_for: Within,
}

/// Volume to act on, with its context.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    pub(super) session: &'a Session,
    /// None if the file does not list the volume.
    pub(super) wanted: Option<&'a Wanted>,
    pub(super) task: &'a Task,
    /// Other volumes that share the session according to the file.
    pub(super) mates: &'a [Session],
    /// Deadline for retries of an attach to a running session.
    pub(super) retry_until: Instant,
}

/// Performs the action for a volume and returns the result; None if there was nothing to do.
///
/// # Errors
/// Returns the action's error.
pub(super) fn act(turn: &Turn<'_>, may: Allowed) -> Result<Option<&'static str>, Error> {
    let Turn { session, task, .. } = turn;
    match (task.action, turn.wanted) {
        (Action::Attach, Some(wanted)) => {
            attach(turn, wanted, turn.mates, may.retry_for)?;
            Ok(Some("attached"))
        }
        (Action::NeedsReattach, Some(wanted)) if may.reattach => {
            reattach(turn, wanted, may)?;
            Ok(Some("reattached"))
        }
        (Action::NeedsReattach, _) => {
            change(session, task, may.within_ms)?;
            Ok(None)
        }
        (Action::Change, _) => {
            change(session, task, may.within_ms)?;
            match session.status()?.no_service() {
                None => Ok(Some("changed")),
                Some(why) => {
                    let text = format!("the session was changed, but serves no IO: {why}");
                    Err(Error::new(ErrorKind::Path, text))
                }
            }
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
            Err(Error::new(ErrorKind::System, format!("cannot read its settings: {why}")))
        }
        _ => Ok(None),
    }
}

/// Error for a dead session that the file does not list. The session's device may be mounted and
/// waiting for a takeover.
pub(super) fn dead() -> Error {
    let text = "its process is dead; clean up with `rtrs-client detach`";
    Error::new(ErrorKind::NotAttached, text)
}

/// Makes the changes that are possible while the session is running. An error names the changes
/// that were made before the failure.
fn change(session: &Session, task: &Task, within_ms: u64) -> Result<(), Error> {
    let mut done = Vec::new();
    change_in_order(session, task, within_ms, &mut done).map_err(|error| match &done[..] {
        [] => error,
        done => {
            let text = format!("{} (done before: {})", error.chain(), done.join(", "));
            Error::new(error.kind(), text)
        }
    })
}

/// Makes the changes and lists the changes that were made. Paths are added before others are
/// removed, and a connected path is removed only once an added path is connected, because an added
/// address may be wrong.
fn change_in_order(
    session: &Session,
    task: &Task,
    within_ms: u64,
    done: &mut Vec<String>,
) -> Result<(), Error> {
    let settings = task.to_set();
    if !settings.is_empty() {
        let names = settings.keys().cloned().collect::<Vec<_>>().join(", ");
        let _: Changed = session.request(&Request::Set { settings })?;
        done.push(format!("set {names}"));
    }
    let mut added = None;
    for path in task.to_add() {
        let (path, goal) = (path.to_owned(), Goal::Added);
        done.push(format!("added path {path}"));
        let replaces = task.to_remove().map(str::to_owned).collect();
        let request = Request::PathAdd { path: path.clone(), replaces };
        let step = Step { goal, path, request, within_ms: 0 };
        let outcome = carry_out(session, &step).inspect_err(|_| drop(done.pop()))?;
        let why = outcome.error.map(|why| format!("{}: {why}", step.path));
        added = match (added, why) {
            (Some(None), _) | (_, None) => Some(None),
            (_, why) => Some(why),
        };
    }
    if let Some(Some(why)) = added {
        let status = session.status()?;
        let is_up = |path: &str| status.paths().iter().any(|one| one.path == path && one.is_up());
        if let Some(path) = task.to_remove().find(|path| is_up(path)) {
            let text = format!(
                "no added path is connected ({why}), so the connected path {path} and other paths \
                 that the file does not list are kept; correct the address and apply again"
            );
            return Err(Error::new(ErrorKind::Path, text));
        }
    }
    for path in task.to_remove() {
        let (path, goal) = (path.to_owned(), Goal::Removed);
        let request = Request::PathRemove(Leave { path: path.clone(), within_ms, force: false });
        let step = Step { goal, path, request, within_ms };
        carry_out(session, &step)?;
        done.push(format!("removed path {}", step.path));
    }
    Ok(())
}

/// Detaches a volume and reattaches it. Anything that would prevent the attach is detected before
/// the detach.
fn reattach(turn: &Turn<'_>, wanted: &Wanted, may: Allowed) -> Result<(), Error> {
    let session = turn.session;
    wanted.plan.session.check()?;
    let status = session.status()?;
    check_identity(wanted, &status)?;
    let sharers = status.volumes.iter().filter(|name| **name != session.name);
    let sharers: Vec<Session> = sharers.map(|name| session.sibling(name)).collect();
    let stays = !sharers.is_empty() && status.session == wanted.plan.session.session_name;
    if !sharers.is_empty() {
        let all_ended = have_all_ended(&status, &sharers);
        if needs_all(wanted, turn.task, &status, all_ended) {
            return Err(not_alone(&status));
        }
    }
    let mates = if stays { &sharers[..] } else { turn.mates };
    if let Some(first) = &wanted.first
        && running_mate(wanted, mates).is_none()
    {
        return Err(no_session(first));
    }
    if stays {
        // The session keeps its settings when the volume returns.
        change(session, turn.task, may.within_ms)?;
    }
    let ended = end(session, may.within_ms, may.force)?;
    // IO that was cut off is reported once the volume is back.
    attach(turn, wanted, mates, may.retry_for)?;
    ended.verdict(&session.name)
}

/// Whether a volume that shares its running session cannot be reattached alone. A volume can be
/// reattached alone if it leaves a session whose log belongs to a different volume, or returns with
/// changes only to its own settings, unless all volumes need a new session.
pub(super) fn needs_all(wanted: &Wanted, task: &Task, status: &Status, all_ended: bool) -> bool {
    if status.session != wanted.plan.session.session_name {
        return status.log == status.name;
    }
    let mut offline = task.differences.iter().filter(|one| !one.online);
    all_ended || !offline.all(|one| OF_ADDED.contains(&one.setting.as_str()))
}

/// Whether neither a volume nor the other volumes that share its session can serve IO again.
pub(super) fn have_all_ended(status: &Status, sharers: &[Session]) -> bool {
    let has_ended = |status: &Status| status.needs_new_session().is_some();
    let other_has = |other: &Session| other.status().is_ok_and(|status| has_ended(&status));
    has_ended(status) && sharers.iter().all(other_has)
}

/// Refuses to reattach a volume whose paths lead to a different export, which the new session would
/// accept.
pub(super) fn check_identity(wanted: &Wanted, status: &Status) -> Result<(), Error> {
    let is_checked = wanted.plan.session.settings.identity.is_some();
    if status.state != SessionState::IdentityMismatch || is_checked {
        return Ok(());
    }
    let text = "cannot reattach it: its paths lead to another server or export; correct them, or \
                set identity in the file if the volume was moved";
    Err(Error::new(ErrorKind::Path, text))
}

/// Error for reattaching a volume without the others that share its session. The file does not list
/// those volumes with this volume; otherwise all would have been detached together
/// ([`super::renew`]).
fn not_alone(status: &Status) -> Error {
    let text = format!(
        "cannot reattach the volume alone: the file does not list the other volumes of its session \
         with it; detach all with `rtrs-client detach {}`, then apply again",
        status.volumes.join(" ")
    );
    Error::new(ErrorKind::InUse, text)
}

/// Attaches a volume: to the session of its `mates` if that session is running, otherwise in a new
/// process.
fn attach(
    turn: &Turn<'_>,
    wanted: &Wanted,
    mates: &[Session],
    retry_for: Within,
) -> Result<(), Error> {
    match (running_mate(wanted, mates), &wanted.first) {
        (Some(mate), _) => add(mate, turn, wanted),
        (None, None) => all_attached(&start(wanted, &[], retry_for)?),
        (None, Some(first)) => Err(no_session(first)),
    }
}

/// Finds a volume that is running in the session that the file names.
pub(super) fn running_mate<'a>(wanted: &Wanted, mates: &'a [Session]) -> Option<&'a Session> {
    let name = &wanted.plan.session.session_name;
    mates.iter().find(|mate| mate.status().is_ok_and(|status| status.session == *name))
}

/// Error for a volume whose session is not running, or is running under a different name.
fn no_session(first: &str) -> Error {
    let text = format!(
        "cannot add the volume to the session of {first:?}, which does not match the file; see the \
         result of {first:?}"
    );
    Error::new(ErrorKind::NotAttached, text)
}

/// Adds a volume to a different volume's running session.
fn add(mate: &Session, turn: &Turn<'_>, wanted: &Wanted) -> Result<(), Error> {
    let name = turn.session.name.clone();
    let request = Request::VolumeAdd { name, settings: wanted.plan.own() };
    loop {
        match mate.request::<Attached>(&request) {
            Ok(attached) => {
                Outcome::Attached(Box::new(attached)).warn();
                return Ok(());
            }
            Err(_) if Instant::now() + RETRY_INTERVAL < turn.retry_until => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
