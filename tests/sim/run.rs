//! Runs a seed: attach, run the load under faults, wait until nothing is in flight, read everything
//! back, cut the power and read again if the faults include power cuts, detach, and check that all
//! resources were returned.

use serde::Serialize;

use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant};

use super::cluster::Cluster;
use super::faults::{
    Act, grow, moves, operate, plan, reconnects, remove, report_ids, second, truncate, twins,
};
use super::log::{Log, Sink};
use super::options::{MS, Options};
use super::workload::Mode;
use super::{Failure, Plant};

/// Maximum time for attaching, without faults.
pub(super) const ATTACH_MAX: Duration = Duration::from_secs(5);
/// Maximum time from the last fault until all IO is done and all paths are up. The slowest of many
/// thousands of seeds took 4 s. The time consists of:
/// - up to four one-second heartbeats until a server detects a silent path;
/// - in a client's attempt, 1 s for each connection and 1 s for the INFO exchange;
/// - four heartbeats until the client detects that the server is silent while the client opens the
///   device;
/// - at most half a second until the client's next attempt.
const LIVE_MAX: Duration = Duration::from_secs(10);
/// Time without faults after which no IO may fail for lack of a path.
const WELL: Duration = Duration::from_secs(3);
/// Time after the last IO in which messages may still be in transit.
const REST: Duration = Duration::from_millis(200);
/// Maximum time for detaching.
const DETACH_MAX: Duration = Duration::from_secs(10);

/// Counters for a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Completed reads.
    pub reads: u64,
    /// Completed writes.
    pub writes: u64,
    /// Completed flushes.
    pub flushes: u64,
    /// IOs that ended with an error.
    pub io_errors: u64,
    /// IOs repeated by a client that took over from a dead one.
    pub taken_over: u64,
    /// Flushes that reported writes lost in a power cut.
    pub losses_reported: u64,
    /// Longest IO in virtual milliseconds.
    pub io_ms_max: u64,
    /// Actions in the fault plan.
    pub faults: u64,
    /// Resent requests that the server held until the original completed, in the held-write
    /// scenario.
    pub replays: u64,
    /// Writes that the server held behind a failed write, in the held-write scenario.
    pub blocked: u64,
    /// Queue pairs that a fault put into the error state.
    pub qp_errors: u64,
    /// Reconnects of paths.
    pub reconnects: u64,
    /// Operations of the backend.
    pub backend_ops: u64,
    /// Backend operations that failed.
    pub backend_errors: u64,
    /// Backend operations that hung temporarily.
    pub backend_stuck: u64,
    /// Backend operations that took longer than the client waits for an answer.
    pub backend_late: u64,
    /// Backend operations that failed because the backing file had been truncated.
    pub backend_beyond: u64,
    /// IOs that failed because the backing file had been truncated.
    pub io_beyond: u64,
    /// IOs that failed because their export had been removed.
    pub io_removed: u64,
    /// Slow saves of epochs.
    pub late_saves: u64,
    /// Servers that ended during a slow save.
    pub cut_saves: u64,
    /// Writes of a second session.
    pub guest_writes: u64,
    /// Writes to a second volume of the session.
    pub second_writes: u64,
    /// Number of times a second volume was closed with IO in flight and added again.
    pub second_lives: u64,
    /// Clients that died partway through a virtual machine's request.
    pub torn: u64,
    /// Requests of a virtual machine that a dead client left unanswered.
    pub left: u64,
    /// Power cuts.
    pub power_cuts: u64,
    /// Events in the log.
    pub events: u64,
    /// Virtual time in milliseconds.
    pub virtual_ms: u64,
    /// Virtual milliseconds from the last fault until all IO is done and all paths are up.
    pub recovery_ms: u64,
}

