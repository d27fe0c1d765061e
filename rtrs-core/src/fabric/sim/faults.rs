//! Faults of a simulated world, drawn from a seed.
//!
//! [`FaultOptions::plan`] draws a list of faults with their times; `World::inject` schedules it.
//! Every fault is repaired, so after the last entry of a plan the world has no faults.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use super::link::LinkOptions;
use crate::prng::{Prng, Ratio};
use crate::time::{Duration, Instant};

/// Change to the simulated world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The link between two addresses goes down: messages on it are lost.
    LinkDown(IpAddr, IpAddr),
    /// The link comes up again, for new connections.
    LinkUp(IpAddr, IpAddr),
    /// Nothing arrives from the first address at the second, without an event.
    Silence(IpAddr, IpAddr),
    /// Messages held back by `Silence` arrive now.
    Unsilence(IpAddr, IpAddr),
    /// This direction starts using these options.
    Change(IpAddr, IpAddr, LinkOptions),
    /// This direction uses the world's default options again.
    Restore(IpAddr, IpAddr),
}

/// Kinds and frequencies of faults.
#[derive(Clone, Debug)]
pub struct FaultOptions {
    /// Links that may break.
    pub links: Vec<(IpAddr, IpAddr)>,
    /// Time between the starts of two faults.
    pub gap: RangeInclusive<Duration>,
    /// Duration of a fault.
    pub lasts: RangeInclusive<Duration>,
    /// Fraction of faults that take a link down.
    pub down: Ratio,
    /// Fraction of the other faults that silence one direction; the rest slow one direction down.
    pub silence: Ratio,
    /// Options of a slow direction.
    pub slow: LinkOptions,
    /// Minimum number of links without a fault at any time.
    pub spare: usize,
}

impl FaultOptions {
    /// Creates options under which a link breaks about every second, for about half a second, and
    /// one link is always intact.
    pub fn new(links: Vec<(IpAddr, IpAddr)>) -> Self {
        Self {
            links,
            gap: Duration::from_millis(100)..=Duration::from_secs(2),
            lasts: Duration::from_millis(10)..=Duration::from_secs(1),
            down: Ratio::new(1, 2),
            silence: Ratio::new(2, 3),
            slow: LinkOptions {
                delay: Duration::from_millis(5),
                jitter: Duration::from_millis(20),
                ..LinkOptions::default()
            },
            spare: 1,
        }
    }

    /// Draws faults that start before `until`, in chronological order.
    pub fn plan(&self, prng: &mut Prng, from: Instant, until: Instant) -> Vec<(Instant, Fault)> {
        let mut plan = Vec::new();
        let mut heals = vec![from; self.links.len()];
        let mut now = from;
        loop {
            now = now + prng.duration(self.gap.clone()).max(Duration::from_nanos(1));
            if now >= until {
                break;
            }
            let whole: Vec<usize> = (0..heals.len()).filter(|&i| heals[i] < now).collect();
            if whole.len() <= self.spare {
                continue;
            }
            let link = whole[prng.index(whole.len())];
            let (a, b) = self.links[link];
            let (from, to) = if prng.chance(Ratio::new(1, 2)) { (a, b) } else { (b, a) };
            heals[link] = now + prng.duration(self.lasts.clone());
            let (start, end) = if prng.chance(self.down) {
                (Fault::LinkDown(a, b), Fault::LinkUp(a, b))
            } else if prng.chance(self.silence) {
                (Fault::Silence(from, to), Fault::Unsilence(from, to))
            } else {
                (Fault::Change(from, to, self.slow), Fault::Restore(from, to))
            };
            plan.push((now, start));
            plan.push((heals[link], end));
        }
        plan.sort_by_key(|&(at, _)| at);
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::{Fault, FaultOptions};
    use crate::prng::Prng;
    use crate::time::Instant;

    #[test]
    fn a_plan_repairs_each_fault_and_keeps_one_link_intact() {
        let ip = |n: u8| std::net::IpAddr::from([10, 0, 0, n]);
        let options = FaultOptions::new(vec![(ip(1), ip(2)), (ip(3), ip(4)), (ip(5), ip(6))]);
        let until = Instant::from_nanos(600_000_000_000);
        let plan = options.plan(&mut Prng::new(3), Instant::ZERO, until);
        assert!(plan.len() > 200, "{}", plan.len());
        assert_eq!(plan, options.plan(&mut Prng::new(3), Instant::ZERO, until));
        let (mut broken, mut kinds) = (0_i32, [0; 3]);
        for (_, fault) in plan {
            match fault {
                Fault::LinkDown(..) => kinds[0] += 1,
                Fault::Silence(..) => kinds[1] += 1,
                Fault::Change(..) => kinds[2] += 1,
                _ => {
                    broken -= 1;
                    continue;
                }
            }
            broken += 1;
            assert!((1..=2).contains(&broken));
        }
        assert_eq!(broken, 0);
        assert!(kinds.iter().all(|&n| n > 10), "{kinds:?}");
    }
}
