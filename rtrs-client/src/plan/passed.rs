//! Listening sockets passed by the service manager (socket activation), matched to volumes.

use std::path::Path;

use rtrs_core::local::PassedSocket;

use super::attach::{AttachPlan, Front};
use crate::error::{Error, usage};
use crate::settings::{AttachSettings, NbdAddress};

impl Front {
    /// Returns the socket that the service manager passed for this front end.
    pub(crate) fn passed<'a>(&self, passed: &'a [PassedSocket]) -> Option<&'a PassedSocket> {
        passed.iter().find(|socket| match self {
            Self::Socket(path) => socket.path().is_some_and(|other| is_same(path, &other)),
            Self::Tcp(address) => socket.address() == Some(*address),
            Self::Device(_) | Self::VhostUser(_) => false,
        })
    }
}

/// Whether two paths lead to the same file; systemd resolves symlinks.
fn is_same(path: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    path == other || (real(path).is_some() && real(path) == real(other))
}

impl AttachSettings {
    /// Serves a volume without a socket or device on the only socket passed by the service manager.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`](crate::error::ErrorKind::Usage) for a socket with no path or address.
    pub(crate) fn activate(&mut self, passed: &[PassedSocket]) -> Result<(), Error> {
        let [only] = passed else { return Ok(()) };
        if !self.is_nowhere() {
            return Ok(());
        }
        self.socket = only.path();
        self.listen = only.address().map(NbdAddress::new);
        match self.is_nowhere() {
            true => Err(usage(format!("cannot serve NBD on {only} of the service manager"))),
            false => Ok(()),
        }
    }
}

impl AttachPlan {
    /// Notes which volumes are served on sockets passed by the service manager.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`](crate::error::ErrorKind::Usage) if such a volume sets its socket's mode
    /// or owner, or for a background session, which receives no sockets.
    pub(crate) fn activate(&mut self, passed: &[PassedSocket]) -> Result<(), Error> {
        if !passed.is_empty() && !self.settings.foreground {
            return Err(usage(
                "the service manager passes sockets, which a background session cannot use; add \
                 --foreground",
            ));
        }
        self.note_passed(passed)?;
        self.more.iter_mut().try_for_each(|volume| volume.note_passed(passed))
    }

    fn note_passed(&mut self, passed: &[PassedSocket]) -> Result<(), Error> {
        self.is_activated = self.front.passed(passed).is_some();
        let AttachSettings { socket_mode, socket_owner, .. } = &self.settings;
        if self.is_activated && (socket_mode.is_some() || socket_owner.is_some()) {
            return Err(usage(
                "socket-mode and socket-owner cannot be used with a socket of the service manager; \
                 drop them, and set SocketMode=, SocketUser= and SocketGroup= in the socket unit",
            ));
        }
        Ok(())
    }

    /// Returns the sockets that serve no volume.
    pub(crate) fn unused<'a>(
        &self,
        passed: &'a [PassedSocket],
    ) -> impl Iterator<Item = &'a PassedSocket> {
        let used = |socket: &PassedSocket| {
            let at = |volume: &Self| volume.front.passed(std::slice::from_ref(socket)).is_some();
            self.volumes().any(at)
        };
        passed.iter().filter(move |socket| !used(socket))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use rtrs_core::settings::Output;

    use super::*;
    use crate::settings::Settings;

    fn plan(yaml: &str, passed: &[PassedSocket]) -> Result<AttachPlan, Error> {
        let foreground = if yaml.contains("foreground") { "" } else { "foreground: true\n" };
        let yaml = format!("path: ['tcp://127.0.0.1:1']\n{foreground}{yaml}");
        let mut settings = Settings::from_yaml(&yaml, "s.yaml").unwrap();
        settings.attach.activate(passed)?;
        let mut plan = AttachPlan::new("v", settings, Output::Text)?;
        plan.activate(passed).map(|()| plan)
    }

    #[test]
    fn a_passed_socket_serves_a_volume_with_its_address_or_without_a_place() {
        let dir = std::env::temp_dir().join(format!("rtrs-passed-{}", std::process::id()));
        let unix =
            PassedSocket { name: "u".into(), socket: UnixListener::bind(&dir).unwrap().into() };
        let tcp = PassedSocket {
            name: "t".into(),
            socket: TcpListener::bind("127.0.0.1:0").unwrap().into(),
        };
        let address = tcp.address().unwrap();
        let (unix, tcp) = ([unix], [tcp]);
        let shown = dir.display();
        for (yaml, passed, front) in [
            ("", &unix, Front::Socket(dir.clone())),
            ("", &tcp, Front::Tcp(address)),
            (&*format!("socket: '{shown}'"), &unix, Front::Socket(dir.clone())),
            (&format!("listen: '{address}'"), &tcp, Front::Tcp(address)),
        ] {
            let plan = plan(yaml, passed).unwrap();
            assert_eq!((&plan.front, plan.is_activated), (&front, true), "{yaml}");
            assert_eq!(plan.unused(passed).count(), 0, "{yaml}");
            plan.check_start().unwrap();
        }
        for yaml in ["socket: /tmp/other.sock", "listen: 127.0.0.1:0"] {
            let plan = plan(yaml, &unix).unwrap();
            assert!(!plan.is_activated && plan.unused(&unix).count() == 1, "{yaml}");
        }
        let refused = |yaml: &str| plan(yaml, &unix).unwrap_err().to_string();
        let error = refused(&format!("socket: '{shown}'\nsocket-mode: '0660'"));
        assert!(error.contains("SocketMode="), "{error}");
        let error = refused("foreground: false");
        assert!(error.contains("add --foreground"), "{error}");
        std::fs::remove_file(dir).unwrap();
    }
}
