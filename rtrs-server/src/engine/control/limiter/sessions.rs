//! Limits for unproven sessions, and the selection of the session to evict.
//!
//! A session is *unproven* until it has opened an export. A client does that right after its first
//! path is up (the kernel client maps a device with the call that creates the session,
//! `rtrs-client` opens on each path), so legitimate sessions are unproven only briefly. Connections
//! of unproven sessions, during the handshake and after it, are limited by `half-open-max`. When
//! that limit or `sessions-max` is reached, the oldest unproven session of the source with the most
//! such sessions is evicted ([`Quota`]), and the new session is admitted. Creating and ending
//! sessions slows down working sessions, so evictions are rate limited ([`EvictionBudget`]); beyond
//! that rate the new session is refused. Sources without unproven sessions have a separate budget.
//!
//! Sessions that have opened an export are exempt, and so are sessions that had an export open and
//! reconnect: their ID is a random 128-bit number, which over plain TCP only the two ends and
//! anyone who can read the network between them know. Such sessions are subject only to their own
//! limits (sessions, paths, connections of a path).
//!
//! Owns the table of unproven sessions, and the IDs of sessions that may reconnect.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rtrs_core::ids::SessionId;
use rtrs_core::proto::quota::{Quota, Source};
use rtrs_core::time::{Duration, Instant};

use crate::engine::control::refusal::Refusal;
use crate::engine::session::SessionParams;

/// Maximum number of evicted sessions that are still being torn down. A driver may be slow to
/// release their memory; at this limit unproven sessions are refused.
const TEARDOWN_MAX: usize = 64;
/// Maximum number of remembered ended sessions; the oldest is dropped first.
const REMEMBERED_MAX: usize = 1024;

/// Period to which [`BUDGET_PER_PERIOD`] applies.
const BUDGET_PERIOD: Duration = Duration::from_millis(100);
/// Maximum number of evictions per period, for sources that already have unproven sessions, and for
/// sources that have none.
const BUDGET_PER_PERIOD: [u32; 2] = [5, 20];

/// An unproven session: its sequence number and its ID.
type Unproven = (u64, SessionId);

/// Decision on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::control) enum Decision {
    Accept,
    /// Accept once this session has been evicted.
    AcceptAfterEvicting(SessionId),
}

/// A connection that asks for admission.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine::control) struct Candidate {
    pub(in crate::engine::control) session: SessionId,
    pub(in crate::engine::control) source: Source,
    /// Whether the client must still authenticate, in which case its session ID proves nothing.
    pub(in crate::engine::control) must_authenticate: bool,
}

/// Remaining evictions in the current period.
#[derive(Debug, Default)]
struct EvictionBudget {
    until: Option<Instant>,
    left: [u32; 2],
}

impl EvictionBudget {
    /// Consumes one eviction from the budget; `first` selects the budget of sources without
    /// unproven sessions. Returns false if the budget is used up.
    fn take(&mut self, first: bool, now: Instant) -> bool {
        if self.until.is_none_or(|until| now >= until) {
            *self = Self { until: Some(now + BUDGET_PERIOD), left: BUDGET_PER_PERIOD };
        }
        let left = &mut self.left[usize::from(first)];
        let some = *left > 0;
        *left = left.saturating_sub(1);
        some
    }
}

/// Unproven sessions, and the budget for evicting them.
#[derive(Debug)]
pub(super) struct UnprovenSessions {
    half_open_max: u32,
    sessions_max: usize,
    unproven: Quota<Unproven>,
    budget: EvictionBudget,
    numbers: BTreeMap<SessionId, u64>,
    last_number: u64,
    ending: BTreeSet<SessionId>,
    returning: VecDeque<SessionId>,
}

impl UnprovenSessions {
    pub(super) fn new(params: &SessionParams) -> Self {
        Self {
            half_open_max: params.half_open_max,
            sessions_max: usize::try_from(params.sessions_max).unwrap_or(usize::MAX),
            unproven: Quota::default(),
            budget: EvictionBudget::default(),
            numbers: BTreeMap::new(),
            last_number: 0,
            ending: BTreeSet::new(),
            returning: VecDeque::new(),
        }
    }

    /// Checks whether a connection can be admitted. `exists` says whether its session, if there is
    /// one, has opened an export; `sessions` is the number of sessions.
    pub(super) fn decide(
        &mut self,
        candidate: Candidate,
        exists: Option<bool>,
        sessions: usize,
        now: Instant,
    ) -> Result<Decision, Refusal> {
        let Candidate { session: id, source, .. } = candidate;
        let most = self.unproven.total();
        if self.ending.contains(&id) {
            return Err(Refusal::HalfOpen(most));
        }
        let live = sessions.saturating_sub(self.ending.len());
        let trusted = exists == Some(true) || self.may_return(candidate);
        let refusal = if exists.is_none() && live >= self.sessions_max {
            Refusal::Sessions(u32::try_from(sessions).unwrap_or(u32::MAX))
        } else if !trusted && most >= self.half_open_max {
            Refusal::HalfOpen(most)
        } else {
            return Ok(Decision::Accept);
        };
        let Some(victim) = self.victim(id) else { return Err(refusal) };
        let first = self.unproven.peers_of(source) == 0;
        if trusted || self.budget.take(first, now) {
            Ok(Decision::AcceptAfterEvicting(victim))
        } else {
            Err(Refusal::Turnover)
        }
    }