impl Stats {
    /// Adds another run's counters; for `io_ms_max` and `recovery_ms`, keeps the larger value.
    pub fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.flushes += other.flushes;
        self.io_errors += other.io_errors;
        self.taken_over += other.taken_over;
        self.losses_reported += other.losses_reported;
        self.io_ms_max = self.io_ms_max.max(other.io_ms_max);
        self.faults += other.faults;
        self.replays += other.replays;
        self.blocked += other.blocked;
        self.qp_errors += other.qp_errors;
        self.reconnects += other.reconnects;
        self.backend_ops += other.backend_ops;
        self.backend_errors += other.backend_errors;
        self.backend_stuck += other.backend_stuck;
        self.backend_late += other.backend_late;
        self.backend_beyond += other.backend_beyond;
        self.io_beyond += other.io_beyond;
        self.io_removed += other.io_removed;
        self.late_saves += other.late_saves;
        self.cut_saves += other.cut_saves;
        self.guest_writes += other.guest_writes;
        self.second_writes += other.second_writes;
        self.second_lives += other.second_lives;
        self.torn += other.torn;
        self.left += other.left;
        self.power_cuts += other.power_cuts;
        self.events += other.events;
        self.virtual_ms += other.virtual_ms;
        self.recovery_ms = self.recovery_ms.max(other.recovery_ms);
    }
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Violation that a checker found, if any.
    pub failure: Option<Failure>,
    /// Counters for the run.
    pub stats: Stats,
    /// Fingerprint, equal for two runs with the same events at the same times.
    pub fingerprint: u64,
}

/// Runs the simulation with a seed.
pub fn run(seed: u64) -> Outcome {
    run_with(&Options::draw(seed), Plant::None, None)
}

/// Runs the scenario of a virtual machine whose client dies and returns.
pub fn run_machine(seed: u64, sink: Option<Sink>) -> Outcome {
    run_with(&Options::draw_machine(seed), Plant::None, sink)
}

/// Runs with these options, a planted bug and a receiver for the log.
pub fn run_with(options: &Options, plant: Plant, sink: Option<Sink>) -> Outcome {
    let log = Log::new(sink);
    let mut cluster = Cluster::new(options, plant, &log);
    let mut stats = Stats::default();
    let failure = drive(&mut cluster, options, plant, &log, &mut stats).err();
    let now = cluster.now();
    if let Some(failure) = &failure {
        log.event(now, "FAILURE", [0, 0], || format!("{}: {}", failure.checker, failure.text));
    }
    for work in cluster.workloads() {
        stats.reads += work.stats.reads;
        stats.writes += work.stats.writes;
        stats.flushes += work.stats.flushes;
        stats.io_errors += work.stats.errors;
        stats.taken_over += work.stats.again;
        stats.losses_reported += work.stats.losses_reported;
        stats.io_beyond += work.stats.beyond;
        stats.io_removed += work.stats.removed;
        stats.io_ms_max = stats.io_ms_max.max(work.stats.time_max.as_millis() as u64);
    }
    let disk = cluster.disk.stats();
    stats.faults = cluster.faults;
    stats.qp_errors = cluster.qp_errors();
    stats.reconnects = cluster.paths().iter().map(|path| path.reconnects).sum();
    (stats.backend_ops, stats.backend_errors) = (disk.ops, disk.errors);
    (stats.backend_stuck, stats.power_cuts) = (disk.stuck, disk.cuts);
    (stats.backend_late, stats.backend_beyond) = (disk.late, disk.beyond);
    (stats.late_saves, stats.cut_saves) = cluster.saves();
    stats.guest_writes = cluster.guest_writes();
    (stats.second_writes, stats.second_lives) = cluster.second_counts();
    let machine = cluster.machine_stats();
    (stats.torn, stats.left) = (machine.torn, machine.left);
    stats.events = log.events();
    stats.virtual_ms = now.as_nanos() / 1_000_000;
    Outcome { failure, stats, fingerprint: log.fingerprint() }
}

