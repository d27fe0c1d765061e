//! Summary of a running server for the command `status`.

use std::collections::BTreeMap;

use crate::control_protocol::{ExportList, Listener, Load, Sessions};

/// Addresses of a server.
pub(super) struct Addresses<'a> {
    /// Portals that the server listens on.
    pub(super) portals: &'a [String],
    /// Portals that use a socket of the service manager.
    pub(super) activated: &'a [String],
}

impl Addresses<'_> {
    fn listeners(&self, lost: &[String]) -> Vec<Listener> {
        self.portals.iter().map(|portal| self.listener(portal, lost)).collect()
    }

    fn listener(&self, portal: &str, lost: &[String]) -> Listener {
        let scheme = portal.split("://").next().unwrap_or_default();
        let is_in = |list: &[String]| list.iter().any(|other| other == portal);
        Listener {
            portal: portal.to_owned(),
            transport: if scheme == "tls" { "tcp" } else { scheme }.to_owned(),
            tls: scheme == "tls",
            serving: !is_in(lost),
            activated: is_in(self.activated),
        }
    }
}

/// Summarizes addresses, exports and sessions of a server.
pub(super) fn load(at: &Addresses<'_>, exports: &ExportList, sessions: &Sessions) -> Load {
    let paths = sessions.sessions.iter().flat_map(|session| &session.paths);
    Load {
        listeners: at.listeners(&sessions.lost_portals),
        exports: counted(exports.exports.iter().map(|export| export.state.name())),
        sessions: counted(sessions.sessions.iter().map(|session| session.state.name())),
        paths: counted(paths.map(|path| path.state.name())),
        memory: sessions.memory,
    }
}

/// Counts states by name.
fn counted<'a>(states: impl Iterator<Item = &'a str>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for state in states {
        *counts.entry(state.to_owned()).or_default() += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_name_transport_tls_and_lost_devices() {
        let lost = ["rdma://10.0.0.2:1234".to_owned()];
        let activated = ["tls://[::]:1234".to_owned()];
        let addresses = Addresses { portals: &[], activated: &activated };
        let shown = |portal: &str| {
            let Listener { transport, tls, serving, activated, .. } =
                addresses.listener(portal, &lost);
            (transport, tls, serving, activated)
        };
        assert_eq!(shown("tcp://[::]:1234"), ("tcp".into(), false, true, false));
        assert_eq!(shown("tls://[::]:1234"), ("tcp".into(), true, true, true));
        assert_eq!(shown("rdma://10.0.0.2:1234"), ("rdma".into(), false, false, false));
        assert_eq!(shown("rdma://10.0.0.3:1234"), ("rdma".into(), false, true, false));
    }
}
