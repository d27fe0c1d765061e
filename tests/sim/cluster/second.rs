//! Second volume of the session: another export of its server, with its own disk and oracle, and
//! with workloads on all cores of the client.
//!
//! The volume shares connections and permits with the first one. Its user sometimes leaves with all
//! IO in flight, and returns; the server sometimes lacks its export, while IO on the other volume
//! continues. A user's unfinished write takes effect before the next user has the volume, or never.

use std::sync::Arc;

use nbd_bridge::{BufferPools, Group, Seat};
use rtrs_client::engine::ClientEngine;
use rtrs_client::{Change, DeviceIndex, VolumeConfig};
use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant};
use rtrs_server::Export;
use rtrs_server::engine::epoch::SyncEpoch;

use super::super::disk::Disk;
use super::super::epochs::KeptEpoch;
use super::super::faults::SecondAct;
use super::super::host::volume;
use super::super::log::Log;
use super::super::options::{Options, WorkOptions};
use super::super::oracle::Oracle;
use super::super::workload::{Mode, Rules, Workload};
use super::super::{Failure, Plant};
use super::Cluster;

/// Name of the volume's export.
const NAME: &str = "vol2";
/// Index of the volume in the session.
const INDEX: DeviceIndex = DeviceIndex(1);
/// Number of sectors on the volume's disk.
const SECTORS: u32 = 64;
/// First core number of the volume in the log, after those of the first volume.
const CORES: usize = 0x40;
/// Delay before the next attempt to add the volume.
const RETRY: Duration = Duration::from_millis(20);

/// State of the second volume.
#[derive(Debug)]
pub(in super::super) struct Second {
    disk: Disk,
    /// State of the export that a server keeps for the next server.
    kept: Arc<KeptEpoch>,
    pub(super) oracle: Oracle,
    works: Vec<Workload>,
    /// Whether the session has the volume.
    is_there: bool,
    /// Whether a core of its current user has the volume open.
    is_used: bool,
    /// Whether servers start without the volume's export.
    is_hidden: bool,
    /// Time at which the volume is added again.
    retry_at: Option<Instant>,
    /// Server's cache epoch that the most recently killed client had saved.
    saved_epoch: Option<u64>,
    lives: u64,
}

impl Second {
    pub(super) fn new(options: &Options, rules: &Rules, log: &Log) -> Option<Self> {
        if !options.extra.second {
            return None;
        }
        let mut prng = Prng::new(options.seed ^ 0x7365_636f_6e64_6469);
        let tracks = options.faults.cuts_power();
        let disk = Disk::new(options.disk, SECTORS, tracks, Plant::None, prng.fork());
        let own = WorkOptions {
            sectors: SECTORS,
            depth: options.work.depth.clamp(2, 8),
            ..options.work.clone()
        };
        let mut oracle = Oracle::new(SECTORS, own.overlap, options.disk.write_cache);
        oracle.part_max = options.part_max();
        let (nbd_drops, stalls, plant) = (false, false, Plant::None);
        let rules = Rules { options: own, nbd_drops, stalls, plant, ..rules.clone() };
        let works = (0..usize::from(options.client_cores))
            .map(|at| Workload::new(CORES + at, &rules, prng.fork(), log.clone()));
        Some(Self {
            disk,
            kept: KeptEpoch::new(None, options.seed, Plant::None),
            oracle,
            works: works.collect(),
            is_there: false,
            is_used: false,
            is_hidden: false,
            retry_at: None,
            saved_epoch: None,
            lives: 0,
        })
    }

    /// Starts a client with the volume.
    pub(super) fn begin_life(&mut self, takes_over: bool) -> VolumeConfig {
        (self.is_there, self.is_used, self.retry_at) = (true, false, None);
        let inherited_epoch = self.saved_epoch.filter(|_| takes_over);
        VolumeConfig { inherited_epoch, ..volume(NAME) }
    }

    /// Ends the client's process; if `takeover` is set, another client takes over.
    pub(super) fn client_gone(&mut self, now: Instant, takeover: bool, core: &ClientEngine) {
        let takeover = takeover && self.is_there;
        // A client that died before saving an epoch leaves that of the previous client.
        let saved = core.saved_epoch(INDEX).or(self.saved_epoch);
        self.saved_epoch = saved.filter(|_| takeover);
        self.user_gone(now, takeover);
    }

    /// Ends the volume's user; if `takeover` is set, another user takes over.
    fn user_gone(&mut self, now: Instant, takeover: bool) {
        for work in &mut self.works {
            work.abandon(now, &mut self.oracle, takeover);
        }
        self.oracle.client_gone(takeover);
        (self.is_there, self.is_used) = (false, false);
    }

    /// Returns the export for a starting server, if that server has the volume.
    pub(super) fn export(&self) -> Option<Export> {
        (!self.is_hidden).then(|| self.exported())
    }

    fn exported(&self) -> Export {
        let epoch = SyncEpoch::kept(self.kept.number(), Arc::clone(&self.kept) as _, NAME.into());
        let mut export = Export::new(NAME, Arc::new(self.disk.exported()));
        export.epoch = epoch;
        export
    }

