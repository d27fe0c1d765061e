//! The command `export set`.

use clap::Args;
use rtrs_core::settings::printable;

use super::store::{Store, saved_text};
use crate::cmd::server::{CHANGE_TIMEOUT, Server, ServerArgs, warnings_text};
use crate::cmd::text::{NEEDS_FORCE, losses_text};
use crate::control_protocol::{Changed, Request};
use crate::error::{Error, ErrorKind};
use crate::settings::ExportSpec;

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct SetArgs {
    /// Name of the export, as in `export list`
    pub export: String,

    /// Options as with --export, for example ro or iops=2000; rw reverts ro, access= removes the
    /// access list, iops=none a limit
    ///
    /// Options that are not named do not change.
    #[arg(required = true, value_name = "OPTION")]
    pub options: Vec<String>,

    /// Apply the change even if that closes other exports, ends sessions or closes a deleted file
    #[arg(long)]
    pub force: bool,

    /// Print the changes and the sessions that would end, and change nothing
    #[arg(long, conflicts_with_all = ["force", "save"])]
    pub dry_run: bool,

    /// Also write the export with all its options to exports-dir, so that they survive a restart
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

pub(super) fn run(args: &SetArgs) -> Result<(), Error> {
    let SetArgs { export, options, force, dry_run, save, server: selected } = args;
    let with_options =
        |access| ExportSpec { access, ..ExportSpec::default() }.with_options(options);
    with_options(Vec::new()).map_err(|error| Error::new(ErrorKind::Usage, error.to_string()))?;
    let has_list = |access| with_options(access).is_ok_and(|spec| !spec.access.is_empty());
    let (name, options) = (export.clone(), options.clone());
    let request = Request::ExportSet { name, options, force: *force, dry_run: *dry_run };
    let server = Server::find(selected)?;
    let store = save.then(|| Store::open(&server, export, has_list)).transpose()?;
    let (mut set, _) = server.request_within::<Changed>(&request, CHANGE_TIMEOUT)?;
    let saved = store.map(|store| store.save(&server, "changed"));
    let saved = saved.transpose().map(|file| set.saved = file);
    selected.output.print(&set, |set| text(set, *dry_run))?;
    saved
}

fn text(set: &Changed, dry_run: bool) -> String {
    let Changed { export, changed, warnings, losses, needs_force, saved } = set;
    let what = match (changed, dry_run) {
        (false, _) => "already has these options",
        (true, false) => "changed",
        (true, true) => "would be changed",
    };
    let losses = losses_text(losses, if dry_run { "would be " } else { "" });
    let forced = if *needs_force { NEEDS_FORCE } else { "" };
    let (warnings, saved) = (warnings_text(warnings), saved_text(saved.as_deref()));
    format!("{warnings}{} {what}\n{losses}{forced}{saved}", printable(export))
}
