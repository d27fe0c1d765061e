//! Summary of a running server for the command `status`.

use std::collections::BTreeMap;

use crate::control_protocol::{ExportList, Listener, Load, Sessions};

/// Summarizes exports and sessions of a server that listens on these portals.
pub(super) fn load(portals: &[String], exports: &ExportList, sessions: &Sessions) -> Load {
    let paths = sessions.sessions.iter().flat_map(|session| &session.paths);
    Load {
        listeners: portals.iter().map(|portal| listener(portal, &sessions.lost_portals)).collect(),
        exports: counted(exports.exports.iter().map(|export| export.state.name())),
        sessions: counted(sessions.sessions.iter().map(|session| session.state.name())),
        paths: counted(paths.map(|path| path.state.name())),
        memory: sessions.memory,
    }
}

fn listener(portal: &str, lost: &[String]) -> Listener {
    let scheme = portal.split("://").next().unwrap_or_default();
    Listener {
        portal: portal.to_owned(),
        transport: if scheme == "tls" { "tcp" } else { scheme }.to_owned(),
        tls: scheme == "tls",
        serving: !lost.iter().any(|lost| lost == portal),
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
        let shown = |portal: &str| {
            let Listener { transport, tls, serving, .. } = listener(portal, &lost);
            (transport, tls, serving)
        };
        assert_eq!(shown("tcp://[::]:1234"), ("tcp".into(), false, true));
        assert_eq!(shown("tls://[::]:1234"), ("tcp".into(), true, true));
        assert_eq!(shown("rdma://10.0.0.2:1234"), ("rdma".into(), false, false));
        assert_eq!(shown("rdma://10.0.0.3:1234"), ("rdma".into(), false, true));
    }
}
