//! The running server that a command addresses: finding it and sending it requests.
//!
//! The server is found by its control socket; without `--name` there must be only one running
//! server. Every request has a time limit.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use clap::Args;
use rtrs_core::local::{RequestError, RunDir, SocketState, listening_pid, request, socket_state};
use rtrs_core::settings::{MINUTE, Output, Time, printable};
use rtrs_core::time::Duration;
use serde::de::DeserializeOwned;

use crate::control_protocol::{Request, Sessions, Status};
use crate::error::{Error, ErrorKind};

/// Time limit for IO requests.
pub(super) type Within = Time<0, { 10 * MINUTE }>;

/// Maximum time for requests that make the server open or close files.
pub(super) const CHANGE_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time for a reply that does not depend on other work.
const REPLY_TIMEOUT: Duration = Duration::from_secs(15);
/// Time after which a command reports that it is waiting for such a reply.
const NOTICE_AFTER: Duration = Duration::from_secs(3);

/// Options that select the server and the output format.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct ServerArgs {
    /// Name of the server; required if several are running
    ///
    /// The --name of the server, or else the address of its first portal, for example
    /// 127.0.0.1:1234; just the port if it listens on all addresses.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Directory with control sockets [default: /run/rtrs, or $XDG_RUNTIME_DIR/rtrs without root]
    ///
    /// The default without root and without XDG_RUNTIME_DIR is /tmp/rtrs-UID.
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,

    /// Output format: text or json
    #[arg(short, long, value_name = "FORMAT", default_value = "text", hide_possible_values = true)]
    pub output: Output,
}

/// Formats warnings, one per line.
pub(super) fn warnings_text<'a>(warnings: impl IntoIterator<Item = &'a String>) -> String {
    warnings.into_iter().map(|why| format!("warning: {}\n", printable(why))).collect()
}

/// Notice on stderr that the server has not answered yet, unless dropped before it is due.
struct SlowNotice {
    _answered: mpsc::Sender<()>,
}

impl SlowNotice {
    fn start(socket: &Path) -> Self {
        let (answered, wait) = mpsc::channel::<()>();
        let (path, limit) = (socket.display(), REPLY_TIMEOUT.as_secs());
        let text = format!("the server at {path} does not answer yet; waiting up to {limit} s");
        // If no thread can be started, only the final error reports the delay.
        let _ = thread::Builder::new().name("slow-notice".into()).spawn(move || {
            if wait.recv_timeout(NOTICE_AFTER) == Err(RecvTimeoutError::Timeout) {
                // Ignored if stderr is closed.
                let _ = writeln!(io::stderr(), "{text}");
            }
        });
        Self { _answered: answered }
    }
}

/// A running server.
pub(super) struct Server {
    socket: PathBuf,
    /// Whether commands report that the server has not answered yet.
    notices: bool,
}

impl Server {
    fn at(socket: PathBuf) -> Self {
        Self { socket, notices: true }
    }

    /// Waits for replies without notices, for a command that fills the screen.
    pub(super) fn without_notices(self) -> Self {
        Self { notices: false, ..self }
    }

    /// Finds the server named by the arguments.
    pub(super) fn find(args: &ServerArgs) -> Result<Self, Error> {
        let run_dir = RunDir::new(args.run_dir.clone())?;
        run_dir.check_to_connect()?;
        let shown = run_dir.path().display().to_string();
        let mut dirs = vec![run_dir];
        if args.run_dir.is_none() {
            // The server's directory is included only for users who may connect there.
            let of_user = RunDir::new(Some(RunDir::OF_SERVER.into()))?;
            dirs.extend(Some(of_user).filter(|dir| dir.check_to_connect().is_ok()));
        }
        if let Some(name) = &args.name {
            let mut sockets = dirs.iter().map(|dir| dir.server_socket(name));
            let first = sockets.next().unwrap_or_default();
            let is_used =
                |path: &PathBuf| socket_state(path).is_ok_and(|state| state == SocketState::InUse);
            let other = sockets.find(|path| !is_used(&first) && is_used(path));
            let path = other.unwrap_or(first);
            let running = match socket_state(&path) {
                Ok(SocketState::Free | SocketState::Stale) => running_in(&dirs)?,
                // The request will report what is wrong.
                Ok(SocketState::InUse) | Err(_) => Vec::new(),
            };
            if running.is_empty() {
                return Ok(Self::at(path));
            }
            let names = running.iter().map(Self::name).collect::<Vec<_>>().join(", ");
            let text = format!("{}; running: {names}", no_server_at(&path));
            return Err(Error::new(ErrorKind::System, text));
        }
        let mut running = running_in(&dirs)?;
        match running.len() {
            0 => Err(Error::new(
                ErrorKind::System,
                format!(
                    "no server has a control socket in {shown} (--run-dir); check that a server is \
                     running, and its log for an error about the control socket"
                ),
            )),
            1 => Ok(running.remove(0)),
            _ => {
                let names: Vec<String> = running.iter().map(Self::name).collect();
                let names = names.join(", ");
                let text = format!(
                    "several servers are running; select one with --name after the command: {names}"
                );
                Err(Error::new(ErrorKind::Usage, text))
            }
        }
    }

