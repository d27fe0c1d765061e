//! Additions to a share of the runs that do not hunt for anything specific: a disk slower than
//! `io-timeout`, a backing file that is truncated, a device that grows and shrinks, epochs that are
//! saved late, a second session that writes, an export that is removed by force, a front end that
//! sends requests for parts of blocks, a second volume, or rate limits.
//!
//! Each addition is drawn by a separate generator, so runs that hunt for something do not change.

use rtrs_client::{NoPath, SlowIo};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::Duration;
use rtrs_server::RateLimits;

use super::{FaultMix, Guest, Ids, Losses, MS, MachineOptions, Options, half, pick};

// Chosen so that seeds kept because they found bugs still produce the same runs.
const LATE_DISK: u64 = 0x6c61_7465_5f64_7361;
const SLOW_IO: u64 = 0x736c_6f77_5f69_6f5f;
const TRUNCATION: u64 = 0x7472_756e_6361_7465;
const GUEST_WRITES: u64 = 0x6775_6573_745f_7770;
const LATE_SAVES: u64 = 0x6c61_7465_7361_7666;
const GUEST_LOSSES: u64 = 0x6775_6573_745f_6c71;
const RESIZES: u64 = 0x7265_7369_7a65_735f;
const REMOVAL: u64 = 0x7265_6d6f_7661_6c5f;
const PARTS: u64 = 0x7061_7274_735f_6f66;
const SECOND: u64 = 0x7365_636f_7475_7a61;
const PIECES: u64 = 0x7069_6563_6573_6f66;
const LIMITS: u64 = 0x7261_7465_7361_7a72;
const MIXED: u64 = 0x6d69_7865_645f_7772;

/// Additions to a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extra {
    /// Whether backend operations take longer than the client waits for an answer.
    pub late_disk: bool,
    /// Truncation of the backing file while it is exported.
    pub truncation: Option<Truncation>,
    /// Whether the device is resized; all sizes include the sectors in use.
    pub resizes: bool,
    /// Forced removal of the session's export.
    pub removal: Option<Removal>,
    /// Slow saves of an export's epoch on the server.
    pub saves: Option<Saves>,
    /// Whether the second session writes to its own sectors, after those of the workloads.
    pub guest_writes: bool,
    /// Whether both sessions change parts of a block that contains sectors of both.
    pub mixed: bool,
    /// Whether the server has memory for half of a path's chunks, so that sessions are granted half
    /// the depth.
    pub little_memory: bool,
    /// Whether the session has a second volume.
    pub second: bool,
    /// Whether two server processes can write to the disk.
    pub unlocked: bool,
    /// Whether the server reports its identity although no other servers appear.
    pub named: bool,
    /// Whether two such processes sometimes run together, each with its own address.
    pub twin: bool,
    /// Reported identities, in runs with other servers. By default the session's server reports
    /// both IDs, and the others report different ones.
    pub ids: Option<Ids>,
    /// Heartbeat intervals of idle paths.
    pub idle: IdleMax,
    /// Ways in which losses are caused and noticed.
    pub losses: Losses,
    /// Rate limits of the session's export.
    pub limits: RateLimits,
    /// Virtual machine that uses the device, in runs of its own.
    pub machine: Option<MachineOptions>,
}

/// Maximum time between two heartbeats of an idle path; zero means a constant interval.
#[derive(Clone, Copy, Debug)]
pub struct IdleMax {
    /// Maximum in the client's settings.
    pub client: Duration,
    /// Maximum that the server accepts.
    pub server: Duration,
}

impl Default for IdleMax {
    fn default() -> Self {
        Self { client: Duration::from_secs(2), server: Duration::from_secs(30) }
    }
}

/// Course of a truncation of the backing file.
#[derive(Clone, Copy, Debug)]
pub struct Truncation {
    /// Whether the file is restored to its old length and the server is restarted.
    pub regained: bool,
    /// Whether the server also starts while the file is short, and exports what is left.
    pub short_export: bool,
}

/// Circumstances of the removal of an export.
#[derive(Clone, Copy, Debug)]
pub struct Removal {
    /// Whether a different disk is exported under the export's name.
    pub has_heir: bool,
    /// Whether all paths are down at that time.
    pub unseen: bool,
}

/// Behavior of epoch saves.
#[derive(Clone, Copy, Debug)]
pub struct Saves {
    /// Maximum duration of a save.
    pub time_max: Duration,
    /// Time for which half of the saves hang.
    pub hang: Option<Duration>,
    /// Whether the server may be killed during a save.
    pub kills: bool,
    /// Whether saves fail and leave torn data.
    pub fails: bool,
}

