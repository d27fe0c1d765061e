//! Terms that a path and the server have agreed on for each volume in the current attempt.
//!
//! The server's device number and cache epoch belong to one path and one volume: a server that was
//! restarted behind a path that still seems alive has new numbers.

use rtrs_core::proto::Backoff;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::AccessMode;

use super::reopen::Reopen;
use crate::engine::device_set::{DeviceIndex, DeviceSet};
use crate::engine::message::Served;
use crate::engine::path_end::PathEnd;

/// Request for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Open the volume with this access.
    Open(AccessMode),
    /// Open the volume again to learn what has changed.
    Again,
    /// Open the volume again with exclusive access.
    Promote,
    /// Close the volume.
    Close,
    /// Have this server or a different one serve the volume.
    Move,
}

/// Outstanding request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) volume: DeviceIndex,
    pub(super) ask: Ask,
    pub(super) until: Instant,
}

/// Refusal of a volume on a path.
#[derive(Clone, Debug)]
struct Refused {
    why: PathEnd,
    /// Time of the next open on this connection.
    again: Instant,
}

/// Terms of one volume.
#[derive(Debug, Default)]
struct Term {
    /// Device number and cache epoch on the server; the epoch is 0 if the server does not report
    /// it.
    agreed: Option<(u32, u64)>,
    /// Device number while a different server serves the volume.
    standby: Option<u32>,
    refused: Option<Refused>,
    reopen: Reopen,
    /// Backoff between failed opens.
    backoff: Option<Backoff>,
    /// Whether the last open was not answered, which ended its path; other volumes go first.
    unanswered: bool,
}

/// Terms of a path.
#[derive(Debug)]
pub(super) struct Terms {
    rows: Vec<Term>,
    /// Outstanding request about a volume.
    asked: Option<Asked>,
    /// Volumes that the path has served since it connected.
    carried: DeviceSet,
    /// Bounds for waits; `seed` makes the waits of this path differ from those of others.
    waits: (Duration, Duration),
    seed: u64,
}

impl Terms {
    pub(super) fn new(waits: (Duration, Duration), seed: u64) -> Self {
        Self { rows: Vec::new(), asked: None, carried: DeviceSet::default(), waits, seed }
    }

    /// Sets new bounds, which apply from the next wait onwards.
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

    /// Clears the terms when the path's connection ends. Returns the volumes that the path has
    /// served.
    pub(super) fn end(&mut self) -> DeviceSet {
        for term in &mut self.rows {
            (term.agreed, term.standby) = (None, None);
            (term.refused, term.reopen) = (None, Reopen::default());
        }
        self.asked = None;
        std::mem::take(&mut self.carried)
    }

    /// Records a request that is being sent.
    pub(super) fn ask(&mut self, asked: Asked) {
        self.asked = Some(asked);
    }

    /// Outstanding request about a volume.
    pub(super) fn asked(&self) -> Option<Asked> {
        self.asked
    }

    /// Takes the request to which the received answer belongs.
    pub(super) fn answered(&mut self) -> Option<Asked> {
        let asked = self.asked.take()?;
        if asked.ask == Ask::Again {
            self.reopen(asked.volume).answered();
        }
        Some(asked)
    }

    /// Returns why a connected path must end if its request is overdue.
    pub(super) fn late(&self, now: Instant) -> Option<PathEnd> {
        let asked = self.asked.filter(|asked| now >= asked.until)?;
        Some(match asked.ask {
            Ask::Open(_) | Ask::Again | Ask::Promote => PathEnd::OpenTimeout,
            Ask::Close => PathEnd::CloseTimeout,
            Ask::Move => PathEnd::MoveTimeout,
        })
    }

    /// Marks a volume whose open timed out, so that it comes last in the next attempt.
    pub(super) fn mark_overdue(&mut self, now: Instant) {
        if let Some(Asked { volume, ask: Ask::Open(_), until }) = self.asked
            && now >= until
        {
            self.term(volume).unanswered = true;
        }
    }

    /// Forgets a volume whose index may be reused.
    pub(super) fn forget(&mut self, volume: DeviceIndex) {
        *self.term(volume) = Term::default();
        self.carried.remove(volume);
    }

    /// Records the device number and cache epoch of a volume that the path serves.
    pub(super) fn agree(&mut self, volume: DeviceIndex, device_id: u32, cache_id: u64) {
        self.carried.insert(volume);
        let term = self.term(volume);
        (term.agreed, term.refused) = (Some((device_id, cache_id)), None);
        (term.standby, term.backoff, term.unanswered) = (None, None, false);
    }

