//! The commands that speak with a running server: one function each.
//!
//! The server is found by its control socket; without `--name` it is the one that runs. Every
//! question and every wait has a bound.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rtrs_core::config::Millis;
use rtrs_core::local::{RunDir, SocketState, ask, socket_state};
use rtrs_core::time::Duration;
use serde_json::{Value, json};

use super::question::{Question, WITHIN_MS_MAX};
use super::report;
use crate::cli::{Command, DisconnectArgs, DrainArgs, EvictArgs, SessionCommand, Shown, Where};
use crate::error::{Error, ErrorKind};

/// How long a server has for an answer that it need not wait for.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// What a drain may take beyond its time: the ends of connections, of threads, and the last flush.
const DRAIN_MORE: Duration = Duration::from_secs(30);
/// How long a server that was drained has to end its process.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// How often an evicted session is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// Does what the command says.
///
/// # Errors
/// [`ErrorKind::Usage`] for a time out of range, else what the server or the system refuses.
pub fn run(command: &Command) -> Result<(), Error> {
    match command {
        Command::Session(SessionCommand::List(place)) => list(place),
        Command::Session(SessionCommand::Disconnect(args)) => disconnect(args),
        Command::Session(SessionCommand::Evict(args)) => evict(args),
        Command::Drain(args) => drain(args),
    }
}

fn list(place: &Where) -> Result<(), Error> {
    let sessions = sessions_of(&find(place)?)?;
    show(&sessions, place.output, report::sessions_text)
}

fn disconnect(args: &DisconnectArgs) -> Result<(), Error> {
    let DisconnectArgs { session, path, place } = args;
    let question = Question::SessionDisconnect { session: session.clone(), path: *path };
    let answer = question_to(&find(place)?, &question, ANSWER_TIMEOUT)?.0;
    show(&answer, place.output, |answer| match answer["paths"].as_array().map(Vec::as_slice) {
        Some([]) | None => format!("{session} has no path that is up\n"),
        Some(paths) => {
            let paths: Vec<String> = paths.iter().map(Value::to_string).collect();
            format!("{session}: ended path {}\n", paths.join(", "))
        }
    })
}

fn evict(args: &EvictArgs) -> Result<(), Error> {
    let EvictArgs { session, within, place } = args;
    let limit = bound(*within)?;
    let server = find(place)?;
    let question = Question::SessionEvict { session: session.clone() };
    let answer = question_to(&server, &question, ANSWER_TIMEOUT)?.0;
    let Some(id) = answer["session"].as_str() else {
        let text = format!("the server does not say which session it evicted: {answer}");
        return Err(Error::new(ErrorKind::System, text));
    };
    let deadline = Instant::now() + limit;
    loop {
        let sessions = sessions_of(&server)?;
        let left = sessions.as_array().into_iter().flatten().find(|left| left["id"] == id);
        let Some(left) = left else { break };
        if Instant::now() >= deadline {
            return Err(Error::new(
                ErrorKind::System,
                format!(
                    "{session} is evicted, but {} of its requests still run at the backend; its \
                     exports are held until they end (session list shows when)",
                    left["io"]["inflight"]
                ),
            ));
        }
        std::thread::sleep(LOOK);
    }
    show(&json!({ "evicted": id }), place.output, |_| format!("{session} evicted\n"))
}

fn drain(args: &DrainArgs) -> Result<(), Error> {
    let DrainArgs { within, place } = args;
    let limit = bound(*within)?;
    let question = Question::Drain { within_ms: within.get() };
    let (answer, stream) = question_to(&find(place)?, &question, limit + DRAIN_MORE)?;
    wait_exit(&stream)?;
    show(&answer, place.output, |_| "drained\n".to_owned())
}

/// The server's process holds its end until it is gone: then its address and its files are free.
fn wait_exit(stream: &UnixStream) -> Result<(), Error> {
    let ended = stream
        .set_read_timeout(Some(EXIT_TIMEOUT))
        .and_then(|()| io::copy(&mut stream.take(4096), &mut io::sink()));
    ended.map(drop).map_err(|error| {
        let what = "the server is drained, but its process does not end";
        Error::with_source(ErrorKind::System, what, error)
    })
}

fn bound(within: Millis) -> Result<Duration, Error> {
    if within.get() > WITHIN_MS_MAX {
        let most = Millis::new(WITHIN_MS_MAX);
        let text = format!("within {within} is out of range; use 0ms to {most}");
        return Err(Error::new(ErrorKind::Usage, text));
    }
    Ok(Duration::from_millis(within.get()))
}

/// The control socket of the server that is meant.
fn find(place: &Where) -> Result<PathBuf, Error> {
    let run_dir = RunDir::new(place.run_dir.clone())?;
    run_dir.check()?;
    if let Some(name) = &place.name {
        return Ok(run_dir.server_socket(name));
    }
    let mut running = Vec::new();
    for path in run_dir.server_sockets()? {
        // What a killed server left behind is none.
        if socket_state(&path)? == SocketState::InUse {
            running.push(path);
        }
    }
    let shown = run_dir.path().display();
    match &running[..] {
        [path] => Ok(path.clone()),
        [] => Err(Error::new(
            ErrorKind::System,
            format!("no server has a control socket in {shown}; is one running? (--run-dir)"),
        )),
        several => {
            let names: Vec<String> = several.iter().map(|path| name_of(path)).collect();
            let names = names.join(", ");
            let text = format!("several servers run here; say which with --name: {names}");
            Err(Error::new(ErrorKind::Usage, text))
        }
    }
}

/// The name of the server behind a control socket, as far as it can be told.
fn name_of(path: &Path) -> String {
    match question_to(path, &Question::Status, ANSWER_TIMEOUT) {
        Ok((status, _)) => status["name"].as_str().unwrap_or("?").to_owned(),
        Err(error) => format!("{} ({})", path.display(), error.chain()),
    }
}

fn sessions_of(server: &Path) -> Result<Value, Error> {
    let mut answer = question_to(server, &Question::SessionList, ANSWER_TIMEOUT)?.0;
    Ok(answer["sessions"].take())
}

fn question_to(
    path: &Path,
    question: &Question,
    timeout: Duration,
) -> Result<(Value, UnixStream), Error> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Error::new(
            ErrorKind::System,
            format!("no such server runs (nobody at {})", path.display()),
        ),
        _ => {
            let text = format!("cannot ask the server at {}", path.display());
            Error::with_source(ErrorKind::System, text, error)
        }
    };
    let line = serde_json::to_string(question).map_err(io::Error::other).map_err(failed)?;
    let (answer, stream) = ask(path, &line, timeout).map_err(failed)?;
    let value: Value = serde_json::from_str(&answer).map_err(io::Error::other).map_err(failed)?;
    match value["error"].as_str() {
        Some(error) => Err(Error::new(ErrorKind::System, error)),
        None => Ok((value, stream)),
    }
}

fn show(value: &Value, shown: Shown, text: impl FnOnce(&Value) -> String) -> Result<(), Error> {
    let shown = match shown {
        Shown::Json => format!("{value:#}\n"),
        Shown::Text => text(value),
    };
    let mut out = io::stdout().lock();
    match out.write_all(shown.as_bytes()).and_then(|()| out.flush()) {
        // Who reads may stop early, as head does.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::with_source(ErrorKind::System, "cannot print", error))
        }
        _ => Ok(()),
    }
}
