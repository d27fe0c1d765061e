//! The file used by `apply`, `diff` and `save`: the sessions of a host, each with its settings and
//! its volumes.
//!
//! The keys are those of the configuration file (`settings.rs`); this module defines only where
//! they may appear. Keys of a volume are below `volumes`, because a session may have several
//! volumes. `difference.rs` compares the file with the running sessions.

pub(crate) mod difference;
mod place;

use std::collections::{BTreeMap, BTreeSet};

use rtrs_core::local::RunDir;
use rtrs_core::settings::{
    KeyGroup, Keys, Output, SettingValue, Settings as Declared, Visitor, describe, nearest, print,
    yaml_error,
};
use serde_yaml::{Mapping, Value};

use self::place::{Step, Wrong, line_of};
use crate::engine::VOLUMES_MAX;
use crate::error::{Error, ErrorKind};
use crate::plan::{AttachPlan, OF_ADDED, VolumeName, non_default, repeated};
use crate::settings::{AttachSettings, PlaceSettings, SessionSettings, Settings};

/// Settings that name a volume's export and where the volume is served. They cannot be set on a
/// session.
const OF_ONE_VOLUME: [&str; 5] = ["device", "socket", "listen", "vhost-user", EXPORT];
/// Key of a volume's export.
const EXPORT: &str = "export";
/// Keys of the lists of sessions and volumes.
const SESSIONS: &str = "sessions";
const VOLUMES: &str = "volumes";
/// Settings of `attach` that all volumes of a session share.
const SHARED: [&str; 2] = ["shards", "metrics"];
/// Session settings that each volume sets individually.
const OF_VOLUME: [&str; 3] = ["access", "read-only", "identity"];
/// Setting that `apply` sets itself.
const FOREGROUND: &str = "foreground";
/// Error for a volume that is not a map.
const NO_MAP: &str =
    "expected a map with export and one of device, socket, listen and vhost-user below volumes";

/// Session in the file, with its first volume.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Volume {
    /// Name of the first volume, which is also the session's name on this host.
    pub(crate) name: String,
    /// Settings in the file, with defaults for missing settings.
    pub(crate) settings: Settings,
    /// Names of the other volumes of the session, with their own settings.
    pub(crate) more: Vec<(String, BTreeMap<String, String>)>,
}

impl Volume {
    /// Export names of all volumes of the session.
    fn exports(&self) -> impl Iterator<Item = &str> {
        let first = self.settings.attach.export.as_deref().unwrap_or(&self.name);
        let more = self.more.iter().map(|(name, own)| own.get(EXPORT).unwrap_or(name).as_str());
        std::iter::once(first).chain(more)
    }

    /// Names of all volumes of the session.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let more = self.more.iter().map(|(name, _)| name.as_str());
        std::iter::once(self.name.as_str()).chain(more)
    }
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

/// Returns the keys of the file for the documentation, grouped by where they may appear.
pub(crate) fn key_groups() -> Vec<KeyGroup> {
    let mut keys = describe::<Entry>();
    keys.retain(|one| ![FOREGROUND, EXPORT].contains(&&*one.setting.name));
    let (of_volume, of_session) = keys.into_iter().partition(|one| is_of_volume(&one.setting.name));
    let group = |what: &str, opening: &str, indent, keys| KeyGroup {
        heading: format!("KEYS OF A {what}"),
        opening: format!("{opening}{indent}"),
        indent,
        keys,
    };
    vec![
        group("SESSION", "sessions:\n- name: TEXT\n", "  ", of_session),
        group("VOLUME", "  volumes:\n  - export: TEXT\n    name: TEXT\n", "    ", of_volume),
    ]
}

/// Reads the text of a file. `file` is the name used in errors. Empty text contains no sessions.
///
/// # Errors
/// Returns [`ErrorKind::Config`], with the location and a remedy.
pub(crate) fn read(text: &str, file: &str) -> Result<Vec<Volume>, Error> {
    let document: Value = serde_yaml::from_str(text).map_err(|error| yaml_error(&error, file))?;
    let wrong = |wrong: Wrong| {
        let (line, what) = (wrong.line(text), &wrong.what);
        Error::new(ErrorKind::Config, format!("{file}:{line}: {what}"))
    };
    let sessions = sessions(document).map_err(wrong)?;
    let mut volumes: Vec<Volume> = Vec::with_capacity(sessions.len());
    for (at, session) in sessions.into_iter().enumerate() {
        let place = place_of(at, &session);
        let in_session = |what: Wrong| wrong(what.in_part(&place).in_item(SESSIONS, at));
        let volume = volume(session).map_err(in_session)?;
        check_listed_once(&volume, &volumes).map_err(in_session)?;
        volumes.push(volume);
    }
    Ok(volumes)
}

