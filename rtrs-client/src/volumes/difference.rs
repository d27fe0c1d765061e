//! Comparison of a running session with the file of `apply` and `diff`: a pure function that
//! returns the necessary changes.

use std::collections::BTreeMap;

use rtrs_core::choices;
use rtrs_core::identity::Identity;
use serde::Serialize;
use serde_json::Value;

use crate::plan::AttachPlan;
use crate::settings::Settings;

choices! {
    /// Action for a session.
    pub(crate) enum Action as "action" {
        /// No change.
        Unchanged = "unchanged",
        /// Attach a session that is not running.
        Attach = "attach",
        /// Change the running session.
        Change = "change",
        /// No change, but no IO is served.
        ServesNoIo = "serves-no-io",
        /// Detach and attach again.
        NeedsReattach = "needs-reattach",
        /// Not in the file, and left as it is.
        NotListed = "not-listed",
        /// Not in the file: detach.
        Detach = "detach",
        /// Cannot be determined.
        Unclear = "unclear",
    }
}

/// Volume in the file.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// Settings in the file; for a later volume of a session, the settings of the session's first
    /// volume.
    pub(crate) configured: Settings,
    /// Plan made from the settings.
    pub(crate) plan: AttachPlan,
    /// First volume of the session; None if this volume is the first.
    pub(crate) first: Option<String>,
}

/// State found under a session's name.
#[derive(Debug)]
pub(crate) enum Found {
    /// No session.
    Absent,
    /// A session whose process has died.
    Dead,
    /// A session that does not answer, or whose answer cannot be parsed, with the reason.
    Silent(String),
    /// A running session.
    Running(Box<Running>),
}

/// A running session that answers.
#[derive(Debug)]
pub(crate) struct Running {
    /// Plan made from the session's settings, with the current paths.
    pub(crate) plan: AttachPlan,
    /// Block device.
    pub(crate) device: Option<String>,
    /// Export that the session is bound to.
    pub(crate) identity: Option<Identity>,
    /// Reason why only a new session can serve IO.
    pub(crate) ended: Option<&'static str>,
    /// Reason why this session currently serves no IO, and the remedy.
    pub(crate) no_service: Option<String>,
}

/// Setting that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Difference {
    /// Name of the setting; `path` if a single path differs.
    pub(crate) setting: String,
    /// Running value; null for a path to be added.
    pub(crate) running: Value,
    /// Value in the file; null for a path to be removed.
    pub(crate) wanted: Value,
    /// Whether the setting can change while the session is running.
    pub(crate) online: bool,
}

/// Action for a session, and its reasons.
#[derive(Debug, PartialEq)]
pub(crate) struct Task {
    pub(crate) action: Action,
    pub(crate) differences: Vec<Difference>,
    /// Further explanation.
    pub(crate) reason: Option<String>,
}

impl Task {
    pub(crate) fn of(action: Action, reason: Option<&str>) -> Self {
        Self { action, differences: Vec::new(), reason: reason.map(str::to_owned) }
    }

    /// Settings to change while the session is running, by name.
    pub(crate) fn to_set(&self) -> BTreeMap<String, String> {
        let online = self.differences.iter().filter(|one| one.online && one.setting != PATH);
        online.map(|one| (one.setting.clone(), text(&one.wanted))).collect()
    }

    pub(crate) fn to_add(&self) -> impl Iterator<Item = &str> {
        self.differences
            .iter()
            .filter(|one| one.setting == PATH)
            .filter_map(|one| one.wanted.as_str())
    }

    pub(crate) fn to_remove(&self) -> impl Iterator<Item = &str> {
        self.differences
            .iter()
            .filter(|one| one.setting == PATH)
            .filter_map(|one| one.running.as_str())
    }
}

const PATH: &str = "path";

