//! What has to be done so that what runs is what the file says: a pure function.

use std::collections::BTreeMap;

use rtrs_core::choices;
use serde::Serialize;
use serde_json::Value;

use crate::plan::AttachPlan;
use crate::settings::Settings;

choices! {
    /// What is to be done about a session.
    pub(crate) enum Action as "action" {
        /// Nothing.
        Unchanged = "unchanged",
        /// It does not run.
        Attach = "attach",
        /// It can be changed while it runs.
        Change = "change",
        /// It has to be detached and attached again.
        NeedsReattach = "needs-reattach",
        /// The file does not have it.
        NotListed = "not-listed",
        /// It cannot be said.
        Unclear = "unclear",
    }
}

/// A session of the file.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// What the file says.
    pub(crate) said: Settings,
    /// What that comes to.
    pub(crate) plan: AttachPlan,
}

/// What there is under a session's name.
#[derive(Debug)]
pub(crate) enum Found {
    /// No session.
    Absent,
    /// A session whose process is gone.
    Dead,
    /// A session that does not answer, or not so that it can be understood: why.
    Silent(String),
    /// A session.
    Running(Box<Running>),
}

/// A session that answers.
#[derive(Debug)]
pub(crate) struct Running {
    /// What its settings come to, with the paths that it has now.
    pub(crate) plan: AttachPlan,
    /// Its block device.
    pub(crate) device: Option<String>,
    /// Why it serves no more IO, if it has ended.
    pub(crate) ended: Option<&'static str>,
}

/// A setting that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Difference {
    /// Its name; `path` for one path.
    pub(crate) setting: String,
    /// As it runs; null for a path that is to be added.
    pub(crate) running: Value,
    /// As the file has it; null for a path that is to be removed.
    pub(crate) wanted: Value,
    /// It can change while the session runs.
    pub(crate) online: bool,
}

/// What is to be done about a session, and why.
#[derive(Debug, PartialEq)]
pub(crate) struct Task {
    pub(crate) action: Action,
    pub(crate) differences: Vec<Difference>,
    /// What is left to say.
    pub(crate) reason: Option<String>,
}

impl Task {
    pub(crate) fn of(action: Action, reason: Option<&str>) -> Self {
        Self { action, differences: Vec::new(), reason: reason.map(str::to_owned) }
    }

    /// Settings to change while it runs, by name.
    pub(crate) fn to_set(&self) -> BTreeMap<String, String> {
        let online = self.differences.iter().filter(|one| one.online && one.setting != PATH);
        online.map(|one| (one.setting.clone(), text(&one.wanted))).collect()
    }

    /// Paths to add.
    pub(crate) fn to_add(&self) -> impl Iterator<Item = &str> {
        self.differences
            .iter()
            .filter(|one| one.setting == PATH)
            .filter_map(|one| one.wanted.as_str())
    }

    /// Paths to remove.
    pub(crate) fn to_remove(&self) -> impl Iterator<Item = &str> {
        self.differences
            .iter()
            .filter(|one| one.setting == PATH)
            .filter_map(|one| one.running.as_str())
    }
}

const PATH: &str = "path";

/// As `set` takes it.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// What is to be done about a session of the file.
pub(crate) fn task(wanted: &Wanted, found: &Found) -> Task {
    match found {
        Found::Absent => Task::of(Action::Attach, None),
        Found::Dead => Task::of(Action::Attach, Some("its process is gone")),
        Found::Silent(why) => Task::of(Action::Unclear, Some(why)),
        Found::Running(running) => change(wanted, running),
    }
}

fn change(wanted: &Wanted, running: &Running) -> Task {
    let mut differences = settings_of(wanted, running);
    let mut task = Task::of(Action::Unchanged, running.ended);
    let online = differences.iter().filter(|one| one.online);
    let online = online.map(|one| (one.setting.clone(), text(&one.wanted))).collect();
    // As the session itself would judge it.
    if let Err(error) = running.plan.changed(&online) {
        task.reason = Some(error.chain().to_string());
        differences.iter_mut().for_each(|one| one.online = false);
    }
    differences.extend(paths_of(&wanted.plan, &running.plan));
    task.action = match () {
        () if running.ended.is_some() || differences.iter().any(|one| !one.online) => {
            Action::NeedsReattach
        }
        () if differences.is_empty() => Action::Unchanged,
        () => Action::Change,
    };
    task.differences = differences;
    task
}

