//! Text forms of values for people.

use std::fmt::Display;
use std::io::{self, Write};

use crate::control_protocol::SlowRequests;

/// Formats a value, or a dash if there is none.
pub(super) fn or_dash<T: Display>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Formats a number of bytes with its unit.
pub(super) fn size_text(bytes: u64) -> String {
    let units = [("TiB", 1_u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

/// Formats the requests that a slow disk delays; None if there never was one.
pub(super) fn slow_text(slow: &SlowRequests) -> Option<String> {
    let oldest = slow.oldest_ms.map(|ms| format!(", the oldest for {} s", ms / 1000));
    let now = format!("{}{}, {} since attach", slow.now, oldest.unwrap_or_default(), slow.total);
    (slow.total > 0).then_some(now)
}

/// Prints a remark beside the output. Standard error may be closed.
pub(super) fn remark(text: impl Display) {
    let _ = writeln!(io::stderr(), "rtrs-client: {text}");
}

/// Shows progress. The terminal may be closed.
pub(super) fn progress(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}
