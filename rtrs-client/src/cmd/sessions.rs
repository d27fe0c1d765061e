//! Parallel status requests to many sessions, including those that do not answer.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use parking_lot::Mutex;
use rtrs_core::local::{RequestError, RunDir, listening_pid, request};
use rtrs_core::settings::Output;
use rtrs_core::time::Duration;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::at_once::at_once;
use super::notice::Awaited;
use crate::control_protocol::{Request, SessionState, Status};
use crate::daemon::saved::left_without_socket;
use crate::error::Error;

/// Time limit for one session's reply.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(4);
/// Time limit for the replies of all sessions, as long as each has at least [`REPLY_MIN`].
const ALL_TIMEOUT: Duration = Duration::from_secs(5);
const REPLY_MIN: Duration = Duration::from_millis(200);
/// Maximum number of simultaneous requests. Each uses a descriptor.
const AT_ONCE: usize = 256;

/// Session in a run directory.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    /// Owner, present when sessions of all users are listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) uid: Option<u32>,
    /// Answer of the session.
    #[serde(flatten)]
    pub(super) answer: Answer,
}

/// Status of a session, or the reason why it does not answer.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Answer {
    Status(Box<Status>),
    Silent(Silent),
}

/// Session that does not answer.
#[derive(Debug, Serialize)]
pub(super) struct Silent {
    pub(super) name: String,
    /// Dead or unresponsive.
    pub(super) state: SessionState,
    pub(super) reason: String,
    /// Process of the session, if it has one.
    pub(super) pid: Option<u32>,
}

impl Answer {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Status(status) => &status.name,
            Self::Silent(silent) => &silent.name,
        }
    }

    /// Remedy for a session that serves no IO; None for other states.
    pub(super) fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Status(status) => status.remedy(),
            Self::Silent(silent) => silent.state.remedy(),
        }
    }

    pub(super) fn state(&self) -> SessionState {
        match self {
            Self::Status(status) => status.state,
            Self::Silent(silent) => silent.state,
        }
    }
}

/// Finds all sessions in these directories.
///
/// # Errors
/// Fails if a directory cannot be read.
pub(super) fn find(dirs: &[(Option<u32>, RunDir)], output: Output) -> Result<Vec<Found>, Error> {
    let mut sockets = Vec::new();
    for (uid, dir) in dirs {
        sockets.extend(dir.session_sockets()?.into_iter().map(|found| (*uid, found)));
    }
    let silent: BTreeSet<&str> = sockets.iter().map(|(_, (name, _))| name.as_str()).collect();
    let silent = Mutex::new(silent);
    let what = || format!("{} to answer", names_text(&silent.lock()));
    let answers = Awaited { what, at_most: ALL_TIMEOUT }.with_notice(output, || {
        each(&sockets, |(uid, (name, path)), timeout| {
            let answer = ask(name, path, timeout);
            silent.lock().remove(name.as_str());
            answer.map(|answer| Found { uid: *uid, answer })
        })
    });
    Ok(answers.into_iter().flatten().collect())
}

/// Number of sessions that a notice names.
const NAMED_MAX: usize = 3;

