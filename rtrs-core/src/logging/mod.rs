//! Log of a daemon: selects lines, formats them and writes them to standard error.
//!
//! Lines pass through the queue of [`Log`], so that no shard waits for the reader of the log.
//!
//! `line.rs` formats · `limit.rs` rate limits for repeated lines

mod limit;
mod line;

use std::fmt::Write;
use std::io;

use tracing::Level;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use self::limit::Limits;
use self::line::{Line, LineFormat};
use crate::rt::{Log, SettleAtEnd};
use crate::settings::{LogFilter, LogFormat};

/// Suffix of event targets to which no limit applies, because an operator requested the lines.
const UNLIMITED: &str = "::state_dump";

/// Starts the log of this process; keep the returned value until the end. A process that already
/// has a log, as in tests, keeps it.
///
/// # Errors
/// Returns the system's error if the thread cannot be started.
pub fn log_to_stderr(filter: &LogFilter, format: LogFormat) -> io::Result<SettleAtEnd> {
    let log = Log::start(io::stderr(), move |count| lost_lines(format, count))?;
    let writer = log.clone();
    let started = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter.get()))
        .with_writer(move || writer.clone())
        .log_internal_errors(false)
        .with_ansi(false)
        .event_format(LineFormat::new(format, Limits::default()))
        .try_init();
    if started.is_err() {
        tracing::debug!("a log is already set up");
    }
    Ok(SettleAtEnd(log))
}

/// Returns the current time in the log's format: RFC 3339, in UTC.
pub fn timestamp() -> String {
    let mut timestamp = String::new();
    // Writing to a string cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    timestamp
}

/// Returns the line that reports lost lines.
fn lost_lines(format: LogFormat, count: u64) -> String {
    let text = format!("lost {count} log lines: the log was not read");
    let line = Line { level: Level::WARN, target: module_path!(), message: text, fields: vec![] };
    line.text(format)
}

/// Appends a character, or its escape if it is a control or format character or is not printable.
fn push_escaped(text: &mut String, c: char) {
    match c {
        '"' | '\'' => text.push(c),
        c => text.extend(c.escape_debug()),
    }
}

/// Appends a text in quotes.
fn push_quoted(text: &mut String, value: &str) {
    text.push('"');
    for c in value.chars() {
        match c {
            '"' => text.push_str("\\\""),
            c => push_escaped(text, c),
        }
    }
    text.push('"');
}

/// Appends a text as a JSON string without any literal control or format characters.
fn push_json(text: &mut String, value: &str) {
    text.push('"');
    for c in value.chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            c if c.escape_debug().len() == 1 || c == '\'' => text.push(c),
            c => {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    // Writing to a string cannot fail.
                    let _ = write!(text, "\\u{unit:04x}");
                }
            }
        }
    }
    text.push('"');
}

#[cfg(test)]
mod tests;
