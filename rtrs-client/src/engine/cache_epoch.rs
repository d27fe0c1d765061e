//! Acknowledged writes that a server may have lost, and the reports to the device's users.
//!
//! A write that was acknowledged but not flushed may be in a cache on the server. When the server's
//! host restarts (or, for an export in memory, its process), the write is lost, and the client no
//! longer has its data. A flush that then succeeded would tell a file system that the write is
//! durable. So OPEN_RSP reports the epoch of the server's cache (`cache_id`), each answer counts
//! for the epoch in which its path was opened, and a change of epoch while such writes are
//! outstanding is a loss. Each user of the device learns of the loss once, through a flush that
//! fails, as with a disk that lost its write cache (`rtrs_core::losses`). A flush that fails on the
//! server is also a loss, and so is a failed write with FUA while other writes wait for a flush:
//! the server's device has one cache, and reports a loss to only one request. A successful flush
//! therefore waits for the syncs that overlap it (`io/syncs.rs`).
//!
//! Shards count their own writes; the control shard (`control/cache_epoch.rs`) sees the epochs
//! change. Neither waits for the other: a shard adds to its count before it reads the epoch, and
//! the control shard changes the epoch before it adds up the counts, so at least one of the two
//! sees the other's change.
//!
//! A process that dies takes its counts with it, and its users may continue with the next process.
//! So the process saves its epoch for the next one (`saved_epoch`), which starts in this epoch and
//! assumes one unflushed write. An epoch is saved once no losses of earlier epochs remain to be
//! reported. A flush that the dead process did not answer is resent, and looks like a flush that
//! began after the one that reported the loss. While such a flush can still arrive
//! (`SessionConfig::resent_for`), every flush reports the losses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rtrs_core::block::{Io, IoOp};
use rtrs_core::ids::CoreIndex;
use rtrs_core::losses::Losses;
use rtrs_core::status::IoStatus;
use rtrs_core::sync_order::SyncOrder;
use rtrs_core::time::Instant;

/// A shard's count, on its own cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Count(AtomicU64);

/// Writes that a flush covers, and losses already reported when it was submitted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FlushMark {
    /// Number of writes acknowledged before the flush was sent.
    covers: u64,
    /// Number of losses already reported, if the session itself reports to its user.
    reported: u64,
}

/// Acknowledged writes of a volume whose loss users would not notice if the next process did not
/// know about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outstanding {
    /// All acknowledged writes have been flushed.
    Nothing,
    /// The report of a loss may not have arrived.
    Reported,
    /// Acknowledged writes await a flush.
    Unflushed,
    /// An earlier process may have left unflushed writes, and nothing has been flushed since.
    Inherited,
    /// A loss was not reported to any user.
    Loss,
}

/// State of the server's cache, shared by all shards.
#[derive(Debug)]
pub(crate) struct CacheWatch {
    /// Acknowledged writes that only a flush makes durable, by shard; for a medium that is lost
    /// with its server, all acknowledged writes. These counts only grow.
    acked: Box<[Count]>,
    /// Number of the writes in `acked` that a flush has covered.
    flushed: AtomicU64,
    /// Number of the writes in `acked` at the last change of epoch.
    since: AtomicU64,
    /// Current epoch of the server.
    epoch: AtomicU64,
    /// Whether the content, flushed or not, is lost at the end of its epoch.
    volatile: AtomicBool,
    /// Order of the device's syncs.
    order: SyncOrder,
    /// Number of syncs that ended without an answer and may have consumed the report of a loss.
    unanswered: AtomicU64,
    /// Number of outstanding syncs whose failure was reported because the disk is slow.
    given_up: AtomicU64,
    /// Flushes submitted before this time may be resends of flushes that an earlier process
    /// accepted.
    resent_until: Option<Instant>,
    losses: Arc<Losses>,
}

impl CacheWatch {
    pub(crate) fn new(shards: u16, epoch: u64, volatile: bool) -> Self {
        let order = SyncOrder::default();
        order.set_shards(shards);
        Self {
            order,
            unanswered: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            acked: (0..shards).map(|_| Count::default()).collect(),
            flushed: AtomicU64::new(0),
            since: AtomicU64::new(0),
            epoch: AtomicU64::new(epoch),
            volatile: AtomicBool::new(volatile),
            resent_until: None,
            losses: Arc::default(),
        }
    }

