//! What a command prints to stdout, as text or as JSON.

use std::io::{self, Write};

use clap::ValueEnum;
use serde::Serialize;

use super::command_error::{CommandError, ErrorClass};

/// Format of what a command prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    #[value(alias = "yaml")]
    Text,
    /// For programs
    Json,
}

impl Output {
    /// Prints a value: as JSON with sorted keys, or as the text that is made of it.
    ///
    /// # Errors
    /// [`ErrorClass::SYSTEM`] when stdout cannot be written.
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

/// Prints text. A reader that has closed its end, as `head` does, is no error.
///
/// # Errors
/// [`ErrorClass::SYSTEM`] when stdout cannot be written.
pub fn print_text<K: ErrorClass>(text: &str) -> Result<(), CommandError<K>> {
    match write_text(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(cannot_print(error)),
        _ => Ok(()),
    }
}

/// Writes text to stdout, all of it.
///
/// # Errors
/// The system's.
pub fn write_text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

fn cannot_print<K: ErrorClass>(error: io::Error) -> CommandError<K> {
    CommandError::with_source(K::SYSTEM, "cannot print", error)
}
