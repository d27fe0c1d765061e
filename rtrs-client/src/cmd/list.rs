//! `list`.

use std::path::Path;

use clap::Args;
use rtrs_core::local::RunDir;
use rtrs_core::rt::effective_user;
use rtrs_core::settings::{Output, printable};

use super::global::GlobalArgs;
use super::sessions::{Answer, Found, Silent, find};
use super::text::{or_dash, remark, size_text, slow_text};
use crate::control_protocol::{PathInfo, SessionState, Status};
use crate::error::{Error, ErrorKind, usage};

/// The arguments.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// List the sessions of all users (root only)
    ///
    /// Searches the default run directory of each user: /run/rtrs, /run/user/UID/rtrs and
    /// /tmp/rtrs-UID.
    #[arg(long)]
    pub all: bool,
}

pub(super) fn run(args: &ListArgs, global: &GlobalArgs) -> Result<(), Error> {
    let run_dir = global.run_dir()?;
    let dirs = match (args.all, &global.run_dir) {
        (true, Some(_)) => {
            return Err(usage("--all searches the default directories; drop --run-dir"));
        }
        (true, None) if run_dir.path() != Path::new(RunDir::OF_ROOT) => {
            let text = "cannot list the sessions of all users: list --all needs root";
            return Err(Error::new(ErrorKind::System, text));
        }
        (true, None) => RunDir::of_all_users().into_iter().map(|(u, d)| (Some(u), d)).collect(),
        (false, named) => {
            run_dir.check()?;
            // A directory given by the user must exist, because its name may have been mistyped.
            if named.is_some() {
                run_dir.files()?;
            }
            vec![(None, run_dir)]
        }
    };
    let found = find(&dirs, global.output)?;
    global.output.print(&found, |found| text(found))?;
    if let [(None, run_dir)] = &dirs[..]
        && found.is_empty()
        && global.output == Output::Text
        && effective_user() != 0
    {
        remark(hint(run_dir, Path::new(RunDir::OF_ROOT).exists()));
    }
    Ok(())
}

/// Hint for an empty list when the user is not root and so cannot list root's sessions.
fn hint(run_dir: &RunDir, root_has_dir: bool) -> String {
    let of_root = "; for the sessions of root, use sudo rtrs-client list";
    let of_root = if root_has_dir { of_root } else { "" };
    format!("no session in {}{of_root}", run_dir.path().display())
}

/// Formats one line per session.
fn text(sessions: &[Found]) -> String {
    let uid = |found: Option<&Found>| match found {
        _ if sessions.iter().all(|found| found.uid.is_none()) => String::new(),
        None => format!("{:<8} ", "UID"),
        Some(found) => format!("{:<8} ", or_dash(found.uid)),
    };
    let mut out = format!(
        "{}{:<16} {:<18} {:>10} {:>6} {:>6} {:<8} {:>8}  {}\n",
        uid(None),
        "NAME",
        "STATE",
        "SIZE",
        "PATHS",
        "ERRORS",
        "VIA",
        "PID",
        "DEVICE"
    );
    for found in sessions {
        let lines = match &found.answer {
            Answer::Status(status) => status_lines(status),
            Answer::Silent(silent) => silent_lines(silent),
        };
        // A process of a different user can send arbitrary text.
        let lines: Vec<String> = lines.iter().map(|line| printable(line)).collect();
        out += &format!("{}{}\n", uid(Some(found)), lines.join("\n"));
    }
    out
}

fn silent_lines(silent: &Silent) -> Vec<String> {
    let Silent { name, state, reason, pid } = silent;
    let remedy = state.remedy().unwrap_or_default();
    vec![
        format!(
            "{name:<16} {state:<18} {:>10} {:>6} {:>6} {:<8} {:>8}  -",
            "-",
            "-",
            "-",
            "-",
            or_dash(*pid)
        ),
        format!("  {reason}; {remedy}"),
    ]
}

fn status_lines(session: &Status) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<16} {:<18} {:>10} {:>6} {:>6} {:<8} {:>8}  {}",
        session.name,
        session.state,
        or_dash(session.size.map(size_text)),
        counts(session),
        session.io_errors.count,
        transports(session.paths()),
        session.pid,
        session.served_at(),
    )];
    // The paths explain a degraded state.
    let detail = session.state_detail().filter(|_| session.state != SessionState::Degraded);
    lines.extend(detail.map(|detail| format!("  {}: {detail}", session.state)));
    if session.export != session.name {
        lines.push(format!("  export: {}", session.export));
    }
    if session.read_only_fallback {
        lines.push("  read-only: the server refused rw (access: auto)".to_owned());
    } else if session.read_only == Some(true) {
        lines.push(format!("  read-only (access: {})", session.access));
    }
    let slow = slow_text(&session.slow_requests).filter(|_| session.slow_requests.now > 0);
    lines.extend(slow.map(|slow| format!("  slow requests: {slow}")));
    let is_told = session.state == SessionState::IdentityMismatch;
    for path in session.paths().iter().filter(|path| !is_told && !path.is_connected()) {
        let why = path.why().filter(|_| path.is_up() || path.mismatch);
        lines.extend(why.map(|why| format!("  {}: {why}", path.path)));
    }
    lines
}

