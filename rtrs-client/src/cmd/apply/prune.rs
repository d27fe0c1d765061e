//! Predictions about the sessions that `--prune` detaches: which are in use, and which hold a
//! device, socket or address that a different session will take.

use std::path::Path;

use rtrs_core::local::RunDir;

use super::group::Item;
use super::state::state_of;
use crate::cmd::at_once::at_once;
use crate::cmd::global::GlobalArgs;
use crate::cmd::session::Session;
use crate::daemon::device::refuse_if_used;
use crate::error::{Error, ErrorKind};
use crate::plan::{AttachPlan, Front};
use crate::volumes::difference::{Action, Found, Running};

/// Number of sessions queried at the same time.
const AT_ONCE: usize = 16;

/// Purpose of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The actions are performed afterwards.
    Act,
    /// Only the differences matter, not whether the actions would be refused.
    Compare,
    /// The actions are only shown. With `force` they would detach sessions in use.
    Show { force: bool },
}

/// Whether a session will be detached, as far as is known.
fn is_pruned(item: &Item) -> bool {
    item.task.action == Action::Detach && item.error.is_none()
}

fn pruned(items: &[Item]) -> Vec<String> {
    items.iter().filter(|item| is_pruned(item)).map(|item| item.name.clone()).collect()
}

/// Records, for sessions that are in use, the error that the detach would return.
pub(super) fn foresee_refusals(items: &mut [Item], global: &GlobalArgs) {
    let errors = at_once(&pruned(items), AT_ONCE, |name| refusal(name, global).err());
    for (item, error) in items.iter_mut().filter(|item| is_pruned(item)).zip(errors) {
        item.error = error;
    }
}

/// Fails if the session is in use, with the error that its detach would return.
fn refusal(name: &str, global: &GlobalArgs) -> Result<(), Error> {
    let status = Session::new(name, global)?.status()?;
    if let Some(path) = &status.device {
        return refuse_if_used(name, Path::new(path));
    }
    match status.nbd_clients {
        0 => Ok(()),
        _ if status.is_for_machine() => {
            let text = format!(
                "{name:?} is used by a virtual machine; stop it first, or use --force, which \
                 removes its disk"
            );
            Err(Error::new(ErrorKind::InUse, text))
        }
        clients => {
            let text = format!(
                "{name:?} is served to NBD clients ({clients} connected); end them first, or use \
                 --force, which ends their connections"
            );
            Err(Error::new(ErrorKind::InUse, text))
        }
    }
}

/// Turns refusals into reasons, for commands that count only errors in the comparison.
pub(super) fn explain_refusals(items: &mut [Item]) {
    for item in items.iter_mut().filter(|item| item.task.action == Action::Detach) {
        let refusal = item.error.take_if(|error| error.kind() == ErrorKind::InUse);
        if let Some(refusal) = refusal {
            item.task.reason = Some(refusal.chain().to_string());
        }
    }
}

/// Drops the errors of attaches that take the place of a session that is detached first.
pub(super) fn expect_free_places(items: &mut [Item], run_dir: &RunDir, global: &GlobalArgs) {
    let is_refused = |item: &Item| item.task.action == Action::Attach && item.error.is_some();
    if !items.iter().any(is_refused) {
        return;
    }
    let states = at_once(&pruned(items), AT_ONCE, |name| state_of(name, run_dir, global));
    let running = states.into_iter().filter_map(|found| match found {
        Found::Running(running) => Some(*running),
        _ => None,
    });
    let running: Vec<Running> = running.collect();
    for item in items.iter_mut().filter(|item| is_refused(item)) {
        let Some(wanted) = &item.wanted else { continue };
        if let Some(holder) = running.iter().find(|one| has_place_of(one, &wanted.plan)) {
            let name = &holder.plan.session.name;
            item.task.reason = Some(format!("replaces {name:?}"));
            item.error = None;
        }
    }
}

/// Whether a running session holds the device, socket or address of a plan.
fn has_place_of(running: &Running, plan: &AttachPlan) -> bool {
    match &plan.front {
        Front::Device(options) => running.device == Some(options.choice.to_string()),
        front => running.plan.front == *front,
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::settings::Output;

    use super::*;
    use crate::settings::Settings;

    #[test]
    fn a_place_is_a_device_a_socket_or_an_address() {
        let plan = |front: &str| {
            let settings = Settings::from_yaml(&format!("path: tcp://a\n{front}"), "s.yaml");
            AttachPlan::new("v", settings.unwrap(), Output::Text).unwrap()
        };
        let running = |front: &str, device: Option<&str>| {
            let (plan, device) = (plan(front), device.map(str::to_owned));
            Running { plan, device, identity: None, ended: None, no_service: None }
        };
        for (runs, device, wanted, same) in [
            ("device: auto", Some("/dev/nbd3"), "device: nbd3", true),
            ("device: nbd3", Some("/dev/nbd3"), "device: nbd4", false),
            ("device: nbd3", Some("/dev/nbd3"), "device: auto", false),
            ("socket: /s", None, "socket: /s", true),
            ("socket: /s", None, "socket: /t", false),
            ("listen: '127.0.0.1:7'", None, "listen: '127.0.0.1:7'", true),
            ("socket: /s", None, "device: nbd3", false),
        ] {
            let same_place = has_place_of(&running(runs, device), &plan(wanted));
            assert_eq!(same_place, same, "{runs} {wanted}");
        }
    }
}
