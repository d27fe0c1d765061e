//! Links between addresses: delay, jitter, bandwidth, link loss, and silence in one direction.
//!
//! Each direction between two addresses has its own options. Messages of one queue pair stay in
//! order, as on any reliable connection; those of different queue pairs may overtake each other
//! within the jitter. A link that is down loses the messages on it and breaks its connections
//! permanently; a silenced direction holds messages back and delivers them late, as TCP does after
//! a route is restored.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::prng::Prng;
use crate::time::{Duration, Instant};

/// Options of one direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// Minimum time from departure to arrival.
    pub delay: Duration,
    /// Maximum additional random delay, drawn for each message.
    pub jitter: Duration,
    /// Bytes per second; None for no limit.
    pub bandwidth: Option<u64>,
    /// Maximum time until a broken link ends its connections (each end notices at a random time in
    /// the second half of it). If None, only heartbeats detect the break.
    pub detect: Option<Duration>,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self {
            delay: Duration::from_micros(10),
            jitter: Duration::from_micros(5),
            bandwidth: None,
            detect: Some(Duration::from_millis(100)),
        }
    }
}

/// All links in a world.
#[derive(Debug)]
pub(super) struct Links {
    default: LinkOptions,
    options: BTreeMap<(IpAddr, IpAddr), LinkOptions>,
    free_at: BTreeMap<(IpAddr, IpAddr), Instant>,
    down: BTreeSet<(IpAddr, IpAddr)>,
    silent: BTreeSet<(IpAddr, IpAddr)>,
}

impl Links {
    pub(super) fn new(default: LinkOptions) -> Self {
        Self {
            default,
            options: BTreeMap::new(),
            free_at: BTreeMap::new(),
            down: BTreeSet::new(),
            silent: BTreeSet::new(),
        }
    }

    pub(super) fn options(&self, from: IpAddr, to: IpAddr) -> LinkOptions {
        self.options.get(&(from, to)).copied().unwrap_or(self.default)
    }

    pub(super) fn set(&mut self, from: IpAddr, to: IpAddr, options: Option<LinkOptions>) {
        match options {
            Some(options) => self.options.insert((from, to), options),
            None => self.options.remove(&(from, to)),
        };
    }

    pub(super) fn set_down(&mut self, a: IpAddr, b: IpAddr, down: bool) {
        set(&mut self.down, pair(a, b), down);
    }

    pub(super) fn is_down(&self, a: IpAddr, b: IpAddr) -> bool {
        self.down.contains(&pair(a, b))
    }

    pub(super) fn set_silent(&mut self, from: IpAddr, to: IpAddr, silent: bool) {
        set(&mut self.silent, (from, to), silent);
    }

    pub(super) fn is_silent(&self, from: IpAddr, to: IpAddr) -> bool {
        self.silent.contains(&(from, to))
    }

    /// Returns when a message of `bytes` that departs now has been sent, and when it arrives.
    pub(super) fn times(
        &mut self,
        prng: &mut Prng,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        bytes: usize,
    ) -> (Instant, Instant) {
        let options = self.options(from, to);
        let left = match options.bandwidth {
            None => now,
            Some(rate) => {
                let free_at = self.free_at.entry((from, to)).or_default();
                let nanos = (bytes as u128 * 1_000_000_000) / u128::from(rate.max(1));
                let takes = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
                *free_at = (*free_at).max(now) + takes;
                *free_at
            }
        };
        (left, left + options.delay + prng.duration(Duration::ZERO..=options.jitter))
    }
}

fn pair(a: IpAddr, b: IpAddr) -> (IpAddr, IpAddr) {
    if a <= b { (a, b) } else { (b, a) }
}

fn set(all: &mut BTreeSet<(IpAddr, IpAddr)>, link: (IpAddr, IpAddr), on: bool) {
    if on {
        all.insert(link)
    } else {
        all.remove(&link)
    };
}