    /// Name of the server, or the reason why it is unknown.
    fn name(&self) -> String {
        match self.request::<Status>(&Request::Status { load: false }) {
            Ok(status) => status.name,
            Err(error) => format!("{} ({})", self.socket.display(), error.chain()),
        }
    }

    /// Control socket of the server.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sessions of the server.
    pub(super) fn sessions(&self) -> Result<Sessions, Error> {
        self.request(&Request::SessionList)
    }

    /// Sends a request whose reply does not depend on other work.
    pub(super) fn request<T: DeserializeOwned>(&self, what: &Request) -> Result<T, Error> {
        Ok(self.request_within(what, REPLY_TIMEOUT)?.0)
    }

    /// Sends a request whose reply may take up to `timeout`. The server holds the connection until
    /// it exits. A request that may take long is sent only after a short one has been answered, to
    /// detect a stopped or hanging server.
    pub(super) fn request_within<T: DeserializeOwned>(
        &self,
        what: &Request,
        timeout: Duration,
    ) -> Result<(T, UnixStream), Error> {
        let takes_long = timeout > REPLY_TIMEOUT;
        if takes_long {
            let _: Status = self.request(&Request::Status { load: false })?;
        }
        let _notice = (self.notices && !takes_long).then(|| SlowNotice::start(&self.socket));
        request(&self.socket, what, timeout).map_err(|error| match error {
            RequestError::Io(error) if takes_long && error.kind() == io::ErrorKind::TimedOut => {
                let path = self.socket.display();
                let text = format!(
                    "the server at {path} has not finished the command yet and may still do so; \
                     check its state and its log for the result"
                );
                Error::with_source(ErrorKind::System, text, error)
            }
            error => failed(&self.socket, error),
        })
    }
}

/// Running servers with a socket in these run directories.
fn running_in(dirs: &[RunDir]) -> Result<Vec<Server>, Error> {
    let mut running = Vec::new();
    for dir in dirs {
        for path in dir.server_sockets()? {
            // A killed server leaves its socket behind.
            if socket_state(&path)? == SocketState::InUse {
                running.push(Server::at(path));
            }
        }
    }
    Ok(running)
}

fn no_server_at(socket: &Path) -> String {
    let path = socket.display();
    format!("no server of that name is running (no process listens on {path})")
}

fn failed(socket: &Path, error: RequestError) -> Error {
    let path = socket.display();
    match error {
        RequestError::NotRunning => Error::new(ErrorKind::System, no_server_at(socket)),
        RequestError::Refused(why) => Error::new(ErrorKind::System, why),
        RequestError::Io(error) if error.kind() == io::ErrorKind::TimedOut => {
            let pid = listening_pid(socket);
            let process = pid.map(|pid| format!(" {pid}")).unwrap_or_default();
            let text = format!(
                "the server at {path} does not answer; if its process{process} is stopped, let it \
                 continue with kill -CONT"
            );
            Error::with_source(ErrorKind::System, text, error)
        }
        RequestError::Io(error) => {
            let text = format!("cannot reach the server at {path}");
            Error::with_source(ErrorKind::System, text, error)
        }
    }
}
