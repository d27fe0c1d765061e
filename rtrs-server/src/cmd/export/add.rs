//! The command `export add`.

use clap::Args;
use rtrs_core::local::absolute_path;
use rtrs_core::settings::printable;

use super::store::{Store, saved_text};
use crate::cmd::server::{CHANGE_TIMEOUT, Server, ServerArgs, warnings_text};
use crate::cmd::text::losses_text;
use crate::control_protocol::{Changed, Request};
use crate::error::{Error, ErrorKind, failed};
use crate::settings::ExportSpec;

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct AddArgs {
    /// The export as [NAME=]TARGET[,OPTION...], as with --export
    pub export: ExportSpec,

    /// Set the access list even if that closes other exports or ends sessions
    #[arg(long)]
    pub force: bool,

    /// Also write the export to exports-dir, so that it survives a restart
    ///
    /// Writes the file that already defines the export, or else NAME.yaml. Refused before anything
    /// changes if the file cannot be written, or if the configuration file or a flag defines the
    /// export.
    #[arg(long)]
    pub save: bool,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &AddArgs) -> Result<(), Error> {
    let mut export = args.export.clone();
    // The server may have been started in another directory.
    if let Some(path) = export.path_mut() {
        *path = absolute_path("export", path)?;
    }
    let server = Server::find(&args.server)?;
    let name = export.resolved_name();
    let name = name.map_err(failed(ErrorKind::Usage, "cannot add an export"))?;
    let has_list = !export.access.is_empty();
    let store = args.save.then(|| Store::open(&server, &name, |_| has_list)).transpose()?;
    let request = Request::ExportAdd { export: Box::new(export), force: args.force };
    let (mut added, _) = server.request_within::<Changed>(&request, CHANGE_TIMEOUT)?;
    let saved = store.map(|store| store.save(&server, "added"));
    let saved = saved.transpose().map(|file| added.saved = file);
    args.server.output.print(&added, |added| {
        let losses = losses_text(&added.losses, "");
        let saved = saved_text(added.saved.as_deref());
        let warnings = warnings_text(&added.warnings);
        format!("{warnings}{} added\n{losses}{saved}", printable(&added.export))
    })?;
    saved
}
