//! Logging for a daemon: selects lines, formats them and writes them to standard error.
//!
//! Lines pass through the queue of [`Log`], so that no shard has to wait for the log's reader.
//!
//! `line.rs` formats · `limit.rs` rate limits for repeated lines

mod limit;
mod line;

use std::io;
use std::sync::OnceLock;

use tracing::Level;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::reload::Error;

use self::limit::Limits;
pub use self::line::timestamp;
use self::line::{Line, LineFormat};
use crate::rt::{Log, SettleAtEnd};
use crate::settings::{LogFilter, LogFormat};

type Change = Box<dyn Fn(EnvFilter) -> Result<(), Error> + Send + Sync>;

/// Replaces the filter of this process's log, once the log has started.
static CHANGE: OnceLock<Change> = OnceLock::new();

/// Starts the log of this process; keep the returned value until the process ends. If the process
/// already has a log, as in tests, that one is kept.
///
/// # Errors
/// Returns the system's error if the thread cannot be started.
pub fn log_to_stderr(filter: &LogFilter, format: LogFormat) -> io::Result<SettleAtEnd> {
    let log = Log::start(io::stderr(), move |count| lost_lines(format, count))?;
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter.get()))
        .with_writer(move || writer.clone())
        .log_internal_errors(false)
        .with_ansi(false)
        .event_format(LineFormat::new(format, Limits::default()))
        .with_filter_reloading();
    let handle = subscriber.reload_handle();
    if subscriber.try_init().is_err() {
        tracing::debug!("a log is already set up");
    } else {
        CHANGE.get_or_init(|| Box::new(move |filter| handle.reload(filter)));
    }
    Ok(SettleAtEnd(log))
}

/// Replaces the filter that selects lines for this process's log.
///
/// # Errors
/// Fails in a process that has not started its log with [`log_to_stderr`].
pub fn change_filter(filter: &LogFilter) -> Result<(), String> {
    let change = CHANGE.get().ok_or("this process has no log")?;
    change(EnvFilter::new(filter.get())).map_err(|error| format!("cannot change the log: {error}"))
}

/// Returns the line that reports lost lines.
fn lost_lines(format: LogFormat, count: u64) -> String {
    let text = format!("lost {count} log lines: the log was not read");
    let line = Line { level: Level::WARN, target: module_path!(), message: text, fields: vec![] };
    line.text(format)
}

#[cfg(test)]
mod tests;
