//! Reattaches all volumes of a session, to change settings that they share and that only a new
//! session can adopt.
//!
//! The volumes are detached first, and then handled as in an initial `apply`. Problems are detected
//! before any volume is detached. If a detach is still refused, the session continues, and the
//! volumes that were detached rejoin it.

use std::collections::BTreeMap;
use std::path::Path;

use super::act::{Allowed, check_identity, have_all_ended, needs_all};
use super::group::{Group, Item};
use crate::cmd::detach::end;
use crate::cmd::session::Session;
use crate::control_protocol::Status;
use crate::daemon::device::refuse_if_used;
use crate::error::{Error, ErrorKind};
use crate::volumes::difference::Action;

/// Result of the first step, the detach.
#[derive(Debug)]
pub(super) enum Renewal {
    /// No running session needs to be replaced, or the file does not list all of its volumes.
    NotNeeded,
    /// The session has ended. IO of these volumes was cut off.
    Ended { cut_off: BTreeMap<String, Error> },
    /// The session continues, because a volume cannot be detached. IO of volumes that were detached
    /// before that volume may have been cut off.
    Refused { why: String, cut_off: BTreeMap<String, Error> },
}

/// Ends the session of a group whose volumes must all be reattached, if the file lists all these
/// volumes.
pub(super) fn renew(group: &Group<'_>) -> Renewal {
    match sharers(group) {
        Ok(None) => Renewal::NotNeeded,
        Ok(Some(sharers)) => end_all(group, sharers),
        Err(error) => refused(error.chain().to_string()),
    }
}

fn refused(why: String) -> Renewal {
    Renewal::Refused { why, cut_off: BTreeMap::new() }
}

/// Volumes of the running session that must be replaced.
fn sharers(group: &Group<'_>) -> Result<Option<Vec<Session>>, Error> {
    if !group.may.reattach {
        return Ok(None);
    }
    for item in group.items {
        let Some(status) = shared_session(group, item)? else { continue };
        let is_listed = |name: &String| group.items.iter().any(|item| item.name == *name);
        if !status.volumes.iter().all(is_listed) {
            return Ok(None);
        }
        let session = |name: &String| Session::new(name, group.global);
        return status.volumes.iter().map(session).collect::<Result<_, _>>().map(Some);
    }
    Ok(None)
}

/// Status of a volume that can be reattached only together with the other volumes of its session.
fn shared_session(group: &Group<'_>, item: &Item) -> Result<Option<Status>, Error> {
    let Some(wanted) = item.wanted.as_ref().filter(|_| item.error.is_none()) else {
        return Ok(None);
    };
    if item.task.action != Action::NeedsReattach {
        return Ok(None);
    }
    let session = Session::new(&item.name, group.global)?;
    let status = match session.status() {
        // The session has ended since it was listed.
        Err(error) if error.kind() == ErrorKind::NotAttached => return Ok(None),
        status => status?,
    };
    let others = status.volumes.iter().filter(|name| **name != item.name);
    let others: Vec<Session> = others.map(|name| session.sibling(name)).collect();
    let all_ended = have_all_ended(&status, &others);
    let needs = !others.is_empty() && needs_all(wanted, &item.task, &status, all_ended);
    Ok(needs.then_some(status))
}

/// Detaches volumes, unless one of them cannot be detached.
fn end_all(group: &Group<'_>, sharers: Vec<Session>) -> Renewal {
    let Allowed { force, within_ms, .. } = group.may;
    let mut obstacles = Vec::new();
    let mut all = Vec::with_capacity(sharers.len());
    for session in sharers {
        match check(group, &session) {
            Ok(status) => all.push((session, status.nbd_clients)),
            Err(error) => obstacles.push(error.chain().to_string()),
        }
    }
    if !obstacles.is_empty() {
        return refused(obstacles.join("; "));
    }
    // A volume with clients is the first to refuse.
    all.sort_by_key(|(_, clients)| *clients == 0);
    let mut cut_off = BTreeMap::new();
    for (session, _) in all {
        match end(&session, within_ms, force) {
            Ok(ended) => {
                let failure = ended.verdict(&session.name).err();
                cut_off.extend(failure.map(|error| (session.name, error)));
            }
            // The session continues, so the others are not interrupted.
            Err(error) => return Renewal::Refused { why: error.chain().to_string(), cut_off },
        }
    }
    Renewal::Ended { cut_off }
}

