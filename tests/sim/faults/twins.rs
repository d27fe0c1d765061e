//! Second process of the server, with one of the server's addresses and the same disk.

use std::net::IpAddr;

use rtrs_core::fabric::sim::{Fault, LinkOptions};
use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant};

use super::super::options::MS;
use super::Act;

/// Maximum delay of requests that the client sent over a path that it considers dead.
const LATE: Duration = Duration::from_millis(700);
/// Time that a path takes to reconnect.
const BACK: Duration = Duration::from_millis(600);

/// Draws, in chronological order, when a second process has an address, and when the path to the
/// first process is dead for the client only, so that requests sent over it still arrive.
pub(in super::super) fn twins(
    links: &[(IpAddr, IpAddr)],
    from: Instant,
    time: Duration,
    prng: &mut Prng,
) -> Vec<(Instant, Act)> {
    let mut plan = Vec::new();
    let mut at = from;
    loop {
        at = at + prng.duration(50 * MS..=200 * MS);
        let path = prng.index(links.len());
        let up = at + prng.duration(MS..=20 * MS);
        let dies = up + BACK + prng.duration(MS..=100 * MS);
        let delay = prng.duration(LATE / 2..=LATE);
        let end = dies + delay + BACK;
        if end >= from + time {
            return plan;
        }
        let (client, server) = links[path];
        plan.push((at, Act::Twin { path: Some(path) }));
        plan.push((at, Act::World(Fault::LinkDown(client, server))));
        plan.push((up, Act::World(Fault::LinkUp(client, server))));
        let slow = LinkOptions { delay, jitter: 20 * MS, ..LinkOptions::default() };
        for &(client, server) in links.iter().filter(|link| **link != links[path]) {
            plan.push((dies, Act::World(Fault::Change(client, server, slow))));
            plan.push((dies + delay, Act::World(Fault::Restore(client, server))));
        }
        plan.push((end, Act::Twin { path: None }));
        at = end + BACK;
    }
}
