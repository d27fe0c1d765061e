//! The commands `set` and `get`: settings of a running server.

use clap::Args;
use rtrs_core::settings::{self, LogFilter, SettingValues, changes};

use super::server::{Server, ServerArgs};
use crate::control_protocol::Request;
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

/// Hint that names the command for listing the settings.
const HINT: &str = "`rtrs-server get` prints all";

fn key_value(text: &str) -> Result<(String, String), String> {
    settings::key_value(text, "log=debug")
}

pub(super) fn set(args: &SetArgs) -> Result<(), Error> {
    let usage = |text: String| Error::new(ErrorKind::Usage, text);
    let settings = changes(&args.settings)?;
    if let Some(level) = settings.get(LOG) {
        level.parse::<LogFilter>().map_err(|error| usage(format!("{LOG}: {error}")))?;
    }
    let server = Server::find(&args.server)?;
    let values: SettingValues = server.request(&Request::Get)?;
    values.check_known(settings.keys(), HINT)?;
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
    let values: SettingValues = Server::find(&args.server)?.request(&Request::Get)?;
    args.server.output.print(&values.select(&args.keys, HINT)?, text)
}

/// Formats settings as in the configuration file, with comments where `set` cannot change them.
fn text(values: &SettingValues) -> String {
    values.text(|setting| if setting.changeable { "" } else { "  # needs a restart" })
}