/// Number of connected paths, and how many of them are slow.
fn counts(session: &Status) -> String {
    let (up, all) = session.path_counts();
    match session.paths().iter().filter(|path| path.is_avoided()).count() {
        0 => format!("{up}/{all}"),
        slow => format!("{up}/{all}, {slow} slow"),
    }
}

/// Transports of the paths, each listed once: `rdma,tcp`.
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
    use crate::settings::Access;

    /// Formats the list of these sessions.
    fn list(sessions: impl IntoIterator<Item = Status>) -> String {
        let answers = sessions.into_iter().map(|status| Answer::Status(Box::new(status)));
        text(&answers.map(|answer| Found { uid: None, answer }).collect::<Vec<_>>())
    }

    #[test]
    fn sessions_of_all_users_show_their_owner_and_cannot_forge_lines() {
        let silent = |name: &str, state, pid| Found {
            uid: Some(1000),
            answer: Answer::Silent(Silent {
                name: name.to_owned(),
                state,
                reason: "why".to_owned(),
                pid,
            }),
        };
        let list = text(&[
            silent("a\n\u{1b}[31m", SessionState::Dead, None),
            silent("b", SessionState::Unresponsive, Some(7)),
        ]);
        let lines: Vec<&str> = list.lines().collect();
        assert!(lines[0].starts_with("UID      NAME "), "{list}");
        assert!(lines[1].starts_with("1000     a\\n\\u{1b}[31m "), "{list}");
        assert!(lines[1].contains(" dead "), "{list}");
        assert_eq!(lines[2], "  why; attach it again, or detach it if it is no longer needed");
        assert!(lines[3].starts_with("1000     b ") && lines[3].ends_with(" 7  -"), "{list}");
        assert!(lines[4].starts_with("  why; if its process is stopped, "), "{list}");
    }

    #[test]
    fn an_empty_list_names_the_directory_and_hints_at_the_sessions_of_root() {
        let dir = RunDir::new(Some("/run/user/7/rtrs".into())).unwrap();
        assert_eq!(hint(&dir, false), "no session in /run/user/7/rtrs");
        let of_root = "no session in /run/user/7/rtrs; for the sessions of root, use sudo \
                       rtrs-client list";
        assert_eq!(hint(&dir, true), of_root);
    }

    #[test]
    fn a_session_shows_where_it_is_served() {
        let device = Status { device: Some("/dev/nbd3".into()), uri: None, ..status() };
        let shown = list([device, status()]);
        let ends: Vec<&str> = shown.lines().filter_map(|l| l.split_whitespace().last()).collect();
        assert_eq!(ends, ["DEVICE", "/dev/nbd3", "nbd://127.0.0.1:10809/v"]);
    }

    #[test]
    fn a_list_shows_current_slow_requests() {
        let slow = |now, oldest_ms| Status {
            slow_requests: SlowRequests { now, oldest_ms, total: 9 },
            ..status()
        };
        let shown = list([slow(3, Some(75_900))]);
        assert!(shown.contains("\n  slow requests: 3, the oldest for 75 s, 9 since attach\n"));
        assert_eq!(list([slow(0, None)]), list([status()]));
    }

    #[test]
    fn a_list_shows_how_long_io_waits() {
        let state = SessionState::NoPath;
        let shown = list([Status { state, no_path_left_ms: Some(9100), ..status() }]);
        assert!(shown.contains("\n  no-path: IO waits, at most 9 s more\n"), "{shown}");
        let paths = Some(vec![path("connected", 0, 0), path("waiting", 0, 1)]);
        let shown = list([Status { state: SessionState::Degraded, paths, ..status() }]);
        assert!(shown.contains(" degraded ") && shown.lines().count() == 2, "{shown}");
    }

    #[test]
    fn a_list_shows_a_fallback_to_read_only() {
        let shown = list([Status { read_only_fallback: true, ..status() }]);
        assert!(shown.contains("\n  read-only: the server refused rw (access: auto)\n"));
        let shown = list([Status { read_only: Some(true), access: Access::Ro, ..status() }]);
        assert!(shown.contains("\n  read-only (access: ro)\n"), "{shown}");
        assert!(!list([status()]).contains("read-only"));
    }

    #[test]
    fn a_list_explains_paths_to_another_server() {
        let waiting = |mismatch| PathInfo { mismatch, ..path("waiting", 0, 1) };
        let status = |mismatch| Status { paths: Some(vec![waiting(mismatch)]), ..status() };
        assert!(list([status(true)]).ends_with("\n  p: why\n"));
        assert!(!list([status(false)]).contains("why"));
        // The field is omitted when there is nothing to report.
        let shown = serde_json::json!([waiting(true), waiting(false)]);
        assert_eq!(shown[0]["mismatch"], true);
        assert_eq!(shown[1].get("mismatch"), None);
    }

    #[test]
    fn a_list_shows_slow_paths() {
        let path = |state, slow| PathInfo { slow, ..path(state, 0, 0) };
        let paths =
            |slow| vec![path("connected", false), path("connected", slow), path("closing", true)];
        let slow = Status { paths: Some(paths(true)), ..status() };
        assert!(list([slow]).contains(" 2/3, 1 slow "));
        let shown = list([Status { paths: Some(paths(false)), ..status() }]);
        assert!(shown.contains(" 2/3 ") && !shown.contains("slow"), "{shown}");
    }
}
