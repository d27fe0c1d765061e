//! The command `session list`.

use std::collections::BTreeMap;
use std::io::{self, Write};

use rtrs_core::settings::printable;

use crate::cmd::server::{Server, ServerArgs};
use crate::cmd::text::age;
use crate::control_protocol::Sessions;
use crate::error::Error;
use crate::stats::{PathAuth, PathSnapshot, PathStage};

pub(super) fn run(args: &ServerArgs) -> Result<(), Error> {
    let list = Server::find(args)?.sessions()?;
    for portal in &list.lost_portals {
        // Ignored if stderr is closed.
        let _ = writeln!(
            io::stderr(),
            "warning: not listening on {portal}: no RDMA device has this address; the server tries \
             again every second"
        );
    }
    args.output.print(&list, |list| text(list) + &refused_text(&list.refused))
}

/// Formats a line with the refusals since the start; empty if there are none.
fn refused_text(refused: &BTreeMap<String, u64>) -> String {
    let counts: Vec<String> =
        refused.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
    if counts.is_empty() { String::new() } else { format!("refused: {}\n", counts.join(", ")) }
}

/// Formats a line for each session, followed by one for each of its paths, and then the total
/// memory. The UUID of a session is a secret, so the line shows the ID that the log uses.
fn text(list: &Sessions) -> String {
    let Sessions { sessions, memory, .. } = list;
    let mut out = format!(
        "{:<24} {:<10} {:>5} {:>5} {:>9} {:>6} {:>11} {:>14} {:>14} {:>7}  {:<12}  {:<20}  {}\n",
        "NAME",
        "STATE",
        "PATHS",
        "DEPTH",
        "IN FLIGHT",
        "ERRORS",
        "MEMORY",
        "READ",
        "WRITTEN",
        "AGE",
        "SESSION",
        "IDENTITY",
        "EXPORTS"
    );
    for session in sessions {
        let up = session.paths.iter().filter(|path| path.state == PathStage::Connected).count();
        let opens: Vec<String> = session
            .opens
            .iter()
            .map(|open| {
                let limited = if open.limited { ", limited" } else { "" };
                format!("{} ({}{limited})", printable(&open.export), open.access)
            })
            .collect();
        out += &format!(
            "{:<24} {:<10} {:>5} {:>5} {:>9} {:>6} {:>11} {:>14} {:>14} {:>7}  {:<12}  {:<20}  \
             {}\n",
            session.name.as_deref().map_or_else(|| "-".to_owned(), printable),
            session.state,
            format!("{up}/{}", session.paths.len()),
            session.queue_depth,
            session.io.inflight,
            session.io.errors,
            mebibytes(session.memory_bytes),
            mebibytes(session.io.read_bytes),
            mebibytes(session.io.write_bytes),
            age(session.age_ms),
            session.log_id,
            printable(&session.identity),
            if opens.is_empty() { "-".to_owned() } else { opens.join(", ") },
        );
        out.extend(session.paths.iter().map(path_text));
    }
    let (used, max) = (mebibytes(memory.used_bytes), mebibytes(memory.max_bytes));
    out + &format!("memory of chunks: {used} of {max} (memory-max)\n")
}

