//! Scenario with equal paths under steady load and a stall: a core that is not running, a path that
//! is slow for a time, a disk that is stuck, or memory whose registration blocks a core of the
//! server on the first request of each path. From one second after the stall, each path again
//! carries its share on each core: within 20 % of the others' shares, measured over one second.
//!
//! The policies are round-robin and min-inflight. With min-latency, one path carries everything by
//! design.

use rtrs_client::{NoPath, Policy};
use rtrs_core::fabric::sim::{Fault, LinkOptions};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant};
use rtrs_server::RateLimits;

use super::cluster::Cluster;
use super::faults::Act;
use super::log::{Log, Sink};
use super::options::{FaultMix, MS, Options};
use super::run::{ATTACH_MAX, Outcome, Stats, not_live, wait_live};
use super::workload::Mode;
use super::{Failure, Plant};

/// Time for which shares may differ after a stall, and over which they are then measured.
const SETTLE: Duration = Duration::from_secs(1);
const COUNTED: Duration = Duration::from_secs(1);
/// Maximum difference between a share and the largest one, in percent.
const DIFFERENCE_PERCENT: u64 = 20;
/// Minimum number of requests on a core for its shares to be compared.
const REQUESTS_MIN: u64 = 100;

fn settings(seed: u64, prng: &mut Prng) -> Options {
    let mut options = Options::draw(seed);
    options.paths = options.paths.max(2);
    options.policy = [Policy::RoundRobin, Policy::MinInflight][prng.index(2)];
    options.no_path = NoPath::QueueFor(Duration::from_secs(60));
    options.io_timeout = Duration::from_secs(30);
    // A stall must not end a path.
    (options.heartbeat, options.server_heartbeat) = (2000 * MS, 2000 * MS);
    (options.faults, options.stall_max) = (FaultMix::NONE, None);
    (options.pinned, options.operated, options.takeover) = (None, false, None);
    (options.other_servers, options.late_data, options.rival) = (false, false, false);
    options.unmix();
    // A user that stops in the middle of a payload submits little.
    options.extra.losses.stalls = false;
    // Rate limits, not the paths, would determine the load.
    options.extra.limits = RateLimits::default();
    options.guest = None;
    options.queue_depth = options.queue_depth.max(16);
    let link = &mut options.world.link;
    (link.bandwidth, link.jitter) = (None, link.jitter.min(MS / 20));
    let disk = &mut options.disk;
    (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
    (disk.room, disk.io_max) = (64, 1 << 20);
    let work = &mut options.work;
    (work.sectors, work.span_max, work.overlap) = (256, 8, false);
    (work.gap_max, work.ios_max) = (4 * MS, u64::MAX);
    options
}

/// Runs the scenario.
pub fn run_shares(seed: u64, plant: Plant, sink: Option<Sink>) -> Outcome {
    let prng = &mut Prng::new(seed ^ 0x7368_6172_6573);
    let options = settings(seed, prng);
    let log = Log::new(sink);
    let mut cluster = Cluster::new(&options, plant, &log);
    let failure = drive(&mut cluster, plant, &log, prng).err();
    if let Some(failure) = &failure {
        let text = || format!("{}: {}", failure.checker, failure.text);
        log.event(cluster.now(), "FAILURE", [0, 0], text);
    }
    let mut stats = Stats {
        writes: cluster.workloads().map(|work| work.stats.writes).sum(),
        reads: cluster.workloads().map(|work| work.stats.reads).sum(),
        flushes: cluster.workloads().map(|work| work.stats.flushes).sum(),
        reconnects: cluster.paths().iter().map(|path| path.reconnects).sum(),
        ..Stats::default()
    };
    (stats.faults, stats.events) = (cluster.faults, log.events());
    stats.virtual_ms = cluster.now().as_nanos() / 1_000_000;
    Outcome { failure, stats, fingerprint: log.fingerprint() }
}

/// Runs the cluster for this long.
fn pass(cluster: &mut Cluster, time: Duration) -> Result<(), Failure> {
    cluster.run_until(cluster.now() + time, |_| false).map(|_| ())
}

fn slow(
    cluster: &mut Cluster,
    path: usize,
    answers: bool,
    prng: &mut Prng,
) -> Result<Fault, Failure> {
    let (a, b) = cluster.links()[path];
    let (from, to) = if answers { (b, a) } else { (a, b) };
    let delay = prng.duration(15 * MS..=60 * MS);
    let link = LinkOptions { delay, jitter: MS, ..LinkOptions::default() };
    cluster.act(Act::World(Fault::Change(from, to, link)))?;
    Ok(Fault::Restore(from, to))
}

fn drive(cluster: &mut Cluster, plant: Plant, log: &Log, prng: &mut Prng) -> Result<(), Failure> {
    let kind = prng.below(4);
    if kind == 0 {
        cluster.disk.pin_slowly(prng.duration(50 * MS..=900 * MS));
    }
    if !cluster.run_until(cluster.now() + ATTACH_MAX, Cluster::is_whole)? {
        return Err(not_live(cluster, "attaching did not end", ATTACH_MAX));
    }
    let paths = cluster.links().len();
    if plant == Plant::LimpingPath {
        slow(cluster, prng.index(paths), true, prng)?;
    }
    cluster.set_mode(Mode::Load);
    let what = match kind {
        0 => {
            // Each path's first requests are sent immediately.
            pass(cluster, 20 * MS)?;
            while cluster.pinned_until() > cluster.now() {
                pass(cluster, 10 * MS)?;
            }
            "memory was registered"
        }
        1 => {
            pass(cluster, prng.duration(Duration::ZERO..=2500 * MS))?;
            let (core, time) = (prng.index(4), prng.duration(100 * MS..=3000 * MS));
            cluster.act(Act::Stall { core, time })?;
            pass(cluster, time)?;
            "a core was stalled"
        }
        2 => {
            pass(cluster, prng.duration(Duration::ZERO..=2500 * MS))?;
            let (path, answers) = (prng.index(paths), prng.chance(Ratio::new(1, 2)));
            let mends = slow(cluster, path, answers, prng)?;
            pass(cluster, prng.duration(200 * MS..=5000 * MS))?;
            cluster.act(Act::World(mends))?;
            "a path was slow"
        }
        _ => {
            pass(cluster, prng.duration(Duration::ZERO..=2500 * MS))?;
            let time = prng.duration(100 * MS..=3000 * MS);
            cluster.disk.stick_until(cluster.now() + time);
            pass(cluster, time)?;
            "the disk was stuck"
        }
    };
    let ended = cluster.now();
    log.event(ended, "stall ends", [kind, 0], || what.to_owned());
    pass(cluster, SETTLE)?;
    compare(cluster, what, ended)?;
    cluster.set_mode(Mode::Rest);
    wait_live(cluster, "after the load")?;
    cluster.check()
}

/// Counts the requests of a period and compares the shares.
fn compare(cluster: &mut Cluster, what: &str, ended: Instant) -> Result<(), Failure> {
    if !cluster.is_whole() {
        return Err(not_live(cluster, "a stall ended a path", SETTLE));
    }
    let before = cluster.path_requests();
    let from = cluster.now();
    pass(cluster, COUNTED)?;
    let after = cluster.path_requests();
    for (core, (before, after)) in before.iter().zip(&after).enumerate() {
        let counts: Vec<u64> =
            after.iter().zip(before).map(|(after, before)| after - before).collect();
        let (least, most) = (counts.iter().min(), counts.iter().max());
        let (Some(&least), Some(&most)) = (least, most) else { continue };
        let total: u64 = counts.iter().sum();
        if total < REQUESTS_MIN || (most - least) * 100 > most * DIFFERENCE_PERCENT {
            let ms = from.since(ended).as_millis();
            let text = format!(
                "{what}; from {ms} ms after its end core {core} sent {counts:?} requests in a \
                 second over its paths"
            );
            return Err(Failure::new("share", text));
        }
    }
    Ok(())
}
