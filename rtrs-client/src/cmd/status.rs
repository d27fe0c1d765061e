//! `status`.

use super::global::GlobalArgs;
use super::notice::Awaited;
use super::session::{NameArgs, Session};
use super::sessions::{Answer, REPLY_TIMEOUT, Silent, ask};
use super::text::{errors_text, or_dash, path_errors_text, size_text, slow_text};
use crate::control_protocol::{OldestIo, PathInfo, Status};
use crate::error::{Error, ErrorKind};
use crate::settings::Access;

pub(super) fn run(args: &NameArgs, global: &GlobalArgs) -> Result<(), Error> {
    let session = Session::find(&args.name, global)?;
    let what = || format!("{:?} to answer", session.name);
    let answer = Awaited { what, at_most: REPLY_TIMEOUT }.with_notice(global.output, || {
        ask(&session.name, &session.control_socket(), REPLY_TIMEOUT)
    });
    let answer = answer.ok_or_else(|| session.not_attached())?;
    global.output.print(&answer, |answer| match answer {
        Answer::Status(status) => text(status),
        Answer::Silent(silent) => silent_text(silent),
    })?;
    match answer.remedy() {
        None => Ok(()),
        Some(remedy) => {
            let text = format!("{} is {}: {remedy}", answer.name(), answer.state());
            Err(Error::new(ErrorKind::NoService, text))
        }
    }
}

/// Formats the access mode; once the volume is open, the mode that `auto` resolved to.
fn access_text(status: &Status) -> String {
    match (status.access, status.read_only) {
        (Access::Auto, Some(true)) if status.read_only_fallback => {
            "ro (auto, because the server refused rw)".to_owned()
        }
        (Access::Auto, Some(true)) => "ro (auto)".to_owned(),
        (Access::Auto, Some(false)) => "rw (auto)".to_owned(),
        (access, _) => access.to_string(),
    }
}

fn silent_text(silent: &Silent) -> String {
    let state = format!("{} ({})", silent.state, silent.reason);
    let line = |key: &str, value: &str| format!("{key:<16} {value}\n");
    line("name", &silent.name) + &line("state", &state) + &line("pid", &or_dash(silent.pid))
}

fn text(status: &Status) -> String {
    let mut out = String::new();
    let mut line = |key: &str, value: String| out += &format!("{key:<16} {value}\n");
    line("name", status.name.clone());
    if status.export != status.name {
        line("export", status.export.clone());
    }
    line("state", state_text(status));
    for (key, at) in [("device", &status.device), ("uri", &status.uri)] {
        if let Some(at) = at {
            line(key, at.clone());
        }
    }
    line("access", access_text(status));
    line("policy", or_dash(status.policy));
    line("no path", status.no_path.to_string());
    line("failover", status.failover.to_string());
    line("slow io", status.slow_io.to_string());
    line("session", status.session.clone());
    if status.volumes.len() > 1 {
        line("volumes", status.volumes.join(", "));
    }
    line("identity", or_dash(status.identity));
    line("pid", status.pid.to_string());
    line("shards", status.shards.to_string());
    let (bytes, block) = (or_dash(status.size), or_dash(status.block_size));
    let size = or_dash(status.size.map(size_text));
    line("size", format!("{size} ({bytes} bytes, blocks of {block})"));
    line("in flight", status.inflight.to_string());
    if let Some(oldest) = status.oldest_io.as_ref().filter(|oldest| oldest.age_ms >= 1000) {
        line("oldest IO", oldest_text(oldest));
    }
    if let Some(slow) = slow_text(&status.slow_requests) {
        line("slow requests", slow);
    }
    if let Some(errors) = errors_text(&status.io_errors) {
        line("failed IO", errors);
    }
    status.unsaved.iter().for_each(|why| line("not saved", why.clone()));
    let clients = if status.is_for_machine() { "vm connections" } else { "nbd clients" };
    line(clients, status.nbd_clients.to_string());
    status.complaint.iter().for_each(|why| line("complaint", why.clone()));
    out.extend(status.paths().iter().map(path_text));
    out
}

fn state_text(status: &Status) -> String {
    match status.state_detail() {
        None => status.state.to_string(),
        Some(detail) => format!("{} ({detail})", status.state),
    }
}

fn oldest_text(OldestIo { age_ms, waits_for, path }: &OldestIo) -> String {
    let what = match path {
        None => format!("a {waits_for}"),
        Some(path) => format!("the {waits_for} of {path}"),
    };
    format!("{} s, waits for {what}", age_ms / 1000)
}