/// Returns a value's text in the form that `set` accepts.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Determines the action for a session in the file.
pub(crate) fn task(wanted: &Wanted, found: &Found) -> Task {
    match found {
        Found::Absent => Task::of(Action::Attach, None),
        Found::Dead => Task::of(Action::Attach, Some("its process has ended")),
        Found::Silent(why) => Task::of(Action::Unclear, Some(why)),
        Found::Running(running) => change(wanted, running),
    }
}

fn change(wanted: &Wanted, running: &Running) -> Task {
    let mut differences = settings_of(wanted, running);
    let reason = running.ended.or(running.no_service.as_deref());
    let mut task = Task::of(Action::Unchanged, reason);
    let online = differences.iter().filter(|one| one.online);
    let online = online.map(|one| (one.setting.clone(), text(&one.wanted))).collect();
    // The session applies the same check.
    if let Err(error) = running.plan.changed(&online) {
        let reason = task.reason.into_iter().chain([error.chain().to_string()]);
        task.reason = Some(reason.collect::<Vec<_>>().join("; "));
        differences.iter_mut().for_each(|one| one.online = false);
    }
    differences.extend(paths_of(&wanted.plan, &running.plan));
    task.action = match () {
        () if running.ended.is_some() || differences.iter().any(|one| !one.online) => {
            Action::NeedsReattach
        }
        () if !differences.is_empty() => Action::Change,
        () if running.no_service.is_some() => Action::ServesNoIo,
        () => Action::Unchanged,
    };
    task.differences = differences;
    task
}

/// Returns the settings that differ, except for the paths.
fn settings_of(wanted: &Wanted, running: &Running) -> Vec<Difference> {
    let mut left: BTreeMap<String, Value> =
        running.plan.values().into_iter().map(|one| (one.name, one.value)).collect();
    let mut differences = Vec::new();
    for setting in wanted.plan.values() {
        let name = setting.name;
        let is = left.remove(&name).unwrap_or(Value::Null);
        let same = match name.as_str() {
            // Paths are compared below. The other two settings matter only while attaching.
            PATH | "foreground" | "require-paths" => true,
            "device" => is_same_device(&setting.value, &is, running.device.as_deref()),
            "identity" => wanted.plan.session.settings.identity.is_none_or(|identity| {
                running.identity.is_some_and(|bound| is_met(identity, bound)) || setting.value == is
            }),
            // If unset, the timeout is derived from other settings, and the kernel keeps the value
            // set at attach. Only the presence of a timeout is compared.
            "device-timeout" if wanted.configured.attach.device_timeout.is_none() => {
                setting.value.is_null() == is.is_null()
            }
            _ => setting.value == is,
        };
        if !same {
            let (wanted, online) = (setting.value, setting.changeable);
            differences.push(Difference { setting: name, running: is, wanted, online });
        }
    }
    differences
}

/// Whether the identity that a session is bound to matches the wanted identity.
fn is_met(wanted: Identity, bound: Identity) -> bool {
    let is_known = |wanted: bool, bound: bool| bound || !wanted;
    is_known(wanted.server.is_some(), bound.server.is_some())
        && is_known(wanted.export.is_some(), bound.export.is_some())
        && !wanted.contradicts(&bound)
}

/// Whether the device satisfies the file. `auto` in the file accepts any device; a session with
/// `auto` satisfies the file if the session uses the named device.
fn is_same_device(wanted: &Value, is: &Value, device: Option<&str>) -> bool {
    let auto = |value: &Value| value.as_str() == Some("auto");
    match (wanted.as_str(), is.as_str()) {
        (Some(_), Some(_)) if auto(wanted) => true,
        (Some(name), Some(_)) if auto(is) => Some(name) == device,
        _ => wanted == is,
    }
}

/// Paths to add, followed by paths to remove.
fn paths_of(wanted: &AttachPlan, running: &AttachPlan) -> Vec<Difference> {
    let names = |plan: &AttachPlan| -> Vec<String> {
        plan.session.settings.path.iter().map(ToString::to_string).collect()
    };
    let (wanted, running) = (names(wanted), names(running));
    let path = |running, wanted| Difference { setting: PATH.into(), running, wanted, online: true };
    let added = wanted.iter().filter(|path| !running.contains(path));
    let removed = running.iter().filter(|path| !wanted.contains(path));
    let added = added.map(|name| path(Value::Null, name.as_str().into()));
    added.chain(removed.map(|name| path(name.as_str().into(), Value::Null))).collect()
}

