//! The settings of a run, drawn from its seed: cluster, timing, workload and faults.
//!
//! The draws follow swarm testing: each seed has its own mix, most runs leave out many kinds of
//! faults so that the others occur often, and limits are small so that tables fill up and wrap.

mod extra;
mod follows;
mod hunts;
mod ids;
mod losses;
mod machine;
mod sequences;

use rtrs_client::{Failover, NoPath, PATH_RUN, Policy, SlowIo};
use rtrs_core::fabric::sim::{BindMode, LinkOptions, WorldOptions};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::Duration;

pub(super) use extra::{Extra, IdleMax, Removal, Saves, Truncation};
pub(super) use ids::{Evidence, Ids, ReportedIds, other_identities};
pub(super) use losses::Losses;
pub(super) use machine::MachineOptions;

/// One millisecond.
pub(super) const MS: Duration = Duration::from_millis(1);

/// Heartbeat of a server that does not detect a silent path within a run: a client that reconnects
/// the path must declare the old connection dead.
const DEAF: Duration = Duration::from_secs(60);

/// Settings of one run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed that determines everything else.
    pub seed: u64,
    /// Number of paths between the client and the server.
    pub paths: usize,
    /// Number of client cores.
    pub client_cores: u16,
    /// Number of server cores.
    pub server_cores: u16,
    /// Number of chunks per path.
    pub queue_depth: u16,
    /// Size of a chunk in bytes.
    pub chunk_size: u32,
    /// Path selection policy.
    pub policy: Policy,
    /// Maximum number of consecutive requests on a path.
    pub path_run: u32,
    /// Behavior of the network.
    pub world: WorldOptions,
    /// Whether the server uses a fresh key per request.
    pub always_invalidate: bool,
    /// Maximum time that the server takes to register memory; None if its memory is not pinned.
    pub pinned: Option<Duration>,
    /// Whether the client uses a fresh key per read.
    pub invalidate_reads: bool,
    /// The client's heartbeat interval.
    pub heartbeat: Duration,
    /// The server's heartbeat interval.
    pub server_heartbeat: Duration,
    /// Maximum time that an IO may be in flight.
    pub io_timeout: Duration,
    /// Handling of IO that takes longer than `io_timeout` over a live path.
    pub slow_io: SlowIo,
    /// Handling of IO while no path is up.
    pub no_path: NoPath,
    /// Longest pause of a core between two turns.
    pub think_max: Duration,
    /// Maximum delay of a message between client cores.
    pub message_max: Duration,
    /// Maximum delay of a message between server cores.
    pub server_message_max: Duration,
    /// Time under load.
    pub load_time: Duration,
    /// Workload.
    pub work: WorkOptions,
    /// Backend.
    pub disk: DiskOptions,
    /// Faults.
    pub faults: FaultMix,
    /// Maximum duration of an IO if the first path always works and the backend is fast.
    pub stall_max: Option<Duration>,
    /// Minimum delay before a client that takes over from a killed one repeats unanswered requests,
    /// from their first submission. None if a different user of the export follows instead.
    pub takeover: Option<Duration>,
    /// Whether the workload uses the device through the front end, as the kernel's nbd does.
    pub nbd: bool,
    /// Whether users close their connections with unanswered requests and reconnect immediately.
    pub nbd_drops: bool,
    /// Whether an operator adds and removes paths, and changes the policy.
    pub operated: bool,
    /// Another session that has the export open and flushes it.
    pub guest: Option<Guest>,
    /// Whether other servers sometimes answer at the server's addresses.
    pub other_servers: bool,
    /// Whether durable writes request a flush before them (PREFLUSH), as other clients' writes may.
    pub preflush: bool,
    /// Whether the server writes the data of answered reads again. The data must not reach the
    /// memory of those reads; the path ends with an error.
    pub late_data: bool,
    /// Whether each client that attaches has its own name.
    pub renamed: bool,
    /// Whether another session repeatedly asks to write.
    pub rival: bool,
    /// Failover of a dead path's requests if the client and the server lack our extensions, as with
    /// a kernel peer (no FENCE, no cache epoch).
    pub kernel: Option<Failover>,
    /// Features used only in some of the runs without a hunt, each drawn separately.
    pub extra: Extra,
}

