//! Settings of a running server, and those that can change without a restart.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use rtrs_core::logging::change_filter;
use rtrs_core::settings::{LogFilter, SettingValue, SettingValues, print};
use serde_json::Value;

use crate::daemon::reload::APPLIED;
use crate::settings::Settings;

/// The only setting that can change.
pub(crate) const LOG: &str = "log";

/// Settings of a running server.
pub(super) struct Tunables {
    start: Settings,
    /// Current filter of the log.
    log: Mutex<LogFilter>,
}

impl Tunables {
    pub(super) fn new(set: &Settings) -> Self {
        Self { start: set.clone(), log: Mutex::new(set.log.clone()) }
    }

    /// Returns the settings, without those that `reload` applies and other commands show.
    pub(super) fn values(&self) -> SettingValues {
        let set = Settings { log: self.log.lock().clone(), ..self.start.clone() };
        let all = print(&set).into_iter().filter_map(|(name, value)| {
            let name = name.as_str().filter(|name| !APPLIED.contains(name))?.to_owned();
            let value = serde_json::to_value(value).unwrap_or(Value::Null);
            Some(SettingValue { changeable: name == LOG, name, value, note: None })
        });
        let mut settings: Vec<SettingValue> = all.collect();
        settings.sort_by(|a, b| a.name.cmp(&b.name));
        SettingValues { settings }
    }

    /// Changes settings, all or none. Returns those that were named.
    pub(super) fn change(&self, new: &BTreeMap<String, String>) -> Result<SettingValues, String> {
        if let Some(name) = new.keys().find(|name| *name != LOG) {
            return Err(format!("{name} cannot change while the server runs; log can"));
        }
        if let Some(text) = new.get(LOG) {
            let filter = text.parse::<LogFilter>().map_err(|error| format!("{LOG}: {error}"))?;
            let mut log = self.log.lock();
            change_filter(&filter)?;
            tracing::warn!(before = %*log, after = %filter, "the log filter has changed");
            *log = filter;
        }
        let mut values = self.values();
        values.settings.retain(|setting| new.contains_key(&setting.name));
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_settings_and_invalid_levels_are_refused() {
        let tunables = Tunables::new(&Settings::default());
        for (name, value, why) in [
            ("queue-depth", "1", "queue-depth cannot change while the server runs; log can"),
            ("log", "loud", "log: log filter \"loud\" has an unknown level \"loud\"; use error"),
        ] {
            let error = tunables.change(&[(name.into(), value.into())].into()).unwrap_err();
            assert!(error.starts_with(why), "{error}");
        }
        let values = tunables.values().settings;
        let changeable = values.iter().filter(|setting| setting.changeable);
        assert_eq!(changeable.map(|setting| &*setting.name).collect::<Vec<_>>(), ["log"]);
        assert!(values.iter().all(|setting| setting.name != "export"));
    }
}