impl Options {
    /// Draws the additions.
    pub(super) fn draw_extra(&mut self) {
        if self.other_servers {
            return self.draw_ids();
        }
        let seed = self.seed;
        self.draw_memory();
        self.draw_pieces();
        let own = &mut Prng::new(seed ^ LIMITS);
        if self.is_ordinary() && own.chance(Ratio::new(1, 16)) {
            self.add_limits(own);
        }
        let own = &mut Prng::new(seed ^ LATE_DISK);
        if self.is_ordinary() && own.chance(Ratio::new(1, 8)) {
            self.add_late_disk(own);
            let own = &mut Prng::new(seed ^ SLOW_IO);
            if half(own) {
                self.add_hanging_disk(own);
            }
            return;
        }
        let own = &mut Prng::new(seed ^ TRUNCATION);
        if self.is_ordinary() && own.chance(Ratio::new(1, 8)) {
            return self.add_truncation(own);
        }
        let own = &mut Prng::new(seed ^ RESIZES);
        if self.is_ordinary() && own.chance(Ratio::new(1, 8)) {
            self.extra.resizes = true;
            if half(own) {
                // No path may learn the size by reconnecting.
                self.faults = FaultMix { gap_max: self.load_time * 4, ..FaultMix::NONE };
                self.operated = false;
            }
            return;
        }
        let own = &mut Prng::new(seed ^ REMOVAL);
        if self.is_ordinary() && own.chance(Ratio::new(1, 4)) {
            return self.add_removal(own);
        }
        let own = &mut Prng::new(seed ^ PARTS);
        // No run checks writes that fail partially.
        let whole = self.disk.errors == Ratio::ZERO && !self.path_errors();
        let stays = self.faults.client_restart + self.faults.power_cut == 0;
        if self.is_ordinary() && self.nbd && whole && stays && half(own) {
            (self.work.parts, self.work.overlap) = (true, false);
        }
        let own = &mut Prng::new(seed ^ GUEST_WRITES);
        let ordinary = self.is_ordinary() && !self.extra.little_memory;
        let alone = self.faults.client_restart == 0 && ordinary;
        if alone && own.chance(Ratio::new(1, 8)) {
            self.guest = Some(Guest::Writer);
            self.extra.guest_writes = true;
            let own = &mut Prng::new(seed ^ MIXED);
            if whole && stays && own.chance(Ratio::new(3, 4)) {
                self.add_mixed_writers(own);
            }
        }
        let own = &mut Prng::new(seed ^ SECOND);
        if self.is_ordinary() && own.chance(Ratio::new(1, 3)) {
            self.extra.second = true;
            self.work.ios_max = self.work.ios_max.max(250);
        }
        let loses = self.disk.writeback.num > 0;
        let own = &mut Prng::new(seed ^ LATE_SAVES);
        if loses && half(own) {
            self.extra.saves = Some(Saves {
                time_max: pick(own, &[5, 100, 300]) * MS,
                hang: pick(own, &[None, Some(6000 * MS)]),
                kills: own.chance(Ratio::new(3, 4)),
                fails: false,
            });
            if half(own) {
                // Losses are reported only by flushes.
                self.work.flushes = Ratio::new(1, 20);
                self.faults =
                    FaultMix { gap_max: self.load_time * 4, power_cut: 1, ..FaultMix::NONE };
            }
            let fails = !half(own);
            self.extra.saves.iter_mut().for_each(|saves| saves.fails = fails);
        }
        let own = &mut Prng::new(seed ^ GUEST_LOSSES);
        let writer = self.guest == Some(Guest::Writer);
        self.extra.guest_writes |= loses && writer && half(own);
    }

    /// Gives the server little memory in runs that have one session at a time, only one path (there
    /// is no memory for more), and twice the minimum depth that a server grants.
    fn draw_memory(&mut self) {
        let Self { faults, guest, kernel, rival, .. } = self;
        let others = faults.client_restart + faults.client_leave > 0 || *rival;
        let alone = !others && guest.is_none() && kernel.is_none();
        self.extra.little_memory = alone && self.queue_depth == 32 && self.paths == 1;
    }

    /// Makes each IO's memory a list of pieces, which the client's fabric may or may not be able to
    /// reach. Data that arrives late goes to memory that other IO reuses, so no bounce memory hides
    /// it.
    fn draw_pieces(&mut self) {
        let own = &mut Prng::new(self.seed ^ PIECES);
        self.work.scattered = own.chance(Ratio::new(1, 4));
        self.world.bounces = self.work.scattered && !self.late_data && half(own);
    }

    /// Whether the run is not a hunt, judging by the settings that hunts change.
    pub(super) fn is_ordinary(&self) -> bool {
        let Self { faults, work, .. } = self;
        let hunted = faults.give_up + faults.client_leave + faults.late_requests > 0
            || faults.away_max != 300 * MS
            || (faults.spare && faults.lasts_max == 2000 * MS)
            || self.disk.writeback.num > 0
            || self.load_time > 3000 * MS
            || self.world.revoke_max.is_some()
            || work.sectors > 256
            || work.rewrites;
        let beside = self.other_servers || self.rival || self.guest.is_some() || self.nbd_drops;
        !hunted && !beside && self.stall_max.is_none() && self.kernel.is_none()
    }

