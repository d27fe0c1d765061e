//! `set` and `get`: settings of an attached session.

use clap::Args;
use rtrs_core::settings::{self, SettingValues, changes};

use super::apply::running;
use super::global::GlobalArgs;
use super::session::Session;
use crate::control_protocol::{Changed, Request};
use crate::error::Error;

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

/// Hint that explains how to list the settings.
const HINT: &str = "get NAME prints all";

fn key_value(text: &str) -> Result<(String, String), String> {
    settings::key_value(text, "no-path=queue")
}

pub(super) fn set(args: &SetArgs, global: &GlobalArgs) -> Result<(), Error> {
    let settings = changes(&args.settings)?;
    let session = Session::find(&args.name, global)?;
    let values: SettingValues = session.request(&Request::Get)?;
    values.check_known(settings.keys(), HINT)?;
    // Values that no session of this kind accepts are usage errors. What the plan does not show,
    // such as a session that is ending, is left to the session.
    if let Ok(running) = running(&session.status()?, &session.run_dir, global) {
        running.plan.changed(&settings)?;
    }
    let _: Changed = session.request(&Request::Set { settings: settings.clone() })?;
    let mut values: SettingValues = session.request(&Request::Get)?;
    values.settings.retain(|setting| settings.contains_key(&setting.name));
    global.output.print(&values, text)
}

pub(super) fn get(args: &GetArgs, global: &GlobalArgs) -> Result<(), Error> {
    let values: SettingValues = Session::find(&args.name, global)?.request(&Request::Get)?;
    global.output.print(&values.select(&args.keys, HINT)?, text)
}

/// Formats settings as in the configuration file, with comments where `set` cannot change them.
fn text(values: &SettingValues) -> String {
    values.text(|setting| match setting.name.as_str() {
        _ if setting.changeable => "",
        "path" => "  # change it with path add and path remove",
        _ => "  # fixed until detach",
    })
}