/// Line number of a session in a file's text.
pub(crate) fn line_of_session(text: &str, at: usize) -> usize {
    line_of(text, &[Step::Key(SESSIONS.to_owned()), Step::Item(at)])
}

/// Rejects a volume that the file lists twice.
fn check_listed_once(session: &Volume, others: &[Volume]) -> Result<(), Wrong> {
    if let Some(export) = repeated(session.exports()) {
        let names: BTreeSet<&str> = session.names().collect();
        if names.len() == session.more.len() + 1 {
            return Err(format!(
                "export {export:?} is listed twice; a session can list an export only once"
            )
            .into());
        }
    }
    let mut names: BTreeSet<&str> = others.iter().flat_map(Volume::names).collect();
    match session.names().find(|name| !names.insert(name)) {
        None => Ok(()),
        Some(_) if session.more.is_empty() => Err(
            "it is listed twice; list it once, or give its volume a different name (key `name`)"
                .into(),
        ),
        Some(name) => {
            Err(format!("volume {name:?} is listed twice; list it once, or set `name` for one")
                .into())
        }
    }
}

fn sessions(document: Value) -> Result<Vec<Value>, Wrong> {
    let mut map = match document {
        Value::Null => return Ok(Vec::new()),
        Value::Mapping(map) => map,
        _ => return Err("expected the key sessions, with a list below it".into()),
    };
    let sessions = map.remove(SESSIONS).unwrap_or(Value::Null);
    if let Some(key) = map.keys().next() {
        let key = text_of(key).unwrap_or_default();
        let what = format!("unknown key {key:?}; the only key is {SESSIONS:?}");
        return Err(Wrong::of_key(&key, what));
    }
    match sessions {
        Value::Null => Ok(Vec::new()),
        Value::Sequence(sessions) => Ok(sessions),
        _ => {
            let what = "sessions is not a list; begin each session with a dash";
            Err(Wrong::of_key(SESSIONS, what))
        }
    }
}

