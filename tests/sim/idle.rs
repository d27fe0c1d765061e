//! Scenario in which a session is idle for minutes, with slow idle heartbeats; then an event
//! occurs, followed by either the first IO or another client. Either end may be an earlier version
//! without support for idle heartbeats.
//!
//! - *Idle*: no path ends, however long the session is idle.
//! - *A link dies* without notice. The first IO moves to another path as quickly as it would under
//!   load; with only one path, it continues once the link is back.
//! - *The server is killed* and starts again. The first IO continues once the server is back.
//! - *The client's host dies* just after its first IO. The server detects it within its usual time.
//! - *The client's host dies* while idle, and another client opens the export, or connects with the
//!   same name. The other client does not wait for the slow idle heartbeat.

use rtrs_client::{NoPath, SlowIo};
use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::Fault;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant};

use super::cluster::Cluster;
use super::faults::Act;
use super::log::{Log, Sink};
use super::options::{Extra, FaultMix, IdleMax, MS, Options};
use super::run::{ATTACH_MAX, Outcome, Stats, not_live, wait_live};
use super::{Failure, Plant};

const HEARTBEAT: Duration = Duration::from_millis(100);
const SERVER_HEARTBEAT: Duration = Duration::from_millis(500);
/// Maximum time that the server in these runs takes to detect a silent client: four periods plus a
/// margin.
const CLIENT_DEAD_MAX: Duration = Duration::from_millis(4 * 500 + 500);
/// Maximum time of an IO over a path that has died, if another path works.
const IO_MAX: Duration = Duration::from_millis(10 * 100 + 500);
/// Maximum time from a server's start, or a link's return, until all IO completes: detecting the
/// silent path, closing it, and the next attempt.
const BACK_MAX: Duration = Duration::from_secs(6);
/// Maximum time from the start of the next client until its device is open: the dead client is
/// detected, its session ends, and the next attempt follows.
const NEXT_MAX: Duration = Duration::from_millis(4 * 500 + 1500);

/// Event after a long idle time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Nothing,
    LinkDies,
    ServerKilled,
    ClientDiesInUse,
    ClientDiesIdle,
}

