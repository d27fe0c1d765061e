//! Identity of a session's server and exports, and protection against a different server or disk in
//! their place.
//!
//! The first path that opens a volume pins the server and the export. Every other path, and every
//! reconnect, must find the same two. Otherwise a reused address or a name that resolves to several
//! hosts could connect the session to a different disk, which would answer as if nothing had
//! happened. A server that reports no ID where one is pinned counts as a different server. The
//! server's ID is checked before a volume is opened there, and the export's ID afterwards. Kernel
//! servers report no IDs, so only the device's geometry can be compared. The session cannot use a
//! different server, and the volume cannot use a different export.
//!
//! A server that reports an ID for the first time, or has a different boot ID, may be the same
//! server after an upgrade or a restart. In that case no earlier path to it is still connected.
//! While an older path is connected, the two count as different servers and the new path stays
//! down: otherwise one volume would be striped over two disks.
//!
//! This module also keeps the eviction secret: a reject with ESTALE ends the session only when it
//! repeats the secret that the server sent with OPEN_RSP.

use std::fmt;

use rtrs_core::identity::{Comparison, EvictionSecret, ExportId, ServerId, ServerProcess};

use crate::engine::device_table::OpenDevice;

/// Remedy for a path that leads to a different server or export.
const HINT: &str = "check the path's address; if the volume was moved, detach it (rtrs-client \
                    detach NAME) and attach it again; if the file for apply sets its identity, \
                    change it there";

/// Difference between the server or export of a path and the pinned one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mismatch {
    /// A different server, or one that reports no ID.
    Server { reported: Option<ServerId>, pinned: ServerId },
    /// Server with an ID that the connected paths did not report.
    NewServer,
    /// A different disk or file, or one without an ID.
    Export { reported: Option<ExportId>, pinned: ExportId },
    /// Export with an ID that the connected paths did not report.
    NewExport,
    /// Device with a different size, and with no ID to prove that it is the same.
    Size { size: u64, had: u64 },
}

impl Mismatch {
    /// Whether the mismatch concerns the server, so that no volume of the session can use the path.
    pub(super) fn is_of_server(self) -> bool {
        matches!(self, Self::Server { .. } | Self::NewServer)
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cannot use this path: ")?;
        match self {
            Self::Server { reported: Some(reported), .. } => {
                write!(f, "it leads to server {reported}")?;
            }
            Self::Server { reported: None, .. } => f.write_str("this server reports no ID")?,
            Self::Export { reported: Some(reported), .. } => {
                write!(f, "the export is a different disk or file ({reported})")?;
            }
            Self::Export { reported: None, .. } => {
                f.write_str("the server reports no ID for the export")?;
            }
            Self::NewServer | Self::NewExport => f.write_str(
                "the server reports an ID that the connected paths did not report; if the server \
                 was upgraded or restarted, the path is used once no other path is connected",
            )?,
            Self::Size { size, had } => write!(
                f,
                "the device has {size} bytes instead of {had}, and no ID proves that it is the \
                 same device; attach again if it was resized"
            )?,
        }
        match self {
            Self::Server { pinned, .. } => {
                write!(f, ", but the session is bound to {pinned}; {HINT}")
            }
            Self::Export { pinned, .. } => {
                write!(f, ", but the session is bound to {pinned}; {HINT}")
            }
            Self::NewServer | Self::NewExport | Self::Size { .. } => Ok(()),
        }
    }
}

impl std::error::Error for Mismatch {}

/// Known identity of the server.
#[derive(Debug)]
pub(super) struct PinnedServer {
    id: Option<ServerId>,
    /// Eviction secrets by server, for volumes that move between several servers.
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
    pub(super) fn refuses(&self, reported: Option<ServerId>) -> Option<Mismatch> {
        let pinned = self.id?;
        (reported != Some(pinned)).then_some(Mismatch::Server { reported, pinned })
    }

    /// Returns why a server that is not refused cannot be used while another path is connected.
    fn refuses_beside(&self, reported: Option<ServerId>) -> Option<Mismatch> {
        let is_new = reported.or(self.id) != self.id;
        (is_new && !rtrs_core::mutated!(NewIdBeside)).then_some(Mismatch::NewServer)
    }

    /// Records the server of an opened volume, once it has been accepted. If `moves` is set, an ID
    /// that is already pinned is kept.
    pub(super) fn record(
        &mut self,
        reported: Option<ServerId>,
        secret: Option<EvictionSecret>,
        moves: bool,
    ) {
        if let Some(secret) = secret {
            self.secrets.retain(|(of, _)| *of != reported);
            self.secrets.push((reported, secret));
        }
        self.id = if moves { self.id.or(reported) } else { reported.or(self.id) };
    }

    /// Records that a server of the session has exports that move between servers.
    pub(super) fn record_gateway(&mut self) {
        self.gateways = true;
    }

