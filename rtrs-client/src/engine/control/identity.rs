//! Identity of the server and the exports of a session, and protection against others in their
//! place.
//!
//! The first path that opens a volume pins server and export. Every other path, and every
//! reconnect, has to find the same two. Otherwise a reused address or a name with several hosts
//! would connect the session to another disk, which answers as if nothing had happened. A server
//! that reports no ID where one is pinned counts as another server. The server's ID is checked
//! before a volume is opened there, the export's ID afterwards. Kernel servers have no IDs; for
//! those only the shape of the device can be compared. Another server is of no use to the session;
//! another export is of no use to its volume.
//!
//! A server that reports more than was known, or has another boot ID, may be the same server after
//! an upgrade or a restart. In that case no path to it is left from before. As long as an older
//! path is connected they are two servers, and the new path stays down: otherwise one volume would
//! be striped over two disks.
//!
//! This module also keeps the eviction secret: a reject with ESTALE ends the session only when it
//! repeats the secret that the server sent with OPEN_RSP.

use rtrs_core::identity::{Comparison, EvictionSecret, ExportId, ServerId};

use crate::engine::device_table::OpenDevice;

/// Reason why a volume cannot be used over a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mismatch {
    /// Another server, which no volume can use.
    Server(String),
    /// Another disk or file.
    Export(String),
}

/// Known identity of the server.
#[derive(Debug)]
pub(super) struct PinnedServer {
    id: Option<ServerId>,
    /// Secrets by server, for volumes that move between several servers.
    secrets: Vec<(Option<ServerId>, EvictionSecret)>,
    /// Whether the server has exports that move.
    gateways: bool,
}

impl PinnedServer {
    /// Starts with the ID that was pinned before the session began, if any.
    pub(super) fn new(id: Option<ServerId>) -> Self {
        Self { id, secrets: Vec::new(), gateways: false }
    }

    pub(super) fn id(&self) -> Option<ServerId> {
        self.id
    }

    /// Returns why a server cannot be used, judging by its ID.
    pub(super) fn refuses(&self, met: Option<ServerId>) -> Option<String> {
        let pinned = self.id?;
        let found = match met {
            Some(met) if met == pinned => return None,
            Some(met) => format!("it is server {met}"),
            None => "this server reports no ID".to_owned(),
        };
        Some(format!("{ANOTHER}: {found}, but the session is bound to {pinned}; {HINT}"))
    }

    /// Returns why a server that is not refused still cannot be used beside another connected path.
    fn refuses_beside(&self, met: Option<ServerId>) -> Option<String> {
        let is_new = met.or(self.id) != self.id;
        (is_new && !rtrs_core::mutated!(NewIdBeside)).then(beside)
    }

    /// Records the server of an opened volume, after it was not refused. With `moves`, no other
    /// server is pinned.
    pub(super) fn meet(
        &mut self,
        met: Option<ServerId>,
        secret: Option<EvictionSecret>,
        moves: bool,
    ) {
        if let Some(secret) = secret {
            self.secrets.retain(|(of, _)| *of != met);
            self.secrets.push((met, secret));
        }
        self.id = if moves { self.id.or(met) } else { met.or(self.id) };
    }

    /// Records that a server of the session has exports that move between servers.
    pub(super) fn meet_gateway(&mut self) {
        self.gateways = true;
    }

    /// Whether other servers may have its exports.
    pub(super) fn has_gateways(&self) -> bool {
        self.gateways
    }

    /// Whether this secret proves that a server of the session ended it.
    pub(super) fn is_proof(&self, secret: Option<EvictionSecret>) -> bool {
        secret.is_some_and(|secret| self.secrets.iter().any(|(_, said)| *said == secret))
    }
}

/// Known identity of a volume's disk or file.
#[derive(Debug)]
pub(super) struct PinnedExport {
    id: Option<ExportId>,
}

impl PinnedExport {
    /// Starts with the ID that was pinned before the session began, if any.
    pub(super) fn new(id: Option<ExportId>) -> Self {
        Self { id }
    }

    pub(super) fn id(&self) -> Option<ExportId> {
        self.id
    }