/// Seed modifier that selects the runs with other servers, excluding seeds that failed before such
/// runs existed.
const STRANGERS: u64 = 0x006f_7468_3632;

/// The other session's access to the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// Opens the session's export for reading.
    Reader,
    /// Opens the session's export for writing, in addition to the first writer.
    Writer,
    /// Opens a different export for writing.
    Neighbor,
}

/// Settings of the workload.
#[derive(Clone, Debug)]
pub struct WorkOptions {
    /// Number of sectors on the device.
    pub sectors: u32,
    /// Maximum number of IOs in flight per core.
    pub depth: usize,
    /// Maximum number of sectors per IO.
    pub span_max: u32,
    /// Longest pause between two IOs on a core.
    pub gap_max: Duration,
    /// Share of reads among IOs.
    pub reads: Ratio,
    /// Share of flushes among the other IOs.
    pub flushes: Ratio,
    /// Share of durable writes (FUA) among writes.
    pub fua: Ratio,
    /// Share of writes that leave zeroes: half write zeroes, half are discards.
    pub zeroes: Ratio,
    /// Whether writes in flight may overlap each other.
    pub overlap: bool,
    /// Whether parts of blocks are also written, over NBD.
    pub parts: bool,
    /// Whether the memory of an IO is a list of pieces.
    pub scattered: bool,
    /// Whether writes that failed for lack of a path are immediately repeated with different data.
    pub rewrites: bool,
    /// Maximum number of such repeated writes per core.
    pub rewrites_max: u64,
    /// Maximum total number of IOs on all cores.
    pub ios_max: u64,
}

/// Behavior of the backend.
#[derive(Clone, Copy, Debug)]
pub struct DiskOptions {
    /// Longest duration of an operation that is not slow.
    pub latency_max: Duration,
    /// Share of slow operations.
    pub slow: Ratio,
    /// Longest duration of a slow operation.
    pub slow_max: Duration,
    /// Share of operations that take very long.
    pub stuck: Ratio,
    /// Longest duration of a stuck operation.
    pub stuck_max: Duration,
    /// Share of operations that fail.
    pub errors: Ratio,
    /// Share of writes that are lost during cache writeback; one sync reports the loss.
    pub writeback: Ratio,
    /// Whether a power cut may lose completed writes.
    pub write_cache: bool,
    /// Whether the disk supports FUA.
    pub fua: bool,
    /// Maximum number of IOs in flight per core.
    pub room: usize,
    /// Maximum length of a read or write.
    pub io_max: u32,
    /// Maximum length of a discard or write zeroes.
    pub discard_max: u32,
    /// Block size in bytes.
    pub block: u32,
}

/// Kinds of faults and their frequencies.
#[derive(Clone, Copy, Debug)]
pub struct FaultMix {
    /// Longest pause between two faults.
    pub gap_max: Duration,
    /// Longest duration of a network fault.
    pub lasts_max: Duration,
    /// Longest time without a client after one was killed.
    pub away_max: Duration,
    /// Weight of links going down.
    pub link_down: u32,
    /// Weight of one direction dropping all messages.
    pub silence: u32,
    /// Weight of both directions dropping all messages.
    pub blackhole: u32,
    /// Weight of a slow direction.
    pub slow_path: u32,
    /// Weight of queue pair errors on work requests.
    pub qp_error: u32,
    /// Weight of the server process exiting and restarting.
    pub server_restart: u32,
    /// Weight of the server machine losing power.
    pub power_cut: u32,
    /// Weight of the server being asked to stop, and restarting.
    pub server_stop: u32,
    /// Weight of the client exiting without closing its session, and attaching again.
    pub client_restart: u32,
    /// Weight of a core pausing for a while.
    pub core_stall: u32,
    /// Weight of memory registration failing.
    pub no_memory: u32,
    /// Weight of all paths being given up, with one path up again while requests sent over another
    /// are still arriving.
    pub give_up: u32,
    /// Weight of a client being detached with IO in flight while the next one is running.
    pub client_leave: u32,
    /// Weight of requests arriving very late over one path.
    pub late_requests: u32,
    /// Weight of the server machine losing power while its answers on one path are in transit, and
    /// coming back before they arrive.
    pub late_answers: u32,
    /// Whether network faults never affect the first path.
    pub spare: bool,
}