/// Name by which errors refer to a session.
fn place_of(at: usize, session: &Value) -> String {
    let volume = |key: &'static str| session.get(VOLUMES)?.get(0)?.get(key);
    match session
        .get("name")
        .or_else(|| volume("name"))
        .or_else(|| volume(EXPORT))
        .and_then(text_of)
    {
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

/// Reads a session with its volumes.
fn volume(session: Value) -> Result<Volume, Wrong> {
    let Value::Mapping(mut session) = session else {
        return Err("expected a map with name, path and volumes".into());
    };
    let name = take_name(&mut session, "name")?;
    let volumes = match session.remove(VOLUMES) {
        Some(Value::Sequence(volumes)) => volumes,
        Some(Value::Null) | None => Vec::new(),
        Some(_) => {
            let what = "volumes is not a list; begin each volume with a dash";
            return Err(Wrong::of_key(VOLUMES, what));
        }
    };
    let mut volumes = volumes.into_iter();
    let Some(volume) = volumes.next() else {
        return Err("the session has no volume; add one with the key `export` below volumes".into());
    };
    let added = |(at, volume)| added(volume).map_err(|what| what.in_item(VOLUMES, at + 1));
    let more = volumes.enumerate().map(added).collect::<Result<Vec<_>, Wrong>>()?;
    check_several(&session, more.len() + 1)?;
    let in_first = |what: Wrong| what.in_item(VOLUMES, 0);
    let Value::Mapping(mut volume) = volume else { return Err(in_first(NO_MAP.into())) };
    let names = names_of(&mut volume).map_err(in_first)?;
    let VolumeName { name: first, export } =
        names.ok_or_else(|| in_first("its volume has no export; add the key export".into()))?;
    if let Some(name) = name.filter(|name| *name != first) {
        let what = format!(
            "the session is named after its first volume, {first:?}; remove name {name:?} or move \
             it below volumes; to change only the name at the server, set session-name"
        );
        return Err(Wrong::of_key("name", what));
    }
    check_session_keys(&session)?;
    check_volume_keys(&volume).map_err(in_first)?;
    let parts = (session.clone(), volume.clone());
    session.extend(volume);
    let entry = entry_of(session).map_err(|what| {
        let of_volume = || wrong_key(&parts.1).map(in_first);
        wrong_key(&parts.0).or_else(of_volume).unwrap_or_else(|| what.into())
    })?;
    let Entry { session, mut attach } = entry;
    attach.export = export;
    let settings = Settings { session, attach, ..Settings::default() };
    Ok(Volume { name: first, settings, more })
}

fn entry_of(map: Mapping) -> Result<Entry, String> {
    let read = serde_yaml::from_value::<Keys<Entry>>(Value::Mapping(map));
    read.map(|Keys(entry)| entry).map_err(|error| error.to_string())
}

/// Error for the first key that is invalid on its own.
fn wrong_key(map: &Mapping) -> Option<Wrong> {
    map.iter().find_map(|(key, value)| {
        let alone = Mapping::from_iter([(key.clone(), value.clone())]);
        let what = entry_of(alone).err()?;
        Some(Wrong::of_key(&text_of(key).unwrap_or_default(), what))
    })
}

/// Takes the names of a volume, if it has an export. The key `name` is the volume's name on this
/// host.
fn names_of(volume: &mut Mapping) -> Result<Option<VolumeName>, Wrong> {
    let name = take_name(volume, "name")?;
    Ok(take_name(volume, EXPORT)?.map(|export| match name {
        Some(name) if name != export => VolumeName { name, export: Some(export) },
        _ => VolumeName { name: export, export: None },
    }))
}

/// Checks a session with this number of volumes: if there are several, settings that apply to a
/// single volume must be below `volumes`.
fn check_several(session: &Mapping, count: usize) -> Result<(), Wrong> {
    if count > VOLUMES_MAX {
        let what = format!("{count} volumes are too many; use at most {VOLUMES_MAX}");
        return Err(Wrong::of_key(VOLUMES, what));
    }
    let mut keys = session.keys().filter_map(text_of);
    match keys.find(|key| count > 1 && OF_ADDED.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            let what = format!("{key} belongs to one of the volumes; move it below volumes");
            Err(Wrong::of_key(&key, what))
        }
    }
}

/// Reads a later volume of a session: its name and its own settings.
fn added(volume: Value) -> Result<(String, BTreeMap<String, String>), Wrong> {
    let Value::Mapping(mut volume) = volume else { return Err(NO_MAP.into()) };
    let VolumeName { name, export } =
        names_of(&mut volume)?.ok_or("one of its volumes has no export; add the key export")?;
    check_volume_keys(&volume)?;
    let keys: Vec<String> = volume.keys().filter_map(text_of).collect();
    if let Some(key) = keys.iter().find(|key| !OF_ADDED.contains(&key.as_str())) {
        let what = format!("volume {name:?}: {key} is shared by the volumes; move it to the first");
        return Err(Wrong::of_key(key, what));
    }
    let Entry { session, mut attach } = entry_of(volume.clone()).map_err(|what| {
        let wrong = wrong_key(&volume).unwrap_or_else(|| what.into());
        wrong.in_part(&format!("volume {name:?}"))
    })?;
    attach.export = export;
    Ok((name, non_default(&session, &attach)))
}

/// Rejects a setting that `apply` sets itself.
fn check_foreground(map: &Mapping) -> Result<(), Wrong> {
    if !map.contains_key(FOREGROUND) {
        return Ok(());
    }
    let what = "foreground cannot be set here: sessions run in the background";
    Err(Wrong::of_key(FOREGROUND, what))
}

/// Checks that a session has no keys that belong to a volume. Unknown keys are rejected later.
fn check_session_keys(session: &Mapping) -> Result<(), Wrong> {
    check_foreground(session)?;
    let mut keys = session.keys().filter_map(text_of);
    match keys.find(|key| OF_ONE_VOLUME.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            let what = format!("{key} belongs to a volume; move it below volumes");
            Err(Wrong::of_key(&key, what))
        }
    }
}