fn path_text(path: &PathInfo) -> String {
    // A host name does not show which of its addresses is in use.
    let at = Some(&path.address).filter(|at| !path.path.ends_with(*at));
    let why = match path.why() {
        Some(why) => Some(format!(" ({why})")),
        None => path_errors_text(path).map(|errors| format!(", {errors}")),
    };
    format!(
        "path {:<28} {:<12} {} connections, {} reconnects, heartbeat {}{}{}\n",
        path.path,
        path.state_text(),
        path.connections,
        path.reconnects,
        or_dash(path.heartbeat_us.map(|us| format!("{us} us"))),
        at.map_or_else(String::new, |at| format!(", at {at}")),
        why.unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::{path, status};
    use super::*;
    use crate::control_protocol::{SessionState, SlowRequests, WaitsFor};

    #[test]
    fn a_state_explains_what_it_means_for_io() {
        let shown = |state, no_path_left_ms, io_fails, reason: Option<&str>| {
            let reason = reason.map(str::to_owned);
            let paths = Some(vec![path("connected", 0, 0), path("waiting", 0, 1)]);
            state_text(&Status { state, no_path_left_ms, io_fails, reason, paths, ..status() })
        };
        for (state, left, fails, reason, text) in [
            (SessionState::Open, None, false, None, "open"),
            (SessionState::Degraded, None, false, None, "degraded (1/2 paths)"),
            (SessionState::NoPath, None, false, None, "no-path (IO waits)"),
            (
                SessionState::NoPath,
                Some(41_900),
                false,
                None,
                "no-path (IO waits, at most 41 s more)",
            ),
            (SessionState::NoPath, None, true, None, "no-path (IO fails)"),
            (SessionState::Evicted, None, true, Some("why"), "evicted (IO fails; why)"),
            (SessionState::Failed, None, false, Some("why"), "failed (IO waits; why)"),
            (SessionState::Unresponsive, None, false, None, "unresponsive"),
        ] {
            assert_eq!(shown(state, left, fails, reason), text);
        }
        // The reason names the cause; the remedy must fit every cause.
        let failed = Status { state: SessionState::Failed, ..status() };
        let remedy = failed.remedy().unwrap();
        assert!(remedy.starts_with("do not detach it") && !remedy.contains("EACCES"), "{remedy}");
    }

    #[test]
    fn a_session_shows_where_it_is_served() {
        let shown = text(&Status { uri: None, ..status() });
        assert!(!shown.contains("device") && !shown.contains("uri"), "{shown}");
        assert!(shown.contains("\nsize             - (- bytes, blocks of -)\n"), "{shown}");
        let device = Status { device: Some("/dev/nbd3".into()), uri: None, ..status() };
        assert!(text(&device).contains("\ndevice           /dev/nbd3\n"));
        assert!(text(&status()).contains("\nuri              nbd://127.0.0.1:10809/v\n"));
    }

    #[test]
    fn no_remedy_loses_io_that_waits() {
        for (state, io_fails, detach) in [
            (SessionState::Failed, false, "do not detach it"),
            (SessionState::Failed, true, "detach it, and attach it again"),
            (SessionState::IdentityMismatch, false, "the IDs of the old one"),
            (SessionState::IdentityMismatch, true, "detach it, and attach it again"),
            (SessionState::Evicted, true, "detach it, and attach it again"),
        ] {
            let remedy = Status { state, io_fails, ..status() }.remedy().unwrap();
            assert!(remedy.contains(detach), "{state}: {remedy}");
        }
    }

    #[test]
    fn the_access_shows_the_mode_that_auto_selected() {
        for (access, read_only, read_only_fallback, shown) in [
            (Access::Auto, None, false, "auto"),
            (Access::Auto, Some(false), false, "rw (auto)"),
            (Access::Auto, Some(true), false, "ro (auto)"),
            (Access::Auto, Some(true), true, "ro (auto, because the server refused rw)"),
            (Access::Ro, Some(true), false, "ro"),
            (Access::Migration, Some(false), false, "migration"),
        ] {
            let status = Status { access, read_only, read_only_fallback, ..status() };
            let line = format!("\naccess           {shown}\n");
            assert!(text(&status).contains(&line), "{}", text(&status));
        }
    }

    #[test]
    fn a_reconnected_path_shows_its_last_error() {
        let flapped =
            PathInfo { errors: 3, last_error_age_ms: Some(5000), ..path("connected", 3, 3) };
        let shown = path_text(&flapped);
        assert!(shown.ends_with(", 3 errors, the last 5 s ago: why\n"), "{shown}");
        assert!(path_text(&path("waiting", 3, 3)).ends_with(" (why)\n"));
        let plain = path_text(&path("connected", 0, 0));
        assert!(plain.ends_with("heartbeat -, at 10.0.0.2:1234\n"), "{plain}");
    }

    #[test]
    fn slow_requests_are_shown_once_one_occurred() {
        assert!(!text(&status()).contains("slow requests"));
        let slow_requests = SlowRequests { now: 0, oldest_ms: None, total: 2 };
        let shown = text(&Status { slow_requests, ..status() });
        assert!(shown.contains("\nslow requests    0, 2 since attach\n"), "{shown}");
    }

    #[test]
    fn the_oldest_io_shows_what_it_waits_for() {
        for (waits_for, path, shown) in [
            (WaitsFor::Answer, Some("p"), "2 s, waits for the answer of p"),
            (WaitsFor::Fence, Some("p"), "2 s, waits for the fence of p"),
            (WaitsFor::Permit, None, "2 s, waits for a permit"),
        ] {
            let path = path.map(str::to_owned);
            assert_eq!(oldest_text(&OldestIo { age_ms: 2999, waits_for, path }), shown);
        }
    }
}