impl FaultMix {
    /// A mix without faults.
    pub(super) const NONE: Self = Self {
        gap_max: Duration::ZERO,
        lasts_max: Duration::ZERO,
        away_max: Duration::from_millis(300),
        link_down: 0,
        silence: 0,
        blackhole: 0,
        slow_path: 0,
        qp_error: 0,
        server_restart: 0,
        power_cut: 0,
        server_stop: 0,
        client_restart: 0,
        core_stall: 0,
        no_memory: 0,
        give_up: 0,
        client_leave: 0,
        late_requests: 0,
        late_answers: 0,
        spare: false,
    };

    /// Whether the server machine may lose power.
    pub(super) const fn cuts_power(&self) -> bool {
        self.power_cut + self.late_answers > 0
    }

    /// Whether there are no faults.
    pub fn is_empty(&self) -> bool {
        self.weights().iter().sum::<u32>() == 0
    }

    /// Returns the weights in the order of the fields.
    pub(super) const fn weights(&self) -> [u32; 15] {
        [
            self.link_down,
            self.silence,
            self.blackhole,
            self.slow_path,
            self.qp_error,
            self.server_restart,
            self.power_cut,
            self.server_stop,
            self.core_stall,
            self.no_memory,
            self.client_restart,
            self.give_up,
            self.client_leave,
            self.late_requests,
            self.late_answers,
        ]
    }
}

fn pick<T: Clone>(prng: &mut Prng, of: &[T]) -> T {
    of[prng.index(of.len())].clone()
}

fn half(prng: &mut Prng) -> bool {
    prng.chance(Ratio::new(1, 2))
}

impl Options {
    /// Maximum number of sectors that the client reads or writes with one request.
    pub(super) fn part_max(&self) -> u32 {
        (self.chunk_size - 4096) / 512
    }

