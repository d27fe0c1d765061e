//! Scenario in which a path dies while the disk holds a write: the client repeats the write, a
//! newer write to the same sectors follows once the first is acknowledged, then the disk releases
//! the held write. In one of four runs, all paths die and stay dead until the first write has
//! failed; the newer write follows as soon as paths are back, and it alone waits for the disk. The
//! newest data must survive. All variation comes from the seed: the writes, how and when the path
//! dies and comes back, and when the disk releases the write.

use rtrs_client::{NoPath, Policy, SlowIo};
use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::Fault;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::Duration;

use super::cluster::Cluster;
use super::faults::Act;
use super::log::{Log, Sink};
use super::options::{FaultMix, MS, Options};
use super::run::{ATTACH_MAX, Outcome, Stats, not_live, wait_live};
use super::{Failure, Plant};

fn settings(seed: u64) -> Options {
    let mut options = Options::draw(seed);
    (options.paths, options.policy) = (options.paths.max(2), Policy::RoundRobin);
    // A separate generator, so that older seeds draw the rest as before.
    let own = &mut Prng::new(seed ^ 0x6661_696c_7321);
    options.no_path = match own.below(12) {
        0 => NoPath::Fail,
        1 => NoPath::QueueFor(20 * MS),
        2 => NoPath::QueueFor(200 * MS),
        _ => NoPath::QueueFor(Duration::from_secs(60)),
    };
    options.slow_io = SlowIo::Wait;
    if options.path_errors() {
        // While a write waits, its core must still have permits for other requests.
        options.queue_depth = options.queue_depth.max(8);
    }
    options.io_timeout = Duration::from_secs(5);
    (options.faults, options.stall_max) = (FaultMix::NONE, None);
    options.unmix();
    options.work.overlap = false;
    let disk = &mut options.disk;
    (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
    // The held write does not block other IO of the disk.
    disk.room = disk.room.max(4);
    options
}

/// Runs the scenario. `stats.replays` counts replays that arrived while the original was running,
/// and `stats.blocked` newer writes that waited for a failed write.
pub fn run_held(seed: u64, sink: Option<Sink>) -> Outcome {
    let options = settings(seed);
    let log = Log::new(sink);
    let mut cluster = Cluster::new(&options, Plant::None, &log);
    let mut stats = Stats::default();
    let failure = drive(&mut cluster, &options, &mut stats).err();
    if let Some(failure) = &failure {
        let text = || format!("{}: {}", failure.checker, failure.text);
        log.event(cluster.now(), "FAILURE", [0, 0], text);
    }
    stats.writes = cluster.workloads().map(|work| work.stats.writes).sum();
    stats.reads = cluster.workloads().map(|work| work.stats.reads).sum();
    stats.reconnects = cluster.paths().iter().map(|path| path.reconnects).sum();
    stats.io_errors = cluster.workloads().map(|work| work.stats.errors).sum();
    (stats.faults, stats.events) = (cluster.faults, log.events());
    stats.virtual_ms = cluster.now().as_nanos() / 1_000_000;
    Outcome { failure, stats, fingerprint: log.fingerprint() }
}

/// Draws how a path dies, and the actions that heal it.
fn death(cluster: &Cluster, path: usize, prng: &mut Prng) -> (Vec<Act>, Vec<Act>) {
    let (a, b) = cluster.links()[path];
    let silence = |from, to| Act::World(Fault::Silence(from, to));
    let unsilence = |from, to| Act::World(Fault::Unsilence(from, to));
    match prng.below(4) {
        0 => {
            let (down, up) = (Fault::LinkDown(a, b), Fault::LinkUp(a, b));
            (vec![Act::World(down)], vec![Act::World(up)])
        }
        1 => (vec![silence(a, b)], vec![unsilence(a, b)]),
        2 => (vec![silence(b, a)], vec![unsilence(b, a)]),
        _ => (vec![silence(a, b), silence(b, a)], vec![unsilence(a, b), unsilence(b, a)]),
    }
}

/// Target of both writes.
#[derive(Clone, Copy, Debug)]
struct Place {
    sector: u32,
    count: u32,
}

impl Place {
    fn write(self, cluster: &mut Cluster, prng: &mut Prng, core: usize) {
        let op = match prng.below(4) {
            0 => IoOp::WriteZeroes,
            1 => IoOp::Discard,
            _ => IoOp::Write,
        };
        cluster.order(core, op, self.sector, self.count, prng.chance(Ratio::new(1, 3)));
    }
}

fn is_idle(cluster: &Cluster) -> bool {
    cluster.workloads().all(|work| work.is_idle())
}

fn drive(cluster: &mut Cluster, options: &Options, stats: &mut Stats) -> Result<(), Failure> {
    if !cluster.run_until(cluster.now() + ATTACH_MAX, Cluster::is_whole)? {
        return Err(not_live(cluster, "attaching did not end", ATTACH_MAX));
    }
    let prng = &mut Prng::new(options.seed ^ 0x6865_6c64);
    let core = prng.index(2);
    let count = 1 + prng.below(u64::from(options.work.span_max)) as u32;
    let count = count.min(8);
    let sector = prng.below(u64::from(options.work.sectors - count) + 1) as u32;
    let place = Place { sector, count };

    cluster.disk.hold_next_write();
    place.write(cluster, prng, core);
    let bound = cluster.now() + ATTACH_MAX;
    if !cluster.run_until(bound, |cluster| cluster.disk.holds())? {
        return Err(not_live(cluster, "the write did not get to the disk", ATTACH_MAX));
    }
    cluster.run_until(cluster.now() + prng.duration(Duration::ZERO..=5 * MS), |_| false)?;
    if options.path_errors() {
        follow_failed(cluster, options, place, prng, stats)?;
    } else {
        follow_copied(cluster, place, prng, stats)?;
    }
    wait_live(cluster, "after the newer write")?;
    cluster.run_until(cluster.now() + 200 * MS, |_| false)?;
    for core in 0..2 {
        cluster.read_back(core);
        wait_live(cluster, "reading everything back")?;
    }
    cluster.check()
}

/// Ends the path; the client repeats the write, and sends a newer one once it is acknowledged.
fn follow_copied(
    cluster: &mut Cluster,
    place: Place,
    prng: &mut Prng,
    stats: &mut Stats,
) -> Result<(), Failure> {
    // The first IO of a core uses the first path.
    let (dies, heals) = death(cluster, 0, prng);
    dies.into_iter().try_for_each(|act| cluster.act(act))?;
    // The path may come back before or after the disk releases the write.
    let start = cluster.now();
    let heals_at = start + prng.duration(10 * MS..=3000 * MS);
    let lets_go_at = start + prng.duration(10 * MS..=3000 * MS);
    let mut later = vec![(heals_at, Some(heals)), (lets_go_at, None)];
    later.sort_by_key(|(at, _)| *at);
    let mut newer = false;
    for (at, heals) in later {
        // The newer write follows immediately if the first is acknowledged too early.
        if !newer && cluster.run_until(at, is_idle)? {
            newer = true;
            let core = prng.index(2);
            place.write(cluster, prng, core);
        }
        cluster.run_until(at, |_| false)?;
        stats.replays = stats.replays.max(cluster.replays());
        match heals {
            Some(heals) => heals.into_iter().try_for_each(|act| cluster.act(act))?,
            None => cluster.release_write(),
        }
    }
    if !newer {
        let bound = cluster.now() + ATTACH_MAX;
        if !cluster.run_until(bound, is_idle)? {
            return Err(not_live(cluster, "the write did not end", ATTACH_MAX));
        }
        let core = prng.index(2);
        place.write(cluster, prng, core);
    }
    Ok(())
}

/// Takes all paths down until the write has failed. Newer writes follow when paths are back: writes
/// to the same sectors wait for the disk, others do not.
fn follow_failed(
    cluster: &mut Cluster,
    options: &Options,
    place: Place,
    prng: &mut Prng,
    stats: &mut Stats,
) -> Result<(), Failure> {
    let mut heals = Vec::new();
    for path in 0..options.paths {
        let (dies, heal) = death(cluster, path, prng);
        dies.into_iter().try_for_each(|act| cluster.act(act))?;
        heals.extend(heal);
    }
    if !cluster.run_until(cluster.now() + ATTACH_MAX, is_idle)? {
        return Err(not_live(cluster, "the write did not fail", ATTACH_MAX));
    }
    heals.into_iter().try_for_each(|act| cluster.act(act))?;
    wait_live(cluster, "after the paths reconnected")?;
    let (one, other) = (prng.index(2), prng.index(2));
    place.write(cluster, prng, one);
    // These sectors do not overlap the first write.
    let elsewhere = (place.sector + place.count) % options.work.sectors;
    cluster.order(other, IoOp::Write, elsewhere, 1, false);
    let lets_go_at = cluster.now() + prng.duration(200 * MS..=1500 * MS);
    cluster.run_until(lets_go_at, |_| false)?;
    stats.blocked = cluster.blocked();
    let inflight: usize = cluster.workloads().map(|work| work.inflight()).sum();
    if inflight > 1 {
        return Err(not_live(
            cluster,
            "a write waits for a write to another place",
            Duration::ZERO,
        ));
    }
    cluster.release_write();
    Ok(())
}