    /// Assumes that an earlier process left an unflushed write. Until this time, users may resend
    /// requests that the earlier process did not answer.
    pub(super) fn inherit(&mut self, resent_until: Instant) {
        self.resent_until = Some(resent_until);
        if let Some(count) = self.acked.first() {
            count.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The server's current epoch; None if unknown, or while a loss has yet to be reported.
    pub(super) fn settled_epoch(&self) -> Option<u64> {
        let reported = self.losses.all_reported() || rtrs_core::mutated!(KeptLifeEarly);
        reported.then(|| self.epoch()).filter(|epoch| *epoch != 0)
    }

    /// Returns the acknowledged writes that the users could lose without noticing. `inherited`
    /// means that an earlier process may have left some.
    pub(super) fn outstanding(&self, inherited: bool) -> Outstanding {
        let safe = if self.is_volatile() { &self.since } else { &self.flushed };
        let safe = safe.load(Ordering::SeqCst);
        if !self.losses.all_reported() {
            Outstanding::Loss
        } else if inherited && safe == 0 {
            Outstanding::Inherited
        } else if self.all_acked() > safe {
            Outstanding::Unflushed
        } else {
            Outstanding::Nothing
        }
    }

    /// Whether the content, flushed or not, is lost at the end of its epoch.
    pub(super) fn is_volatile(&self) -> bool {
        self.volatile.load(Ordering::SeqCst)
    }

    fn all_acked(&self) -> u64 {
        self.acked.iter().map(|count| count.0.load(Ordering::SeqCst)).sum()
    }

    /// Records the submission of a flush.
    pub(super) fn submitted(&self, mark: &mut FlushMark, now: Instant) {
        // The flush may have begun before any loss was reported.
        mark.reported = if self.is_resending(now) { 0 } else { self.losses.common() };
    }

    pub(super) fn is_resending(&self, now: Instant) -> bool {
        self.resent_until.is_some_and(|until| now < until)
    }

    /// Records that a flush is about to be sent.
    pub(super) fn sent(&self, mark: &mut FlushMark) {
        mark.covers = self.all_acked();
    }

    /// Records the success of a request on a path opened in this cache epoch, 0 if unknown. Returns
    /// true for a write from an old epoch, which may be lost.
    pub(super) fn done(&self, shard: CoreIndex, io: &Io, mark: FlushMark, epoch: u64) -> bool {
        let current = || self.epoch.load(Ordering::SeqCst) == epoch;
        let is_current = || epoch == 0 || rtrs_core::mutated!(OldEpochAnswer) || current();
        match io.op {
            IoOp::Read | IoOp::Extents => {}
            IoOp::Discard | IoOp::WriteZeroes if rtrs_core::mutated!(ZeroesUnwatched) => {}
            IoOp::Flush => {
                if is_current() {
                    let later = rtrs_core::mutated!(FlushCoversLater).then(|| self.all_acked());
                    self.flushed.fetch_max(later.unwrap_or(mark.covers), Ordering::SeqCst);
                }
            }
            // A medium that is lost with its server loses even these writes.
            IoOp::Write | IoOp::Discard | IoOp::WriteZeroes
                if io.flags.fua && !self.volatile.load(Ordering::Relaxed) => {}
            IoOp::Write | IoOp::Discard | IoOp::WriteZeroes => {
                if let Some(count) = self.acked.get(shard.index()) {
                    count.0.fetch_add(1, Ordering::SeqCst);
                }
                if !is_current() {
                    self.losses.add();
                    return true;
                }
            }
        }
        false
    }

    /// Records a request that the server answered with an error. Whatever the status, the server's
    /// device may have used this request to report a loss of other requests' data. Not called for
    /// statuses that this session assigns to unanswered requests: the server reports a loss again
    /// if its answer was lost.
    pub(super) fn failed(&self, io: &Io, answer: IoStatus) {
        let by_kind = rtrs_core::mutated!(FlushErrorByKind)
            && matches!(answer, IoStatus::Aborted | IoStatus::TimedOut | IoStatus::ReadOnly);
        let unflushed = || self.all_acked() > self.flushed.load(Ordering::SeqCst);
        let durable_write = || io.flags.fua && !answer.is_refusal() && unflushed();
        if !by_kind && (io.op == IoOp::Flush || durable_write()) {
            self.losses.add_shared();
        }
    }

    /// Order of the device's syncs.
    pub(super) fn order(&self) -> &SyncOrder {
        &self.order
    }

    /// Records a sync that ended without an answer from the server.
    pub(super) fn sync_unanswered(&self) {
        self.unanswered.fetch_add(1, Ordering::SeqCst);
    }

    /// Number of syncs that ended without an answer.
    pub(super) fn unanswered(&self) -> u64 {
        self.unanswered.load(Ordering::SeqCst)
    }

    /// Adds, or else removes, an outstanding sync whose failure was reported because the disk is
    /// slow.
    pub(super) fn count_given_up(&self, begins: bool) {
        if begins {
            self.given_up.fetch_add(1, Ordering::SeqCst);
        } else {
            self.given_up.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Whether a sync is outstanding whose failure was reported because the disk is slow.
    pub(super) fn has_given_up(&self) -> bool {
        self.given_up.load(Ordering::SeqCst) > 0
    }

    /// Number of losses so far that may affect any write. A write answered from an old epoch is
    /// counted separately.
    pub(super) fn count(&self) -> u64 {
        self.losses.shared()
    }

    /// Records the success of an IO whose first part finished when there were `before` losses. A
    /// later loss may have affected that part and may already be reported, so flushes of the whole
    /// IO report the loss again.
    pub(super) fn ended_in_parts(&self, io: &Io, before: u64) {
        let changes = matches!(io.op, IoOp::Write | IoOp::Discard | IoOp::WriteZeroes);
        let is_safe = io.flags.fua && !self.is_volatile();
        let is_due = self.count() != before && !rtrs_core::mutated!(PartLossForgotten);
        if changes && !is_safe && is_due {
            self.losses.add();
        }
    }

    /// Result of a flush for the session's only user. There were `count` losses when it ended.
    pub(super) fn report(&self, mark: FlushMark, status: IoStatus, count: u64) -> IoStatus {
        let (status, reported) = self.losses.judge(status, mark.reported, count);
        self.losses.report_common(reported);
        status
    }

    /// Losses, for a front end that reports them to the users itself.
    pub(super) fn losses(&self) -> Arc<Losses> {
        Arc::clone(&self.losses)
    }

    /// Records the server's epoch. Returns the number of writes that it may have lost.
    pub(super) fn observe(&self, epoch: u64, volatile: bool) -> u64 {
        let before = self.epoch.swap(epoch, Ordering::SeqCst);
        let volatile = self.volatile.swap(volatile, Ordering::SeqCst);
        // After an upgrade, the server reports an epoch for the first time.
        if before == epoch || before == 0 {
            return 0;
        }
        let acked = self.all_acked();
        let since = self.since.swap(acked, Ordering::SeqCst);
        let flushed = self.flushed.fetch_max(acked, Ordering::SeqCst);
        let safe = if volatile { since } else { flushed };
        let lost = acked.saturating_sub(safe);
        if lost > 0 {
            self.losses.add_shared();
        }
        lost
    }

    /// Records that the device shrank, perhaps while no path was connected. Unflushed writes may
    /// have been beyond its new end. Returns the number of writes that may be lost.
    pub(super) fn cut(&self) -> u64 {
        let lost = self.all_acked().saturating_sub(self.flushed.load(Ordering::SeqCst));
        if lost > 0 {
            self.losses.add_shared();
        }
        lost
    }

    /// Current epoch of the server.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::block::IoFlags;

    use super::*;

    const CORE: CoreIndex = CoreIndex(0);

    fn io(op: IoOp, fua: bool) -> Io {
        let flags = IoFlags { fua, ..IoFlags::default() };
        Io { tag: 0, op, flags, offset: 0, len: 4096, buf: None }
    }

    fn write(watch: &CacheWatch, shard: u16, epoch: u64) {
        watch.done(CoreIndex(shard), &io(IoOp::Write, false), FlushMark::default(), epoch);
    }

    fn begin(watch: &CacheWatch) -> FlushMark {
        let mut mark = FlushMark::default();
        watch.submitted(&mut mark, Instant::ZERO);
        watch.sent(&mut mark);
        mark
    }

    fn end(watch: &CacheWatch, mark: FlushMark, epoch: u64) -> bool {
        watch.done(CORE, &io(IoOp::Flush, false), mark, epoch);
        watch.report(mark, IoStatus::Ok, watch.losses().count()) == IoStatus::Io
    }

    #[test]
    fn unflushed_writes_of_a_dead_process_count_until_a_flush() {
        let mut watch = CacheWatch::new(1, 7, false);
        watch.inherit(Instant::ZERO);
        assert_eq!(watch.settled_epoch(), Some(7));
        assert_eq!(watch.observe(8, false), 1);
        assert_eq!(watch.settled_epoch(), None, "it has to be reported");
        let mark = begin(&watch);
        assert!(end(&watch, mark, 8), "reported by a flush that fails");
        assert_eq!(watch.settled_epoch(), Some(8));
        let mut watch = CacheWatch::new(1, 7, false);
        watch.inherit(Instant::ZERO);
        let mark = begin(&watch);
        assert!(!end(&watch, mark, 7), "flushed");
        assert_eq!(watch.observe(8, false), 0);
    }

    #[test]
    fn writes_are_outstanding_until_they_are_flushed_or_reported_lost() {
        let watch = CacheWatch::new(1, 7, false);
        assert_eq!(watch.outstanding(false), Outstanding::Nothing);
        write(&watch, 0, 7);
        assert_eq!(watch.outstanding(false), Outstanding::Unflushed);
        let mark = begin(&watch);
        assert!(!end(&watch, mark, 7));
        assert_eq!(watch.outstanding(false), Outstanding::Nothing);
        write(&watch, 0, 7);
        assert_eq!(watch.observe(8, false), 1);
        assert_eq!(watch.outstanding(false), Outstanding::Loss);
        let mark = begin(&watch);
        assert!(end(&watch, mark, 8));
        assert_eq!(watch.outstanding(false), Outstanding::Nothing);

        let mut watch = CacheWatch::new(1, 7, false);
        watch.inherit(Instant::ZERO);
        assert_eq!(watch.outstanding(true), Outstanding::Inherited);
        write(&watch, 0, 7);
        assert_eq!(watch.outstanding(true), Outstanding::Inherited);
        let mark = begin(&watch);
        assert!(!end(&watch, mark, 7));
        assert_eq!(watch.outstanding(true), Outstanding::Nothing);

        // A flush does not preserve an export in memory.
        let watch = CacheWatch::new(1, 7, true);
        write(&watch, 0, 7);
        let mark = begin(&watch);
        assert!(!end(&watch, mark, 7));
        assert_eq!(watch.outstanding(false), Outstanding::Unflushed);
    }

    #[test]
    fn shrinking_is_a_loss_if_writes_were_not_flushed() {
        let watch = CacheWatch::new(1, 7, false);
        assert_eq!(watch.cut(), 0);
        write(&watch, 0, 7);
        assert_eq!(watch.cut(), 1);
        let mark = begin(&watch);
        assert!(end(&watch, mark, 7), "reported by a flush that fails");
        let mark = begin(&watch);
        assert!(!end(&watch, mark, 7), "once");
        assert_eq!(watch.cut(), 0, "flushed");
    }

    #[test]
    fn only_unflushed_writes_are_lost() {
        let watch = CacheWatch::new(2, 7, false);
        assert_eq!(watch.observe(8, false), 0, "nothing was written");
        write(&watch, 1, 8);
        watch.done(CORE, &io(IoOp::Write, true), FlushMark::default(), 8);
        watch.done(CORE, &io(IoOp::Read, false), FlushMark::default(), 8);
        let flush = begin(&watch);
        assert!(!end(&watch, flush, 8));
        assert_eq!(watch.observe(9, false), 0, "all was flushed");
        for op in [IoOp::Write, IoOp::Discard, IoOp::WriteZeroes] {
            watch.done(CORE, &io(op, false), FlushMark::default(), 9);
        }
        let flush = begin(&watch);
        write(&watch, 1, 9);
        assert!(!end(&watch, flush, 9));
        assert_eq!(watch.observe(9, false), 0, "the same epoch");
        assert_eq!(watch.observe(10, false), 1, "the write after the flush began");
        assert_eq!(watch.observe(11, false), 0, "not twice");
    }

    #[test]
    fn a_loss_is_reported_by_all_flushes_that_could_hide_it_and_no_other() {
        let watch = CacheWatch::new(2, 7, false);
        write(&watch, 0, 7);
        let (before, beside) = (begin(&watch), begin(&watch));
        assert_eq!(watch.observe(8, false), 1);
        let after = begin(&watch);
        assert!(end(&watch, before, 8) && end(&watch, after, 8) && end(&watch, beside, 8));
        let later = begin(&watch);
        assert!(!end(&watch, later, 8));
    }

    #[test]
    fn an_answer_from_the_previous_epoch_is_a_loss_too() {
        let watch = CacheWatch::new(2, 7, false);
        let flush = begin(&watch);
        assert_eq!(watch.observe(8, false), 0);
        write(&watch, 1, 7);
        assert!(end(&watch, flush, 7));
        // That flush does not count, because it was for a different cache.
        write(&watch, 1, 8);
        let mark = begin(&watch);
        watch.done(CORE, &io(IoOp::Flush, false), mark, 7);
        assert_eq!(watch.observe(9, false), 2);
    }

    #[test]
    fn an_export_in_memory_loses_even_durable_writes() {
        let watch = CacheWatch::new(1, 7, true);
        watch.done(CORE, &io(IoOp::Write, true), FlushMark::default(), 7);
        assert_eq!(watch.observe(8, true), 1);
        let flush = begin(&watch);
        assert!(end(&watch, flush, 8));
    }

    #[test]
    fn an_export_in_memory_loses_even_flushed_writes() {
        let watch = CacheWatch::new(1, 7, true);
        assert_eq!(watch.observe(8, true), 0, "nothing was written");
        write(&watch, 0, 8);
        let flush = begin(&watch);
        assert!(!end(&watch, flush, 8));
        assert_eq!(watch.observe(9, true), 1);
        assert_eq!(watch.observe(10, true), 0, "nothing was written since");
    }

    #[test]
    fn a_server_without_an_epoch_reports_no_loss() {
        let watch = CacheWatch::new(1, 0, false);
        assert_eq!(watch.settled_epoch(), None);
        write(&watch, 0, 0);
        assert_eq!(watch.observe(8, false), 0, "an epoch is reported for the first time");
        let flush = begin(&watch);
        assert!(!end(&watch, flush, 0));
        assert_eq!(watch.observe(9, false), 0);
    }

    #[test]
    fn a_failed_request_may_have_consumed_the_error_of_others() {
        let watch = CacheWatch::new(1, 7, false);
        let (flush, fua) = (io(IoOp::Flush, false), io(IoOp::Write, true));
        let count = || watch.losses().count();
        watch.failed(&fua, IoStatus::Io);
        watch.failed(&io(IoOp::Write, false), IoStatus::Io);
        assert_eq!(count(), 0, "nothing to lose, nothing made durable");
        write(&watch, 0, 7);
        watch.failed(&fua, IoStatus::Io);
        watch.failed(&flush, IoStatus::NoSpace);
        assert_eq!(count(), 2);
        let mark = begin(&watch);
        assert!(end(&watch, mark, 7));
        let mark = begin(&watch);
        assert!(!end(&watch, mark, 7));
    }

    #[test]
    fn a_write_from_an_old_epoch_does_not_affect_parts_of_other_ios() {
        let watch = CacheWatch::new(1, 8, false);
        let (change, before) = (io(IoOp::Write, false), watch.count());
        assert!(watch.done(CORE, &change, FlushMark::default(), 7), "from an old epoch");
        assert!(!watch.done(CORE, &change, FlushMark::default(), 8));
        watch.ended_in_parts(&change, before);
        assert_eq!(watch.losses().count(), 1, "the answer from the old epoch");
        watch.failed(&io(IoOp::Flush, false), IoStatus::Io);
        watch.ended_in_parts(&change, before);
        assert_eq!(watch.losses().count(), 3, "the flush, and the part that it may have covered");
    }

    #[test]
    fn every_error_that_answers_a_flush_counts() {
        for status in IoStatus::ALL.into_iter().filter(|status| !status.is_ok()) {
            let watch = CacheWatch::new(1, 7, false);
            write(&watch, 0, 7);
            watch.failed(&io(IoOp::Write, true), status);
            assert_eq!(watch.losses().count(), u64::from(!status.is_refusal()), "FUA: {status}");
            let watch = CacheWatch::new(1, 7, false);
            watch.failed(&io(IoOp::Flush, false), status);
            assert_eq!(watch.losses().count(), 1, "flush: {status}");
        }
    }
}
