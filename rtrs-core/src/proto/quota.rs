//! Quota of half-open peers: when there are too many, the oldest peer of the source with the most
//! peers is closed.
//!
//! Peers are not authenticated, and before a peer's first message only its address is known. An
//! address cannot be forged over TCP, since the handshake needs an answer. The limit is therefore
//! shared by address: one source cannot displace others, and a source with only one half-open peer
//! keeps that peer for as long as another source has two. Closing an old peer instead of refusing a
//! new one favors honest peers: they send their request immediately, and the idle ones grow old.
//!
//! Known sources (a session has paths from there) have a reserve of [`RESERVE`] peers that do not
//! count. Unknown peers therefore never displace a reconnect, however many addresses they use.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// Number of peers of a known source that do not count: the connections that its sessions open
/// concurrently.
pub const RESERVE: usize = 64;

/// Origin of a peer: an IPv4 address, or the /64 of an IPv6 address, since a host controls its
/// whole /64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// IPv4 address, including IPv4-mapped IPv6 addresses.
    V4(u32),
    /// Upper half of an IPv6 address.
    V6Net(u64),
}

impl Source {
    /// Returns the source of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address.to_bits()),
            #[allow(clippy::cast_possible_truncation, reason = "64 bits are left")]
            IpAddr::V6(address) => Self::V6Net((address.to_bits() >> 64) as u64),
        }
    }
}

/// Half-open peers by source. Keys increase with time: the smallest is the oldest. A peer may have
/// several connections; ranks count peers, the total counts connections.
#[derive(Debug)]
pub struct Quota<K> {
    /// Source of a peer, and the number of its connections.
    peers: BTreeMap<K, (Source, u32)>,
    shares: BTreeMap<Source, BTreeSet<K>>,
    /// Number of counted peers from a source, its oldest peer, and the source. The last entry is
    /// evicted first.
    ranks: BTreeSet<(usize, Reverse<K>, Source)>,
    known: BTreeMap<Source, u32>,
    total: u32,
}

impl<K> Default for Quota<K> {
    fn default() -> Self {
        Self {
            peers: BTreeMap::new(),
            shares: BTreeMap::new(),
            ranks: BTreeSet::new(),
            known: BTreeMap::new(),
            total: 0,
        }
    }
}

impl<K: Copy + Ord> Quota<K> {
    /// Adds a connection of a new or existing peer.
    pub fn add(&mut self, peer: K, source: Source) {
        let source = self.peers.get(&peer).map_or(source, |(source, _)| *source);
        self.change(source, |quota| {
            quota.shares.entry(source).or_default().insert(peer);
            quota.peers.entry(peer).or_insert((source, 0)).1 += 1;
            quota.total += 1;
        });
    }

    /// Removes a peer with all its connections. Returns false if it is not present.
    pub fn remove(&mut self, peer: K) -> bool {
        let Some((source, count)) = self.peers.get(&peer).copied() else { return false };
        self.change(source, |quota| {
            quota.peers.remove(&peer);
            quota.total -= count;
            if let Some(share) = quota.shares.get_mut(&source) {
                share.remove(&peer);
            }
        });
        if self.shares.get(&source).is_some_and(BTreeSet::is_empty) {
            self.shares.remove(&source);
        }
        true
    }

    /// Records that a session has paths from this source; each call must be balanced by
    /// [`Self::forget`].
    pub fn know(&mut self, source: Source) {
        self.change(source, |quota| *quota.known.entry(source).or_insert(0) += 1);
    }

    /// Records that one fewer session has paths from this source.
    pub fn forget(&mut self, source: Source) {
        self.change(source, |quota| {
            if let Some(count) = quota.known.get_mut(&source) {
                *count -= 1;
                if *count == 0 {
                    quota.known.remove(&source);
                }
            }
        });
    }

    /// Returns the number of connections of all peers.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Returns the number of peers of this source.
    #[must_use]
    pub fn peers_of(&self, source: Source) -> usize {
        self.shares.get(&source).map_or(0, BTreeSet::len)
    }

    /// Returns the peer to evict: the oldest peer of the source with the most peers.
    #[must_use]
    pub fn victim(&self) -> Option<K> {
        self.ranks.last().map(|(_, Reverse(peer), _)| *peer)
    }

    /// Changes the state of a source and updates its rank.
    fn change(&mut self, source: Source, change: impl FnOnce(&mut Self)) {
        if let Some(rank) = self.rank(source) {
            self.ranks.remove(&rank);
        }
        change(self);
        if let Some(rank) = self.rank(source) {
            self.ranks.insert(rank);
        }
    }

