//! Users of the device that close their NBD connections and connect again.

use rtrs_core::block::BlockDevice;
use rtrs_core::time::Instant;

use super::super::Plant;
use super::super::nbd::{Front, connection};
use super::Cluster;

impl Cluster {
    /// The users of all connections, or of one core's, close them and connect again at once, to
    /// the bridge `by` cores further. Where others keep their connections, the close is seen
    /// before anything else happens: nobody can say what comes first otherwise.
    pub(super) fn reconnect(&mut self, now: Instant, only: Option<usize>, by: usize) {
        let count = self.client.len();
        let room = |front: Option<&mut Front>| front.is_some_and(|front| front.has_room());
        if count == 0 || !self.client.iter_mut().all(|host| room(host.work.front())) {
            return;
        }
        for at in (0..count).filter(|at| only.is_none_or(|only| only % count == *at)) {
            let (ours, theirs) = connection();
            if let Some(front) = self.client[(at + by) % count].work.front() {
                front.adopt(now, theirs);
            }
            let work = &mut self.client[at].work;
            work.forget_all(&mut self.oracle).expect("buffers that nobody wrote to");
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
    }
}
