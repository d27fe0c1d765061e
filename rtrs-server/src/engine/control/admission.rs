//! Admission control: limits unproven sessions and selects the one to evict.
//!
//! A session is *unproven* until it has opened an export. A client does that right after its first
//! path is up (the kernel's maps a device with the call that creates the session, `rtrs-client`
//! opens on each path), so legitimate sessions are unproven only briefly. Connections of unproven
//! sessions, during the handshake and after it, are limited by `half-open-max`. When that limit or
//! `sessions-max` is reached, the oldest unproven session of the source with the most such sessions
//! is evicted ([`Quota`]), instead of the new one being refused. Creating and ending sessions takes
//! time from working sessions, so evictions are rate limited ([`Turnover`]); beyond that rate the
//! new session is refused. A source without unproven sessions has a budget of its own.
//!
//! Sessions that have opened an export are exempt, and so are those that had one open and
//! reconnect: their ID is a random number of 128 bits, which over plain TCP only both ends and
//! readers of the network between them know. Such sessions are subject only to their own limits
//! (sessions, paths, connections of a path).
//!
//! Owns the table of unproven sessions, and the IDs of sessions that may reconnect.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rtrs_core::ids::SessionId;
use rtrs_core::proto::quota::{Quota, Source};
use rtrs_core::time::{Duration, Instant};

use super::refusal::Refusal;
use crate::engine::session::SessionParams;

/// Maximum number of evicted sessions that are still being torn down. A driver may take long to
/// release their memory; at this limit unproven sessions are refused.
const ENDING_MAX: usize = 64;
/// Maximum number of remembered ended sessions; the oldest is dropped first.
const RETURNING_MAX: usize = 1024;

/// Period to which [`TURNOVER_MAX`] applies.
const TURNOVER_WINDOW: Duration = Duration::from_millis(100);
/// Maximum number of evictions per period, for sources that already have unproven sessions, and for
/// sources that have none.
const TURNOVER_MAX: [u32; 2] = [5, 20];

/// An unproven session: its sequence number and its ID.
type Stranger = (u64, SessionId);

/// Outcome of an admission check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// Admit the connection.
    Free,
    /// Admit the connection after evicting this session.
    After(SessionId),
}

/// A connection that asks for admission.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) session: SessionId,
    pub(super) source: Source,
    /// Whether the client must still authenticate, so that its session ID proves nothing.
    pub(super) must_authenticate: bool,
}

/// Remaining evictions in the current period.
#[derive(Debug, Default)]
struct Turnover {
    until: Option<Instant>,
    left: [u32; 2],
}

impl Turnover {
    /// Consumes one eviction from the budget; `first` selects the budget of sources without
    /// unproven sessions. Returns false if the budget is used up.
    fn take(&mut self, first: bool, now: Instant) -> bool {
        if self.until.is_none_or(|until| now >= until) {
            *self = Self { until: Some(now + TURNOVER_WINDOW), left: TURNOVER_MAX };
        }
        let left = &mut self.left[usize::from(first)];
        let some = *left > 0;
        *left = left.saturating_sub(1);
        some
    }
}

/// State of the admission control.
#[derive(Debug)]
pub(super) struct Admission {
    half_open_max: u32,
    sessions_max: usize,
    strangers: Quota<Stranger>,
    turnover: Turnover,
    numbers: BTreeMap<SessionId, u64>,
    last_number: u64,
    ending: BTreeSet<SessionId>,
    returning: VecDeque<SessionId>,
}

impl Admission {
    pub(super) fn new(params: &SessionParams) -> Self {
        Self {
            half_open_max: params.half_open_max,
            sessions_max: usize::try_from(params.sessions_max).unwrap_or(usize::MAX),
            strangers: Quota::default(),
            turnover: Turnover::default(),
            numbers: BTreeMap::new(),
            last_number: 0,
            ending: BTreeSet::new(),
            returning: VecDeque::new(),
        }
    }

