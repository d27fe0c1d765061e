//! Settings of a running daemon, as exchanged with it by the commands `set` and `get`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::command_error::{CommandError, ErrorClass};
use super::output::printable;

/// Setting of a running daemon.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingValue {
    /// Key in the configuration file.
    pub name: String,
    /// Value as in the configuration file; null if unset.
    pub value: Value,
    /// Whether `set` can change it.
    pub changeable: bool,
    /// Remark about a part of the running daemon that does not follow the value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Settings of a running daemon.
#[derive(Debug, Serialize, Deserialize)]
pub struct SettingValues {
    /// Settings in order of their names.
    pub settings: Vec<SettingValue>,
}

impl SettingValues {
    /// Returns an error if a name is not a known setting. `hint` says how to list the names.
    ///
    /// # Errors
    /// A usage error, with the unknown name.
    pub fn check_known<'a, K: ErrorClass>(
        &self,
        mut names: impl Iterator<Item = &'a String>,
        hint: &str,
    ) -> Result<(), CommandError<K>> {
        let is_known = |name: &&String| self.settings.iter().any(|known| known.name == **name);
        match names.find(|name| !is_known(name)) {
            Some(name) => {
                Err(CommandError::new(K::USAGE, format!("there is no setting {name}; {hint}")))
            }
            None => Ok(()),
        }
    }

    /// Keeps only the settings with these names, or all if `names` is empty.
    ///
    /// # Errors
    /// See [`check_known`](Self::check_known).
    pub fn select<K: ErrorClass>(
        mut self,
        names: &[String],
        hint: &str,
    ) -> Result<Self, CommandError<K>> {
        self.check_known(names.iter(), hint)?;
        self.settings.retain(|setting| names.is_empty() || names.contains(&setting.name));
        Ok(self)
    }

    /// Formats the settings as in the configuration file, each with its `remark`.
    #[must_use]
    pub fn text(&self, remark: impl Fn(&SettingValue) -> &'static str) -> String {
        let line = |setting: &SettingValue| {
            let value = match &setting.value {
                Value::Null => "unset".to_owned(),
                Value::String(text) => printable(text),
                other => other.to_string(),
            };
            let note = setting.note.as_ref().map(|note| format!("  # {}", printable(note)));
            format!("{}: {value}{}{}\n", setting.name, remark(setting), note.unwrap_or_default())
        };
        self.settings.iter().map(line).collect()
    }
}

/// Parses a change of the form `KEY=VALUE`.
///
/// # Errors
/// Returns what to write instead, with an example.
pub fn key_value(text: &str, example: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("use KEY=VALUE, for example {example}")),
    }
}

/// Collects the changes in a `set` by name.
///
/// # Errors
/// A usage error, if a setting is named twice.
pub fn changes<K: ErrorClass>(
    pairs: &[(String, String)],
) -> Result<BTreeMap<String, String>, CommandError<K>> {
    let changes: BTreeMap<_, _> = pairs.iter().cloned().collect();
    if changes.len() < pairs.len() {
        let text = "a setting is named twice; name each once";
        return Err(CommandError::new(K::USAGE, text));
    }
    Ok(changes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_may_contain_an_equals_sign() {
        let pair = key_value("no-path=queue-for=1m", "a=b").unwrap();
        assert_eq!(pair, ("no-path".to_owned(), "queue-for=1m".to_owned()));
        for bad in ["", "policy", "=x"] {
            assert_eq!(
                key_value(bad, "a=b").unwrap_err(),
                "use KEY=VALUE, for example a=b",
                "{bad}"
            );
        }
    }
}