    /// Whether other servers may serve this server's exports.
    pub(super) fn has_gateways(&self) -> bool {
        self.gateways
    }

    /// Whether this secret proves that a server of the session ended it.
    pub(super) fn is_proof(&self, secret: Option<EvictionSecret>) -> bool {
        secret.is_some_and(|secret| self.secrets.iter().any(|(_, known)| *known == secret))
    }
}

/// Known identity of a volume's disk or file, and the server on which it was last open.
#[derive(Debug)]
pub(super) struct PinnedExport {
    id: Option<ExportId>,
    /// Server of the last open, and its process.
    opened_at: Option<(Option<ServerId>, ServerProcess)>,
}

impl PinnedExport {
    /// Starts with the ID that was pinned before the session began, if any.
    pub(super) fn new(id: Option<ExportId>) -> Self {
        Self { id, opened_at: None }
    }

    /// Records the server on which the export was opened.
    pub(super) fn note_server(&mut self, id: Option<ServerId>, process: ServerProcess) {
        self.opened_at = Some((id, process));
    }

    /// Whether the last open was on this server. A server without an ID counts as a different one
    /// after a restart.
    pub(super) fn was_open_at(&self, id: Option<ServerId>, process: ServerProcess) -> bool {
        self.opened_at.is_some_and(|(last, at)| match (last, id) {
            (Some(last), Some(id)) => last == id,
            _ => at == process && at != ServerProcess::NONE,
        })
    }

    pub(super) fn id(&self) -> Option<ExportId> {
        self.id
    }

    fn compare(&self, reported: Option<ExportId>) -> Option<Comparison> {
        Some(self.id?.compare(reported?))
    }

    /// Returns why a device cannot replace the pinned one or the one opened `last`.
    fn refuses(&self, last: Option<&OpenDevice>, device: &OpenDevice) -> Option<Mismatch> {
        let reported = device.export_id;
        let proven = self.compare(reported) == Some(Comparison::Same);
        self.refuses_id(reported).or_else(|| {
            let last = last.filter(|last| last.geometry.size != device.geometry.size && !proven)?;
            Some(Mismatch::Size { size: device.geometry.size, had: last.geometry.size })
        })
    }

    fn refuses_id(&self, reported: Option<ExportId>) -> Option<Mismatch> {
        let pinned = self.id?;
        let is_other = |reported| pinned.compare(reported) == Comparison::Different;
        reported.is_none_or(is_other).then_some(Mismatch::Export { reported, pinned })
    }

    /// Returns why a device that is not refused cannot be used while another path serves the
    /// volume.
    fn refuses_beside(&self, reported: Option<ExportId>) -> Option<Mismatch> {
        let other_boot = self.compare(reported) == Some(Comparison::Unknown);
        let is_allowed = if other_boot {
            rtrs_core::mutated!(OtherBootBeside)
        } else {
            rtrs_core::mutated!(NewIdBeside)
        };
        (reported.or(self.id) != self.id && !is_allowed).then_some(Mismatch::NewExport)
    }

    /// Records the ID of a device that was opened and not refused.
    pub(super) fn record(&mut self, reported: Option<ExportId>) {
        if self.compare(reported) == Some(Comparison::Unknown) {
            tracing::warn!(
                "the server's host was rebooted, and the ID of its export is valid for one boot \
                 only: only the export's size and blocks indicate that it is the same"
            );
        }
        self.id = reported.or(self.id);
    }
}

/// Server that a path has reached, and the one that the session is pinned to.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReportedServer<'a> {
    pub(super) pinned: &'a PinnedServer,
    pub(super) reported: Option<ServerId>,
}

/// State of the session's other paths while a path opens a volume.
#[derive(Clone, Copy, Debug)]
pub(super) struct OtherPaths {
    /// Whether another path is connected.
    pub(super) connected: bool,
    /// Whether another path has the volume open.
    pub(super) serving: bool,
}

/// Returns why a device of this server cannot replace the pinned one or the one opened `last`.
pub(super) fn judge(
    server: ReportedServer<'_>,
    export: &PinnedExport,
    last: Option<&OpenDevice>,
    device: &OpenDevice,
) -> Option<Mismatch> {
    if rtrs_core::mutated!(OtherDiskAccepted) {
        return None;
    }
    server.pinned.refuses(server.reported).or_else(|| export.refuses(last, device))
}

/// Returns why an accepted device cannot be used while other paths are connected or serve the
/// volume.
pub(super) fn judge_beside(
    server: ReportedServer<'_>,
    export: &PinnedExport,
    reported_export: Option<ExportId>,
    others: OtherPaths,
) -> Option<Mismatch> {
    let refused = server.pinned.refuses_beside(server.reported).filter(|_| others.connected);
    refused.or_else(|| export.refuses_beside(reported_export).filter(|_| others.serving))
}
