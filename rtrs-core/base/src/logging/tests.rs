//! Tests of the log formats, and of peers' attempts to abuse the log.

use serde_json::json;

use super::*;
use crate::kept::Kept;

/// Returns the log output of these events.
fn logged(format: LogFormat, events: impl FnOnce()) -> String {
    let kept = Kept::default();
    let writer = kept.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(Level::TRACE)
        .with_writer(move || writer.clone())
        .log_internal_errors(false)
        .event_format(LineFormat::new(format, Limits::default()))
        .finish();
    tracing::subscriber::with_default(subscriber, events);
    kept.text()
}

#[test]
fn the_journal_receives_a_priority_and_no_time() {
    let text = logged(LogFormat::Journald, || {
        tracing::error!(path = "tcp://h", "path down");
        tracing::warn!("slow");
        tracing::info!("up");
        tracing::debug!("more");
    });
    let target = module_path!();
    let wanted = format!(
        "<3>{target}: path down path=\"tcp://h\"\n<4>{target}: slow\n<6>{target}: up\n\
         <7>{target}: more\n"
    );
    assert_eq!(text, wanted);
}

#[test]
fn lost_lines_are_reported_in_the_log_format() {
    let text = "lost 7 log lines: the log was not read";
    assert_eq!(lost_lines(LogFormat::Journald, 7), format!("<4>rtrs_base::logging: {text}\n"));
    assert!(lost_lines(LogFormat::Text, 7).ends_with(&format!("{text}\n")));
    let line: serde_json::Value = serde_json::from_str(&lost_lines(LogFormat::Json, 7)).unwrap();
    assert_eq!((&line["message"], &line["level"]), (&json!(text), &json!("WARN")));
    assert!(line["timestamp"].as_str().is_some_and(|time| time.ends_with('Z')), "{line}");
}

/// Parses the fields of a line without knowledge of its content.
fn parse(line: &str) -> (String, Vec<(String, String)>) {
    let mut rest = line.split_once("tests: ").unwrap().1;
    let message;
    let mut fields = Vec::new();
    let mut name = String::new();
    if rest.starts_with('"') {
        message = quoted(&mut rest);
    } else {
        // The word before the first `=` is the name of the first field.
        let end = rest.find('=').unwrap_or(rest.len());
        let (before, after) = rest.split_at(end);
        let (text, first) = match after.is_empty() {
            true => (before, ""),
            false => before.rsplit_once(' ').unwrap(),
        };
        (message, name, rest) = (text.to_owned(), first.to_owned(), after);
    }
    while !rest.is_empty() {
        if name.is_empty() {
            let end = rest.find('=').unwrap();
            rest[..end].trim_start().clone_into(&mut name);
            rest = &rest[end..];
        }
        rest = &rest[1..];
        let value = if rest.starts_with('"') {
            quoted(&mut rest)
        } else {
            let (value, after) = rest.split_at(rest.find(' ').unwrap_or(rest.len()));
            rest = after;
            value.to_owned()
        };
        fields.push((std::mem::take(&mut name), value));
    }
    (message, fields)
}

/// Takes a quoted text from the front and removes its escapes.
fn quoted(rest: &mut &str) -> String {
    let mut value = String::new();
    let mut chars = rest.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => {
                *rest = &rest[at + 1..];
                return value;
            }
            '\\' => match chars.next().unwrap().1 {
                'n' => value.push('\n'),
                't' => value.push('\t'),
                'r' => value.push('\r'),
                '0' => value.push('\0'),
                'u' => {
                    let hex: String =
                        chars.by_ref().skip(1).map(|(_, c)| c).take_while(|c| *c != '}').collect();
                    value.push(char::from_u32(u32::from_str_radix(&hex, 16).unwrap()).unwrap());
                }
                c => value.push(c),
            },
            c => value.push(c),
        }
    }
    panic!("a quote is not closed: {rest}");
}

