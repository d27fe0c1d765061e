//! Reads a daemon's settings from its YAML file.
//!
//! [`settings_from_file`] and [`settings_from_yaml`] limit the file's size and never panic; their
//! errors give the file, the line and a remedy. The daemons define the keys.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::command_error::{CommandError, ErrorClass};
use super::declare::Settings;
use super::file_map::Keys;
use crate::paths::why_missing;

/// Maximum size of a configuration file in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads a configuration file of at most 1 MiB.
///
/// # Errors
/// [`ErrorClass::CONFIG_FILE`] if it cannot be read, [`ErrorClass::CONFIG`] if its contents, size
/// or encoding are invalid.
pub fn settings_from_file<T, K>(path: &Path) -> Result<T, CommandError<K>>
where
    T: Settings,
    K: ErrorClass,
{
    settings_from_yaml(&config_text(path)?, &path.display().to_string())
}

/// Returns the text of a configuration file of at most 1 MiB.
///
/// # Errors
/// See [`settings_from_file`].
pub fn config_text<K: ErrorClass>(path: &Path) -> Result<String, CommandError<K>> {
    let unreadable = |error| {
        let source = why_missing(path, error);
        let text = format!("cannot read the configuration file {}", path.display());
        CommandError::with_source(K::CONFIG_FILE, text, source)
    };
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes))
        .map_err(unreadable)?;
    let name = path.display().to_string();
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let text = format!("{name}: larger than 1 MiB; use a smaller file");
        return Err(CommandError::new(K::CONFIG, text));
    }
    String::from_utf8(bytes).map(without_bom).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count();
        let byte = error.as_bytes()[at];
        let text = format!("{name}:{line}: byte {byte:#04x} is not UTF-8; save the file as UTF-8");
        CommandError::new(K::CONFIG, text)
    })
}

/// Removes the byte order mark that some editors put at the start of a UTF-8 file.
#[must_use]
pub fn without_bom(text: String) -> String {
    match text.strip_prefix('\u{feff}') {
        Some(rest) => rest.to_owned(),
        None => text,
    }
}

/// Parses the text of a configuration file. Errors refer to the file as `name`. Empty text sets
/// nothing.
///
/// # Errors
/// [`ErrorClass::CONFIG`], with the name, the line and a hint.
pub fn settings_from_yaml<T, K>(text: &str, name: &str) -> Result<T, CommandError<K>>
where
    T: Settings,
    K: ErrorClass,
{
    let read = serde_yaml::from_str::<Option<Keys<T>>>(text);
    read.map(|keys| keys.map_or_else(T::default, |keys| keys.0))
        .map_err(|error| yaml_error(&error, name))
}

/// Converts an error in the text of a file. The result refers to the file as `name`.
pub fn yaml_error<K: ErrorClass>(error: &serde_yaml::Error, name: &str) -> CommandError<K> {
    let line = error.location().map_or(1, |place| place.line());
    let what = error.to_string();
    // The line number is at the front of the message instead.
    let what = what.rfind(" at line ").map_or(&*what, |place| &what[..place]);
    CommandError::new(K::CONFIG, format!("{name}:{line}: {what}"))
}
