//! `detach`.

use std::path::Path;

use clap::Args;
use rtrs_core::local::remove_left_behind;
use rtrs_core::settings::Output;
use serde_json::json;

use super::global::GlobalArgs;
use super::session::{Session, Within};
use super::text::remark;
use crate::control_protocol::{Detached, Request};
use crate::daemon::device;
use crate::daemon::saved::Saved;
use crate::error::{Error, ErrorKind, system};

/// The arguments.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// Name of the export that was attached.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Wait at most TIME (unit required, e.g. 5s) for running IO [default: 5s]
    ///
    /// Wait at most TIME (unit required, e.g. 5s) for running IO; what still runs then fails and
    /// the command exits 1. At most 10m; 0 does not wait.
    #[arg(long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub within: Within,

    /// Detach even if the device is in use; unwritten data is lost
    ///
    /// Without this a device that is mounted, open or otherwise in use is not detached. The IO of
    /// its users fails.
    #[arg(long)]
    pub force: bool,
}

pub(super) fn run(args: &DetachArgs, global: &GlobalArgs) -> Result<(), Error> {
    let session = Session::find(&args.name, global)?;
    let status = match session.status() {
        Err(error) if error.kind() == ErrorKind::NotAttached => return free(&session, error),
        status => status?,
    };
    if let Some(path) = &status.device
        && !args.force
    {
        device::refuse_if_used(&session.name, Path::new(path))?;
    }
    let request = Request::Detach { within_ms: args.within.millis() };
    let detached: Detached = session.request(&request)?;
    if let Some(warning) = detached.warning.as_ref().filter(|_| session.output == Output::Text) {
        remark(warning);
    }
    session.output.print(&detached, |_| format!("{} detached\n", session.name))?;
    match detached.abandoned {
        0 => Ok(()),
        count => {
            let text = format!(
                "{}: {count} IO request{} did not end in time and failed; a write among them may \
                 still reach the disk",
                session.name,
                if count == 1 { "" } else { "s" },
            );
            Err(Error::new(ErrorKind::Abandoned, text))
        }
    }
}

/// Frees the device that a dead process may have left behind, and removes its control socket.
fn free(session: &Session, not_attached: Error) -> Result<(), Error> {
    let name = &session.name;
    let freed = device::free(name)?;
    // Without a run directory nothing was saved.
    if let Ok(saved) = Saved::new(&session.run_dir, name) {
        saved.forget();
    }
    let path = session.control_socket();
    let was_dead = remove_left_behind(&path)
        .map_err(system(format!("cannot remove the socket {}", path.display())))?;
    if freed.is_empty() && !was_dead {
        return Err(not_attached);
    }
    session.output.print(&json!({ "detached": false, "freed": freed }), |_| match &freed[..] {
        [] => format!("{name} was dead; removed its socket\n"),
        freed => format!("{name} was not attached; freed what it had left behind: {freed:?}\n"),
    })
}