    /// Checks whether a connection can be admitted. `exists`: whether its session has opened an
    /// export, if the session exists; `sessions`: the number of sessions.
    pub(super) fn room(
        &mut self,
        candidate: Candidate,
        exists: Option<bool>,
        sessions: usize,
        now: Instant,
    ) -> Result<Room, Refusal> {
        let Candidate { session: id, source, .. } = candidate;
        let most = self.strangers.total();
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
            return Ok(Room::Free);
        };
        let Some(victim) = self.victim(id) else { return Err(refusal) };
        let first = self.strangers.peers_of(source) == 0;
        if trusted || self.turnover.take(first, now) {
            Ok(Room::After(victim))
        } else {
            Err(Refusal::Turnover)
        }
    }

    /// Whether the connection belongs to a session that may reconnect.
    fn may_return(&self, candidate: Candidate) -> bool {
        !candidate.must_authenticate && self.returning.contains(&candidate.session)
    }

    /// Selects the unproven session to evict for a connection of this session.
    fn victim(&self, of: SessionId) -> Option<SessionId> {
        let (_, id) = self.strangers.victim().filter(|_| self.ending.len() < ENDING_MAX)?;
        (id != of).then_some(id)
    }

    /// Records an admitted connection; `opened`: its session has opened an export. A client that
    /// must still authenticate counts as unproven, even with the ID of a session that may
    /// reconnect.
    pub(super) fn joined(&mut self, candidate: Candidate, opened: bool) {
        if opened || self.may_return(candidate) {
            return;
        }
        let Candidate { session: id, source, .. } = candidate;
        let number = *self.numbers.entry(id).or_insert_with(|| {
            self.last_number += 1;
            self.last_number
        });
        self.strangers.add((number, id), source);
    }

    /// Records that a client has proved to own a session. If the session is one that may reconnect,
    /// it is no longer unproven.
    pub(super) fn proved(&mut self, id: SessionId) {
        if self.returning.contains(&id) {
            self.opened(id);
        }
    }

    /// Records that a session opened an export, so that it is no longer unproven.
    pub(super) fn opened(&mut self, id: SessionId) {
        if let Some(number) = self.numbers.remove(&id) {
            self.strangers.remove((number, id));
        }
    }

    /// Records that a session is being evicted.
    pub(super) fn crowded_out(&mut self, id: SessionId) {
        self.opened(id);
        self.ending.insert(id);
    }

    /// Records the end of a session; `opened`: it had opened an export.
    pub(super) fn ended(&mut self, id: SessionId, opened: bool) {
        self.opened(id);
        self.ending.remove(&id);
        if !opened {
            return;
        }
        self.returning.retain(|other| *other != id);
        if self.returning.len() >= RETURNING_MAX {
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

    /// Checks the admission of a session from a source with many connections.
    fn room(
        admission: &mut Admission,
        n: usize,
        exists: Option<bool>,
        sessions: usize,
    ) -> Result<Room, Refusal> {
        admission.room(candidate(id(n), MANY), exists, sessions, Instant::ZERO)
    }

    fn admission(half_open_max: u32, sessions_max: u32) -> Admission {
        Admission::new(&SessionParams { half_open_max, sessions_max, ..SessionParams::default() })
    }

    #[test]
    fn evicts_the_oldest_session_of_the_busiest_source() {
        let mut admission = admission(4, 100);
        admission.joined(candidate(id(1), FEW), false);
        for n in 2..5 {
            assert_eq!(room(&mut admission, n, None, n), Ok(Room::Free));
            admission.joined(candidate(id(n), MANY), false);
        }
        assert_eq!(room(&mut admission, 5, None, 4), Ok(Room::After(id(2))));
        // A connection is refused if its own session would be the one to evict.
        assert_eq!(room(&mut admission, 2, Some(false), 4), Err(Refusal::HalfOpen(4)));
        admission.crowded_out(id(2));
        assert_eq!(room(&mut admission, 5, None, 4), Ok(Room::Free));
        assert_eq!(room(&mut admission, 2, Some(false), 4), Err(Refusal::HalfOpen(3)));
        admission.ended(id(2), false);
        // A session that has opened an export is not counted.
        admission.joined(candidate(id(5), MANY), false);
        admission.opened(id(5));
        assert_eq!(room(&mut admission, 6, None, 4), Ok(Room::Free));
        admission.joined(candidate(id(6), MANY), true);
        assert_eq!(room(&mut admission, 6, None, 4), Ok(Room::Free));
    }

    #[test]
    fn known_and_returning_sessions_are_admitted_despite_unproven_ones() {
        let mut admission = admission(2, 100);
        admission.ended(id(9), true);
        admission.joined(candidate(id(1), MANY), false);
        admission.joined(candidate(id(2), MANY), false);
        for (n, exists) in [(8, Some(true)), (9, None), (9, Some(false))] {
            assert_eq!(room(&mut admission, n, exists, 3), Ok(Room::Free), "{n}");
            admission.joined(candidate(id(n), MANY), exists == Some(true));
        }
        assert_eq!(admission.strangers.total(), 2);
        assert_eq!(room(&mut admission, 3, None, 4), Ok(Room::After(id(1))));
    }

    #[test]
    fn a_session_id_is_no_proof() {
        let mut admission = admission(2, 100);
        admission.ended(id(9), true);
        admission.joined(authenticating(id(9), FEW), false);
        assert_eq!(admission.strangers.total(), 1, "the ID may be another client's");
        admission.joined(candidate(id(1), MANY), false);
        let full = admission.room(authenticating(id(9), FEW), Some(false), 2, Instant::ZERO);
        assert_eq!(full, Err(Refusal::HalfOpen(2)), "this session is the oldest itself");
        assert_eq!(room(&mut admission, 9, Some(false), 2), Ok(Room::Free));
        admission.proved(id(1));
        assert_eq!(admission.strangers.total(), 2, "that session never had anything open");
        admission.proved(id(9));
        assert_eq!(admission.strangers.total(), 1);
    }

    #[test]
    fn unproven_sessions_are_evicted_at_the_session_limit() {
        let mut admission = admission(100, 3);
        admission.joined(candidate(id(1), MANY), false);
        // A session that reconnects needs a place too.
        admission.ended(id(9), true);
        for new in [7, 9] {
            assert_eq!(room(&mut admission, new, None, 2), Ok(Room::Free));
            assert_eq!(room(&mut admission, new, None, 3), Ok(Room::After(id(1))));
        }
        admission.crowded_out(id(1));
        assert_eq!(room(&mut admission, 7, None, 3), Ok(Room::Free), "one of the three is ending");
        assert_eq!(room(&mut admission, 7, None, 4), Err(Refusal::Sessions(4)), "no stranger");
        assert_eq!(room(&mut admission, 8, Some(true), 4), Ok(Room::Free));
    }

    #[test]
    fn the_number_of_evictions_per_second_is_limited() {
        let mut admission = admission(8, 100);
        for n in 0..8 {
            admission.joined(candidate(id(n), MANY), false);
        }
        admission.ended(id(99), true);
        let begin = Instant::ZERO;
        let mut ask = |n, source, now| {
            let room = admission.room(candidate(id(n), source), None, 8, now);
            if let Ok(Room::After(stranger)) = room {
                admission.crowded_out(stranger);
                admission.ended(stranger, false);
                admission.joined(candidate(id(n), source), false);
            }
            room
        };
        for n in 10..15 {
            assert!(ask(n, MANY, begin).is_ok(), "{n}");
        }
        assert_eq!(ask(15, MANY, begin), Err(Refusal::Turnover));
        // A source without unproven sessions has a budget of its own, and a reconnecting session
        // needs none.
        assert!(ask(16, FEW, begin).is_ok());
        assert_eq!(ask(17, FEW, begin), Err(Refusal::Turnover));
        assert!(ask(99, MANY, begin).is_ok());
        for n in 20..39 {
            assert!(ask(n, Source::V4(100 + n as u32), begin).is_ok(), "{n}");
        }
        assert_eq!(ask(40, Source::V4(200), begin), Err(Refusal::Turnover));
        assert!(ask(41, MANY, begin + TURNOVER_WINDOW).is_ok());
    }

    #[test]
    fn the_number_of_remembered_sessions_is_bounded() {
        let mut admission = admission(1, 1 << 16);
        for n in 0..=RETURNING_MAX {
            admission.ended(id(n), true);
            admission.ended(id(n), true);
        }
        assert_eq!(admission.returning.len(), RETURNING_MAX);
        assert!(!admission.returning.contains(&id(0)), "the oldest is forgotten");
        for n in 2000..2000 + ENDING_MAX {
            admission.joined(candidate(id(n), FEW), false);
            admission.crowded_out(id(n));
        }
        admission.joined(candidate(id(3000), FEW), false);
        assert_eq!(room(&mut admission, 3001, None, 99), Err(Refusal::HalfOpen(1)));
        admission.ended(id(2000), false);
        assert_eq!(room(&mut admission, 3001, None, 98), Ok(Room::After(id(3000))));
        assert_eq!(admission.numbers.len(), 1);
    }
}
