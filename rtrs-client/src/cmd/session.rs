//! The attached session that a command addresses, and requests to it.

use std::io;
use std::path::PathBuf;

use clap::Args;
use rtrs_core::local::{RequestError, RunDir, check_socket_path, request};
use rtrs_core::settings::{MINUTE, Output, Time};
use rtrs_core::time::Duration;
use serde::de::DeserializeOwned;

use super::global::GlobalArgs;
use super::notice::Awaited;
use crate::control_protocol::{Request, Status};
use crate::error::{Error, ErrorKind, system};
use crate::plan::check_name;

/// Time limit for requests in flight.
pub(super) type Within = Time<0, { 10 * MINUTE }>;

/// Time limit for a reply that does not depend on other events.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for a session to attach a volume.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(75);
/// Time limit for a detach, on top of the time for requests.
const DETACH_MORE: Duration = Duration::from_secs(25);

/// The session of a command.
#[derive(Debug, Args)]
pub struct NameArgs {
    /// Name of the volume on this host, as list shows it.
    #[arg(value_name = "NAME")]
    pub name: String,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) name: String,
    /// Run directory of the control socket.
    pub(super) run_dir: RunDir,
    /// Output format of replies.
    pub(super) output: Output,
}

impl Session {
    /// Creates a handle for the session with that name, whether or not it exists.
    pub(super) fn new(name: &str, global: &GlobalArgs) -> Result<Self, Error> {
        check_name("volume name", name)?;
        let (name, run_dir) = (name.to_owned(), global.run_dir()?);
        check_socket_path("control socket", &run_dir.control_socket(&name))?;
        Ok(Self { name, run_dir, output: global.output })
    }

    /// Checks the run directory and creates a handle.
    pub(super) fn find(name: &str, global: &GlobalArgs) -> Result<Self, Error> {
        let session = Self::new(name, global)?;
        session.run_dir.check()?;
        Ok(session)
    }

    /// Creates a handle for another volume named by a session in the run directory.
    pub(super) fn sibling(&self, name: &str) -> Self {
        Self { name: name.to_owned(), run_dir: self.run_dir.clone(), output: self.output }
    }

    pub(super) fn control_socket(&self) -> PathBuf {
        self.run_dir.control_socket(&self.name)
    }

    /// Control socket left behind by a dead process. `list` shows only the part of a long name that
    /// the socket's file name contains, and this function also finds the socket by that part.
    pub(super) fn left_socket(&self) -> PathBuf {
        let path = self.control_socket();
        if path.exists() {
            return path;
        }
        // An unreadable directory is reported by the caller, which opens the returned path.
        let all = self.run_dir.session_sockets().unwrap_or_default();
        all.into_iter().find(|(listed, _)| *listed == self.name).map_or(path, |(_, left)| left)
    }

    /// Error for a session that does not exist.
    pub(super) fn not_attached(&self) -> Error {
        let (name, path) = (&self.name, self.control_socket());
        let text = format!(
            "{name:?} is not attached (no process listens on {}; check list and --run-dir)",
            path.display()
        );
        Error::new(ErrorKind::NotAttached, text)
    }

    /// Requests the status of the session.
    pub(super) fn status(&self) -> Result<Status, Error> {
        self.request(&Request::Status)
    }

    /// Sends a request to the session.
    pub(super) fn request<T: DeserializeOwned>(&self, what: &Request) -> Result<T, Error> {
        let timeout = match what {
            Request::Detach { within_ms, .. } => Duration::from_millis(*within_ms) + DETACH_MORE,
            Request::VolumeAdd { .. } => ATTACH_TIMEOUT,
            _ => REPLY_TIMEOUT,
        };
        let (name, path) = (&self.name, self.control_socket());
        let awaited = || match what {
            Request::Detach { .. } => format!("{name:?} to be detached"),
            Request::VolumeAdd { name: added, .. } => format!("{name:?} to attach {added:?}"),
            _ => format!("{name:?} to answer"),
        };
        let reply = Awaited { what: awaited, at_most: timeout }
            .with_notice(self.output, || request(&path, what, timeout));
        reply.map(|(reply, _)| reply).map_err(|error| match error {
            RequestError::NotRunning => self.not_attached(),
            // The error from a refused detach already names the volume.
            RequestError::Refused(why) if matches!(what, Request::Detach { .. }) => {
                Error::new(ErrorKind::InUse, why)
            }
            RequestError::Refused(why) => Error::new(ErrorKind::System, format!("{name}: {why}")),
            RequestError::Io(error) if error.kind() == io::ErrorKind::TimedOut => {
                Error::with_source(
                    ErrorKind::System,
                    format!(
                        "the process of {name:?} does not reply at {} within {} s; if it is \
                         stopped, let it continue with kill -CONT; if it hangs, end it with kill \
                         -9, which loses the waiting IO, then detach {name}",
                        path.display(),
                        timeout.as_secs()
                    ),
                    error,
                )
            }
            RequestError::Io(error) => {
                system(format!("cannot reach the session at {}", path.display()))(error)
            }
        })
    }
}
