//! `detach`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use rtrs_core::local::remove_left_behind;
use rtrs_core::settings::{Output, print_text, printable};
use serde_json::{Value, json};

use super::global::GlobalArgs;
use super::session::{Session, Within};
use super::sessions::find;
use super::text::remark;
use crate::control_protocol::{Detached, Request};
use crate::daemon::device;
use crate::daemon::saved::Saved;
use crate::error::{Error, ErrorKind, system};

/// Maximum time for a daemon to notice that an NBD client has disconnected.
const CLIENT_PATIENCE: Duration = Duration::from_secs(1);
/// Interval between detach attempts during [`CLIENT_PATIENCE`].
const CLIENT_INTERVAL: Duration = Duration::from_millis(20);

/// The arguments.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// Names of the volumes on this host, as list shows them
    #[arg(value_name = "NAME", required_unless_present = "all", conflicts_with = "all")]
    pub names: Vec<String>,

    /// Detach all sessions of the run directory
    ///
    /// A session that cannot be detached does not keep the others attached.
    #[arg(long)]
    pub all: bool,

    /// Wait at most TIME (unit required, e.g. 5s) for running IO [default: 5s]
    ///
    /// IO that still runs after this time fails, and the command exits with 1. At most 10m; 0 does
    /// not wait.
    #[arg(long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub within: Within,

    /// Detach even if the device or socket is in use; unwritten data is lost
    ///
    /// Without this option, a device that is mounted, open or otherwise in use is not detached, nor
    /// is a volume with connected NBD clients or a virtual machine. With it, the IO of the users
    /// fails. If the process is dead, --force also forgets its unflushed writes: NBD clients get no
    /// error if the server loses them.
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
    let sessions = sessions(args, global)?;
    match &sessions[..] {
        [session] if args.names.len() == 1 => {
            let ended = end(session, args.within.millis(), args.force)?;
            warn(&ended, global.output);
            global.output.print(&ended.value(), |_| ended.text(&session.name))?;
            ended.verdict(&session.name)
        }
        sessions => detach_each(sessions, args, global.output),
    }
}

/// Returns the sessions to detach, each once.
fn sessions(args: &DetachArgs, global: &GlobalArgs) -> Result<Vec<Session>, Error> {
    let mut names = args.names.clone();
    if args.all {
        let run_dir = global.run_dir()?;
        run_dir.check()?;
        // A directory given by the user must exist: the name may be mistyped.
        if global.run_dir.is_some() {
            run_dir.files()?;
        }
        let found = find(&[(None, run_dir)], global.output)?;
        names = found.iter().map(|found| found.answer.name().to_owned()).collect();
    }
    let mut sessions: Vec<Session> = Vec::with_capacity(names.len());
    for name in names {
        if sessions.iter().all(|session| session.name != name) {
            sessions.push(Session::find(&name, global)?);
        }
    }
    Ok(sessions)
}

/// Detaches several sessions, one after another.
///
/// # Errors
/// Returns the failures, one per line, after all sessions have been tried.
fn detach_each(sessions: &[Session], args: &DetachArgs, output: Output) -> Result<(), Error> {
    let (mut rows, mut errors, mut printed) = (Vec::new(), Vec::new(), Ok(()));
    for session in sessions {
        let name = &session.name;
        let (mut row, failure) = match end(session, args.within.millis(), args.force) {
            Ok(ended) => {
                warn(&ended, output);
                // The other sessions are detached even if nothing can be printed.
                if output == Output::Text && printed.is_ok() {
                    printed = print_text(&ended.text(name));
                }
                (ended.value(), ended.verdict(name).err())
            }
            Err(error) => (json!({ "detached": false }), Some(error)),
        };
        let failure = failure.map(|error| error.chain().to_string());
        row["name"] = json!(name);
        row["error"] = json!(failure);
        rows.push(row);
        errors.extend(failure);
    }
    if output == Output::Json {
        printed = output.print(&rows, |_| String::new());
    }
    errors.extend(printed.err().map(|error: Error| error.chain().to_string()));
    match errors.is_empty() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::System, errors.join("\n"))),
    }
}

/// Prints the warning of a detach. In JSON it is part of the result.
fn warn(ended: &Ended, output: Output) {
    if let Ended::Detached(Detached { warning: Some(warning), .. }) = ended
        && output == Output::Text
    {
        remark(warning);
    }
}

/// Ends a session, or cleans up after a dead one.
pub(super) fn end(session: &Session, within_ms: u64, force: bool) -> Result<Ended, Error> {
    let status = match session.status() {
        Err(error) if error.kind() == ErrorKind::NotAttached => {
            return free(session, error, force);
        }
        status => status?,
    };
    if let Some(path) = &status.device
        && !force
    {
        device::refuse_if_used(&session.name, Path::new(path))?;
    }
    // The daemon may not have noticed yet that a client has disconnected.
    let deadline = Instant::now() + CLIENT_PATIENCE;
    loop {
        match session.request(&Request::Detach { within_ms, force }) {
            Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < deadline => {
                std::thread::sleep(CLIENT_INTERVAL);
            }
            result => return result.map(Ended::Detached),
        }
    }
}

impl Ended {
    /// Result as JSON.
    fn value(&self) -> Value {
        match self {
            Self::Detached(detached) => json!(detached),
            Self::Freed(freed) => json!({ "detached": false, "freed": freed }),
        }
    }

    /// Result as text.
    fn text(&self, name: &str) -> String {
        let name = printable(name);
        match self {
            Self::Detached(_) => format!("{name} detached\n"),
            Self::Freed(freed) if freed.is_empty() => {
                format!("{name} was dead; removed its socket\n")
            }
            Self::Freed(freed) => {
                format!(
                    "{name} was not attached; freed the devices that it had left behind: \
                     {freed:?}\n"
                )
            }
        }
    }

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

/// Frees the device that a dead process may have left behind, and removes its control socket. NBD
/// clients of the process may still be waiting for the next process, which must report lost writes
/// to them, so the saved epoch stays unless `force` is set or the process had a device: a device's
/// users cannot outlive it.
fn free(session: &Session, not_attached: Error, force: bool) -> Result<Ended, Error> {
    let (name, path) = (&session.name, session.left_socket());
    let freed = device::free(name, |export| session.run_dir.control_socket(export) == path)?;
    // Without a run directory, nothing was saved.
    let mut was_dead = false;
    if let Ok(saved) = Saved::beside(&session.run_dir, &path) {
        let ends_users = force || !freed.is_empty() || saved.device().is_some();
        // A failed attach has removed the socket.
        was_dead = saved.forget_but_epoch();
        if ends_users {
            saved.forget();
        }
    }
    was_dead |= remove_left_behind(&path)
        .map_err(system(format!("cannot remove the socket {}", path.display())))?;
    if freed.is_empty() && !was_dead {
        return Err(not_attached);
    }
    Ok(Ended::Freed(freed))
}