fn drive(
    cluster: &mut Cluster,
    options: &Options,
    plant: Plant,
    log: &Log,
    stats: &mut Stats,
) -> Result<(), Failure> {
    let log_phase = |cluster: &Cluster, what: &'static str| {
        log.event(cluster.now(), "phase", [0, 0], || what.to_owned());
    };
    log_phase(cluster, "attach");
    if !cluster.run_until(cluster.now() + ATTACH_MAX, Cluster::is_whole)? {
        return Err(not_live(cluster, "attaching did not end", ATTACH_MAX));
    }

    log_phase(cluster, "load");
    let mut prng = Prng::new(options.seed ^ 0x6661_756c_7473);
    let (from, until) = (cluster.now(), cluster.now() + options.load_time);
    let links = cluster.links();
    let mut acts = plan(&options.faults, &links, &options.world.link, from, until, &mut prng);
    if options.operated {
        // The operator's changes spare the path that always works.
        let paths = usize::from(options.keeps_first_path())..options.paths;
        acts.extend(operate(paths, from, until, &mut prng));
        acts.sort_by_key(|&(at, _)| at);
    }
    if options.other_servers {
        let own = &mut Prng::new(options.seed ^ 0x6d6f_7665_735f);
        acts.extend(moves(options.paths, from, until, own));
        acts.sort_by_key(|&(at, _)| at);
    }
    if let Some(ids) = options.extra.ids {
        let own = &mut Prng::new(options.seed ^ 0x7361_795f_6964);
        acts.extend(report_ids(ids, from, options.load_time, own));
        acts.sort_by_key(|&(at, _)| at);
    }
    if options.extra.resizes {
        let own = &mut Prng::new(options.seed ^ 0x6772_6f77_735f);
        acts.extend(grow(from, options.load_time, own));
        acts.sort_by_key(|&(at, _)| at);
    }
    if options.nbd_drops {
        let own = &mut Prng::new(options.seed ^ 0x7265_636f_6e6e);
        acts.extend(reconnects(usize::from(options.client_cores), from, until, own));
        acts.sort_by_key(|&(at, _)| at);
    }
    if let Some(truncation) = options.extra.truncation {
        let own = &mut Prng::new(options.seed ^ 0x6375_745f_6669_6c65);
        let (sectors, time) = (options.work.sectors, options.load_time);
        acts.extend(truncate(truncation, sectors, from, time, own));
        acts.sort_by_key(|&(at, _)| at);
    }
    if let Some(removal) = options.extra.removal {
        let own = &mut Prng::new(options.seed ^ 0x7265_6d6f_7665_6421);
        acts.extend(remove(removal, &links, from, options.load_time, own));
        acts.sort_by_key(|&(at, _)| at);
    }
    if options.extra.twin {
        let own = &mut Prng::new(options.seed ^ 0x7477_696e_735f_6f66);
        acts.extend(twins(&links, from, options.load_time, own));
        acts.sort_by_key(|&(at, _)| at);
    }
    if options.extra.second {
        let own = &mut Prng::new(options.seed ^ 0x7365_636f_6e64_5f21);
        acts.extend(second(from, options.load_time, own));
        acts.sort_by_key(|&(at, _)| at);
    }
    cluster.set_plan(acts);
    if options.rival {
        cluster.start_rival();
    }
    cluster.set_mode(Mode::Load);
    cluster.run_until(until, |cluster| {
        options.is_quiet() && cluster.workloads().all(|work| work.is_idle())
    })?;

    log_phase(cluster, "faults stop");
    cluster.set_mode(Mode::Rest);
    cluster.calm();
    if plant == Plant::DeadLink {
        cluster.kill_link()?;
    }
    cluster.follow_removed()?;
    let stopped = cluster.now();
    wait_live(cluster, "after the faults stopped")?;
    stats.recovery_ms = cluster.now().since(stopped).as_millis() as u64;
    cluster.check_pinned()?;
    rest(cluster)?;

    log_phase(cluster, "read back");
    for core in 0..2 {
        cluster.read_back(core);
        wait_live(cluster, "reading everything back")?;
    }

    if options.faults.cuts_power() {
        log_phase(cluster, "last power cut");
        cluster.act(Act::StopServer { power: true })?;
        cluster.run_until(cluster.now() + 20 * MS, |_| false)?;
        cluster.act(Act::StartServer)?;
        // The session detects the cut by heartbeats and then recovers.
        cluster.run_until(cluster.now() + 10 * options.heartbeat, |_| false)?;
        wait_live(cluster, "after the last power cut")?;
        for core in 0..2 {
            cluster.read_back(core);
            wait_live(cluster, "reading everything back once more")?;
        }
    }
    if options.path_errors() {
        log_phase(cluster, "all is well");
        cluster.run_until(cluster.now() + WELL, |_| false)?;
        wait_live(cluster, "when all is well")?;
        cluster.expect_no_errors();
        for core in 0..2 {
            cluster.read_back(core);
            wait_live(cluster, "reading everything back when all is well")?;
        }
    }
    cluster.check()?;
    let left = cluster.left_at_client();
    if left != (0, 0) {
        let text = format!("with nothing in flight the client still has IOs and permits: {left:?}");
        return Err(Failure::new("home", text));
    }

    log_phase(cluster, "detach");
    cluster.detach();
    if !cluster.run_until(cluster.now() + DETACH_MAX, Cluster::is_done)? {
        return Err(not_live(cluster, "detaching did not end", DETACH_MAX));
    }
    // The server uses heartbeats to detect a link that died silently just before.
    let end = cluster.now() + DETACH_MAX + 5 * options.server_heartbeat;
    let empty = |cluster: &Cluster| {
        cluster.left_at_server() == (0, 0, 0, 0) && cluster.registered() == (0, 0)
    };
    if !cluster.run_until(end, empty)? {
        let left = cluster.left_at_server();
        if left != (0, 0, 0, 0) {
            let text = format!(
                "after detach the server has sessions, connections, requests and block IO left: \
                 {left:?}"
            );
            return Err(Failure::new("home", text));
        }
        let text = format!(
            "after detach client and server have {:?} bytes registered",
            cluster.registered()
        );
        return Err(Failure::new("memory", text));
    }
    cluster.check()
}

