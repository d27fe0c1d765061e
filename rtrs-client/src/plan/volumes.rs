//! Several volumes in one session: `attach` with more than one name, and added volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use nbd_bridge::kernel::DeviceChoice;
use rtrs_core::settings::{Output, Settings as _, nearest, print};
use serde::{Deserialize, Serialize};
use serde_yaml::Value;

use super::attach::{AttachPlan, NAME};
use super::change::Assign;
use super::session::check_name;
use crate::engine::VOLUMES_MAX;
use crate::error::{Error, usage};
use crate::settings::{AttachSettings, PlaceSettings, SessionSettings, Settings};

/// Settings that can be set for an added volume. All others belong to the session.
pub(crate) const OF_ADDED: [&str; 14] = [
    "access",
    "device",
    "export",
    "identity",
    "insecure-open",
    "listen",
    "nbd-tls",
    "nbd-tls-dir",
    "queues",
    "read-only",
    "socket",
    "socket-mode",
    "socket-owner",
    "vhost-user",
];

/// Name of a volume on this host, and its export if the export has a different name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeName {
    pub(crate) name: String,
    pub(crate) export: Option<String>,
}

impl VolumeName {
    /// Names the volumes of these exports, in order: after `locals` or, if that is empty, after the
    /// exports.
    ///
    /// # Errors
    /// Fails if the number of names differs, or a name is invalid.
    pub(crate) fn all(exports: &[String], locals: &[String]) -> Result<Vec<Self>, Error> {
        if locals.is_empty() {
            let named = |name: &String| Self { name: name.clone(), export: None };
            return Ok(exports.iter().map(named).collect());
        }
        if locals.len() != exports.len() {
            return Err(usage(format!(
                "{} names after --as do not match {} exports; give --as once for each export, in \
                 the same order",
                locals.len(),
                exports.len()
            )));
        }
        locals.iter().try_for_each(|name| check_name("--as", name))?;
        let pairs = locals.iter().zip(exports);
        let named = pairs.map(|(name, export)| {
            let (name, export) = (name.clone(), Some(export.clone()));
            Self { name, export }
        });
        Ok(named.collect())
    }

    fn export(&self) -> &str {
        self.export.as_ref().unwrap_or(&self.name)
    }
}

/// An additional volume of a session being started, as the command passes it to the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LaterVolume {
    pub(crate) name: String,
    /// The volume's own settings, as returned by [`AttachPlan::own`].
    pub(crate) settings: BTreeMap<String, String>,
}

impl fmt::Display for LaterVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl FromStr for LaterVolume {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }
}

impl AttachPlan {
    /// Validates the settings that volumes with these names share in one session. Returns the plan.
    pub(crate) fn of_volumes(
        names: &[VolumeName],
        mut settings: Settings,
        output: Output,
    ) -> Result<Self, Error> {
        let Some((first, more)) = names.split_first() else {
            return Err(usage("name an export"));
        };
        if more.is_empty() {
            if first.export.is_some() {
                settings.attach.export.clone_from(&first.export);
            }
            return Self::new(&first.name, settings, output);
        }
        check_names(names)?;
        check_shared(&settings)?;
        let mut shared = settings;
        let mut plan: Option<Self> = None;
        for VolumeName { name, export } in names {
            shared.attach.export.clone_from(export);
            let volume = Self::new(name, shared.clone(), output)?;
            // The default contains the first volume's name.
            shared.session.session_name = Some(volume.session.session_name.clone());
            match &mut plan {
                None => plan = Some(volume),
                Some(plan) => plan.more.push(volume),
            }
        }
        plan.ok_or_else(|| usage("name an export"))
    }

    pub(crate) fn volumes(&self) -> impl Iterator<Item = &Self> + Clone {
        std::iter::once(self).chain(&self.more)
    }