#[cfg(test)]
mod tests {
    use rtrs_core::settings::Output;

    use super::*;

    fn wanted(yaml: &str) -> Wanted {
        let configured = Settings::from_yaml(yaml, "w.yaml").unwrap();
        let plan = AttachPlan::new("vol", configured.clone(), Output::Text).unwrap();
        Wanted { configured, plan, first: None }
    }

    fn running(yaml: &str) -> Running {
        let device = Some("/dev/nbd3".into());
        let plan = wanted(yaml).plan;
        Running { plan, device, identity: None, ended: None, no_service: None }
    }

    fn task_of(file: &str, runs: &str) -> Task {
        task(&wanted(file), &Found::Running(Box::new(running(runs))))
    }

    const BASE: &str = "path: tcp://a\nsocket: /s\n";

    #[test]
    fn missing_volumes_are_attached() {
        let wanted = wanted(BASE);
        assert_eq!(task(&wanted, &Found::Absent).action, Action::Attach);
        assert_eq!(task(&wanted, &Found::Dead).action, Action::Attach);
        let unclear = task(&wanted, &Found::Silent("why".into()));
        assert_eq!((unclear.action, unclear.reason.as_deref()), (Action::Unclear, Some("why")));
    }

    #[test]
    fn unchanged_volumes_are_left_alone() {
        for (file, runs) in [
            (BASE, BASE),
            ("path: tcp://a:1234\nsocket: /s\n", BASE),
            (BASE, "path: tcp://a\nsocket: /s\nforeground: true\npolicy: min-inflight\n"),
            ("path: [tcp://a, tcp://b]\nsocket: /s\n", "path: [tcp://b, tcp://a]\nsocket: /s\n"),
            ("path: tcp://a\ndevice: auto\n", "path: tcp://a\ndevice: /dev/nbd7\n"),
            ("path: tcp://a\ndevice: /dev/nbd3\n", "path: tcp://a\ndevice: auto\n"),
        ] {
            assert_eq!(task_of(file, runs), Task::of(Action::Unchanged, None), "{file} {runs}");
        }
    }

    #[test]
    fn online_changes_are_applied_online() {
        let file = "path: [tcp://a, tcp://c]\nsocket: /s\npolicy: round-robin\nno-path: queue\n";
        let task = task_of(file, "path: [tcp://a, tcp://b]\nsocket: /s\n");
        assert_eq!(task.action, Action::Change);
        let set: Vec<_> = task.to_set().into_iter().collect();
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(set, [pair("no-path", "queue"), pair("policy", "round-robin")]);
        assert_eq!(task.to_add().collect::<Vec<_>>(), ["tcp://c:1234"]);
        assert_eq!(task.to_remove().collect::<Vec<_>>(), ["tcp://b:1234"]);
        // The device timeout follows no-path, and was not set in the file.
        let device = "path: tcp://a\ndevice: auto\nslow-io: fail\n";
        let task = task_of(&format!("{device}no-path: queue-for=30s\n"), device);
        assert_eq!((task.action, task.differences.len()), (Action::Change, 1), "{task:?}");
    }

