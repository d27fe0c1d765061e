//! What a server may have lost of acknowledged writes, and who is reported.
//!
//! A write that was acknowledged and not flushed may lie in a cache of the server. When the
//! server's host starts anew (or, for an export in memory, its process does) it is gone, and we do
//! not have its data any more. A flush that then succeeded would tell a file system that it is
//! durable. So OPEN_RSP says which epoch of the cache the server is in (`cache_id`), each answer
//! counts for the epoch its path was opened in, and when the epoch changes while such writes are
//! outstanding, that is a loss: each user of the device hears of it once, by a flush that fails,
//! as by a disk that lost its write cache (`rtrs_core::losses`). So is a flush that the server
//! fails, and a write with FUA while other writes wait for a flush: the server's device has one
//! cache, and it reports what it lost to one request.
//!
//! Shards count their own writes; the control shard (`control/cache_epoch.rs`) sees the epochs
//! change. Neither waits for the other: a shard adds to its count before it looks at the epoch, the
//! control shard changes the epoch before it adds the counts up, so one of the two sees the other.
//!
//! A process that dies takes its counts with it, and its users may go on with the next one. So the
//! process saves the epoch it is in where the next one finds it (`saved_epoch`), and that one
//! begins in this epoch, with a write that nobody has flushed. An epoch is saved when there is
//! nothing to report of the ones before. A flush that the dead process had taken comes again, and
//! looks like one that began after another had failed; so a loss is reported by every flush for as
//! long as such a flush can come (`SessionConfig::resent_for`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rtrs_core::block::{Io, IoOp};
use rtrs_core::ids::CoreIndex;
use rtrs_core::losses::Losses;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;

/// A count of one shard, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Count(AtomicU64);

/// What a flush covers and knew when it was submitted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FlushMark {
    /// Writes acknowledged before it was sent.
    covers: u64,
    /// Losses that had been reported, where the session reports its user.
    reported: u64,
}

/// The state of the server's cache as all shards see it.
#[derive(Debug)]
pub(crate) struct CacheWatch {
    /// Writes acknowledged that only a flush makes durable, by shard; of a medium that ends with
    /// its server all that were acknowledged. These only grow.
    acked: Box<[Count]>,
    /// So many of them a flush has covered.
    flushed: AtomicU64,
    /// So many there were at the last loss.
    since: AtomicU64,
    /// The epoch that the server is in.
    epoch: AtomicU64,
    /// Its content ends with its epoch, flushed or not.
    volatile: AtomicBool,
    /// A flush submitted before this may be one that an earlier process had taken.
    resent_until: Option<Instant>,
    losses: Arc<Losses>,
}

impl CacheWatch {
    pub(crate) fn new(shards: u16, epoch: u64, volatile: bool) -> Self {
        Self {
            acked: (0..shards).map(|_| Count::default()).collect(),
            flushed: AtomicU64::new(0),
            since: AtomicU64::new(0),
            epoch: AtomicU64::new(epoch),
            volatile: AtomicBool::new(volatile),
            resent_until: None,
            losses: Arc::default(),
        }
    }