/// Formats the names of sessions, or of the first ones if there are many.
fn names_text(names: &BTreeSet<&str>) -> String {
    let named: Vec<String> = names.iter().take(NAMED_MAX).map(|name| format!("{name:?}")).collect();
    let named = named.join(", ");
    match names.len().saturating_sub(NAMED_MAX) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// Finds all sessions in a directory, and the volumes that dead processes left without a control
/// socket.
///
/// # Errors
/// Fails if the directory cannot be read.
pub(super) fn find_with_left(run_dir: &RunDir, output: Output) -> Result<Vec<Found>, Error> {
    let left = left_without_socket(run_dir)?;
    let mut found = find(&[(None, run_dir.clone())], output)?;
    for (name, _) in left {
        // The volume may have been attached in the meantime.
        if found.iter().all(|found| found.answer.name() != name) {
            let reason = "its process has ended, and its control socket is gone".to_owned();
            let silent = Silent { name, state: SessionState::Dead, reason, pid: None };
            found.push(Found { uid: None, answer: Answer::Silent(silent) });
        }
    }
    Ok(found)
}

/// Calls `one` for each session, many at a time, with its time limit. The results are in the order
/// of `all`.
pub(super) fn each<T: Sync, R: Send>(all: &[T], one: impl Fn(&T, Duration) -> R + Sync) -> Vec<R> {
    let deadline = Instant::now() + ALL_TIMEOUT;
    at_once(all, AT_ONCE, |session| {
        let left = deadline.saturating_duration_since(Instant::now());
        one(session, left.clamp(REPLY_MIN, REPLY_TIMEOUT))
    })
}

/// Requests the status of one session. None if it does not exist.
pub(super) fn ask(name: &str, path: &Path, timeout: Duration) -> Option<Answer> {
    let silent = |state, reason, pid| {
        Some(Answer::Silent(Silent { name: name.to_owned(), state, reason, pid }))
    };
    match request(path, &Request::Status, timeout) {
        Ok((status, _)) => Some(Answer::Status(status)),
        // A process that exits cleanly removes its socket.
        Err(RequestError::NotRunning) if std::fs::symlink_metadata(path).is_err() => None,
        Err(RequestError::NotRunning) => {
            silent(SessionState::Dead, "its process has ended".to_owned(), None)
        }
        Err(error) => {
            let pid = listening_pid(path);
            let process = pid.map(|pid| format!("process {pid}: ")).unwrap_or_default();
            silent(SessionState::Unresponsive, format!("{process}{error}"), pid)
        }
    }
}

/// A session's reply to a request.
#[derive(Debug)]
pub(super) struct Reply<T> {
    pub(super) name: String,
    pub(super) result: Result<T, RequestError>,
}

/// Sends a request to all sessions in a run directory, many at a time, each with the time limit
/// that `timeout` returns for its name. The replies are in the order of the names. Sessions that
/// have ended cleanly are omitted.
///
/// # Errors
/// Fails if the directory cannot be read.
pub(super) fn replies<T: DeserializeOwned + Send>(
    what: &Request,
    run_dir: &RunDir,
    timeout: impl Fn(&str) -> Duration + Sync,
) -> Result<Vec<Reply<T>>, Error> {
    let sockets = run_dir.session_sockets()?;
    let replies = at_once(&sockets, AT_ONCE, |(name, path)| {
        let result = request(path, what, timeout(name)).map(|(reply, _)| reply);
        let has_ended = matches!(result, Err(RequestError::NotRunning))
            && std::fs::symlink_metadata(path).is_err();
        (!has_ended).then(|| Reply { name: name.clone(), result })
    });
    Ok(replies.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};

    use rtrs_core::local::{ControlSocket, reply};
    use serde_json::json;

    use super::super::tests::status;
    use super::*;

    /// Run directory of a test, removed when the test ends.
    struct Scratch(RunDir);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("rtrs-sessions-{name}-{}", std::process::id());
            let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
            dir.make().unwrap();
            Self(dir)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(self.0.path());
        }
    }

    #[test]
    fn a_notice_names_the_first_sessions() {
        let text = |names: &[&str]| names_text(&names.iter().copied().collect());
        assert_eq!(text(&["b", "a"]), "\"a\", \"b\"");
        assert_eq!(text(&["a", "b", "c", "d", "e"]), "\"a\", \"b\", \"c\" and 2 more");
    }

    #[test]
    fn sessions_are_queried_concurrently() {
        const COUNT: usize = 20;
        let scratch = Scratch::new("many");
        // Each session replies once all have been asked.
        let barrier = Arc::new(Barrier::new(COUNT));
        let sockets: Vec<_> = (0..COUNT)
            .map(|number| {
                let name = format!("v{number:02}");
                let socket = ControlSocket::bind(&scratch.0.control_socket(&name)).unwrap();
                let barrier = Arc::clone(&barrier);
                let serve = move |_: Request, stream| {
                    barrier.wait();
                    reply(&stream, Ok(Status { name: name.clone(), ..status() }));
                };
                socket.serve(serve).unwrap();
                socket
            })
            .collect();
        let found = find(&[(None, scratch.0.clone())], Output::Text).unwrap();
        let names: Vec<_> = found.iter().map(|found| found.answer.name()).collect();
        let expected: Vec<_> = (0..COUNT).map(|number| format!("v{number:02}")).collect();
        assert_eq!(names, expected);
        assert!(found.iter().all(|found| matches!(found.answer, Answer::Status(_))));
        drop(sockets);
    }

    #[test]
    fn an_unresponsive_session_is_found() {
        let scratch = Scratch::new("silent");
        let path = scratch.0.control_socket("a b");
        assert!(ask("a b", &path, REPLY_TIMEOUT).is_none());
        // No process accepts connections.
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let answer = ask("a b", &path, REPLY_MIN).unwrap();
        let pid = std::process::id();
        let reason = format!("process {pid}: the reply took longer than 200ms");
        let shown = json!(Found { uid: Some(7), answer });
        let (state, name) = ("unresponsive", "a b");
        assert_eq!(
            shown,
            json!({ "uid": 7, "name": name, "state": state, "reason": reason, "pid": pid })
        );
        drop(listener);
        let found = find(&[(None, scratch.0.clone())], Output::Text).unwrap();
        let state = ("dead", "its process has ended");
        let expected = json!([{ "name": name, "state": state.0, "reason": state.1, "pid": null }]);
        assert_eq!(json!(found), expected);
    }
}
