//! Who is let in when too many ask, and which session has to go for it.
//!
//! Nothing authenticates a client. A session is a *stranger's* until it has opened an export: a
//! client does that right after its first path is up (the kernel's maps a device with the call
//! that makes the session, ours opens on each path), so strangers are few and stay for a moment.
//! Their connections, in the handshake or behind it, are limited by `half-open-max`. Beyond that,
//! and when there are `sessions-max` sessions, the oldest stranger of the source that has the most
//! ends ([`Quota`]), instead of the new one being refused. Making a session and ending one costs
//! the sessions at work their time, so only so many end for others in a second ([`Turnover`]);
//! beyond that the new one is refused. A source that has no stranger has a share of its own.
//!
//! Sessions that have opened an export are not limited so, nor are those that had one open and come
//! back: their number is a random one of 128 bits, which over plain TCP nobody knows but the two
//! ends and who reads the network between them. What their own limits allow (sessions, paths,
//! connections of a path) is their reserve.
//!
//! Owns the table of strangers, and the numbers of sessions that may come back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rtrs_core::ids::SessionId;
use rtrs_core::proto::quota::{Quota, Source};
use rtrs_core::time::{Duration, Instant};

use super::refusal::Refusal;
use crate::engine::session::SessionParams;

/// Sessions that were ended for others and are not gone yet. Their memory may stay for as long as a
/// driver needs; with so many strangers are refused.
const ENDING_MAX: usize = 64;
/// Ended sessions that are remembered; the oldest is forgotten for one more.
const RETURNING_MAX: usize = 1024;

/// For this long [`TURNOVER_MAX`] holds.
const TURNOVER_WINDOW: Duration = Duration::from_millis(100);
/// Strangers that end in that time for others of a source that has strangers, and for others of one
/// that has none.
const TURNOVER_MAX: [u32; 2] = [5, 20];

/// A session that has opened nothing: its place in the order in which they came, and its number.
type Stranger = (u64, SessionId);

/// Whether a connection has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// It has.
    Free,
    /// It may have when this session was ended.
    After(SessionId),
}

/// How many strangers still may end for others, and until when.
#[derive(Debug, Default)]
struct Turnover {
    until: Option<Instant>,
    left: [u32; 2],
}

impl Turnover {
    /// One ends for a stranger of a source that has strangers or, `first`, has none. False if that
    /// would be too many.
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

/// Sessions of strangers.
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

