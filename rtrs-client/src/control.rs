//! The control socket of an attached session: one question, one answer, a line of JSON each.
//!
//! It runs on a thread of its own (`rtrs_core::local`), off the IO path, and asks the cores by
//! mail. Every question has a bound, so a client that stops half way holds nothing up.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use rtrs_core::local::{ControlSocket, reply};

use crate::launch::Cores;
use crate::online::Online;
use crate::report::{self, Ask, Identity};

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

/// Serves questions until the socket is dropped. `detaches` gets every detach.
pub(crate) fn serve(
    control: &ControlSocket,
    identity: Identity,
    cores: Cores,
    online: Online,
    detaches: mpsc::Sender<Detach>,
) -> io::Result<()> {
    control.serve(move |question, stream| {
        if let Err(error) = answer(question, stream, &identity, &cores, &online, &detaches) {
            tracing::debug!("control socket: {error}");
        }
    })
}

fn answer(
    question: &str,
    stream: UnixStream,
    identity: &Identity,
    cores: &Cores,
    online: &Online,
    detaches: &mpsc::Sender<Detach>,
) -> io::Result<()> {
    let value = match serde_json::from_str::<Ask>(question) {
        Err(error) => serde_json::json!({ "error": format!("not understood: {error}") }),
        Ok(Ask::Status) => report::status(identity, &cores.reports()),
        Ok(Ask::Stats) => report::stats(identity, &cores.reports()),
        // Also while one is under way: it may be in more of a hurry.
        Ok(Ask::Detach { within_ms }) => return detach(stream, within_ms, detaches),
        Ok(ask) => match online.change(cores, ask) {
            Ok(()) => serde_json::json!({ "changed": true }),
            Err(error) => serde_json::json!({ "error": error }),
        },
    };
    send(&stream, &value)
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

fn send(stream: &UnixStream, value: &serde_json::Value) -> io::Result<()> {
    reply(stream, &value.to_string())
}

/// Asks the session behind a control socket.
///
/// # Errors
/// The system's error; `NotFound` or `ConnectionRefused` when there is no session.
pub(crate) fn ask(path: &Path, question: &Ask, timeout: Duration) -> io::Result<serde_json::Value> {
    let question = serde_json::to_string(question).map_err(io::Error::other)?;
    let (answer, _) = rtrs_core::local::ask(path, &question, timeout)?;
    serde_json::from_str(&answer).map_err(|e| {
        io::Error::new(io::ErrorKind::InvalidData, format!("answer not understood: {e}"))
    })
}
