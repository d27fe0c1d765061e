//! File of `apply` and `save`: the sessions of a host, each with its settings and its volumes.
//!
//! The keys are those of the configuration file (`settings.rs`); this module only knows their
//! places. Keys of a volume are below `volumes`, because a session will have several.
//! `difference.rs` compares the file with the running sessions.

pub(crate) mod difference;

use rtrs_core::local::RunDir;
use rtrs_core::settings::{
    KeyGroup, Keys, Output, Settings as Declared, Visitor, describe, nearest, print, yaml_error,
};
use serde_yaml::{Mapping, Value};

use crate::control_protocol::SettingValue;
use crate::error::{Error, ErrorKind};
use crate::plan::AttachPlan;
use crate::settings::{AttachSettings, PlaceSettings, SessionSettings, Settings};

/// Settings for the place where a volume is served. A session has none of its own.
const FRONTS: [&str; 3] = ["device", "socket", "listen"];
/// Settings of `attach` that all volumes of a session share.
const SHARED: [&str; 2] = ["shards", "metrics"];
/// Session settings that each volume has.
const OF_VOLUME: [&str; 3] = ["access", "read-only", "identity"];
/// Setting that `apply` itself decides.
const FOREGROUND: &str = "foreground";

/// Volume in the file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Volume {
    /// Export name, which is also the session's name on this host.
    pub(crate) name: String,
    /// Settings in the file, with defaults for those that are missing.
    pub(crate) settings: Settings,
}

/// All settings of a session and a volume.
#[derive(Debug, Default, Clone)]
struct Entry {
    session: SessionSettings,
    attach: AttachSettings,
}

impl Declared for Entry {
    fn visit(&mut self, visitor: &mut impl Visitor) {
        self.session.visit(visitor);
        self.attach.visit(visitor);
    }
}

/// Whether a key may appear below `volumes`.
fn is_of_volume(key: &str) -> bool {
    let declared = describe::<AttachSettings>();
    let of_attach = declared
        .iter()
        .any(|one| one.setting.name == key || one.setting.old.is_some_and(|old| old == key));
    OF_VOLUME.contains(&key) || of_attach && !SHARED.contains(&key)
}

/// Returns the keys of the file for documents, by their places.
pub(crate) fn key_groups() -> Vec<KeyGroup> {
    let mut keys = describe::<Entry>();
    keys.retain(|one| one.setting.name != FOREGROUND);
    let (of_volume, of_session) = keys.into_iter().partition(|one| is_of_volume(&one.setting.name));
    let group = |what: &str, opening: &str, indent, keys| KeyGroup {
        heading: format!("KEYS OF A {what}"),
        opening: format!("{opening}{indent}"),
        indent,
        keys,
    };
    vec![
        group("SESSION", "sessions:\n- name: TEXT\n", "  ", of_session),
        group("VOLUME", "  volumes:\n  - export: TEXT\n", "    ", of_volume),
    ]
}

/// Reads the text of a file that errors call `file`. An empty text has no sessions.
///
/// # Errors
/// Returns [`ErrorKind::Config`], with the place and a remedy.
pub(crate) fn read(text: &str, file: &str) -> Result<Vec<Volume>, Error> {
    let document: Value = serde_yaml::from_str(text).map_err(|error| yaml_error(&error, file))?;
    let wrong = |what: String| Error::new(ErrorKind::Config, format!("{file}: {what}"));
    let sessions = sessions(document).map_err(wrong)?;
    let mut volumes: Vec<Volume> = Vec::with_capacity(sessions.len());
    for (at, session) in sessions.into_iter().enumerate() {
        let place = place_of(at, &session);
        let volume = volume(session).map_err(|what| wrong(format!("{place}: {what}")))?;
        if volumes.iter().any(|other| other.name == volume.name) {
            return Err(wrong(format!("{place}: it is listed twice; list each session once")));
        }
        volumes.push(volume);
    }
    Ok(volumes)
}

fn sessions(document: Value) -> Result<Vec<Value>, String> {
    let mut map = match document {
        Value::Null => return Ok(Vec::new()),
        Value::Mapping(map) => map,
        _ => return Err("expected the key sessions, with a list below it".into()),
    };
    let sessions = map.remove("sessions").unwrap_or(Value::Null);
    if let Some(key) = map.keys().next() {
        let key = text_of(key).unwrap_or_default();
        return Err(format!("unknown key {key:?}; the only key is \"sessions\""));
    }
    match sessions {
        Value::Null => Ok(Vec::new()),
        Value::Sequence(sessions) => Ok(sessions),
        _ => Err("sessions is not a list; begin each session with a dash".into()),
    }
}

/// Name of a session in errors.
fn place_of(at: usize, session: &Value) -> String {
    let volume = || session.get("volumes")?.get(0)?.get("export");
    match session.get("name").or_else(volume).and_then(text_of) {
        Some(name) => format!("session {name:?}"),
        None => format!("session {}", at + 1),
    }
}

fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Reads a session with its volume.
fn volume(session: Value) -> Result<Volume, String> {
    let Value::Mapping(mut session) = session else {
        return Err("expected a map with name, path and volumes".into());
    };
    let name = take_name(&mut session, "name")?;
    let volumes = match session.remove("volumes") {
        Some(Value::Sequence(volumes)) => volumes,
        Some(Value::Null) | None => Vec::new(),
        Some(_) => return Err("volumes is not a list; begin each volume with a dash".into()),
    };
    let volume = match <[Value; 1]>::try_from(volumes) {
        Ok([volume]) => volume,
        Err(none) if none.is_empty() => {
            return Err("it has no volume; add one below volumes, with the key export".into());
        }
        Err(several) => {
            return Err(format!(
                "it has {} volumes: one volume per session for now; give each volume a session",
                several.len()
            ));
        }
    };
    let Value::Mapping(mut volume) = volume else {
        return Err("expected a map with export and device, socket or listen below volumes".into());
    };
    let export = take_name(&mut volume, "export")?;
    let export = export.ok_or("its volume has no export; add the key export")?;
    if let Some(name) = name.filter(|name| *name != export) {
        return Err(format!(
            "its export is {export:?}: a session has the name of its export for now; drop name \
             {name:?}, or see session-name for the name at the server"
        ));
    }
    check_keys(&session, &volume)?;
    session.extend(volume);
    let Keys(entry) = serde_yaml::from_value::<Keys<Entry>>(Value::Mapping(session))
        .map_err(|error| error.to_string())?;
    let Entry { session, attach } = entry;
    Ok(Volume { name: export, settings: Settings { session, attach, ..Settings::default() } })
}

/// Checks that each key is in its place. Unknown keys are found later.
fn check_keys(session: &Mapping, volume: &Mapping) -> Result<(), String> {
    let keys = |map: &Mapping| -> Vec<String> { map.keys().filter_map(text_of).collect() };
    let (of_session, of_volume) = (keys(session), keys(volume));
    if of_session.iter().chain(&of_volume).any(|key| key == FOREGROUND) {
        return Err("foreground cannot be set here: sessions run in the background".into());
    }
    if let Some(key) = of_session.iter().find(|key| FRONTS.contains(&key.as_str())) {
        return Err(format!("{key} belongs to a volume; move it below volumes"));
    }
    let declared = describe::<Entry>();
    let known: Vec<&str> = declared.iter().map(|one| one.setting.name.as_str()).collect();
    match of_volume.iter().find(|key| !is_of_volume(key)) {
        None => Ok(()),
        Some(key) if known.contains(&key.as_str()) => {
            Err(format!("{key} belongs to the session; move it out of volumes"))
        }
        Some(key) => {
            Err(match nearest(key, known.iter().copied().filter(|key| is_of_volume(key))) {
                Some(near) => format!("unknown key {key:?} below volumes; did you mean {near:?}?"),
                None => format!("unknown key {key:?} below volumes"),
            })
        }
    }
}

fn take_name(map: &mut Mapping, key: &str) -> Result<Option<String>, String> {
    match map.remove(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => text_of(&value).map(Some).ok_or_else(|| format!("{key} is not a text")),
    }
}

/// Rebuilds the plan of a running session from its settings and its current paths.
///
/// # Errors
/// Fails on settings that this version does not know.
pub(crate) fn plan_of(
    name: &str,
    values: Vec<SettingValue>,
    paths: Vec<String>,
    run_dir: &RunDir,
) -> Result<AttachPlan, Error> {
    let mut map = Mapping::new();
    for SettingValue { name, value, .. } in values {
        let value = serde_yaml::to_value(value).unwrap_or(Value::Null);
        map.insert(name.into(), value);
    }
    map.remove(FOREGROUND);
    map.insert("path".into(), paths.into_iter().map(Value::from).collect::<Vec<_>>().into());
    plan(name, map, run_dir)
}

fn plan(name: &str, map: Mapping, run_dir: &RunDir) -> Result<AttachPlan, Error> {
    let Keys(Entry { session, attach }) =
        serde_yaml::from_value(Value::Mapping(map)).map_err(|error| {
            Error::new(ErrorKind::System, format!("the settings of {name}: {error}"))
        })?;
    let place = PlaceSettings { run_dir: Some(run_dir.path().to_path_buf()) };
    let settings = Settings { session, attach, place, ..Settings::default() };
    AttachPlan::new(name, settings, Output::Text)
}

/// Returns the session for the file that makes this plan, without default values.
pub(crate) fn session_of(plan_wanted: &AttachPlan) -> Mapping {
    let (name, run_dir) = (&plan_wanted.session.export_name, &plan_wanted.run_dir);
    let mut map = print(&plan_wanted.session.settings);
    map.extend(print(&plan_wanted.settings));
    map.retain(|_, value| !value.is_null());
    map.remove(FOREGROUND);
    let keys: Vec<Value> = map.keys().cloned().collect();
    for key in keys {
        let mut without = map.clone();
        without.remove(&key);
        if plan(name, without.clone(), run_dir).is_ok_and(|plan| plan == *plan_wanted) {
            map = without;
        }
    }
    let mut session = Mapping::from_iter([("name".into(), name.as_str().into())]);
    let mut volume = Mapping::from_iter([("export".into(), name.as_str().into())]);
    for (key, value) in map {
        let of_volume = key.as_str().is_some_and(is_of_volume);
        if of_volume { &mut volume } else { &mut session }.insert(key, value);
    }
    session.insert("volumes".into(), Value::Sequence(vec![volume.into()]));
    session
}

#[cfg(test)]
mod tests;
