//! `udev-properties`: prints the properties from which the udev rule creates the links of a device.
//!
//! The command only reads files, so that a session that hangs, or has died and awaits a takeover,
//! keeps its links.

use clap::Args;
use nbd_bridge::kernel::{DeviceChoice, backend_of};
use rtrs_core::identity::Identity;
use rtrs_core::settings::print_text;

use super::global::GlobalArgs;
use crate::daemon::saved::Saved;
use crate::error::{Error, ErrorKind};
use crate::plan::volume_of;

/// Property of a device that its session has not announced: systemd then waits before mounting the
/// device under any name (systemd.device(5)).
const NOT_READY: &str = "SYSTEMD_READY=0\n";

/// The arguments.
#[derive(Debug, Args)]
pub struct UdevArgs {
    /// The device, e.g. nbd0.
    #[arg(value_name = "DEVICE")]
    pub device: DeviceChoice,
}

pub(super) fn run(args: &UdevArgs, global: &GlobalArgs) -> Result<(), Error> {
    let DeviceChoice::Index(index) = args.device else {
        return Err(Error::new(ErrorKind::Usage, "name a device, for example nbd0"));
    };
    let backend = backend_of(index);
    let Some(name) = backend.as_deref().and_then(volume_of) else {
        let text = format!("{} is not the device of a session", args.device);
        return Err(Error::new(ErrorKind::NotAttached, text));
    };
    print_text(&properties_of(&Saved::new(&global.run_dir()?, name)?, name, &args.device))
}

/// Properties of a device, from the state saved by its session.
fn properties_of(saved: &Saved, name: &str, device: &DeviceChoice) -> String {
    match saved.device() {
        // The session uses a different run directory. The link by name is still created.
        None => properties(name, None),
        Some(path) if path == device.to_string() => {
            let export = saved.export().unwrap_or_else(|error| {
                tracing::warn!("{name}: no link by identity: {error}");
                None
            });
            properties(name, export.map(|export| export.identity))
        }
        Some(_) => NOT_READY.to_owned(),
    }
}

/// Formats properties as KEY=VALUE lines. The ID is included only if it is known and permanent.
fn properties(name: &str, identity: Option<Identity>) -> String {
    let mut text = format!("RTRS_NAME={}\n", link_name(name));
    if let Some(Identity { server: Some(server), export: Some(export) }) = identity
        && !export.is_weak()
    {
        text.push_str(&format!("RTRS_ID={server}-{export}\n"));
    }
    text
}

/// Converts a name to a path below /dev/rtrs, without components that lead elsewhere. Characters
/// that udev does not allow in a link are escaped as udev does.
fn link_name(name: &str) -> String {
    let part = |part: &str| match part {
        "." | ".." => part.replace('.', "\\x2e"),
        part => part.chars().map(link_char).collect(),
    };
    let parts = name.split('/').filter(|part| !part.is_empty()).map(part);
    parts.collect::<Vec<_>>().join("/")
}

fn link_char(character: char) -> String {
    let allowed = character.is_ascii_alphanumeric() || "#+-.:=@_".contains(character);
    match allowed || (!character.is_ascii() && !character.is_control()) {
        true => character.to_string(),
        false => format!("\\x{:02x}", u32::from(character)),
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::local::RunDir;

    use super::*;

    #[test]
    fn a_link_name_is_a_path_below_its_directory() {
        for (name, link) in [
            ("vol0", "vol0"),
            ("pool/vol-0", "pool/vol-0"),
            ("/srv//a.img/", "srv/a.img"),
            ("../sda", "\\x2e\\x2e/sda"),
            ("a/./..b", "a/\\x2e/..b"),
            ("a b\n$c\\", "a\\x20b\\x0a\\x24c\\x5c"),
            ("größe", "größe"),
        ] {
            assert_eq!(link_name(name), link);
        }
    }

    #[test]
    fn a_device_has_links_only_once_its_session_announced_it() {
        let place = std::env::temp_dir().join(format!("rtrs-udev-{}", std::process::id()));
        let dir = RunDir::new(Some(place)).unwrap();
        dir.make().unwrap();
        let saved = Saved::new(&dir, "v").unwrap();
        let device = |index| properties_of(&saved, "v", &DeviceChoice::Index(index));
        assert_eq!(device(3), "RTRS_NAME=v\n", "of another run directory");
        let identity = "00112233445566778899aabbccddeeff/ffeeddccbbaa99887766554433221100";
        saved.begin();
        saved.save_export(identity.parse().unwrap());
        saved.save_device("");
        assert_eq!(device(3), NOT_READY, "being connected");
        saved.save_device("/dev/nbd3");
        assert_eq!(device(3), properties("v", Some(identity.parse().unwrap())));
        assert_eq!(device(4), NOT_READY, "not the one of the session");
        saved.forget();
        std::fs::remove_dir(dir.path()).unwrap();
    }

    #[test]
    fn only_a_stable_identity_makes_a_link() {
        let with = |identity: &str| properties("v", Some(identity.parse().unwrap()));
        let (server, export) =
            ("00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100");
        let both = format!("{server}/{export}");
        assert_eq!(with(&both), format!("RTRS_NAME=v\nRTRS_ID={server}-{export}\n"));
        for partial in [format!("-/{export}"), format!("{server}/-")] {
            assert_eq!(with(&partial), "RTRS_NAME=v\n", "{partial}");
        }
        assert_eq!(with(&format!("{both}:weak")), "RTRS_NAME=v\n");
        assert_eq!(properties("v", None), "RTRS_NAME=v\n");
    }
}
