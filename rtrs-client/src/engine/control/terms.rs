//! What a path has agreed on with the server for each volume, in its present attempt.
//!
//! The server's number for a volume and the epoch of its cache are of one path and one volume: a
//! server that was started again behind a path which still seems alive has other numbers than it
//! had there.

use rtrs_core::proto::Backoff;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::AccessMode;

use super::reopen::Reopen;
use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::message::Served;

/// What a path asks the server to do with a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Open it, for this access.
    Open(AccessMode),
    /// Open it once more, to learn what has changed.
    Again,
    /// Close it.
    Close,
    /// Have it served by this server, or by another.
    Move,
}

/// A question under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) volume: DeviceIndex,
    pub(super) ask: Ask,
    pub(super) until: Instant,
}

/// The path does not serve a volume.
#[derive(Clone, Debug)]
struct Refused {
    why: String,
    /// When it is opened again on this connection.
    again: Instant,
}

/// What was agreed on for a volume.
#[derive(Debug, Default)]
struct Term {
    /// The server's number for it, and the epoch of its cache; 0 when nobody says.
    agreed: Option<(u32, u64)>,
    /// The server's number for it while another server serves it.
    standby: Option<u32>,
    refused: Option<Refused>,
    reopen: Reopen,
    /// Waits between opens that fail.
    backoff: Option<Backoff>,
    /// The last open was not answered, and its path ended for that: others go first.
    unanswered: bool,
}

/// The terms of a path.
#[derive(Debug)]
pub(super) struct Terms {
    rows: Vec<Term>,
    /// What the path has served since it connects.
    carried: DeviceSet,
    /// Bounds of waits, and what tells those of this path from others.
    waits: (Duration, Duration),
    seed: u64,
}

impl Terms {
    pub(super) fn new(waits: (Duration, Duration), seed: u64) -> Self {
        Self { rows: Vec::new(), carried: DeviceSet::default(), waits, seed }
    }

    /// Other bounds for waits, from the next one on.
    pub(super) fn set_waits(&mut self, min: Duration, max: Duration) {
        self.waits = (min, max);
        self.rows.iter_mut().filter_map(|term| term.backoff.as_mut()).for_each(|backoff| {
            backoff.set_bounds(min, max);
        });
    }

    fn get(&self, volume: DeviceIndex) -> Option<&Term> {
        self.rows.get(volume.index())
    }

    fn term(&mut self, volume: DeviceIndex) -> &mut Term {
        let terms = self.rows.len().max(volume.index() + 1);
        self.rows.resize_with(terms, Term::default);
        &mut self.rows[volume.index()]
    }

    /// The path has ended: what was agreed on holds no more. Returns what it has served.
    pub(super) fn end(&mut self) -> DeviceSet {
        for term in &mut self.rows {
            (term.agreed, term.standby) = (None, None);
            (term.refused, term.reopen) = (None, Reopen::default());
        }
        std::mem::take(&mut self.carried)
    }

    /// Another volume may have this index.
    pub(super) fn forget(&mut self, volume: DeviceIndex) {
        *self.term(volume) = Term::default();
        self.carried.remove(volume);
    }

    /// The path serves a volume, under this number and in this epoch of the server's cache.
    pub(super) fn agree(&mut self, volume: DeviceIndex, device_id: u32, cache_id: u64) {
        self.carried.insert(volume);
        let term = self.term(volume);
        (term.agreed, term.refused) = (Some((device_id, cache_id)), None);
        (term.standby, term.backoff, term.unanswered) = (None, None, false);
    }

    /// The path has a volume open under this number, and another server serves it.
    pub(super) fn stand_by(&mut self, volume: DeviceIndex, device_id: u32) {
        let term = self.term(volume);
        (term.agreed, term.refused) = (None, None);
        (term.standby, term.backoff, term.unanswered) = (Some(device_id), None, false);
    }

    /// True while another server serves a volume that the path has open.
    pub(super) fn is_standby(&self, volume: DeviceIndex) -> bool {
        self.standby_id(volume).is_some()
    }

