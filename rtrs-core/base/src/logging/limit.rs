//! Rate limits for repeated log lines, whatever their cause.
//!
//! Many lines are caused by peers, including unauthenticated ones, and no peer may fill a disk or
//! cause the journal to drop others' lines. Each call site that logs has a budget, and each peer
//! has a share of each call site's budget, so that one peer alone cannot exhaust it. Lines beyond a
//! budget are counted, and the next line that passes reports their number. Call sites that know
//! more about their lines limit them further (`log_limit.rs`).

use std::sync::Mutex;

use tracing::callsite::Identifier;

use crate::time::{Duration, Instant};

/// Number of lines that a call site may log in a burst, and the time after which it may log another
/// line.
const PLACE: Rate = Rate { burst: 1000, pause: Duration::from_millis(500) };
/// Number of lines that a call site may log in a burst for one peer, and the time after which it
/// may log another line.
const PEER: Rate = Rate { burst: 100, pause: Duration::from_secs(5) };
/// Maximum number of peers distinguished per call site; a new peer replaces the one that has been
/// quiet the longest.
const PEERS_MAX: usize = 64;

#[derive(Clone, Copy)]
struct Rate {
    burst: u64,
    pause: Duration,
}

/// Origin of a line.
pub(super) struct Origin<'a> {
    pub(super) callsite: Identifier,
    pub(super) peer: Option<&'a str>,
}

/// Decision on a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admission {
    LeftOut,
    /// The line passes; contains the number of lines from this origin suppressed since the last
    /// line that passed.
    Passes {
        left_out: u64,
    },
}

/// Budgets of all call sites.
#[derive(Default)]
pub(super) struct Limits(Mutex<Vec<Place>>);

/// Remaining budget.
struct Budget {
    lines: u64,
    /// Time from which the next line accrues.
    since: Instant,
}

struct Place {
    callsite: Identifier,
    budget: Budget,
    left_out: u64,
    peers: Vec<Peer>,
}

struct Peer {
    name: String,
    budget: Budget,
    last: Instant,
    left_out: u64,
}

impl Budget {
    fn new(now: Instant, rate: Rate) -> Self {
        Self { lines: rate.burst, since: now }
    }

    fn refill(&mut self, now: Instant, rate: Rate) {
        let pauses = now.since(self.since).as_nanos() / rate.pause.as_nanos();
        let pauses = u64::try_from(pauses).unwrap_or(u64::MAX);
        if pauses >= rate.burst - self.lines {
            (self.lines, self.since) = (rate.burst, now);
        } else {
            self.lines += pauses;
            self.since = self.since + rate.pause * u32::try_from(pauses).unwrap_or(u32::MAX);
        }
    }
}

impl Limits {
    pub(super) fn admit(&self, now: Instant, origin: &Origin<'_>) -> Admission {
        let mut places = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let found = places.iter().position(|place| place.callsite == origin.callsite);
        let at = found.unwrap_or_else(|| {
            places.push(Place {
                callsite: origin.callsite.clone(),
                budget: Budget::new(now, PLACE),
                left_out: 0,
                peers: Vec::new(),
            });
            places.len() - 1
        });
        places[at].admit(now, origin.peer)
    }
}

impl Place {
    fn admit(&mut self, now: Instant, peer: Option<&str>) -> Admission {
        self.budget.refill(now, PLACE);
        let mut left_out = 0;
        if let Some(name) = peer {
            let at = self.peer(now, name);
            let peer = &mut self.peers[at];
            peer.last = now;
            peer.budget.refill(now, PEER);
            if self.budget.lines == 0 || peer.budget.lines == 0 {
                peer.left_out += 1;
                return Admission::LeftOut;
            }
            peer.budget.lines -= 1;
            left_out = std::mem::take(&mut peer.left_out);
        } else if self.budget.lines == 0 {
            self.left_out += 1;
            return Admission::LeftOut;
        }
        self.budget.lines -= 1;
        // Includes suppressed lines from peers that have been replaced.
        Admission::Passes { left_out: left_out + std::mem::take(&mut self.left_out) }
    }

    /// Returns the index of a peer in the table.
    fn peer(&mut self, now: Instant, name: &str) -> usize {
        if let Some(at) = self.peers.iter().position(|peer| peer.name == name) {
            return at;
        }
        let peer =
            Peer { name: name.to_owned(), budget: Budget::new(now, PEER), last: now, left_out: 0 };
        if self.peers.len() < PEERS_MAX {
            self.peers.push(peer);
            return self.peers.len() - 1;
        }
        let quietest = self.peers.iter().enumerate().min_by_key(|(_, peer)| peer.last);
        let at = quietest.map_or(0, |(at, _)| at);
        self.left_out += std::mem::replace(&mut self.peers[at], peer).left_out;
        at
    }
}

#[cfg(test)]
mod tests {
    use tracing::callsite::Callsite;

    use super::*;

    struct Here;

    impl Callsite for Here {
        fn set_interest(&self, _: tracing::subscriber::Interest) {}

        fn metadata(&self) -> &tracing::Metadata<'_> {
            unreachable!("only its address counts")
        }
    }

    static HERE: Here = Here;

    fn admitted(limits: &Limits, now: Instant, peer: Option<&str>) -> Admission {
        limits.admit(now, &Origin { callsite: Identifier(&HERE), peer })
    }

    fn passed(limits: &Limits, now: Instant, peer: Option<&str>, count: u64) -> u64 {
        let lines = (0..count).filter(|_| admitted(limits, now, peer) != Admission::LeftOut);
        lines.count() as u64
    }

    #[test]
    fn a_peer_uses_only_its_own_budget() {
        let limits = Limits::default();
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        assert_eq!(passed(&limits, at(0), Some("a"), 10_000), PEER.burst);
        assert_eq!(passed(&limits, at(0), Some("b"), 3), 3);
        assert_eq!(admitted(&limits, at(4), Some("a")), Admission::LeftOut);
        assert_eq!(admitted(&limits, at(5), Some("a")), Admission::Passes { left_out: 9901 });
        assert_eq!(admitted(&limits, at(5), Some("a")), Admission::LeftOut);
        assert_eq!(passed(&limits, at(5 + 5 * PEER.burst), Some("a"), 1000), PEER.burst);
    }

    #[test]
    fn all_peers_share_the_budget_of_a_call_site() {
        let limits = Limits::default();
        let mut passing = 0;
        for peer in 0..10_000 {
            passing += passed(&limits, Instant::ZERO, Some(&peer.to_string()), 1);
        }
        assert_eq!(passing, PLACE.burst);
        let later = Instant::ZERO + PLACE.pause;
        // Suppressed lines are counted, including those from forgotten peers.
        assert_eq!(admitted(&limits, later, Some("new")), Admission::Passes { left_out: 9000 });
        let places = limits.0.lock().unwrap();
        let kept: u64 = places[0].peers.iter().map(|peer| peer.left_out).sum();
        assert_eq!((kept, places[0].peers.len()), (0, PEERS_MAX));
    }

    #[test]
    fn lines_without_a_peer_use_the_budget_of_a_call_site() {
        let limits = Limits::default();
        assert_eq!(passed(&limits, Instant::ZERO, None, 10_000), PLACE.burst);
        let later = Instant::ZERO + PLACE.pause * 3;
        assert_eq!(passed(&limits, later, None, 10_000), 3);
    }
}