    /// Ends the server's process; if `power` is set, by a power failure. Returns the oracle of the
    /// volume's sectors.
    pub(super) fn server_gone(&mut self, power: bool) -> &mut Oracle {
        self.kept.abandon();
        if power {
            self.disk.cut_power();
        }
        &mut self.oracle
    }

    pub(super) fn works(&self) -> impl Iterator<Item = &Workload> {
        self.works.iter()
    }

    pub(super) fn set_mode(&mut self, mode: Mode) {
        self.works.iter_mut().for_each(|work| work.mode = mode);
    }

    pub(super) fn read_back(&mut self, core: usize) {
        self.works[core].mode = Mode::ReadBack(0);
    }

    pub(super) fn expect_no_errors(&mut self) {
        self.works.iter_mut().for_each(|work| work.is_calm = true);
    }

    pub(super) fn set_now(&self, now: Instant) {
        self.disk.set_now(now);
    }

    /// Returns the number of operations on the volume's disk that have not ended.
    pub(super) fn block_inflight(&self) -> usize {
        self.disk.inflight()
    }

    /// Returns when the volume is to be added.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Returns when a core needs a turn for the volume.
    pub(super) fn deadline(&self, core: usize) -> Option<Instant> {
        self.works.get(core).and_then(Workload::deadline)
    }

    /// Runs a turn of the volume's workload on a core. Returns whether anything happened.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        at: usize,
        core: &ClientEngine,
        pools: &BufferPools,
    ) -> Result<bool, Failure> {
        let work = &mut self.works[at];
        if !work.is_open()
            && self.is_there
            && let Some(device) = core.device(INDEX)
        {
            if !std::mem::replace(&mut self.is_used, true) {
                self.oracle.settle();
            }
            let seat = Seat { group: Group::new(1, |_| ()), shard: 0 };
            work.open(now, device, seat, pools);
        }
        let busy = work.turn(now, &mut self.oracle)?;
        work.failed.clear();
        Ok(busy)
    }

    /// Checks that free buffers have not changed since their release.
    pub(super) fn check(&mut self) -> Result<(), Failure> {
        self.works.iter_mut().try_for_each(Workload::check)
    }
}

impl Cluster {
    /// Performs a planned action on the second volume.
    pub(super) fn act_on_second(&mut self, now: Instant, act: SecondAct) {
        let Some(second) = &mut self.second else { return };
        match act {
            SecondAct::Close if second.is_there => self.close_second(now),
            SecondAct::Add if !second.is_there => second.retry_at = Some(now),
            SecondAct::Close | SecondAct::Add => {}
            SecondAct::Hide => second.is_hidden = true,
            SecondAct::Show => self.show_second(),
        }
    }

    /// Closes the volume with all IO of its user in flight.
    fn close_second(&mut self, now: Instant) {
        let closed = self.change(now, Change::CloseVolume { export: NAME.into() });
        if let Some(second) = self.second.as_mut().filter(|_| closed) {
            second.user_gone(now, false);
            second.saved_epoch = None;
            second.lives += 1;
        }
    }

    /// Exports the volume on the server.
    fn show_second(&mut self) {
        let Some(second) = self.second.as_mut().filter(|second| second.is_hidden) else { return };
        second.is_hidden = false;
        // A starting server exports the volume itself; a running one may still export it from
        // before it was hidden.
        if !self.server.is_empty() && !self.exports.has(NAME) {
            let export = second.exported();
            self.exports.add_second(export);
        }
    }

    /// Adds the second volume again after it was closed or could not be opened.
    pub(super) fn supervise_second(&mut self, now: Instant) {
        let due = |second: &Second| second.retry_at.is_some_and(|at| at <= now);
        if self.second.as_ref().is_none_or(|second| !due(second)) || self.client.is_empty() {
            return;
        }
        let is_there = self.second.as_ref().is_some_and(|second| second.is_there);
        let failed = |volume: &rtrs_client::VolumeStatus| volume.device == INDEX && volume.failed;
        if is_there && self.client[0].core.volumes(now).iter().any(failed) {
            self.close_second(now);
        }
        let is_there = is_there && self.second.as_ref().is_some_and(|second| second.is_there);
        let added = !is_there && self.change(now, Change::AddVolume(volume(NAME)));
        let Some(second) = &mut self.second else { return };
        second.is_there |= added;
        // A volume may still fail after it has been added.
        second.retry_at = Some(now + RETRY);
        self.wake_all();
    }

    /// Ensures that the server exports the second volume and that the session has it until the end.
    pub(super) fn calm_second(&mut self) {
        let now = self.now();
        self.show_second();
        if let Some(second) = &mut self.second {
            second.disk.calm(now);
            second.retry_at.get_or_insert(now);
        }
    }

    /// Whether every core has the second volume and every path serves it; true if there is none.
    pub(super) fn is_second_whole(&self) -> bool {
        let Some(second) = &self.second else { return true };
        let served = self.paths().iter().all(|path| path.volumes == 2);
        second.is_there && served && second.works.iter().all(Workload::is_open)
    }

    /// Returns a second volume's number of writes, and how often it was closed with IO in flight.
    pub(in super::super) fn second_counts(&self) -> (u64, u64) {
        let second = self.second.as_ref();
        second.map_or((0, 0), |second| {
            (second.works().map(|work| work.stats.writes).sum(), second.lives)
        })
    }
}