    /// The server's number for such a volume.
    pub(super) fn standby_id(&self, volume: DeviceIndex) -> Option<u32> {
        self.get(volume)?.standby
    }

    /// True when the path serves a volume, or may after a take-over.
    pub(super) fn is_of_use(&self) -> bool {
        self.rows.iter().any(|term| term.agreed.is_some() || term.standby.is_some())
    }

    /// True when the path serves nothing, and may after a take-over.
    pub(super) fn are_standby(&self) -> bool {
        self.is_of_use() && self.served().next().is_none()
    }

    /// The path does not serve a volume. Returns how long it is until that is tried again.
    pub(super) fn refuse(&mut self, volume: DeviceIndex, why: String, now: Instant) -> Duration {
        let (waits, seed) = (self.waits, self.seed);
        let term = self.term(volume);
        let own = seed ^ u64::from(volume.0 + 1).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let backoff = term.backoff.get_or_insert_with(|| Backoff::new(waits.0, waits.1, own));
        let wait = backoff.wait();
        term.refused = Some(Refused { why, again: now + wait });
        (term.agreed, term.standby, term.reopen) = (None, None, Reopen::default());
        wait
    }

    /// The path ends because an open was not answered.
    pub(super) fn unanswered(&mut self, volume: DeviceIndex) {
        self.term(volume).unanswered = true;
    }

    /// True when an open of it was not answered on this path before, and others go first.
    pub(super) fn is_unanswered(&self, volume: DeviceIndex) -> bool {
        self.get(volume).is_some_and(|term| term.unanswered)
    }

    /// The server's number for a volume that the path serves.
    pub(super) fn device_id(&self, volume: DeviceIndex) -> Option<u32> {
        self.get(volume)?.agreed.map(|(device_id, _)| device_id)
    }

    /// The epoch of the server's cache in which the path opened a volume that it serves.
    pub(super) fn cache_id(&self, volume: DeviceIndex) -> Option<u64> {
        self.get(volume)?.agreed.map(|(_, cache_id)| cache_id)
    }

    /// True while the path serves a volume.
    pub(super) fn serves(&self, volume: DeviceIndex) -> bool {
        self.device_id(volume).is_some()
    }

    /// What the path serves.
    pub(super) fn served(&self) -> impl Iterator<Item = Served> {
        let terms = DeviceIndex::all().zip(&self.rows);
        terms.filter_map(|(device, term)| {
            let (device_id, cache_id) = term.agreed?;
            Some(Served { device, device_id, cache_id })
        })
    }

    /// Why the path does not serve a volume, if it was refused in this attempt.
    pub(super) fn refusal(&self, volume: DeviceIndex) -> Option<&str> {
        self.get(volume)?.refused.as_ref().map(|refused| &*refused.why)
    }

    /// True when a volume was opened or refused in this attempt.
    pub(super) fn is_tried(&self, volume: DeviceIndex) -> bool {
        self.serves(volume) || self.is_standby(volume) || self.refusal(volume).is_some()
    }

    /// When a volume that the path does not serve is due to be opened on it.
    pub(super) fn due_first(&self, volume: DeviceIndex) -> Option<Instant> {
        let Some(term) = self.get(volume) else { return Some(Instant::ZERO) };
        let due = term.refused.as_ref().map_or(Instant::ZERO, |refused| refused.again);
        (term.agreed.is_none() && term.standby.is_none()).then_some(due)
    }

    /// When to open a volume once more that the path has open, because it has changed.
    pub(super) fn due_again(&self, volume: DeviceIndex) -> Option<Instant> {
        let open = |term: &&Term| term.agreed.is_some() || term.standby.is_some();
        self.get(volume).filter(open)?.reopen.due()
    }

    /// What the path has still to ask of a volume.
    pub(super) fn reopen(&mut self, volume: DeviceIndex) -> &mut Reopen {
        &mut self.term(volume).reopen
    }
}
