//! Reading a daemon's settings from its YAML file.
//!
//! Owns [`settings_from_file`] and [`settings_from_yaml`]: bounded, never panicking, with errors
//! that name file, line and what would do. What the keys are is the daemons' business.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::DeserializeOwned;

use super::{CommandError, ErrorClass, file_error_text};

/// Largest configuration file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads a configuration file of at most 1 MiB.
///
/// # Errors
/// [`ErrorClass::CONFIG_FILE`] if it cannot be read, [`ErrorClass::CONFIG`] for its contents.
pub fn settings_from_file<T, K>(path: &Path) -> Result<T, CommandError<K>>
where
    T: DeserializeOwned + Default,
    K: ErrorClass,
{
    let unreadable = |source| {
        let text = format!("cannot read the configuration file {}", path.display());
        CommandError::with_source(K::CONFIG_FILE, text, source)
    };
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text))
        .map_err(unreadable)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        let text = format!("{}: is larger than 1 MiB; use a smaller file", path.display());
        return Err(CommandError::new(K::CONFIG_FILE, text));
    }
    settings_from_yaml(&text, &path.display().to_string())
}

/// Reads the text of a configuration file called `name` in errors. An empty text says nothing.
///
/// # Errors
/// [`ErrorClass::CONFIG`], with name, line and remedy.
pub fn settings_from_yaml<T, K>(text: &str, name: &str) -> Result<T, CommandError<K>>
where
    T: DeserializeOwned + Default,
    K: ErrorClass,
{
    serde_yaml::from_str::<Option<T>>(text).map(Option::unwrap_or_default).map_err(|error| {
        let line = error.location().map_or(1, |place| place.line());
        let what = file_error_text(&error.to_string());
        CommandError::new(K::CONFIG, format!("{name}:{line}: {what}"))
    })
}
