//! A backing file that is made shorter while it is exported.
//!
//! What was beyond the cut is gone, whoever was promised what: where the file gets its length back
//! it holds zeroes, as if they had been written at the cut, and nothing of before. Until it is
//! exported anew no IO beyond the cut succeeds that began after it; what overlaps that time may
//! fail. IO before the cut goes on as if nothing had happened; but a write with FUA beyond it is a
//! sync that fails, which the server tells every flush and write with FUA of. And what had been
//! acknowledged there without a flush is not flushed by any that begins afterwards: one has to fail
//! first, unless the server ends before.
//!
//! The disk fails one flush for the cut. Where it lacks FUA, that may be the flush which follows a
//! write with FUA; with PREFLUSH, the one before it. That write then fails wherever it is, and so
//! do writes with FUA that run at that moment, since each failed sync makes the server doubt them.

use std::collections::BTreeMap;

use rtrs_core::time::Instant;

use super::{Failure, Oracle};

/// How many flushes of a core may fail for one cut, one after the other.
const TELLINGS_MAX: u32 = 8;

/// What is known of the file's end.
#[derive(Debug, Default)]
pub(super) struct Length {
    short: Option<Short>,
    /// The end of the durable writes so far.
    durable_end: u32,
    /// Cores that have been told of durable writes that failed, after the file was exported anew,
    /// and when first.
    reported: BTreeMap<usize, Instant>,
    /// Writes that were acknowledged, not flushed, and cut off, and no flush has failed since.
    cut: Vec<u32>,
    /// When a flush of that core has last failed, for all one knows since the file was cut, and how
    /// many have done so one after the other.
    cut_reported: BTreeMap<usize, (Instant, u32)>,
    /// When the disk's one flush failed for the cut, for all one knows from writes with FUA: all
    /// of them that failed for it ran from the first moment to the second.
    failed_within: Option<(Instant, Instant)>,
}

/// A file that is, or was, shorter than its export.
#[derive(Clone, Copy, Debug)]
struct Short {
    /// Its first sector that is gone.
    from: u32,
    /// When that was, in the order of submissions and ends.
    since: u64,
    /// When it was exported anew in its old length, if that was so.
    until: Option<Instant>,
}

impl Oracle {
    /// The file ends before this sector from now on.
    pub(in super::super) fn truncated(&mut self, from: u32) -> Result<(), Failure> {
        let cut = (1u32..).zip(&self.writes[1..]).filter(|(_, write)| {
            write.is_acked() && !write.durable && write.sector + write.count > from
        });
        self.file.cut = cut.map(|(id, _)| id).collect();
        self.file.cut_reported.clear();
        self.file.failed_within = None;
        let zeroes = self.write(from, self.sectors.len() as u32 - from, true);
        self.write_acked(zeroes, false)?;
        self.file.short = Some(Short { from, since: self.clock, until: None });
        Ok(())
    }

    /// The file is exported anew, in its old length.
    pub(in super::super) fn regained(&mut self, now: Instant) {
        if let Some(short) = &mut self.file.short {
            short.until = Some(now);
        }
    }

    /// A durable write is asked for.
    pub(in super::super) fn durable_asked(&mut self, sector: u32, count: u32) {
        self.file.durable_end = self.file.durable_end.max(sector + count);
    }

    /// A flush has failed, or the server has ended and does not know of the cut any more.
    pub(in super::super) fn cut_is_reported(&mut self) {
        self.file.cut.clear();
    }

    /// True when a flush, or a write with PREFLUSH, of a core since that moment may have failed
    /// because the file was cut: the first one, those beside it, and some that the server may take
    /// for other copies of these, or whose answers went with a path.
    pub(in super::super) fn may_be_cut(
        &mut self,
        core: usize,
        since: Instant,
        now: Instant,
    ) -> bool {
        let reported = self.file.cut_reported.entry(core).or_insert((since, 0));
        if since > reported.0 || reported.1 == 0 {
            *reported = (now, reported.1 + 1);
        }
        self.file.short.is_some() && reported.1 <= TELLINGS_MAX
    }

    /// True when a write with FUA and without PREFLUSH, since that moment, may have failed because
    /// the disk failed a flush for the cut while it ran. That happens once.
    pub(in super::super) fn may_meet_cut(&mut self, since: Instant, now: Instant) -> bool {
        let known = self.file.failed_within.unwrap_or((since, now));
        let (from, until) = (known.0.max(since), known.1.min(now));
        let may = self.file.short.is_some() && from <= until;
        if may {
            self.file.failed_within = Some((from, until));
        }
        may
    }

    /// A flush that began at `start` has succeeded.
    pub(super) fn judge_cut(&self, start: u64) -> Result<(), Failure> {
        let Some(short) = self.file.short.filter(|short| short.since < start) else {
            return Ok(());
        };
        let Some(id) = self.file.cut.iter().find(|id| self.writes[**id as usize].finish < start)
        else {
            return Ok(());
        };
        let text = format!(
            "a flush was acknowledged, and none has failed, after the backing file was cut at \
             sector {} and with it write {id}, acknowledged before the flush began",
            short.from
        );
        Err(Failure::new("durable", text))
    }

    /// True when a flush or durable write of a core since that moment may have failed because a
    /// durable write beyond the end of the file did. The server that exports the file anew has
    /// another epoch for that, which each core may be told of once more, by all that it had in
    /// flight then.
    pub(in super::super) fn may_be_reported(
        &mut self,
        core: usize,
        since: Instant,
        now: Instant,
    ) -> bool {
        if self.may_be_beyond(0, self.file.durable_end, since) {
            return true;
        }
        let is_over = self.file.short.is_some_and(|short| short.until.is_some());
        let durable = self.file.short.is_some_and(|short| self.file.durable_end > short.from);
        let reported = *self.file.reported.entry(core).or_insert(now);
        is_over && durable && since <= reported
    }

    /// True for IO since that moment which may have met the end of the file.
    pub(in super::super) fn may_be_beyond(&self, sector: u32, count: u32, since: Instant) -> bool {
        let meets = |short: Short| {
            sector + count > short.from && short.until.is_none_or(|until| since <= until)
        };
        count > 0 && self.file.short.is_some_and(meets)
    }

    /// A write was acknowledged.
    pub(super) fn judge_acked(&self, id: u32) -> Result<(), Failure> {
        let write = &self.writes[id as usize];
        self.judge_end(write.start, write.sector, write.count)
    }

    /// IO that began at `start` has succeeded.
    pub(super) fn judge_end(&self, start: u64, sector: u32, count: u32) -> Result<(), Failure> {
        let Some(short) = self.file.short else { return Ok(()) };
        if short.until.is_some() || start <= short.since || sector + count <= short.from {
            return Ok(());
        }
        let text = format!(
            "IO of sectors {sector}+{count} succeeded although the backing file has ended before \
             sector {} since before it began",
            short.from
        );
        Err(Failure::new("blocks", text))
    }
}