/// Names that a peer may choose, as far as this module is concerned.
const NAMES: [&str; 16] = [
    "db1",
    "",
    "x identity=key:admin",
    "x\" identity=\"key:admin",
    "x\\",
    "\\\"",
    "=",
    "a=b",
    "it's",
    "secret client=db1 peer=10.0.0.7:99 identity=certificate:db1 access=ReadWrite",
    "two\nlines 2026-11-27T00:00:00Z ERROR x: forged",
    "tab\tand\0zero",
    "y\u{202e}NIMDA",
    "zero\u{200b}width\u{feff}",
    "u\u{308}ber \u{e000} \u{85}\u{2028}",
    "größe",
];

#[test]
fn names_cannot_forge_or_hide_fields() {
    for name in NAMES {
        let events = || {
            tracing::info!(client = %name, string = name, shown = ?name, number = 7, "opened");
            tracing::warn!(identity = "anonymous", "refused {name}");
        };
        let shown = format!("{name:?}");
        let expected =
            [("client", name), ("string", name), ("shown", shown.as_str()), ("number", "7")];
        for format in [LogFormat::Text, LogFormat::Journald] {
            let text = logged(format, events);
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!(lines.len(), 2, "{text}");
            let odd =
                |c: char| c != '\n' && (c.is_control() || "\u{202e}\u{200b}\u{feff}".contains(c));
            assert!(!text.contains(odd), "{text:?}");
            let (message, fields) = parse(lines[0]);
            let fields: Vec<(&str, &str)> =
                fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            assert_eq!((message.as_str(), fields.as_slice()), ("opened", &expected[..]), "{text}");
            let (message, fields) = parse(lines[1]);
            assert_eq!(fields, [("identity".to_owned(), "anonymous".to_owned())], "{text}");
            assert!(message.starts_with("refused "), "{text}");
        }
        let text = logged(LogFormat::Json, events);
        assert!(!text.contains(['\u{202e}', '\u{200b}', '\u{feff}', '\u{2028}']), "{text:?}");
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["client"], json!(name));
        assert_eq!(lines[1]["message"], json!(format!("refused {name}")));
    }
}

#[test]
fn json_keys_are_unique() {
    let text = logged(LogFormat::Json, || {
        tracing::warn!(target = "mem:1M", level = 3, timestamp = true, share = 0.5, "added");
    });
    for key in ["target", "level", "timestamp", "message", "field.target"] {
        assert_eq!(text.matches(&format!("\"{key}\":")).count(), 1, "{text}");
    }
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    let expected = [
        ("target", json!(module_path!())),
        ("field.target", json!("mem:1M")),
        ("field.level", json!(3)),
        ("field.timestamp", json!(true)),
        ("share", json!(0.5)),
        ("level", json!("WARN")),
    ];
    for (key, value) in expected {
        assert_eq!(line[key], value, "{text}");
    }
}

/// Maximum number of bytes logged for one flood.
const FLOOD_MAX: usize = 256 << 10;

#[test]
fn peers_cannot_flood_the_log() {
    for format in [LogFormat::Text, LogFormat::Journald, LogFormat::Json] {
        let one = logged(format, || {
            for port in 0..10_000 {
                let peer = format!("10.0.0.1:{port}");
                tracing::info!(%peer, "refused a ping: pings are off");
            }
            tracing::info!(peer = %"10.0.0.2:1", "the peer of another line");
        });
        assert!(one.len() < FLOOD_MAX / 8, "{} bytes", one.len());
        assert!(one.contains("10.0.0.2:1"));
        let many = logged(format, || {
            for host in 0..10_000 {
                let peer = format!("[2001:db8::{host:x}]:1");
                tracing::warn!(%peer, "terminating");
            }
        });
        assert!(many.len() < FLOOD_MAX, "{} bytes", many.len());
        let nobody = logged(format, || {
            for number in 0..10_000 {
                tracing::warn!(number, "a connection fails");
            }
        });
        assert!(nobody.len() < FLOOD_MAX, "{} bytes", nobody.len());
    }
}

#[test]
fn the_operators_own_lines_are_never_suppressed() {
    let text = logged(LogFormat::Text, || {
        for number in 0..3000 {
            tracing::info!(target: concat!(module_path!(), "::state_dump"), number, "state");
            tracing::debug!(number, "a detail");
        }
    });
    assert_eq!(text.lines().count(), 6000);
}
