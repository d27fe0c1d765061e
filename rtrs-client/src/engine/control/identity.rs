//! Which server's disks the session works with, and what no other server may do to them.
//!
//! The first path that opens a volume pins server and export; every other path, and every
//! reconnect, has to meet the same two. Otherwise a reused address or a name with several hosts
//! would connect the session to another disk, which answers as if nothing had happened. A server
//! that says no id where one is pinned is another one too. The server's id is judged before a
//! volume is opened there, the export's after. A kernel's server has no ids: of that the shape of
//! the device is compared, and nothing else can be. Another server is of no use to the session;
//! another export is of no use to its volume.
//!
//! What says more than was known, or is of another boot, may be the same server, which was
//! upgraded or started again. Then no path to it is left from before. As long as one is connected
//! they are two, and the new path stays down: else one volume would be striped over two disks.
//!
//! The eviction secret stands here as well: a reject with ESTALE ends the session only when it
//! repeats what the server said with OPEN_RSP.

use rtrs_core::identity::{Comparison, EvictionSecret, ExportId, ServerId};

use crate::engine::device_table::OpenDevice;

/// Why a volume cannot be used over a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mismatch {
    /// It is another server: no volume can.
    Server(String),
    /// It is another disk or file.
    Export(String),
}

/// What is known of the server.
#[derive(Debug)]
pub(super) struct PinnedServer {
    id: Option<ServerId>,
    /// By server, where a volume moves between several.
    secrets: Vec<(Option<ServerId>, EvictionSecret)>,
    /// It has exports that move.
    gateways: bool,
}

impl PinnedServer {
    /// Pinned before the session begins, if it is.
    pub(super) fn new(id: Option<ServerId>) -> Self {
        Self { id, secrets: Vec::new(), gateways: false }
    }

    /// Which server it is, if that is known.
    pub(super) fn id(&self) -> Option<ServerId> {
        self.id
    }

    /// Why a server cannot be used, as far as its id says.
    pub(super) fn refuses(&self, met: Option<ServerId>) -> Option<String> {
        let pinned = self.id?;
        let found = match met {
            Some(met) if met == pinned => return None,
            Some(met) => format!("it is server {met}"),
            None => "this server does not say who it is".to_owned(),
        };
        Some(format!("{ANOTHER}: {found}, and the session is with {pinned}; {HINT}"))
    }

    /// Why a server that is not refused cannot be used while another path is connected.
    fn refuses_beside(&self, met: Option<ServerId>) -> Option<String> {
        let is_new = met.or(self.id) != self.id;
        (is_new && !rtrs_core::mutated!(NewIdBeside)).then(beside)
    }

    /// A path opened a volume of this server, which is not refused; one that `moves` pins no other
    /// server.
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

    /// A server of the session has exports that move between servers.
    pub(super) fn meet_gateway(&mut self) {
        self.gateways = true;
    }

    /// True when other servers may have its exports.
    pub(super) fn has_gateways(&self) -> bool {
        self.gateways
    }

    /// True when a server that repeats this secret ended the session.
    pub(super) fn is_proof(&self, secret: Option<EvictionSecret>) -> bool {
        secret.is_some_and(|secret| self.secrets.iter().any(|(_, said)| *said == secret))
    }
}

/// What is known of the disk or file of a volume.
#[derive(Debug)]
pub(super) struct PinnedExport {
    id: Option<ExportId>,
}

impl PinnedExport {
    /// Pinned before the session begins, if it is.
    pub(super) fn new(id: Option<ExportId>) -> Self {
        Self { id }
    }

    /// Which disk or file it is, if that is known.
    pub(super) fn id(&self) -> Option<ExportId> {
        self.id
    }

    fn compare(&self, met: Option<ExportId>) -> Option<Comparison> {
        Some(self.id?.compare(met?))
    }

    /// Why a device cannot be used in place of the one that is pinned, or was opened `last`.
    fn refuses(&self, last: Option<&OpenDevice>, device: &OpenDevice) -> Option<String> {
        let met = device.export_id;
        let proven = self.compare(met) == Some(Comparison::Same);
        self.refuses_id(met).or_else(|| {
            let last = last.filter(|last| last.geometry.size != device.geometry.size && !proven)?;
            let (size, had) = (device.geometry.size, last.geometry.size);
            Some(format!(
                "{ANOTHER}: its device has {size} bytes and had {had} before, and \
                 no id proves that it is the same; attach again if it was resized"
            ))
        })
    }

    fn refuses_id(&self, met: Option<ExportId>) -> Option<String> {
        let pinned = self.id?;
        let found = match met {
            Some(met) if pinned.compare(met) != Comparison::Different => return None,
            Some(met) => format!("the export is another disk or file ({met})"),
            None => "the server does not say which disk or file the export is".to_owned(),
        };
        Some(format!("{ANOTHER}: {found}, and the session is with {pinned}; {HINT}"))
    }

    /// Why a device that is not refused cannot be used while another path serves the volume.
    fn refuses_beside(&self, met: Option<ExportId>) -> Option<String> {
        let other_boot = self.compare(met) == Some(Comparison::Unknown);
        let is_allowed = if other_boot {
            rtrs_core::mutated!(OtherBootBeside)
        } else {
            rtrs_core::mutated!(NewIdBeside)
        };
        (met.or(self.id) != self.id && !is_allowed).then(beside)
    }

    /// A path opened this device, which is not refused.
    pub(super) fn meet(&mut self, met: Option<ExportId>) {
        if self.compare(met) == Some(Comparison::Unknown) {
            tracing::warn!(
                "the server's host was started again, and its export has an id for one boot only: \
                 nothing but its shape says that it is the same"
            );
        }
        self.id = met.or(self.id);
    }
}

/// Why a device of this server cannot be used in place of what is pinned, or was opened `last`.
pub(super) fn judge(
    (server, met): (&PinnedServer, Option<ServerId>),
    export: &PinnedExport,
    last: Option<&OpenDevice>,
    device: &OpenDevice,
) -> Option<Mismatch> {
    if rtrs_core::mutated!(OtherDiskAccepted) {
        return None;
    }
    let refused = server.refuses(met).map(Mismatch::Server);
    refused.or_else(|| export.refuses(last, device).map(Mismatch::Export))
}

/// Why what is not refused cannot be used while other paths are connected, or serve the volume.
pub(super) fn judge_beside(
    (server, met): (&PinnedServer, Option<ServerId>),
    export: &PinnedExport,
    met_export: Option<ExportId>,
    (connected, serving): (bool, bool),
) -> Option<Mismatch> {
    let refused = server.refuses_beside(met).filter(|_| connected).map(Mismatch::Server);
    let refused_export = || export.refuses_beside(met_export).filter(|_| serving);
    refused.or_else(|| refused_export().map(Mismatch::Export))
}

fn beside() -> String {
    format!(
        "{ANOTHER}: it says of server or export what a path that is connected did not say; it \
         is used when no other is connected, if the server was upgraded or started again"
    )
}

/// Begins the error of a path to another disk.
pub(crate) const ANOTHER: &str = "cannot use this path";
/// What to do about another disk.
const HINT: &str = "check the path's address, or attach again with --accept-new-identity if the \
                    volume was moved";
