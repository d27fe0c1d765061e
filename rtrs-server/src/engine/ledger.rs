//! Losses of an open export that have not yet been reported to a session.
//!
//! A flush of the session fails if it covers writes that were acknowledged before the export's
//! epoch rose, even if the sync itself succeeds, because a different sync has consumed the error
//! (`epoch.rs`). Each session sees one such failure, regardless of which session received the
//! error, and a successful flush by a different session changes nothing.
//!
//! In the steady state shards only read these words: a write stores a value only if it is the first
//! since a flush was submitted.
//!
//! `dirty` describes the writes that no successful flush has covered: the lowest epoch and the last
//! generation in which any of them was acknowledged. A flush begins a new generation when it is
//! submitted and covers the earlier generations. A write that is acknowledged in a later epoch than
//! that of its submission counts as lost (`late`) until a flush that covers it has failed: a
//! failure reported before the write's acknowledgment did not cover the write.

use rtrs_core::ids::PermitId;
use rtrs_core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::path::key::PathKey;

/// State when a flush is submitted: covered writes, and losses reported so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushMark {
    generation: u32,
    reported: u32,
    epoch: u32,
    /// Whether the flush may be a copy of the flush that reported the last loss.
    repeats: bool,
}

/// Reason why a flush fails although its sync succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// Covered writes may be lost, and the session has not been informed.
    Loss,
    /// A different flush reported the loss while this one was running.
    ReportedMeanwhile,
}

/// Record of one session's unflushed writes to one open export.
#[derive(Debug, Default)]
pub struct FlushLedger {
    generation: AtomicU32,
    /// 0 when clean; otherwise the lowest epoch plus one, and the last generation.
    dirty: AtomicU64,
    /// 0, or one more than the generation of the last late write.
    late: AtomicU64,
    /// Number of flushes that reported a loss.
    reported: AtomicU32,
    /// Path and permit of the last flush that reported a loss.
    reported_to: AtomicU64,
    /// Epoch in which the session opened the export.
    opened: AtomicU32,
    /// Whether `late` stands for a loss of the session on the old host of a virtual machine, which
    /// this session's client cannot detect.
    inherits_loss: AtomicBool,
}

fn pack(epoch: u32, generation: u32) -> u64 {
    (u64::from(epoch) + 1) << 32 | u64::from(generation)
}

#[allow(clippy::cast_possible_truncation, reason = "two halves of a word")]
fn unpack(word: u64) -> Option<(u32, u32)> {
    (word != 0).then(|| (((word >> 32) - 1) as u32, word as u32))
}

/// Whether generation `a` is later than `b`; generations wrap.
fn is_later(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() > 0
}

fn place(path: PathKey, permit: PermitId) -> u64 {
    (path.0 << 16 | u64::from(permit.0)) + 1
}

impl FlushLedger {
    /// Resets the ledger when the session opens the export in `epoch`.
    pub fn reset(&self, epoch: u32) {
        self.dirty.store(0, Ordering::SeqCst);
        self.late.store(0, Ordering::SeqCst);
        self.reported_to.store(0, Ordering::SeqCst);
        self.opened.store(epoch, Ordering::SeqCst);
        self.inherits_loss.store(false, Ordering::SeqCst);
    }

    /// Epoch in which the session opened the export.
    pub fn opened(&self) -> u32 {
        self.opened.load(Ordering::SeqCst)
    }

    /// Returns the unflushed state of an ending session: the lowest epoch of a write that no
    /// successful flush has covered, and whether a loss must still be reported. Returns None if
    /// nothing is left.
    pub fn unflushed(&self) -> Option<(u32, bool)> {
        let late = self.late.load(Ordering::SeqCst) != 0;
        let dirty = unpack(self.dirty.load(Ordering::SeqCst));
        dirty.map(|(oldest, _)| (oldest, late)).or_else(|| late.then_some((u32::MAX, true)))
    }

    /// Takes over the state of an earlier session: a loss, or unflushed writes, which count from
    /// `epoch` onwards. Called before the session can use the device.
    pub fn resume(&self, epoch: u32, lost: bool) {
        if lost {
            self.report_again();
        } else {
            self.wrote(epoch, epoch);
        }
    }

    /// Takes over a loss that the session on the old host of a virtual machine did not report. A
    /// client that compares cache IDs cannot detect this loss either.
    pub fn inherit_loss(&self) {
        self.inherits_loss.store(true, Ordering::SeqCst);
        self.report_again();
    }

    /// Whether an inherited loss must still be reported.
    pub fn has_inherited_loss(&self) -> bool {
        self.late.load(Ordering::SeqCst) != 0 && self.inherits_loss.load(Ordering::SeqCst)
    }

    /// Whether all writes have been flushed.
    pub fn is_clean(&self) -> bool {
        self.dirty.load(Ordering::Acquire) == 0 && self.late.load(Ordering::Acquire) == 0
    }

