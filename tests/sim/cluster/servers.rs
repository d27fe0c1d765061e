//! Servers of a run: the session's own server, and others with the same name.
//!
//! A different server with a different disk answers while the session's server is down, on one of
//! its addresses after a restart, or on an address that moves while it is running. The session must
//! not use any other server, and must continue with its own once that one has all its addresses
//! again. No other server appears before the session has opened its device for the first time,
//! since the session belongs to the first server that opens it. Later clients are configured with
//! that server's identity.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use rtrs_client::DeviceIndex;
use rtrs_core::block::Core;
use rtrs_core::fabric::Fabric;
use rtrs_core::identity::{ExportId, Identity, ServerId};
use rtrs_core::ids::CoreIndex;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant};
use rtrs_server::engine::epoch::SyncEpoch;
use rtrs_server::engine::message::{ControlMessage, Message};
use rtrs_server::{Export, ExportIndex, ExportTable, ServerEngine, ServerInstance, SessionParams};

use super::super::disk::Disk;
use super::super::faults::Act;
use super::super::host::{Inbox, PORT, Pace, ServerHost, server_ip, server_params};
use super::super::options::{Evidence, Extra, Ids, MS, Options, ReportedIds, other_identities};
use super::super::port::{Port, PortFaults, SharedFaults};
use super::super::{Failure, Plant};
use super::Cluster;
use super::guest::Guest;
use super::second::Second;

/// Other servers of a run.
#[derive(Debug)]
pub(super) struct OtherServers {
    /// Whether other servers may appear; in some runs, until the faults stop.
    on: bool,
    /// Identity that the session's own server reports; None in runs without other servers.
    home: Option<Identity>,
    /// Separate generator, so that the rest of a run does not depend on it.
    prng: Prng,
    /// Whether other servers claim to be the session's, for a planted bug.
    alike: bool,
    /// The other server that is running, and its disk.
    host: Option<(ServerHost, Disk)>,
    /// Path whose address the session's server has lost to the other server.
    path: Option<usize>,
    /// Number of processes of the session's server that ran alongside the first.
    twins: u64,
    /// Identity that the most recently ended client saved for the next one.
    kept: Option<Identity>,
    /// Identities that servers report, in runs in which not all report both IDs.
    ids: Option<Ids>,
    /// Identity that the session's own server reports after its next start.
    reported: ReportedIds,
    /// Identity by which the session knows its server.
    known: Identity,
    /// Whether other servers are held back until the session knows which IDs its restarted server
    /// reports: the session accepts the first server that it reaches.
    learns: bool,
}

impl OtherServers {
    pub(super) fn new(options: &Options, plant: Plant) -> Self {
        let (home, ids) = (ReportedIds::All.identity(), options.extra.ids);
        let reported = ids.map_or(ReportedIds::All, |ids| ids.home[0]);
        let Extra { resizes, twin, named, .. } = options.extra;
        let named = options.other_servers || resizes || twin || named;
        Self {
            on: options.other_servers,
            home: named.then_some(home),
            prng: Prng::new(options.seed ^ 0x7374_7261_6e67_6572),
            alike: plant == Plant::SameIdentity,
            host: None,
            path: None,
            twins: 0,
            kept: None,
            ids,
            reported,
            known: reported.identity(),
            learns: false,
        }
    }

    /// Returns the identity that the session's own server reports, if any.
    pub(super) const fn home(&self) -> Option<Identity> {
        self.home
    }

    /// Returns the identity that a client must find: None for the first client, which accepts any
    /// server, and for later clients the identity that the first one found.
    pub(super) fn identity(&self, client: u8) -> Option<Identity> {
        self.kept.or(self.home).filter(|_| client > 1)
    }

    /// Keeps the identity to which an ending client is pinned.
    pub(super) fn keep(&mut self, identity: Option<Identity>) {
        self.kept = identity.or(self.kept);
    }

    pub(super) fn hosts(&self) -> impl Iterator<Item = &ServerHost> {
        self.host.iter().map(|(host, _)| host)
    }

    pub(super) fn hosts_mut(&mut self) -> impl Iterator<Item = &mut ServerHost> {
        self.host.iter_mut().map(|(host, _)| host)
    }

    /// Runs a turn of the other server and its disk. Returns whether anything happened.
    pub(super) fn turn(&mut self, now: Instant, think_max: Duration) -> bool {
        let Some((host, disk)) = &mut self.host else { return false };
        disk.set_now(now);
        if !host.pace.due || host.pace.free_at > now {
            return false;
        }
        let (busy, messages) = host.turn(now);
        for (_, message) in messages {
            host.inbox.push(now, message);
        }
        host.pace.due = busy;
        if busy {
            host.pace.free_at = now + self.prng.duration(Duration::ZERO..=think_max);
        }
        busy
    }

