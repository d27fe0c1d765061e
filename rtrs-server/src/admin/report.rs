//! Answers of a server as people read them.

use serde_json::Value;

fn text(value: &Value) -> String {
    match value {
        // Clients choose their names, and a terminal obeys what is written to it.
        Value::String(text) => text.chars().fold(String::new(), |mut shown, character| {
            if character.is_control() {
                shown.extend(character.escape_default());
            } else {
                shown.push(character);
            }
            shown
        }),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

fn mebibytes(value: &Value) -> String {
    let bytes = value.as_u64().unwrap_or(0);
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// What is said of requests that wait for an older write of a closed path.
fn waiting(barred: &Value) -> String {
    match barred.as_u64() {
        None | Some(0) => String::new(),
        Some(barred) => format!(" ({barred} behind older writes that the disk still has)"),
    }
}

fn age(value: &Value) -> String {
    let seconds = value.as_u64().unwrap_or(0) / 1000;
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m{:02}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h{minutes:02}m"),
        (days, hours, _) => format!("{days}d{hours:02}h"),
    }
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// `session list`: a line for each session, and below it one for each of its paths.
pub(super) fn sessions_text(sessions: &Value) -> String {
    let mut out = format!(
        "{:<24} {:<10} {:>5} {:>9} {:>14} {:>14} {:>7}  {:<36}  {}\n",
        "NAME", "STATE", "PATHS", "IN FLIGHT", "READ", "WRITTEN", "AGE", "SESSION", "EXPORTS"
    );
    for session in items(sessions) {
        let io = &session["io"];
        let paths = || items(&session["paths"]);
        let up = paths().filter(|path| path["state"] == "connected").count();
        let opens: Vec<String> = items(&session["opens"])
            .map(|open| format!("{} ({})", text(&open["export"]), text(&open["access"])))
            .collect();
        out += &format!(
            "{:<24} {:<10} {:>5} {:>9} {:>14} {:>14} {:>7}  {:<36}  {}\n",
            text(&session["name"]),
            text(&session["state"]),
            format!("{up}/{}", paths().count()),
            text(&io["inflight"]),
            mebibytes(&io["read_bytes"]),
            mebibytes(&io["write_bytes"]),
            age(&session["age_ms"]),
            text(&session["id"]),
            if opens.is_empty() { "-".to_owned() } else { opens.join(", ") },
        );
        for path in paths() {
            out += &format!(
                "  path {:<6} {:<5} {:<10} {} from {}, {} connections, {} in flight{}, up {}\n",
                text(&path["path"]),
                text(&path["transport"]),
                text(&path["state"]),
                text(&path["local"]),
                text(&path["peer"]),
                text(&path["connections"]),
                text(&path["io"]["inflight"]),
                waiting(&path["io"]["barred"]),
                age(&path["age_ms"]),
            );
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sessions_are_shown_with_their_paths() {
        let sessions = json!([{
            "id": "01010101-0101-0101-0101-010101010101", "name": "host-vol0", "state": "up",
            "age_ms": 3_723_000, "io": { "inflight": 3, "read_bytes": 1 << 20, "write_bytes": 0 },
            "opens": [{ "export": "vol0", "access": "rw" }],
            "paths": [
                { "path": 7, "transport": "tcp", "state": "connected", "local": "127.0.0.1:1234",
                  "peer": "127.0.0.1:4000", "connections": 3, "age_ms": 61_000,
                  "io": { "inflight": 3, "barred": 0 } },
                { "path": 6, "transport": "tcp", "state": "draining", "local": "127.0.0.1:1234",
                  "peer": "127.0.0.1:3999", "connections": 3, "age_ms": 90_000_000,
                  "io": { "inflight": 2, "barred": 1 } },
            ],
        }]);
        let shown = sessions_text(&sessions);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 4, "{shown}");
        for part in ["host-vol0 ", " up ", " 1/2 ", " 3 ", " 1.0 MiB ", " 1h02m ", " vol0 (rw)"] {
            assert!(lines[1].contains(part), "{part:?} in {shown}");
        }
        assert_eq!(
            lines[2],
            "  path 7      tcp   connected  127.0.0.1:1234 from 127.0.0.1:4000, 3 connections, \
             3 in flight, up 1m01s"
        );
        assert!(lines[3].contains("draining") && lines[3].ends_with("up 1d01h"), "{shown}");
        let waits = ", 2 in flight (1 behind older writes that the disk still has), up ";
        assert!(lines[3].contains(waits), "{shown}");
        let odd = json!([{ "id": "x", "name": "a\nb\u{1b}[31m", "state": "up", "age_ms": 10 }]);
        assert!(sessions_text(&odd).contains("\na\\nb\\u{1b}[31m "), "{}", sessions_text(&odd));
        // Of a session that is just beginning there is little to say.
        let early = json!([{ "id": "x", "name": null, "state": "connecting", "age_ms": 10 }]);
        assert!(sessions_text(&early).lines().nth(1).is_some_and(|line| line.ends_with("  -")));
    }
}
