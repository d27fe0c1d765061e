//! Start of a session, with all of its volumes that are to be attached.

use std::collections::BTreeMap;
use std::ffi::OsString;

use rtrs_core::settings::print;
use serde_yaml::Value;

use super::act::running_mate;
use super::group::{Group, Item};
use super::renew::Renewal;
use super::state::state_of;
use crate::cmd::attach::{Outcome, start_daemon};
use crate::cmd::session::{Session, Within};
use crate::error::{Error, ErrorKind};
use crate::plan::{AttachPlan, LaterVolume};
use crate::settings::{AttachSettings, SessionSettings, Settings};
use crate::volumes::difference::{Action, Found, Wanted};

/// Volumes with which a session was started, by name, and the errors of those not attached.
pub(super) type Started = BTreeMap<String, Result<(), Error>>;

impl Group<'_> {
    /// Starts the session with the volumes that are to be attached, unless it runs already. A
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

    /// Volumes to start a session with; none if it runs, or if a volume of it may run.
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

/// Starts the process of a session with these volumes.
pub(super) fn start(
    head: &Wanted,
    more: &[&Wanted],
    retry_for: Within,
) -> Result<Vec<Outcome>, Error> {
    let mut args: Vec<OsString> = vec!["attach".into(), "--run-dir".into()];
    args.push(head.plan.run_dir.path().into());
    args.push(format!("--retry-for={retry_for}").into());
    let settings = match head.first {
        None => head.configured.clone(),
        // The settings of the session, and its own.
        Some(_) => head.plan.printed(),
    };
    args.extend(flags(&settings).into_iter().map(OsString::from));
    args.extend(more.iter().map(|wanted| {
        let (name, settings) = (wanted.plan.session.name.clone(), wanted.plan.own());
        OsString::from(format!("--with={}", LaterVolume { name, settings }))
    }));
    args.extend(["--".into(), head.plan.session.name.clone().into()]);
    let more = more.iter().map(|wanted| wanted.plan.clone()).collect();
    start_daemon(&AttachPlan { more, ..head.plan.clone() }, args)
}

/// Flags for the settings that differ from their defaults.
pub(super) fn flags(settings: &Settings) -> Vec<String> {
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