    /// Returns the identity that the session's own server reports after its next start.
    fn next_identity(&self) -> Identity {
        self.home.map(|_| self.reported.identity()).unwrap_or_default()
    }

    /// Whether other servers may run now.
    const fn is_on(&self) -> bool {
        self.on && !self.learns
    }

    /// Whether only the first path, which must then stay up, distinguishes the session's server
    /// from others.
    fn is_beside(&self) -> bool {
        self.ids.is_some_and(|ids| ids.is_beside() && self.reported == ids.home[0])
    }

    /// Draws the identity of another server, in runs in which not all servers report both IDs.
    fn draw_less(&mut self) -> Identity {
        let by = if self.is_beside() && self.prng.below(4) > 0 {
            Evidence::Beside
        } else {
            Evidence::Known
        };
        let mut all = other_identities(self.known, by);
        if all.is_empty() {
            all = other_identities(self.known, Evidence::Beside);
        }
        all[self.prng.index(all.len())]
    }

    fn chance(&mut self, num: u32, den: u32) -> bool {
        self.is_on() && self.prng.chance(Ratio::new(num, den))
    }
}

impl Cluster {
    pub(super) fn start_server(&mut self) {
        let cuts = if self.plant == Plant::SameLife { 0 } else { self.disk.stats().cuts };
        self.servers_started += 1;
        let instance = ServerInstance { boot: 1 + cuts, process: self.servers_started };
        let server_id = self.other_servers.next_identity().server;
        let params = SessionParams { server_id, ..server_params(&self.options, instance) };
        let second = self.second.as_ref().and_then(Second::export);
        let exports = self.exports.of(self.export(), second);
        self.note_length();
        for at in 0..self.options.server_cores {
            let core = Core::without_ring(CoreIndex(at));
            let fabric = self.world.fabric(self.nodes[1]);
            self.server.push(ServerHost {
                core: ServerEngine::new(params, core, &exports),
                fabrics: vec![Port::boxed(fabric, SharedFaults::clone(&self.ports[1]))],
                inbox: Inbox::new(),
                pace: Pace::new(),
            });
        }
        for path in (0..self.options.paths).filter(|path| Some(*path) != self.other_servers.path) {
            listen(self.server[0].fabrics[0].as_mut(), path);
        }
    }

    /// Returns the session's export, with the current length of its file.
    pub(super) fn export(&self) -> Export {
        let source = Arc::new(self.disk.exported());
        let epoch = SyncEpoch::kept(self.kept.number(), Arc::clone(&self.kept) as _, "vol".into());
        let mut export = Export::new("vol", source);
        export.throttle.set(self.options.extra.limits);
        (export.id, export.epoch) = (self.other_servers.next_identity().export, epoch);
        export
    }

    /// Starts the server that is down; another server may now hold one of its addresses.
    pub(super) fn start_again(&mut self) {
        self.learn();
        self.end_other_servers();
        if self.options.paths > 1 && self.other_servers.chance(1, 3) {
            self.other_servers.path = Some(self.other_servers.prng.index(self.options.paths));
        }
        self.start_server();
        if let Some(path) = self.other_servers.path {
            self.start_other_server(path..path + 1);
        }
    }

    /// Ends the server's process; if `power` is set, by a power failure.
    pub(in super::super) fn stop_server(&mut self, power: bool) {
        if power {
            self.world.crash(self.nodes[1]);
        }
        self.end_other_servers();
        for host in std::mem::take(&mut self.server) {
            // The block IO of a process ends before its connections do.
            drop(host.core);
            drop(host.fabrics);
        }
        self.kept.abandon();
        let guest = self.guest.as_mut().and_then(Guest::oracle_mut);
        let second = self.second.as_mut().map(|second| second.server_gone(power));
        if power {
            self.disk.cut_power();
        }
        for oracle in guest.into_iter().chain(second).chain([&mut self.oracle]) {
            oracle.settle();
            oracle.cut_is_reported();
            if power {
                oracle.power_cut();
            }
        }
    }

    /// Sets the length of the backing file.
    pub(super) fn resize(&mut self, sectors: u32) {
        self.disk.set_sectors(sectors);
        self.is_short = sectors < self.options.work.sectors;
        if self.is_short {
            self.oracle.truncated(sectors).expect("nothing newer was seen yet");
        }
    }

