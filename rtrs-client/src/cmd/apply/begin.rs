//! Starts a session for `apply`, with all of its volumes that are to be attached.

use std::collections::BTreeMap;

use super::act::running_mate;
use super::group::{Group, Item};
use super::renew::Renewal;
use super::start::start;
use super::state::state_of;
use crate::cmd::attach::Outcome;
use crate::cmd::session::Session;
use crate::error::{Error, ErrorKind};
use crate::volumes::difference::{Action, Found, Wanted};

/// Volumes with which a session was started, by name, and the errors of volumes that were not
/// attached.
pub(super) type Started = BTreeMap<String, Result<(), Error>>;

impl Group<'_> {
    /// Starts the session with the volumes that are to be attached, unless it is already running. A
    /// volume that cannot be attached does not affect the others.
    pub(super) fn start(&self, renewal: &Renewal) -> Started {
        let volumes = self.to_start(renewal);
        let Some((head, more)) = volumes.split_first() else { return Started::new() };
        let name_of = |wanted: &Wanted| wanted.plan.session.name.clone();
        match start(head, more, self.may.retry_for) {
            Ok(outcomes) => {
                let result = |outcome: &Outcome| match outcome.error() {
                    None => Ok(()),
                    Some(why) => Err(Error::new(ErrorKind::Path, why)),
                };
                outcomes.iter().map(|one| (one.name().to_owned(), result(one))).collect()
            }
            Err(error) => {
                let first = name_of(head);
                let other = |wanted: &&Wanted| (name_of(wanted), Err(not_started(&first)));
                let mut all: Started = more.iter().map(other).collect();
                all.insert(first, Err(error));
                all
            }
        }
    }

    /// Volumes to start the session with; none if the session, or one of its volumes, may already
    /// be running.
    fn to_start(&self, renewal: &Renewal) -> Vec<&Wanted> {
        let is_renewed = matches!(renewal, Renewal::Ended { .. });
        if self.items.iter().any(|item| item.task.action == Action::Unclear) {
            return Vec::new();
        }
        let to_attach = |item: &&Item| {
            item.error.is_none()
                && (item.task.action == Action::Attach || is_renewed && self.is_absent(item))
        };
        let items: Vec<&Item> = self.items.iter().filter(to_attach).collect();
        let volumes: Vec<&Wanted> = items.iter().filter_map(|item| item.wanted.as_ref()).collect();
        // An unusable name or run directory is reported when its item is handled.
        let session = |item: &Item| Session::new(&item.name, self.global).ok();
        let all: Vec<Session> = self.items.iter().filter_map(session).collect();
        match volumes.first() {
            Some(first) if running_mate(first, &all).is_none() => volumes,
            _ => Vec::new(),
        }
    }

    fn is_absent(&self, item: &Item) -> bool {
        let Some(wanted) = &item.wanted else { return false };
        let found = state_of(&item.name, &wanted.plan.run_dir, self.global);
        matches!(found, Found::Absent | Found::Dead)
    }
}

/// Error for a volume of a session whose process has failed.
fn not_started(head: &str) -> Error {
    let text = format!("its session was not started; see the result of {head:?}");
    Error::new(ErrorKind::NotAttached, text)
}
