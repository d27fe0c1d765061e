//! Text forms of values for people.

use std::fmt::Display;
use std::io::{self, Write};

use crate::control_protocol::{IoError, IoErrors, PathInfo, SlowRequests};

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

/// Reason why flushes failed although they succeeded on the server.
const LOST_WRITES: &str = "ended with EIO, as the server may have lost acknowledged writes";

/// Formats the failed IOs; None if there is none.
pub(super) fn errors_text(errors: &IoErrors) -> Option<String> {
    let last = errors.last.as_ref().map(|last| {
        let IoError { errno, op, offset, bytes, path, age_ms } = last;
        let what = match bytes {
            0 => op.clone(),
            _ => format!("{op} of {bytes} bytes at offset {offset}"),
        };
        let path = path.as_ref().map(|path| format!(" on {path}")).unwrap_or_default();
        format!(", the last {} ago: {errno}, {what}{path}", age_text(*age_ms))
    });
    let lost = match errors.lost_writes {
        0 => String::new(),
        1 => format!(" (1 flush {LOST_WRITES})"),
        flushes => format!(" ({flushes} flushes {LOST_WRITES})"),
    };
    let details = last.unwrap_or_default() + &lost;
    (errors.count > 0).then(|| format!("{}{details}", errors.count))
}

/// Formats the errors of a path that carries IO; None if it never had one.
pub(super) fn path_errors_text(path: &PathInfo) -> Option<String> {
    let last = path.last_error.as_ref()?;
    let ago = path.last_error_age_ms.map(|ms| format!(" {} ago", age_text(ms)));
    Some(format!("{} errors, the last{}: {last}", path.errors, ago.unwrap_or_default()))
}

/// Formats a time since an event.
fn age_text(ms: u64) -> String {
    match ms / 1000 {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

/// Prints a remark in addition to the output. Standard error may be closed.
pub(super) fn remark(text: impl Display) {
    let _ = writeln!(io::stderr(), "rtrs-client: {text}");
}

/// Shows progress. The terminal may be closed.
pub(super) fn progress(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_failed_io_is_described() {
        let last = |bytes, path: Option<&str>, age_ms| IoErrors {
            count: 3,
            lost_writes: 0,
            last: Some(IoError {
                errno: "ENOSPC".to_owned(),
                op: if bytes > 0 { "write" } else { "flush" }.to_owned(),
                offset: if bytes > 0 { 8192 } else { 0 },
                bytes,
                path: path.map(str::to_owned),
                age_ms,
            }),
        };
        for (errors, text) in [
            (IoErrors::default(), None),
            (
                last(4096, Some("tcp://h:1"), 61_500),
                Some(
                    "3, the last 61 s ago: ENOSPC, write of 4096 bytes at offset 8192 on tcp://h:1",
                ),
            ),
            (last(0, None, 120_000), Some("3, the last 2 min ago: ENOSPC, flush")),
            (last(0, None, 7_200_000), Some("3, the last 2 h ago: ENOSPC, flush")),
            (
                IoErrors { count: 1, lost_writes: 1, last: None },
                Some("1 (1 flush ended with EIO, as the server may have lost acknowledged writes)"),
            ),
        ] {
            assert_eq!(errors_text(&errors).as_deref(), text);
        }
    }
}
