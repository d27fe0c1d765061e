//! The command `export drain`.

use clap::Args;
use rtrs_core::settings::printable;

use crate::cmd::server::{CHANGE_TIMEOUT, Server, ServerArgs, Within};
use crate::control_protocol::{ExportDrained, Request};
use crate::error::Error;

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct DrainArgs {
    /// Name of the export, as in `export list`
    pub export: String,

    /// Maximum time to wait for running requests, for example 10s
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub within: Within,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &DrainArgs) -> Result<(), Error> {
    let DrainArgs { export, within, server } = args;
    let request = Request::ExportDrain { name: export.clone(), within_ms: within.millis() };
    let timeout = within.get() + CHANGE_TIMEOUT;
    let (drained, _) = Server::find(server)?.request_within::<ExportDrained>(&request, timeout)?;
    server.output.print(&drained, |drained| format!("{} is standby\n", printable(&drained.standby)))
}