/// Lets messages in transit arrive. After that, failed writes have either taken effect or never
/// will.
fn rest(cluster: &mut Cluster) -> Result<(), Failure> {
    let at_least: Instant = cluster.now() + REST;
    cluster.run_until(at_least, |_| false)?;
    let bound = cluster.now() + LIVE_MAX;
    let idle = |cluster: &Cluster| {
        let (_, _, requests, block) = cluster.left_at_server();
        // Requests left by closed NBD connections are in flight without a workload.
        (requests, block) == (0, 0) && cluster.left_at_client().0 == 0
    };
    if !cluster.run_until(bound, idle)? {
        let (_, _, requests, block) = cluster.left_at_server();
        let text = format!(
            "with nothing in flight at the client the server still has {requests} requests and \
             {block} block IOs after {} s",
            LIVE_MAX.as_secs()
        );
        return Err(Failure::new("home", text));
    }
    cluster.oracle.dropped_are_over();
    cluster.settle_all();
    Ok(())
}

pub(super) fn wait_live(cluster: &mut Cluster, when: &str) -> Result<(), Failure> {
    let bound = cluster.now() + LIVE_MAX;
    let live =
        |cluster: &Cluster| cluster.is_whole() && cluster.workloads().all(|work| work.is_idle());
    if cluster.run_until(bound, live)? {
        return Ok(());
    }
    Err(not_live(cluster, when, LIVE_MAX))
}

pub(super) fn not_live(cluster: &Cluster, what: &str, bound: Duration) -> Failure {
    let now = cluster.now();
    let mut text = format!("{what}: not done within {} s", bound.as_secs());
    if let Some(why) = cluster.gave_up() {
        text += &format!("; the session gave up: {why}");
    }
    for (at, path) in cluster.paths().into_iter().enumerate() {
        if !path.is_connected() {
            let why = path.last_error().unwrap_or_default();
            text += &format!("; path {at} is {}: {why}", path.state_name());
        }
    }
    text += &cluster.other_sizes();
    for work in cluster.workloads() {
        if let Some(oldest) = work.oldest(now) {
            text += &format!("; {} in flight, oldest {oldest}", work.inflight());
        }
    }
    Failure::new("live", text)
}
