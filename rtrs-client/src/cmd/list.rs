//! `list`.

use std::fs;
use std::io;
use std::path::PathBuf;

use rtrs_core::local::{RequestError, request};
use rtrs_core::time::Duration;

use super::global::GlobalArgs;
use super::text::{or_dash, remark, size_text, slow_text};
use crate::control_protocol::{PathInfo, Request, SessionState, Status};
use crate::engine::ANOTHER;
use crate::error::{Error, system};

/// How long each session may take.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn run(global: &GlobalArgs) -> Result<(), Error> {
    let run_dir = global.run_dir()?;
    run_dir.check()?;
    let mut paths: Vec<PathBuf> = match fs::read_dir(run_dir.path()) {
        Ok(entries) => entries
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .filter(|path| path.extension().is_some_and(|ext| ext == "ctl"))
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            return Err(system(format!("cannot read {}", run_dir.path().display()))(error));
        }
    };
    paths.sort();
    let mut sessions: Vec<Status> = Vec::new();
    for path in paths {
        match request(&path, &Request::Status, REPLY_TIMEOUT) {
            Ok((status, _)) => sessions.push(status),
            // A killed session leaves its socket behind; the next attach replaces it.
            Err(RequestError::NotRunning) => {}
            Err(error) => remark(format_args!("{}: {error}", path.display())),
        }
    }
    global.output.print(&sessions, |sessions| text(sessions))
}

/// A line per session.
fn text(sessions: &[Status]) -> String {
    let mut out = format!(
        "{:<16} {:<18} {:>10} {:>6} {:<8} {:>8}  {}\n",
        "NAME", "STATE", "SIZE", "PATHS", "VIA", "PID", "DEVICE"
    );
    for session in sessions {
        out += &format!(
            "{:<16} {:<18} {:>10} {:>6} {:<8} {:>8}  {}\n",
            session.name,
            session.state,
            or_dash(session.size.map(size_text)),
            counts(session),
            transports(session.paths()),
            session.pid,
            session.served_at(),
        );
        // The paths say it of a degraded one.
        let detail = session.state_detail().filter(|_| session.state != SessionState::Degraded);
        if let Some(detail) = detail {
            out += &format!("  {}: {detail}\n", session.state);
        }
        let slow = slow_text(&session.slow_requests).filter(|_| session.slow_requests.now > 0);
        if let Some(slow) = slow {
            out += &format!("  slow requests: {slow}\n");
        }
        let is_told = session.state == SessionState::IdentityMismatch;
        for path in session.paths().iter().filter(|path| !is_told && !path.is_connected()) {
            if let Some(why) = path.last_error.as_ref().filter(|why| why.contains(ANOTHER)) {
                out += &format!("  {}: {why}\n", path.path);
            }
        }
    }
    out
}

/// How many paths are connected, and how many of these are slow.
fn counts(session: &Status) -> String {
    let (up, all) = session.path_counts();
    match session.paths().iter().filter(|path| path.is_avoided()).count() {
        0 => format!("{up}/{all}"),
        slow => format!("{up}/{all}, {slow} slow"),
    }
}

/// The transports of the paths, each once: `rdma,tcp`.
fn transports(paths: &[PathInfo]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for path in paths {
        if !names.contains(&&*path.transport) {
            names.push(&path.transport);
        }
    }
    if names.is_empty() { "-".to_owned() } else { names.join(",") }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{path, status};
    use super::*;
    use crate::control_protocol::SlowRequests;

    #[test]
    fn a_session_is_shown_where_it_is_served() {
        let device = Status { device: Some("/dev/nbd3".into()), uri: None, ..status() };
        let list = text(&[device, status()]);
        let ends: Vec<&str> = list.lines().filter_map(|l| l.split_whitespace().last()).collect();
        assert_eq!(ends, ["DEVICE", "/dev/nbd3", "nbd://127.0.0.1:10809/v"]);
    }

    #[test]
    fn a_list_shows_slow_requests_while_there_are_some() {
        let slow = |now, oldest_ms| Status {
            slow_requests: SlowRequests { now, oldest_ms, total: 9 },
            ..status()
        };
        let list = text(&[slow(3, Some(75_900))]);
        assert!(list.contains("\n  slow requests: 3, the oldest for 75 s, 9 since attach\n"));
        assert_eq!(text(&[slow(0, None)]), text(&[status()]));
    }

    #[test]
    fn a_list_says_how_long_io_waits() {
        let state = SessionState::NoPath;
        let list = text(&[Status { state, no_path_left_ms: Some(9100), ..status() }]);
        assert!(list.contains("\n  no-path: IO waits, at most 9 s more\n"), "{list}");
        let paths = Some(vec![path("connected", 0, 0), path("waiting", 0, 1)]);
        let list = text(&[Status { state: SessionState::Degraded, paths, ..status() }]);
        assert!(list.contains(" degraded ") && list.lines().count() == 2, "{list}");
    }

    #[test]
    fn a_list_shows_slow_paths() {
        let path = |state, slow| PathInfo { slow, ..path(state, 0, 0) };
        let paths =
            |slow| vec![path("connected", false), path("connected", slow), path("closing", true)];
        let slow = Status { paths: Some(paths(true)), ..status() };
        assert!(text(&[slow]).contains(" 2/3, 1 slow "));
        let list = text(&[Status { paths: Some(paths(false)), ..status() }]);
        assert!(list.contains(" 2/3 ") && !list.contains("slow"), "{list}");
    }
}
