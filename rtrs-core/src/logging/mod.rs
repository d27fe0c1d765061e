//! The log of a daemon: which lines, in which format, to standard error.
//!
//! Lines pass through the queue of [`Log`], so that no shard waits for who reads them.

use std::fmt;
use std::io;

use serde_json::json;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::rt::{Log, SettleAtEnd};
use crate::settings::{LogFilter, LogFormat};

/// Starts the log of this process; keep what comes back until the end. A process that has one
/// already, as tests do, keeps that.
///
/// # Errors
/// The system's error when there can be no thread.
pub fn log_to_stderr(filter: &LogFilter, format: LogFormat) -> io::Result<SettleAtEnd> {
    let log = Log::start(io::stderr(), move |count| lost_lines(format, count))?;
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter.get()))
        .with_writer(move || writer.clone())
        .log_internal_errors(false)
        .with_ansi(false);
    let started = match format {
        LogFormat::Text => subscriber.try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
        LogFormat::Journald => subscriber.event_format(ForJournal::new()).try_init(),
    };
    if started.is_err() {
        tracing::debug!("a log was set up already");
    }
    Ok(SettleAtEnd(log))
}

/// The time now as the log writes it: RFC 3339, in UTC.
pub fn timestamp() -> String {
    let mut timestamp = String::new();
    // Writing to a string cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    timestamp
}

/// The line that stands for lines that were lost.
fn lost_lines(format: LogFormat, count: u64) -> String {
    let text = format!("{count} lines of the log were lost: it was not read");
    match format {
        LogFormat::Text => format!("{text}\n"),
        LogFormat::Journald => format!("<{}>{text}\n", priority(Level::WARN)),
        LogFormat::Json => {
            let timestamp = timestamp();
            let target = module_path!();
            let line = json!({
                "timestamp": timestamp, "level": "WARN", "message": text, "target": target,
            });
            format!("{line}\n")
        }
    }
}

/// Lines as the journal takes them from standard error: the priority in front (sd-daemon(3)), and
/// no time or level, which the journal notes itself.
struct ForJournal(Format<Full, ()>);

impl ForJournal {
    fn new() -> Self {
        Self(Format::default().without_time().with_level(false).with_ansi(false))
    }
}

impl<S, N> FormatEvent<S, N> for ForJournal
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

/// The priority of syslog(3).
const fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Kept;

    #[test]
    fn the_journal_gets_a_priority_and_no_time() {
        let kept = Kept::default();
        let writer = kept.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::TRACE)
            .with_writer(move || writer.clone())
            .event_format(ForJournal::new())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::error!(path = "tcp://h", "path down");
            tracing::warn!("slow");
            tracing::info!("up");
            tracing::debug!("more");
        });
        let text = kept.text();
        let target = module_path!();
        let wanted = format!(
            "<3>{target}: path down path=\"tcp://h\"\n<4>{target}: slow\n<6>{target}: up\n\
             <7>{target}: more\n"
        );
        assert_eq!(text, wanted);
    }

    #[test]
    fn lost_lines_are_told_in_the_format_of_the_log() {
        let text = "7 lines of the log were lost: it was not read";
        assert_eq!(lost_lines(LogFormat::Text, 7), format!("{text}\n"));
        assert_eq!(lost_lines(LogFormat::Journald, 7), format!("<4>{text}\n"));
        let line: serde_json::Value =
            serde_json::from_str(&lost_lines(LogFormat::Json, 7)).unwrap();
        assert_eq!((&line["message"], &line["level"]), (&json!(text), &json!("WARN")));
        assert!(line["timestamp"].as_str().is_some_and(|time| time.ends_with('Z')), "{line}");
    }
}