    /// Resizes the device to a size that still holds all sectors in use.
    pub(super) fn grow(&mut self, now: Instant, times: u32) {
        self.disk.resize(times);
        if let Some(host) = self.server.first_mut() {
            let resized = Message::Control(ControlMessage::Resized(ExportIndex(0)));
            host.core.handle_message(now, resized, &mut host.fabrics);
        }
    }

    /// Whether only the session's client is left, and all its shards know the device's size.
    pub(super) fn is_settled(&self) -> bool {
        self.beside.is_empty() && self.other_sizes().is_empty()
    }

    /// Describes the client's shards that have the wrong size for the device.
    pub(in super::super) fn other_sizes(&self) -> String {
        let size = self.disk.size();
        let wrong = self.client.iter().filter_map(|host| host.core.size(DeviceIndex::FIRST));
        let wrong: Vec<u64> =
            wrong.filter(|known| *known != size && self.options.extra.resizes).collect();
        if wrong.is_empty() {
            return String::new();
        }
        format!("; the device has {size} bytes, and shards of the client know {wrong:?}")
    }

    /// Records that the backing file is exported again.
    fn note_length(&mut self) {
        if !self.is_short {
            self.oracle.regained(self.world.now());
        }
    }

    /// Runs a turn of the thread that saves epochs. Returns whether one was saved.
    pub(super) fn save_epochs(&mut self, now: Instant) -> bool {
        let saved = self.kept.turn(now);
        if saved {
            self.server.iter_mut().for_each(|host| host.pace.due = true);
        }
        saved
    }

    /// In some runs, kills the server while it is saving an epoch, and restarts it soon.
    pub(super) fn kill_while_saving(&mut self, now: Instant) -> Result<(), Failure> {
        if self.kept.kills(now) && !self.server.is_empty() {
            self.act(Act::StopServer { power: false })?;
            let at = now + self.prng.duration(Duration::from_micros(100)..=100 * MS);
            let behind = self.plan.partition_point(|(planned, _)| *planned <= at);
            self.plan.insert(behind, (at, Act::StartServer));
        }
        Ok(())
    }

    /// In some cases, gives some or all addresses of the server that is down to another server.
    pub(super) fn start_other_servers_in_its_place(&mut self) {
        self.learn();
        if self.other_servers.chance(2, 3) {
            let all = 0..self.options.paths;
            let one = self.other_servers.prng.index(self.options.paths);
            let some = if self.other_servers.chance(1, 3) { one..one + 1 } else { all };
            self.start_other_server(some);
        }
    }

    /// Moves one address of the server to another server, keeping the server's connections to that
    /// address; or gives all addresses back.
    pub(super) fn move_address(&mut self, path: usize) {
        if self.other_servers.host.is_some() {
            return self.take_back();
        }
        self.learn();
        let path =
            if self.other_servers.is_beside() { 1 + path % (self.options.paths - 1) } else { path };
        let up = self.server.first_mut().filter(|host| !host.core.is_stopping());
        let Some(host) = up.filter(|_| self.other_servers.is_on()) else { return };
        host.fabrics[0].stop_listening();
        for own in (0..self.options.paths).filter(|own| *own != path) {
            listen(host.fabrics[0].as_mut(), own);
        }
        self.other_servers.path = Some(path);
        self.start_other_server(path..path + 1);
    }

    /// Sets the identity that the server reports after its next start.
    pub(super) fn report_ids(&mut self, reported: ReportedIds) {
        self.learn();
        self.other_servers.learns = self.other_servers.is_beside();
        self.other_servers.reported = reported;
        if self.other_servers.learns {
            self.take_back();
        }
    }

    /// Records when the session has learned the identity that its server reports.
    fn learn(&mut self) {
        if self.other_servers.learns && self.pinned() == Some(self.other_servers.next_identity()) {
            (self.other_servers.learns, self.other_servers.known) =
                (false, self.other_servers.next_identity());
        }
    }

    /// Returns the identity to which the session is pinned, if there is a session.
    fn pinned(&self) -> Option<Identity> {
        let home = self.client.first()?;
        Some(home.core.pinned_identity(DeviceIndex::FIRST).unwrap_or_default())
    }

    /// Checks at the end that the session is pinned to the identity that its server reports.
    pub(in super::super) fn check_pinned(&self) -> Result<(), Failure> {
        let (says, pinned) = (self.other_servers.next_identity(), self.pinned());
        if self.other_servers.home.is_none() || pinned.is_none_or(|pinned| pinned == says) {
            return Ok(());
        }
        let text = format!("the session is pinned to {pinned:?}, and its server is {says}");
        Err(Failure::new("blocks", text))
    }

