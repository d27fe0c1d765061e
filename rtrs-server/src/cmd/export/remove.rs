//! The command `export remove`.

use clap::Args;
use rtrs_core::settings::printable;

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

    /// Maximum time to wait for its last requests, for example 10s
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub within: Within,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &RemoveArgs) -> Result<(), Error> {
    let RemoveArgs { export, force, within, server } = args;
    let (name, within_ms) = (export.clone(), within.millis());
    let request = Request::ExportRemove { name, force: *force, within_ms };
    let timeout = within.get() + CHANGE_TIMEOUT;
    let (removed, _) = Server::find(server)?.request_within::<Removed>(&request, timeout)?;
    let export = printable(export);
    server.output.print(&removed, |removed| match &removed.ended[..] {
        [] => format!("{export} removed\n"),
        ended => format!("{export} removed; ended for {}\n", printable(&ended.join(", "))),
    })
}