    /// Whether the connection belongs to a session that may reconnect.
    fn may_return(&self, candidate: Candidate) -> bool {
        !candidate.must_authenticate && self.returning.contains(&candidate.session)
    }

    /// Selects the unproven session to evict for a connection of session `of`.
    fn victim(&self, of: SessionId) -> Option<SessionId> {
        let (_, id) = self.unproven.victim().filter(|_| self.ending.len() < TEARDOWN_MAX)?;
        (id != of).then_some(id)
    }

    /// Records an admitted connection; `opened` says whether its session has opened an export. A
    /// client that must still authenticate counts as unproven, even with the ID of a session that
    /// may reconnect.
    pub(super) fn joined(&mut self, candidate: Candidate, opened: bool) {
        if opened || self.may_return(candidate) {
            return;
        }
        let Candidate { session: id, source, .. } = candidate;
        let number = *self.numbers.entry(id).or_insert_with(|| {
            self.last_number += 1;
            self.last_number
        });
        self.unproven.add((number, id), source);
    }

    /// Records that a client has proved that it owns a session. A session that may reconnect is
    /// then no longer unproven.
    pub(super) fn proved(&mut self, id: SessionId) {
        if self.returning.contains(&id) {
            self.opened(id);
        }
    }

    /// Records that a session opened an export, so it is no longer unproven.
    pub(super) fn opened(&mut self, id: SessionId) {
        if let Some(number) = self.numbers.remove(&id) {
            self.unproven.remove((number, id));
        }
    }

    /// Records that a session is being evicted.
    pub(super) fn evicting(&mut self, id: SessionId) {
        self.opened(id);
        self.ending.insert(id);
    }

