//! Actions of operators: on the client's paths and on the server's exports.
//!
//! In some runs the server's operator removes the session's export by force under load, in half of
//! these gives its name to another disk, and exports the first disk again after the session has
//! ended; a different session follows. After the removal, no IO of the session succeeds. The
//! session has to learn of the removal, end, release everything and never return; the server has to
//! release the disk. A neighbor with its own export on the same server must not be affected.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rtrs_client::engine::SessionFailure;
use rtrs_client::{Change, Leaving};
use rtrs_core::block::IoOp;
use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant};
use rtrs_server::engine::message::{
    AdminReply, AdminReplyTo, AdminRequest, ControlMessage, Message,
};
use rtrs_server::{Export, ExportTable};

use super::super::disk::Disk;
use super::super::faults::Act;
use super::super::host::{path_name, path_target};
use super::super::options::{Guest as Kind, MS, Options};
use super::super::workload::Workload;
use super::super::{Failure, Plant};
use super::{Cluster, guest};

/// Maximum time for a session whose export was removed to end, once all faults are over.
const END_MAX: Duration = Duration::from_secs(10);
/// Time that the session has to stay ended.
const STAY: Duration = Duration::from_secs(2);
/// Interval between checks of whether the export to be removed is open.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Exports of the server besides the session's, and the state of removals.
#[derive(Debug)]
pub(super) struct Exports {
    /// Disk of a neighbor, exported under another name.
    neighbor: Option<Disk>,
    /// Disk that is exported under the name of the removed export.
    heir: Option<Disk>,
    table: Arc<ExportTable>,
    /// The session's export, while the server holds a reference.
    held: Weak<Export>,
    is_removed: bool,
}

impl Exports {
    pub(super) fn new(options: &Options) -> Self {
        let mut prng = Prng::new(options.seed ^ 0x6578_706f_7274_7321);
        let mut disk = |sectors| Disk::new(options.disk, sectors, false, Plant::None, prng.fork());
        let has_neighbor = options.guest == Some(Kind::Neighbor);
        let has_heir = options.extra.removal.is_some_and(|removal| removal.has_heir);
        Self {
            neighbor: has_neighbor.then(|| disk(guest::SECTORS)),
            heir: has_heir.then(|| disk(options.work.sectors)),
            table: ExportTable::new(Vec::new()),
            held: Weak::new(),
            is_removed: false,
        }
    }

    /// Returns the exports of a server that starts with this export for the session, and perhaps a
    /// second one.
    pub(super) fn of(&mut self, export: Export, second: Option<Export>) -> Arc<ExportTable> {
        self.table = ExportTable::new(Vec::new());
        self.add(export);
        second.into_iter().for_each(|second| self.add_second(second));
        if let Some(disk) = &self.neighbor {
            let other = Export::new(guest::NEIGHBOR, Arc::new(disk.clone()));
            self.table.add(&Arc::new(other)).expect("another name");
        }
        Arc::clone(&self.table)
    }

    /// Adds the session's export.
    fn add(&mut self, export: Export) {
        let export = Arc::new(export);
        self.table.add(&export).expect("nothing else has the name");
        self.held = Arc::downgrade(&export);
    }

    /// Whether the server has an export with this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.table.find(name.as_bytes()).is_some()
    }

    /// Adds the second volume's export.
    pub(super) fn add_second(&mut self, export: Export) {
        self.table.add(&Arc::new(export)).expect("nothing else has the name");
    }

    fn disks(&self) -> impl Iterator<Item = &Disk> {
        self.neighbor.iter().chain(&self.heir)
    }

    /// Sets the submission time for the next operations.
    pub(super) fn set_now(&self, now: Instant) {
        self.disks().for_each(|disk| disk.set_now(now));
    }

    /// Stops slowing, blocking and failing operations on all disks.
    pub(super) fn calm(&self, now: Instant) {
        self.disks().for_each(|disk| disk.calm(now));
    }

    /// Returns the number of operations that have not ended.
    pub(super) fn inflight(&self) -> usize {
        self.disks().map(Disk::inflight).sum()
    }
}

impl Cluster {
    /// Gives the session back all paths that an operator took from it.
    pub(super) fn restore(&mut self, now: Instant) {
        let there = self.paths();
        let mut whole = true;
        for path in 0..self.options.paths {
            let name = path_name(path);
            let found = there.iter().find(|one| one.path == name);
            whole &= found.is_some_and(|one| !one.is_leaving());
            if found.is_none_or(|one| one.state_name() == "disconnected") {
                whole = false;
                self.ensure_path(now, path, Duration::ZERO);
            }
        }
        self.restore_at = (!whole || self.client.is_empty()).then_some(now + 20 * MS);
    }