fn path_text(path: &PathSnapshot) -> String {
    let waiting = match path.io.blocked {
        0 => String::new(),
        count => format!(" ({count} blocked by older writes that are still running)"),
    };
    let cipher = path.cipher.as_ref().map(|cipher| format!(", {cipher}")).unwrap_or_default();
    let auth = match path.auth {
        Some(PathAuth::Signed) => ", authenticated",
        Some(PathAuth::Pending) => ", not authenticated yet",
        Some(PathAuth::Tls) | None => "",
    };
    let keys = if path.fresh_keys { "" } else { ", no fresh keys" };
    format!(
        "  path {:<6} {:<5} {:<10} {} from {}, {} connections, {} in flight{waiting}{keys}\
         {cipher}{auth}, up {}\n",
        path.path,
        path.transport,
        path.state,
        path.local,
        path.peer,
        path.connections,
        path.io.inflight,
        age(path.age_ms),
    )
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{
        Access, IoTotals, MemorySnapshot, OpenSnapshot, SessionSnapshot, SessionState,
    };

    fn path(number: u64, state: PathStage, age_ms: u64, io: IoTotals) -> PathSnapshot {
        PathSnapshot {
            path: number,
            uuid: String::new(),
            state,
            transport: "tls".into(),
            cipher: Some("TLS_AES_128_GCM_SHA256".into()),
            auth: Some(PathAuth::Tls),
            peer: format!("127.0.0.1:{}", 3993 + number),
            local: "127.0.0.1:1234".into(),
            connections: 3,
            fresh_keys: true,
            age_ms,
            heartbeat_us: None,
            io,
        }
    }

    #[test]
    fn sessions_are_shown_with_their_paths() {
        let session = SessionSnapshot {
            id: "01010101-0101-0101-0101-010101010101".into(),
            log_id: "5f0c1d9be2a4".into(),
            name: Some("host-vol0".into()),
            identity: "certificate:db1".into(),
            state: SessionState::Up,
            version: 2,
            age_ms: 3_723_000,
            queue_depth: 512,
            memory_bytes: 5 << 19,
            permits_held: 3,
            opens: [false, true]
                .map(|limited| OpenSnapshot {
                    export: "vol0".into(),
                    access: Access::Rw,
                    id: None,
                    limited,
                })
                .into(),
            io: IoTotals { inflight: 3, read_bytes: 1 << 20, ..IoTotals::default() },
            paths: vec![
                path(
                    7,
                    PathStage::Connected,
                    61_000,
                    IoTotals { inflight: 3, ..IoTotals::default() },
                ),
                path(
                    6,
                    PathStage::Draining,
                    90_000_000,
                    IoTotals { inflight: 2, blocked: 1, ..IoTotals::default() },
                ),
            ],
        };
        let text = |session: &SessionSnapshot| {
            let memory = MemorySnapshot { used_bytes: 3 << 20, max_bytes: 1 << 30 };
            text(&Sessions {
                sessions: vec![session.clone()],
                memory,
                lost_portals: Vec::new(),
                refused: BTreeMap::new(),
            })
        };
        let shown = text(&session);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 5, "{shown}");
        assert_eq!(lines[4], "memory of chunks: 3.0 MiB of 1024.0 MiB (memory-max)");
        for part in [
            "host-vol0 ",
            " up ",
            " 1/2 ",
            " 512 ",
            " 3 ",
            " 2.5 MiB ",
            " 1.0 MiB ",
            " 1h02m ",
            " 5f0c1d9be2a4 ",
            " certificate:db1 ",
            " vol0 (rw), vol0 (rw, limited)",
        ] {
            assert!(lines[1].contains(part), "{part:?} in {shown}");
        }
        assert!(!shown.contains(&session.id), "the UUID is a secret: {shown}");
        assert_eq!(
            lines[2],
            "  path 7      tls   connected  127.0.0.1:1234 from 127.0.0.1:4000, 3 connections, \
             3 in flight, TLS_AES_128_GCM_SHA256, up 1m01s"
        );
        assert!(lines[3].contains("draining") && lines[3].ends_with("up 1d01h"), "{shown}");
        let waits = ", 2 in flight (1 blocked by older writes that are still running), TLS_";
        assert!(lines[3].contains(waits), "{shown}");
        let odd = SessionSnapshot { name: Some("a\nb\u{1b}[31m".into()), ..session.clone() };
        let shown = text(&odd);
        assert!(shown.contains("\na\\nb\\u{1b}[31m "), "{shown}");
        assert_eq!(refused_text(&BTreeMap::new()), "");
        let refused = [("silent", 7), ("half-open-max", 12)].map(|(r, n)| (r.to_owned(), n));
        assert_eq!(refused_text(&refused.into()), "refused: half-open-max 12, silent 7\n");
        // Little is known about a session that has just begun.
        let early = SessionSnapshot {
            name: None,
            state: SessionState::Connecting,
            opens: Vec::new(),
            paths: Vec::new(),
            ..session
        };
        let shown = text(&early);
        let line = shown.lines().nth(1).unwrap();
        assert!(line.starts_with("-  ") && line.ends_with("  -"), "{shown}");
    }
}