/// Settings that differ, but for the paths.
fn settings_of(wanted: &Wanted, running: &Running) -> Vec<Difference> {
    let mut left: BTreeMap<String, Value> =
        running.plan.values().into_iter().map(|one| (one.name, one.value)).collect();
    let mut differences = Vec::new();
    for setting in wanted.plan.values() {
        let name = setting.name;
        let is = left.remove(&name).unwrap_or(Value::Null);
        let same = match name.as_str() {
            // Below; and of no interest to a session that runs in the background.
            PATH | "foreground" => true,
            "device" => is_same_device(&setting.value, &is, running.device.as_deref()),
            // By default it follows other settings, and the kernel keeps what it began with.
            "device-timeout" if wanted.said.attach.device_timeout.is_none() => {
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

/// `auto` is content with any device, and any device may have been chosen by `auto`.
fn is_same_device(wanted: &Value, is: &Value, device: Option<&str>) -> bool {
    let auto = |value: &Value| value.as_str() == Some("auto");
    match (wanted.as_str(), is.as_str()) {
        (Some(_), Some(_)) if auto(wanted) => true,
        (Some(name), Some(_)) if auto(is) => Some(name) == device,
        _ => wanted == is,
    }
}

/// Paths to add, then paths to remove.
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
        let said = Settings::from_yaml(yaml, "w.yaml").unwrap();
        let plan = AttachPlan::new("vol", said.clone(), Output::Text).unwrap();
        Wanted { said, plan }
    }

    fn running(yaml: &str) -> Running {
        Running { plan: wanted(yaml).plan, device: Some("/dev/nbd3".into()), ended: None }
    }

    fn task_of(file: &str, runs: &str) -> Task {
        task(&wanted(file), &Found::Running(Box::new(running(runs))))
    }

    const BASE: &str = "path: tcp://a\nsocket: /s\n";

    #[test]
    fn what_does_not_run_is_attached() {
        let wanted = wanted(BASE);
        assert_eq!(task(&wanted, &Found::Absent).action, Action::Attach);
        assert_eq!(task(&wanted, &Found::Dead).action, Action::Attach);
        let unclear = task(&wanted, &Found::Silent("why".into()));
        assert_eq!((unclear.action, unclear.reason.as_deref()), (Action::Unclear, Some("why")));
    }

    #[test]
    fn what_runs_as_it_should_is_left_alone() {
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
    fn what_can_change_online_does() {
        let file = "path: [tcp://a, tcp://c]\nsocket: /s\npolicy: round-robin\nno-path: queue\n";
        let task = task_of(file, "path: [tcp://a, tcp://b]\nsocket: /s\n");
        assert_eq!(task.action, Action::Change);
        let set: Vec<_> = task.to_set().into_iter().collect();
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(set, [pair("no-path", "queue"), pair("policy", "round-robin")]);
        assert_eq!(task.to_add().collect::<Vec<_>>(), ["tcp://c:1234"]);
        assert_eq!(task.to_remove().collect::<Vec<_>>(), ["tcp://b:1234"]);
        // The timeout of the device follows no-path, and is not what was asked for.
        let device = "path: tcp://a\ndevice: auto\nslow-io: fail\n";
        let task = task_of(&format!("{device}no-path: queue-for=30s\n"), device);
        assert_eq!((task.action, task.differences.len()), (Action::Change, 1), "{task:?}");
    }

    #[test]
    fn what_cannot_change_needs_a_new_attach() {
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
        // It asked for a timeout, and has another.
        let device = "path: tcp://a\ndevice: auto\n";
        let task = task_of(&format!("{device}device-timeout: 20m\n"), device);
        assert_eq!(task.action, Action::NeedsReattach);
    }

    #[test]
    fn what_the_session_would_refuse_is_not_tried() {
        let fails = "path: tcp://a\nsocket: /s\nslow-io: fail\n";
        let task = task_of(&format!("{fails}io-timeout: 5s\n"), fails);
        assert_eq!(task.action, Action::NeedsReattach);
        assert!(task.reason.as_ref().unwrap().contains("io-timeout cannot change"), "{task:?}");
        assert!(task.to_set().is_empty());
        let device = "path: tcp://a\ndevice: auto\nslow-io: fail\nno-path: queue-for=1m\n";
        let more = device.replace("1m", "10m");
        let task = task_of(&more, device);
        assert_eq!(task.action, Action::NeedsReattach, "the kernel would lose patience");
    }

    #[test]
    fn an_evicted_session_serves_no_more() {
        let found = Found::Running(Box::new(Running {
            ended: Some("the server evicted it"),
            ..running(BASE)
        }));
        let task = task(&wanted(BASE), &found);
        assert_eq!((task.action, task.differences), (Action::NeedsReattach, vec![]));
    }
}
