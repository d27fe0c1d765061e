//! Names of a block device: the backend name that the kernel stores, and the name in errors.

use nbd_bridge::kernel::{DeviceChoice, DeviceError};

use crate::error::{Error, ErrorKind};

/// Backend name of a device, which identifies it to people and programs. The session's name has no
/// slash.
pub(super) fn backend(session_name: &str, name: &str) -> String {
    format!("rtrs:{session_name}/{name}")
}

/// Volume in a name made by [`backend`], whatever the session's name.
pub(crate) fn volume_of(backend: &str) -> Option<&str> {
    let (_, name) = backend.strip_prefix("rtrs:")?.split_once('/')?;
    Some(name)
}

/// Beginning of the error when an attach to a device fails.
pub(crate) fn cannot_attach(name: &str, device: DeviceChoice) -> String {
    match device {
        DeviceChoice::Auto => format!("cannot make {name:?} a block device"),
        DeviceChoice::Index(_) => format!("cannot attach {name:?} to {device}"),
    }
}

/// Converts a device's error into one of the client.
pub(crate) fn device_failed(what: String) -> impl FnOnce(DeviceError) -> Error {
    move |error| {
        let kind = match error {
            DeviceError::Busy { .. } | DeviceError::Stuck { .. } => ErrorKind::InUse,
            _ => ErrorKind::System,
        };
        Error::with_source(kind, what, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_names_its_session_and_volume() {
        let text = backend("host-vol0", "pool/vol0");
        assert_eq!(text, "rtrs:host-vol0/pool/vol0");
        assert_eq!(volume_of(&text), Some("pool/vol0"));
        assert_eq!(volume_of("nbd:host/pool/vol0"), None);
        assert_eq!(volume_of(""), None);
    }

    #[test]
    fn an_attach_error_names_the_device() {
        for (device, text) in [
            ("auto", "cannot make \"pool/vol0\" a block device"),
            ("/dev/nbd3", "cannot attach \"pool/vol0\" to /dev/nbd3"),
        ] {
            assert_eq!(cannot_attach("pool/vol0", device.parse().unwrap()), text);
        }
    }
}