fn settings(seed: u64, what: What, prng: &mut Prng) -> Options {
    let mut options = Options::draw(seed);
    (options.heartbeat, options.server_heartbeat) = (HEARTBEAT, SERVER_HEARTBEAT);
    options.no_path = NoPath::QueueFor(Duration::from_secs(60));
    (options.io_timeout, options.slow_io) = (Duration::from_secs(5), SlowIo::Wait);
    (options.faults, options.stall_max) = (FaultMix::NONE, None);
    (options.pinned, options.operated, options.takeover) = (None, false, None);
    (options.other_servers, options.late_data, options.rival) = (false, false, false);
    (options.guest, options.kernel, options.nbd_drops) = (None, None, false);
    options.unmix();
    (options.extra, options.renamed) = (Extra::default(), prng.chance(Ratio::new(1, 2)));
    let long = Duration::from_secs(30);
    // Neither an earlier version nor an end with idle heartbeats disabled announces them.
    let (client, server) = match prng.below(6) {
        0 => (Duration::ZERO, long),
        1 => (long, Duration::ZERO),
        2 => (Duration::from_secs(8), long),
        3 => (long, Duration::from_secs(8)),
        _ => (long, long),
    };
    options.extra.idle = IdleMax { client, server };
    let link = &mut options.world.link;
    (link.bandwidth, link.jitter) = (None, link.jitter.min(MS / 20));
    if what != What::ServerKilled {
        // The ends of the link receive no event.
        link.detect = None;
    }
    if matches!(what, What::ClientDiesInUse | What::ClientDiesIdle) {
        // Keeps connections from ending slowly: their memory would add to that of the dead client.
        options.faults.client_restart = 1;
    }
    (options.message_max, options.server_message_max) = (MS / 5, MS / 5);
    let disk = &mut options.disk;
    (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
    (disk.room, disk.writeback, disk.write_cache) = (64, Ratio::ZERO, false);
    options.work.overlap = false;
    options
}

/// Runs the scenario.
pub fn run_idle(seed: u64, sink: Option<Sink>) -> Outcome {
    let prng = &mut Prng::new(seed ^ 0x6964_6c65);
    let what = [
        What::Nothing,
        What::LinkDies,
        What::LinkDies,
        What::ServerKilled,
        What::ClientDiesInUse,
        What::ClientDiesIdle,
    ][prng.index(6)];
    let options = settings(seed, what, prng);
    let log = Log::new(sink);
    log.event(Instant::ZERO, "scenario", [0, 0], || format!("{what:?}"));
    let mut cluster = Cluster::new(&options, Plant::None, &log);
    let failure = drive(&mut cluster, &options, what, prng).err();
    if let Some(failure) = &failure {
        let text = || format!("{}: {}", failure.checker, failure.text);
        log.event(cluster.now(), "FAILURE", [0, 0], text);
    }
    let mut stats = Stats {
        writes: cluster.workloads().map(|work| work.stats.writes).sum(),
        reads: cluster.workloads().map(|work| work.stats.reads).sum(),
        reconnects: cluster.paths().iter().map(|path| path.reconnects).sum(),
        ..Stats::default()
    };
    (stats.faults, stats.events) = (cluster.faults, log.events());
    stats.virtual_ms = cluster.now().as_nanos() / 1_000_000;
    Outcome { failure, stats, fingerprint: log.fingerprint() }
}

fn pass(cluster: &mut Cluster, time: Duration) -> Result<(), Failure> {
    cluster.run_until(cluster.now() + time, |_| false).map(|_| ())
}

/// Performs an IO on one or two cores, within a time limit.
fn io(
    cluster: &mut Cluster,
    options: &Options,
    prng: &mut Prng,
    what: &str,
    longest: Duration,
) -> Result<(), Failure> {
    order(cluster, options, prng);
    end_io(cluster, what, longest)
}

fn order(cluster: &mut Cluster, options: &Options, prng: &mut Prng) {
    for core in 0..1 + prng.index(2) {
        let op = if prng.chance(Ratio::new(1, 2)) { IoOp::Read } else { IoOp::Write };
        // Each core has its own half.
        let half = options.work.sectors / 2;
        let sector = half * core as u32 + prng.below(u64::from(half)) as u32;
        cluster.order(core, op, sector, 1, false);
    }
}

fn end_io(cluster: &mut Cluster, what: &str, longest: Duration) -> Result<(), Failure> {
    let idle = |cluster: &Cluster| cluster.workloads().all(|work| work.is_idle());
    if cluster.run_until(cluster.now() + longest, idle)? {
        return Ok(());
    }
    Err(not_live(cluster, what, longest))
}

fn drive(
    cluster: &mut Cluster,
    options: &Options,
    what: What,
    prng: &mut Prng,
) -> Result<(), Failure> {
    if !cluster.run_until(cluster.now() + ATTACH_MAX, Cluster::is_whole)? {
        return Err(not_live(cluster, "attaching did not end", ATTACH_MAX));
    }
    for _ in 0..2 {
        io(cluster, options, prng, "IO before the idle time", IO_MAX)?;
        idle(cluster, options, prng)?;
    }
    match what {
        What::Nothing => io(cluster, options, prng, "the first IO", IO_MAX)?,
        What::LinkDies => link_dies(cluster, options, prng)?,
        What::ServerKilled => {
            cluster.act(Act::StopServer { power: false })?;
            let away = prng.duration(Duration::ZERO..=3000 * MS);
            let early = prng.chance(Ratio::new(1, 2));
            if early {
                order(cluster, options, prng);
            }
            pass(cluster, away)?;
            cluster.act(Act::StartServer)?;
            if !early {
                pass(cluster, prng.duration(Duration::ZERO..=40_000 * MS))?;
                order(cluster, options, prng);
            }
            end_io(cluster, "IO after the server was killed", BACK_MAX)?;
        }
        What::ClientDiesInUse => {
            io(cluster, options, prng, "the first IO", IO_MAX)?;
            pass(cluster, prng.duration(Duration::ZERO..=20 * MS))?;
            cluster.act(Act::StopClient { power: true })?;
            let gone = |cluster: &Cluster| cluster.left_at_server().0 == 0;
            if !cluster.run_until(cluster.now() + CLIENT_DEAD_MAX, gone)? {
                let text = "the server still has the session of a dead client".to_owned();
                return Err(Failure::new("live", text));
            }
            next_client(cluster)?;
        }
        What::ClientDiesIdle => {
            cluster.act(Act::StopClient { power: true })?;
            pass(cluster, prng.duration(Duration::ZERO..=3000 * MS))?;
            next_client(cluster)?;
        }
    }
    wait_live(cluster, "after all that")?;
    for core in 0..2 {
        cluster.read_back(core);
        wait_live(cluster, "reading everything back")?;
    }
    cluster.check()
}

/// Lets up to a few minutes pass without events, and checks that no path ends.
fn idle(cluster: &mut Cluster, options: &Options, prng: &mut Prng) -> Result<(), Failure> {
    let before: u64 = cluster.paths().iter().map(|path| path.reconnects).sum();
    // If an end is an earlier version, a longer idle time makes no difference.
    let IdleMax { client, server } = options.extra.idle;
    let most = if client.min(server).is_zero() { 10_000 } else { 200_000 };
    pass(cluster, prng.duration(1000 * MS..=most * MS))?;
    let after: u64 = cluster.paths().iter().map(|path| path.reconnects).sum();
    if after > before || !cluster.is_whole() {
        return Err(not_live(cluster, "an idle path has ended", Duration::ZERO));
    }
    Ok(())
}

fn link_dies(cluster: &mut Cluster, options: &Options, prng: &mut Prng) -> Result<(), Failure> {
    let path = prng.index(options.paths);
    let (a, b) = cluster.links()[path];
    let (one, other) = (Fault::Silence(a, b), Fault::Silence(b, a));
    let (back, forth) = (Fault::Unsilence(a, b), Fault::Unsilence(b, a));
    let (dies, heals) = match prng.below(4) {
        0 => (vec![Fault::LinkDown(a, b)], vec![Fault::LinkUp(a, b)]),
        1 => (vec![one], vec![back]),
        2 => (vec![other], vec![forth]),
        _ => (vec![one, other], vec![back, forth]),
    };
    dies.into_iter().try_for_each(|fault| cluster.act(Act::World(fault)))?;
    // A heartbeat may be due during this time.
    pass(cluster, prng.duration(Duration::ZERO..=20_000 * MS))?;
    order(cluster, options, prng);
    if options.paths > 1 {
        end_io(cluster, "IO while another path works", IO_MAX)?;
    } else {
        pass(cluster, prng.duration(Duration::ZERO..=3000 * MS))?;
    }
    heals.into_iter().try_for_each(|fault| cluster.act(Act::World(fault)))?;
    end_io(cluster, "IO when the link is back", BACK_MAX)
}

fn next_client(cluster: &mut Cluster) -> Result<(), Failure> {
    cluster.act(Act::StartClient)?;
    if cluster.run_until(cluster.now() + NEXT_MAX, Cluster::is_whole)? {
        return Ok(());
    }
    Err(not_live(cluster, "the next client does not get the device", NEXT_MAX))
}