    /// Makes it likely that a path dies while the backend is slow, that its requests go to another
    /// path while their first copies are still executing, and that writes that failed for this
    /// reason, or because the disk took too long, are repeated.
    fn add_late_disk(&mut self, prng: &mut Prng) {
        self.extra.late_disk = true;
        self.io_timeout = pick(prng, &[100, 400]) * MS;
        let sixty = NoPath::QueueFor(Duration::from_secs(60));
        self.no_path = pick(prng, &[NoPath::QueueFor(50 * MS), sixty]);
        self.load_time = self.load_time.max(2000 * MS);
        let disk = &mut self.disk;
        (disk.slow, disk.slow_max) = (pick(prng, &[Ratio::new(1, 20), Ratio::new(1, 4)]), 600 * MS);
        (disk.stuck, disk.stuck_max) = (Ratio::new(1, 50), pick(prng, &[600, 2000]) * MS);
        disk.room = disk.room.max(4);
        let work = &mut self.work;
        (work.sectors, work.gap_max) = (pick(prng, &[16, 32, 64]), 5 * MS);
        (work.span_max, work.reads) = (pick(prng, &[4, 8]), Ratio::new(1, 2));
        (work.rewrites, work.rewrites_max) = (half(prng), 300);
        work.ios_max = 1000;
    }

    /// Makes it likely that the front end gives up on a write while the backend is running it and
    /// its path is up, and that the write is repeated immediately, over any connection.
    fn add_hanging_disk(&mut self, prng: &mut Prng) {
        (self.slow_io, self.nbd, self.pinned) = (SlowIo::Fail, true, None);
        (self.io_timeout, self.load_time) = (pick(prng, &[100, 300]) * MS, 6000 * MS);
        self.queue_depth = self.queue_depth.max(16);
        let disk = &mut self.disk;
        disk.slow = Ratio::ZERO;
        (disk.stuck, disk.stuck_max) = (Ratio::new(1, 16), pick(prng, &[1500, 3000]) * MS);
        let work = &mut self.work;
        (work.depth, work.gap_max) = (pick(prng, &[8, 24]), 20 * MS);
        (work.rewrites, work.overlap) = (true, false);
        if half(prng) {
            // The paths have no faults.
            self.faults = FaultMix { gap_max: self.load_time * 4, ..FaultMix::NONE };
        }
    }

    /// Makes requests wait on the server while paths, sessions and processes end.
    fn add_limits(&mut self, prng: &mut Prng) {
        self.extra.limits = RateLimits {
            iops: pick(prng, &[Some(500), Some(2000)]),
            iops_write: pick(prng, &[None, Some(300)]),
            bandwidth: pick(prng, &[None, Some(4 << 20)]),
            burst_ms: pick(prng, &[10, 100]),
            ..RateLimits::default()
        };
    }

    /// Makes blocks larger than sectors, so that the sectors of the second session begin within a
    /// block.
    fn add_mixed_writers(&mut self, prng: &mut Prng) {
        self.extra.mixed = true;
        (self.nbd, self.pinned) = (true, None);
        let Self { disk, work, .. } = self;
        (disk.block, disk.latency_max) = (4096, MS / 2);
        (disk.slow, disk.slow_max) = (Ratio::new(1, 8), 5 * MS);
        (work.parts, work.overlap) = (true, false);
        // The front end skips discards of partial blocks, and no checker knows about that.
        work.zeroes = Ratio::ZERO;
        (work.sectors, work.span_max) = (pick(prng, &[4, 12]), 8);
        (work.gap_max, work.ios_max) = (MS, 500);
    }

    /// Undoes `add_mixed_writers`, for runs whose requests do not all come from the workloads.
    pub(in super::super) fn unmix(&mut self) {
        if std::mem::take(&mut self.extra.mixed) {
            (self.disk.block, self.work.parts, self.work.sectors) = (512, false, 64);
        }
    }

    /// Removes the export in runs with one session at a time and one server: a restarted server
    /// would export it again, as configured.
    fn add_removal(&mut self, prng: &mut Prng) {
        self.extra.removal = Some(Removal { has_heir: half(prng), unseen: half(prng) });
        (self.guest, self.extra.guest_writes) = (Some(Guest::Neighbor), true);
        let faults = &mut self.faults;
        (faults.server_restart, faults.power_cut, faults.server_stop) = (0, 0, 0);
        (faults.client_restart, self.takeover) = (0, None);
        // The server detects dead paths in time to release their resources.
        self.server_heartbeat = self.server_heartbeat.min(1000 * MS);
        self.extra.little_memory = false;
        self.work.ios_max = self.work.ios_max.max(500);
    }

    /// Truncates the backing file in runs without other causes of failures. There is no guarantee
    /// that a shorter file survives a power cut.
    fn add_truncation(&mut self, prng: &mut Prng) {
        let (regained, short_export) = pick(prng, &[(false, false), (true, false), (true, true)]);
        self.extra.truncation = Some(Truncation { regained, short_export });
        let faults = &mut self.faults;
        (faults.server_restart, faults.power_cut, faults.server_stop) = (0, 0, 0);
        (faults.client_restart, self.takeover) = (0, None);
        (self.disk.errors, self.load_time) = (Ratio::ZERO, self.load_time.max(1000 * MS));
        self.work.ios_max = self.work.ios_max.max(250);
    }
}