    /// Records a write that was submitted in the epoch `began`, before it is acknowledged in
    /// `epoch`.
    pub fn wrote(&self, began: u32, epoch: u32) {
        let generation = self.generation.load(Ordering::Acquire);
        if began != epoch {
            self.late.store(u64::from(generation) + 1, Ordering::SeqCst);
        }
        let mut word = self.dirty.load(Ordering::Acquire);
        loop {
            let next = match unpack(word) {
                None => pack(epoch, generation),
                Some((oldest, last)) => {
                    let newer = is_later(generation, last);
                    pack(oldest.min(epoch), if newer { generation } else { last })
                }
            };
            if next == word {
                return;
            }
            match self.dirty.compare_exchange(word, next, Ordering::SeqCst, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Records a flush before it is submitted in `epoch`. A flush that may be a copy of the one
    /// that reported the last loss reports that loss again.
    pub fn begin_flush(&self, epoch: u32, path: PathKey, permit: PermitId) -> FlushMark {
        let repeats = self.may_repeat(path, permit);
        if repeats {
            self.report_again();
        }
        let reported = self.reported.load(Ordering::SeqCst);
        let generation = self.generation.fetch_add(1, Ordering::SeqCst);
        FlushMark { generation, reported, epoch, repeats }
    }

    /// Checks a flush that succeeded in `epoch`. Returns a reason if it must fail nevertheless.
    pub fn hides_loss(&self, mark: FlushMark, epoch: u32) -> Option<Hidden> {
        let mut word = self.dirty.load(Ordering::SeqCst);
        loop {
            let lost = unpack(word).is_some_and(|(oldest, _)| epoch > oldest);
            if lost || self.late.load(Ordering::SeqCst) != 0 {
                return Some(Hidden::Loss);
            }
            if self.reported.load(Ordering::SeqCst) != mark.reported {
                return Some(Hidden::ReportedMeanwhile);
            }
            // In the meantime, a shard that has not seen the epoch rise may acknowledge a write:
            // that write, too, is checked before it counts as covered.
            match self.cover(word, mark) {
                Ok(()) => return None,
                Err(now) => word = now,
            }
        }
    }

    /// Records that a flush is about to report a failure, which tells the session about the covered
    /// writes.
    ///
    /// A flush that fails because of another flush causes no further failures, and a flush that may
    /// be a copy is not used to detect further copies. Otherwise flushes that always overlap, or
    /// always use the same permit on changing paths, would fail forever.
    pub fn report(&self, mark: FlushMark, hidden: Hidden, path: PathKey, permit: PermitId) {
        let place = if mark.repeats { 0 } else { place(path, permit) };
        self.reported_to.store(place, Ordering::SeqCst);
        if hidden == Hidden::Loss {
            self.reported.fetch_add(1, Ordering::SeqCst);
        }
        let late = self.late.load(Ordering::SeqCst);
        #[allow(clippy::cast_possible_truncation, reason = "a generation plus one")]
        let covered = late != 0 && !is_later((late - 1) as u32, mark.generation);
        if covered {
            self.inherits_loss.store(false, Ordering::SeqCst);
            // A late write that arrives in the meantime is kept.
            let _ = self.late.compare_exchange(late, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
        let mut word = self.dirty.load(Ordering::SeqCst);
        while let Err(now) = self.cover(word, mark) {
            word = now;
        }
    }

    /// Marks as settled the writes that the flush covers, given this value of `dirty`. Writes
    /// acknowledged since the flush was submitted belong to its epoch or a later one, or are late.
    /// If the word has changed, returns its current value as the error.
    fn cover(&self, word: u64, mark: FlushMark) -> Result<(), u64> {
        let next = match unpack(word) {
            Some((oldest, last)) if is_later(last, mark.generation) => {
                pack(oldest.max(mark.epoch), last)
            }
            _ => 0,
        };
        if next == word {
            return Ok(());
        }
        let swapped = self.dirty.compare_exchange(word, next, Ordering::SeqCst, Ordering::SeqCst);
        swapped.map(drop)
    }

    /// Makes the next flush report a loss again, because the answer that reported the loss may have
    /// been lost with its path.
    pub fn report_again(&self) {
        let generation = self.generation.load(Ordering::SeqCst);
        self.late.store(u64::from(generation) + 1, Ordering::SeqCst);
    }

    /// Whether a flush may be a copy of the flush that reported the last loss: it has the same
    /// permit and arrived over a different path.
    fn may_repeat(&self, path: PathKey, permit: PermitId) -> bool {
        let reported = self.reported_to.load(Ordering::Acquire);
        reported != 0 && reported != place(path, permit) && (reported - 1) as u16 == permit.0
    }

    /// Records that a permit is reused on its path, which shows that the previous answer has
    /// arrived.
    pub fn arrived(&self, path: PathKey, permit: PermitId) {
        let reported = place(path, permit);
        let _ = self.reported_to.compare_exchange(reported, 0, Ordering::SeqCst, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::mem;

    use super::*;

    const PATH: PathKey = PathKey(1);
    const PERMIT: PermitId = PermitId(3);

    fn begin(ledger: &FlushLedger, epoch: u32) -> FlushMark {
        ledger.begin_flush(epoch, PATH, PERMIT)
    }

    /// Submits and completes a flush in `epoch`. Returns whether it reported a loss.
    fn flush(ledger: &FlushLedger, epoch: u32) -> bool {
        let mark = begin(ledger, epoch);
        end(ledger, mark, epoch)
    }

    fn end(ledger: &FlushLedger, mark: FlushMark, epoch: u32) -> bool {
        let hidden = ledger.hides_loss(mark, epoch);
        if let Some(hidden) = hidden {
            ledger.report(mark, hidden, PATH, PERMIT);
        }
        hidden.is_some()
    }

    #[test]
    fn a_flush_fails_once_for_writes_before_an_epoch_advance() {
        let ledger = FlushLedger::default();
        ledger.wrote(0, 0);
        let (one, two) = (begin(&ledger, 0), begin(&ledger, 1));
        assert!(end(&ledger, one, 1));
        assert!(end(&ledger, two, 1), "submitted before the failure was reported");
        assert!(!flush(&ledger, 1) && ledger.is_clean());
        ledger.wrote(1, 1);
        assert!(!flush(&ledger, 1), "written in the epoch that it is in");
    }

    #[test]
    fn overlapping_flushes_do_not_fail_forever() {
        let ledger = FlushLedger::default();
        ledger.wrote(0, 0);
        let mut running = begin(&ledger, 1);
        let failed = (0..10).filter(|_| {
            let next = begin(&ledger, 1);
            ledger.wrote(1, 1);
            end(&ledger, mem::replace(&mut running, next), 1)
        });
        assert_eq!(failed.count(), 2, "the first, and the one that overlapped it");
    }

    #[test]
    fn a_session_without_unflushed_writes_gets_no_error() {
        let ledger = FlushLedger::default();
        assert!(!flush(&ledger, 1));
        ledger.wrote(1, 1);
        assert!(!flush(&ledger, 1));
        assert!(!flush(&ledger, 2), "all was flushed before");
    }

    #[test]
    fn a_flush_covers_only_writes_acknowledged_before_it() {
        let ledger = FlushLedger::default();
        ledger.wrote(0, 0);
        let mark = begin(&ledger, 0);
        ledger.wrote(0, 0);
        assert!(!end(&ledger, mark, 0));
        assert!(!ledger.is_clean(), "the second write");
        assert!(flush(&ledger, 1));
    }

    #[test]
    fn a_write_acknowledged_during_a_failed_flush_fails_the_next_flush() {
        let ledger = FlushLedger::default();
        ledger.wrote(0, 0);
        let mark = begin(&ledger, 0);
        ledger.wrote(0, 1);
        assert!(end(&ledger, mark, 1));
        assert!(flush(&ledger, 1), "it was not covered by that one");
        assert!(!flush(&ledger, 1));
        // Continuous writes do not make flushes fail repeatedly.
        ledger.wrote(1, 1);
        for _ in 0..3 {
            let mark = begin(&ledger, 1);
            ledger.wrote(1, 1);
            assert!(!end(&ledger, mark, 1));
        }
    }

    #[test]
    fn unflushed_writes_of_a_session_are_reported_to_its_successor() {
        let ledger = FlushLedger::default();
        assert_eq!(ledger.unflushed(), None);
        ledger.wrote(1, 1);
        ledger.wrote(2, 2);
        assert_eq!(ledger.unflushed(), Some((1, false)));
        assert!(flush(&ledger, 2));
        assert_eq!(ledger.unflushed(), None);
        ledger.report_again();
        assert!(ledger.unflushed().is_some_and(|(_, late)| late));

        let next = FlushLedger::default();
        next.resume(2, true);
        assert!(flush(&next, 2) && !flush(&next, 2), "a loss, reported once");
        next.resume(2, false);
        assert!(flush(&next, 3) && !flush(&next, 3), "no loss yet");
    }

    #[test]
    fn a_lost_answer_is_reported_again() {
        let ledger = FlushLedger::default();
        ledger.wrote(0, 0);
        assert!(flush(&ledger, 1));
        let other = PathKey(2);
        assert!(ledger.may_repeat(other, PERMIT));
        assert!(!ledger.may_repeat(PATH, PERMIT) && !ledger.may_repeat(other, PermitId(4)));
        ledger.report_again();
        assert!(flush(&ledger, 1) && !flush(&ledger, 1));
        ledger.arrived(PATH, PERMIT);
        assert!(!ledger.may_repeat(other, PERMIT));
    }
}