    /// Returns the plan for a volume that is added to this session, with its own settings.
    ///
    /// # Errors
    /// Fails if a setting belongs to the session, does not exist or is invalid.
    pub(crate) fn adding(&self, name: &str, own: &BTreeMap<String, String>) -> Result<Self, Error> {
        let (mut session, mut attach) = (self.session.settings.clone(), self.settings.clone());
        (session.access, session.read_only, session.identity) = (None, false, None);
        attach.take_place();
        (attach.socket_mode, attach.socket_owner, attach.queues) = (None, None, None);
        let AttachSettings { nbd_tls, nbd_tls_dir, insecure_open, require_paths, .. } =
            AttachSettings::default();
        (attach.nbd_tls, attach.nbd_tls_dir) = (nbd_tls, nbd_tls_dir);
        (attach.insecure_open, attach.require_paths) = (insecure_open, require_paths);
        attach.export = None;
        for (name, text) in own {
            if !OF_ADDED.contains(&name.as_str()) {
                return Err(of_session(name));
            }
            let mut assign = Assign { name, text, outcome: None };
            session.visit(&mut assign);
            attach.visit(&mut assign);
            assign.outcome.unwrap_or(Ok(())).map_err(usage)?;
        }
        if attach.device.is_none() {
            (attach.takeover, attach.quick_takeover) = (false, false);
            (attach.device_timeout, attach.device_dead_timeout) = (None, None);
        }
        let place = PlaceSettings { run_dir: Some(self.run_dir.path().to_path_buf()) };
        let settings = Settings { session, attach, place, ..Settings::default() };
        Self::new(name, settings, self.output)
    }

    /// Returns the settings with which `adding` recreates this volume.
    pub(crate) fn own(&self) -> BTreeMap<String, String> {
        let mut own = non_default(&self.session.settings, &self.settings);
        own.retain(|name, _| OF_ADDED.contains(&name.as_str()));
        own
    }
}

/// Settings that differ from their defaults, as text.
pub(crate) fn non_default(
    session: &SessionSettings,
    attach: &AttachSettings,
) -> BTreeMap<String, String> {
    let all = |session: &SessionSettings, attach: &AttachSettings| {
        let mut all = print(session);
        all.extend(print(attach));
        all
    };
    let defaults = all(&SessionSettings::default(), &AttachSettings::default());
    let text = |value| match value {
        Value::String(text) => text,
        Value::Bool(is_on) => if is_on { "on" } else { "off" }.to_owned(),
        // Numbers can always be serialized.
        other => serde_yaml::to_string(&other).unwrap_or_default().trim().to_owned(),
    };
    let non_default = all(session, attach).into_iter().filter(|(name, value)| {
        name.as_str().is_some_and(|name| defaults.get(name) != Some(value))
    });
    non_default.filter_map(|(name, value)| Some((name.as_str()?.to_owned(), text(value)))).collect()
}

/// Error for a setting that an added volume takes from its session.
pub(crate) fn of_session(name: &str) -> Error {
    let list = OF_ADDED.join(", ");
    usage(match nearest(name, OF_ADDED.iter().copied()) {
        Some(near) => format!("{name} belongs to the session; did you mean {near}?"),
        None => {
            format!("{name} belongs to the session; an added volume can set only: {list}")
        }
    })
}

/// Rejects too many names, and duplicates.
fn check_names(names: &[VolumeName]) -> Result<(), Error> {
    if names.len() > VOLUMES_MAX {
        let count = names.len();
        return Err(usage(format!("{count} volumes are too many; use at most {VOLUMES_MAX}")));
    }
    if let Some(name) = repeated(names.iter().map(|one| one.name.as_str())) {
        return Err(usage(format!("{name:?} is named twice; drop one")));
    }
    match repeated(names.iter().map(VolumeName::export)) {
        Some(export) => Err(usage(format!(
            "a session cannot have the export {export:?} twice; attach it in another session"
        ))),
        None => Ok(()),
    }
}

/// First name that occurs more than once.
pub(crate) fn repeated<'a>(mut names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut seen = BTreeSet::new();
    names.find(|name| !seen.insert(*name))
}

