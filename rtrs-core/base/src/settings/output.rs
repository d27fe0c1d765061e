//! Output of a command, as text or JSON: results go to stdout, errors to stderr.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;

use clap::{Parser, ValueEnum};
use serde::Serialize;

use super::command_error::{CommandError, ErrorClass};
use super::exit_status::ExitStatus;
use crate::time::Duration;

/// Format of a command's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    Text,
    /// For programs
    Json,
}

impl Output {
    /// Prints a value as JSON with sorted keys, or as text.
    ///
    /// # Errors
    /// [`ErrorClass::SYSTEM`] if stdout cannot be written.
    pub fn print<T: Serialize, K: ErrorClass>(
        self,
        value: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<(), CommandError<K>> {
        match self {
            Self::Json => {
                let sorted = serde_json::to_value(value).map_err(io::Error::other);
                print_text(&format!("{:#}\n", sorted.map_err(cannot_print)?))
            }
            Self::Text => print_text(&text(value)),
        }
    }
}

/// Runs a program: parses its arguments (the first is its name), runs it, prints its error, if any,
/// and returns its exit code. With JSON output, an error is the line
/// `{"error": TEXT, "exit_code": CODE}`.
pub fn run_program<A: Parser, K: ErrorClass>(
    args: Vec<OsString>,
    output: impl FnOnce(&A) -> Output,
    run: impl FnOnce(&A) -> Result<(), CommandError<K>>,
) -> ExitCode {
    let name = A::command().get_name().to_owned();
    let is_json = wants_json(&args);
    let args = match A::try_parse_from(args) {
        Ok(args) => args,
        Err(error) if error.use_stderr() && is_json => {
            let text = error.to_string();
            let text = text.strip_prefix("error: ").unwrap_or(&text);
            Output::Json.print_error(&name, text.trim_end(), ExitStatus::USAGE.code);
            return ExitCode::from(ExitStatus::USAGE.code);
        }
        Err(error) => error.exit(),
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let text = error.chain().to_string();
            if !text.is_empty() {
                output(&args).print_error(&name, &text, error.exit_code());
            }
            ExitCode::from(error.exit_code())
        }
    }
}

/// Returns true if the arguments, which may be invalid, request JSON.
#[must_use]
pub fn wants_json(args: &[OsString]) -> bool {
    let is_flag = |arg: &OsString| arg == "-o" || arg == "--output";
    let alone = ["-ojson", "--output=json"];
    args.iter().any(|arg| alone.iter().any(|flag| arg == flag))
        || args.windows(2).any(|pair| is_flag(&pair[0]) && pair[1] == "json")
}

impl Output {
    /// Prints an error of the named program. A failure to print is ignored, since the exit code
    /// also reports the error.
    fn print_error(self, program: &str, error: &str, exit_code: u8) {
        let line = match self {
            Self::Text => format!("{program}: {error}"),
            Self::Json => serde_json::json!({ "error": error, "exit_code": exit_code }).to_string(),
        };
        let _ = writeln!(io::stderr(), "{line}");
    }
}

/// Prints text. A reader that has closed its end, like `head`, is not an error.
///
/// # Errors
/// [`ErrorClass::SYSTEM`] if stdout cannot be written.
pub fn print_text<K: ErrorClass>(text: &str) -> Result<(), CommandError<K>> {
    match write_text(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(cannot_print(error)),
        _ => Ok(()),
    }
}

/// Writes the whole text to stdout.
///
/// # Errors
/// Returns the system's error.
pub fn write_text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Time within which the reader of a daemon's stdout must take its first lines.
const READER_MAX: Duration = Duration::from_secs(1);

/// Writes a daemon's first lines to stdout. A full pipe blocks only a separate thread: the daemon
/// serves and exits even if nothing reads them.
///
/// # Errors
/// Returns the system's error.
pub fn announce(text: String) -> io::Result<()> {
    let (done, written) = mpsc::channel();
    thread::Builder::new().name("stdout".into()).spawn(move || {
        // The receiver is gone if the daemon has stopped waiting.
        let _ = done.send(write_text(&text));
    })?;
    written.recv_timeout(READER_MAX).unwrap_or_else(|_| {
        tracing::warn!("standard output is not being read");
        Ok(())
    })
}

/// Escapes characters that would control a terminal, since names are chosen by peers and by other
/// users' processes.
#[must_use]
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        // These change the order in which a terminal shows other characters.
        let is_bidi = matches!(
            character,
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        );
        match character.is_control() || is_bidi {
            true => shown.extend(character.escape_default()),
            false => shown.push(character),
        }
    }
    shown
}

fn cannot_print<K: ErrorClass>(error: io::Error) -> CommandError<K> {
    CommandError::with_source(K::SYSTEM, "cannot print", error)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::{printable, wants_json};

    #[test]
    fn names_cannot_control_the_terminal() {
        assert_eq!(printable("a\nb\u{1b}[31m\u{9b}é"), "a\\nb\\u{1b}[31m\\u{9b}é");
        for code in [0x200e, 0x200f, 0x202a, 0x202e, 0x2066, 0x2069] {
            let character = char::from_u32(code).unwrap();
            assert_eq!(printable(&format!("a{character}b")), format!("a\\u{{{code:x}}}b"));
        }
        assert_eq!(printable("\u{2010}\u{202f}\u{2065}\u{206a}").chars().count(), 4);
    }

    #[test]
    fn arguments_requesting_json_are_recognized() {
        for (args, json) in [
            (&["list", "-o", "json"][..], true),
            (&["-ojson", "list"], true),
            (&["--output=json"], true),
            (&["--output", "json", "x"], true),
            (&["--output", "text", "json"], false),
            (&["json", "-o"], false),
            (&[], false),
        ] {
            let typed: Vec<OsString> = args.iter().map(OsString::from).collect();
            assert_eq!(wants_json(&typed), json, "{args:?}");
        }
    }
}