    /// Somebody before may have had a write acknowledged that nobody has flushed, and what that one
    /// had not answered comes again until then.
    pub(super) fn inherit(&mut self, resent_until: Instant) {
        self.resent_until = Some(resent_until);
        if let Some(count) = self.acked.first() {
            count.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The epoch that the server is in, unless there is a loss to be reported.
    pub(super) fn settled_epoch(&self) -> Option<u64> {
        let reported = self.losses.all_reported() || rtrs_core::mutated!(KeptLifeEarly);
        reported.then(|| self.epoch()).filter(|epoch| *epoch != 0)
    }

    /// Its content ends with its epoch, flushed or not.
    pub(super) fn is_volatile(&self) -> bool {
        self.volatile.load(Ordering::SeqCst)
    }

    fn all_acked(&self) -> u64 {
        self.acked.iter().map(|count| count.0.load(Ordering::SeqCst)).sum()
    }

    /// A flush is submitted.
    pub(super) fn submitted(&self, mark: &mut FlushMark, now: Instant) {
        // It may have begun before anything was reported.
        mark.reported = if self.is_resending(now) { 0 } else { self.losses.common() };
    }

    pub(super) fn is_resending(&self, now: Instant) -> bool {
        self.resent_until.is_some_and(|until| now < until)
    }

    /// A flush is about to be sent.
    pub(super) fn sent(&self, mark: &mut FlushMark) {
        mark.covers = self.all_acked();
    }

    /// The server did a request, over a path opened in this epoch of its cache; 0: nobody knows.
    /// True when that epoch is over, so that what it wrote may be lost.
    pub(super) fn done(&self, shard: CoreIndex, io: &Io, mark: FlushMark, epoch: u64) -> bool {
        let current = || self.epoch.load(Ordering::SeqCst) == epoch;
        let is_current = || epoch == 0 || rtrs_core::mutated!(OldLifeAnswer) || current();
        match io.op {
            IoOp::Read | IoOp::Extents => {}
            IoOp::Discard | IoOp::WriteZeroes if rtrs_core::mutated!(ZeroesUnwatched) => {}
            IoOp::Flush => {
                if is_current() {
                    let later = rtrs_core::mutated!(FlushCoversLater).then(|| self.all_acked());
                    self.flushed.fetch_max(later.unwrap_or(mark.covers), Ordering::SeqCst);
                }
            }
            // On a medium that ends with its server even these are lost.
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

    /// Records a request that the server answered with an error. The server's device may have
    /// reported to this request what it lost of others' data, whatever the status is. Statuses that
    /// this session made itself, for requests without an answer, do not belong here: the server
    /// reports a loss again when its answer did not arrive.
    pub(super) fn failed(&self, io: &Io, answer: IoStatus) {
        let by_kind = rtrs_core::mutated!(FlushErrorByKind)
            && matches!(answer, IoStatus::Aborted | IoStatus::TimedOut | IoStatus::ReadOnly);
        let unflushed = || self.all_acked() > self.flushed.load(Ordering::SeqCst);
        let durable_write = || io.flags.fua && !answer.is_refusal() && unflushed();
        if !by_kind && (io.op == IoOp::Flush || durable_write()) {
            self.losses.add_shared();
        }
    }

    /// Losses so far that may have taken any write. One whose answer came out of an epoch that was
    /// over is lost by itself.
    pub(super) fn count(&self) -> u64 {
        self.losses.shared()
    }

    /// An IO has ended well whose first part was done when there were `before` losses. One since
    /// may have taken that part, and be reported already: flushes of the whole IO report it again.
    pub(super) fn ended_in_parts(&self, io: &Io, before: u64) {
        let changes = matches!(io.op, IoOp::Write | IoOp::Discard | IoOp::WriteZeroes);
        let is_safe = io.flags.fua && !self.is_volatile();
        let is_due = self.count() != before && !rtrs_core::mutated!(PartLossForgotten);
        if changes && !is_safe && is_due {
            self.losses.add();
        }
    }

    /// How a flush ends for the session's only user.
    pub(super) fn report(&self, mark: FlushMark, status: IoStatus) -> IoStatus {
        let (status, reported) = self.losses.judge(status, mark.reported);
        self.losses.report_common(reported);
        status
    }

    /// For who reports the users instead.
    pub(super) fn losses(&self) -> Arc<Losses> {
        Arc::clone(&self.losses)
    }

    /// The server is in this epoch. Returns how many writes it may have lost.
    pub(super) fn meet(&self, epoch: u64, volatile: bool) -> u64 {
        let before = self.epoch.swap(epoch, Ordering::SeqCst);
        let volatile = self.volatile.swap(volatile, Ordering::SeqCst);
        // A server that is newer than the last one says it for the first time.
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

    /// The device was made smaller, perhaps while nobody looked: what was not flushed may have been
    /// beyond its end. Returns how many writes it may have lost.
    pub(super) fn cut(&self) -> u64 {
        let lost = self.all_acked().saturating_sub(self.flushed.load(Ordering::SeqCst));
        if lost > 0 {
            self.losses.add_shared();
        }
        lost
    }

    /// The epoch that the server is in.
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
        watch.report(mark, IoStatus::Ok) == IoStatus::Io
    }

    #[test]
    fn what_a_process_that_died_left_counts_until_a_flush() {
        let mut watch = CacheWatch::new(1, 7, false);
        watch.inherit(Instant::ZERO);
        assert_eq!(watch.settled_epoch(), Some(7));
        assert_eq!(watch.meet(8, false), 1);
        assert_eq!(watch.settled_epoch(), None, "it has to be reported");
        let mark = begin(&watch);
        assert!(end(&watch, mark, 8), "reported by a flush that fails");
        assert_eq!(watch.settled_epoch(), Some(8));
        let mut watch = CacheWatch::new(1, 7, false);
        watch.inherit(Instant::ZERO);
        let mark = begin(&watch);
        assert!(!end(&watch, mark, 7), "flushed");
        assert_eq!(watch.meet(8, false), 0);
    }

    #[test]
    fn a_cut_is_a_loss_where_something_was_not_flushed() {
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
    fn only_what_was_not_flushed_is_lost() {
        let watch = CacheWatch::new(2, 7, false);
        assert_eq!(watch.meet(8, false), 0, "nothing was written");
        write(&watch, 1, 8);
        watch.done(CORE, &io(IoOp::Write, true), FlushMark::default(), 8);
        watch.done(CORE, &io(IoOp::Read, false), FlushMark::default(), 8);
        let flush = begin(&watch);
        assert!(!end(&watch, flush, 8));
        assert_eq!(watch.meet(9, false), 0, "all was flushed");
        for op in [IoOp::Write, IoOp::Discard, IoOp::WriteZeroes] {
            watch.done(CORE, &io(op, false), FlushMark::default(), 9);
        }
        let flush = begin(&watch);
        write(&watch, 1, 9);
        assert!(!end(&watch, flush, 9));
        assert_eq!(watch.meet(9, false), 0, "the same epoch");
        assert_eq!(watch.meet(10, false), 1, "the one after the flush began");
        assert_eq!(watch.meet(11, false), 0, "not twice");
    }

    #[test]
    fn a_loss_is_reported_by_all_flushes_that_could_hide_it_and_no_other() {
        let watch = CacheWatch::new(2, 7, false);
        write(&watch, 0, 7);
        let (before, beside) = (begin(&watch), begin(&watch));
        assert_eq!(watch.meet(8, false), 1);
        let after = begin(&watch);
        assert!(end(&watch, before, 8) && end(&watch, after, 8) && end(&watch, beside, 8));
        let later = begin(&watch);
        assert!(!end(&watch, later, 8));
    }

    #[test]
    fn an_answer_of_the_epoch_before_is_a_loss_too() {
        let watch = CacheWatch::new(2, 7, false);
        let flush = begin(&watch);
        assert_eq!(watch.meet(8, false), 0);
        write(&watch, 1, 7);
        assert!(end(&watch, flush, 7));
        // Of that flush nothing counts: it was another cache.
        write(&watch, 1, 8);
        let mark = begin(&watch);
        watch.done(CORE, &io(IoOp::Flush, false), mark, 7);
        assert_eq!(watch.meet(9, false), 2);
    }

    #[test]
    fn of_memory_durable_writes_are_lost_as_well() {
        let watch = CacheWatch::new(1, 7, true);
        watch.done(CORE, &io(IoOp::Write, true), FlushMark::default(), 7);
        assert_eq!(watch.meet(8, true), 1);
        let flush = begin(&watch);
        assert!(end(&watch, flush, 8));
    }

    #[test]
    fn of_memory_flushed_writes_are_lost_as_well() {
        let watch = CacheWatch::new(1, 7, true);
        assert_eq!(watch.meet(8, true), 0, "there was nothing");
        write(&watch, 0, 8);
        let flush = begin(&watch);
        assert!(!end(&watch, flush, 8));
        assert_eq!(watch.meet(9, true), 1);
        assert_eq!(watch.meet(10, true), 0, "there was nothing since");
    }

    #[test]
    fn a_server_that_says_nothing_is_not_judged() {
        let watch = CacheWatch::new(1, 0, false);
        assert_eq!(watch.settled_epoch(), None);
        write(&watch, 0, 0);
        assert_eq!(watch.meet(8, false), 0, "it says so now, and did not before");
        let flush = begin(&watch);
        assert!(!end(&watch, flush, 0));
        assert_eq!(watch.meet(9, false), 0);
    }

    #[test]
    fn a_request_that_the_device_failed_may_have_taken_the_error_of_others() {
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
    fn a_write_that_is_lost_by_itself_says_nothing_of_parts_of_others() {
        let watch = CacheWatch::new(1, 8, false);
        let (change, before) = (io(IoOp::Write, false), watch.count());
        assert!(watch.done(CORE, &change, FlushMark::default(), 7), "out of an epoch that is over");
        assert!(!watch.done(CORE, &change, FlushMark::default(), 8));
        watch.ended_in_parts(&change, before);
        assert_eq!(watch.losses().count(), 1, "the answer out of the old epoch");
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