    /// Records the end of a session; `opened` says whether it had opened an export.
    pub(super) fn ended(&mut self, id: SessionId, opened: bool) {
        self.opened(id);
        self.ending.remove(&id);
        if !opened {
            return;
        }
        self.returning.retain(|other| *other != id);
        if self.returning.len() >= REMEMBERED_MAX {
            self.returning.pop_front();
        }
        self.returning.push_back(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FEW: Source = Source::V4(1);
    const MANY: Source = Source::V4(2);

    fn id(n: usize) -> SessionId {
        SessionId((n as u128).to_be_bytes())
    }

    fn candidate(session: SessionId, source: Source) -> Candidate {
        Candidate { session, source, must_authenticate: false }
    }

    fn authenticating(session: SessionId, source: Source) -> Candidate {
        Candidate { session, source, must_authenticate: true }
    }

    /// Decides whether to admit a session from a source with many connections.
    fn decide(
        sessions: &mut UnprovenSessions,
        n: usize,
        exists: Option<bool>,
        count: usize,
    ) -> Result<Decision, Refusal> {
        sessions.decide(candidate(id(n), MANY), exists, count, Instant::ZERO)
    }

    fn sessions(half_open_max: u32, sessions_max: u32) -> UnprovenSessions {
        UnprovenSessions::new(&SessionParams {
            half_open_max,
            sessions_max,
            ..SessionParams::default()
        })
    }

    #[test]
    fn evicts_the_oldest_session_of_the_busiest_source() {
        let mut sessions = sessions(4, 100);
        sessions.joined(candidate(id(1), FEW), false);
        for n in 2..5 {
            assert_eq!(decide(&mut sessions, n, None, n), Ok(Decision::Accept));
            sessions.joined(candidate(id(n), MANY), false);
        }
        assert_eq!(decide(&mut sessions, 5, None, 4), Ok(Decision::AcceptAfterEvicting(id(2))));
        // A connection is refused if its own session would be evicted.
        assert_eq!(decide(&mut sessions, 2, Some(false), 4), Err(Refusal::HalfOpen(4)));
        sessions.evicting(id(2));
        assert_eq!(decide(&mut sessions, 5, None, 4), Ok(Decision::Accept));
        assert_eq!(decide(&mut sessions, 2, Some(false), 4), Err(Refusal::HalfOpen(3)));
        sessions.ended(id(2), false);
        // A session that has opened an export is not counted.
        sessions.joined(candidate(id(5), MANY), false);
        sessions.opened(id(5));
        assert_eq!(decide(&mut sessions, 6, None, 4), Ok(Decision::Accept));
        sessions.joined(candidate(id(6), MANY), true);
        assert_eq!(decide(&mut sessions, 6, None, 4), Ok(Decision::Accept));
    }

    #[test]
    fn known_and_returning_sessions_are_admitted_despite_unproven_ones() {
        let mut sessions = sessions(2, 100);
        sessions.ended(id(9), true);
        sessions.joined(candidate(id(1), MANY), false);
        sessions.joined(candidate(id(2), MANY), false);
        for (n, exists) in [(8, Some(true)), (9, None), (9, Some(false))] {
            assert_eq!(decide(&mut sessions, n, exists, 3), Ok(Decision::Accept), "{n}");
            sessions.joined(candidate(id(n), MANY), exists == Some(true));
        }
        assert_eq!(sessions.unproven.total(), 2);
        assert_eq!(decide(&mut sessions, 3, None, 4), Ok(Decision::AcceptAfterEvicting(id(1))));
    }

    #[test]
    fn a_session_id_is_not_proof() {
        let mut sessions = sessions(2, 100);
        sessions.ended(id(9), true);
        sessions.joined(authenticating(id(9), FEW), false);
        assert_eq!(sessions.unproven.total(), 1, "the ID may be another client's");
        sessions.joined(candidate(id(1), MANY), false);
        let full = sessions.decide(authenticating(id(9), FEW), Some(false), 2, Instant::ZERO);
        assert_eq!(full, Err(Refusal::HalfOpen(2)), "this session is the oldest itself");
        assert_eq!(decide(&mut sessions, 9, Some(false), 2), Ok(Decision::Accept));
        sessions.proved(id(1));
        assert_eq!(sessions.unproven.total(), 2, "that session never had anything open");
        sessions.proved(id(9));
        assert_eq!(sessions.unproven.total(), 1);
    }

    #[test]
    fn unproven_sessions_are_evicted_at_the_session_limit() {
        let mut sessions = sessions(100, 3);
        sessions.joined(candidate(id(1), MANY), false);
        // A session that reconnects counts towards the limit too.
        sessions.ended(id(9), true);
        for new in [7, 9] {
            assert_eq!(decide(&mut sessions, new, None, 2), Ok(Decision::Accept));
            assert_eq!(
                decide(&mut sessions, new, None, 3),
                Ok(Decision::AcceptAfterEvicting(id(1)))
            );
        }
        sessions.evicting(id(1));
        assert_eq!(
            decide(&mut sessions, 7, None, 3),
            Ok(Decision::Accept),
            "one of the three is ending"
        );
        assert_eq!(decide(&mut sessions, 7, None, 4), Err(Refusal::Sessions(4)), "no victim");
        assert_eq!(decide(&mut sessions, 8, Some(true), 4), Ok(Decision::Accept));
    }

    #[test]
    fn the_number_of_evictions_per_second_is_limited() {
        let mut sessions = sessions(8, 100);
        for n in 0..8 {
            sessions.joined(candidate(id(n), MANY), false);
        }
        sessions.ended(id(99), true);
        let begin = Instant::ZERO;
        let mut ask = |n, source, now| {
            let room = sessions.decide(candidate(id(n), source), None, 8, now);
            if let Ok(Decision::AcceptAfterEvicting(victim)) = room {
                sessions.evicting(victim);
                sessions.ended(victim, false);
                sessions.joined(candidate(id(n), source), false);
            }
            room
        };
        for n in 10..15 {
            assert!(ask(n, MANY, begin).is_ok(), "{n}");
        }
        assert_eq!(ask(15, MANY, begin), Err(Refusal::Turnover));
        // Sources without unproven sessions have a separate budget, and a reconnecting session
        // needs none.
        assert!(ask(16, FEW, begin).is_ok());
        assert_eq!(ask(17, FEW, begin), Err(Refusal::Turnover));
        assert!(ask(99, MANY, begin).is_ok());
        for n in 20..39 {
            assert!(ask(n, Source::V4(100 + n as u32), begin).is_ok(), "{n}");
        }
        assert_eq!(ask(40, Source::V4(200), begin), Err(Refusal::Turnover));
        assert!(ask(41, MANY, begin + BUDGET_PERIOD).is_ok());
    }

    #[test]
    fn the_number_of_remembered_sessions_is_bounded() {
        let mut sessions = sessions(1, 1 << 16);
        for n in 0..=REMEMBERED_MAX {
            sessions.ended(id(n), true);
            sessions.ended(id(n), true);
        }
        assert_eq!(sessions.returning.len(), REMEMBERED_MAX);
        assert!(!sessions.returning.contains(&id(0)), "the oldest is forgotten");
        for n in 2000..2000 + TEARDOWN_MAX {
            sessions.joined(candidate(id(n), FEW), false);
            sessions.evicting(id(n));
        }
        sessions.joined(candidate(id(3000), FEW), false);
        assert_eq!(decide(&mut sessions, 3001, None, 99), Err(Refusal::HalfOpen(1)));
        sessions.ended(id(2000), false);
        assert_eq!(
            decide(&mut sessions, 3001, None, 98),
            Ok(Decision::AcceptAfterEvicting(id(3000)))
        );
        assert_eq!(sessions.numbers.len(), 1);
    }
}
