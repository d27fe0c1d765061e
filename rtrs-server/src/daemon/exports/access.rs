//! Access to the exports of a running server: access lists, and the certificates or keys that
//! authenticate clients.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rtrs_core::tls::{TlsEndpoint, TlsServerConfig};

use crate::control_protocol::{Changed, Losses};
use crate::daemon::access::{FormerAccess, ServerAccess};
use crate::daemon::control_shard::ControlShard;
use crate::engine::message::{AdminReply, AdminRequest};
use crate::export::ExportTable;
use crate::path::PathKey;
use crate::settings::{AccessRule, ExportSpec, Settings};
use crate::stats::Revoked;

/// Access lists of a running server, and the certificates or keys of its clients.
pub(in crate::daemon) struct ExportAccess {
    lists: Mutex<ServerAccess>,
    /// Held from the check for access that clients would lose until the lists are changed, and
    /// while an export is published with its list.
    checking_losses: Mutex<()>,
    table: Arc<ExportTable>,
    control: ControlShard,
    /// Certificates or keys of clients, if configured.
    keys: Option<Arc<TlsEndpoint>>,
}

impl ExportAccess {
    pub(super) fn new(
        set: &Settings,
        table: &Arc<ExportTable>,
        control: &ControlShard,
        keys: Option<Arc<TlsEndpoint>>,
    ) -> Self {
        let (lists, checking_losses) = (Mutex::new(ServerAccess::new(set)), Mutex::default());
        Self { lists, checking_losses, table: Arc::clone(table), control: control.clone(), keys }
    }

    /// Copy of all access lists.
    pub(super) fn lists(&self) -> ServerAccess {
        self.lists.lock().clone()
    }

    /// Access list of an export; if empty, the server's list applies.
    pub(super) fn of(&self, name: &str) -> Vec<AccessRule> {
        self.lists.lock().of(name)
    }

