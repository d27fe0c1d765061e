//! The commands `set` and `get`: settings of a running server.

use std::collections::BTreeMap;

use clap::Args;
use rtrs_core::settings::{LogFilter, printable};
use serde_json::Value;

use super::server::{Server, ServerArgs};
use crate::control_protocol::{Request, SettingValue, SettingValues};
use crate::daemon::LOG;
use crate::error::{Error, ErrorKind};

/// The arguments of `set`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct SetArgs {
    /// Settings and their new values, as in the configuration file, for example log=debug
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = key_value)]
    pub settings: Vec<(String, String)>,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

/// The arguments of `get`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct GetArgs {
    /// Settings to print instead of all
    #[arg(value_name = "KEY")]
    pub keys: Vec<String>,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("use KEY=VALUE, for example log=debug".to_owned()),
    }
}

pub(super) fn set(args: &SetArgs) -> Result<(), Error> {
    let usage = |text: String| Error::new(ErrorKind::Usage, text);
    let settings: BTreeMap<_, _> = args.settings.iter().cloned().collect();
    if settings.len() < args.settings.len() {
        return Err(usage("a setting is named twice; name each once".to_owned()));
    }
    if let Some(level) = settings.get(LOG) {
        level.parse::<LogFilter>().map_err(|error| usage(format!("{LOG}: {error}")))?;
    }
    let server = Server::find(&args.server)?;
    let values: SettingValues = server.request(&Request::Get)?;
    check_known(settings.keys(), &values)?;
    let fixed = |name: &&String| {
        values.settings.iter().any(|setting| setting.name == **name && !setting.changeable)
    };
    if let Some(name) = settings.keys().find(fixed) {
        let text = format!(
            "{name} cannot change while the server runs; change it in the configuration and \
             restart the server. {LOG} can change now"
        );
        return Err(usage(text));
    }
    let changed: SettingValues = server.request(&Request::Set { settings })?;
    args.server.output.print(&changed, text)
}

pub(super) fn get(args: &GetArgs) -> Result<(), Error> {
    let mut values: SettingValues = Server::find(&args.server)?.request(&Request::Get)?;
    check_known(args.keys.iter(), &values)?;
    let wanted = |setting: &SettingValue| args.keys.is_empty() || args.keys.contains(&setting.name);
    values.settings.retain(wanted);
    args.server.output.print(&values, text)
}

/// Rejects the name of an unknown setting.
fn check_known<'a>(
    mut keys: impl Iterator<Item = &'a String>,
    values: &SettingValues,
) -> Result<(), Error> {
    let is_known = |key: &&String| values.settings.iter().any(|setting| setting.name == **key);
    match keys.find(|key| !is_known(key)) {
        Some(key) => {
            let text = format!("there is no setting {key} here; `rtrs-server get` prints all");
            Err(Error::new(ErrorKind::Usage, text))
        }
        None => Ok(()),
    }
}

/// Formats settings as in the configuration file, with comments where `set` cannot change them.
fn text(values: &SettingValues) -> String {
    let line = |setting: &SettingValue| {
        let value = match &setting.value {
            Value::Null => "unset".to_owned(),
            Value::String(text) => printable(text),
            other => other.to_string(),
        };
        let remark = if setting.changeable { "" } else { "  # needs a restart" };
        format!("{}: {value}{remark}\n", setting.name)
    };
    values.settings.iter().map(line).collect()
}
