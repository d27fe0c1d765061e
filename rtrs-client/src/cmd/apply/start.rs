//! Starts a session's process.

use std::ffi::OsString;

use rtrs_core::settings::print;
use serde_yaml::Value;

use crate::cmd::attach::{Outcome, start_daemon};
use crate::cmd::session::Within;
use crate::error::Error;
use crate::plan::{AttachPlan, LaterVolume};
use crate::settings::{AttachSettings, SessionSettings, Settings};
use crate::volumes::difference::Wanted;

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
        // The session's settings, and the volume's own.
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
