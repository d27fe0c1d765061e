//! Changes by `set` to the settings of an attached session.

use std::collections::BTreeMap;
use std::time::Duration;

use rtrs_core::settings::{Field, Setting, SettingValue, Settings, Visitor, nearest, print};
use serde_json::Value;

use super::attach::{AttachPlan, Front, request_seconds};
use super::session::SessionPlan;
use crate::error::{Error, usage};
use crate::settings::SlowIo;

/// Settings that may be changed while a session is attached.
const CHANGEABLE: [&str; 10] = [
    "connect-timeout",
    "heartbeat",
    "heartbeat-idle-max",
    "heartbeat-missed-max",
    "io-timeout",
    "log",
    "no-path",
    "policy",
    "reconnect-max",
    "reconnect-min",
];

/// Visitor that assigns a value to one setting.
pub(super) struct Assign<'a> {
    pub(super) name: &'a str,
    pub(super) text: &'a str,
    /// Result of the assignment; None until the setting is found.
    pub(super) outcome: Option<Result<(), String>>,
}

impl Visitor for Assign<'_> {
    fn setting<F: Field>(&mut self, setting: &Setting, value: &mut F) {
        if setting.name == self.name {
            let parsed = F::parse(self.text).map(|parsed| *value = parsed);
            self.outcome = Some(parsed.map_err(|error| format!("{}: {error}", self.name)));
        }
    }

    fn section<S: Settings>(&mut self, _: &'static str, _: &mut S) {}
}

impl AttachPlan {
    /// Returns every setting with its value and whether it may be changed.
    pub(crate) fn values(&self) -> Vec<SettingValue> {
        let all = print(&self.session.settings).into_iter().chain(print(&self.settings));
        let mut values: Vec<SettingValue> = all
            .filter_map(|(name, value)| {
                let name = name.as_str()?.to_owned();
                let changeable = CHANGEABLE.contains(&name.as_str());
                let value = serde_json::to_value(value).unwrap_or(Value::Null);
                Some(SettingValue { name, value, changeable, note: None })
            })
            .collect();
        values.sort_by(|a, b| a.name.cmp(&b.name));
        values
    }

    /// Returns the plan with some settings changed.
    ///
    /// # Errors
    /// Fails if a setting does not exist or cannot be changed now, or if a value is invalid or
    /// conflicts with another setting.
    pub(crate) fn changed(&self, changes: &BTreeMap<String, String>) -> Result<Self, Error> {
        let SessionPlan { name, export_name, shards, access, mut settings, .. } =
            self.session.clone();
        for (name, text) in changes {
            self.check_changeable(name)?;
            let mut assign = Assign { name, text, outcome: None };
            settings.visit(&mut assign);
            assign.outcome.unwrap_or_else(|| Err(unknown(name))).map_err(usage)?;
        }
        let session = SessionPlan::new(&name, settings, shards, access)?;
        let session = SessionPlan { export_name, ..session };
        if let Front::Device(options) = &self.front
            && let Some(seconds) = options.timeout_s
        {
            // The kernel keeps the initial timeout of the device.
            request_seconds(Some(Duration::from_secs(seconds)), self.slow_io(), &session)?;
        }
        Ok(Self { session, ..self.clone() })
    }

    fn check_changeable(&self, name: &str) -> Result<(), Error> {
        if name == "io-timeout" && self.slow_io() == SlowIo::Fail {
            return Err(usage(
                "io-timeout cannot change while slow-io is fail, because NBD requests use it \
                 too; detach, and attach with the new value",
            ));
        }
        if CHANGEABLE.contains(&name) {
            return Ok(());
        }
        let known = self.values().iter().any(|setting| setting.name == name);
        Err(usage(if known {
            let list = CHANGEABLE.join(", ");
            format!("{name} cannot change while the session is attached; these can: {list}")
        } else {
            unknown(name)
        }))
    }
}

fn unknown(name: &str) -> String {
    match nearest(name, CHANGEABLE.iter().copied()) {
        Some(near) => format!("there is no setting {name}; did you mean {near}?"),
        None => format!("there is no setting {name}; see rtrs-client get"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings as All;
    use rtrs_core::settings::Output;

    fn plan(yaml: &str) -> AttachPlan {
        let yaml = format!("path: tcp://h\n{yaml}");
        let settings = All::from_yaml(&yaml, "c.yaml").unwrap();
        AttachPlan::new("vol", settings, Output::Text).unwrap()
    }

    fn change(plan: &AttachPlan, changes: &[(&str, &str)]) -> Result<AttachPlan, String> {
        let changes = changes.iter().map(|(name, text)| ((*name).into(), (*text).into()));
        plan.changed(&changes.collect()).map_err(|error| error.to_string())
    }

    #[test]
    fn settings_change_one_by_one_and_together() {
        let plan = plan("socket: /tmp/s\nreconnect-min: 1s\n");
        for name in CHANGEABLE {
            let known = plan.values().into_iter().find(|setting| setting.name == name);
            let text = match known.expect(name).value {
                Value::String(text) => text,
                other => other.to_string(),
            };
            assert_eq!(change(&plan, &[(name, &text)]).as_ref(), Ok(&plan), "{name}");
        }
        // Each change on its own would conflict with the other setting.
        let waits = [("reconnect-max", "20ms"), ("reconnect-min", "10ms")];
        let settings = change(&plan, &waits).unwrap().session.settings;
        assert_eq!(settings.reconnect_max.get(), Duration::from_millis(20));
        let error = change(&plan, &waits[..1]).unwrap_err();
        assert!(error.contains("reconnect-min 1s is more than reconnect-max 20ms"), "{error}");
    }

    #[test]
    fn an_unchangeable_setting_is_refused_with_a_reason() {
        let plan = plan("socket: /tmp/s\nslow-io: fail\n");
        for (name, text, reason) in [
            ("crc", "off", "crc cannot change while the session is attached; these can: connect"),
            ("polcy", "round-robin", "there is no setting polcy; did you mean policy?"),
            ("foo", "1", "there is no setting foo; see rtrs-client get"),
            ("policy", "best", "policy: policy \"best\""),
            ("io-timeout", "1s", "io-timeout cannot change while slow-io is fail"),
        ] {
            let error = change(&plan, &[(name, text)]).unwrap_err();
            assert!(error.starts_with(reason), "{error}");
        }
    }

    #[test]
    fn the_kernels_timeout_limits_other_timeouts() {
        let plan = plan("device: auto\nslow-io: fail\nno-path: queue-for=1m\n");
        let error = change(&plan, &[("no-path", "queue-for=10m")]).unwrap_err();
        assert!(error.contains("is too short for io-timeout 30s and no-path"), "{error}");
        assert!(change(&plan, &[("no-path", "fail")]).is_ok());
    }
}
