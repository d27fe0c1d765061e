//! Model of a backing file that is truncated while it is exported.
//!
//! All data beyond the cut is lost, including durable data: if the file is extended again, it holds
//! zeroes there, as if they had been written at the cut, instead of the old data. Until the file is
//! exported again, no IO beyond the cut that began after it succeeds; IO that overlaps that time
//! may fail. IO before the cut continues normally. However, a write with FUA beyond the cut is a
//! failed sync, which the server reports to every flush and write with FUA. Data beyond the cut
//! that had been acknowledged without a flush is not covered by flushes that begin afterwards: one
//! such flush has to fail first, unless the server ends before that.
//!
//! The disk fails one flush because of the cut. If the disk lacks FUA, that may be the flush that
//! follows a write with FUA; with PREFLUSH, the one before it. That write then fails at any offset,
//! and so do writes with FUA that are in flight at that time, since each failed sync makes the
//! server doubt them.

use std::collections::BTreeMap;

use rtrs_core::time::Instant;

use super::{Failure, Oracle};

/// Maximum number of consecutive flushes of a core that may fail because of one cut.
const REPORTS_MAX: u32 = 8;

/// Known facts about the end of the file.
#[derive(Debug, Default)]
pub(super) struct Length {
    short: Option<Short>,
    /// Write that represents the zeroes beyond the last truncation.
    zeroes: Option<u32>,
    /// End of the durable writes so far.
    durable_end: u32,
    /// Cores that received reports of failed durable writes after the file was exported again, and
    /// the time of the first report.
    reported: BTreeMap<usize, Instant>,
    /// Acknowledged but unflushed writes that were cut off, with no failed flush since.
    cut: Vec<u32>,
    /// For each core, the time at which a flush last failed, perhaps because of the cut, and the
    /// number of consecutive failures.
    cut_reported: BTreeMap<usize, (Instant, u32)>,
    /// Bounds on the time at which the disk's one flush failed for the cut, learned from writes
    /// with FUA: all that failed for it were in flight between these two times.
    failed_within: Option<(Instant, Instant)>,
}

/// File that is, or was, shorter than its export.
#[derive(Clone, Copy, Debug)]
struct Short {
    /// First sector that was cut off.
    from: u32,
    /// Time of the cut, in the order of submissions and completions.
    since: u64,
    /// Time at which the file was exported again at its old length, if it was.
    until: Option<Instant>,
}

impl Oracle {
    /// Records that the file now ends before this sector.
    pub(in super::super) fn truncated(&mut self, from: u32) -> Result<(), Failure> {
        let cut = (1u32..).zip(&self.writes[1..]).filter(|(_, write)| {
            write.is_acked() && !write.durable && write.sector + write.count > from
        });
        self.file.cut = cut.map(|(id, _)| id).collect();
        self.file.cut_reported.clear();
        self.file.failed_within = None;
        let zeroes = self.write(from, self.sectors.len() as u32 - from, true);
        self.write_acked(zeroes, false)?;
        self.file.zeroes = Some(zeroes);
        self.file.short = Some(Short { from, since: self.clock, until: None });
        Ok(())
    }

    /// Whether one of these writes is the cut, and the other was in flight at that time. A client
    /// repeats such a write over another path or on the next server, so it may have an effect both
    /// before and after the cut.
    pub(super) fn may_repeat_after_cut(&self, one: u32, other: u32) -> bool {
        let Some(cut) = self.file.zeroes else { return false };
        let at = self.writes[cut as usize].start;
        let in_flight = |id: u32| {
            let write = &self.writes[id as usize];
            write.start < at && at < write.finish
        };
        one == cut && in_flight(other) || other == cut && in_flight(one)
    }

    /// Records that the file is exported again, at its old length.
    pub(in super::super) fn regained(&mut self, now: Instant) {
        if let Some(short) = &mut self.file.short {
            short.until = Some(now);
        }
    }

    /// Records that a durable write has been submitted.
    pub(in super::super) fn durable_asked(&mut self, sector: u32, count: u32) {
        self.file.durable_end = self.file.durable_end.max(sector + count);
    }

    /// Records that a flush has failed, or that the server has ended and no longer knows of the
    /// cut.
    pub(in super::super) fn cut_is_reported(&mut self) {
        self.file.cut.clear();
    }

    /// Whether a flush, or a write with PREFLUSH, that a core submitted at `since` may have failed
    /// because the file was cut: the first one, concurrent ones, and some that the server may take
    /// for copies of these, or whose answers were lost with a path.
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
        self.file.short.is_some() && reported.1 <= REPORTS_MAX
    }

    /// Whether a write with FUA and without PREFLUSH that was submitted at `since` may have failed
    /// because it was in flight when the disk failed a flush for the cut. That happens once.
    pub(in super::super) fn may_fail_for_cut(&mut self, since: Instant, now: Instant) -> bool {
        let known = self.file.failed_within.unwrap_or((since, now));
        let (from, until) = (known.0.max(since), known.1.min(now));
        let may = self.file.short.is_some() && from <= until;
        if may {
            self.file.failed_within = Some((from, until));
        }
        may
    }

    /// Checks a successful flush that began at `start`.
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

    /// Whether a flush or durable write that a core submitted at `since` may have failed because a
    /// durable write beyond the end of the file failed. The server that exports the file again has
    /// a new epoch for such failures, which it may report to each core once more, in all requests
    /// that the core had in flight at that time.
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

    /// Whether IO submitted at `since` may have reached beyond the end of the file.
    pub(in super::super) fn may_be_beyond(&self, sector: u32, count: u32, since: Instant) -> bool {
        let meets = |short: Short| {
            sector + count > short.from && short.until.is_none_or(|until| since <= until)
        };
        count > 0 && self.file.short.is_some_and(meets)
    }

    /// Checks an acknowledged write.
    pub(super) fn judge_acked(&self, id: u32) -> Result<(), Failure> {
        let write = &self.writes[id as usize];
        self.judge_end(write.start, write.sector, write.count)
    }

    /// Checks successful IO that began at `start`.
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