    /// Draws the settings for a seed.
    pub fn draw(seed: u64) -> Self {
        let mut prng = Prng::new(seed ^ 0x5157_4152_4d5f_3031);
        let prng = &mut prng;
        let paths = pick(prng, &[1, 2, 2, 2, 3, 3]);
        let chunk_size = pick(prng, &[8192, 16384]);
        let heartbeat = pick(prng, &[50, 100, 200]) * MS;
        let us = Duration::from_micros;
        let link = LinkOptions {
            delay: pick(prng, &[us(2), us(10), us(50), us(300)]),
            jitter: pick(prng, &[us(0), us(5), us(50), us(1000)]),
            bandwidth: pick(prng, &[None, None, Some(500_000_000), Some(50_000_000)]),
            detect: pick(prng, &[None, Some(20 * MS), Some(100 * MS), Some(2000 * MS)]),
        };
        let world = WorldOptions {
            acknowledged: half(prng),
            bind: if half(prng) { BindMode::Done } else { BindMode::Pending },
            link,
            buffered_max: pick(prng, &[64 << 10, 4 << 20]),
            ..WorldOptions::default()
        };
        let message_max;
        let mut drawn = Self {
            seed,
            paths,
            client_cores: pick(prng, &[1, 2, 2]),
            server_cores: pick(prng, &[1, 2, 2]),
            queue_depth: pick(prng, &[4, 8, 16, 32]),
            chunk_size,
            policy: pick(prng, &[Policy::RoundRobin, Policy::MinInflight, Policy::MinLatency]),
            // Not drawn, so that older seeds draw everything else as before.
            path_run: if seed.div_ceil(2).is_multiple_of(2) { PATH_RUN } else { 1 },
            world,
            always_invalidate: half(prng),
            // A separate generator, so that older seeds draw everything else as before.
            pinned: match Prng::new(seed ^ 0x7069_6e6e_6564).below(8) {
                0 => Some(Duration::ZERO),
                1 => Some(20 * MS),
                2 => Some(300 * MS),
                _ => None,
            },
            invalidate_reads: half(prng),
            heartbeat,
            server_heartbeat: pick(prng, &[50, 100, 200, 1000]) * MS,
            io_timeout: pick(prng, &[2000, 5000]) * MS,
            slow_io: SlowIo::Wait,
            // A separate generator, so that older seeds draw everything else as before.
            no_path: match Prng::new(seed ^ 0x6e6f_7061_7468).below(16) {
                0 => NoPath::Fail,
                1 => NoPath::QueueFor(200 * MS),
                2 => NoPath::Queue,
                _ => NoPath::QueueFor(Duration::from_secs(60)),
            },
            think_max: {
                let think_max = pick(prng, &[us(0), us(20), us(200)]);
                message_max = pick(prng, &[us(0), us(10), us(200), 3 * MS]);
                think_max
            },
            message_max,
            server_message_max: message_max,
            load_time: pick(prng, &[500, 1000, 2000, 3000]) * MS,
            work: WorkOptions::draw(prng, chunk_size),
            disk: DiskOptions::draw(prng),
            faults: FaultMix::draw(prng, paths),
            stall_max: None,
            takeover: None,
            nbd: Prng::new(seed ^ 0x6e62_645f_6e62_6421).chance(Ratio::new(1, 4)),
            nbd_drops: false,
            // Separate generator, as above.
            operated: Prng::new(seed ^ 0x6f70_6572_6174).chance(Ratio::new(1, 4)),
            guest: None,
            other_servers: false,
            preflush: false,
            late_data: false,
            renamed: false,
            rival: false,
            kernel: None,
            extra: Extra::default(),
        };
        // Seeds that hunt for one kind of bug draw nothing else.
        let mut looks = true;
        if paths > 1 && prng.chance(Ratio::new(1, 6)) {
            drawn.hold_to_time(pick(prng, &[50, 100]) * MS);
        } else if paths > 1 && prng.chance(Ratio::new(1, 5)) {
            drawn.hunt_late_writes(prng);
        } else {
            // A separate generator, so that older seeds draw everything else as before.
            let own = &mut Prng::new(seed ^ 0x6769_7665_5f75_705f);
            if paths > 1 && !drawn.operated && own.chance(Ratio::new(1, 8)) {
                drawn.hunt_given_up_writes(own);
            } else if drawn.faults.client_restart == 0
                && !drawn.operated
                && own.chance(Ratio::new(1, 4))
            {
                drawn.server_heartbeat = DEAF;
                if half(own) {
                    drawn.world.link.detect = None;
                }
            } else {
                looks = false;
            }
        }
        // Separate generator, as above.
        let own = &mut Prng::new(seed ^ 0x7461_6b65_6f76_6572);
        if drawn.faults.client_restart > 0 && own.chance(Ratio::new(2, 3)) {
            drawn.takeover = Some(pick(own, &[0, 20, 200, 1000]) * MS);
            if half(own) {
                drawn.hunt_dead_writes(own);
            }
        } else if !looks && !drawn.operated {
            // Separate generator, as above.
            let own = &mut Prng::new(seed ^ 0x6c61_7465_5f65_7272);
            if own.chance(Ratio::new(1, 3)) {
                drawn.hunt_failed_writes(own);
            } else if paths > 1 && Prng::new(seed ^ 0x6768_6f73_745f_6e62).chance(Ratio::new(1, 3))
            {
                drawn.hunt_dropped_writes(&mut Prng::new(seed ^ 0x6768_6f73_745f_7772));
            }
        }
        // Other runs check IO on which a session gave up, and data lost by a disk.
        let plain = drawn.faults.client_restart == 0 && drawn.faults.power_cut == 0;
        let plain = plain && drawn.stall_max.is_none() && !drawn.path_errors();
        let own = &mut Prng::new(seed ^ 0x6e62_645f_6472_6f70);
        drawn.nbd_drops |= drawn.nbd && plain && half(own);
        let own = &mut Prng::new(seed ^ 0x7772_6974_6562);
        let fits = drawn.disk.write_cache
            && drawn.faults.power_cut > 0
            && drawn.faults.client_restart == 0
            && drawn.stall_max.is_none();
        if fits && own.chance(Ratio::new(1, 2)) {
            drawn.hunt_lost_writes(own);
        } else if drawn.stall_max.is_none() && !drawn.nbd_drops {
            let own = &mut Prng::new(seed ^ STRANGERS);
            if own.chance(Ratio::new(1, 6)) {
                drawn.hunt_other_servers(own);
            }
        }
        let loses = drawn.disk.writeback.num > 0;
        let own = &mut Prng::new(seed ^ 0x6875_6e74_5f6d_7574);
        let free =
            !looks && !drawn.operated && drawn.takeover.is_none() && !loses && !drawn.other_servers;
        if free && !drawn.nbd_drops && own.chance(Ratio::new(1, 6)) {
            match own.below(4) {
                0 => drawn.hunt_left_writes(own),
                1 if paths > 1 => drawn.hunt_unfenced_writes(own),
                2 if paths > 1 => drawn.hunt_kernel_copies(own),
                _ => (drawn.faults, drawn.rival) = (FaultMix::NONE, true),
            }
        }
        let own = &mut Prng::new(seed ^ 0x636f_7665_7265_6421);
        let free = free && drawn.faults.client_leave == 0 && drawn.kernel.is_none();
        let free = free && !drawn.rival && drawn.faults.late_requests == 0 && !drawn.nbd_drops;
        if free && own.chance(Ratio::new(1, 8)) {
            drawn.hunt_covered_writes(own);
        }
        let own = &mut Prng::new(seed ^ 0x6d75_7461_6e74_7332);
        if free && drawn.faults.power_cut == 0 && !drawn.nbd && own.chance(Ratio::new(1, 8)) {
            match own.below(4) {
                0 if paths > 1 => drawn.hunt_old_answers(own),
                1 => drawn.hunt_saved_epoch(own),
                2 => drawn.hunt_reused_buffers(own),
                _ => drawn.hunt_long_requests(own),
            }
        } else if free && paths > 1 && !drawn.nbd && own.chance(Ratio::new(1, 6)) {
            drawn.hunt_rewrites(own);
        }
        let has = |weight: u32, own: &mut Prng| weight > 0 && half(own);
        let late = drawn.invalidate_reads && !drawn.other_servers;
        drawn.late_data |= late && has(drawn.faults.qp_error, own);
        let takes = drawn.disk.fua && drawn.disk.write_cache && !loses;
        drawn.preflush = takes && has(drawn.faults.power_cut, own);
        drawn.draw_additions();
        drawn
    }

