//! `reload`.

use clap::Args;
use rtrs_core::settings::printable;

use crate::cmd::server::{CHANGE_TIMEOUT, Server, ServerArgs};
use crate::control_protocol::{Kept, Reloaded, Request};
use crate::error::{Error, ErrorKind};

/// The arguments.
#[derive(Debug, Clone, Args)]
pub struct ReloadArgs {
    /// Print what a reload would change, and change nothing
    ///
    /// Targets are not opened, so one that is locked is found only by the reload.
    #[arg(long)]
    pub dry_run: bool,

    /// Which server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &ReloadArgs) -> Result<(), Error> {
    let server = Server::find(&args.server)?;
    let request = if args.dry_run { Request::ReloadPreview } else { Request::Reload };
    let (done, _) = server.request_within::<Reloaded>(&request, CHANGE_TIMEOUT)?;
    args.server.output.print(&done, |done| text(done, args.dry_run))?;
    match done.failed.len() {
        0 => Ok(()),
        1 => Err(Error::new(ErrorKind::Export, "one export is not as the configuration says")),
        more => {
            let text = format!("{more} exports are not as the configuration says");
            Err(Error::new(ErrorKind::Export, text))
        }
    }
}

fn text(done: &Reloaded, dry_run: bool) -> String {
    let would = if dry_run { "would be " } else { "" };
    let Reloaded { added, removed, changed, kept, failed, restart, unchanged, access_changed } =
        done;
    let mut out = String::new();
    for (what, names) in [("added", added), ("removed", removed), ("changed", changed)] {
        out.extend(names.iter().map(|name| format!("{would}{what} {}\n", printable(name))));
    }
    let line = |what: &str, one: &Kept| {
        format!("{would}{what} {}: {}\n", printable(&one.name), printable(&one.why))
    };
    out.extend(kept.iter().map(|one| line("kept", one)));
    out.extend(failed.iter().map(|one| line("failed", one)));
    if !restart.is_empty() {
        out += &format!("needs a restart: {}\n", restart.join(", "));
    }
    if *access_changed {
        out += &format!("{would}changed: the access list of the server\n");
    }
    let done = added.len() + removed.len() + changed.len();
    out + &match dry_run {
        true => format!("{done} exports would change, {unchanged} are as they should be\n"),
        false => format!("{done} exports changed, {unchanged} as they were\n"),
    }
}