    /// Records the device number of an open volume that a different server serves.
    pub(super) fn stand_by(&mut self, volume: DeviceIndex, device_id: u32) {
        let term = self.term(volume);
        (term.agreed, term.refused) = (None, None);
        (term.standby, term.backoff, term.unanswered) = (Some(device_id), None, false);
    }

    /// Whether a different server serves a volume that the path has open.
    pub(super) fn is_standby(&self, volume: DeviceIndex) -> bool {
        self.standby_id(volume).is_some()
    }

    /// Device number of a volume that a different server serves.
    pub(super) fn standby_id(&self, volume: DeviceIndex) -> Option<u32> {
        self.get(volume)?.standby
    }

    /// Whether the path serves a volume, or may serve one after a takeover.
    pub(super) fn is_of_use(&self) -> bool {
        self.rows.iter().any(|term| term.agreed.is_some() || term.standby.is_some())
    }

    /// Whether the path serves no volume but may serve one after a takeover.
    pub(super) fn are_standby(&self) -> bool {
        self.is_of_use() && self.served().next().is_none()
    }

    /// Records a refusal. Returns the time until the next open.
    pub(super) fn refuse(&mut self, volume: DeviceIndex, why: PathEnd, now: Instant) -> Duration {
        let (waits, seed) = (self.waits, self.seed);
        let term = self.term(volume);
        let own = seed ^ u64::from(volume.0 + 1).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let backoff = term.backoff.get_or_insert_with(|| Backoff::new(waits.0, waits.1, own));
        let wait = backoff.wait();
        term.refused = Some(Refused { why, again: now + wait });
        (term.agreed, term.standby, term.reopen) = (None, None, Reopen::default());
        wait
    }

    /// Whether the last open of a volume was not answered on this path, so that other volumes go
    /// first.
    pub(super) fn is_unanswered(&self, volume: DeviceIndex) -> bool {
        self.get(volume).is_some_and(|term| term.unanswered)
    }

    /// Device number of a volume that the path serves.
    pub(super) fn device_id(&self, volume: DeviceIndex) -> Option<u32> {
        self.get(volume)?.agreed.map(|(device_id, _)| device_id)
    }

    /// Cache epoch in which the path opened a volume that it serves.
    pub(super) fn cache_id(&self, volume: DeviceIndex) -> Option<u64> {
        self.get(volume)?.agreed.map(|(_, cache_id)| cache_id)
    }

    /// Whether the path serves a volume.
    pub(super) fn serves(&self, volume: DeviceIndex) -> bool {
        self.device_id(volume).is_some()
    }

    /// Volumes that the path serves.
    pub(super) fn served(&self) -> impl Iterator<Item = Served> {
        let terms = DeviceIndex::all().zip(&self.rows);
        terms.filter_map(|(device, term)| {
            let (device_id, cache_id) = term.agreed?;
            Some(Served { device, device_id, cache_id })
        })
    }

    /// Reason for a refusal in this attempt.
    pub(super) fn refusal(&self, volume: DeviceIndex) -> Option<&PathEnd> {
        self.get(volume)?.refused.as_ref().map(|refused| &refused.why)
    }

    /// Volumes that were refused in this attempt.
    pub(super) fn refused(&self) -> DeviceSet {
        let mut refused = DeviceSet::default();
        let terms = DeviceIndex::all().zip(&self.rows);
        terms
            .filter(|(_, term)| term.refused.is_some())
            .for_each(|(volume, _)| refused.insert(volume));
        refused
    }

    /// Whether a volume was opened or refused in this attempt.
    pub(super) fn is_tried(&self, volume: DeviceIndex) -> bool {
        self.serves(volume) || self.is_standby(volume) || self.refusal(volume).is_some()
    }

    /// Time at which the path should open a volume that it does not serve yet.
    pub(super) fn due_first(&self, volume: DeviceIndex) -> Option<Instant> {
        let Some(term) = self.get(volume) else { return Some(Instant::ZERO) };
        let due = term.refused.as_ref().map_or(Instant::ZERO, |refused| refused.again);
        (term.agreed.is_none() && term.standby.is_none()).then_some(due)
    }

    /// Time at which an open volume must be reopened because it has changed.
    pub(super) fn due_again(&self, volume: DeviceIndex) -> Option<Instant> {
        let open = |term: &&Term| term.agreed.is_some() || term.standby.is_some();
        self.get(volume).filter(open)?.reopen.due()
    }

    /// Pending repeated open of a volume.
    pub(super) fn reopen(&mut self, volume: DeviceIndex) -> &mut Reopen {
        &mut self.term(volume).reopen
    }
}
