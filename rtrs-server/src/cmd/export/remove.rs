//! The command `export remove`.

use clap::Args;
use rtrs_core::settings::printable;

use super::store::{Store, unsaved_text};
use crate::cmd::server::{CHANGE_TIMEOUT, Server, ServerArgs, Within};
use crate::cmd::text::{NEEDS_FORCE, all_revoked_text, counted, from_text};
use crate::control_protocol::{Removed, Request};
use crate::error::{Error, ErrorKind};

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct RemoveArgs {
    /// Name of the export, as in `export list`
    pub export: String,

    /// Remove the export even if sessions have it open or its file was deleted
    ///
    /// The devices of the sessions end with errors. The content of a deleted file is lost.
    #[arg(long)]
    pub force: bool,

    /// Print the sessions that would lose the export or their access, and change nothing
    #[arg(long, conflicts_with_all = ["force", "save"])]
    pub dry_run: bool,

    /// Also remove the export from exports-dir, so that a restart does not restore it
    ///
    /// Refused before anything changes if the file cannot be written, or if the configuration file
    /// or a flag defines the export.
    #[arg(long)]
    pub save: bool,

    /// Maximum time to wait for running requests, for example 10s
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub within: Within,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &RemoveArgs) -> Result<(), Error> {
    let RemoveArgs { export, force, dry_run, save, within, server: selected } = args;
    let (name, within_ms) = (export.clone(), within.millis());
    let request = Request::ExportRemove { name, force: *force, within_ms, dry_run: *dry_run };
    let timeout = within.get() + CHANGE_TIMEOUT;
    let server = Server::find(selected)?;
    let store = save.then(|| Store::open(&server, export, |_| false)).transpose()?;
    let (mut removed, _) = server.request_within::<Removed>(&request, timeout)?;
    let saved =
        store.map_or(Ok(None), |store| store.remove(&server)).map(|file| removed.saved = file);
    selected.output.print(&removed, |removed| text(removed, *dry_run))?;
    saved?;
    removed.not_closed.map_or(Ok(()), |why| Err(Error::new(ErrorKind::System, why)))
}

fn text(removed: &Removed, dry_run: bool) -> String {
    let Removed { removed: export, users, revoked, needs_force, lost, saved, .. } = removed;
    let would = if dry_run { "would be " } else { "" };
    let mut out = format!("{} {would}removed\n", printable(export));
    out.extend(users.iter().map(|user| {
        let session = printable(user.name.as_deref().unwrap_or(&user.session));
        let from = from_text(&user.peers);
        format!("{would}ended: the export of session {session}{from} ({})\n", user.access)
    }));
    if users.len() > 1 {
        out += &format!("{} had it open\n", counted(users.len(), "session"));
    }
    out += &all_revoked_text(revoked, would);
    out.extend(lost.iter().map(|lost| format!("warning: {}\n", printable(lost))));
    out + if *needs_force { NEEDS_FORCE } else { "" } + &unsaved_text(saved.as_deref())
}
