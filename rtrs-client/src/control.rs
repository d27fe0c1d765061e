//! The control socket of an attached session: one question, one answer, a line of JSON each.
//!
//! It runs on a thread of its own, off the IO path, and asks the cores by mail. Every read,
//! write and question has a bound, so a client that stops half way holds nothing up.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nbd_bridge::{SocketFile, bind_unix};

use crate::launch::Cores;
use crate::report::{self, Ask, Identity};

const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest question.
const ASK_MAX: u64 = 4096;

/// A detach, and who waits for the session's end.
#[derive(Debug)]
pub(crate) struct Detach {
    pub(crate) within: Duration,
    stream: UnixStream,
}

impl Detach {
    /// Tells who asked that the session has ended, and what there is to say about it. Its name
    /// must be free before.
    pub(crate) fn answer(self, warning: Option<&str>) {
        let answer = serde_json::json!({ "detached": true, "warning": warning });
        if let Err(error) = send(&self.stream, &answer) {
            tracing::debug!("who asked for the detach is gone: {error}");
        }
    }
}

/// The listening control socket. Removes its path when dropped.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    listener: UnixListener,
    _file: SocketFile,
}

impl ControlSocket {
    /// Binds the socket, for this user only. A path nobody listens on is replaced.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        let (listener, file) = bind_unix(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { listener, _file: file })
    }

    /// Serves questions until the process ends. `detaches` gets every detach.
    pub(crate) fn serve(
        &self,
        identity: Identity,
        cores: Cores,
        detaches: mpsc::Sender<Detach>,
    ) -> io::Result<()> {
        let listener = self.listener.try_clone()?;
        let busy = Arc::new(AtomicBool::new(false));
        std::thread::Builder::new().name("rtrs-control".into()).spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else {
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                };
                if let Err(error) = answer(&stream, &identity, &cores, &detaches, &busy) {
                    tracing::debug!("control socket: {error}");
                }
            }
        })?;
        Ok(())
    }
}

fn answer(
    stream: &UnixStream,
    identity: &Identity,
    cores: &Cores,
    detaches: &mpsc::Sender<Detach>,
    detaching: &Arc<AtomicBool>,
) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut line = String::new();
    BufReader::new(stream.take(ASK_MAX)).read_line(&mut line)?;
    let value = match serde_json::from_str::<Ask>(&line) {
        Err(error) => serde_json::json!({ "error": format!("not understood: {error}") }),
        Ok(Ask::Status) => report::status(identity, &cores.reports()),
        Ok(Ask::Stats) => report::stats(identity, &cores.reports()),
        Ok(Ask::Detach { within_ms }) => {
            if detaching.swap(true, Ordering::SeqCst) {
                serde_json::json!({ "error": "a detach is already under way" })
            } else {
                return detach(stream.try_clone()?, within_ms, detaches);
            }
        }
    };
    send(stream, &value)
}

/// Hands the detach over; `status` still answers until the session has ended.
fn detach(stream: UnixStream, within_ms: u64, detaches: &mpsc::Sender<Detach>) -> io::Result<()> {
    let within = Duration::from_millis(within_ms);
    match detaches.send(Detach { within, stream }) {
        Ok(()) => Ok(()),
        Err(mpsc::SendError(detach)) => {
            send(&detach.stream, &serde_json::json!({ "error": "the session is ending" }))
        }
    }
}

fn send(mut stream: &UnixStream, value: &serde_json::Value) -> io::Result<()> {
    let mut line = value.to_string();
    line.push('\n');
    stream.write_all(line.as_bytes())
}

/// Asks the session behind a control socket.
///
/// # Errors
/// The system's error; `NotFound` or `ConnectionRefused` when there is no session.
pub(crate) fn ask(path: &Path, question: Ask, timeout: Duration) -> io::Result<serde_json::Value> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut line = serde_json::to_string(&question).map_err(io::Error::other)?;
    line.push('\n');
    (&stream).write_all(line.as_bytes())?;
    let mut answer = String::new();
    BufReader::new(&stream).read_line(&mut answer)?;
    serde_json::from_str(&answer).map_err(|e| {
        io::Error::new(io::ErrorKind::InvalidData, format!("answer not understood: {e}"))
    })
}
