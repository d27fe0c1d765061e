//! `set` and `get`: settings of an attached session.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::Value;

use super::apply::running;
use super::global::GlobalArgs;
use super::session::Session;
use crate::control_protocol::{Changed, Request, SettingValue, SettingValues};
use crate::error::{Error, usage};

/// The arguments of `set`.
#[derive(Debug, Args)]
pub struct SetArgs {
    /// Name of the volume on this host, as list shows it.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Settings and their new values, as in the configuration file
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = key_value)]
    pub settings: Vec<(String, String)>,
}

/// The arguments of `get`.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// Name of the volume on this host, as list shows it.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Settings to print instead of all
    #[arg(value_name = "KEY")]
    pub keys: Vec<String>,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("use KEY=VALUE, for example no-path=queue".to_owned()),
    }
}

pub(super) fn set(args: &SetArgs, global: &GlobalArgs) -> Result<(), Error> {
    let settings: BTreeMap<_, _> = args.settings.iter().cloned().collect();
    if settings.len() < args.settings.len() {
        return Err(usage("a setting is named twice; name each once"));
    }
    let session = Session::find(&args.name, global)?;
    let values: SettingValues = session.request(&Request::Get)?;
    check_known(settings.keys(), &values)?;
    // Values that no session of this kind accepts are wrong usage. What the plan does not show,
    // such as a session that is ending, is left to the session.
    if let Ok(running) = running(&session.status()?, &session.run_dir, global) {
        running.plan.changed(&settings)?;
    }
    let _: Changed = session.request(&Request::Set { settings: settings.clone() })?;
    let mut values: SettingValues = session.request(&Request::Get)?;
    values.settings.retain(|setting| settings.contains_key(&setting.name));
    global.output.print(&values, |values| values.settings.iter().map(line).collect())
}

pub(super) fn get(args: &GetArgs, global: &GlobalArgs) -> Result<(), Error> {
    let mut values: SettingValues = Session::find(&args.name, global)?.request(&Request::Get)?;
    check_known(args.keys.iter(), &values)?;
    let wanted = |setting: &SettingValue| args.keys.is_empty() || args.keys.contains(&setting.name);
    values.settings.retain(wanted);
    global.output.print(&values, |values| values.settings.iter().map(line).collect())
}

/// Rejects the name of an unknown setting.
fn check_known<'a>(
    mut keys: impl Iterator<Item = &'a String>,
    values: &SettingValues,
) -> Result<(), Error> {
    let is_known = |key: &&String| values.settings.iter().any(|setting| setting.name == **key);
    match keys.find(|key| !is_known(key)) {
        Some(key) => Err(usage(format!("there is no setting {key}; get NAME prints all"))),
        None => Ok(()),
    }
}

/// Formats a setting as in the configuration file, with a comment if `set` cannot change it.
fn line(setting: &SettingValue) -> String {
    let value = match &setting.value {
        Value::Null => "unset".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let remark = match setting.name.as_str() {
        _ if setting.changeable => "",
        "path" => "  # change it with path add and path remove",
        _ => "  # fixed until detach",
    };
    format!("{}: {value}{remark}\n", setting.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_may_hold_an_equals_sign() {
        let pair = key_value("no-path=queue-for=1m").unwrap();
        assert_eq!(pair, ("no-path".to_owned(), "queue-for=1m".to_owned()));
        for bad in ["", "policy", "=x"] {
            assert!(key_value(bad).unwrap_err().contains("use KEY=VALUE"), "{bad}");
        }
    }
}