    /// Whether a connection of this session, from this source, has room beside so many sessions;
    /// `proves`: its client has still to prove who it is; `exists`: the session is one of them, and
    /// has opened an export or not.
    pub(super) fn room(
        &mut self,
        (id, source, proves): (SessionId, Source, bool),
        exists: Option<bool>,
        sessions: usize,
        now: Instant,
    ) -> Result<Room, Refusal> {
        let most = self.strangers.total();
        if self.ending.contains(&id) {
            return Err(Refusal::HalfOpen(most));
        }
        let live = sessions.saturating_sub(self.ending.len());
        let trusted = exists == Some(true) || !proves && self.returning.contains(&id);
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

    /// The stranger that has to go for a connection of this session.
    fn victim(&self, of: SessionId) -> Option<SessionId> {
        let (_, id) = self.strangers.victim().filter(|_| self.ending.len() < ENDING_MAX)?;
        (id != of).then_some(id)
    }

    /// A connection of a session was let in; `opened`: that has opened an export. Whoever has still
    /// to prove who he is is a stranger, also with the number of a session that may come back.
    pub(super) fn joined(&mut self, (id, source, proves): (SessionId, Source, bool), opened: bool) {
        if opened || !proves && self.returning.contains(&id) {
            return;
        }
        let number = *self.numbers.entry(id).or_insert_with(|| {
            self.last_number += 1;
            self.last_number
        });
        self.strangers.add((number, id), source);
    }

    /// A client has proved that a session is its own. If that comes back, it is no stranger's.
    pub(super) fn proved(&mut self, id: SessionId) {
        if self.returning.contains(&id) {
            self.opened(id);
        }
    }

    /// A session has opened an export: it is no stranger's.
    pub(super) fn opened(&mut self, id: SessionId) {
        if let Some(number) = self.numbers.remove(&id) {
            self.strangers.remove((number, id));
        }
    }

    /// A session is being ended for others.
    pub(super) fn crowded_out(&mut self, id: SessionId) {
        self.opened(id);
        self.ending.insert(id);
    }

    /// A session is gone; `opened`: it had opened an export.
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

    /// Whether there is room for a session, if many come from its source.
    fn room(
        admission: &mut Admission,
        n: usize,
        exists: Option<bool>,
        sessions: usize,
    ) -> Result<Room, Refusal> {
        admission.room((id(n), MANY, false), exists, sessions, Instant::ZERO)
    }

    fn admission(half_open_max: u32, sessions_max: u32) -> Admission {
        Admission::new(&SessionParams { half_open_max, sessions_max, ..SessionParams::default() })
    }

    #[test]
    fn the_oldest_stranger_of_the_greatest_source_goes_first() {
        let mut admission = admission(4, 100);
        admission.joined((id(1), FEW, false), false);
        for n in 2..5 {
            assert_eq!(room(&mut admission, n, None, n), Ok(Room::Free));
            admission.joined((id(n), MANY, false), false);
        }
        assert_eq!(room(&mut admission, 5, None, 4), Ok(Room::After(id(2))));
        // More of a session that is itself the one to go is refused.
        assert_eq!(room(&mut admission, 2, Some(false), 4), Err(Refusal::HalfOpen(4)));
        admission.crowded_out(id(2));
        assert_eq!(room(&mut admission, 5, None, 4), Ok(Room::Free));
        assert_eq!(room(&mut admission, 2, Some(false), 4), Err(Refusal::HalfOpen(3)));
        admission.ended(id(2), false);
        // What has opened an export is not counted.
        admission.joined((id(5), MANY, false), false);
        admission.opened(id(5));
        assert_eq!(room(&mut admission, 6, None, 4), Ok(Room::Free));
        admission.joined((id(6), MANY, false), true);
        assert_eq!(room(&mut admission, 6, None, 4), Ok(Room::Free));
    }

    #[test]
    fn sessions_that_exist_or_come_back_are_not_kept_out_by_strangers() {
        let mut admission = admission(2, 100);
        admission.ended(id(9), true);
        admission.joined((id(1), MANY, false), false);
        admission.joined((id(2), MANY, false), false);
        for (n, exists) in [(8, Some(true)), (9, None), (9, Some(false))] {
            assert_eq!(room(&mut admission, n, exists, 3), Ok(Room::Free), "{n}");
            admission.joined((id(n), MANY, false), exists == Some(true));
        }
        assert_eq!(admission.strangers.total(), 2);
        assert_eq!(room(&mut admission, 3, None, 4), Ok(Room::After(id(1))));
    }

    #[test]
    fn a_number_proves_nothing() {
        let mut admission = admission(2, 100);
        admission.ended(id(9), true);
        admission.joined((id(9), FEW, true), false);
        assert_eq!(admission.strangers.total(), 1, "it may be anybody's");
        admission.joined((id(1), MANY, false), false);
        let full = admission.room((id(9), FEW, true), Some(false), 2, Instant::ZERO);
        assert_eq!(full, Err(Refusal::HalfOpen(2)), "it is the oldest itself");
        assert_eq!(room(&mut admission, 9, Some(false), 2), Ok(Room::Free));
        admission.proved(id(1));
        assert_eq!(admission.strangers.total(), 2, "that one never had anything open");
        admission.proved(id(9));
        assert_eq!(admission.strangers.total(), 1);
    }

    #[test]
    fn strangers_go_when_there_are_too_many_sessions() {
        let mut admission = admission(100, 3);
        admission.joined((id(1), MANY, false), false);
        // One that comes back needs a place too.
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
    fn so_many_strangers_end_for_others_in_a_second() {
        let mut admission = admission(8, 100);
        for n in 0..8 {
            admission.joined((id(n), MANY, false), false);
        }
        admission.ended(id(99), true);
        let begin = Instant::ZERO;
        let mut ask = |n, source, now| {
            let room = admission.room((id(n), source, false), None, 8, now);
            if let Ok(Room::After(stranger)) = room {
                admission.crowded_out(stranger);
                admission.ended(stranger, false);
                admission.joined((id(n), source, false), false);
            }
            room
        };
        for n in 10..15 {
            assert!(ask(n, MANY, begin).is_ok(), "{n}");
        }
        assert_eq!(ask(15, MANY, begin), Err(Refusal::Turnover));
        // Who has no stranger yet has a share of its own, and who comes back needs none.
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
    fn what_is_remembered_is_bounded() {
        let mut admission = admission(1, 1 << 16);
        for n in 0..=RETURNING_MAX {
            admission.ended(id(n), true);
            admission.ended(id(n), true);
        }
        assert_eq!(admission.returning.len(), RETURNING_MAX);
        assert!(!admission.returning.contains(&id(0)), "the oldest is forgotten");
        for n in 2000..2000 + ENDING_MAX {
            admission.joined((id(n), FEW, false), false);
            admission.crowded_out(id(n));
        }
        admission.joined((id(3000), FEW, false), false);
        assert_eq!(room(&mut admission, 3001, None, 99), Err(Refusal::HalfOpen(1)));
        admission.ended(id(2000), false);
        assert_eq!(room(&mut admission, 3001, None, 98), Ok(Room::After(id(3000))));
        assert_eq!(admission.numbers.len(), 1);
    }
}