/// Rejects settings that several volumes cannot share.
fn check_shared(settings: &Settings) -> Result<(), Error> {
    let Settings { session, attach, .. } = settings;
    let named = |path: &Path| path.to_string_lossy().contains(NAME);
    if attach.listen.is_some() {
        return Err(usage(
            "several volumes cannot listen at one address; use device or socket, or add each \
             volume with --session and its own address",
        ));
    }
    if attach.device.is_some_and(|device| device.get() != DeviceChoice::Auto) {
        return Err(usage("several volumes cannot share a device; use --device auto"));
    }
    let mut sockets = attach.socket.iter().chain(&attach.vhost_user);
    if let Some(path) = sockets.find(|path| !named(path)) {
        return Err(usage(format!(
            "several volumes cannot share the socket {}; write {NAME} in the path, which is \
             replaced by the name of each volume",
            path.display()
        )));
    }
    if let Some(export) = &attach.export {
        return Err(usage(format!(
            "several volumes cannot share the export {export:?}; drop export, and name each export"
        )));
    }
    if session.identity.is_some() {
        return Err(usage(
            "several volumes cannot share an identity; omit it, or add each volume with --session \
             and its own identity",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Front;
    use crate::settings::Access;

    fn plan(names: &[&str], yaml: &str) -> Result<AttachPlan, String> {
        let settings = Settings::from_yaml(&format!("path: tcp://h\n{yaml}"), "s.yaml").unwrap();
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let names = VolumeName::all(&names, &[]).unwrap();
        let plan = AttachPlan::of_volumes(&names, settings, Output::Text);
        plan.map_err(|error| error.to_string())
    }

    fn add(plan: &AttachPlan, own: &[(&str, &str)]) -> Result<AttachPlan, String> {
        let own = own.iter().map(|(name, text)| ((*name).into(), (*text).into()));
        plan.adding("d", &own.collect()).map_err(|error| error.to_string())
    }

    #[test]
    fn volumes_share_the_session_and_have_separate_front_ends() {
        let plan = plan(&["a", "pool/b"], "socket: '/s/{name}'\nio-timeout: 9s\n").unwrap();
        let shown: Vec<_> = plan
            .volumes()
            .map(|one| (one.session.export_name.as_str(), one.front.clone()))
            .collect();
        let socket = |path: &str| Front::Socket(path.into());
        assert_eq!(shown, [("a", socket("/s/a")), ("pool/b", socket("/s/pool%2Fb"))]);
        let one = self::plan(&["pool/b"], "socket: '/s/{name}'\n").unwrap();
        assert_eq!(one.front, socket("/s/pool%2Fb"), "also for one volume");
        let names: Vec<_> = plan.volumes().map(|one| &one.session.session_name).collect();
        assert_eq!(names[0], names[1]);
        assert!(names[0].ends_with("-a"));
    }

    #[test]
    fn a_local_name_replaces_that_of_the_export() {
        let plan = |exports: &[&str], locals: &[&str], yaml: &str| {
            let owned = |all: &[&str]| -> Vec<String> { all.iter().map(|s| (*s).into()).collect() };
            let yaml = format!("path: tcp://h\nsocket: '/s/{{name}}'\n{yaml}");
            let settings = Settings::from_yaml(&yaml, "s.yaml").unwrap();
            VolumeName::all(&owned(exports), &owned(locals))
                .and_then(|names| AttachPlan::of_volumes(&names, settings, Output::Text))
                .map_err(|error| error.to_string())
        };
        let one = plan(&["vol0"], &["a"], "").unwrap();
        assert_eq!((&*one.session.name, &*one.session.export_name), ("a", "vol0"));
        assert!(one.session.session_name.ends_with("-a"));
        assert_eq!(one.front, Front::Socket("/s/a".into()));
        assert_eq!(one.settings.export.as_deref(), Some("vol0"));
        assert_eq!(plan(&["a"], &[], "export: vol0").unwrap(), one, "from a file");
        assert_eq!(plan(&["vol0"], &["a"], "export: other").unwrap(), one, "the flag counts");
        assert_eq!(plan(&["a"], &["a"], ""), plan(&["a"], &[], ""));
        let changed = one.changed(&[("io-timeout".into(), "9s".into())].into()).unwrap();
        assert_eq!((&*changed.session.name, &*changed.session.export_name), ("a", "vol0"));
        let both = plan(&["v", "w"], &["w", "v"], "").unwrap();
        assert_eq!((&*both.more[0].session.name, &*both.more[0].session.export_name), ("v", "w"));
        assert_eq!(both.adding("v", &both.more[0].own()).unwrap(), both.more[0]);
        assert_eq!(both.adding("c", &BTreeMap::new()).err().map(|e| e.exit_code()), Some(2));
        let long = "x".repeat(255);
        for (exports, locals, yaml, text) in [
            (&["v"][..], &[""][..], "", "--as \"\" is empty; use 1 to 254 bytes without NUL"),
            (&["v"], &[&*long], "", "--as \"xxxx"),
            (&["v", "w"], &["a"], "", "1 names after --as do not match 2 exports; give"),
            (&["v", "w"], &["a", "a"], "", "\"a\" is named twice; drop one"),
            (&["v", "v"], &["a", "b"], "", "a session cannot have the export \"v\" twice"),
            (&["v", "w"], &[], "export: x", "several volumes cannot share the export \"x\""),
            (&["v"], &[], "export: ''", "export name \"\" is empty"),
        ] {
            let error = plan(exports, locals, yaml).unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
    }

    #[test]
    fn settings_that_volumes_cannot_share_are_refused() {
        for (names, yaml, text) in [
            (&["a", "a"][..], "device: auto", "\"a\" is named twice; drop one"),
            (&["a", "b"], "listen: 127.0.0.1", "several volumes cannot listen at one address"),
            (&["a", "b"], "device: /dev/nbd3", "several volumes cannot share a device"),
            (&["a", "b"], "socket: /s", "several volumes cannot share the socket /s; write {name}"),
            (
                &["a", "b"],
                "device: auto\nidentity: -/00112233445566778899aabbccddeeff",
                "several volumes cannot share an identity",
            ),
            (&["a", ""], "device: auto", "export name \"\" is empty"),
        ] {
            let error = plan(names, yaml).unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
        let names: Vec<String> = (0..=VOLUMES_MAX).map(|at| format!("v{at}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let error = plan(&names, "device: auto").unwrap_err();
        assert_eq!(error, "129 volumes are too many; use at most 128");
        assert!(plan(&names[1..], "device: auto").is_ok());
    }

    #[test]
    fn an_added_volume_uses_the_session_and_its_own_front_end() {
        let first = "socket: /s\nsocket-mode: 660\nread-only: true\nsession-name: s\n";
        let first = plan(&["a"], first).unwrap();
        let added = add(&first, &[("listen", "127.0.0.1:0"), ("access", "rw")]).unwrap();
        assert_eq!((&*added.session.export_name, &*added.session.session_name), ("d", "s"));
        assert_eq!((added.session.access, added.settings.socket_mode), (Access::Rw, None));
        assert!(matches!(added.front, Front::Tcp(_)));
        let device = add(&first, &[("device", "auto"), ("read-only", "on")]).unwrap();
        assert_eq!(device.session.access, Access::Ro);
        for (own, text) in [
            (&[][..], "choose where to attach"),
            (&[("socket", "/t"), ("crc", "off")], "crc belongs to the session"),
            (&[("sockt", "/t")], "sockt belongs to the session; did you mean socket?"),
            (&[("socket", "/t"), ("access", "x")], "access: "),
        ] {
            let error = add(&first, own).unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
    }

    #[test]
    fn an_added_device_follows_the_takeover_of_the_others() {
        let first = plan(&["a"], "device: auto\ntakeover: true\ndevice-timeout: 200s\n").unwrap();
        let added = add(&first, &[("device", "auto")]).unwrap();
        assert!(added.takes_over());
        assert_eq!(added.resent_for(), first.resent_for());
        let socket = add(&first, &[("socket", "/t")]).unwrap();
        assert!(!socket.takes_over());
        assert_eq!(socket.settings.device_timeout, None);
        // A volume added to a session without devices does not take over.
        let plain = plan(&["a"], "socket: /s\n").unwrap();
        assert!(!add(&plain, &[("device", "auto")]).unwrap().takes_over());
    }
    #[test]
    fn a_volume_lists_its_own_settings() {
        let text = "device: auto\ntakeover: true\nread-only: true\nio-timeout: 9s\n";
        let both = plan(&["a", "d"], text).unwrap();
        let own = both.more[0].own();
        let names: Vec<&str> = own.keys().map(String::as_str).collect();
        assert_eq!(names, ["access", "device", "read-only"]);
        assert_eq!(both.adding("d", &own).unwrap(), both.more[0]);
        let socket = plan(&["d"], "socket: /s\nsocket-mode: 660\naccess: rw\n").unwrap();
        assert_eq!(socket.adding("d", &socket.own()).unwrap(), socket);
    }
}
