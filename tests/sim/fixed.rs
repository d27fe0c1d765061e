//! Scenario with fixed requests and no faults, whose instructions are counted
//! (`tests/bin/rtrs-instructions.rs`).

use rtrs_client::{NoPath, Policy, SlowIo};
use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::{BindMode, LinkOptions, WorldOptions};
use rtrs_core::prng::Ratio;
use rtrs_core::time::Duration;

use super::cluster::Cluster;
use super::log::Log;
use super::options::{Extra, FaultMix, IdleMax, MS, Options};
use super::run::{ATTACH_MAX, not_live};
use super::{Failure, Plant};

/// Sectors of a request: 4 KiB.
const SECTORS: u32 = 8;
/// Requests in flight.
const DEPTH: u64 = 8;
/// Maximum virtual time of `DEPTH` requests.
const BATCH_MAX: Duration = Duration::from_secs(10);

/// Returns the settings. Each one that affects the count is set here, independently of draws.
fn settings(nbd: bool) -> Options {
    let mut options = Options::draw(1);
    (options.paths, options.client_cores, options.server_cores) = (1, 1, 1);
    (options.queue_depth, options.chunk_size) = (32, 8192);
    options.policy = Policy::RoundRobin;
    let delay = Duration::from_micros(10);
    let link = LinkOptions { delay, jitter: Duration::ZERO, bandwidth: None, detect: None };
    let bind = BindMode::Done;
    options.world = WorldOptions { acknowledged: true, bind, link, ..WorldOptions::default() };
    (options.always_invalidate, options.invalidate_reads, options.pinned) = (true, true, None);
    (options.heartbeat, options.server_heartbeat) = (1000 * MS, 1000 * MS);
    (options.io_timeout, options.slow_io) = (5000 * MS, SlowIo::Wait);
    options.no_path = NoPath::QueueFor(Duration::from_secs(60));
    (options.think_max, options.message_max, options.server_message_max) = Default::default();
    let work = &mut options.work;
    (work.sectors, work.depth, work.span_max) = (512, DEPTH as usize, SECTORS);
    (work.overlap, work.parts, work.rewrites) = (false, false, false);
    let disk = &mut options.disk;
    disk.latency_max = Duration::from_micros(1);
    (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
    (disk.writeback, disk.write_cache, disk.fua) = (Ratio::ZERO, false, true);
    (disk.room, disk.block) = (64, 512);
    (options.faults, options.stall_max, options.takeover) = (FaultMix::NONE, None, None);
    (options.nbd, options.nbd_drops, options.operated) = (nbd, false, false);
    (options.guest, options.kernel, options.other_servers) = (None, None, false);
    (options.preflush, options.late_data, options.renamed, options.rival) = Default::default();
    let long = Duration::from_secs(30);
    let idle = IdleMax { client: long, server: long };
    options.extra = Extra { idle, ..Extra::default() };
    options
}

/// Performs `count` requests of 4 KiB between one core of a client and one of a server, a few at a
/// time, through an NBD front end if `nbd` is set.
///
/// # Errors
/// Returns the violation that a checker of the simulator detected.
pub fn run_fixed(nbd: bool, op: IoOp, count: u64) -> Result<(), Failure> {
    let options = settings(nbd);
    let mut cluster = Cluster::new(&options, Plant::None, &Log::new(None));
    if !cluster.run_until(cluster.now() + ATTACH_MAX, Cluster::is_whole)? {
        return Err(not_live(&cluster, "attaching did not end", ATTACH_MAX));
    }
    let places = u64::from(options.work.sectors / SECTORS);
    for batch in 0..count / DEPTH {
        for at in 0..DEPTH {
            let place = (batch * DEPTH + at) % places;
            cluster.order(0, op, place as u32 * SECTORS, SECTORS, false);
        }
        let idle = |cluster: &Cluster| cluster.workloads().all(|work| work.is_idle());
        if !cluster.run_until(cluster.now() + BATCH_MAX, idle)? {
            return Err(not_live(&cluster, "requests did not end", BATCH_MAX));
        }
    }
    cluster.check()
}
