//! The command `export remove`.

use clap::Args;
use rtrs_core::settings::printable;

use super::store::{Store, saved_text};
use crate::cmd::server::{CHANGE_TIMEOUT, Server, ServerArgs, Within};
use crate::control_protocol::{Removed, Request};
use crate::error::Error;

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct RemoveArgs {
    /// Name of the export, as in `export list`
    pub export: String,

    /// Remove it also if sessions have it open: their devices end with errors
    #[arg(long)]
    pub force: bool,

    /// Remove it from exports-dir too, so that a restart does not bring it back
    ///
    /// Refused before anything changes if the file cannot be written, or if the configuration file
    /// or a flag names the export.
    #[arg(long)]
    pub save: bool,

    /// Maximum time to wait for its last requests, for example 10s
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub within: Within,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &RemoveArgs) -> Result<(), Error> {
    let RemoveArgs { export, force, save, within, server: selected } = args;
    let (name, within_ms) = (export.clone(), within.millis());
    let request = Request::ExportRemove { name, force: *force, within_ms };
    let timeout = within.get() + CHANGE_TIMEOUT;
    let server = Server::find(selected)?;
    let store = save.then(|| Store::open(&server, export)).transpose()?;
    let (mut removed, _) = server.request_within::<Removed>(&request, timeout)?;
    let saved = store.map_or(Ok(None), Store::remove).map(|file| removed.saved = file);
    let export = printable(export);
    selected.output.print(&removed, |removed| {
        let ended = match &removed.ended[..] {
            [] => String::new(),
            ended => format!("; ended for {}", printable(&ended.join(", "))),
        };
        format!("{export} removed{ended}\n{}", saved_text(removed.saved.as_deref()))
    })?;
    saved
}