    fn rank(&self, source: Source) -> Option<(usize, Reverse<K>, Source)> {
        let share = self.shares.get(&source)?;
        let reserve = if self.known.contains_key(&source) { RESERVE } else { 0 };
        Some((share.len().saturating_sub(reserve), Reverse(*share.first()?), source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::of(text.parse().unwrap())
    }

    /// Adds a peer, then makes room for it; returns the closed peers in order.
    fn admit(quota: &mut Quota<u64>, max: u32, key: u64, from: Source) -> Vec<u64> {
        quota.add(key, from);
        let mut closed = Vec::new();
        while quota.total() > max {
            let victim = quota.victim().unwrap();
            assert!(quota.remove(victim));
            closed.push(victim);
        }
        closed
    }

    #[test]
    fn a_source_is_an_ipv4_address_or_a_64() {
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
        assert_ne!(source("10.0.0.2"), source("10.0.0.1"));
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:0:0:2"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
    }

    #[test]
    fn the_oldest_of_the_busiest_source_is_evicted() {
        let (many, one, two) = (source("10.0.0.1"), source("10.0.0.2"), source("10.0.0.3"));
        let mut quota = Quota::default();
        assert!(admit(&mut quota, 4, 0, one).is_empty());
        for key in 1..4 {
            assert!(admit(&mut quota, 4, key, many).is_empty());
        }
        // The oldest peer overall belongs to a different source and stays.
        assert_eq!(admit(&mut quota, 4, 4, many), [1]);
        assert_eq!(admit(&mut quota, 4, 5, two), [2]);
        assert_eq!(admit(&mut quota, 4, 6, two), [3], "of two with as many: the oldest");
        assert_eq!(admit(&mut quota, 4, 7, one), [0]);
        assert!(quota.remove(5) && !quota.remove(5));
        assert_eq!(quota.total(), 3);
    }

    #[test]
    fn a_peer_with_many_connections_counts_once() {
        let mut quota = Quota::default();
        let (few, many) = (source("10.0.0.1"), source("10.0.0.2"));
        quota.add(1, few);
        for _ in 0..9 {
            quota.add(2, many);
        }
        // Adds connections to an existing peer; the given source is ignored.
        quota.add(2, few);
        assert_eq!((quota.total(), quota.victim()), (11, Some(1)), "one each: the oldest");
        quota.add(3, many);
        assert_eq!((quota.total(), quota.victim()), (12, Some(2)));
        assert!(quota.remove(2));
        assert_eq!((quota.total(), quota.victim()), (2, Some(1)));
        assert!(quota.remove(1) && quota.remove(3) && quota.shares.is_empty());
        assert_eq!((quota.victim(), quota.total()), (None, 0));
    }

    #[test]
    fn unknown_peers_of_many_sources_do_not_evict_known_ones() {
        let known = source("10.1.0.1");
        let unknown = |n: u64| Source::V4(u32::try_from(n).unwrap());
        let mut quota = Quota::default();
        quota.know(known);
        quota.know(known);
        for key in 0..100 {
            admit(&mut quota, 100, key, unknown(key));
        }
        // All sources have one peer each; the known source gets its reserve, and the oldest unknown
        // peers are closed.
        for key in 100..164 {
            assert_eq!(admit(&mut quota, 100, key, known), [key - 100]);
        }
        for key in 164..1000 {
            let [closed] = admit(&mut quota, 100, key, unknown(key))[..] else { panic!("{key}") };
            assert!(!(100..164).contains(&closed), "{closed} was the known source's");
        }
        // Beyond its reserve, the known source counts like any other.
        assert_eq!(admit(&mut quota, 100, 1000, known), [100]);
        assert_eq!(admit(&mut quota, 100, 1001, known), [101]);
        // The source is known for as long as any session has paths from there.
        quota.forget(known);
        assert_ne!(quota.victim(), Some(102));
        quota.forget(known);
        assert_eq!(quota.victim(), Some(102));
        quota.forget(known);
    }

    #[test]
    fn the_oldest_is_evicted_among_known_sources() {
        let mut quota = Quota::default();
        for n in 0..4 {
            quota.know(Source::V4(n));
        }
        for key in 0..4 {
            let from = Source::V4(u32::try_from(key).unwrap());
            assert!(admit(&mut quota, 4, key, from).is_empty());
        }
        assert_eq!(admit(&mut quota, 4, 4, Source::V4(9)), [4], "not for an unknown source");
        assert_eq!(admit(&mut quota, 4, 5, Source::V4(3)), [0]);
    }
}