    /// Waits until no other thread is between checking for losses and changing the lists, or
    /// between changing the lists and publishing the export.
    pub(in crate::daemon) fn begin_check(&self) -> MutexGuard<'_, ()> {
        self.checking_losses.lock()
    }

    /// Changes the access lists. They apply to new opens and paths immediately, and to existing
    /// paths after [`Self::check`].
    pub(super) fn change(&self, change: impl FnOnce(&mut ServerAccess)) {
        let mut access = self.lists.lock();
        change(&mut access);
        self.table.set_access(access.policy());
    }

    /// Access list of the server.
    pub(in crate::daemon) fn of_server(&self) -> Vec<AccessRule> {
        self.lists.lock().server().to_vec()
    }

    /// Whether exports without a list of their own are closed to clients that no list names.
    pub(in crate::daemon) fn is_closed_to_unlisted(&self) -> bool {
        self.lists.lock().is_closed()
    }

    /// Forgets the list of a removed export.
    pub(in crate::daemon) fn forget(&self, name: &str) {
        self.change(|access| access.forget(name));
    }

    /// Replaces the certificates or keys. They apply to connected clients after
    /// [`Self::check`].
    pub(in crate::daemon) fn replace_keys(&self, endpoint: &TlsEndpoint, config: TlsServerConfig) {
        let generation = endpoint.replace(config);
        // A client that authenticated against the previous configuration but has not been admitted
        // yet must authenticate again, unless the keys are the same.
        self.change(|access| access.generation = generation);
    }

    /// Ends the paths that no longer have the access that their sessions use, and the paths of
    /// clients that are no longer accepted. Returns the access that sessions have lost.
    pub(in crate::daemon) fn check(&self) -> Result<Vec<Revoked>, String> {
        let mut revoked = self.control.ask(AdminRequest::CheckAccess, lost)?;
        let ended = self.end_unknown();
        // A session may lose paths for both reasons.
        for one in ended.iter().flatten() {
            let same = |known: &&mut Revoked| {
                (&known.session, &known.identity) == (&one.session, &one.identity)
            };
            match revoked.iter_mut().find(same) {
                Some(known) => {
                    known.paths += one.paths;
                    known.paths_left = one.paths_left;
                    known.peers.extend(&one.peers);
                }
                None => revoked.push(one.clone()),
            }
        }
        for Revoked { session, identity, paths, paths_left, peers } in &revoked {
            let identity = identity.as_deref().unwrap_or("anonymous");
            tracing::info!(
                %session, identity, ?peers, paths, paths_left,
                "ending paths of a session: access lists, certificates or keys have changed"
            );
        }
        ended.map(|_| revoked)
    }

    /// Ends the paths of clients that are no longer accepted.
    fn end_unknown(&self) -> Result<Vec<Revoked>, String> {
        let keys = self.keys.as_ref().and_then(|keys| keys.server_config());
        let Some(keys) = keys else { return Ok(Vec::new()) };
        match self.unknown_to(&keys)? {
            unknown if unknown.is_empty() => Ok(Vec::new()),
            unknown => self.control.ask(AdminRequest::EndUnknown(unknown), lost),
        }
    }

    /// Access that sessions would lose under these access lists and these certificates or keys.
    pub(in crate::daemon) fn preview(
        &self,
        access: &ServerAccess,
        keys: Option<&TlsServerConfig>,
    ) -> Result<Vec<Revoked>, String> {
        let policy = access.policy();
        let unknown = keys.map(|keys| self.unknown_to(keys)).transpose()?.unwrap_or_default();
        self.control.ask(AdminRequest::WouldEnd { policy, unknown }, lost)
    }

    /// Paths of clients that these certificates or keys do not include.
    fn unknown_to(&self, keys: &TlsServerConfig) -> Result<Vec<PathKey>, String> {
        let mut clients = self.control.ask(AdminRequest::Identities, |answer| match answer {
            AdminReply::Identities(clients) => Some(clients),
            _ => None,
        })?;
        clients.retain(|(_, identity)| !keys.still_knows(identity));
        Ok(clients.into_iter().map(|(path, _)| path).collect())
    }

    /// Applies a changed list of an export. An unchanged list is not applied, because a reload may
    /// have changed the current list since then.
    pub(super) fn change_list(
        &self,
        before: &ExportSpec,
        spec: &ExportSpec,
    ) -> Result<Vec<Revoked>, String> {
        self.set_list(before, spec).map_or(Ok(Vec::new()), |_| self.check())
    }

    /// Sets a changed list of an export like [`Self::change_list`], but does not apply it to
    /// existing paths yet. Returns the previous access if the list differs.
    pub(super) fn set_list(&self, before: &ExportSpec, spec: &ExportSpec) -> Option<FormerAccess> {
        let mut former = None;
        if before.access != spec.access {
            self.change(|access| former = Some(access.set(spec)));
        }
        former
    }

    /// Reverts the list of an export whose change has failed, unless the list has changed since.
    pub(super) fn take_back(
        &self,
        set: &ExportSpec,
        former: FormerAccess,
        configured: bool,
    ) -> Result<(), String> {
        let mut is_taken_back = false;
        self.change(|access| is_taken_back = access.take_back(set, former, configured));
        if is_taken_back { self.check().map(drop) } else { Ok(()) }
    }

    /// Restores the lists of exports in the configuration with this number, if commands have
    /// removed the lists since the configuration was read.
    pub(in crate::daemon) fn renew(&self, configuration: u64, exports: &[ExportSpec]) {
        self.change(|access| access.renew(configuration, exports));
    }

    /// Access that clients would lose under these access lists.
    pub(in crate::daemon) fn losses(&self, access: &ServerAccess) -> Result<Losses, String> {
        let closed = self.lists.lock().closed_in(access);
        Ok(Losses { closed, revoked: self.preview(access, None)? })
    }

    /// Checks the list of an export that is about to be added or changed. Unless forced, refuses a
    /// list that makes clients lose access. Returns the exports that the list closes.
    pub(super) fn check_losses(
        &self,
        spec: &ExportSpec,
        force: bool,
    ) -> Result<Vec<String>, String> {
        let mut access = self.lists();
        if access.of(spec.name()) == spec.access {
            return Ok(Vec::new());
        }
        access.set(spec);
        let losses = self.losses(&access)?;
        match losses.refusal().filter(|_| !force) {
            Some(why) => Err(format!("cannot set the access list of {:?}: {why}", spec.name())),
            None => Ok(losses.closed),
        }
    }
}

impl Changed {
    /// Description of the access that clients have lost, for the audit log.
    pub(super) fn lost(&self) -> Option<String> {
        let texts = self.losses.texts("lost");
        (!texts.is_empty()).then(|| texts.join("; "))
    }
}

/// Extracts the losses from the answer to a request that ends paths of sessions.
fn lost(answer: AdminReply) -> Option<Vec<Revoked>> {
    match answer {
        AdminReply::Revoked(revoked) => Some(revoked),
        _ => None,
    }
}
