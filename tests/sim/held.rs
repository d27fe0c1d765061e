//! A write that its disk holds up while its path dies; what the client sends again; a newer write
//! to the same place as soon as the first is acknowledged; then the disk lets go. The newest data
//! has to stay. Everything that may vary follows from the seed: the writes, how and when the path
//! dies and comes back, when the disk lets go.

use rtrs_client::{NoPath, Policy};
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
    options.no_path = NoPath::QueueFor(Duration::from_secs(60));
    options.io_timeout = Duration::from_secs(5);
    (options.faults, options.stall_max) = (FaultMix::NONE, None);
    options.work.overlap = false;
    let disk = &mut options.disk;
    (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
    // The held write does not keep the disk from others.
    disk.room = disk.room.max(4);
    options
}

/// Runs the scenario. `stats.replays` tells whether a copy met its original.
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
    (stats.faults, stats.events) = (cluster.faults, log.events());
    stats.virtual_ms = cluster.now().as_nanos() / 1_000_000;
    Outcome { failure, stats, fingerprint: log.fingerprint() }
}

/// How the path dies, and how that heals.
fn death(cluster: &Cluster, prng: &mut Prng) -> (Vec<Act>, Vec<Act>) {
    // A core's first IO goes over the first path.
    let (a, b) = cluster.links()[0];
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

fn drive(cluster: &mut Cluster, options: &Options, stats: &mut Stats) -> Result<(), Failure> {
    if !cluster.run_until(cluster.now() + ATTACH_MAX, Cluster::is_whole)? {
        return Err(not_live(cluster, "attaching did not end", ATTACH_MAX));
    }
    let prng = &mut Prng::new(options.seed ^ 0x6865_6c64);
    let idle = |cluster: &Cluster| cluster.workloads().all(|work| work.is_idle());
    let core = prng.index(2);
    let count = 1 + prng.below(u64::from(options.work.span_max)) as u32;
    let count = count.min(8);
    let sector = prng.below(u64::from(options.work.sectors - count) + 1) as u32;
    let write = |cluster: &mut Cluster, prng: &mut Prng, core: usize| {
        let op = match prng.below(4) {
            0 => IoOp::WriteZeroes,
            1 => IoOp::Discard,
            _ => IoOp::Write,
        };
        cluster.order(core, op, sector, count, prng.chance(Ratio::new(1, 3)));
    };

    cluster.disk.hold_next_write();
    write(cluster, prng, core);
    let bound = cluster.now() + ATTACH_MAX;
    if !cluster.run_until(bound, |cluster| cluster.disk.holds())? {
        return Err(not_live(cluster, "the write did not get to the disk", ATTACH_MAX));
    }
    cluster.run_until(cluster.now() + prng.duration(Duration::ZERO..=5 * MS), |_| false)?;
    let (dies, heals) = death(cluster, prng);
    for act in dies {
        cluster.act(act);
    }
    // It may come back before the disk lets go or after.
    let start = cluster.now();
    let heals_at = start + prng.duration(10 * MS..=3000 * MS);
    let lets_go_at = start + prng.duration(10 * MS..=3000 * MS);
    let mut later = vec![(heals_at, Some(heals)), (lets_go_at, None)];
    later.sort_by_key(|(at, _)| *at);
    let mut newer = false;
    for (at, heals) in later {
        // The newer write follows at once if the first is acknowledged too early.
        if !newer && cluster.run_until(at, idle)? {
            newer = true;
            let core = prng.index(2);
            write(cluster, prng, core);
        }
        cluster.run_until(at, |_| false)?;
        stats.replays = stats.replays.max(cluster.replays());
        match heals {
            Some(heals) => heals.into_iter().for_each(|act| cluster.act(act)),
            None => cluster.let_go(),
        }
    }
    if !newer {
        let bound = cluster.now() + ATTACH_MAX;
        if !cluster.run_until(bound, idle)? {
            return Err(not_live(cluster, "the write did not end", ATTACH_MAX));
        }
        let core = prng.index(2);
        write(cluster, prng, core);
    }
    wait_live(cluster, "after the newer write")?;
    cluster.run_until(cluster.now() + 200 * MS, |_| false)?;
    for core in 0..2 {
        cluster.read_back(core);
        wait_live(cluster, "reading everything back")?;
    }
    cluster.check()
}
