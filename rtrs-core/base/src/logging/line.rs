//! Log lines: `TIME LEVEL target: message name=value`, a variant for the journal, or JSON.
//!
//! Data from a peer may occur in any value and in the message, and must not be able to forge or
//! hide a field. So a value is quoted unless all its characters are printable and none is a space,
//! `=`, a quote or a backslash. A message is quoted if it contains a `=` or begins with a quote, so
//! the first `=` outside quotes belongs to the first field. Control and format characters, such as
//! those that change the text direction, are escaped everywhere.

use std::fmt::{self, Debug, Write as _};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::limit::{Admission, Limits, Origin};
use crate::rt::Clock;
use crate::settings::LogFormat;

/// Suffix of event targets to which no limit applies, because an operator requested the lines.
const UNLIMITED: &str = "::state_dump";
/// Names with a different meaning in the JSON format; fields with such a name get a prefix.
const RESERVED: [&str; 4] = ["timestamp", "level", "message", "target"];

/// Line before it is formatted.
pub(super) struct Line {
    pub(super) level: Level,
    pub(super) target: &'static str,
    pub(super) message: String,
    pub(super) fields: Vec<(&'static str, Value)>,
}

/// Value of a field.
pub(super) enum Value {
    /// Number or Boolean.
    Plain(String),
    /// String, always quoted.
    String(String),
    /// Formatted value, quoted if needed.
    Shown(String),
}

impl Value {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Plain(text) | Self::String(text) | Self::Shown(text) => text,
        }
    }
}

impl Line {
    fn of(event: &Event<'_>) -> Self {
        let metadata = event.metadata();
        let mut line = Self {
            level: *metadata.level(),
            target: metadata.target(),
            message: String::new(),
            fields: Vec::new(),
        };
        event.record(&mut line);
        line
    }

    /// Formats the line, including the newline.
    pub(super) fn text(&self, format: LogFormat) -> String {
        match format {
            LogFormat::Json => self.json(),
            LogFormat::Text => self.fields_after(format!("{} {:>5} ", timestamp(), self.level)),
            LogFormat::Journald => self.fields_after(format!("<{}>", priority(self.level))),
        }
    }

    fn fields_after(&self, mut text: String) -> String {
        text.push_str(self.target);
        text.push_str(": ");
        if self.message.contains('=') || self.message.starts_with('"') {
            push_quoted(&mut text, &self.message);
        } else {
            push_message(&mut text, &self.message);
        }
        for (name, value) in &self.fields {
            text.extend([" ", *name, "="]);
            match value {
                Value::Plain(value) => text.push_str(value),
                Value::Shown(value) if is_bare(value) => text.push_str(value),
                Value::String(value) | Value::Shown(value) => push_quoted(&mut text, value),
            }
        }
        text.push('\n');
        text
    }

    fn json(&self) -> String {
        let mut text = format!(r#"{{"timestamp":"{}","level":"{}","#, timestamp(), self.level);
        text.push_str(r#""message":"#);
        push_json(&mut text, &self.message);
        for (name, value) in &self.fields {
            let prefix = if RESERVED.contains(name) { "field." } else { "" };
            text.extend([",\"", prefix, *name, "\":"]);
            match value {
                Value::Plain(value) => text.push_str(value),
                Value::String(value) | Value::Shown(value) => push_json(&mut text, value),
            }
        }
        text.push_str(r#","target":"#);
        push_json(&mut text, self.target);
        text.push_str("}\n");
        text
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        match field.name() {
            "message" => self.message = text,
            name => self.fields.push((name, Value::Shown(text))),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => self.fields.push((name, Value::String(value.to_owned()))),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.fields.push((field.name(), Value::Plain(value.to_string())));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.fields.push((field.name(), Value::Plain(value.to_string())));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        let value = value.is_finite().then(|| value.to_string());
        self.fields.push((field.name(), Value::Plain(value.unwrap_or_else(|| "null".to_owned()))));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.fields.push((field.name(), Value::Plain(value.to_string())));
    }
}

/// Returns true if a value needs no quotes.
fn is_bare(value: &str) -> bool {
    let plain =
        |c: char| !matches!(c, ' ' | '=' | '"' | '\'' | '\\') && c.escape_debug().len() == 1;
    !value.is_empty() && value.chars().all(plain)
}

/// Appends a message, in which backslashes are literal.
fn push_message(text: &mut String, message: &str) {
    for c in message.chars() {
        match c {
            '\\' => text.push(c),
            c => push_escaped(text, c),
        }
    }
}

/// Returns the syslog(3) priority.
const fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Formats the events of a process and suppresses those that repeat too often.
///
/// The journal takes lines from standard error with a priority prefix (sd-daemon(3)), and records
/// the time and level itself.
pub(super) struct LineFormat {
    format: LogFormat,
    limits: Limits,
}

impl LineFormat {
    pub(super) fn new(format: LogFormat, limits: Limits) -> Self {
        Self { format, limits }
    }
}

impl<S, N> FormatEvent<S, N> for LineFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    /// Formats an event; an error drops it.
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let line = Line::of(event);
        let metadata = event.metadata();
        // More verbose levels were requested explicitly, so no limit applies.
        let is_limited =
            *metadata.level() <= Level::INFO && !metadata.target().ends_with(UNLIMITED);
        if is_limited {
            let origin = Origin { callsite: metadata.callsite(), peer: line.peer() };
            match self.limits.admit(Clock.now(), &origin) {
                Admission::LeftOut => return Err(fmt::Error),
                Admission::Passes { left_out: 0 } => {}
                Admission::Passes { left_out } => {
                    let note = line.left_out(left_out);
                    writer.write_str(&note.text(self.format))?;
                }
            }
        }
        writer.write_str(&line.text(self.format))
    }
}

impl Line {
    /// Returns the origin of the line: the address in the field `peer`, without its port, or the
    /// name of a client or session.
    fn peer(&self) -> Option<&str> {
        let of = |name: &str| self.fields.iter().find(|(field, _)| *field == name);
        if let Some((_, peer)) = of("peer") {
            return peer.text().rsplit_once(':').map(|(address, _)| address);
        }
        of("client").or_else(|| of("session")).map(|(_, value)| value.text())
    }

    /// Returns the line that represents `count` suppressed lines like this one.
    fn left_out(&self, count: u64) -> Self {
        let fields = vec![("left_out", Value::Plain(count.to_string()))];
        let message = "suppressed lines like the next one".to_owned();
        Self { level: self.level, target: self.target, message, fields }
    }
}

/// Returns the current time in the log's format: RFC 3339, in UTC.
pub fn timestamp() -> String {
    let mut timestamp = String::new();
    // Writing to a string cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    timestamp
}

/// Appends a character, or its escape if it is a control or format character or is not printable.
fn push_escaped(text: &mut String, c: char) {
    match c {
        '"' | '\'' => text.push(c),
        c => text.extend(c.escape_debug()),
    }
}

/// Appends text in quotes.
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

/// Appends text as a JSON string without any literal control or format characters.
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
