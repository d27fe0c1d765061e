//! Which server's disk the session works with, and what no other server may do to it.
//!
//! The first path that opens the device pins server and export; every other path, and every
//! reconnect, has to meet the same two. Otherwise a reused address or a name with several hosts
//! would connect the session to another disk, which answers as if nothing had happened. A server
//! that says no id where one is pinned is another one too. The server's id is judged before the
//! export is opened there, the export's after. A kernel's server has no ids: of that the shape of
//! the device is compared, and nothing else can be.
//!
//! What says more than was known, or is of another boot, may be the same server, which was
//! upgraded or started again. Then no path to it is left from before. As long as one is connected
//! they are two, and the new path stays down: else one volume would be striped over two disks.
//!
//! The eviction secret stands here as well: a reject with ESTALE ends the session only when it
//! repeats what the server said with OPEN_RSP.

use rtrs_core::identity::{Comparison, EvictionSecret, ExportId, Identity, ServerId};

use crate::engine::device_table::OpenDevice;

/// What is known of the server and its disk.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    identity: Identity,
    secret: Option<EvictionSecret>,
}

impl Pinned {
    /// Pinned before the session begins, if it is.
    pub(super) fn new(identity: Option<Identity>) -> Self {
        Self { identity: identity.unwrap_or_default(), secret: None }
    }

    /// What the session is pinned to, if to anything; see
    /// [`SessionConfig::identity`](crate::engine::session::SessionConfig::identity).
    pub(super) fn identity(&self) -> Option<Identity> {
        Some(self.identity).filter(|identity| !identity.is_unknown())
    }

    /// True if it is known which disk or file the export is.
    pub(super) fn knows_export(&self) -> bool {
        self.identity.export.is_some()
    }

    /// Why a server cannot be used, as far as its id says.
    pub(super) fn refuses_server(&self, met: Option<ServerId>) -> Option<String> {
        let pinned = self.identity.server?;
        let found = match met {
            Some(met) if met == pinned => return None,
            Some(met) => format!("it is server {met}"),
            None => "this server does not say who it is".to_owned(),
        };
        Some(format!("{ANOTHER}: {found}, and the session is with {pinned}; {HINT}"))
    }

    /// Why a device cannot be used in place of the one that is pinned, or was opened `last`.
    pub(super) fn refuses(
        &self,
        server: Option<ServerId>,
        last: Option<&OpenDevice>,
        device: &OpenDevice,
    ) -> Option<String> {
        if rtrs_core::mutated!(OtherDiskAccepted) {
            return None;
        }
        let met = device.export_id;
        let proven = self.compare(met) == Some(Comparison::Same);
        self.refuses_server(server).or_else(|| self.refuses_export(met)).or_else(|| {
            let last = last.filter(|last| last.geometry.size != device.geometry.size && !proven)?;
            let (size, had) = (device.geometry.size, last.geometry.size);
            Some(format!(
                "{ANOTHER}: its device has {size} bytes and had {had} before, and \
                 no id proves that it is the same; attach again if it was resized"
            ))
        })
    }

    fn compare(&self, met: Option<ExportId>) -> Option<Comparison> {
        Some(self.identity.export?.compare(met?))
    }

    fn refuses_export(&self, met: Option<ExportId>) -> Option<String> {
        let pinned = self.identity.export?;
        let found = match met {
            Some(met) if pinned.compare(met) != Comparison::Different => return None,
            Some(met) => format!("the export is another disk or file ({met})"),
            None => "the server does not say which disk or file the export is".to_owned(),
        };
        Some(format!("{ANOTHER}: {found}, and the session is with {pinned}; {HINT}"))
    }

    /// Why a device that is not refused cannot be used while another path is connected.
    pub(super) fn refuses_beside(
        &self,
        server: Option<ServerId>,
        export: Option<ExportId>,
    ) -> Option<String> {
        let other_boot = self.compare(export) == Some(Comparison::Unknown);
        let is_allowed = if other_boot {
            rtrs_core::mutated!(OtherBootBeside)
        } else {
            rtrs_core::mutated!(NewIdBeside)
        };
        if is_allowed || self.after(server, export) == self.identity {
            return None;
        }
        Some(format!(
            "{ANOTHER}: it says of server or export what a path that is connected did not say; it \
             is used when no other is connected, if the server was upgraded or started again"
        ))
    }

    /// What is known when this was met.
    fn after(&self, server: Option<ServerId>, export: Option<ExportId>) -> Identity {
        Identity {
            server: server.or(self.identity.server),
            export: export.or(self.identity.export),
        }
    }

    /// A path opened this device of this server, which is not refused.
    pub(super) fn meet(
        &mut self,
        (server, export): (Option<ServerId>, Option<ExportId>),
        secret: Option<EvictionSecret>,
    ) {
        self.secret = secret.or(self.secret);
        if self.compare(export) == Some(Comparison::Unknown) {
            tracing::warn!(
                "the server's host was started again, and its export has an id for one boot only: \
                 nothing but its shape says that it is the same"
            );
        }
        let met = self.after(server, export);
        if met != self.identity {
            tracing::info!(identity = %met, "the identity of the volume is pinned");
            self.identity = met;
        }
    }

    /// True when a server that repeats this secret ended the session.
    pub(super) fn is_proof(&self, secret: Option<EvictionSecret>) -> bool {
        secret.is_some() && secret == self.secret
    }
}

/// Begins the error of a path to another disk.
pub(crate) const ANOTHER: &str = "cannot use this path";
/// What to do about another disk.
const HINT: &str = "check the path's address, or attach again with --accept-new-identity if the \
                    volume was moved";