    /// Makes it likely that IO fails because no path is left, and that its requests arrive late
    /// over a path that only the client has given up, when another path is up again.
    fn hunt_given_up_writes(&mut self, prng: &mut Prng) {
        (self.heartbeat, self.server_heartbeat) = (50 * MS, DEAF);
        self.no_path = pick(prng, &[NoPath::Fail, NoPath::QueueFor(100 * MS)]);
        self.load_time = 4000 * MS;
        (self.client_cores, self.server_cores) = (2, 2);
        // A core that processes its messages late closes its connections late.
        (self.message_max, self.server_message_max) = (MS / 5, pick(prng, &[50, 200]) * MS);
        self.faults = FaultMix {
            gap_max: pick(prng, &[100, 400]) * MS,
            lasts_max: 700 * MS,
            give_up: 1,
            ..FaultMix::NONE
        };
        let disk = &mut self.disk;
        (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (pick(prng, &[16, 32]), 3 * MS, 2000);
        (work.reads, work.span_max, work.overlap) = (Ratio::new(1, 2), 4, false);
        work.depth = 24;
    }

    /// Makes it likely that a write fails because no path is left, and that newer writes go to the
    /// same sectors before the disk has finished it.
    fn hunt_failed_writes(&mut self, prng: &mut Prng) {
        (self.heartbeat, self.server_heartbeat) = (50 * MS, pick(prng, &[50 * MS, DEAF]));
        self.no_path = pick(prng, &[NoPath::Fail, NoPath::QueueFor(20 * MS)]);
        (self.load_time, self.queue_depth) = (4000 * MS, self.queue_depth.max(16));
        let faults = &mut self.faults;
        *faults = FaultMix { gap_max: 400 * MS, lasts_max: 600 * MS, ..FaultMix::NONE };
        if half(prng) {
            // The path soon comes back.
            self.paths = 1;
            (faults.link_down, faults.silence, faults.blackhole) = (1, 1, 2);
        } else {
            faults.give_up = 1;
        }
        let disk = &mut self.disk;
        (disk.slow, disk.errors, disk.room) = (Ratio::ZERO, Ratio::ZERO, 64);
        (disk.stuck, disk.stuck_max) = (Ratio::new(1, 40), 2000 * MS);
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (pick(prng, &[16, 32]), 3 * MS, 3000);
        (work.reads, work.span_max, work.overlap) = (Ratio::new(1, 2), 4, half(prng));
        work.depth = 24;
    }

    /// Makes it likely that writeback fails while several sessions and cores flush, with a visible
    /// effect: the power fails at the end, if not earlier.
    fn hunt_lost_writes(&mut self, prng: &mut Prng) {
        self.disk.writeback = pick(prng, &[Ratio::new(1, 20), Ratio::new(1, 100)]);
        self.guest = pick(prng, &[None, Some(Guest::Reader), Some(Guest::Writer)]);
        self.server_cores = pick(prng, &[1, 2, 2]);
        self.work.flushes = pick(prng, &[Ratio::new(1, 20), Ratio::new(1, 5)]);
        if half(prng) {
            // Nothing else fails before the end.
            self.faults = FaultMix { gap_max: self.load_time * 4, power_cut: 1, ..FaultMix::NONE };
        }
    }

    /// Makes it likely that a path meets a different server: in place of one that is down, or at an
    /// address that belonged to the session's server, while requests sent there are still
    /// executing.
    fn hunt_other_servers(&mut self, prng: &mut Prng) {
        self.other_servers = true;
        (self.heartbeat, self.load_time) = (50 * MS, self.load_time.max(2000 * MS));
        self.server_heartbeat = pick(prng, &[50, 200, 1000]) * MS;
        let faults = &mut self.faults;
        faults.gap_max = faults.gap_max.clamp(100 * MS, 400 * MS);
        faults.server_restart = pick(prng, &[0, 2, 4]);
        faults.qp_error = pick(prng, &[1, 3]);
        faults.blackhole = pick(prng, &[0, 2]);
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (pick(prng, &[32, 64]), 5 * MS, 800);
    }

    /// Makes it likely that a client dies while its writes execute in the backend, and that the
    /// next client quickly writes to the same sectors.
    fn hunt_dead_writes(&mut self, prng: &mut Prng) {
        (self.heartbeat, self.server_heartbeat) = (50 * MS, 50 * MS);
        self.load_time = 3000 * MS;
        let faults = &mut self.faults;
        *faults = FaultMix { gap_max: 400 * MS, client_restart: 3, ..FaultMix::NONE };
        (faults.silence, faults.qp_error) = (pick(prng, &[0, 1]), pick(prng, &[0, 1]));
        (faults.lasts_max, faults.away_max) = (200 * MS, 5 * MS);
        let disk = &mut self.disk;
        (disk.slow, disk.slow_max) = (Ratio::new(1, 4), 300 * MS);
        (disk.stuck, disk.room) = (Ratio::ZERO, disk.room.max(4));
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (pick(prng, &[16, 32]), 5 * MS, 1000);
        (work.reads, work.span_max, work.overlap) = (Ratio::new(1, 2), 4, false);
        work.depth = 24;
    }

    /// Makes it likely that a write arrives late over a path that the client, but not the server,
    /// has given up, after newer writes have taken another path.
    fn hunt_late_writes(&mut self, prng: &mut Prng) {
        (self.heartbeat, self.server_heartbeat) = (50 * MS, 1000 * MS);
        self.load_time = 3000 * MS;
        let faults = &mut self.faults;
        (faults.silence, faults.blackhole) = (3, 3);
        (faults.server_restart, faults.power_cut, faults.server_stop) = (0, 0, 0);
        (faults.link_down, faults.client_restart) = (0, 0);
        faults.gap_max = pick(prng, &[300, 1000]) * MS;
        (faults.lasts_max, faults.spare) = (2000 * MS, true);
        let work = &mut self.work;
        (work.sectors, work.gap_max, work.ios_max) = (pick(prng, &[32, 64]), 5 * MS, 500);
        work.reads = Ratio::new(1, 2);
    }

    /// Leaves only faults for which another path can compensate, and bounds the duration of IO: two
    /// paths may fall silent one after the other under the same IO.
    fn hold_to_time(&mut self, heartbeat: Duration) {
        // Only the receiving end detects a silent direction.
        (self.heartbeat, self.server_heartbeat) = (heartbeat, heartbeat);
        self.stall_max = Some(heartbeat * 10 + 500 * MS);
        let faults = &mut self.faults;
        (faults.spare, faults.slow_path, faults.qp_error) = (true, 0, 0);
        (faults.server_restart, faults.power_cut, faults.server_stop) = (0, 0, 0);
        (faults.core_stall, faults.client_restart) = (0, 0);
        (faults.silence, faults.blackhole) = (faults.silence.max(1), faults.blackhole.max(1));
        faults.lasts_max = faults.lasts_max.max(3000 * MS);
        (self.disk.slow, self.disk.stuck) = (Ratio::ZERO, Ratio::ZERO);
        self.load_time = 3000 * MS;
    }
}

impl WorkOptions {
    fn draw(prng: &mut Prng, chunk_size: u32) -> Self {
        let one = (chunk_size - 4096) / 512;
        Self {
            sectors: pick(prng, &[32, 64, 128, 256]),
            depth: pick(prng, &[1, 4, 8, 24]),
            span_max: pick(prng, &[1, 8, one, one * 2 + 3]),
            gap_max: pick(prng, &[1, 5, 20]) * MS,
            reads: pick(prng, &[Ratio::new(1, 10), Ratio::new(1, 2), Ratio::new(3, 4)]),
            flushes: pick(prng, &[Ratio::ZERO, Ratio::new(1, 20), Ratio::new(1, 5)]),
            fua: pick(prng, &[Ratio::ZERO, Ratio::new(1, 20), Ratio::new(1, 3)]),
            zeroes: pick(prng, &[Ratio::ZERO, Ratio::ZERO, Ratio::new(1, 5)]),
            overlap: prng.chance(Ratio::new(1, 4)),
            parts: false,
            scattered: false,
            rewrites: false,
            rewrites_max: u64::MAX,
            ios_max: pick(prng, &[100, 250, 500]),
        }
    }
}

impl DiskOptions {
    fn draw(prng: &mut Prng) -> Self {
        let rare = Ratio::new(1, 200);
        Self {
            latency_max: Duration::from_micros(pick(prng, &[1, 50, 500])),
            slow: pick(prng, &[Ratio::ZERO, Ratio::ZERO, Ratio::new(1, 50), Ratio::new(1, 4)]),
            slow_max: pick(prng, &[5, 50, 300]) * MS,
            stuck: pick(prng, &[Ratio::ZERO, Ratio::ZERO, rare]),
            stuck_max: pick(prng, &[1000, 4000]) * MS,
            errors: pick(prng, &[Ratio::ZERO, Ratio::ZERO, Ratio::ZERO, Ratio::new(1, 50)]),
            writeback: Ratio::ZERO,
            write_cache: prng.chance(Ratio::new(3, 4)),
            fua: half(prng),
            room: pick(prng, &[1, 4, 64]),
            io_max: pick(prng, &[4096, 1 << 20, 1 << 20]),
            discard_max: pick(prng, &[4096, 1 << 20]),
            block: 512,
        }
    }
}

impl FaultMix {
    fn draw(prng: &mut Prng, paths: usize) -> Self {
        // One run in ten has no faults at all.
        let none = prng.chance(Ratio::new(1, 10));
        let mut weight = || if none || half(prng) { 0 } else { pick(prng, &[1, 3]) };
        let (link_down, silence, blackhole) = (weight(), weight(), weight());
        let (slow_path, qp_error, server_restart) = (weight(), weight(), weight());
        let (power_cut, server_stop, core_stall) = (weight(), weight(), weight());
        let (no_memory, client_restart) = (weight(), weight());
        Self {
            gap_max: pick(prng, &[50, 200, 600]) * MS,
            lasts_max: pick(prng, &[20, 200, 1000]) * MS,
            away_max: 300 * MS,
            link_down,
            silence,
            blackhole,
            slow_path,
            qp_error,
            server_restart,
            power_cut,
            server_stop,
            client_restart,
            core_stall,
            no_memory,
            spare: paths > 1 && half(prng),
            ..Self::NONE
        }
    }
}