/// Checks that each key may appear below `volumes`.
fn check_volume_keys(volume: &Mapping) -> Result<(), Wrong> {
    check_foreground(volume)?;
    let of_volume: Vec<String> = volume.keys().filter_map(text_of).collect();
    let declared = describe::<Entry>();
    let known: Vec<&str> = declared.iter().map(|one| one.setting.name.as_str()).collect();
    match of_volume.iter().find(|key| !is_of_volume(key)) {
        None => Ok(()),
        Some(key) if known.contains(&key.as_str()) => {
            let what = format!("{key} belongs to the session; move it out of volumes");
            Err(Wrong::of_key(key, what))
        }
        Some(key) => {
            let what = match nearest(key, known.iter().copied().filter(|key| is_of_volume(key))) {
                Some(near) => format!("unknown key {key:?} below volumes; did you mean {near:?}?"),
                None => format!("unknown key {key:?} below volumes"),
            };
            Err(Wrong::of_key(key, what))
        }
    }
}

fn take_name(map: &mut Mapping, key: &str) -> Result<Option<String>, Wrong> {
    match map.remove(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let wrong = || Wrong::of_key(key, format!("{key} must be a string"));
            text_of(&value).map(Some).ok_or_else(wrong)
        }
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
            Error::new(ErrorKind::System, format!("cannot read the settings of {name}: {error}"))
        })?;
    let place = PlaceSettings { run_dir: Some(run_dir.path().to_path_buf()) };
    let settings = Settings { session, attach, place, ..Settings::default() };
    AttachPlan::new(name, settings, Output::Text)
}

/// Returns the entry in the file that recreates this plan, without default values.
pub(crate) fn session_of(plan_wanted: &AttachPlan) -> Mapping {
    let (name, run_dir) = (&plan_wanted.session.name, &plan_wanted.run_dir);
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
    map.remove(EXPORT);
    let mut volume = names_in_file(plan_wanted);
    for (key, value) in map {
        let of_volume = key.as_str().is_some_and(is_of_volume);
        if of_volume { &mut volume } else { &mut session }.insert(key, value);
    }
    session.insert("volumes".into(), Value::Sequence(vec![volume.into()]));
    session
}

/// Returns the keys of a volume's export and, if different, of the volume's name.
fn names_in_file(plan: &AttachPlan) -> Mapping {
    let (name, export) = (&plan.session.name, &plan.session.export_name);
    let mut names = Mapping::from_iter([(EXPORT.into(), export.as_str().into())]);
    if name != export {
        names.insert("name".into(), name.as_str().into());
    }
    names
}

/// Returns the session entry that recreates the plans of these volumes, without default values. The
/// volumes keep their order, except that a volume from which all others can inherit their settings
/// is moved to the front. Also returns the names of volumes that cannot inherit from the first.
pub(crate) fn session_of_volumes(plans: &[AttachPlan]) -> (Mapping, Vec<&str>) {
    fn name(plan: &AttachPlan) -> &str {
        &plan.session.name
    }
    let others = |first: &AttachPlan| {
        let first = name(first).to_owned();
        plans.iter().filter(move |plan| name(plan) != first)
    };
    let leads = |first: &&AttachPlan| others(first).all(|other| inherits(other, first));
    let Some(first) = plans.iter().find(leads).or_else(|| plans.first()) else {
        return (Mapping::new(), Vec::new());
    };
    let mut session = session_of(first);
    if let Some(Value::Sequence(volumes)) = session.get_mut("volumes") {
        volumes.extend(others(first).map(|plan| added_of(plan, first).into()));
    }
    let differ = others(first).filter(|other| !inherits(other, first)).map(name).collect();
    (session, differ)
}

/// Whether the volume's own settings recreate its plan in the session of the volume `first`.
fn inherits(plan: &AttachPlan, first: &AttachPlan) -> bool {
    first.adding(&plan.session.name, &plan.own()).is_ok_and(|made| made == *plan)
}

/// Returns the entry of a later volume of a session, without keys that the inherited values make
/// redundant.
fn added_of(plan: &AttachPlan, first: &AttachPlan) -> Mapping {
    let name = &plan.session.name;
    let mut own = plan.own();
    let made = first.adding(name, &own).ok();
    for key in OF_ADDED {
        let mut without = own.clone();
        without.remove(key);
        if made.is_some() && first.adding(name, &without).ok() == made {
            own = without;
        }
    }
    let mut values = print(&plan.session.settings);
    values.extend(print(&plan.settings));
    values.retain(|key, _| key.as_str().is_some_and(|key| own.contains_key(key)));
    let mut volume = names_in_file(plan);
    volume.extend(values);
    volume
}

#[cfg(test)]
mod tests;