    fn compare(&self, met: Option<ExportId>) -> Option<Comparison> {
        Some(self.id?.compare(met?))
    }

    /// Returns why a device cannot replace the pinned one, or the one opened `last`.
    fn refuses(&self, last: Option<&OpenDevice>, device: &OpenDevice) -> Option<String> {
        let met = device.export_id;
        let proven = self.compare(met) == Some(Comparison::Same);
        self.refuses_id(met).or_else(|| {
            let last = last.filter(|last| last.geometry.size != device.geometry.size && !proven)?;
            let (size, had) = (device.geometry.size, last.geometry.size);
            Some(format!(
                "{ANOTHER}: its device has {size} bytes and had {had} before, and \
                 no ID proves that it is the same; attach again if it was resized"
            ))
        })
    }

    fn refuses_id(&self, met: Option<ExportId>) -> Option<String> {
        let pinned = self.id?;
        let found = match met {
            Some(met) if pinned.compare(met) != Comparison::Different => return None,
            Some(met) => format!("the export is another disk or file ({met})"),
            None => "the server reports no ID for the export".to_owned(),
        };
        Some(format!("{ANOTHER}: {found}, but the session is bound to {pinned}; {HINT}"))
    }

    /// Returns why a device that is not refused cannot be used while another path serves the
    /// volume.
    fn refuses_beside(&self, met: Option<ExportId>) -> Option<String> {
        let other_boot = self.compare(met) == Some(Comparison::Unknown);
        let is_allowed = if other_boot {
            rtrs_core::mutated!(OtherBootBeside)
        } else {
            rtrs_core::mutated!(NewIdBeside)
        };
        (met.or(self.id) != self.id && !is_allowed).then(beside)
    }

    /// Records the ID of a device that was opened and not refused.
    pub(super) fn meet(&mut self, met: Option<ExportId>) {
        if self.compare(met) == Some(Comparison::Unknown) {
            tracing::warn!(
                "the server's host was rebooted, and the ID of its export is valid for one boot \
                 only: only the export's size and blocks indicate that it is the same"
            );
        }
        self.id = met.or(self.id);
    }
}

/// Server that a path has reached, and the one that the session is pinned to.
#[derive(Clone, Copy, Debug)]
pub(super) struct MetServer<'a> {
    pub(super) pinned: &'a PinnedServer,
    pub(super) met: Option<ServerId>,
}

/// Use of the session's other paths while a path opens a volume.
#[derive(Clone, Copy, Debug)]
pub(super) struct OtherPaths {
    /// Whether one is connected.
    pub(super) connected: bool,
    /// Whether one has the volume.
    pub(super) serving: bool,
}

/// Returns why a device of this server cannot replace the pinned one, or the one opened `last`.
pub(super) fn judge(
    server: MetServer<'_>,
    export: &PinnedExport,
    last: Option<&OpenDevice>,
    device: &OpenDevice,
) -> Option<Mismatch> {
    if rtrs_core::mutated!(OtherDiskAccepted) {
        return None;
    }
    let refused = server.pinned.refuses(server.met).map(Mismatch::Server);
    refused.or_else(|| export.refuses(last, device).map(Mismatch::Export))
}

/// Returns why an accepted device cannot be used while other paths are connected or serve the
/// volume.
pub(super) fn judge_beside(
    server: MetServer<'_>,
    export: &PinnedExport,
    met_export: Option<ExportId>,
    others: OtherPaths,
) -> Option<Mismatch> {
    let refused = server.pinned.refuses_beside(server.met).filter(|_| others.connected);
    let refused = refused.map(Mismatch::Server);
    let refused_export = || export.refuses_beside(met_export).filter(|_| others.serving);
    refused.or_else(|| refused_export().map(Mismatch::Export))
}

fn beside() -> String {
    format!(
        "{ANOTHER}: it reports an ID that the connected paths did not report; it is used once no \
         other path is connected, if the server was upgraded or restarted"
    )
}

/// Prefix of the error of a path that leads to another disk.
pub(crate) const ANOTHER: &str = "cannot use this path";
/// Remedy for a path that leads to another disk.
const HINT: &str = "check the path's address, or attach again with --accept-new-identity if the \
                    volume was moved";