    /// Adds or reconnects a path of the session.
    pub(super) fn ensure_path(&mut self, now: Instant, path: usize, within: Duration) {
        let name = path_name(path);
        let change = if self.paths().iter().any(|one| one.path == name) {
            Change::Reconnect(Leaving { path: name, within, force: false })
        } else {
            self.added = self.added.wrapping_add(1);
            let (client, added) = (self.clients_started, self.added);
            let uuid = [client, added, 0xa0 + path as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
            let target = path_target(&self.options, path);
            Change::Add { target, uuid, replaces: Vec::new() }
        };
        self.change(now, change);
    }

    /// Changes the session. Returns false if the session refuses the change.
    pub(super) fn change(&mut self, now: Instant, change: Change) -> bool {
        let Some(home) = self.client.first_mut() else { return false };
        let done = home.core.change(now, change, &mut home.fabrics);
        if let Err(refused) = &done {
            self.log.event(now, "refused", [0, 0], || refused.to_string());
        }
        done.is_ok()
    }

    /// Removes the session's export. Returns the names of the sessions that had it open.
    fn remove_by_name(&mut self, force: bool) -> Result<Vec<String>, Failure> {
        let answer = Arc::new(Mutex::new(None));
        let slot = Arc::clone(&answer);
        let reply = AdminReplyTo::new(move |reply| *slot.lock() = Some(reply));
        let request = AdminRequest::ExportRemove { name: "vol".into(), force };
        let message = Message::Control(ControlMessage::Admin { request, reply });
        let now = self.now();
        let host = self.server.first_mut().expect("a server that is not restarted");
        host.core.handle_message(now, message, &mut host.fabrics);
        host.pace.due = true;
        match answer.lock().take() {
            Some(AdminReply::ExportRemoved { ended }) => Ok(ended),
            other => Err(Failure::new("live", format!("an export is not removed: {other:?}"))),
        }
    }

    /// Removes the session's export as the operator, as soon as the server has it open: the removal
    /// of an export that is not open does not affect a session.
    pub(super) fn remove_export(&mut self) -> Result<(), Failure> {
        let now = self.now();
        let sessions = self.server.first().map(|host| host.core.snapshot(now)).unwrap_or_default();
        let mut open = sessions.iter().flat_map(|session| &session.opens);
        if !open.any(|open| open.export == "vol") {
            let at = now + LOOK_EVERY;
            let behind = self.plan.partition_point(|(planned, _)| *planned <= at);
            self.plan.insert(behind, (at, Act::RemoveExport));
            return Ok(());
        }
        self.remove_by_name(true)?;
        self.exports.is_removed = true;
        if let Some(heir) = &self.exports.heir {
            let heir = Export::new("vol", Arc::new(heir.clone()));
            self.exports.table.add(&Arc::new(heir)).expect("the name is free");
        }
        for host in &mut self.client {
            host.work.export_removed(now);
        }
        // A session without IO does not notice the removal.
        self.order(0, IoOp::Read, 0, 1, false);
        Ok(())
    }

    /// Whether the session has ended: only its process is left, and the disk is released.
    fn has_ended(&self) -> bool {
        let removed = Some(&SessionFailure::Removed);
        let neighbors = usize::from(self.exports.neighbor.is_some());
        let (sessions, _, requests, block) = self.left_at_server();
        self.client.first().is_some_and(|home| home.core.failure() == removed)
            && self.workloads().all(Workload::is_idle)
            && self.left_at_client() == (0, 0)
            && !self.paths().iter().any(|path| path.is_connected())
            && (sessions, requests, block) == (neighbors, 0, 0)
            && self.exports.held.strong_count() == 0
    }

    /// Checks after the faults that a session whose export was removed has ended and stays ended.
    /// Then exports the disk again and checks that another session can use it.
    pub(in super::super) fn follow_removed(&mut self) -> Result<(), Failure> {
        if !self.exports.is_removed {
            return Ok(());
        }
        if !self.run_until(self.now() + END_MAX, Self::has_ended)? {
            return Err(Failure::new("home", self.what_removal_left()));
        }
        self.run_until(self.now() + STAY, |_| false)?;
        if !self.has_ended() {
            let text = "a session whose export had been removed came back";
            return Err(Failure::new("live", text));
        }
        if let Some(heir) = &self.exports.heir {
            let ops = heir.stats().ops;
            if ops > 0 || !self.remove_by_name(false)?.is_empty() {
                let text = format!("{ops} IOs of a session went to the disk that has the name now");
                return Err(Failure::new("blocks", text));
            }
        }
        self.exports.add(self.export());
        self.leave_client();
        let gone = |cluster: &Self| cluster.beside.is_empty() && cluster.registered().0 == 0;
        if !self.run_until(self.now() + END_MAX, gone)? {
            let text = format!(
                "the session whose export was removed has {} bytes registered after its detach",
                self.registered().0
            );
            return Err(Failure::new("memory", text));
        }
        self.act(Act::StartClient)
    }

    /// Describes the remains of a session whose export was removed, for a failure report.
    fn what_removal_left(&self) -> String {
        let why = self.gave_up().unwrap_or_else(|| "it did not end".to_owned());
        let paths: Vec<_> = self.paths().into_iter().map(|path| path.state_name()).collect();
        format!(
            "{} s after its export was removed: the session says: {why}; paths {paths:?}; IOs and \
             permits of the client {:?}; sessions, connections, requests and block IO of the \
             server {:?}; holders of the export {}",
            END_MAX.as_secs(),
            self.left_at_client(),
            self.left_at_server(),
            self.exports.held.strong_count()
        )
    }
}
