//! Users of the device that close their NBD connections and reconnect.

use rtrs_core::block::BlockDevice;
use rtrs_core::time::Instant;

use super::super::nbd::{Front, connection};
use super::super::{Failure, Plant};
use super::Cluster;

impl Cluster {
    /// Closes the NBD connections of all users, or of one core's user, and reconnects immediately,
    /// to the bridge `by` cores further on. If other users keep their connections, the close is
    /// processed before anything else happens; otherwise the order would be undefined.
    pub(super) fn reconnect(
        &mut self,
        now: Instant,
        only: Option<usize>,
        by: usize,
    ) -> Result<(), Failure> {
        let count = self.client.len();
        let room = |front: Option<&mut Front>| front.is_some_and(|front| front.has_room());
        if count == 0 || !self.client.iter_mut().all(|host| room(host.work.front())) {
            return Ok(());
        }
        for at in (0..count).filter(|at| only.is_none_or(|only| only % count == *at)) {
            let (ours, theirs) = connection();
            if let Some(front) = self.client[(at + by) % count].work.front() {
                front.adopt(now, theirs);
            }
            let work = &mut self.client[at].work;
            work.forget_all(now, &mut self.oracle)?;
            let old = work.front().map(|front| front.reconnect(ours));
            if self.plant == Plant::UnseenClose {
                self.unseen.extend(old);
            }
        }
        if only.is_some() {
            for host in &mut self.client {
                host.work.front().map(|front| front.poll(now));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::block::IoOp;
    use rtrs_core::prng::Ratio;

    use super::super::super::faults::Act;
    use super::super::super::log::Log;
    use super::super::super::options::{FaultMix, MS, Options};
    use super::*;

    /// Returns a cluster with two cores and without faults.
    fn whole() -> Cluster {
        let mut options = Options::draw(1946);
        (options.nbd, options.nbd_drops, options.client_cores) = (true, true, 2);
        (options.faults, options.extra) = (FaultMix::NONE, Default::default());
        let disk = &mut options.disk;
        (disk.slow, disk.stuck, disk.errors) = (Ratio::ZERO, Ratio::ZERO, Ratio::ZERO);
        let mut cluster = Cluster::new(&options, Plant::None, &Log::new(None));
        let attached = cluster.run_until(cluster.now() + 5000 * MS, Cluster::is_whole);
        assert_eq!(attached, Ok(true));
        cluster
    }

    /// Closing one user's connection runs all bridges and their users' ends, including those of a
    /// stalled core, whose user then has a reply that its workload has not seen.
    #[test]
    fn replies_sent_before_a_close_count_as_ended() {
        for op in [IoOp::Read, IoOp::Write] {
            let mut cluster = whole();
            cluster.act(Act::Reconnect { only: None, by: 1 }).unwrap();
            // The first request over a connection waits until all cores have seen the old ones end.
            cluster.order(0, IoOp::Flush, 0, 0, false);
            let idle = |cluster: &Cluster| cluster.workloads().all(|work| work.is_idle());
            assert_eq!(cluster.run_until(cluster.now() + 1000 * MS, idle), Ok(true));
            cluster.order(0, op, 0, 4, false);
            let asked = |cluster: &Cluster| cluster.client[0].work.inflight() == 1;
            assert_eq!(cluster.run_until(cluster.now() + 10 * MS, asked), Ok(true));
            cluster.act(Act::Stall { core: 0, time: 50 * MS }).unwrap();
            cluster.run_until(cluster.now() + 30 * MS, |_| false).unwrap();
            cluster.act(Act::Reconnect { only: Some(1), by: 0 }).unwrap();
            assert!(asked(&cluster), "its core is stalled");

            assert_eq!(cluster.act(Act::Reconnect { only: Some(0), by: 0 }), Ok(()), "{op:?}");
            let work = &cluster.client[0].work;
            let ended = work.stats.reads + work.stats.writes;
            assert_eq!((ended, work.inflight()), (1, 0), "{op:?}");
            cluster.check().unwrap();
        }
    }
}
