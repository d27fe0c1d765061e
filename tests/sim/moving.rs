//! Scenario of a virtual machine that moves to a host whose session waits for exclusive access.
//!
//! The session of the new host attaches while that of the old host writes. The new host claims the
//! device at any time. It must not get it while the server has the export open for the old host,
//! which closes it, dies, or sleeps, with writes in flight. In some runs, the old host returns
//! before the new host claims the device, or after it has withdrawn its claim, and its writes take
//! effect. In others it returns after the new host has written, and is refused. In some runs, the
//! process of the new host dies and another one attaches. In some, the server loses power before
//! the new host has the device; the next flush there must report lost writes of the old host. All
//! variation follows from the seed.

use rtrs_core::block::IoOp;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::Duration;

use super::away::{GONE_MAX, RETURN_MAX, settings, wait, write_all};
use super::cluster::Cluster;
use super::faults::Act;
use super::log::{Log, Sink};
use super::options::{MS, Options};
use super::run::{ATTACH_MAX, Outcome, Stats, wait_live};
use super::{Failure, Plant};

/// End of the old host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Detach,
    Death,
    /// The host sleeps, and wakes up when the new host has written.
    LateReturn,
    /// The host sleeps, and wakes up before the new host claims the device.
    EarlyReturn,
}

/// Runs the scenario. `stats.io_errors` counts the requests with which an old host returns.
pub fn run_moving(seed: u64, sink: Option<Sink>) -> Outcome {
    let mut options = settings(seed);
    (options.faults.power_cut, options.disk.write_cache, options.extra.named) = (1, true, true);
    let log = Log::new(sink);
    let mut cluster = Cluster::new(&options, Plant::None, &log);
    cluster.move_users();
    let mut stats = Stats::default();
    let prng = &mut Prng::new(seed ^ 0x6d6f_7665);
    let failure = drive(&mut cluster, &options, prng, &mut stats).err();
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

/// Lets up to `max` pass while the old host has the export. The new host may claim the device.
fn pass(
    cluster: &mut Cluster,
    max: Duration,
    claims: bool,
    prng: &mut Prng,
) -> Result<(), Failure> {
    let until = cluster.now() + prng.duration(Duration::ZERO..=max);
    if cluster.run_until(until, |cluster| claims && cluster.claim_target())? {
        let text = "a new host was granted exclusive access beside the old one";
        return Err(Failure::new("blocks", text));
    }
    Ok(())
}

fn drive(
    cluster: &mut Cluster,
    options: &Options,
    prng: &mut Prng,
    stats: &mut Stats,
) -> Result<(), Failure> {
    let end = [End::Detach, End::Death, End::LateReturn, End::EarlyReturn][prng.index(4)];
    let claims = prng.chance(Ratio::new(2, 3));
    wait(cluster, ATTACH_MAX, "attaching did not end", Cluster::is_whole)?;
    write_all(cluster, options, prng);
    wait_live(cluster, "the first writes")?;
    for _ in 0..=prng.index(2) {
        wait_live(cluster, "the old host")?;
        cluster.end_target();
        cluster.start_target();
        let opens = "the new host did not open the export";
        wait(cluster, GONE_MAX, opens, Cluster::is_target_open)?;
        write_all(cluster, options, prng);
        pass(cluster, 400 * MS, claims, prng)?;
    }
    write_all(cluster, options, prng);
    pass(cluster, MS, claims, prng)?;
    if end == End::EarlyReturn && claims {
        cluster.release_target();
        pass(cluster, 400 * MS, false, prng)?;
        write_all(cluster, options, prng);
        cluster.run_until(cluster.now() + 10 * MS, |_| false)?;
    }
    match end {
        End::Detach => cluster.act(Act::LeaveClient)?,
        End::Death => cluster.act(Act::StopClient { power: false })?,
        End::LateReturn => cluster.put_to_sleep(),
        End::EarlyReturn => {
            cluster.put_to_sleep();
            let is_gone = |cluster: &Cluster| cluster.left_at_server().0 == 1;
            wait(cluster, GONE_MAX, "the session of a host that sleeps did not end", is_gone)?;
            // The new host must not get the export in the meantime.
            let sleeps = prng.duration(Duration::ZERO..=3000 * MS);
            cluster.run_until(cluster.now() + sleeps, |_| false)?;
            stats.io_errors = cluster.wake_up() as u64;
            wait(cluster, RETURN_MAX, "IO of the old host did not end", |cluster| {
                cluster.returned_inflight() == 0
            })?;
            if cluster.is_returned_refused() {
                let text = "an old host was refused beside a new host that had not written";
                return Err(Failure::new("live", text));
            }
            cluster.end_returned();
        }
    }
    if prng.chance(Ratio::new(1, 3)) {
        cluster.act(Act::StopServer { power: true })?;
        cluster.act(Act::StartServer)?;
    }
    let granted = "the new host was not granted exclusive access";
    wait(cluster, GONE_MAX, granted, Cluster::claim_target)?;
    cluster.adopt_target();
    wait_live(cluster, "the new host")?;
    (0..2).for_each(|core| cluster.order(core, IoOp::Flush, 0, 0, false));
    wait_live(cluster, "flushes of the new host")?;
    cluster.read_back(prng.index(2));
    wait_live(cluster, "reads of the new host")?;
    write_all(cluster, options, prng);
    wait_live(cluster, "writes of the new host")?;
    if end == End::LateReturn {
        stats.io_errors = cluster.wake_up() as u64;
        let bound = cluster.now() + RETURN_MAX;
        let is_refused = cluster.run_until(bound, Cluster::is_returned_refused)?;
        wait(cluster, RETURN_MAX, "IO of the old host did not end", |cluster| {
            cluster.returned_inflight() == 0
        })?;
        cluster.end_returned();
        if !is_refused {
            let text = "an old host returned after the new one had written, and was not refused";
            return Err(Failure::new("blocks", text));
        }
    }
    for core in 0..2 {
        cluster.read_back(core);
        wait_live(cluster, "reading everything back")?;
    }
    cluster.check()
}