    #[test]
    fn other_changes_need_a_new_attach() {
        for (more, setting) in [
            ("crc: off", "crc"),
            ("read-only: true", "access"),
            ("session-name: other", "session-name"),
            ("shards: 1", "shards"),
            ("socket-mode: 660", "socket-mode"),
        ] {
            let task = task_of(&format!("{BASE}{more}\npolicy: min-latency\n"), BASE);
            assert_eq!(task.action, Action::NeedsReattach, "{more}");
            let fixed = task.differences.iter().find(|one| !one.online).unwrap();
            assert_eq!(fixed.setting, setting);
            assert_eq!(task.to_set().len(), 1, "the rest can change online");
        }
        let task = task_of("path: tcp://a\nlisten: '127.0.0.1:1'\n", BASE);
        let names: Vec<_> = task.differences.iter().map(|one| one.setting.as_str()).collect();
        assert_eq!((task.action, names), (Action::NeedsReattach, vec!["listen", "socket"]));
        let task = task_of("path: tcp://a\ndevice: /dev/nbd4\n", "path: tcp://a\ndevice: auto\n");
        assert_eq!(task.action, Action::NeedsReattach);
        // The file sets a timeout that differs from the running timeout.
        let device = "path: tcp://a\ndevice: auto\n";
        let task = task_of(&format!("{device}device-timeout: 20m\n"), device);
        assert_eq!(task.action, Action::NeedsReattach);
    }

    #[test]
    fn changes_the_session_would_refuse_are_not_tried() {
        let fails = "path: tcp://a\nsocket: /s\nslow-io: fail\n";
        let task = task_of(&format!("{fails}io-timeout: 5s\n"), fails);
        assert_eq!(task.action, Action::NeedsReattach);
        assert!(task.reason.as_ref().unwrap().contains("io-timeout cannot change"), "{task:?}");
        assert!(task.to_set().is_empty());
        let device = "path: tcp://a\ndevice: auto\nslow-io: fail\nno-path: queue-for=1m\n";
        let more = device.replace("1m", "10m");
        let task = task_of(&more, device);
        assert_eq!(task.action, Action::NeedsReattach, "the kernel's timeout would be too short");
    }

    #[test]
    fn a_session_that_serves_no_io_differs() {
        let no_path = || Running { no_service: Some("no-path".into()), ..running(BASE) };
        let of = |file: &str| task(&wanted(file), &Found::Running(Box::new(no_path())));
        let same = of(BASE);
        assert_eq!((same.action, same.reason.as_deref()), (Action::ServesNoIo, Some("no-path")));
        let changed = of(&format!("{BASE}policy: round-robin\n"));
        assert_eq!(changed.action, Action::Change);
        assert_eq!(changed.reason.as_deref(), Some("no-path"));
        assert_eq!(of(&format!("{BASE}crc: off\n")).action, Action::NeedsReattach);
    }

    #[test]
    fn a_wanted_identity_is_compared_with_that_of_the_open_export() {
        let server = "00112233445566778899aabbccddeeff";
        let export = "ffeeddccbbaa99887766554433221100";
        let of = |file: &str, setting: &str, bound: Option<&str>| {
            let identity = bound.map(|id| id.parse().unwrap());
            let running = Running { identity, ..running(&format!("{BASE}{setting}")) };
            task(&wanted(&format!("{BASE}{file}")), &Found::Running(Box::new(running))).action
        };
        let both = format!("{server}/{export}");
        let key = |identity: &str| format!("identity: {identity}\n");
        for wanted in [key(&both), key(&format!("{server}/-")), key(&format!("-/{export}"))] {
            assert_eq!(of(&wanted, "", Some(&both)), Action::Unchanged, "{wanted}");
        }
        assert_eq!(of("", &key(&both), Some(&both)), Action::Unchanged, "any identity is accepted");
        assert_eq!(of(&key(&both), &key(&both), None), Action::Unchanged, "not open yet");
        for bound in [None, Some(format!("{server}/-")), Some(format!("{export}/{export}"))] {
            let bound = bound.as_deref();
            assert_eq!(of(&key(&both), "", bound), Action::NeedsReattach, "{bound:?}");
        }
    }

    #[test]
    fn an_evicted_session_is_not_reused() {
        let found = Found::Running(Box::new(Running {
            ended: Some("the server evicted the session"),
            ..running(BASE)
        }));
        let task = task(&wanted(BASE), &found);
        assert_eq!((task.action, task.differences), (Action::NeedsReattach, vec![]));
    }
}
