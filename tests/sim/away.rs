//! Scenario in which a client is away while another client replaces it as the writer, and then
//! returns.
//!
//! The first client's host sleeps with writes in flight; in half of the runs, its paths die first.
//! The server ends its session. Another client attaches, writes to all sectors, and then leaves or
//! dies. Then the first host wakes up and resumes its requests. It must not regain the export: its
//! requests fail, and the next client reads what the other client wrote. All variation derives from
//! the seed.

use rtrs_client::{NoPath, SlowIo};
use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::Fault;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant};

use super::cluster::Cluster;
use super::faults::Act;
use super::log::{Log, Sink};
use super::options::{Extra, FaultMix, MS, Options};
use super::run::{ATTACH_MAX, Outcome, Stats, not_live, wait_live};
use super::{Failure, Plant};

const HEARTBEAT: Duration = Duration::from_millis(100);
/// Maximum time that the server takes to end the session of a client that is away or has left.
pub(super) const GONE_MAX: Duration = Duration::from_secs(10);
/// Maximum time from the return of the first client to the end of its IO.
pub(super) const RETURN_MAX: Duration = Duration::from_secs(20);

pub(super) fn settings(seed: u64) -> Options {
    let mut options = Options::draw(seed);
    (options.heartbeat, options.server_heartbeat) = (HEARTBEAT, 2 * HEARTBEAT);
    (options.no_path, options.slow_io) = (NoPath::Queue, SlowIo::Wait);
    options.io_timeout = Duration::from_secs(5);
    // Connections are not made to end slowly, since their memory would add to the next client's.
    (options.faults, options.stall_max) = (FaultMix { client_restart: 1, ..FaultMix::NONE }, None);
    (options.pinned, options.operated, options.takeover) = (None, false, None);
    (options.other_servers, options.late_data, options.rival) = (false, false, false);
    (options.guest, options.kernel) = (None, None);
    // The session itself keeps the requests of a client that is away.
    (options.nbd, options.nbd_drops, options.preflush) = (false, false, false);
    options.unmix();
    options.extra = Extra::default();
    (options.message_max, options.server_message_max) = (MS / 5, MS / 5);
    let disk = &mut options.disk;
    (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
    (disk.room, disk.writeback, disk.write_cache) = (64, Ratio::ZERO, false);
    (options.work.overlap, options.work.parts) = (false, false);
    options
}

/// Whether the server remembers the clients that have written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    Kept,
    /// The server is restarted without its state before the first client returns: a planted bug.
    Lost,
}

/// Runs the scenario. `stats.io_errors` counts the requests with which the first client returns.
pub fn run_away(seed: u64, memory: Memory, sink: Option<Sink>) -> Outcome {
    let options = settings(seed);
    let log = Log::new(sink);
    let mut cluster = Cluster::new(&options, Plant::None, &log);
    let mut stats = Stats::default();
    let prng = &mut Prng::new(seed ^ 0x6177_6179);
    let failure = drive(&mut cluster, &options, memory, prng, &mut stats).err();
    if let Some(failure) = &failure {
        let text = || format!("{}: {}", failure.checker, failure.text);
        log.event(cluster.now(), "FAILURE", [0, 0], text);
    }
    stats.writes = cluster.workloads().map(|work| work.stats.writes).sum();
    stats.reads = cluster.workloads().map(|work| work.stats.reads).sum();
    (stats.faults, stats.events) = (cluster.faults, log.events());
    stats.virtual_ms = cluster.now().as_nanos() / 1_000_000;
    Outcome { failure, stats, fingerprint: log.fingerprint() }
}

/// Issues writes to all sectors, in random order.
pub(super) fn write_all(cluster: &mut Cluster, options: &Options, prng: &mut Prng) {
    let max = options.work.span_max.clamp(1, 8);
    let (mut sector, mut places) = (0, Vec::new());
    while sector < options.work.sectors {
        let count = (1 + prng.below(u64::from(max)) as u32).min(options.work.sectors - sector);
        places.insert(prng.index(places.len() + 1), (sector, count));
        sector += count;
    }
    for (sector, count) in places {
        let (core, fua) = (prng.index(2), prng.chance(Ratio::new(1, 4)));
        cluster.order(core, IoOp::Write, sector, count, fua);
    }
}

pub(super) fn wait(
    cluster: &mut Cluster,
    max: Duration,
    what: &str,
    so: impl Fn(&Cluster) -> bool,
) -> Result<(), Failure> {
    let bound: Instant = cluster.now() + max;
    if cluster.run_until(bound, so)? { Ok(()) } else { Err(not_live(cluster, what, max)) }
}

fn is_unused(cluster: &Cluster) -> bool {
    cluster.left_at_server().0 == 0
}

fn drive(
    cluster: &mut Cluster,
    options: &Options,
    memory: Memory,
    prng: &mut Prng,
    stats: &mut Stats,
) -> Result<(), Failure> {
    wait(cluster, ATTACH_MAX, "attaching did not end", Cluster::is_whole)?;
    write_all(cluster, options, prng);
    wait_live(cluster, "the first writes")?;

    let links = cluster.links();
    let dies = prng.chance(Ratio::new(1, 2));
    for &(a, b) in links.iter().filter(|_| dies) {
        cluster.act(Act::World(Fault::LinkDown(a, b)))?;
    }
    write_all(cluster, options, prng);
    let passes = if dies { 3000 * MS } else { MS };
    cluster.run_until(cluster.now() + prng.duration(Duration::ZERO..=passes), |_| false)?;
    cluster.put_to_sleep();
    for &(a, b) in links.iter().filter(|_| dies) {
        cluster.act(Act::World(Fault::LinkUp(a, b)))?;
    }
    wait(cluster, GONE_MAX, "the session of a client that is away did not end", is_unused)?;

    cluster.act(Act::StartClient)?;
    wait_live(cluster, "the other client")?;
    write_all(cluster, options, prng);
    wait_live(cluster, "writes of the other client")?;
    let leaves = prng.chance(Ratio::new(1, 2));
    cluster.act(if leaves { Act::LeaveClient } else { Act::StopClient { power: false } })?;
    wait(cluster, GONE_MAX, "the session of the other client did not end", is_unused)?;

    if memory == Memory::Lost {
        cluster.act(Act::StopServer { power: false })?;
        cluster.act(Act::StartServer)?;
    }
    stats.io_errors = cluster.wake_up() as u64;
    let bound = cluster.now() + RETURN_MAX;
    let is_refused = cluster.run_until(bound, Cluster::is_returned_refused)?;
    wait(cluster, RETURN_MAX, "IO of the client that returned did not end", |cluster| {
        cluster.returned_inflight() == 0
    })?;
    cluster.end_returned();
    wait(cluster, GONE_MAX, "the session of the client that returned did not end", is_unused)?;

    cluster.act(Act::StartClient)?;
    wait_live(cluster, "the next client")?;
    for core in 0..2 {
        cluster.read_back(core);
        wait_live(cluster, "reading everything back")?;
    }
    if memory == Memory::Kept && !is_refused {
        let text = "a client returned after another one had written, and was not refused";
        return Err(Failure::new("blocks", text));
    }
    cluster.check()
}