/// Checks whether a volume can be detached and reattached.
fn check(group: &Group<'_>, session: &Session) -> Result<Status, Error> {
    let item = group.items.iter().find(|item| item.name == session.name);
    let wanted = item.and_then(|item| item.wanted.as_ref());
    let status = session.status()?;
    if let Some(wanted) = wanted {
        wanted.plan.session.check()?;
        check_identity(wanted, &status)?;
    }
    if let Some(path) = status.device.as_deref().filter(|_| !group.may.force) {
        refuse_if_used(&session.name, Path::new(path))?;
    }
    Ok(status)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rtrs_core::local::{ControlSocket, RunDir, reply};
    use rtrs_core::settings::Output;
    use serde_json::json;

    use super::*;
    use crate::cmd::global::GlobalArgs;
    use crate::cmd::session::Within;
    use crate::cmd::tests::status;
    use crate::control_protocol::Request;
    use crate::plan::AttachPlan;
    use crate::settings::Settings;
    use crate::volumes::difference::{Difference, Task, Wanted};

    /// Returns the result for volumes of a session. The first volume can be detached, with its IO
    /// cut off.
    fn renewed(test: &str, last: fn(&Request) -> Result<serde_json::Value, String>) -> Renewal {
        let place = format!("rtrs-renew-{test}-{}", std::process::id());
        let place = std::env::temp_dir().join(place);
        let dir = RunDir::new(Some(place.clone())).unwrap();
        dir.make().unwrap();
        let names = ["a", "b", "c"].map(str::to_owned);
        let mut sockets = Vec::new();
        let mut items = Vec::new();
        for name in &names {
            let volumes = names.to_vec();
            let found = Status { name: name.clone(), session: "s".into(), volumes, ..status() };
            let is_first = name == "a";
            let serve = move |request: Request, stream| match request {
                Request::Detach { .. } if is_first => {
                    reply(&stream, Ok(json!({ "detached": true, "abandoned": 2 })));
                }
                Request::Status if is_first => reply(&stream, Ok(&found)),
                request => match last(&request) {
                    Ok(_) if request == Request::Status => reply(&stream, Ok(&found)),
                    answer => reply(&stream, answer),
                },
            };
            let socket = ControlSocket::bind(&dir.control_socket(name)).unwrap();
            socket.serve(serve).unwrap();
            sockets.push(socket);
            let text = format!("path: tcp://127.0.0.1\nsocket: /s/{name}\nsession-name: s\n");
            let configured = Settings::from_yaml(&text, "s.yaml").unwrap();
            let plan = AttachPlan::new(name, configured.clone(), Output::Text).unwrap();
            let (setting, online) = ("crc".to_owned(), false);
            let (running, value) = (json!("on"), json!("off"));
            let differs = Difference { setting, running, wanted: value, online };
            let differences = vec![differs];
            let task = Task { action: Action::NeedsReattach, differences, reason: None };
            let wanted = Some(Wanted { configured, plan, first: None });
            items.push(Item { name: name.clone(), wanted, task, error: None });
        }
        let retry_for = Within::new(Duration::ZERO);
        let may = Allowed { reattach: true, force: false, within_ms: 0, retry_for };
        let global = GlobalArgs { output: Output::Text, run_dir: Some(place.clone()) };
        let retry_until = Instant::now();
        let group = Group { items: &items, may, retry_until, global: &global };
        let renewal = renew(&group);
        drop(sockets);
        std::fs::remove_dir_all(place).unwrap();
        renewal
    }

    #[test]
    fn each_volume_that_does_not_answer_is_an_obstacle() {
        let Renewal::Refused { why, cut_off } = renewed("silent", |_| Err("busy".into())) else {
            panic!("not refused");
        };
        assert_eq!((&*why, cut_off.len()), ("b: busy; c: busy", 0));
    }

    #[test]
    fn io_that_was_cut_off_before_a_refusal_is_reported() {
        let renewal = renewed("refused", |request| match request {
            Request::Detach { .. } => Err("it is in use".into()),
            _ => Ok(json!(null)),
        });
        let Renewal::Refused { why, cut_off } = renewal else { panic!("not refused") };
        assert_eq!(why, "it is in use");
        let names: Vec<&str> = cut_off.keys().map(String::as_str).collect();
        assert_eq!(names, ["a"]);
    }
}