    /// Checks that the first path stays up while only it distinguishes the server from others.
    /// Otherwise the session may legitimately switch to another server, and the run proves nothing.
    pub(super) fn check_first_path(&self) -> Result<(), Failure> {
        let stays = self.other_servers.is_on() && self.other_servers.is_beside() && self.is_loaded;
        if !stays
            || self.paths().first().is_some_and(|path| path.is_connected() && path.reconnects == 0)
        {
            return Ok(());
        }
        Err(Failure::new("live", "the first path went down, although no fault struck it"))
    }

    /// Gives all addresses back to the server for the rest of the run.
    pub(super) fn stop_other_servers(&mut self) {
        self.other_servers.on = false;
        self.take_back();
    }

    fn take_back(&mut self) {
        let path = self.other_servers.path;
        self.end_other_servers();
        // A server that is stopping or down takes all addresses when it starts.
        let up = self.server.first_mut().filter(|host| !host.core.is_stopping());
        if let (Some(path), Some(host)) = (path, up) {
            listen(host.fabrics[0].as_mut(), path);
        }
    }

    /// Ends the other server's process.
    fn end_other_servers(&mut self) {
        self.other_servers.path = None;
        if let Some((host, _)) = self.other_servers.host.take() {
            drop(host.core);
            drop(host.fabrics);
        }
    }

    /// Starts a server of one core with an empty disk on these paths' addresses.
    fn start_other_server(&mut self, paths: Range<usize>) {
        let others = &mut self.other_servers;
        let home = others.next_identity();
        let other = (Some(ServerId::of_name("other")), Some(ExportId::of_name("other")));
        let (server_id, id) = match others.prng.below(4) {
            _ if others.alike => (home.server, home.export),
            _ if others.ids.is_some() => {
                let Identity { server, export } = others.draw_less();
                (server, export)
            }
            0 => (home.server, other.1),
            1 => (other.0, home.export),
            2 => other,
            _ => (None, None),
        };
        let Options { disk, work, .. } = &self.options;
        let disk = Disk::new(*disk, work.sectors, false, Plant::None, others.prng.fork());
        disk.set_now(self.world.now());
        let instance = ServerInstance { boot: 1, process: 1 << 32 };
        let params =
            SessionParams { server_id, cores: 1, ..server_params(&self.options, instance) };
        let mut export = Export::new("vol", Arc::new(disk.clone()));
        (export.id, export.epoch) = (id, SyncEpoch::unkept(1));
        self.log.event(
            self.world.now(),
            "stranger",
            [paths.start as u64, paths.end as u64],
            || Identity { server: server_id, export: id }.to_string(),
        );
        self.start_other(params, export, disk, paths);
    }

    /// Starts a server alongside the session's, with these paths' addresses.
    fn start_other(
        &mut self,
        params: SessionParams,
        export: Export,
        disk: Disk,
        paths: Range<usize>,
    ) {
        let faults = PortFaults::new(Plant::None, self.other_servers.prng.fork());
        let core = Core::without_ring(CoreIndex(0));
        let mut host = ServerHost {
            core: ServerEngine::new(params, core, &ExportTable::new(vec![export])),
            fabrics: vec![Port::boxed(self.world.fabric(self.nodes[1]), faults)],
            inbox: Inbox::new(),
            pace: Pace::new(),
        };
        for path in paths {
            listen(host.fabrics[0].as_mut(), path);
        }
        self.other_servers.host = Some((host, disk));
    }

    /// Starts a second process of the server, which has the same disk and this path's address; or
    /// ends that process and gives the address back to the first one.
    pub(super) fn twin(&mut self, path: Option<usize>) {
        self.take_back();
        let up = self.server.first_mut().filter(|host| !host.core.is_stopping());
        let (Some(path), Some(host)) = (path, up) else { return };
        host.fabrics[0].stop_listening();
        for own in (0..self.options.paths).filter(|own| *own != path) {
            listen(host.fabrics[0].as_mut(), own);
        }
        self.other_servers.path = Some(path);
        let Identity { server: server_id, export: id } = self.other_servers.next_identity();
        self.other_servers.twins += 1;
        let instance = ServerInstance { boot: 1, process: (1 << 32) + self.other_servers.twins };
        let params =
            SessionParams { server_id, cores: 1, ..server_params(&self.options, instance) };
        let source = Arc::new(self.disk.clone());
        let mut export = Export::new("vol", source);
        (export.id, export.epoch) = (id, SyncEpoch::unkept(1));
        self.start_other(params, export, self.disk.clone(), path..path + 1);
    }
}

fn listen(fabric: &mut dyn Fabric, path: usize) {
    fabric.listen(SocketAddr::new(server_ip(path), PORT)).expect("the address is free");
}
