//! The command `export add`.

use std::path;

use clap::Args;
use rtrs_core::settings::printable;

use crate::cmd::server::{CHANGE_TIMEOUT, Server, ServerArgs, warnings_text};
use crate::cmd::text::losses_text;
use crate::control_protocol::{Changed, Request};
use crate::error::{Error, ErrorKind, failed};
use crate::settings::{ExportSpec, Target};

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct AddArgs {
    /// The export as [NAME=]TARGET[,OPTION...], as with --export
    pub export: ExportSpec,

    /// Set the access list also if that closes other exports or ends sessions
    #[arg(long)]
    pub force: bool,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &AddArgs) -> Result<(), Error> {
    let mut export = args.export.clone();
    // The server may have been started in another directory.
    let path = match &mut export.target {
        Target::Path(path) => Some(path),
        _ => export.conf.as_mut(),
    };
    if let Some(path) = path {
        let what = "the current directory is not known";
        *path = path::absolute(&*path).map_err(failed(ErrorKind::System, what))?;
    }
    let request = Request::ExportAdd { export, force: args.force };
    let (added, _) =
        Server::find(&args.server)?.request_within::<Changed>(&request, CHANGE_TIMEOUT)?;
    args.server.output.print(&added, |added| {
        let losses = losses_text(&added.losses, "");
        format!("{}{} added\n{losses}", warnings_text(&added.warnings), printable(&added.export))
    })
}
