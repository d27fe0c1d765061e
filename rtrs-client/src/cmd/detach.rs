//! `detach`.

use std::path::{Path, PathBuf};

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

/// Result of a detach.
pub(super) enum Ended {
    /// The session has ended.
    Detached(Detached),
    /// The session's process was dead and had left these devices behind.
    Freed(Vec<PathBuf>),
}

pub(super) fn run(args: &DetachArgs, global: &GlobalArgs) -> Result<(), Error> {
    let session = Session::find(&args.name, global)?;
    let (name, ended) = (&session.name, end(&session, args.within.millis(), args.force)?);
    match &ended {
        Ended::Detached(detached) => {
            if let Some(warning) =
                detached.warning.as_ref().filter(|_| session.output == Output::Text)
            {
                remark(warning);
            }
            session.output.print(detached, |_| format!("{name} detached\n"))?;
        }
        Ended::Freed(freed) => {
            let value = json!({ "detached": false, "freed": freed });
            session.output.print(&value, |_| match &freed[..] {
                [] => format!("{name} was dead; removed its socket\n"),
                freed => {
                    format!("{name} was not attached; freed what it had left behind: {freed:?}\n")
                }
            })?;
        }
    }
    ended.verdict(name)
}

/// Ends a session, or cleans up after a dead one.
pub(super) fn end(session: &Session, within_ms: u64, force: bool) -> Result<Ended, Error> {
    let status = match session.status() {
        Err(error) if error.kind() == ErrorKind::NotAttached => return free(session, error),
        status => status?,
    };
    if let Some(path) = &status.device
        && !force
    {
        device::refuse_if_used(&session.name, Path::new(path))?;
    }
    session.request(&Request::Detach { within_ms }).map(Ended::Detached)
}

impl Ended {
    /// Returns an error if IO was cut off.
    pub(super) fn verdict(&self, name: &str) -> Result<(), Error> {
        let count = match self {
            Self::Detached(Detached { abandoned, .. }) => *abandoned,
            Self::Freed(_) => 0,
        };
        if count == 0 {
            return Ok(());
        }
        let plural = if count == 1 { "" } else { "s" };
        let text = format!(
            "{name}: {count} IO request{plural} did not end in time and failed; a write among them \
             may still reach the disk"
        );
        Err(Error::new(ErrorKind::Abandoned, text))
    }
}

/// Frees the device that a dead process may have left behind, and removes its control socket.
fn free(session: &Session, not_attached: Error) -> Result<Ended, Error> {
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
    Ok(Ended::Freed(freed))
}
